"""`load` and `open_checkpoint`: read trees from files."""

from __future__ import annotations

import os
from typing import TypedDict, Unpack, overload

import numpy as np

from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.typing import SameTree, Tree
from haiku_implicit.files import dtypes, pickles, records
from haiku_implicit.files.checkpoint import Checkpoint, Source, opened
from haiku_implicit.files.container import CheckpointError, is_container
from haiku_implicit.files.file_types import check_file, kind_of, not_a
from haiku_implicit.files.npz import Archive
from haiku_implicit.files.orbax_folders import Folder
from haiku_implicit.files.saving import Path
from haiku_implicit.files.structure import describe

# The files that `load` reads, for errors.
_EXPECTED = "a safetensors or .npz file"
# Kinds that only the unpickler can tell from pickles: old pickles are texts.
_MAY_BE_PICKLES = ("pickle", "text", "unknown", "packed")


class _Options(TypedDict, total=False):
    """The options of `load`, besides `like`, on which the type of its result depends."""

    only: Targets | None
    shardings: Tree
    numpy: bool
    allow_pickle: bool


@overload
def load(path: Path, *, like: None = None, **options: Unpack[_Options]) -> Tree: ...


@overload
def load(path: Path, *, like: SameTree, **options: Unpack[_Options]) -> SameTree: ...


def load(
    path: Path,
    *,
    like: Tree = None,
    only: Targets | None = None,
    shardings: Tree = None,
    numpy: bool = False,
    allow_pickle: bool = False,
) -> Tree:
    """Reads the tree that `save` wrote, or the parameters in a file of another program.

    Loading does not run or import anything in a file. It looks types up by name among the program's
    implicit types and the types that `register_tree_type` knows, and checks data against the checksums
    in the file.

    A safetensors file of another program gives a dict `{module: {name: array}}`: the tensor
    `mlp/linear/w` is `w` in the module `mlp/linear`, one without a `/` is in the module `''`. (One of
    several files of a model is an error, which names the others.) So do an `.npz` file, whose names
    may also be `module//name`, as in AlphaFold's files, and AlphaFold 3's `.bin` or `.bin.zst`. A
    folder of Orbax, such as AlphaGenome's, gives its dicts and lists; Orbax reads it.

    Args:
      path: the file that `save` was given, or a file or folder of another program.
      like: a tree of arrays or `jax.ShapeDtypeStruct`. If the tree in the file has other containers,
        types, keys, shapes, dtypes or static metadata, this is an error. The default does not check.
        (Type checkers take the result for a tree of the same leaves; it has arrays instead of structs.)
      only: the parameters to read, if the tree consists of nested dicts: a regular expression over
        `module/name`, a list of names or expressions, or a predicate
        `(module_name, name, value) -> bool`.
      shardings: one `jax.sharding.Sharding` for all arrays, or a tree of them, like the tree in the
        file or a prefix of it, such as `haiku_implicit.shardings` gives; None in it stands for the
        default device. Each process reads only the parts that its devices hold. Devices and processes
        may differ from the ones that saved the tree.
      numpy: whether to return NumPy arrays: read-only views of the files, which the system reads when
        they are used and drops when memory is short. (They are read once for the checksums.)
      allow_pickle: whether the file may be a pickle of Haiku parameters, as many published models
        are. The unpickler knows only NumPy arrays, also as joblib writes them, and containers, and
        does not run anything else. The file may be compressed by zlib, gzip or bz2.

    Returns:
      The tree, with JAX arrays, by default on the default device. Without JAX's 64-bit mode, arrays of
      64 bits are NumPy arrays, to keep their precision.

    Raises:
      haiku_implicit.CheckpointError: a `ValueError` that names the key: for a file that is truncated or
        damaged, has an unknown type or version, lacks a tensor or has an extra one, does not fit
        `like`, or is a pickle, if it has other objects in it or `allow_pickle` is False.
      ValueError: if `only` matches nothing; for `shardings` of another tree.
      ImportError: if the file needs a package that is not there: `zstandard`, or Orbax.
      OSError: if the file can't be read.

    Example:
      >>> import os, tempfile, jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'w': jnp.ones((2, 3)), 'b': hki.Zeros(shape=(3,), dtype=jnp.float32)}}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   path = os.path.join(folder, 'params.safetensors')
      ...   hki.save(path, params)
      ...   print(hki.load(path, only='.*/b'))
      ...   try:
      ...     hki.load(path, like={'linear': {'w': jnp.ones((2, 4)), 'b': params['linear']['b']}})
      ...   except hki.CheckpointError as e:
      ...     print(str(e).partition(': ')[2])
      {'linear': {'b': Zeros(float32[3])}}
      linear/w: expected an array float32[2, 4], found an array float32[2, 3]. The file is ...
    """
    with _opened(path, numpy, allow_pickle) as checkpoint:
        return checkpoint.read(only=only, like=like, shardings=shardings)


def open_checkpoint(path: Path, *, numpy: bool = False) -> Checkpoint:
    """Opens the tree in a file without reading its arrays.

    Args:
      path: the file: one that `save` wrote, or any that `load` reads, except a pickle.
      numpy: as for `load`.

    Returns:
      A mapping with the keys of the tree: `checkpoint['mlp/~/linear_0']['w']` reads only this array.
      `checkpoint.structs` has shapes and dtypes, `checkpoint.read(only=...)` reads more at once. It is
      a context manager, which closes the files.

    Raises:
      haiku_implicit.CheckpointError: as for `load`, for errors in the file's header.
      OSError: if the file can't be read.

    Example:
      >>> import os, tempfile, jax.numpy as jnp, haiku_implicit as hki
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   path = os.path.join(folder, 'params.safetensors')
      ...   hki.save(path, {'linear': {'w': jnp.ones((2, 3)), 'b': jnp.zeros(3)}})
      ...   with hki.open_checkpoint(path) as checkpoint:
      ...     print(checkpoint.structs)
      ...     print(checkpoint['linear']['b'])
      {'linear': {'w': ShapeDtypeStruct(shape=(2, 3), dtype=float32), 'b': ...}}
      [0. 0. 0.]
    """
    return _opened(path, numpy, allow_pickle=False)


def _opened(path: Path, numpy: bool, allow_pickle: bool) -> Checkpoint:
    """Opens a file without reading its arrays; a pickle is read as a whole."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        check_file(path, _EXPECTED)
        if is_container(path):
            files, structure = opened(path)
            return Checkpoint(structure, "", Source(path, files, numpy))
    file = _of_other_program(path, allow_pickle)
    return Checkpoint(file.structure, "", Source(path, [file], numpy))


class _Once:
    """The arrays of a tree in memory, each of which is read once and then forgotten."""

    def __init__(self, path: str, tree: Tree):
        self.path = path
        try:
            self.structure, arrays = describe(tree)
        except CheckpointError as e:
            raise CheckpointError(f"{path}: {e}") from None
        self._arrays = dict(arrays)

    def bytes_of(self, name: str) -> np.ndarray:
        """The bytes of an array, `[bytes]` uint8."""
        return dtypes.bytes_of(self._arrays.pop(name))

    def close(self) -> None:
        """Forgets the arrays."""
        self._arrays = {}


def _of_other_program(path: str, allow_pickle: bool) -> Archive | Folder | records.Records | _Once:
    """Opens a file or folder that is not of this library.

    Raises:
      CheckpointError: for a file of an unknown kind, a damaged one, and for a pickle without
        `allow_pickle`.
    """
    kind = kind_of(records.pieces_of(path)[0]).name
    if kind == "npz":
        return Archive(path)
    if kind == "orbax":
        return Folder(path)
    if kind in ("records", "zstd"):
        file = records.file_in(path) if os.path.isdir(path) else path
        return records.Records(file or path)
    if kind == "joined":
        raise not_a("an .npz file of names `module/name`", path)
    if allow_pickle and kind in _MAY_BE_PICKLES:
        return _Once(path, pickles.read(path))
    raise not_a(_EXPECTED, path)
