"""`by_parts`: any product of arrays with named axes, as a JAX primitive that XLA splits by these names.

Convolutions and ragged products are functions of XLA's own operations, which decode stored codes. By
itself, XLA would move the decoded values. As one primitive with named axes (`partitioned.Axes`), they
move codes, and each device decodes its own shard. Derivatives and batches of such a function are such
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
from haiku_implicit.core.sharding import is_spec, is_split, shard_specs
from haiku_implicit.core.typing import Array, Aval, EqnParam, EqnParams, MeshLike, TreeDef
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


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A function with its first arguments fixed: hashable, unlike `functools.partial`.

    Attributes:
      fun: called as `fun(*arguments, *operands, parts=...)`.
      arguments: hashable.
    """

    fun: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self, *operands: jax.Array, parts: Parts) -> Any:
        return self.fun(*self.arguments, *operands, parts=parts)


def by_parts(fun: Fun, axes: Axes, *operands: Array, dense: bool = True) -> jax.Array:
    """Calls a function that XLA splits over devices by the names of axes.

    Args:
      fun: a hashable function of arrays; also called with `parts=`, the part of the whole that they
        are. Linear in each floating operand, up to a constant.
      axes: the names of the axes of its operands and of its result.
      *operands: arrays. Implicit ones move as stored.
      dense: whether they are dense in `fun`.
    """
    leaves: list[Array] = []
    treedefs: list[TreeDef] = []
    names: list[Names] = []
    pieces = list(axes.pieces)
    for x, own in zip(operands, axes.operands, strict=True):
        of_leaves: list[Names] | None = [own]
        if is_implicit(x):
            of_leaves = _names_of_leaves(x, own)
            if of_leaves is None and not dense:
                return fun(*operands, parts=WHOLE)
            if of_leaves is None:
                x, of_leaves = interpreter.materialize_array(x), [own]
            else:
                pieces += _pieces_of(x, own)
        own_leaves, treedef = jax.tree.flatten(x)
        leaves += own_leaves
        treedefs.append(treedef)
        names += of_leaves or []
    expanded = Axes(tuple(names), axes.result, tuple(pieces))
    return _bind(
        Fixed(_of_leaves, (fun, tuple(treedefs), dense)), expanded, leaves, needs_devices()
    )


def _bind(fun: Fun, axes: Axes, operands: Sequence[Array], mesh: MeshLike | None) -> jax.Array:
    return by_parts_p.bind(*operands, fun=fun, axes=axes, mesh=mesh)


def _of_leaves(
    fun: Fun, treedefs: Sequence[TreeDef], dense: bool, *leaves: jax.Array, parts: Parts
) -> jax.Array:
    """Calls a function, given the leaves of its operands, which have these structures."""
    rest, operands = list(leaves), []
    for treedef in treedefs:
        x = treedef.unflatten(rest[: treedef.num_leaves])
        operands.append(interpreter.materialize_array(x) if dense and is_implicit(x) else x)
        rest = rest[treedef.num_leaves :]
    return fun(*operands, parts=parts)


# --- implicit operands ---------------------------------------------------------------------------
# A type's `field_axes` say which axes of its leaves are axes of the dense array.


def _names_of_leaves(x: Array, names: Names) -> list[Names] | None:
    """Returns the names of the axes of an implicit array's leaves, from the names of its own axes.

    None if the type does not define them.
    """
    own = [name for name in names if name is not None]
    part = shard_specs(x, PartitionSpec(*names), compat.auto_mesh([1] * len(own), own))
    if part is NotImplemented:
        return None
    found = []
    specs = jax.tree.leaves(part, is_leaf=is_spec)
    for leaf, spec in zip(jax.tree.leaves(x), specs, strict=True):
        entries = (*spec, *[None] * (len(leaf.shape) - len(spec)))
        # One scale for a whole axis belongs to all its parts.
        found.append(tuple(None if n == 1 else e for e, n in zip(entries, leaf.shape, strict=True)))
    return found


def _pieces_of(x: Array, names: Names) -> list[tuple[str, int]]:
    """Returns for each axis name of an implicit array the most parts that its leaves can be cut into.

    The numbers of parts are the divisors of the number of devices.
    """
    count = jax.device_count()
    numbers = [n for n in range(count, 0, -1) if count % n == 0]
    own = [name for name in names if name is not None]
    return [(name, next(n for n in numbers if _can_be_cut(x, names, name, n))) for name in own]


def _can_be_cut(x: Array, names: Names, name: str, parts: int) -> bool:
    """Whether the leaves of each shard make an array with the static fields of the whole one."""
    own = (n if n == name else None for n in names)
    part = shard_specs(x, PartitionSpec(*own), compat.auto_mesh([parts], [name]))
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
    if mesh is not None and devices and devices.number > 1 and devices.program is None:
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


def _tangent(fun: Fun, moving: Sequence[int], *operands: jax.Array, parts: Parts) -> jax.Array:
    """Differentiates along tangents of some operands, which come after the operands."""
    count = len(operands) - len(moving)
    primals, tangents = operands[:count], operands[count:]

    def of_moving(*own: jax.Array) -> jax.Array:
        given = dict(zip(moving, own, strict=True))
        return fun(*(given.get(i, x) for i, x in enumerate(primals)), parts=parts)

    return jax.jvp(of_moving, tuple(primals[i] for i in moving), tangents)[1]


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Array], *, fun: Fun, axes: Axes, mesh: MeshLike
) -> tuple[Array, Array]:
    out = _bind(fun, axes, primals, mesh)
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero))
    if not moving:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    names = (*axes.operands, *(axes.operands[i] for i in moving))
    operands = (*primals, *(tangents[i] for i in moving))
    tangent = Fixed(_tangent, (fun, moving))
    return out, _bind(tangent, Axes(names, axes.result, axes.pieces), operands, mesh)


# The position, the shape, the dtype and the axis names of an operand.
_Unknown = tuple[int, tuple[int, ...], Any, Names]


def _pulled(
    fun: Fun, unknown: Sequence[_Unknown], wrt: int, *operands: jax.Array, parts: Parts
) -> jax.Array:
    """Returns the cotangent of one unknown operand.

    Args:
      fun: the function of all operands, linear in the unknown ones.
      unknown: the unknown operands.
      wrt: the position of the operand whose cotangent this is.
      *operands: the known operands, and the result's cotangent.
      parts: the parts that these are.
    """
    *known, ct = operands
    zeros = {
        i: jnp.zeros([n // parts.count(a) for n, a in zip(shape, own, strict=True)], dtype)
        for i, shape, dtype, own in unknown
    }

    def of_one(x: jax.Array) -> jax.Array:
        rest, given = iter(known), zeros | {wrt: x}
        count = len(known) + len(given)
        return fun(*(given[i] if i in given else next(rest) for i in range(count)), parts=parts)

    (out,) = jax.vjp(of_one, zeros[wrt])[1](ct)
    return out


def _transpose(ct: Array, *operands: Array, fun: Fun, axes: Axes, mesh: MeshLike) -> Any:
    if isinstance(ct, ad.Zero):
        return [None] * len(operands)
    avals = {i: x.aval for i, x in enumerate(operands) if ad.is_undefined_primal(x)}
    unknown = tuple((i, x.shape, np.dtype(x.dtype), axes.operands[i]) for i, x in avals.items())
    known = [i for i in range(len(operands)) if i not in avals]
    names = (*(axes.operands[i] for i in known), axes.result)
    found: list[Any] = [None] * len(operands)
    for i in avals:
        pulled = Fixed(_pulled, (fun, unknown, i))
        of_one = Axes(names, axes.operands[i], axes.pieces)
        found[i] = _bind(pulled, of_one, [*(operands[j] for j in known), ct], mesh)
    return found


def _mapped(fun: Fun, in_axes: Any, *operands: jax.Array, parts: Parts) -> jax.Array:
    """Maps a function over one more axis of some operands, their first."""
    return jax.vmap(functools.partial(fun, parts=parts), in_axes)(*operands)


def _batch(operands: Sequence[Array], dims: Any, *, fun: Fun, axes: Axes, mesh: MeshLike) -> Any:
    new = f"mapped{sum(name.startswith('mapped') for name in axes.names)}"
    stacked: list[Array] = []
    names: list[Names] = []
    for x, own, d in zip(operands, axes.operands, dims, strict=True):
        stacked.append(x if d is None else jnp.moveaxis(x, d, 0))
        names.append(own if d is None else (new, *own))
    in_axes = tuple(None if d is None else 0 for d in dims)
    mapped = Axes(tuple(names), (new, *axes.result), axes.pieces)
    return _bind(Fixed(_mapped, (fun, in_axes)), mapped, stacked, mesh), 0


by_parts_p.def_impl(_run)
by_parts_p.def_abstract_eval(_abstract)
ad.primitive_jvps[by_parts_p] = _jvp
ad.primitive_transposes[by_parts_p] = _transpose
batching.primitive_batchers[by_parts_p] = _batch
mlir.register_lowering(by_parts_p, _lower)
