"""The product primitive where XLA partitions a program: each device multiplies its own part.

Without a rule XLA looks into the product, decodes blocks of the matrix, and moves those. The rule here
says which axes of the operands belong together, so that activations, codes and scales are split by
these and nothing else, and each device runs the kernel on what it has:

- where rows of the activations are split, the codes that lie elsewhere are gathered, as codes;
- where outputs are split, so is the result;
- where the contracted axis is split, between groups, each device's product is a part of the sum, and
  these parts are added up.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

from haiku_implicit.core import compat
from haiku_implicit.core.sharding import num_parts, padded_spec
from haiku_implicit.numerics import formats
from haiku_implicit.numerics.layout import Order
from haiku_implicit.numerics.options import activation_of
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix

Names = tuple[str, ...]


def partitioned(
    product: Callable[..., jax.Array], treedef: Any, order: Order, num_devices: int
) -> Any:
    """The product as a function that XLA splits over devices, each of which has it of its own parts.

    Args:
      product: of `x` and the leaves of a quantized matrix.
      treedef: of the matrix.
      order: of the axes of its leaves.
      num_devices: of the program.
    """

    def partition(mesh: Any, operands: Any, _: Any) -> Any:
        x, q = operands[0], treedef.unflatten(operands[1:-1])
        split = _Split.of(x, q, order, mesh)

        def local(*own: jax.Array) -> jax.Array:
            out = product(*own[:-1])
            return jax.lax.psum(out, split.contracted) if split.contracted else out

        specs = [split.of_x(), *jax.tree.leaves(split.of_matrix(q, order), is_leaf=_is_spec)]
        specs.append(PartitionSpec())  # the table of sizes
        places = tuple(NamedSharding(mesh, spec) for spec in specs)
        return mesh, local, NamedSharding(mesh, split.of_result()), places

    def infer(mesh: Any, operands: Any, _: Any) -> Any:
        q = treedef.unflatten(operands[1:-1])
        return NamedSharding(mesh, _Split.of(operands[0], q, order, mesh).of_result())

    def run(*operands: jax.Array) -> jax.Array:
        q = treedef.unflatten(operands[1:])
        own = custom_partitioning(lambda *operands: product(*operands[:-1]))
        own.def_partition(partition, infer, sharding_rule=lambda *_: _rule(q, order))
        return own(*operands, _sizes(q, order, num_devices))

    return run


@functools.cache
def needs_devices() -> Any:
    """A jaxpr that has a partitioned function in it; None where nothing is partitioned by this rule.

    JAX tells the rule that lowers a primitive the mesh of the program, which partitioning needs, only
    where such a function is in the program. So the primitive has this among its parameters. Then JAX
    wants one mesh, of devices that are there: `HAIKU_IMPLICIT_PARTITION=0` in the environment leaves
    products to XLA, for programs with several meshes or an abstract one.
    """
    wanted = os.environ.get("HAIKU_IMPLICIT_PARTITION", "1") != "0"
    if not wanted or not compat.PARTITIONING_RULES or len(jax.devices()) == 1:
        return None
    fun = custom_partitioning(lambda x: x)
    fun.def_partition(lambda *_: None, sharding_rule="->")
    return jax.make_jaxpr(fun)(0.0)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


class _Split(NamedTuple):
    """The mesh axes by which a product `[batch, m, i] @ [batch, i, o]` is split.

    Attributes:
      batch, rows, contracted, columns: for the axes `batch`, `m`, `i` and `o`.
    """

    batch: Names
    rows: Names
    contracted: Names
    columns: Names

    @classmethod
    def of(cls, x: Any, q: QuantizedMatrix, order: Order, mesh: Any) -> "_Split":
        """What is best where the operands lie as they do.

        Where rows are split, so that gradients are summed over devices, everything else gives way. Of
        two operands of which only one has its contracted axis split, the smaller is moved: that
        operand, or the parts of the result.
        """
        of_batch, of_rows, of_x = _names_by_axis(x)
        codes = _names_by_axis(q.codes)
        of_q, columns = codes[order[-1]], codes[order[-2]]
        inputs, outputs = _pieces(q), int(q.codes.shape[order[-2]])
        if q.axis == -1:
            (of_q, columns), (inputs, outputs) = (columns, of_q), (outputs, inputs)
        taken: set[str] = set()

        def left(names: Sequence[str], length: int) -> Names:
            """Those that are not taken and cut the axis evenly."""
            found: list[str] = []
            for name in names:
                if name not in taken and length % num_parts((*found, name), mesh) == 0:
                    found.append(name)
                    taken.add(name)
            return tuple(found)

        batch = left(of_batch, x.shape[0]) if len(order) == 3 else ()
        rows = left(of_rows, x.shape[1])
        columns = left(columns, outputs)
        # The sum over devices moves each result twice.
        sums = 2 * x.shape[1] * outputs * x.dtype.itemsize
        other = x.shape[1:] if of_x else q.codes.shape[-2:]
        whole = math.prod(other) * (x if of_x else q.codes).dtype.itemsize
        cheap = set(of_x) & set(of_q) or sums <= whole
        contracted: Names = ()
        if cheap and _sums_in_parts(q):
            contracted = left(tuple(dict.fromkeys((*of_x, *of_q))), inputs)
        return cls(batch, rows, contracted, columns)

    def of_x(self) -> PartitionSpec:
        return PartitionSpec(_entry(self.batch), _entry(self.rows), _entry(self.contracted))

    def of_result(self) -> PartitionSpec:
        return PartitionSpec(_entry(self.batch), _entry(self.rows), _entry(self.columns))

    def of_matrix(self, q: QuantizedMatrix, order: Order) -> QuantizedMatrix:
        """The matrix with specs in place of its leaves."""
        along, across = (self.contracted, self.columns)[:: 1 if q.axis == -2 else -1]

        def spec(of_last: Names) -> PartitionSpec:
            entries: list[Any] = [None] * len(order)
            if len(order) == 3:
                entries[order[0]] = _entry(self.batch)
            entries[order[-2]], entries[order[-1]] = _entry(across), _entry(of_last)
            return PartitionSpec(*entries)

        # A scale per channel is that of all parts of the channel.
        return q.map_scales(lambda _: spec(along if q.num_groups > 1 else ()))._replace(
            codes=spec(along)
        )


def _names_by_axis(x: Any) -> list[Names]:
    """The mesh axes by which each axis of an operand is split."""
    entries = padded_spec(getattr(x.sharding, "spec", ()), len(x.shape))
    return [y if isinstance(y, tuple) else () if y is None else (y,) for y in entries]


def _entry(names: Names) -> Any:
    return names or None


def _pieces(q: QuantizedMatrix) -> int:
    """Into how many parts the grouped axis can be cut: between groups, or anywhere in one of bytes."""
    one_byte = formats.find(q.format).bits == 8 and not q.padding
    return q.codes.shape[-1] if q.num_groups == 1 and one_byte else q.num_groups


def _sums_in_parts(q: QuantizedMatrix) -> bool:
    """Whether parts of the contracted axis can be multiplied apart.

    Activations that are rounded by rows are so by whole rows, or by the parts that meet a group.
    """
    if q.activation is None:
        return True
    return q.axis == -2 and q.num_groups > 1 and activation_of(q.activation).groups


def _rule(q: Any, order: Order) -> SdyShardingRule:
    """The axes of `x`, codes, scale (and offset), a table of sizes, and the result, by names.

    Axes of one name split together, whatever their lengths: codes, and the scales of their groups.
    """
    lead = [f"l{i}" for i in range(len(order) - 2)]
    inputs, outputs = ("k", "r") if q.axis == -2 else ("r", "k")
    batch: Any = "b" if not lead else lead[0] if len(lead) == 1 else CompoundFactor(*lead)

    def stored(last: str) -> tuple[str, ...]:
        at = dict(zip(order, (*lead, "r", last), strict=True))
        return tuple(at[i] for i in range(len(order)))

    of_scale = stored("k" if q.num_groups > 1 else "s")
    scales = [of_scale] * (1 if q.offset is None else 2)
    operands = [(batch, "m", inputs), stored("k"), *scales, ("r", "k")]
    summed = (inputs,) if _sums_in_parts(q) else ()
    return SdyShardingRule(
        tuple(ArrayMapping(*axes) for axes in operands),
        (ArrayMapping(batch, "m", outputs),),
        reduction_factors=summed,
        need_replication_factors=() if summed else (inputs,),
    )


def _sizes(q: QuantizedMatrix, order: Order, num_devices: int) -> jax.Array:
    """A table whose axes are as long as there are parts of rows and of groups at most.

    XLA takes the shortest axis of a name for its length. Where two axes are split by one mesh axis, it
    keeps the split of the operand that is larger by these lengths: so that is `x`, if its rows are
    split at all.
    """
    rows, groups = q.codes.shape[order[-2]], _pieces(q)
    return jnp.zeros((math.gcd(rows, num_devices), math.gcd(groups, num_devices)), jnp.uint8)
