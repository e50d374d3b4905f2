"""The products of weights in a jaxpr, found by following their axes, without running anything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from haiku_implicit.arrays import axes as axes_of
from haiku_implicit.arrays.axes import Axes
from haiku_implicit.core import compat
from haiku_implicit.core.structure import passed_on
from haiku_implicit.quantized.products.bilinear import product_of


class Use(NamedTuple):
    """One product of a weight; axes are axes of the stored weight, from the end.

    Attributes:
      op_name: the operation, one of `quant_rules.OP_NAMES`.
      axes: all axes in the product. (A loop takes one index after another of a stack.)
      shared: the axes that the result does not have.
      tiled: the axes that are cut into tiles.
      contracted: the axes that a `dot_general` contracts; empty for other operations.
      free: the axes of the weight, but not of the other operand, that a `dot_general`'s result has;
        empty for other operations.
    """

    op_name: str
    axes: frozenset[int]
    shared: frozenset[int]
    tiled: frozenset[int]
    contracted: frozenset[int] = frozenset()
    free: frozenset[int] = frozenset()


# The uses of weights by their paths.
Uses = dict[str, list[Use]]

# Marks an axis whose indices each hold a looked-up matrix.
CHOSEN = 0


class Piece(NamedTuple):
    """A stored weight, or a part of it, as a value of a program holds it.

    Attributes:
      path: the name of the stored weight.
      axes: the axes of the piece as groups of the stored weight's axes, which count from the end.
      place: the axis along which the value has other pieces beside this one; None if it has none.
      start: the first index of this piece there.
    """

    path: str
    axes: Axes
    place: int | None = None
    start: int = 0

    @classmethod
    def of(cls, path: str, shape: Sequence[int]) -> Self:
        """A whole stored weight."""
        whole = axes_of.whole(shape)
        return cls(path, tuple(tuple((n, s, i - len(shape)) for n, s, i in g) for g in whole))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the piece alone."""
        return axes_of.shape(self.axes)

    def moved(self, axes: Sequence[Any], place: int | None) -> Self:
        """The piece with other axes."""
        return self._replace(axes=tuple(axes), place=place)


# The pieces in a value; none for a value that is not followed.
Pieces = Sequence[Piece]
# The pieces in each result of an equation, from those in each operand.
Rule = Callable[[JaxprEqn, list[Pieces]], list[Pieces]]


def find_uses(jaxpr: Jaxpr, given: Sequence[Pieces]) -> Uses:
    """Finds the products of weights, in the order of the program.

    Args:
      jaxpr: a program.
      given: the pieces in each of its arguments.
    """
    uses: Uses = {}
    _follow(jaxpr, given, uses)
    return uses


def _follow(jaxpr: Jaxpr, given: Sequence[Pieces], uses: Uses) -> list[Pieces]:
    """Notes the uses in a jaxpr, and returns the pieces in its results."""
    held: dict[Var, Pieces] = dict(zip(jaxpr.invars, given, strict=True))

    def pieces_in(atoms: Iterable[Any]) -> list[Pieces]:
        return [() if isinstance(v, Literal) else held.get(v, ()) for v in atoms]

    for eqn in jaxpr.eqns:
        operands = pieces_in(eqn.invars)
        if any(operands):
            held.update(zip(eqn.outvars, _results(eqn, operands, uses), strict=True))
    return pieces_in(jaxpr.outvars)


def _results(eqn: JaxprEqn, operands: list[Pieces], uses: Uses) -> list[Pieces]:
    """The pieces in the results of one equation."""
    name = eqn.primitive.name
    if name in _PRODUCTS:
        _note_product(eqn, operands, uses)
    elif name in _RULES:
        return _RULES[name](eqn, operands)
    elif name in _LOOPS:
        return _LOOPS[name](eqn, operands, uses)
    elif (body := _called(eqn)) is not None:
        return _follow(body, operands, uses)
    return [()] * len(eqn.outvars)


# --- products ------------------------------------------------------------------------------------

_PRODUCTS = ("dot_general", "conv_general_dilated", compat.ragged_dot_general_p.name)


def _note_product(eqn: JaxprEqn, operands: list[Pieces], uses: Uses) -> None:
    """Notes the product for each operand that is a weight."""
    pair: Any = tuple(v.aval for v in eqn.invars[:2])
    product = product_of(eqn.primitive, pair, eqn.params)
    name = eqn.primitive.name
    is_ragged = name not in _PRODUCTS[:2]
    if product is None:
        return
    sides = (1,) if is_ragged else (0, 1)
    for side, piece in ((i, piece) for i in sides for piece in operands[i]):
        places: dict[str, Iterable[int]] = {}
        if name == "dot_general":
            contracted, batch = (own[side] for own in eqn.params["dimension_numbers"])
            free = [i for i in range(len(piece.axes)) if i not in (*contracted, *batch)]
            places = dict(contracted=contracted, free=free)
        every, kept = range(len(piece.axes)), (i for i in product.axes[side] if i is not None)
        use = Use(
            "ragged_dot" if is_ragged else name,
            axes=_stored(piece, every),
            shared=_stored(piece, every) - _stored(piece, kept),
            tiled=_stored(piece, (own[side] for own in product.summed[-1:])),
            **{key: _stored(piece, own) for key, own in places.items()},
        )
        uses.setdefault(piece.path, []).append(use)


def _stored(piece: Piece, places: Iterable[int]) -> frozenset[int]:
    """The axes of the stored weight that some axes of a piece are made of."""
    return frozenset(axis for i in places for _, _, axis in piece.axes[i] if axis != CHOSEN)


# --- rearrangements ------------------------------------------------------------------------------


def _of_each(fun: Callable[[JaxprEqn, Piece], Piece | None]) -> Rule:
    """A rule that follows each piece in the first operand on its own."""

    def rule(eqn: JaxprEqn, operands: list[Pieces]) -> list[Pieces]:
        found = (fun(eqn, piece) for piece in operands[0])
        return [[piece for piece in found if piece is not None]]

    return rule


def _reshaped(eqn: JaxprEqn, piece: Piece) -> Piece | None:
    """Follows axes that are split or merged; a repeated weight is not followed."""
    shape = _shape(eqn.invars[0])
    new = axes_of.new_shape(shape, {**eqn.params, "sharding": None})
    if new is None or 0 in shape:
        return None
    if piece.place is None:
        axes = axes_of.reshaped(piece.axes, new)
        return None if axes is None else piece.moved(axes, None)
    # The axis of the pieces is split between them, or merged with axes after it.
    front, behind = math.prod(shape[: piece.place]), math.prod(shape[piece.place + 1 :])
    place = next((i for i, n in enumerate(new) if math.prod(new[:i]) == front and n > 1), None)
    if place is None:
        return None
    rest, size = math.prod(new[place + 1 :]), piece.shape[piece.place]
    if size * behind % rest or piece.start * behind % rest:
        return None
    own = (*new[:place], size * behind // rest, *new[place + 1 :])
    axes = axes_of.reshaped(piece.axes, own)
    if axes is None:
        return None
    return piece.moved(axes, place)._replace(start=piece.start * behind // rest)


def _transposed(eqn: JaxprEqn, piece: Piece) -> Piece:
    order = list(eqn.params["permutation"])
    place = None if piece.place is None else order.index(piece.place)
    return piece.moved([piece.axes[i] for i in order], place)


def _cut(piece: Piece, starts: Sequence[int], sizes: Sequence[int]) -> Piece | None:
    """A part of a piece: a part of an axis is followed as the same stored axis."""
    axes = []
    for i, (start, size, group) in enumerate(zip(starts, sizes, piece.axes, strict=True)):
        if i == piece.place:
            low, high = max(start - piece.start, 0), start + size - piece.start
            own = min(high, axes_of.length(group)) - low
            if own <= 0:
                return None
            alone = own == size  # without the other pieces
            piece = piece._replace(
                start=max(piece.start - start, 0), place=None if alone else piece.place
            )
            size = own
        if size != axes_of.length(group):
            found = {axis for _, _, axis in group}
            if len(found) > 1:
                return None
            group = tuple((size, 1, axis) for axis in found) if size > 1 else ()
        axes.append(group)
    return piece.moved(axes, piece.place)


def _sliced(eqn: JaxprEqn, piece: Piece) -> Piece | None:
    strides, starts = eqn.params["strides"], eqn.params["start_indices"]
    if strides is not None and piece.place is not None and strides[piece.place] != 1:
        return None
    return _cut(piece, starts, _shape(eqn.outvars[0]))


def _dynamically_sliced(eqn: JaxprEqn, piece: Piece) -> Piece | None:
    old, new = map(_shape, (eqn.invars[0], eqn.outvars[0]))
    if piece.place is not None and old[piece.place] != new[piece.place]:
        return None
    return _cut(piece, [0] * len(new), new)


def _split(eqn: JaxprEqn, operands: list[Pieces]) -> list[Pieces]:
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    shape = _shape(eqn.invars[0])
    found: list[Pieces] = []
    for starts, limits in axes_of.pieces(shape, axis, sizes):
        lengths = [limit - start for start, limit in zip(starts, limits, strict=True)]
        parts = (_cut(piece, starts, lengths) for piece in operands[0])
        found.append([piece for piece in parts if piece is not None])
    return found


def _chosen(eqn: JaxprEqn, piece: Piece) -> Piece | None:
    """Follows matrices that are looked up in a batch: they have the same axes."""
    sizes, numbers = eqn.params["slice_sizes"], eqn.params["dimension_numbers"]
    shape, out = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    batch = len(out) - len(numbers.offset_dims)
    kept = [i for i in range(len(shape)) if i not in numbers.collapsed_slice_dims]
    whole = piece.place is None and all(sizes[i] == shape[i] for i in kept)
    if not whole or numbers.operand_batching_dims or min(numbers.offset_dims, default=0) < batch:
        return None
    looked_up = [((n, 1, CHOSEN),) if n > 1 else () for n in out[:batch]]
    return piece.moved([*looked_up, *(piece.axes[i] for i in kept)], None)


def _concatenated(eqn: JaxprEqn, operands: list[Pieces]) -> list[Pieces]:
    """Follows each of the concatenated weights."""
    place = eqn.params["dimension"]
    sizes = [_shape(v)[place] for v in eqn.invars]
    starts = itertools.accumulate(sizes, initial=0)
    pairs = [(start, piece) for start, own in zip(starts, operands, strict=False) for piece in own]
    return [
        [
            piece._replace(place=place, start=start + piece.start)
            for start, piece in pairs
            if piece.place in (None, place)
        ]
    ]


def _stacked(eqn: JaxprEqn, operands: list[Pieces]) -> list[Pieces]:
    """Follows each of the stacked weights, with a new axis."""
    place = eqn.params["axis"]
    return [
        [
            piece.moved([*piece.axes[:place], (), *piece.axes[place:]], place)._replace(start=i)
            for i, own in enumerate(operands)
            for piece in own
            if piece.place is None
        ]
    ]


def _unstacked(eqn: JaxprEqn, operands: list[Pieces]) -> list[Pieces]:
    """Follows each index along an axis, without that axis."""
    axis, shape = eqn.params["axis"], list(_shape(eqn.invars[0]))
    sizes = [1 if i == axis else n for i, n in enumerate(shape)]
    found: list[Pieces] = []
    for index in range(shape[axis]):
        starts = [index if i == axis else 0 for i in range(len(shape))]
        parts = [_cut(piece, starts, sizes) for piece in operands[0]]
        found.append([_without(piece, axis) for piece in parts if piece is not None])
    return found


def _without(piece: Piece, axis: int) -> Piece:
    """A piece without an axis of length one."""
    place = piece.place
    if place is not None and place > axis:
        place -= 1
    return piece.moved([group for i, group in enumerate(piece.axes) if i != axis], place)


def _elementwise(eqn: JaxprEqn, operands: list[Pieces]) -> list[Pieces]:
    """Follows the one weight among the operands, if others do not enlarge it."""
    shape = _shape(eqn.outvars[0])
    pairs = zip(eqn.invars, operands, strict=True)
    whole = [own for v, own in pairs if own and _shape(v) == shape]
    return [whole[0] if len(whole) == 1 else ()]


def _unchanged(eqn: JaxprEqn, operands: list[Pieces]) -> list[Pieces]:
    return operands


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("reshape", "squeeze", "broadcast_in_dim"), _of_each(_reshaped)),
    **dict.fromkeys(
        ["convert_element_type", "reduce_precision", "copy", "copy_p", "rev", "sharding_constraint"]
        + ["reshard", "neg", "abs", "tanh", "sign", "exp", "logistic", "integer_pow", "square"]
        + ["sqrt", "rsqrt", "log", "mul", "div", "add", "sub", "max", "min", "select_n", "pow"],
        _elementwise,
    ),
    "transpose": _of_each(_transposed),
    "slice": _of_each(_sliced),
    "dynamic_slice": _of_each(_dynamically_sliced),
    "split": _split,
    "gather": _of_each(_chosen),
    "concatenate": _concatenated,
    "stack": _stacked,
    "unstack": _unstacked,
    "optimization_barrier": _unchanged,
}


# --- calls and loops -----------------------------------------------------------------------------


def _called(eqn: JaxprEqn) -> Jaxpr | None:
    """The jaxpr that an equation runs once on its operands; None for any other equation."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        body = eqn.params.get(name)
        body = getattr(body, "jaxpr", body)
        if isinstance(body, Jaxpr) and _fits(body.invars, eqn.invars):
            return body if _fits(body.outvars, eqn.outvars) else None
    return None


def _fits(inner: Sequence[Any], outer: Sequence[Any]) -> bool:
    """Whether variables have the same shapes. (In a `shard_map` they have the shapes of one device.)"""
    return [_shape(v) for v in inner] == [_shape(v) for v in outer]


def _shape(v: Any) -> tuple[int, ...]:
    """The shape of a variable; empty for one without, such as a token."""
    return getattr(v.aval, "shape", ())


def _scan(eqn: JaxprEqn, operands: list[Pieces], uses: Uses) -> list[Pieces]:
    """Follows constants, slices of inputs, and carries that the body passes on unchanged."""
    body = eqn.params["jaxpr"].jaxpr
    values: list[Any] = list(eqn.invars)
    num_consts, num_carry = compat.scan_arity(eqn.params, values)
    xs = operands[num_consts + num_carry :]
    slices = [
        [piece.moved(piece.axes[1:], piece.place and piece.place - 1) for piece in own]
        for own in ([piece for piece in own if piece.place != 0] for own in xs)
    ]
    carry = _kept(body, num_consts, operands[num_consts:][:num_carry])
    _follow(body, [*operands[:num_consts], *carry, *slices], uses)
    return [*carry, *[()] * (len(eqn.outvars) - num_carry)]


def _while(eqn: JaxprEqn, operands: list[Pieces], uses: Uses) -> list[Pieces]:
    """Follows constants, and carries that the body passes on unchanged."""
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    body = eqn.params["body_jaxpr"].jaxpr
    carry = _kept(body, num_body, operands[num_cond + num_body :])
    _follow(eqn.params["cond_jaxpr"].jaxpr, [*operands[:num_cond], *carry], uses)
    _follow(body, [*operands[num_cond:][:num_body], *carry], uses)
    return carry


def _kept(body: Jaxpr, num_consts: int, carry: list[Pieces]) -> list[Pieces]:
    """The pieces in each value of a carry that stays the same in all steps."""
    same = {i for i, j in passed_on(body, num_consts, len(carry)) if i == j}
    return [own if i in same else () for i, own in enumerate(carry)]


def _cond(eqn: JaxprEqn, operands: list[Pieces], uses: Uses) -> list[Pieces]:
    """Follows operands of the branches, and results that are the same in all branches."""
    outs = [_follow(own.jaxpr, operands[1:], uses) for own in eqn.params["branches"]]
    pairs = zip(*outs, strict=True)
    return [own[0] if all(list(x) == list(own[0]) for x in own) else () for own in pairs]


def _linear_solve(eqn: JaxprEqn, operands: list[Pieces], uses: Uses) -> list[Pieces]:
    """Follows the constants of the functions."""
    left = iter(operands)
    for count, closed in zip(eqn.params["const_lengths"], eqn.params["jaxprs"], strict=True):
        consts = list(itertools.islice(left, count))
        if closed is not None:
            rest = len(closed.jaxpr.invars) - count
            _follow(closed.jaxpr, [*consts, *[()] * rest], uses)
    return [()] * len(eqn.outvars)


_LOOPS: Mapping[str, Callable[[JaxprEqn, list[Pieces], Uses], list[Pieces]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
}
