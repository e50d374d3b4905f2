"""Tables of the parameters of a model: types, memory, and differences between two trees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import progress
from haiku_implicit.core.array import check_values, flatten_one_level, is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import check_function, text_table, type_error, value_error
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.typing import Array, JsonObject, Params, Tree
from haiku_implicit.params.adapters.parts import check_whole
from haiku_implicit.params.haiku.frozen import Frozen
from haiku_implicit.params.trees import trees
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.types.trellis import TrellisMatrix
from haiku_implicit.training.gradients import Slot, slots_of, trained


class SummaryRow(NamedTuple):
    """One parameter, or all parameters of a module.

    Attributes:
      path: `module/name`, or the module's name.
      kind: 'dense', or the type of the implicit array and of the array in it; for several parameters,
        each kind once.
      shape: the shape of the dense array; None for several parameters.
      dtype: the dtype of the dense array; None for several parameters that differ.
      size: the number of elements of the dense array.
      trained: how many of the parameter's numbers are trained.
      nbytes: the bytes of the array.
      dense_nbytes: the bytes of the dense array.
    """

    path: str
    kind: str
    shape: tuple[int, ...] | None
    dtype: str | None
    size: int
    trained: int
    nbytes: int
    dense_nbytes: int

    @property
    def bits(self) -> float:
        """Bits per element of the dense array; 0 if it is empty."""
        return 8 * self.nbytes / self.size if self.size else 0.0


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of `summary`; `print` shows a table.

    Attributes:
      rows: in the order of the tree.
      total: all rows together.
    """

    rows: tuple[SummaryRow, ...]
    total: SummaryRow

    def __str__(self) -> str:
        names = ("path", "type", "shape", "dtype", "trained", "bytes", "of dense bytes", "bits")
        lines = [self._cells(row) for row in (*self.rows, self.total)]
        return text_table(names, lines, numbers=4)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the rows as JSON values."""
        return [{**row._asdict(), "bits": row.bits} for row in self.rows]

    @staticmethod
    def _cells(row: SummaryRow) -> tuple[str, ...]:
        shape = "" if row.shape is None else f"[{','.join(map(str, row.shape))}]"
        counts = (f"{n:,}" for n in (row.trained, row.nbytes, row.dense_nbytes))
        return (row.path, row.kind, shape, row.dtype or "", *counts, f"{row.bits:.2f}")


def summary(
    params: Params | Frozen, *, depth: int | None = None, trainable_dense: Targets = True
) -> Summary:
    """A table of parameters: which are implicit, of what type, and how much memory each takes.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings; also the
        `jax.ShapeDtypeStruct`s of them that `jax.eval_shape` returns. Or a model from `freeze`, which
        knows what it trains.
      depth: None for a row for each parameter; otherwise a row for each module. A depth of 1 or more
        groups modules by the first names of their paths: with 2, `model/layer_1/mlp/linear` counts for
        `model/layer_1`. A depth below zero groups them by the last names: with -1, the row `linear`
        counts the layers' modules of that name together. Parameters outside of modules are the row
        `~`, as Haiku calls them.
      trainable_dense: the dense parameters that count as trained, as for `partition`; not used for a
        model from `freeze`.

    Returns:
      The rows and their total: the path (`module/name`), the type ('dense', or the type of the implicit
      array, and of the array in it; for a quantized array also its format, 'trellis3', or 'int4/32' for
      groups of 32, and the format of activations), shape, dtype, the count of trained numbers, the
      bytes that the array takes, the bytes of the dense array, and bits per number.

    Raises:
      TypeError: for anything but a mapping.
      ValueError: for a depth of 0.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'b': jnp.zeros(64), 'w': jnp.ones((128, 64))}}
      >>> print(hki.summary(hki.quantize_params(params)))
      path      type                  shape     dtype    trained  bytes  of dense bytes   bits
      linear/b  dense                 [64]      float32       64    256             256  32.00
      linear/w  QuantizedMatrix int8  [128,64]  float32        0  8,448          32,768   8.25
      total                                                   64  8,704          33,024   8.43
    """
    if depth == 0:
        raise value_error("depth: expected None, 1 and more, or -1 and less, got 0")

    def is_trained(slots: Sequence[Slot]) -> Sequence[bool]:
        return trained(slots, trainable_dense)

    if isinstance(params, Frozen):
        params, flags = params.shapes()
        known = dict(zip((slot.path for slot in slots_of(params)), flags, strict=True))

        def is_trained(slots: Sequence[Slot]) -> Sequence[bool]:
            return [known[slot.path] for slot in slots]

    parameters = trees.parameters_of(params)
    counts = _trained_counts(parameters, is_trained)
    rows = [_row_of(p, count) for p, count in zip(parameters, counts, strict=True)]
    if depth is not None:
        rows = _by_module(rows, depth)
    return Summary(tuple(rows), _joined("total", rows)._replace(kind="", dtype=None))


def _trained_counts(
    parameters: Sequence[trees.Parameter], is_trained: Callable[[Sequence[Slot]], Sequence[bool]]
) -> list[int]:
    """The count of trained numbers in each parameter."""
    own = [slots_of({p.module_name: {p.name: p.value}}) for p in parameters]
    flags = iter(is_trained([slot for slots in own for slot in slots]))
    return [sum(math.prod(np.shape(s.value)) for s in slots if next(flags)) for slots in own]


def _row_of(parameter: trees.Parameter, count: int) -> SummaryRow:
    value = parameter.value
    size = math.prod(value.shape)
    dense = size * value.dtype.itemsize
    held = value.nbytes if is_implicit(value) else dense
    dtype = value.dtype.name
    return SummaryRow(parameter.path, _kind(value), value.shape, dtype, size, count, held, dense)


def _by_module(rows: Sequence[SummaryRow], depth: int) -> list[SummaryRow]:
    groups: dict[str, list[SummaryRow]] = {}
    for row in rows:
        module = [part for part in row.path.split("/")[:-1] if part != "~"]
        own = module[:depth] if depth > 0 else module[depth:]
        groups.setdefault("/".join(own) or "~", []).append(row)
    return [_joined(name, own) for name, own in groups.items()]


def _joined(path: str, rows: Sequence[SummaryRow]) -> SummaryRow:
    kinds = ", ".join(dict.fromkeys(row.kind for row in rows))
    dtypes = {row.dtype for row in rows}
    sums = (sum(counts) for counts in zip(*(row[4:] for row in rows), strict=True))
    counts = tuple(sums) or (0, 0, 0, 0)
    return SummaryRow(path, kinds, None, dtypes.pop() if len(dtypes) == 1 else None, *counts)


def _kind(value: Array) -> str:
    """The type of an array and of the arrays in it, as in 'LoRA of QuantizedMatrix'."""
    if not is_implicit(value):
        return "dense"
    if isinstance(value, QuantizedMatrix | TrellisMatrix):
        groups = ""
        if isinstance(value, QuantizedMatrix) and value.num_groups > 1:
            groups = f"/{value.group_size}"
        activation = f" × {value.activation}" if value.activation else ""
        return f"{type(value).__name__} {value.format}{groups}{activation}"
    inner = next(iter(flatten_one_level(value)[0]), None)
    of = f" of {_kind(inner)}" if is_implicit(inner) else ""
    return type(value).__name__ + of


# --- two trees -----------------------------------------------------------------------------------


class ParameterError(NamedTuple):
    """The differences between two values of a parameter.

    Attributes:
      path: `module/name`.
      kinds: the kinds of the two, as in `SummaryRow`.
      relative: the root of the mean square of the difference, over the root of the mean square of the
        first value; infinite if only the latter is zero.
      largest: the largest magnitude of the difference; NaN if one of the differences is NaN.
    """

    path: str
    kinds: tuple[str, str]
    relative: float
    largest: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare_params`; `print` shows a table.

    Attributes:
      rows: in the order of the tree.
      only_first, only_second: paths of parameters that only one of the trees has.
      outputs: the relative error of the model's outputs; None without `apply`.
    """

    rows: tuple[ParameterError, ...]
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    outputs: float | None = None

    def __str__(self) -> str:
        cells = [
            (row.path, *row.kinds, f"{row.relative:.3e}", f"{row.largest:.3e}") for row in self.rows
        ]
        cells += [(path, "is there", "", "", "") for path in self.only_first]
        cells += [(path, "", "is there", "", "") for path in self.only_second]
        if self.outputs is not None:
            cells.append(("outputs", "", "", f"{self.outputs:.3e}", ""))
        names = ("path", "first", "second", "relative error", "largest")
        return text_table(names, cells, numbers=2)

    def to_json(self) -> JsonObject:
        """Returns the comparison as JSON values; NaN and infinity, which JSON lacks, become None."""
        rows = [
            row._asdict() | {"relative": _finite(row.relative), "largest": _finite(row.largest)}
            for row in self.rows
        ]
        return {**dataclasses.asdict(self), "rows": rows, "outputs": _finite(self.outputs)}


def compare_params(
    first: Params,
    second: Params,
    *,
    apply: Callable[..., Tree] | None = None,
    args: Sequence[Array] = (),
) -> Comparison:
    """Compares the parameters of two trees, for example before and after quantizing or merging.

    It makes one parameter at a time dense.

    Args:
      first, second: parameters, dense or implicit, in nestings of mappings.
      apply: a function `apply(params, *args)`, to compare its outputs, too.
      args: its further arguments, such as a batch of inputs.

    Returns:
      A row for each parameter that both have, and the relative error of the outputs.

    Raises:
      ValueError: for parameters of different shapes.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'w': jax.random.normal(jax.random.key(0), (64, 32))}}
      >>> found = hki.compare_params(params, hki.quantize_params(params, dtype='int4'))
      >>> found.rows[0].kinds, 0.1 < found.rows[0].relative < 0.2
      (('dense', 'QuantizedMatrix int4'), True)
    """
    one, two = trees.values_of(first), trees.values_of(second)
    both = [path for path in one if path in two]
    with progress.bar("comparing", len(both)) as run:
        rows = tuple(run(path, _error_of, path, one[path], two[path]) for path in both)
    only_first = tuple(path for path in one if path not in two)
    only_second = tuple(path for path in two if path not in one)
    outputs = None
    if apply is not None:
        check_function("apply", apply)
        pair = (jax.tree.leaves(apply(params, *args)) for params in (first, second))
        outputs = _relative([_distance_of("outputs", a, b) for a, b in zip(*pair, strict=True)])
    return Comparison(rows, only_first, only_second, outputs)


def _error_of(path: str, a: Array, b: Array) -> ParameterError:
    if tuple(a.shape) != tuple(b.shape):
        raise value_error(f"{path}: the first is {list(a.shape)}, the second {list(b.shape)}")
    for x in (a, b):
        check_whole(path, x)
        check_values(path, x)
    distance = _distance_of(path, *(materialize_array(x) if is_implicit(x) else x for x in (a, b)))
    return ParameterError(path, (_kind(a), _kind(b)), _relative([distance]), distance.largest)


def _finite(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None


class _Distance(NamedTuple):
    """The largest difference, and the sums of squares of the differences and of the first values."""

    largest: float
    apart: float
    of_first: float


_PART = 1 << 22  # numbers to compare at a time, which bounds the memory


def _distance_of(path: str, a: Array, b: Array) -> _Distance:
    """The distance between two arrays, computed with doubles.

    Raises:
      TypeError: for random keys.
    """
    if any(jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) for x in (a, b)):
        raise type_error(
            f"{path}: random keys have no distance; compare jax.random.key_data of them"
        )
    a, b = (np.asarray(x).ravel() for x in (a, b))
    kind = np.complex128 if np.iscomplexobj(a) or np.iscomplexobj(b) else np.float64
    found = _Distance(0.0, 0.0, 0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, a.size, _PART):
            one, two = (x[start : start + _PART].astype(kind) for x in (a, b))
            apart, first = np.abs(one - two), np.abs(one)
            found = _Distance(
                float(np.maximum(found.largest, apart.max())),
                found.apart + float(np.square(apart).sum()),
                found.of_first + float(np.square(first).sum()),
            )
    return found


def _relative(distances: Sequence[_Distance]) -> float:
    """The root of the squares of the differences over the squares of the first values."""
    apart, of_first = sum(x.apart for x in distances), sum(x.of_first for x in distances)
    if not apart:
        return 0.0
    return math.sqrt(apart / of_first) if of_first else math.inf
