"""A table of the parameters of a model: what each is, and how much memory it takes."""

import math
from typing import Any

from haiku_implicit.core.array import flatten_one_level, is_implicit
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.params import trees

_HEADER = ("path", "type", "shape", "dtype", "bytes", "of dense bytes")
_NUMBERS = 2  # the last columns, which are set to the right


def summary(params: Any) -> str:
    """A table of parameters: which are implicit, of what type, and how much memory each takes.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings; also the
        `jax.ShapeDtypeStruct`s of them that `jax.eval_shape` returns.

    Returns:
      A line for each parameter, in the order of the tree, and a total: the path (`module/name`), the
      type ('dense', or that of the implicit array, and of the one in it; of a quantized one its format,
      as in 'int4/32' for groups of 32, and what it rounds activations to), shape, dtype, the bytes
      that it takes, and those that the dense array would take.

    Raises:
      TypeError: for anything but a mapping.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'b': jnp.zeros(64), 'w': jnp.ones((128, 64))}}
      >>> print(hki.summary(hki.quantize_params(params)))
      path      type                  shape     dtype    bytes  of dense bytes
      linear/b  dense                 [64]      float32    256             256
      linear/w  QuantizedMatrix int8  [128,64]  float32  8,448          32,768
      total                                              8,704          33,024
    """
    rows: list[tuple[str, ...]] = []
    held = dense = 0
    for parameter in trees.parameters_of(params):
        value = parameter.value
        size = math.prod(value.shape) * value.dtype.itemsize
        own = value.nbytes if is_implicit(value) else size
        shape = f"[{','.join(map(str, value.shape))}]"
        rows.append(
            (parameter.path, _kind(value), shape, value.dtype.name, f"{own:,}", f"{size:,}")
        )
        held, dense = held + own, dense + size
    rows = [_HEADER, *rows, ("total", "", "", "", f"{held:,}", f"{dense:,}")]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _kind(value: Any) -> str:
    """'LoRA of QuantizedMatrix': the types of an array and of those that it is made around."""
    if not is_implicit(value):
        return "dense"
    if isinstance(value, QuantizedMatrix):
        groups = f"/{value.group_size}" if value.num_groups > 1 else ""
        activation = f" × {value.activation}" if value.activation else ""
        return f"{type(value).__name__} {value.format}{groups}{activation}"
    inner = next(iter(flatten_one_level(value)[0]), None)
    of = f" of {_kind(inner)}" if is_implicit(inner) else ""
    return type(value).__name__ + of


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    left = len(row) - _NUMBERS
    cells = zip(row, widths, strict=True)
    return "  ".join(f"{x:<{n}}" if i < left else f"{x:>{n}}" for i, (x, n) in enumerate(cells))
