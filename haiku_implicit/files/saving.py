"""`save`: trees in safetensors files, whole or not at all."""

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
    """Writes a tree to a file, so that `load` gives the same tree.

    The file is one of safetensors. Other programs find an array of a Haiku model under
    `module/name`, and the arrays of an implicit one under `module/name.field`. Types, static metadata,
    containers and Python values are in the file's metadata, with checksums of everything.

    A file that is there already stays as it is until the new one is complete and on disk, also if the
    program is killed. Two programs that save to the same path leave the file of one of them.

    Of arrays that lie on the devices of several processes, each process writes what it has, into files
    of its own beside `path`, in a folder that all of them see. All processes of the program have to
    call this then, with the same tree, and it returns, or fails, in all of them. What each process has
    for itself, such as numbers and NumPy arrays, is written by the first one.

    Args:
      path: the file, in a folder that is there.
      tree: arrays of JAX or NumPy, random keys, implicit arrays, numbers, texts, bytes, dtypes and
        None, in dicts, lists, tuples, Haiku's immutable dicts, states of optax, and types that
        `register_tree_type` knows: parameters, their halves by `partition`, gradients, Haiku's state,
        optimizer states. Arrays of NumPy are read back as those of JAX.
      max_shard_bytes: where there is more, the rest goes into further files beside `path`, which
        belong to it: copy them with it, under their names. The arrays of one implicit array may lie in
        several.

    Raises:
      haiku_implicit.CheckpointError: for what a file cannot hold or give back, a `ValueError` that
        names the key; and in a process that could write, where another one could not.
      ValueError: for a `max_shard_bytes` that is not a positive integer, and for a `path` that ends in
        `.gguf`, whose files `save_gguf` writes.
      OSError: if the file can't be written. The one that was there is still there.

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
    """Saves what this process has."""
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
    except OSError as e:  # which names a temporary file
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
