"""Differences between the supported JAX versions. No other module looks at versions."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.ad_checkpoint
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.sharding import Sharding

from haiku_implicit.core.typing import Array, DType, EqnParams, MeshLike, Primitive, Tree

# For `jax.jit(inline=)`: puts the equations into the jaxpr, without a call. From JAX 0.12 on, True
# inlines only at a later stage.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True

# The sharding that `jax.jit` assumes for an operand or a result if none is given.
UNSPECIFIED: Any = inspect.signature(jax.jit).parameters["in_shardings"].default


# Makes a reference to a copy of an array; None if `checkpoint` can't close over one (before JAX 0.9).
new_ref: Any = jax.new_ref if jax.__version_info__ >= (0, 9) else None

# The class of types that are not arrays (hijax); None before JAX 0.9.
try:
    from jax.experimental.hijax import HiType
except ImportError:  # pragma: no cover
    HiType: Any = None  # type: ignore[no-redef]

# Whether a rule for XLA's partitioner can name the axes that are summed over (not in JAX 0.7.0).
PARTITIONING_RULES = "reduction_factors" in inspect.signature(SdyShardingRule).parameters


def bind(primitive: Primitive, args: Sequence[Array], params: EqnParams) -> list[Array]:
    """Binds a primitive with the parameters of an equation, and returns a list of results.

    `get_bind_params` returns `(subfuns, params)` before JAX 0.10 and `params` from then on.
    """
    found = primitive.get_bind_params(params)
    subfuns, params = found if isinstance(found, tuple) else ((), found)
    out = primitive.bind(*subfuns, *args, **params)
    return list(out) if primitive.multiple_results else [out]


def on_device(x: np.ndarray) -> jax.Array:
    """An array of JAX for one of NumPy, whose memory it may use on a CPU.

    It is placed as `jnp.array` places it, for which JAX 0.10 compiles a program for each shape.
    """
    with jax.ensure_compile_time_eval():
        on_mesh = not jax.sharding.get_abstract_mesh().empty
        return jnp.array(x) if on_mesh else jax.device_put(x)


def scan_arity(params: EqnParams, operands: list[Array]) -> tuple[int, int]:
    """The numbers of constants and of carries of a scan equation.

    From JAX 0.11 on they are in `ft_in`, a flat tree of (constants, carries, xs).
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].update(operands).unpack()
    return len(list(consts)), len(list(carries))


def _primitive_of(fun: Any, *args: Any) -> Primitive:
    """Finds the primitive that a public function binds, for primitives that JAX does not export."""
    return jax.make_jaxpr(fun)(*args).eqns[-1].primitive


def auto_mesh(sizes: Iterable[int], names: Iterable[str]) -> jax.sharding.AbstractMesh:
    """Makes a mesh without devices whose axes are left to XLA (JAX 0.12 makes explicit ones)."""
    sizes, names = tuple(sizes), tuple(names)
    axis_types = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.AbstractMesh(sizes, names, axis_types=axis_types)


def _mapped(fun: Any, specs: tuple[Any, ...], out: Any, check_vma: bool = True) -> Any:
    """The `shard_map` equation of a function of arrays `[1]`, from specs of operands and result."""
    mesh = auto_mesh([1], ["i"])
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
    return jax.make_jaxpr(mapped)(*[jax.ShapeDtypeStruct((1,), jnp.float32)] * len(specs)).eqns[-1]


_WHOLE, _SPLIT = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("i")


def _find_pvary() -> list[Primitive]:
    """Finds the primitive that marks a value as varying over a mesh axis, if this JAX has one."""
    eqns = _mapped(lambda x, y: x * y, (_WHOLE, _SPLIT), _SPLIT).params["jaxpr"].eqns
    return [e.primitive for e in eqns if e.primitive is not jax.lax.mul_p]


def _find_sums() -> list[Primitive]:
    """Finds the sums over a mesh axis: `psum`, with and without `check_vma`, and `psum_scatter`."""
    found = []
    for fun, check in ((jax.lax.psum, True), (jax.lax.psum, False), (jax.lax.psum_scatter, False)):
        eqn = _mapped(lambda x, fun=fun: fun(x, "i"), (_SPLIT,), _WHOLE, check)
        found.append(eqn.params["jaxpr"].eqns[-1].primitive)
    return list(dict.fromkeys(found))


def _find_reshards() -> list[Primitive]:
    """Finds the primitives that change the sharding of an array over explicit mesh axes."""
    axis_types = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.AbstractMesh((1,), ("i",), axis_types=axis_types)
    whole, split = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)) for axis in (None, "i")
    )

    def fun(x: jax.Array) -> jax.Array:
        x = jax.sharding.reshard(x, split)
        return jax.sharding.auto_axes(jnp.sin, axes=("i",), out_sharding=whole)(x)

    one = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=whole)
    primitives = {e.primitive for e in jax.make_jaxpr(fun)(one).eqns}
    return sorted(primitives - {jax.lax.sin_p}, key=str)


def _find_custom_vmap() -> Primitive:
    """Finds the primitive of functions with a custom rule for `vmap`."""
    fun = jax.custom_batching.custom_vmap(lambda x: x * 2)
    fun.def_vmap(lambda size, batched, x: (x * 2, batched[0]))
    return _primitive_of(fun, _SCALAR)


_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def _find_check_effect() -> type:
    """Finds the type of the effect that `checkify.check` leaves in a jaxpr."""
    closed = jax.make_jaxpr(lambda x: checkify.check(x > 0, "positive"))(_SCALAR)
    return type(next(iter(closed.effects)))


CheckEffect = _find_check_effect()

remat_p = _primitive_of(jax.checkpoint(lambda x: x * 2), _SCALAR)
shard_map_p = _mapped(lambda x: x, (_WHOLE,), _WHOLE).primitive
ragged_dot_general_p = _primitive_of(
    jax.lax.ragged_dot,
    jax.ShapeDtypeStruct((1, 1), jnp.float32),
    jax.ShapeDtypeStruct((1, 1, 1), jnp.float32),
    jax.ShapeDtypeStruct((1,), jnp.int32),
)
custom_vmap_p = _find_custom_vmap()
# Before JAX 0.8, `auto_axes` has a separate primitive.
RESHARDS = _find_reshards()
add_any_p = jax.extend.core.primitives.add_jaxvals_p

SUMS = _find_sums()

# Primitives that return their one operand unchanged.
IDENTITIES = [
    jax.lax.copy_p,
    jax.lax.stop_gradient_p,
    _primitive_of(lambda x: jax.ad_checkpoint.checkpoint_name(x, "name"), _SCALAR),
    *_find_pvary(),
]


def polynomials(x: jax.Array) -> list[jax.Array]:
    """A polynomial with and without its optional parameter, if JAX has a primitive for it (0.12)."""
    polynomial: Any = getattr(jax.lax, "polynomial", None)
    return [polynomial(x, [x, x]), polynomial(x, [x, x], unroll=1)] if polynomial else []


# Marks traces that nothing else may use.
_OWN_TRACES: Any = jax.make_user_context(False) if hasattr(jax, "make_user_context") else None


@contextlib.contextmanager
def own_traces(kind: int = 1) -> Iterator[None]:
    """A block whose traces JAX caches separately from those outside it and of another `kind`."""
    if _OWN_TRACES is not None:
        with _OWN_TRACES(kind):
            yield
        return
    # Before JAX 0.8: a setting of all threads that is part of the caches' keys. Only a compiler with
    # remote profiles, inside Google, reads it.
    name = "jax_xla_profile_version"
    old = getattr(jax.config, name)
    jax.config.update(name, old + kind)
    try:
        yield
    finally:
        jax.config.update(name, old)


def trace_of(x: Any) -> Any:
    """The trace of a tracer; None for any other array."""
    return getattr(x, "_trace", None)


# Tells one state of tracing from another; before JAX 0.10 in `jax.core`.
_trace_state: Callable[[], Any] = (
    getattr(jax.extend.core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state
)
_NOT_TRACED = _trace_state()


def is_traced() -> bool:
    """Whether a function is being traced."""
    return _trace_state() != _NOT_TRACED


def manual_axes(params: EqnParams) -> frozenset[str]:
    """The mesh axes that a shard_map equation makes manual."""
    for name in ("newly_manual_axes", "manual_axes"):
        if name in params:
            return frozenset(params[name])
    return frozenset(params["mesh"].axis_names)


def in_manual_region() -> bool:
    """Whether the program of one of several devices is being traced (`shard_map`, `pmap`)."""
    return jax.sharding.AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def vary_like(x: Array, others: Any) -> Array:
    """Marks `x` as varying over the mesh axes of the other arrays (inside `shard_map`)."""
    return vary_over(x, {axis for y in others for axis in varying(y)})


def vary_over(x: Array, axes: Iterable[str]) -> Array:
    """Marks `x` as varying over the axes of a `shard_map`; axes of a `vmap` are left out."""
    mesh = jax.sharding.get_abstract_mesh()
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    manual = {name for name, kind in pairs if kind == jax.sharding.AxisType.Manual}
    axes = tuple(sorted(manual.intersection(axes) - varying(x)))
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    pvary: Any = getattr(jax.lax, "pvary", None)
    return pvary(x, axes)


# In the order of how often tracing meets them.
_ARRAYS = jax.ShapeDtypeStruct, jax.Array, int, float, np.generic, np.ndarray, complex


def hi_type(x: Any) -> Any:
    """The type of a value of hijax (not an array), or of such a type itself; None for anything else."""
    if HiType is None or isinstance(x, _ARRAYS):
        return None
    if isinstance(x, HiType):
        return x
    if hasattr(type(x), "__jax_array__") and not isinstance(x, jax.core.Tracer):
        return None  # an implicit array
    try:
        about = jax.typeof(x)
    except TypeError:
        return None
    return about if isinstance(about, HiType) else None


def varying(x: Any) -> frozenset[str]:
    """The mesh axes that an array or a `jax.ShapeDtypeStruct` varies over (inside `shard_map`)."""
    if not isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
        return frozenset()
    about: Any = jax.typeof(x) if isinstance(x, jax.core.Tracer) else x
    mat = getattr(about, "mat", None) or getattr(about, "manual_axis_type", None)
    return frozenset(mat.varying if mat else getattr(about, "vma", None) or ())


def explicit_sharding(x: Any) -> jax.sharding.NamedSharding | None:
    """The sharding in the type of an array or a `jax.ShapeDtypeStruct`, split or not.

    None without a mesh, and on a mesh whose axes are all left to XLA (none of them is `Explicit`).
    """
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return None
    about: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return about.sharding if is_explicit(about.sharding) else None


def sharding_of_result(fun: Any, *args: Any) -> jax.sharding.NamedSharding | None:
    """The sharding in the type of a function's only result; None as in `explicit_sharding`.

    `jax.eval_shape` omits it if only some axes of a mesh are explicit.
    """
    (about,) = jax.make_jaxpr(fun)(*args).out_avals
    return about.sharding if is_explicit(about.sharding) else None


def within_mesh_of(tree: Tree) -> contextlib.AbstractContextManager[Any]:
    """A block that sets the mesh in the types of a tree's leaves, if another mesh is current.

    If no mesh is set, arrays bring theirs, and JAX can't set one around eager operations. JAX 0.7.0
    can't set one here at all.
    """
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    use: Any = getattr(jax.sharding, "use_abstract_mesh", None)
    current = jax.sharding.get_abstract_mesh()
    if use is None or current.empty:
        return context
    meshes = set(map(_mesh_of, jax.tree.leaves(tree))) - {None}
    return context if len(meshes) != 1 or current in meshes else use(*meshes)


def _mesh_of(x: Any) -> jax.sharding.AbstractMesh | None:
    """The mesh in the type of an array or a struct, or None."""
    about: Any = jax.typeof(x) if isinstance(x, jax.Array) else x
    mesh: MeshLike | None = getattr(getattr(about, "sharding", None), "mesh", None)
    return None if mesh is None or mesh.empty else mesh.abstract_mesh


def in_explicit_mesh() -> bool:
    """Whether the current mesh (`jax.set_mesh`) has explicit axes, which are a part of types."""
    return jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def is_same_split(sharding: Sharding, other: Any, ndim: int) -> bool:
    """Whether two shardings cut an array in the same way, over devices known only by number.

    JAX calls the same private method on the results of partitioning rules. The public methods also
    compare devices.
    """
    whole = sharding.is_fully_replicated, other.is_fully_replicated
    if any(whole):
        return all(whole)
    return bool(sharding._to_xla_hlo_sharding(ndim) == other._to_xla_hlo_sharding(ndim))


def is_explicit(sharding: Sharding | None) -> bool:
    """Whether a sharding is on a mesh with explicit axes, which are a part of arrays' types."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return False
    return jax.sharding.AxisType.Explicit in sharding.mesh.axis_types


def struct(
    shape: Sequence[int],
    dtype: DType,
    weak_type: bool = False,
    like: Iterable[Array] = (),
    sharding: Sharding | None = None,
) -> jax.ShapeDtypeStruct:
    """Makes a `jax.ShapeDtypeStruct` that varies over each mesh axis that any of `like` varies over."""
    axes = frozenset().union(*map(varying, like))
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type, sharding=sharding)
    options: dict[str, Any] = {"vma": axes}
    if hasattr(jax.sharding, "ManualAxisType"):
        options = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)}
    mesh = jax.sharding.get_abstract_mesh()  # the axes are looked up in it
    whole = jax.sharding.PartitionSpec(*[None] * len(shape))
    sharding = jax.sharding.NamedSharding(mesh, whole)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type, sharding=sharding, **options)


def pallas_load(ref: Any, index: Any, mask: Any) -> jax.Array:
    """Reads a reference at this index in a Pallas kernel, with zeros where `mask` is False."""
    options = {} if mask is None else dict(mask=mask, other=0)
    return _pallas_access("load", ref, index, **options)


def pallas_store(ref: Any, index: Any, value: jax.Array, mask: Any) -> None:
    """Writes to a reference at this index in a Pallas kernel, except where `mask` is False."""
    _pallas_access("store", ref, index, value, mask=mask)


def _pallas_access(name: str, ref: Any, index: Any, *values: jax.Array, **options: Any) -> Any:
    """Calls `load` or `store`, which are functions of `pallas` itself before JAX 0.8."""
    # Imported here, as Pallas takes longer to import than this library.
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    if hasattr(triton, name):
        return getattr(triton, name)(ref.at[index], *values, **options)
    return getattr(pallas, name)(ref, index, *values, **options)
