"""Convolutions with stored kernels that XLA splits over devices: codes move, not dense values."""

import jax

from haiku_implicit.core.typing import Array, EqnParam, EqnParams, Result
from haiku_implicit.quantized.products.by_parts import Fixed, by_parts, is_wanted
from haiku_implicit.quantized.products.partitioned import Axes, Names, Parts


def convolve(x: jax.Array, w: Array, params: EqnParams, *factors: jax.Array) -> Result:
    """`conv_general_dilated`, split over devices by the batch, the input and the output channels.

    Args:
      x: the images.
      w: the kernel; implicit, or the placeholder of a field that may be.
      params: the parameters of the primitive.
      *factors: none, or `a` and `b` of a correction `a @ b` of the kernel's last two axes.

    Returns:
      The convolution; NotImplemented if XLA does not split the program.
    """
    if not is_wanted(x, w, *factors):
        return NotImplemented
    numbers = params["dimension_numbers"]
    groups = max(params["feature_group_count"], params["batch_group_count"])  # one of them is 1

    def named(spec: tuple[int, ...], pair: Names) -> Names:
        at = dict(zip(spec, pair, strict=False))
        return tuple(at.get(i) for i in range(len(spec)))

    # First the names of the batch or the outputs, then those for the inputs or the result's channels.
    of_x: Names = ("batch", "inputs")
    of_w: Names = ("outputs", "inputs")
    of_out: Names = ("batch", "outputs")
    if params["feature_group_count"] > 1:
        of_x, of_w, of_out = ("batch", "channels"), ("channels", None), ("batch", "channels")
    elif groups > 1:
        of_x, of_w, of_out = ("channels", "inputs"), ("channels", "inputs"), (None, "channels")
    kernel = named(numbers.rhs_spec, of_w)
    of_factors = [(*kernel[:-1], None), (*kernel[:-2], None, kernel[-1])][: len(factors)]
    axes = Axes(
        (named(numbers.lhs_spec, of_x), kernel, *of_factors),
        named(numbers.out_spec, of_out),
        (("channels", groups),) if groups > 1 else (),
    )
    return by_parts(Fixed(_convolution, (tuple(params.items()),)), axes, x, w, *factors)


def _convolution(
    pairs: EqnParam, x: jax.Array, w: jax.Array, *factors: jax.Array, parts: Parts
) -> jax.Array:
    """Convolves dense arrays; `pairs` are the parameters of the primitive."""
    params = dict(pairs)
    for groups in ("feature_group_count", "batch_group_count"):
        if params[groups] > 1:
            params[groups] //= parts.count("channels")
    if factors:
        a, b = factors
        w = w + (a @ b).astype(w.dtype)
    return jax.lax.conv_general_dilated_p.bind(x, w, **params)
