"""Convolutions with stored kernels where XLA splits them over devices: what is moved are codes."""

import dataclasses
from typing import Any

import jax

from haiku_implicit.products.by_parts import by_parts, is_wanted
from haiku_implicit.products.partitioned import Axes, Parts


def convolve(x: jax.Array, w: Any, params: dict[str, Any], *factors: jax.Array) -> Any:
    """`conv_general_dilated`, split over devices by the batch, the input and the output channels.

    Args:
      x: the images.
      w: the kernel; implicit, or what stands for a field that may be.
      params: of the primitive.
      *factors: none, or `a` and `b` of a correction `a @ b` of the kernel's last two axes.

    Returns:
      The convolution; NotImplemented where XLA splits nothing, and with groups of the batch.
    """
    if params["batch_group_count"] != 1 or not is_wanted(x, w, *factors):
        return NotImplemented
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    inputs, outputs = ("inputs", "outputs") if groups == 1 else ("channels", "channels")

    def named(spec: tuple[int, ...], first: str, second: str | None) -> tuple[str | None, ...]:
        at = {spec[0]: first, spec[1]: second}
        return tuple(at.get(i) for i in range(len(spec)))

    of_w = named(numbers.rhs_spec, outputs, inputs if groups == 1 else None)
    of_factors = [(*of_w[:-1], None), (*of_w[:-2], None, of_w[-1])][: len(factors)]
    axes = Axes(
        (named(numbers.lhs_spec, "batch", inputs), of_w, *of_factors),
        named(numbers.out_spec, "batch", outputs),
        (("channels", groups),) if groups > 1 else (),
    )
    return by_parts(_Convolution(tuple(params.items())), axes, x, w, *factors)


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """The convolution of dense arrays.

    Attributes:
      params: of the primitive, as pairs.
    """

    params: tuple[tuple[str, Any], ...]

    def __call__(self, x: jax.Array, w: jax.Array, *factors: jax.Array, parts: Parts) -> jax.Array:
        params = dict(self.params)
        params["feature_group_count"] //= parts.count("channels")
        if factors:
            a, b = factors
            w = w + (a @ b).astype(w.dtype)
        out: jax.Array = jax.lax.conv_general_dilated_p.bind(x, w, **params)
        return out
