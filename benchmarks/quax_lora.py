"""LoRA types for quax 0.4.6.

quax ships a type as an example (`quax.examples.lora`), which moves axes around each product and stops
the gradient of `w` at each use. `Lora` does no more than LoRA by hand, so that the comparison is
between the machineries.
"""

from typing import Any

import equinox as eqx
import jax
import quax
from quax.examples import lora


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
    """Computes `x · (w + ab)` as `x · w + (x · a) · b`."""
    (contract, w_contract), batch = dimension_numbers
    if w_contract != (0,) or batch != ((), ()):
        raise NotImplementedError(f"dimension numbers {dimension_numbers}")
    free = ((), ())
    base = jax.lax.dot_general(x, w.w, dimension_numbers, **params)
    low = jax.lax.dot_general(x, w.a, ((contract, (0,)), free), **params) * w.scale
    return base + jax.lax.dot_general(low, w.b, (((low.ndim - 1,), (0,)), free), **params)


def shipped(w: jax.Array, a: jax.Array, b: jax.Array) -> lora.LoraArray:
    """Returns quax's own type with given factors; its constructor makes its own."""
    array = lora.LoraArray(jax.numpy.zeros((1, 1)), rank=1, key=jax.random.key(0))
    return eqx.tree_at(lambda x: (x._w, x.a, x.b), array, (w, a, b))
