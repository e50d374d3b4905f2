"""Where the parameters of a model lie on a mesh of devices, from what is known of the dense ones."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from haiku_implicit.adapters.adapter import Adapter
from haiku_implicit.arrays.axes import parts
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.matrix_view import MatrixView
from haiku_implicit.core.array import is_implicit, known_struct
from haiku_implicit.core.sharding import num_parts, padded_spec
from haiku_implicit.core.transform import tree_flatten_with_implicit
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.params.selection import describe

# One for all; a tree, or a prefix of one; or rules, of which the first that matches counts.
Specs = Any


def shardings(params: Any, specs: Specs, mesh: Any) -> Any:
    """The sharding of every array of a tree, from the partition specs of the dense weights.

    An implicit array is split as the dense one would be: LoRA's factors along the axes that they have,
    codes and scales between groups, in their own order of storage. Give what comes out to
    `jax.device_put`, as `in_shardings` and `out_shardings` to `jax.jit`, or for restoring checkpoints.
    (A dense sharding given there for an implicit array is taken for each of its leaves, and splits a
    weight along another axis than it says.)

    Args:
      params: parameters, dense or implicit, arrays or `jax.ShapeDtypeStruct`; or another tree of such
        arrays, such as an optimizer's state. (A part of an implicit array, such as LoRA's factors
        without the weight there, is replicated. `optimizer.init` of parameters that are placed already
        gives a state that is.)
      specs: one `PartitionSpec` for all; or a tree of them, like `params` or a prefix of it, in which
        an implicit array has one, and None stands for a replicated array; or rules `[(pattern, spec),
        ...]`, of which the first counts whose regular expression matches the whole path, the keys of
        the tree joined by `/`.
      mesh: a `jax.sharding.Mesh`, or an abstract one.

    Returns:
      The tree with a `NamedSharding` in place of each array, within implicit ones, too.

    Raises:
      ValueError: for a parameter that no rule matches, whose spec has too many axes, or that can't be
        split so: it names the parameter, its groups, and the number of shards.
      TypeError: for another kind of mesh, or of specs.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ('model',), axis_types=(jax.sharding.AxisType.Auto,))
      >>> params = {'linear': {'w': jnp.ones((8, 4)), 'b': jnp.zeros(4)}}
      >>> params = hki.add_lora(hki.quantize_params(params, dtype='int8'), 0, rank=2)
      >>> found = hki.shardings(params, [('.*/w', P(None, 'model')), ('.*', P())], mesh)
      >>> found['linear']['w'].w.codes.spec, found['linear']['w'].a.spec, found['linear']['b'].spec
      (P('model', None), P(None, None), P())
      >>> placed = jax.device_put(params, found)
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"mesh: expected a jax.sharding.Mesh, as jax.make_mesh((jax.device_count(),), ('model',)) "
            f"makes it, got {mesh!r}"
        )
    paths, leaves, treedef = _flattened(params)
    found = [
        _placed(path, x, spec, mesh)
        for path, x, spec in zip(paths, leaves, _specs_of(paths, params, specs), strict=True)
    ]
    return treedef.unflatten(found)


def _flattened(params: Any) -> tuple[list[str], list[Any], Any]:
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_implicit)
    paths = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in pairs]
    return paths, [x for _, x in pairs], treedef


def _specs_of(paths: Sequence[str], params: Any, specs: Specs) -> list[PartitionSpec]:
    """The spec of each array."""
    if isinstance(specs, PartitionSpec):
        return [specs] * len(paths)
    if isinstance(specs, list) and all(isinstance(x, tuple) and len(x) == 2 for x in specs):
        return [_by_rules(path, specs) for path in paths]

    def repeated(spec: Any, below: Any) -> Any:
        return [PartitionSpec() if spec is None else spec] * len(
            tree_flatten_with_implicit(below)[0]
        )

    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)  # noqa: E731
    try:
        nested = jax.tree.map(repeated, specs, params, is_leaf=is_spec)
    except ValueError as e:
        first = str(e).splitlines()[0]
        raise ValueError(
            "specs: expected a PartitionSpec, a tree like params or a prefix of it, or a list of rules "
            f"[(pattern, spec), ...]: {first}"
        ) from e
    found = jax.tree.leaves(nested, is_leaf=is_spec)
    wrong = next((x for x in found if not is_spec(x)), None)
    if wrong is not None:
        raise TypeError(f"specs: expected PartitionSpecs in the tree, got {wrong!r}")
    return found


def _by_rules(path: str, rules: Sequence[tuple[Any, PartitionSpec]]) -> PartitionSpec:
    for pattern, spec in rules:
        try:
            found = re.fullmatch(pattern, path)
        except (re.error, TypeError) as e:
            raise ValueError(
                "specs: expected pairs of a regular expression and a PartitionSpec, got "
                f"{pattern!r}: {e}"
            ) from e
        if found:
            return spec
    patterns = ", ".join(repr(pattern) for pattern, _ in rules)
    raise ValueError(
        f"{path}: no rule matches it, of {patterns}. A last rule ('.*', PartitionSpec()) replicates "
        "what is left"
    )


def _placed(path: str, x: Any, spec: PartitionSpec, mesh: Any) -> Any:
    """An array with shardings in place of its leaves."""
    if is_implicit(x) and known_struct(x) is None:  # in an optimizer's state, say
        return _of_part(x, spec, mesh)
    what, shape = f"{path}: {describe(x)}", np.shape(x)
    unknown = set(_names_in(spec)) - set(mesh.shape)
    if unknown:
        raise ValueError(f"{what}: {spec}: the mesh has {dict(mesh.shape)}, no {sorted(unknown)}")
    if len(spec) > len(shape):
        raise ValueError(f"{what}: {spec} is for {len(spec)} axes, the array has {len(shape)}")
    for axis, (length, names) in enumerate(zip(shape, padded_spec(spec, len(shape)), strict=True)):
        if length % (parts := num_parts(names, mesh)):
            raise ValueError(
                f"{what}: {spec}: axis {axis}, of length {length}, can't be cut into {parts} shards of "
                "one size"
            )
    if not is_implicit(x):
        return NamedSharding(mesh, spec)
    specs = _specs_in(x, spec, mesh)
    if specs is NotImplemented:
        raise ValueError(f"{what}: {spec}: {_reason(x, spec, mesh)}")
    is_spec = lambda s: isinstance(s, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)


def _of_part(x: Any, spec: PartitionSpec, mesh: Any) -> Any:
    """The shardings of a part of an implicit array: LoRA's factors lie where those of the weight do."""
    specs = jax.tree.map(lambda _: PartitionSpec(), x)
    if isinstance(x, LoRA) and len(spec) <= (ndim := max(map(np.ndim, (x.a, x.b)))) >= 2:
        *lead, rows, columns = padded_spec(spec, ndim)
        wanted = dict(a=(*lead, rows, None), b=(*lead, None, columns), factor=tuple(lead))
        specs = x._replace(
            **{name: _if_even(getattr(x, name), entries, mesh) for name, entries in wanted.items()}
        )
    is_spec = lambda s: isinstance(s, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)


def _if_even(x: Any, entries: Sequence[Any], mesh: Any) -> PartitionSpec | None:
    """The spec of one array of a part, which is not there, or replicated where it can't be cut."""
    if x is None:
        return None
    pairs = zip(np.shape(x), entries, strict=False)
    even = all(length % num_parts(entry, mesh) == 0 for length, entry in pairs)
    return PartitionSpec(*entries) if even else PartitionSpec()


def _names_in(spec: PartitionSpec) -> list[str]:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [name for entry in entries for name in entry if name is not None]


def _specs_in(x: Any, spec: PartitionSpec, mesh: Any) -> Any:
    """An implicit array with specs in place of its leaves, or NotImplemented.

    `partition_spec` is also for `jax.shard_map`, where the part on each device is an array of the same
    type. Here it is enough that the leaves lie somewhere: XLA computes with whole arrays.
    """
    specs = x.partition_spec(spec, mesh)
    if specs is not NotImplemented:
        return specs
    if isinstance(x, MatrixView):
        of_matrix = _of_matrix(x, spec, mesh)
        inner = of_matrix and _inner(x.matrix, of_matrix, mesh)
        return NotImplemented if inner in (None, NotImplemented) else x._replace(matrix=inner)
    if isinstance(x, LoRA | Adapter):  # what is trained is small, and on all devices
        inner = _inner(x.w, spec, mesh)
        if inner is NotImplemented:
            return NotImplemented
        rest = jax.tree.map(lambda _: PartitionSpec(), x._replace(w=None))
        return rest._replace(w=inner)
    return NotImplemented


def _inner(x: Any, spec: PartitionSpec, mesh: Any) -> Any:
    return _specs_in(x, spec, mesh) if is_implicit(x) else spec


def _of_matrix(x: MatrixView, spec: PartitionSpec, mesh: Any) -> PartitionSpec | None:
    """The spec of the matrix that holds a tensor; None if it can't be split so.

    Its rows are split as the outermost of the axes that make them, its columns likewise.
    """
    entries, lead = padded_spec(spec, x.ndim), x.ndim - len(x.axes)
    found: list[Any] = [None, None]
    for entry, group in zip(entries[lead:], x.axes, strict=True):
        if entry is None:
            continue
        size, _, axis = group[0] if group else (1, 1, 0)
        outermost = group and parts(x.axes, axis)[0] == group[0]
        if not outermost or size % num_parts(entry, mesh):
            return None
        found[axis] = entry
    return PartitionSpec(*entries[:lead], *found)


def _reason(x: Any, spec: PartitionSpec, mesh: Any) -> str:
    """Why an implicit array is not split, and what helps."""
    inner = next((y for y in _nested(x) if isinstance(y, QuantizedMatrix)), None)
    if inner is None or isinstance(x, MatrixView):
        return f"{type(x).__name__} can't be split so. PartitionSpec() replicates it"
    entries = padded_spec(spec, inner.ndim)
    shards, length = num_parts(entries[inner.axis], mesh), inner.shape[inner.axis]
    size = math.gcd(inner.group_size, length // shards)
    return (
        f"axis {inner.axis} has {inner.num_groups} groups of {inner.group_size}, which {shards} shards "
        f"would cut. Groups of {size} fit (group_size= of quantize_params); PartitionSpec() replicates "
        "the weight"
    )


def _nested(x: Any) -> list[Any]:
    """An implicit array, and those inside of it."""
    inner = [y for y in vars(x).values() if is_implicit(y)]
    return [x, *(z for y in inner for z in _nested(y))]
