"""The placement of a model's parameters on a mesh of devices, from the specs of the dense ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.array import is_implicit, known_struct
from haiku_implicit.core.messages import see, shown, type_error, value_error, warn_caller
from haiku_implicit.core.predicates import compiled
from haiku_implicit.core.sharding import (
    fitted,
    fitting,
    is_spec,
    leaf_specs,
    names_in,
    num_shards,
    padded_spec,
    part_specs,
    shard_specs,
)
from haiku_implicit.core.transform import tree_flatten_with_implicit
from haiku_implicit.core.typing import Array, MeshLike, Params, SameTree, Tree
from haiku_implicit.params.trees.selection import describe
from haiku_implicit.quantized.matrix import QuantizedMatrix

# One spec for all; a tree of specs, or a prefix of one; or pairs of a pattern and a spec, of which the
# first match counts.
Specs = Any


def shardings(params: Params, specs: Specs, mesh: MeshLike) -> Tree:
    """The sharding of every array of a tree, from the partition specs of the dense weights.

    An implicit array is split as the dense array would be: LoRA's factors along the axes that they
    have, codes and scales in their own order of storage. If shards would cut a group, codes are split,
    and scales are on all devices; one warning says so (`place` makes smaller groups). Give the result
    to `jax.device_put`, to `jax.jit` as `in_shardings` and `out_shardings`, or to restore checkpoints.
    (Do not give these a dense sharding for an implicit array: JAX takes it for each leaf, which splits
    the weight along another axis.)

    Args:
      params: parameters, dense or implicit, arrays or `jax.ShapeDtypeStruct`; or another tree of such
        arrays, such as an optimizer's state. (LoRA's factors are split in the same way without their
        weight; other fields of implicit arrays are replicated. `optimizer.init` of placed parameters
        gives a placed state.)
      specs: one `PartitionSpec` for all; or a tree of them, like `params` or a prefix of it, with one
        for an implicit array and None for a replicated array; or pairs `[(pattern, spec), ...]`. The
        first pair counts whose regular expression matches the whole path, the keys of the tree joined
        by `/`. (A pattern without a match is not an error: one list may serve several models.)
      mesh: a `jax.sharding.Mesh`, or an abstract one.

    Returns:
      The tree with a `NamedSharding` for each array, also within implicit arrays, and None for a number
      or a string.

    Raises:
      ValueError: for a parameter that no pattern matches, whose spec has too many axes, or that can't
        be split by its spec. The error names the parameter, its axis, and the number of shards.
      TypeError: for another kind of mesh, or of specs.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ('model',), axis_types=(jax.sharding.AxisType.Auto,))
      >>> params = {'linear': {'w': jnp.ones((8, 4)), 'b': jnp.zeros(4)}}
      >>> params = hki.add_lora(hki.quantize_params(params, dtype='int8'), 0, rank=2)
      >>> found = hki.shardings(params, [('.*/w', P(None, 'model')), ('.*', P())], mesh)
      >>> w, b = found['linear']['w'], found['linear']['b']
      >>> tuple(w.w.codes.spec), tuple(w.a.spec), tuple(b.spec)
      (('model', None), (None, None), ())
      >>> placed = jax.device_put(params, found)
    """
    found, treedef, notes = _for_each(_placed, params, specs, mesh)
    _say(notes, ". haiku_implicit.place makes smaller groups of the same values")
    return treedef.unflatten(found)


def place(params: SameTree, specs: Specs, mesh: MeshLike) -> SameTree:
    """Puts parameters on a mesh of devices, in a form that can be split by their specs.

    It is `jax.device_put(params, hki.shardings(params, specs, mesh))`, with changes to arrays that do
    not fit:

    - Groups of a quantized weight that shards would cut are divided into smaller groups, each with the
      scale that they share. Codes and values stay the same, to the bit; there are more scales. (Groups
      stay if products round activations by groups, which smaller groups would change.)
    - An axis that can't be cut into shards of one size is whole on every device, and so is an array of
      a type that can't be split by its spec. One warning names all of them.

    Args:
      params: parameters, dense or implicit, with arrays in them.
      specs: as for `shardings`.
      mesh: a `jax.sharding.Mesh`.

    Returns:
      The parameters on the mesh. (`jax.tree.map(lambda x: x.sharding, placed)` shows the shardings.)

    Raises:
      ValueError: for a parameter that no pattern matches, or a spec with axes that it or the mesh
        lacks.
      TypeError: for another kind of mesh, or of specs.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, haiku_implicit as hki
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ('model',), axis_types=(jax.sharding.AxisType.Auto,))
      >>> params = hki.quantize_params({'w': jnp.ones((64, 32))}, dtype='int4', group_size=32)
      >>> placed = hki.place(params, P('model'), mesh)
      >>> tuple(placed['w'].codes.sharding.spec), placed['w'].group_size  # of 16 on four devices
      ((None, 'model'), 32)
    """
    pairs, treedef, notes = _for_each(_fitted, params, specs, mesh)
    _say(notes)
    new, places = (treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
    return jax.device_put(new, places)


def _for_each(
    function: Callable[[str, Any, PartitionSpec, Any, list[str]], Any],
    params: Params,
    specs: Specs,
    mesh: MeshLike,
) -> tuple[list[Any], Any, list[str]]:
    """The results of a function of each array and its spec, the tree's structure, and the notes."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise type_error(
            f"mesh: expected a jax.sharding.Mesh, as jax.make_mesh((jax.device_count(),), ('model',)) "
            f"makes it, got {mesh!r}"
        )
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_implicit)
    paths = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in pairs]
    notes: list[str] = []
    found = [
        function(path, x, spec, mesh, notes)
        for path, (_, x), spec in zip(paths, pairs, _specs_of(paths, params, specs), strict=True)
    ]
    return found, treedef, notes


def _fitted(
    path: str, x: Array, spec: PartitionSpec, mesh: MeshLike, notes: list[str]
) -> tuple[Any, Any]:
    """An array that its spec can split, and the shardings of its leaves."""
    if not hasattr(x, "shape") or (is_implicit(x) and known_struct(x) is None):
        return x, _placed(path, x, spec, mesh, notes)
    what = f"{path}: {describe(x)}"
    _fits(what, np.shape(x), spec, mesh)
    if reason := _uneven(np.shape(x), spec, mesh):
        notes.append(f"{what}: {spec}: {reason}, and is whole on every device")
        spec = fitting(spec, np.shape(x), mesh)
    if is_implicit(x):
        x = fitted(x, spec, mesh)
        if leaf_specs(x, spec, mesh) is NotImplemented:
            notes.append(
                f"{what}: {spec}: its type can't be split so, and is whole on every device"
            )
            spec = PartitionSpec()
    return x, _placed(path, x, spec, mesh, notes)


def _specs_of(paths: Sequence[str], params: Params, specs: Specs) -> list[PartitionSpec]:
    """The spec of each array."""
    if isinstance(specs, PartitionSpec):
        return [specs] * len(paths)
    if isinstance(specs, list) and all(isinstance(x, tuple) and len(x) == 2 for x in specs):
        return _by_patterns(paths, specs)

    def repeated(spec: PartitionSpec, below: Any) -> Any:
        return [spec] * len(tree_flatten_with_implicit(below)[0])

    is_own = lambda x: x is None or is_spec(x)  # noqa: E731
    try:
        nested = jax.tree.map(repeated, specs, params, is_leaf=is_own)
    except ValueError as e:
        said = " ".join(str(e).split())
        raise value_error(
            "specs: expected a PartitionSpec, a tree like params or a prefix of it, or a list of pairs "
            f"[(pattern, spec), ...]: {said:.500}"
        ) from e
    found = jax.tree.leaves(nested, is_leaf=is_own)
    return [_checked(path, spec) for path, spec in zip(paths, found, strict=True)]


def _checked(path: str, spec: Any) -> PartitionSpec:
    """A spec given by the user; raises for another type."""
    if spec is None:
        return PartitionSpec()
    if not isinstance(spec, PartitionSpec):
        hint = ". Give its spec" if isinstance(spec, NamedSharding) else ""
        raise type_error(f"{path}: specs: expected a PartitionSpec, got {spec!r}{hint}")
    return spec


def _by_patterns(paths: Sequence[str], pairs: Sequence[tuple[Any, Any]]) -> list[PartitionSpec]:
    """The spec of each array, from the first pattern that matches its path."""
    try:
        compiled_pairs = [(compiled("specs", pattern), spec) for pattern, spec in pairs]
    except (ValueError, TypeError) as e:
        raise value_error(
            "specs: expected pairs of a regular expression and a PartitionSpec, got the patterns "
            f"{[pattern for pattern, _ in pairs]!r}: {e}"
        ) from e
    found = []
    for path in paths:
        own = [spec for pattern, spec in compiled_pairs if pattern.fullmatch(path)]
        if not own:
            known = ", ".join(repr(pattern) for pattern, _ in pairs)
            raise ValueError(
                f"{path}: no pattern matches this whole path, of {known}. A last pair "
                "('.*', PartitionSpec()) replicates what is left"
                f" {see('a-split-that-does-not-fit')}"
            )
        found.append(_checked(path, own[0]))
    return found


def _fits(what: str, shape: Sequence[int], spec: PartitionSpec, mesh: MeshLike) -> None:
    """Raises for a spec with axes that the mesh or the array does not have."""
    unknown = set(names_in(spec)) - set(mesh.shape)
    if unknown:
        raise ValueError(
            f"{what}: {spec}: the mesh has {dict(mesh.shape)}, no {sorted(unknown)}"
            f" {see('a-split-that-does-not-fit')}"
        )
    if len(names := names_in(spec)) > len(set(names)):
        raise ValueError(
            f"{what}: {spec}: an axis of the mesh splits one axis of an array, not two"
            f" {see('a-split-that-does-not-fit')}"
        )
    if len(spec) > len(shape):
        raise ValueError(
            f"{what}: {spec} is for {len(spec)} axes, the array has {len(shape)}"
            f" {see('a-split-that-does-not-fit')}"
        )


def _uneven(shape: Sequence[int], spec: PartitionSpec, mesh: MeshLike) -> str | None:
    """The reason that an axis can't be cut evenly, in words; None if all axes can."""
    for axis, (length, entry) in enumerate(zip(shape, padded_spec(spec, len(shape)), strict=True)):
        if length % (count := num_shards(entry, mesh)):
            return f"axis {axis}, of length {length}, can't be cut into {count} shards of one size"
    return None


def _placed(path: str, x: Array, spec: PartitionSpec, mesh: MeshLike, notes: list[str]) -> Array:
    """The shardings of an array's leaves, in the structure of the array."""
    if is_implicit(x) and known_struct(x) is None:  # in an optimizer's state, say
        return _with_specs(x, _of_half(x, spec, mesh), mesh)
    if not hasattr(x, "shape"):  # a number of steps, or a string
        return None
    what = f"{path}: {describe(x)}"
    _fits(what, np.shape(x), spec, mesh)
    if reason := _uneven(np.shape(x), spec, mesh):
        raise ValueError(
            f"{what}: {spec}: {reason}. haiku_implicit.place leaves such an axis whole"
            f" {see('a-split-that-does-not-fit')}"
        )
    if not is_implicit(x):
        return NamedSharding(mesh, spec)
    specs = leaf_specs(x, spec, mesh)
    if specs is NotImplemented:
        raise ValueError(
            f"{what}: {spec}: {type(x).__name__} can't be split so. PartitionSpec() replicates it, as "
            f"haiku_implicit.place does {see('a-split-that-does-not-fit')}"
        )
    exact = shard_specs(x, spec, mesh) is not NotImplemented
    if not exact and (reason := _not_as_asked(x, specs, spec, mesh)):
        notes.append(f"{what}: {spec}: {reason}")
    return _with_specs(x, specs, mesh)


def _with_specs(x: Array, specs: Sequence[PartitionSpec], mesh: MeshLike) -> Any:
    return jax.tree.unflatten(jax.tree.structure(x), [NamedSharding(mesh, s) for s in specs])


def _not_as_asked(
    x: Array, specs: Sequence[PartitionSpec], spec: PartitionSpec, mesh: MeshLike
) -> str:
    """The fields of an implicit array that are not split by the spec, in words; empty if all are."""
    found = []
    if missing := set(names_in(spec)) - {name for own in specs for name in names_in(own)}:
        found.append(f"nothing in it can be split by {sorted(missing)}")
    new = jax.eval_shape(lambda x: fitted(x, spec, mesh), x)
    for old, fit in zip(_quantized(x), _quantized(new), strict=True):
        if fit.group_size < old.group_size:
            cut = "a whole column" if old.num_groups == 1 else f"groups of {old.group_size}"
            found.append(
                f"that cuts {cut}, whose scales are on all devices; groups of {fit.group_size} fit"
            )
    return ", and ".join(found)


def _of_half(x: Array, spec: PartitionSpec, mesh: MeshLike) -> list[Any]:
    """The specs of a half of an implicit array: LoRA's factors are split as in the whole weight."""
    specs = jax.tree.map(lambda _: PartitionSpec(), x)
    if isinstance(x, LoRA) and len(spec) <= (ndim := max(map(np.ndim, (x.a, x.b)))) >= 2:
        *lead, rows, columns = padded_spec(spec, ndim)
        wanted = dict(a=(*lead, rows), b=(*lead, None, columns), factor=lead)
        for name, entries in wanted.items():
            of = functools.partial(part_specs, own=PartitionSpec(*entries), mesh=mesh)
            new = jax.tree.map(of, getattr(x, name), is_leaf=is_implicit)
            specs = specs._replace(**{name: new})
    return jax.tree.leaves(specs, is_leaf=is_spec)


def _quantized(x: Array) -> list[QuantizedMatrix]:
    """The quantized matrices in an implicit array, except quantized scales."""
    if isinstance(x, QuantizedMatrix):
        return [x]
    return [z for y in vars(x).values() if is_implicit(y) for z in _quantized(y)]


def _say(notes: list[str], help: str = "") -> None:
    """Warns once of all notes."""
    if notes:
        warn_caller(shown(notes, most=3, separator="; ") + help)
