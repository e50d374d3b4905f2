"""The options of LoRA and quantization: the weights that they fit, and their application to one."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax

from haiku_implicit.arrays.lora import LoRA, check_room
from haiku_implicit.arrays.lora_init import Drawn, Initializer, LoRAInit, init_of
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.arrays.zeros import Zeros
from haiku_implicit.core.array import ImplicitArray, is_implicit
from haiku_implicit.core.predicates import path_of
from haiku_implicit.numerics.formats import RECIPES
from haiku_implicit.numerics.options import is_positive_integer
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.params.selection import describe, errors_name, is_matrix, is_weight
from haiku_implicit.products.quant_rules import QuantRule

GroupSize = int | tuple[int, int] | str | None


class Room(NamedTuple):
    """The weights with room for adapters of a rank, which are the default targets.

    Attributes:
      rank_of: a function from the path of a weight to its rank.
      room_of: a function from the path and the shape of a weight to the largest rank.
    """

    rank_of: Callable[[str], int]
    room_of: Callable[[str, tuple[int, ...]], int]

    def takes(self, module_name: str, name: str, value: Any) -> bool:
        """Whether a weight is a default target: dense or quantized, with room for the rank."""
        return _may_hold(module_name, name, value) and self._fits(module_name, name, value)

    def leaves(self, module_name: str, name: str, value: Any) -> bool:
        """Whether a weight would be a default target if it had more room."""
        return _may_hold(module_name, name, value) and not self._fits(module_name, name, value)

    def _fits(self, module_name: str, name: str, value: Any) -> bool:
        path = path_of(module_name, name)
        return self.rank_of(path) <= self.room_of(path, tuple(value.shape))

    @property
    def wanted(self) -> str:
        """The default targets in words, for errors."""
        rank = self.rank_of("")
        return (
            f"a weight with room for LoRA of rank {rank} that is dense or quantized (those of other "
            "types have to be named by targets=; infer_matrix_axes finds the axes of weights of more "
            "than two, for matrix_axes=)"
        )


def _may_hold(module_name: str, name: str, value: Any) -> bool:
    """Whether a parameter is a dense or quantized weight."""
    held = isinstance(value, QuantizedMatrix | ScaledMatrix) or not is_implicit(value)
    return held and is_weight(module_name, name, value)


@dataclasses.dataclass(frozen=True)
class LoRAOptions:
    """The options of LoRA, checked when they are made.

    Attributes:
      rank: the rank of the correction.
      alpha: the correction is scaled by `alpha / rank`; None for a scale of 1.
      init: a function that draws the factor `a`; None: uniform in ±1/sqrt(n), as in PEFT and the
        authors' code. Or an initialization of `lora_init`: 'gaussian', 'orthogonal', 'pissa', 'olora',
        an `EVA` or a `LoftQ`.
      rank_stabilized: whether to scale by `alpha / sqrt(rank)` (rsLoRA, arXiv:2312.03732).

    Raises:
      ValueError: for an option out of its range.
    """

    rank: int
    alpha: float | None = None
    init: Initializer | LoRAInit | str | None = None
    rank_stabilized: bool = False

    def __post_init__(self) -> None:
        LoRA.check_options(vars(self))

    @property
    def room(self) -> "Room":
        """The weights with room for the rank."""
        return Room(lambda path: self.rank, lambda path, shape: min(shape[-2:]))

    def check(self, path: str, value: Any, stacked: int = 0) -> None:
        """Raises unless a parameter can take LoRA of this rank; `stacked` as for `check_matrix`."""
        check_matrix(path, value, "LoRA", stacked)
        with errors_name(path, value):
            check_room(value, self.rank)

    def factor_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of `a` and `b` for a weight `[..., n, m]`."""
        *batch, n, m = shape
        return (*batch, n, self.rank), (*batch, self.rank, m)

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Draws the factor `a`, `[..., n, r]`, without the weight."""
        init = init_of(self.init)
        if not isinstance(init, Drawn):
            raise ValueError(
                f"init: {self.init!r} needs the weight; give it to add_lora, on existing parameters"
            )
        return init.draw(key, shape, dtype)

    def put_on(self, path: str, value: Any, key: jax.Array, stacked: int = 0) -> LoRA:
        """A parameter with LoRA, which stands for the same values."""
        self.check(path, value, stacked)
        with errors_name(path, value):
            options = LoRA.options_for(path, len(value.shape) - stacked, vars(self))
            return LoRA.create(value, key, **options)


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """The options of `QuantizedMatrix.quantize`, under the same names.

    Raises:
      ValueError: for an `axis` or a `group_size` that no weight could have.
    """

    dtype: str = "int8"
    group_size: GroupSize = None
    axis: int = -2
    zero_point: bool = False
    calibration: str | None = None
    scale_dtype: Any = None
    activation: str | None = None

    def __post_init__(self) -> None:
        if self.axis not in (-2, -1):
            raise ValueError(f"axis: expected -2 or -1, got {self.axis!r}")
        object.__setattr__(self, "group_size", checked_group_size(self.group_size))

    def takes(self, module_name: str, name: str, value: Any) -> bool:
        """Whether a weight is a default target: dense, also within LoRA, and divided by the groups.

        An axis of length one (a depthwise kernel `[h, w, 1, m]`) would give a scale to each number.
        """
        return self._might_take(module_name, name, value) and self._divides(value)

    def leaves(self, module_name: str, name: str, value: Any) -> bool:
        """Whether a weight would be a default target if the groups divided it."""
        return self._might_take(module_name, name, value) and not self._divides(value)

    def _might_take(self, module_name: str, name: str, value: Any) -> bool:
        inner = value.w if isinstance(value, LoRA) else value
        dense = is_weight(module_name, name, value) and not is_implicit(inner)
        return dense and value.shape[self.axis] > 1

    @property
    def divisor(self) -> GroupSize:
        """The group size, or the multiple that the format requires; None or 'tensor' fit any weight."""
        if self.group_size is None and self.dtype in RECIPES:
            return RECIPES[self.dtype].multiple
        return self.group_size

    def _divides(self, value: Any) -> bool:
        """Whether the groups, and tiles of rows, divide the axes of a matrix."""
        size, length, rows = self.divisor, value.shape[self.axis], value.shape[-3 - self.axis]
        if size is None or isinstance(size, str):
            return True
        tile, group = size if isinstance(size, tuple) else (1, size)
        return length % group == 0 and rows % tile == 0

    @property
    def wanted(self) -> str:
        """The default targets in words, for errors."""
        size = self.divisor
        if not size or isinstance(size, str):
            return "a dense weight"
        return (
            f"a dense weight whose axis {self.axis} is divided by {size} (matrix_axes= says which axes "
            "make the matrix of a weight of more than two)"
        )

    def by_rule(self, rule: QuantRule, shape: tuple[int, ...]) -> Self:
        """The options of a rule for a weight of this shape, with the same `axis` and `scale_dtype`."""
        return dataclasses.replace(self, **rule.weight_options(shape[self.axis]))

    def refuse_beside_rules(self, default: "QuantizeOptions") -> None:
        """Raises if options are given together with rules, which replace them."""
        own, plain = vars(self), vars(default)
        both = [x for x in own if own[x] != plain[x] and x not in ("axis", "scale_dtype")]
        if both:
            raise ValueError(f"rules: expected them in place of {', '.join(both)}, got both")

    def quantize(self, w: jax.Array, moments: jax.Array | None = None) -> QuantizedMatrix:
        """`QuantizedMatrix.quantize` with these options; for a struct, the struct of the result."""
        if isinstance(w, jax.ShapeDtypeStruct):
            return jax.eval_shape(self.quantize, w)
        return QuantizedMatrix.quantize(w, **vars(self), moments=moments)

    def put_on(self, path: str, value: Any, stacked: int = 0) -> ImplicitArray:
        """Quantizes a parameter; of a LoRA weight, its `w`."""
        if isinstance(value, LoRA):
            return value._replace(w=self.put_on(path, value.w, stacked))
        check_matrix(path, value, "quantization", stacked)
        if is_implicit(value):
            raise ValueError(
                f"{path}: this is {describe(value)}, and only a dense parameter (or the dense w of "
                "LoRA) can be quantized. Leave it out by targets=, or materialize it first"
            )
        with errors_name(path, value):
            return self.quantize(value)


def zeros_for(value: Any) -> Zeros:
    """Symbolic zeros of the shape and dtype of a value."""
    return Zeros(shape=tuple(value.shape), dtype=value.dtype)


def check_matrix(path: str, value: Any, what: str, stacked: int = 0) -> None:
    """Raises unless a parameter is a floating-point matrix or a stack of matrices.

    Args:
      stacked: how many of its leading axes stack layers: a stack of biases is not a matrix.
    """
    if not is_matrix(value) or len(value.shape) - stacked < 2:
        axes = "two axes besides that of stacked layers" if stacked else "two axes"
        raise ValueError(
            f"{path}: {what} needs a floating-point parameter of at least {axes}, but this one is "
            f"{describe(value)}. Leave it out by targets="
        )


def checked_group_size(size: Any) -> GroupSize:
    """A group size; raises if `QuantizedMatrix.quantize` would reject it for every weight."""
    pair = isinstance(size, tuple | list) and len(size) == 2
    known = size is None or (isinstance(size, str) and size == "tensor")
    if not known and not all(map(is_positive_integer, size if pair else [size])):
        raise ValueError(
            "group_size: expected None, 'tensor', a positive integer or a pair of them, got "
            f"{size!r}"
        )
    return tuple(size) if pair else size
