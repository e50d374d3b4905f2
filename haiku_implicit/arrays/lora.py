"""`LoRA`: a weight plus a low-rank correction (Hu et al. 2021, arXiv:2106.09685)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit._array import ArrayValue, ImplicitArray, aux_field, frozen_field
from haiku_implicit._dispatch import primitive_handler


@dataclasses.dataclass
class LoRA(ImplicitArray, core_ndim=2):
    """The weight `w + (alpha / rank) * a @ b`, of which `a` and `b` are trained and `w` is frozen.

    Attributes:
      w: `[..., n, m]`, the frozen weight; itself implicit where it is quantized, say.
      a: `[..., n, r]`, and
      b: `[..., r, m]`: the factors of the correction, of rank `r`.
      alpha: the numerator of the correction's scale `alpha / r`; None for a scale of 1.

    Raises:
      ValueError: where the shapes do not fit together.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.zeros((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)), alpha=2.0)
      >>> print(hki.materialize(w))
      [[2. 2. 2.]
       [2. 2. 2.]]
    """

    w: ArrayValue = frozen_field()
    a: ArrayValue
    b: ArrayValue
    alpha: float | None = aux_field(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        w, a, b = np.shape(self.w), np.shape(self.a), np.shape(self.b)
        if len(w) < 2 or w[:-1] != a[:-1] or w[:-2] + a[-1:] + w[-1:] != b:
            raise ValueError(
                f"LoRA: expected w [..., n, m], a [..., n, r] and b [..., r, m] with the same leading "
                f"axes, got w {list(w)}, a {list(a)}, b {list(b)}"
            )

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.w))

    def compute_dtype(self) -> Any:
        return self.w.dtype

    @property
    def rank(self) -> int:
        """The rank `r` of the correction."""
        return self.a.shape[-1]

    @property
    def scale(self) -> float:
        """The factor `alpha / rank` of the correction."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def delta(self) -> jax.Array:
        """The dense correction `scale * a @ b`."""
        return (self.a * self.scale) @ self.b

    def materialize(self) -> jax.Array:
        return self.w + self.delta().astype(self.w.dtype)


def _dot_by_factors(x: Any, w: LoRA, x_contracts: Any, n_contracts: bool, params: Any) -> Any:
    """`x @ a @ b` for one contracted axis, everything else free: two dots through the rank."""
    first, second = (w.a, w.b) if n_contracts else (w.b, w.a)
    free = ((), ())
    n_axis = 0 if n_contracts else 1
    t = jax.lax.dot_general(x, first, ((x_contracts, (n_axis,)), free), **params)
    return jax.lax.dot_general(
        t * w.scale, second, (((t.ndim - 1,), (n_axis,)), free), **params
    )


@primitive_handler("dot_general")
def dot_general_rhs(
    primitive: Any, x: ArrayValue, w: LoRA, *, dimension_numbers: Any, **params: Any
) -> Any:
    """`x · (w + ab)` as `x · w + (x · a) · b`."""
    (x_contract, w_contract), (_, w_batch) = dimension_numbers
    if w.ndim != 2 or len(w_contract) != 1 or w_batch:
        return NotImplemented
    dense = primitive.bind(x, w.w, dimension_numbers=dimension_numbers, **params)
    low = _dot_by_factors(x, w, x_contract, w_contract == (0,), params)
    return dense + low
