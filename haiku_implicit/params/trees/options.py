"""The options of LoRA and quantization: the weights that they fit, and their application to one."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.rotated import Rotated
from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.core.array import ImplicitArray, is_implicit
from haiku_implicit.core.messages import see, shown, type_error, value_error
from haiku_implicit.core.predicates import path_of
from haiku_implicit.core.typing import Array, DType
from haiku_implicit.params.trees import selection
from haiku_implicit.params.trees.one_by_one import is_news
from haiku_implicit.params.trees.selection import Parameter
from haiku_implicit.quantized.matrix import QuantizeArguments, QuantizedMatrix
from haiku_implicit.quantized.numbers import channel_scales
from haiku_implicit.quantized.numbers.formats import RECIPES, find
from haiku_implicit.quantized.numbers.options import is_positive_integer
from haiku_implicit.quantized.products.rules import QuantRule
from haiku_implicit.quantized.types import trellis

GroupSize = int | tuple[int, int] | str | None

# Rotations of blocks of fewer numbers leave outliers nearly as they are.
_FEW_ROTATED = 8


class Room(NamedTuple):
    """The weights with room for adapters of a rank, which are the default targets.

    Attributes:
      rank_of: a function from the path of a weight to its rank.
      room_of: a function from the path and the shape of a weight to the largest rank.
      of_each: the new thing that each matrix of a stack has, in words.
      page: the section of the errors' page for weights that suit and have no room.
    """

    rank_of: Callable[[str], int]
    room_of: Callable[[str, tuple[int, ...]], int]
    of_each: str = "an adapter"
    page: str = "a-rank-too-large"

    def suits(self, module_name: str, name: str, value: Array) -> bool:
        """Whether a parameter is a dense or quantized weight."""
        stored = QuantizedMatrix | ScaledMatrix | Rotated
        held = isinstance(value, stored) or not is_implicit(value)
        return held and selection.is_weight(module_name, name, value)

    def fits(self, module_name: str, name: str, value: Array) -> bool:
        """Whether a weight has room for its rank."""
        path = path_of(module_name, name)
        return self.rank_of(path) <= self.room_of(path, tuple(value.shape))

    def wanted(self, suited: Sequence[Parameter]) -> str:
        """The default targets in words, for the error that none of the suited weights has room."""
        most = max((self.room_of(p.path, tuple(p.value.shape)) for p in suited), default=0)
        largest = f" (the rank can be {most} at most)" if most else ""
        return (
            f"a weight with room for LoRA of rank {self.rank_of('')}{largest} that is dense or "
            "quantized (those of other types have to be named by targets=; matrix_axes= says which "
            "axes make the matrix of a weight of more than two, and hki.prepare(model, params, *args) "
            "finds them)"
        )

    def told(self, left: Sequence[Parameter], *, prepared: bool) -> str:
        """The warning about weights without room."""
        what = "1 weight gets" if len(left) == 1 else f"{len(left)} weights get"
        kernels = [p for p in left if selection.is_kernel(p)]
        ways = []
        if kernels:
            ways.append(
                "For kernels of convolutions, the method 'locon' of add_adapter takes all axes as one "
                "matrix"
            )
        if _of_many_axes([p for p in left if p not in kernels]) and not prepared:
            ways.append(
                "params = hki.prepare(model, params, *args) finds which axes make one matrix of a "
                "weight of more than two"
            )
        ways.append("Give a smaller rank=, or leave them out by exclude=")
        return (
            f"{what} no adapter, because the rank is larger than there is room for (the smaller of "
            f"the last two axes): {named(left)}. {'. '.join(ways)} {see('a-rank-too-large')}"
        )


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """The options of `QuantizedMatrix.quantize`, checked as far as no weight is needed.

    Trellis codes have no options but `activation`, and are always rotated. `of_each` and `page` are as
    for `Room`.

    Raises:
      ValueError: for an `axis` or a `group_size` that no weight could have, or that has no rotation.
    """

    dtype: str = "int8"
    group_size: GroupSize = None
    axis: int = -2
    zero_point: bool = False
    calibration: str | None = None
    scale_dtype: DType | None = None
    activation: str | None = None
    rotate: bool = False

    of_each: ClassVar[str] = "scales"
    page: ClassVar[str] = "groups-that-do-not-fit"

    def __post_init__(self) -> None:
        if self.axis not in (-2, -1):
            raise value_error(f"axis: expected -2 or -1, got {self.axis!r}")
        if self.is_rotated and self.axis != -2:
            what = f"dtype {self.dtype!r} is" if self.is_trellis else "rotated weights are"
            raise value_error(f"axis: {what} for axis -2, the inputs; got -1")
        if not isinstance(self.rotate, bool):
            raise type_error(f"rotate: expected True or False, got {self.rotate!r}")
        if self.is_trellis:
            own = dict(vars(self), dtype="int8", rotate=False, activation=None)
            plain = vars(QuantizeOptions())
            if given := [name for name in own if own[name] != plain[name]]:
                raise value_error(f"dtype {self.dtype!r} has no {', '.join(given)}; leave it out")
        elif self.dtype not in RECIPES:
            find(self.dtype, also=[*RECIPES, *trellis.BITS])  # raises for an unknown one
        object.__setattr__(self, "group_size", checked_group_size(self.group_size))

    @classmethod
    def of(
        cls, options: QuantizeArguments, default: QuantizeArguments | None = None, *, rules: bool
    ) -> Self:
        """The record of a function's `**options`.

        Args:
          options: the options that the user gives.
          default: other defaults of the function.
          rules: whether there are rules, which replace all options but `axis` and `scale_dtype`.

        Raises:
          TypeError: for an unknown option.
          ValueError: for options beside rules that replace them, or trellis codes without a rotation.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(options.keys() - set(known)):
            raise type_error(
                f"unexpected keyword argument {unknown[0]!r}: expected an option of "
                f"QuantizedMatrix.quantize, {', '.join(known)}"
            )
        plain = cls(**(default or {}))
        new = dataclasses.replace(plain, **options)
        if new.is_trellis and options.get("rotate") is False:
            raise value_error(
                f"rotate: the codes of {new.dtype!r} need the rotation, got False; leave it out"
            )
        both = [x for x in known if getattr(new, x) != getattr(plain, x)]
        if both := [x for x in both if rules and x not in ("axis", "scale_dtype")]:
            raise value_error(f"rules: expected them in place of {', '.join(both)}, got both")
        return new

    @property
    def is_trellis(self) -> bool:
        """Whether weights become trellis codes."""
        return self.dtype in trellis.BITS

    @property
    def is_rotated(self) -> bool:
        """Whether weights are rotated first."""
        return self.rotate or self.is_trellis

    def suits(self, module_name: str, name: str, value: Array) -> bool:
        """Whether a parameter is a dense weight, also within an adapter. A single row is a vector."""
        inner = value.w if isinstance(value, Adapter) else value
        dense = selection.is_weight(module_name, name, value) and not is_implicit(inner)
        return dense and (value.shape[self.axis] > 1 or math.prod(value.shape[:-1]) > 1)

    @property
    def divisor(self) -> GroupSize:
        """The group size, or the multiple that the format requires; None or 'tensor' fit any weight."""
        if self.group_size is None and self.dtype in RECIPES:
            return RECIPES[self.dtype].multiple
        return self.group_size

    def fits(self, module_name: str, name: str, value: Array) -> bool:
        """Whether the groups, and tiles of rows, divide the axes, and no look-up needs a rotation.

        An axis of length one (a depthwise kernel `[h, w, 1, m]`) would give a scale to each number.
        """
        if self.is_rotated_table(name) or value.shape[self.axis] == 1:
            return False
        size, length, rows = self.divisor, value.shape[self.axis], value.shape[-3 - self.axis]
        if size is None or isinstance(size, str):
            return True
        tile, group = size if isinstance(size, tuple) else (1, size)
        return length % group == 0 and rows % tile == 0

    def is_rotated_table(self, name: str) -> bool:
        """Whether a parameter is `hk.Embed`'s: a look-up of a row would rotate the whole table."""
        return self.is_rotated and name == "embeddings"

    def wanted(self, suited: Sequence[Parameter]) -> str:
        """The default targets in words, for the error that none of the suited weights fits."""
        size = self.divisor
        if not size or isinstance(size, str):
            return f"a dense weight whose axis {self.axis} is longer than one"
        return (
            f"a dense weight whose axis {self.axis} is divided by {size}{self._fitting(suited)} "
            "(matrix_axes= says which axes make the matrix of a weight of more than two, and "
            "hki.prepare(model, params, *args) finds them)"
        )

    def _fitting(self, left: Sequence[Parameter]) -> str:
        """The sizes of groups that fit some weights which the given size does not fit, in words."""
        lengths = {p.value.shape[self.axis] for p in left} - {1}  # which nothing would fit
        common = math.gcd(*lengths)
        sizes = [str(n) for n in range(8, min(common, 256) + 1, 2) if common % n == 0]
        known = isinstance(self.group_size, int) and sizes
        return f" ({', '.join(sizes[-6:])} would fit)" if known else ""

    def told(self, left: Sequence[Parameter], *, prepared: bool) -> str:
        """The warning about weights that the groups do not divide, or that are not rotated."""
        axis = self.axis
        tables = [p for p in left if self.is_rotated_table(p.name)]
        thin = [p for p in left if p not in tables and p.value.shape[axis] == 1]
        others = [p for p in left if p not in tables and p not in thin]
        sentences = []
        if tables:
            sentences.append(
                "tables of hk.Embed stay dense, because a look-up of one row would rotate all of them: "
                f"{named(tables)}. Quantize them in another call without a rotation, or leave them out "
                "by exclude="
            )
        if thin:
            sentences.append(
                f"weights whose axis {axis} has the length one stay dense, because each number would "
                f"have its own scale: {named(thin)}. Leave them out by exclude= {see(self.page)}"
            )
        if others:
            sentences.append(self._told_of_groups(others, prepared))
        return ". ".join(sentences)

    def told_of_changed(self, changed: Sequence[Parameter]) -> list[str]:
        """The warnings about weights that are hardly rotated, or do not get smaller."""
        if not self.is_rotated:
            return []
        odd = [p for p in changed if (n := p.value.shape[-2]) & -n < min(n, _FEW_ROTATED)]
        large = [p for p in changed if self.is_trellis and not self._saves_bits(p.value)]
        sentences = []
        if odd and is_news("rotations"):
            sentences.append(
                f"a rotation mixes fewer than {_FEW_ROTATED} inputs of these weights, because no "
                f"larger power of two divides their number, so that outliers stay: {named(odd)}. "
                "Quantize them in groups, without a rotation, or leave them out by exclude="
            )
        if large and is_news("large codes"):
            sentences.append(
                f"these weights do not get smaller, because {self.dtype!r} stores a multiple of "
                f"{trellis.MULTIPLE} outputs: {named(large)}. Leave them out by exclude="
            )
        return sentences

    def _saves_bits(self, value: Array) -> bool:
        columns = value.shape[-1]
        stored = -(-columns // trellis.MULTIPLE) * trellis.MULTIPLE * trellis.BITS[self.dtype]
        return stored < columns * value.dtype.itemsize * 8

    def _told_of_groups(self, left: Sequence[Parameter], prepared: bool) -> str:
        """The warning about weights that the groups do not divide."""
        axis, size = self.axis, self.divisor
        what = "1 weight stays" if len(left) == 1 else f"{len(left)} weights stay"
        axes = "; hki.prepare(model, params, *args) finds matrices in weights of more than two axes"
        axes = axes if _of_many_axes(left) and not prepared else ""
        return (
            f"{what} dense, because groups of {size} do not divide axis {axis}: {named(left)}. "
            f"Quantize with another group_size={self._fitting(left)}, these alone by targets=; or "
            f"leave them out by exclude={axes}"
            f" {see('groups-that-do-not-fit')}"
        )

    def by_rule(self, rule: QuantRule, parameter: Parameter) -> Self:
        """The options of a rule for a weight, with the same `axis` and `scale_dtype`."""
        options = rule.weight_options(parameter.value.shape[self.axis])
        new = dataclasses.replace(self, **options, rotate=rule.rotate)
        return (
            dataclasses.replace(new, rotate=False) if new.is_rotated_table(parameter.name) else new
        )

    def quantize(self, w: jax.Array, moments: jax.Array | None = None) -> ImplicitArray:
        """A weight quantized with these options; for a struct, the struct of the result."""
        if isinstance(w, jax.ShapeDtypeStruct):
            return jax.eval_shape(self.quantize, w)
        return (
            Rotated.quantize(w, self._stored, moments)
            if self.is_rotated
            else self._stored(w, moments)
        )

    def _stored(self, w: jax.Array, moments: jax.Array | None) -> ImplicitArray:
        """A weight quantized as it is, or after its rotation."""
        if not self.is_trellis:
            known = {name: x for name, x in vars(self).items() if name != "rotate"}
            return QuantizedMatrix.quantize(w, **known, moments=moments)
        # The codes fit the rounded scales: bfloat16 has the range of any weight.
        bits, wide = trellis.BITS[self.dtype], w.astype(jnp.promote_types(w.dtype, jnp.float32))
        scale = trellis.best_scales(wide, bits).astype(jnp.bfloat16)
        numbers = wide / jnp.where(scale == 0, 1, scale).astype(wide.dtype)[..., None, :]
        codes = trellis.TrellisMatrix.encode(numbers, bits, moments, w.dtype)
        if moments is not None:
            best = channel_scales.fitted(numbers, codes.materialize().astype(wide.dtype), moments)
            scale = (scale * best).astype(scale.dtype)
        return ScaledMatrix(codes.with_activation(self.activation), scale, -1)

    def put_on(self, path: str, value: Array, stacked: int = 0) -> ImplicitArray:
        """Quantizes a parameter; of an adapter, its `w`."""
        if isinstance(value, Adapter):
            return value._replace(w=self.put_on(path, value.w, stacked))
        check_matrix(path, value, "quantization", stacked)
        if is_implicit(value):
            raise ValueError(
                f"{path}: this is {selection.describe(value)}, and only a dense parameter (or the "
                "dense w of an adapter) can be quantized. Leave it out by exclude=, or materialize it "
                f"first {see('implicit-already')}"
            )
        with selection.editing(path, value):
            return self.quantize(value)


def check_matrix(path: str, value: Array, what: str, stacked: int = 0) -> None:
    """Raises unless a parameter is a floating-point matrix or a stack of matrices.

    Args:
      stacked: how many of its leading axes stack layers: a stack of biases is not a matrix.
    """
    if not selection.is_matrix(value) or len(value.shape) - stacked < 2:
        axes = "two axes besides that of stacked layers" if stacked else "two axes"
        raise ValueError(
            f"{path}: {what} needs a floating-point parameter of at least {axes}, but this one is "
            f"{selection.describe(value)}. Leave it out by exclude= (all biases by "
            "exclude=haiku_implicit.BIASES)"
            f" {see('not-a-matrix')}"
        )


def checked_group_size(size: Any) -> GroupSize:
    """A group size; raises if `QuantizedMatrix.quantize` would reject it for every weight."""
    pair = isinstance(size, tuple | list) and len(size) == 2
    known = size is None or (isinstance(size, str) and size == "tensor")
    if not known and not all(map(is_positive_integer, size if pair else [size])):
        raise value_error(
            "group_size: expected None, 'tensor', a positive integer or a pair of them, got "
            f"{size!r}"
        )
    return tuple(size) if pair else size


def named(left: Sequence[Parameter]) -> str:
    """The paths, dtypes and shapes of some parameters."""
    return shown([f"{p.path} ({selection.describe(p.value)})" for p in left])


def _of_many_axes(left: Sequence[Parameter]) -> bool:
    """Whether any of these weights has more axes than a matrix."""
    return any(len(p.value.shape) - p.stacked > 2 for p in left)
