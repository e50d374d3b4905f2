"""`by_parts`: any product of arrays with named axes, as a JAX primitive that XLA splits by these names.

Convolutions and ragged products are functions of XLA's own operations, which decode stored codes. By
itself, XLA would move the decoded values. As one primitive with named axes (`partitioned.Axes`), they
move codes, and each device decodes its own part. Derivatives and batches of such a function are such
functions, too; their names follow from the function's names. On one device the functions are called
directly.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from haiku_implicit.core import compat, interpreter
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.sharding import is_spec, is_split, part_specs
from haiku_implicit.core.typing import Array, Aval, EqnParam, EqnParams, MeshLike
from haiku_implicit.quantized.products.partitioned import (
    WHOLE,
    Axes,
    Names,
    Parts,
    devices_of,
    needs_devices,
    partitioned,
)

by_parts_p = Primitive("by_parts")

Fun = Callable[..., jax.Array]


def is_wanted(*operands: Array) -> bool:
    """Whether XLA may have to split a product of these: not on one device, nor within a `shard_map`.

    Explicit axes of a mesh have other rules.
    """
    leaves = jax.tree.leaves(operands)
    return (
        needs_devices() is not None
        and not any(map(compat.varying, leaves))
        and not is_split(leaves)
    )


def by_parts(fun: Fun, axes: Axes, *operands: Array) -> jax.Array:
    """Calls a function that XLA splits over devices by the names of axes.

    Args:
      fun: a hashable function of dense arrays; also called with `parts=`, the part of the whole that
        they are. Linear in each floating operand, up to a constant.
      axes: the names of the axes of its operands and of its result.
      *operands: arrays. Implicit ones move as stored, and are dense in `fun`.
    """
    if not any(map(is_implicit, operands)):
        return _bind(fun, axes, operands, needs_devices())
    leaves: list[Array] = []
    treedefs: list[tuple[Any, int] | None] = []
    names: list[Names] = []
    pieces = list(axes.pieces)
    for x, own in zip(operands, axes.operands, strict=True):
        of_leaves = names_of_leaves(x, own) if is_implicit(x) else None
        if of_leaves is None:
            x = interpreter.materialize_array(x) if is_implicit(x) else x
            leaves, treedefs, names = [*leaves, x], [*treedefs, None], [*names, own]
            continue
        own_leaves, treedef = jax.tree.flatten(x)
        leaves += own_leaves
        treedefs.append((treedef, len(own_leaves)))
        names += of_leaves
        pieces += pieces_of(x, own)
    expanded = Axes(tuple(names), axes.result, tuple(pieces))
    return _bind(_Expanded(fun, tuple(treedefs)), expanded, leaves, needs_devices())


def _bind(fun: Fun, axes: Axes, operands: Sequence[Array], mesh: MeshLike | None) -> jax.Array:
    out: jax.Array = by_parts_p.bind(*operands, fun=fun, axes=axes, mesh=mesh)
    return out


@dataclasses.dataclass(frozen=True)
class _Expanded:
    """A function of the leaves of its operands.

    Attributes:
      fun: the function of dense operands.
      treedefs: the structure of each operand, and the number of its leaves; None for a dense operand.
    """

    fun: Any
    treedefs: tuple[tuple[Any, int] | None, ...]

    def __call__(self, *leaves: jax.Array, parts: Parts) -> jax.Array:
        rest, operands = list(leaves), []
        for treedef in self.treedefs:
            size = 1 if treedef is None else treedef[1]
            own, rest = rest[:size], rest[size:]
            x = own[0] if treedef is None else treedef[0].unflatten(own)
            operands.append(interpreter.materialize_array(x) if is_implicit(x) else x)
        return self.fun(*operands, parts=parts)


# --- implicit operands ---------------------------------------------------------------------------
# A type's `field_axes` say which axes of its leaves are axes of the dense array.


def names_of_leaves(x: Array, names: Names) -> list[Names] | None:
    """Returns the names of the axes of an implicit array's leaves, from the names of its own axes.

    None if the type does not define them.
    """
    own = [name for name in names if name is not None]
    part = part_specs(x, PartitionSpec(*names), compat.auto_mesh([1] * len(own), own))
    if part is NotImplemented:
        return None
    found = []
    specs = jax.tree.leaves(part, is_leaf=is_spec)
    for leaf, spec in zip(jax.tree.leaves(x), specs, strict=True):
        entries = (*spec, *[None] * (len(leaf.shape) - len(spec)))
        # One scale for a whole axis belongs to all its parts.
        found.append(tuple(None if n == 1 else e for e, n in zip(entries, leaf.shape, strict=True)))
    return found


def pieces_of(x: Array, names: Names) -> list[tuple[str, int]]:
    """Returns for each axis name of an implicit array the most parts that its leaves can be cut into.

    The numbers of parts are the divisors of the number of devices.
    """
    count = jax.device_count()
    numbers = [n for n in range(count, 0, -1) if count % n == 0]
    own = [name for name in names if name is not None]
    return [(name, next(n for n in numbers if _can_be_cut(x, names, name, n))) for name in own]


def _can_be_cut(x: Array, names: Names, name: str, parts: int) -> bool:
    """Whether the leaves of each part make an array with the static fields of the whole one."""
    own = (n if n == name else None for n in names)
    part = part_specs(x, PartitionSpec(*own), compat.auto_mesh([parts], [name]))
    structures: list[Any] = [jax.tree.structure(y, is_leaf=is_spec) for y in (part, x)]
    return parts == 1 or structures[0] == structures[1]


def _expand(operands: list[Array], params: EqnParams) -> list[Array]:
    """Handles operands that are implicit although a type's rule takes them for dense arrays."""
    return [by_parts(params["fun"], params["axes"], *operands)]


interpreter.HIGHER_ORDER[by_parts_p] = _expand


# --- the primitive's own rules -------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _out_aval(fun: Fun, avals: tuple[Aval, ...]) -> Any:
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    with jax.numpy_dtype_promotion("standard"):
        closed = jax.make_jaxpr(functools.partial(fun, parts=WHOLE))(*structs)
    (out,) = closed.out_avals
    return out


def _abstract(*operands: Aval, fun: Fun, **_: Any) -> Any:
    return _out_aval(fun, operands)


@functools.partial(jax.jit, static_argnames=("fun", "axes", "mesh"))
def _run(*operands: jax.Array, fun: Fun, **params: EqnParam) -> jax.Array:
    """Compiles the primitive outside of any trace; under `disable_jit` it calls the function."""
    if any(isinstance(x, jax.core.Tracer) for x in operands):
        return _bind(fun, operands=operands, **params)
    return fun(*operands, parts=WHOLE)


def _lower(ctx: Any, *operands: Array, fun: Fun, axes: Axes, mesh: MeshLike) -> Any:
    run: Fun = functools.partial(fun, parts=WHOLE)
    devices = devices_of(ctx.module_context)
    if mesh is not None and devices is not None and devices.program is None:
        run = partitioned(_opaque(fun, axes), axes, devices)
    with jax.numpy_dtype_promotion("standard"):
        return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)


def _opaque(fun: Fun, axes: Axes) -> Fun:
    """Wraps the whole function in one primitive: JAX partitions only functions without constants."""

    def run(*operands: jax.Array, parts: Parts) -> jax.Array:
        if parts is WHOLE:
            return _bind(fun, axes, operands, None)
        with jax.numpy_dtype_promotion("standard"):
            return fun(*operands, parts=parts)

    return run


@dataclasses.dataclass(frozen=True)
class _Tangent:
    """The derivative of a function along tangents of some operands, which come after the operands."""

    fun: Any
    moving: tuple[int, ...]

    def __call__(self, *operands: jax.Array, parts: Parts) -> jax.Array:
        count = len(operands) - len(self.moving)
        primals, tangents = operands[:count], operands[count:]

        def of_moving(*moving: jax.Array) -> jax.Array:
            own = list(primals)
            for i, x in zip(self.moving, moving, strict=True):
                own[i] = x
            return self.fun(*own, parts=parts)

        out: jax.Array = jax.jvp(of_moving, tuple(primals[i] for i in self.moving), tangents)[1]
        return out


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Array], *, fun: Fun, axes: Axes, mesh: MeshLike
) -> tuple[Array, Array]:
    out = _bind(fun, axes, primals, mesh)
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero))
    if not moving:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    names = (*axes.operands, *(axes.operands[i] for i in moving))
    operands = (*primals, *(tangents[i] for i in moving))
    return out, _bind(_Tangent(fun, moving), Axes(names, axes.result, axes.pieces), operands, mesh)


@dataclasses.dataclass(frozen=True)
class _Pulled:
    """The cotangent of one unknown operand, from the known operands and the result's cotangent.

    Attributes:
      fun: the function of all operands, linear in the unknown ones.
      unknown: the positions of the unknown operands.
      wrt: the position of the operand whose cotangent this is.
      structs: the shape, dtype and axis names of each unknown operand.
    """

    fun: Any
    unknown: tuple[int, ...]
    wrt: int
    structs: tuple[tuple[tuple[int, ...], Any, Names], ...]

    def __call__(self, *operands: jax.Array, parts: Parts) -> jax.Array:
        *known, ct = operands
        zeros = {
            i: jnp.zeros([n // parts.count(a) for n, a in zip(shape, own, strict=True)], dtype)
            for i, (shape, dtype, own) in zip(self.unknown, self.structs, strict=True)
        }

        def of_one(x: jax.Array) -> jax.Array:
            rest, given = iter(known), zeros | {self.wrt: x}
            count = len(known) + len(given)
            own = [given[i] if i in given else next(rest) for i in range(count)]
            return self.fun(*own, parts=parts)

        (out,) = jax.vjp(of_one, zeros[self.wrt])[1](ct)
        return out


def _transpose(ct: Array, *operands: Array, fun: Fun, axes: Axes, mesh: MeshLike) -> Any:
    if isinstance(ct, ad.Zero):
        return [None] * len(operands)
    unknown = tuple(i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
    avals = [operands[i].aval for i in unknown]
    structs = tuple(
        (x.shape, np.dtype(x.dtype), axes.operands[i]) for i, x in zip(unknown, avals, strict=True)
    )
    known = [i for i in range(len(operands)) if i not in unknown]
    names = (*(axes.operands[i] for i in known), axes.result)
    found: list[Any] = [None] * len(operands)
    for i in unknown:
        of_one = Axes(names, axes.operands[i], axes.pieces)
        pulled = _Pulled(fun, unknown, i, structs)
        found[i] = _bind(pulled, of_one, [*(operands[j] for j in known), ct], mesh)
    return found


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A function mapped over one more axis of some operands, their first."""

    fun: Any
    in_axes: tuple[int | None, ...]

    def __call__(self, *operands: jax.Array, parts: Parts) -> jax.Array:
        out: jax.Array = jax.vmap(functools.partial(self.fun, parts=parts), self.in_axes)(*operands)
        return out


def _batch(operands: Sequence[Array], dims: Any, *, fun: Fun, axes: Axes, mesh: MeshLike) -> Any:
    new = f"mapped{sum(name.startswith('mapped') for name in axes.names)}"
    pairs = list(zip(operands, dims, strict=True))
    stacked = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
    in_axes = tuple(None if d is None else 0 for d in dims)
    names = tuple(
        own if d is None else (new, *own) for own, d in zip(axes.operands, dims, strict=True)
    )
    mapped = Axes(names, (new, *axes.result), axes.pieces)
    return _bind(_Mapped(fun, in_axes), mapped, stacked, mesh), 0


by_parts_p.def_impl(_run)
by_parts_p.def_abstract_eval(_abstract)
ad.primitive_jvps[by_parts_p] = _jvp
ad.primitive_transposes[by_parts_p] = _transpose
batching.primitive_batchers[by_parts_p] = _batch
mlir.register_lowering(by_parts_p, _lower)
