"""A LoRA type for quax 0.4.6.

quax ships one as an example (`quax.examples.lora`), which moves axes around each product and stops
the gradient of `w` at each use. This one does no more than the library's own rule does, so that what
is compared is the machinery.
"""

from typing import Any

import equinox as eqx
import jax
import quax


class Lora(quax.ArrayValue):
    """The weight `w + scale * a @ b`."""

    w: jax.Array
    a: jax.Array
    b: jax.Array
    scale: float = eqx.field(static=True)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.w.shape, self.w.dtype)

    def materialise(self) -> jax.Array:
        raise NotImplementedError("a LoRA weight was used in something other than a product")


@quax.register(jax.lax.dot_general_p)
def dot_general(x: jax.Array, w: Lora, *, dimension_numbers: Any, **params: Any) -> jax.Array:
    """`x · (w + ab)` as `x · w + (x · a) · b`."""
    (contract, w_contract), batch = dimension_numbers
    if w_contract != (0,) or batch != ((), ()):
        raise NotImplementedError(f"dimension numbers {dimension_numbers}")
    free = ((), ())
    base = jax.lax.dot_general(x, w.w, dimension_numbers, **params)
    low = jax.lax.dot_general(x, w.a, ((contract, (0,)), free), **params) * w.scale
    return base + jax.lax.dot_general(low, w.b, (((low.ndim - 1,), (0,)), free), **params)
