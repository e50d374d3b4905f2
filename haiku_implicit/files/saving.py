"""`save`: writes trees to safetensors files, atomically."""

import functools
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import jax

from haiku_implicit.files import dtypes, naming, together
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.replacing import checked_target, named, sync_folder
from haiku_implicit.files.structure import (
    Structure,
    check_readable,
    describe,
    leaves_of,
    with_leaves,
)
from haiku_implicit.files.writing import (
    PART,
    Stored,
    divided,
    main_metadata,
    number_in,
    part_text,
    write_file,
)

Path = str | os.PathLike[str]


def save(path: Path, tree: Any, *, max_shard_bytes: int = 2_000_000_000) -> None:
    """Writes a tree to a safetensors file, from which `load` reads the same tree.

    Other programs find an array of a Haiku model under `module/name`, and the arrays in an implicit
    array under `module/name.field`. Types, static metadata, containers and Python values are in the
    file's metadata, with checksums of everything.

    An existing file is kept until the new one is complete and on disk, even if the program is killed.
    If two programs save to the same path, the file of one of them remains.

    If arrays are on the devices of several processes, each process writes its parts to its own files
    next to `path`, in a folder that all of them see. All processes of the program then have to call
    this with the same tree, and it returns, or fails, in all of them. The first process writes the
    values that each process holds completely, such as numbers and NumPy arrays.

    Args:
      path: the file, in an existing folder.
      tree: JAX or NumPy arrays, random keys, implicit arrays, numbers, texts, bytes, dtypes and None,
        in dicts, lists, tuples, Haiku's immutable dicts, states of optax, and types that
        `register_tree_type` knows: parameters, their halves by `partition`, gradients, Haiku's state,
        optimizer states. NumPy arrays are read back as JAX arrays.
      max_shard_bytes: the most bytes of tensors in a file (a larger tensor has its own). The rest goes
        into further files next to `path`: copy them with it, under their names. The arrays in one
        implicit array may be in several files.

    Raises:
      haiku_implicit.CheckpointError: a `ValueError` that names the key, for a value that a file cannot
        hold or give back; and in processes that could write, if another one could not.
      ValueError: for a `max_shard_bytes` that is not a positive integer, and for a `path` that ends in
        `.gguf`, whose files `save_gguf` writes.
      OSError: if the file can't be written. An existing file is kept.

    Example:
      >>> import os, tempfile, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = hki.quantize_params({'linear': {'w': jnp.ones((8, 4))}}, dtype='int4')
      >>> params = hki.add_lora(params, jax.random.key(0), rank=2)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   path = os.path.join(folder, 'params.safetensors')
      ...   hki.save(path, params)
      ...   same = hki.load(path)
      >>> same['linear']['w']
      LoRA(float32[8,4], w=QuantizedMatrix(...), a=float32[8,2], b=float32[2,4], factor=float32[])
    """
    if type(max_shard_bytes) is not int or max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes: expected a positive integer, got {max_shard_bytes!r}")
    if os.fspath(path).lower().endswith(".gguf"):
        raise ValueError(
            f"{os.fspath(path)}: expected the name of a safetensors file, which is what save writes, "
            "got that of a GGUF file. haiku_implicit.save_gguf writes these; or name it .safetensors"
        )
    structure, arrays = describe(tree)
    for name, x in arrays.items():
        if isinstance(x, jax.ShapeDtypeStruct):
            raise CheckpointError(f"{name}: a ShapeDtypeStruct, which has no values. Give arrays")
    check_readable(structure)
    if any(map(together.is_spread, arrays.values())):
        together.save(path, structure, arrays, max_shard_bytes)
    else:
        _save(path, structure, arrays, max_shard_bytes)


def _save(
    given: Path, structure: Structure, arrays: Mapping[str, Any], max_shard_bytes: int
) -> None:
    """Saves a tree whose arrays this process holds completely."""
    path = checked_target(given)
    tensors = [
        Stored(x.name, x.dtype, x.shape, functools.partial(dtypes.bytes_of, arrays[x.name]))
        for x in leaves_of(structure)
    ]
    files = divided(tensors, max_shard_bytes)
    places = {tensor.name: i for i, tensors in enumerate(files) for tensor in tensors}
    structure = with_leaves(structure, lambda leaf: leaf._replace(file=places[leaf.name]))
    try:
        number, main = naming.start(path)
    except OSError as e:  # it names a temporary file
        raise named(e, given) from None
    shards = [naming.shard_name(path, number, i, len(files) - 1) for i in range(1, len(files))]
    try:
        with main:
            _write(main, shards, files, structure, number, path)
            naming.commit(main, path)
    except BaseException as e:
        if os.path.exists(main.name):  # else it is the checkpoint by now
            for name in (*shards, main.name):
                naming.remove(name)
        if isinstance(e, OSError):
            raise named(e, given) from None
        raise
    sync_folder(path)
    naming.remove_leftovers(path, lambda: number_in(path))


def _write(
    main: BinaryIO,
    shards: list[str],
    files: list[list[Stored]],
    structure: Structure,
    number: str,
    path: str,
) -> None:
    """Writes the further files, then the main one."""
    crcs: dict[str, int] = {}
    part = {PART: part_text(path, number)}
    for name, tensors in zip(shards, files[1:], strict=True):
        with open(name, "xb") as file:
            write_file(file, tensors, crcs, lambda: part)
    if shards:
        sync_folder(path)
    names = [os.path.basename(name) for name in shards]
    write_file(main, files[0], crcs, lambda: main_metadata(structure, crcs, number, names))
