"""`Probe`: a weight that records which of its axes products contract."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from haiku_implicit.arrays import axes as axes_of
from haiku_implicit.arrays.axes import Axes
from haiku_implicit.arrays.concatenated import Concatenated
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.compat import ragged_dot_general_p
from haiku_implicit.core.dispatch import named, primitive_handler
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.typing import Array, EqnParam, Primitive, Result
from haiku_implicit.core.wrapper import Wrapper
from haiku_implicit.quantized.products.bilinear import Product, product_of


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


# Marks an axis of a `Probe` whose indices each hold a looked-up matrix.
CHOSEN = 0


class Log:
    """The uses of each weight, by its path; compared by identity, as static metadata of a `Probe`."""

    def __init__(self) -> None:
        self.uses: dict[str, list[Use]] = {}


@dataclasses.dataclass
class Probe(Wrapper, core_ndim=0, warn_on_materialize=False):
    """A dense weight that follows its axes through rearrangements to the products.

    It is for abstract runs of a model (`infer_matrix_axes`): its values do not matter.

    Attributes:
      value: the weight, as rearranged so far.
      axes: its axes as groups of the stored weight's axes, which are counted from the end.
      path: the name of the stored weight.
      log: the record of products.
    """

    value: Array
    axes: Axes = aux_field()
    path: str = aux_field()
    log: Log = aux_field()

    @classmethod
    def of(cls, value: jax.Array, path: str, log: Log) -> "Probe":
        """Makes a probe of a stored weight."""
        axes = axes_of.whole(value.shape)
        n = value.ndim
        return cls(value, tuple(tuple((k, s, i - n) for k, s, i in g) for g in axes), path, log)

    def with_leading_axis(self, size: int | None) -> Result:
        """Drops the first axis, as a scan does."""
        return self._replace(axes=self.axes[1:]) if size is None else NotImplemented


# --- products ------------------------------------------------------------------------------------


@binary_handler(["dot_general", "conv_general_dilated"])
def record(call: BinaryCall, x: jax.Array, w: Probe) -> jax.Array:
    """Records the axes in a product, and computes it."""
    places = {}
    if call.primitive is jax.lax.dot_general_p:
        contracted, batch = call.contracted[1], call.batch[1]
        free = [i for i in range(w.ndim) if i not in (*contracted, *batch)]
        places = dict(contracted=contracted, free=free)
    product = product_of(call.primitive, call.ordered(x, w), call.params)
    _note(call.primitive.name, w, product, call.w_first, **places)
    return call(x, w.value)


@primitive_handler("dot_general")
def record_of_two(primitive: Primitive, v: Probe, w: Probe, **params: EqnParam) -> jax.Array:
    """Records the axes of both weights in their product, each with the other as a dense array."""
    record(BinaryCall(primitive, params, w_first=True), w.value, v)
    return record(BinaryCall(primitive, params, w_first=False), v.value, w)


@primitive_handler(ragged_dot_general_p)
def record_ragged_product(
    primitive: Primitive, x: jax.Array, w: Probe, sizes: jax.Array, **params: EqnParam
) -> Result:
    """Records the axes in a ragged product, and computes it."""
    _note("ragged_dot", w, product_of(primitive, (x, w), params), False)
    return primitive.bind(x, w.value, sizes, **params)


def _note(op_name: str, w: Probe, product: Product | None, w_first: bool, **places: Any) -> None:
    if product is None:
        return
    side = 0 if w_first else 1

    def stored(places: Any) -> frozenset[int]:
        return frozenset(axis for i in places for _, _, axis in w.axes[i] if axis != CHOSEN)

    every, tiled = stored(range(w.ndim)), stored(pair[side] for pair in product.summed[-1:])
    shared = every - stored(axis for axis in product.axes[side] if axis is not None)
    use = Use(
        op_name, every, shared, tiled, **{name: stored(found) for name, found in places.items()}
    )
    w.log.uses.setdefault(w.path, []).append(use)


# --- rearrangements ------------------------------------------------------------------------------


@primitive_handler(["reshape", "squeeze", "broadcast_in_dim"])
def reshape_probe(primitive: Primitive, w: Probe, **params: EqnParam) -> Result:
    """Follows axes that are split or merged; a repeated weight is not followed."""
    value = primitive.bind(w.value, **params)
    new = axes_of.new_shape(w.shape, {**params, "sharding": None})  # the value is split already
    axes = None if new is None else axes_of.reshaped(w.axes, new)
    return value if axes is None else w._replace(value=value, axes=axes)


@primitive_handler("transpose")
def transpose_probe(primitive: Primitive, w: Probe, *, permutation: tuple[int, ...]) -> Probe:
    """Follows axes that change places."""
    value = primitive.bind(w.value, permutation=permutation)
    return w._replace(value=value, axes=tuple(w.axes[i] for i in permutation))


@primitive_handler(["slice", "dynamic_slice", "split", "rev"])
def cut_probe(primitive: Primitive, w: Probe, *starts: jax.Array, **params: EqnParam) -> Result:
    """Follows a part of an axis as the same stored axis."""

    def part(value: jax.Array) -> Array:
        axes = []
        for new, old, group in zip(value.shape, w.shape, w.axes, strict=True):
            found = {f[2] for f in group}
            if new != old and len(found) > 1:
                return value
            own = tuple((new, 1, axis) for axis in found) if new > 1 else ()
            axes.append(group if new == old else own)
        return w._replace(value=value, axes=tuple(axes))

    return jax.tree.map(part, primitive.bind(w.value, *starts, **params))


@primitive_handler(["convert_element_type", "neg", "abs", "tanh", "sign", "exp"])
def change_probe(primitive: Primitive, w: Probe, **params: EqnParam) -> Probe:
    """Follows a weight through an elementwise function."""
    return w._replace(value=primitive.bind(w.value, **params))


@binary_handler(["mul", "div", "add", "sub", "max", "min"])
def change_with_dense(call: BinaryCall, x: jax.Array, w: Probe) -> Result:
    """Follows a weight through an elementwise function with an operand that does not enlarge it."""
    value = call(x, w.value)
    return w._replace(value=value) if value.shape == w.shape else value


@primitive_handler(named("tile unstack"))
def leave_probe(primitive: Primitive, w: Probe, *others: jax.Array, **params: EqnParam) -> Result:
    """Makes the weight dense: tiles and pieces are not followed."""
    return primitive.bind(w.value, *others, **params)


@primitive_handler("gather")
def choose_probe(primitive: Primitive, w: Probe, indices: jax.Array, **params: EqnParam) -> Result:
    """Follows matrices that are looked up in a batch: they have the same axes."""
    value = primitive.bind(w.value, indices, **params)
    sizes = params["slice_sizes"]
    numbers = params["dimension_numbers"]
    batch = value.ndim - len(numbers.offset_dims)
    kept = [i for i in range(w.ndim) if i not in numbers.collapsed_slice_dims]
    whole = all(sizes[i] == w.shape[i] for i in kept)
    if not whole or numbers.operand_batching_dims or min(numbers.offset_dims, default=0) < batch:
        return value
    looked_up = tuple(((n, 1, CHOSEN),) if n > 1 else () for n in value.shape[:batch])
    return w._replace(value=value, axes=(*looked_up, *(w.axes[i] for i in kept)))


@primitive_handler("concatenate")
def concatenate_probes(primitive: Primitive, *operands: Probe, dimension: int) -> Concatenated:
    """Follows each of the concatenated weights."""
    return Concatenated(operands, dimension - operands[0].ndim)


@primitive_handler(named("stack"))
def stack_probes(primitive: Primitive, *operands: Probe, axis: int) -> Concatenated:
    """Follows each of the stacked weights."""
    parts = []
    for w in operands:
        axes = (*w.axes[:axis], (), *w.axes[axis:])
        parts.append(w._replace(value=jnp.expand_dims(w.value, axis), axes=axes))
    return Concatenated(tuple(parts), axis - parts[0].ndim)


@primitive_handler(["dynamic_update_slice", "select_n"])
def leave_probes(primitive: Primitive, *operands: Probe, **params: EqnParam) -> Result:
    """Makes weights dense that are written into one another or selected: they are not followed."""
    return primitive.bind(*(w.value for w in operands), **params)
