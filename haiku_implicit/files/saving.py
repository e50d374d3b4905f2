"""`save`: trees in safetensors files, whole or not at all."""

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import jax

from haiku_implicit.core import progress
from haiku_implicit.files import container, dtypes, naming
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.replacing import checked_target, named, sync_folder
from haiku_implicit.files.structure import (
    Leaf,
    Structure,
    describe,
    leaves_of,
    to_json,
    with_leaves,
)

# What is in the metadata of a main file, and of the files beside it.
ENTRY = "haiku_implicit"
CHECKSUM = "haiku_implicit.crc32"
PART = "haiku_implicit.part_of"
VERSION = 1

Path = str | os.PathLike[str]


def save(path: Path, tree: Any, *, max_shard_bytes: int = 2_000_000_000) -> None:
    """Writes a tree to a file, so that `load` gives the same tree.

    The file is one of safetensors. Other programs find an array of a Haiku model under
    `module/name`, and the arrays of an implicit one under `module/name.field`. Types, static metadata,
    containers and Python values are in the file's metadata, with checksums of everything.

    A file that is there already stays as it is until the new one is complete and on disk, also if the
    program is killed. Two programs that save to the same path leave the file of one of them.

    Args:
      path: the file, in a folder that is there.
      tree: arrays of JAX or NumPy, random keys, implicit arrays, numbers, texts, bytes, dtypes and
        None, in dicts, lists, tuples, Haiku's immutable dicts, states of optax, and types that
        `register_tree_type` knows: parameters, their halves by `partition`, Haiku's state, optimizer
        states. Arrays of NumPy are read back as those of JAX.
      max_shard_bytes: where there is more, the rest goes into further files beside `path`, which
        belong to it: copy them with it, under their names. The arrays of one implicit array may lie in
        several.

    Raises:
      haiku_implicit.CheckpointError: for what a file cannot hold; a `ValueError` that names the key.
      ValueError: for a `max_shard_bytes` that is not a positive integer.
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
      LoRA(float32[8,4], w=QuantizedMatrix(...), a=float32[8,2], b=float32[2,4])
    """
    if type(max_shard_bytes) is not int or max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes: expected a positive integer, got {max_shard_bytes!r}")
    given, path = path, checked_target(path)
    structure, arrays = describe(tree)
    for name, x in arrays.items():
        if isinstance(x, jax.ShapeDtypeStruct):
            raise CheckpointError(f"{name}: a ShapeDtypeStruct, which has no values. Give arrays")
    files = _divided(list(leaves_of(structure)), max_shard_bytes)
    places = {leaf.name: i for i, leaves in enumerate(files) for leaf in leaves}
    structure = with_leaves(structure, lambda leaf: leaf._replace(file=places[leaf.name]))
    try:
        number, main = naming.start(path)
    except OSError as e:  # which names a temporary file
        raise named(e, given) from None
    shards = [naming.shard_name(path, number, i, len(files) - 1) for i in range(1, len(files))]
    try:
        with main:
            _write(main, shards, files, arrays, structure, number, path)
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


def _divided(leaves: list[Leaf], max_shard_bytes: int) -> list[list[Leaf]]:
    """The arrays of each file, which has room for so many bytes, but for one array in any case."""
    files: list[list[Leaf]] = [[]]
    room = max_shard_bytes
    for leaf in leaves:
        size = _size(leaf)
        if size > room and files[-1]:
            files.append([])
            room = max_shard_bytes
        files[-1].append(leaf)
        room -= size
    return files


def _size(leaf: Leaf) -> int:
    dtype, shape = dtypes.stored_of(leaf.dtype, leaf.shape)
    return container.table([("", dtype, shape)])[""].stop


def _write(
    main: BinaryIO,
    shards: list[str],
    files: list[list[Leaf]],
    arrays: Mapping[str, Any],
    structure: Structure,
    number: str,
    path: str,
) -> None:
    """Writes the further files, then the main one, all to disk."""
    crcs: dict[str, int] = {}
    part = {PART: f"{os.path.basename(path)}, save {number}"}
    for name, leaves in zip(shards, files[1:], strict=True):
        with open(name, "xb") as file:
            _write_file(file, leaves, arrays, crcs, lambda: part)
    if shards:
        sync_folder(path)

    def metadata() -> dict[str, str]:
        known = with_leaves(structure, lambda leaf: leaf._replace(crc=crcs.get(leaf.name, 0)))
        names = [os.path.basename(name) for name in shards]
        tree = {"version": VERSION, "save": number, "files": names, "tree": to_json(known)}
        text = json.dumps(tree, separators=(",", ":"))
        return {ENTRY: text, CHECKSUM: f"{zlib.crc32(text.encode()):08x}"}

    _write_file(main, files[0], arrays, crcs, metadata)


def _write_file(
    file: BinaryIO,
    leaves: list[Leaf],
    arrays: Mapping[str, Any],
    crcs: dict[str, int],
    metadata: Any,
) -> None:
    """Writes arrays one by one, and adds their checksums to `crcs`.

    The header goes before them and may have the checksums in it: it is written again at the end, with
    as many bytes.
    """
    rows = [(leaf.name, *dtypes.stored_of(leaf.dtype, leaf.shape)) for leaf in leaves]
    # The widest first, so that each begins at a multiple of its width.
    rows.sort(key=lambda row: -container.WIDTHS[row[1]])
    table = container.table(rows)
    begin = container.header(metadata(), table)
    file.write(begin)

    def write(name: str) -> None:
        data = dtypes.bytes_of(arrays[name]).data
        crcs[name] = zlib.crc32(data)
        file.write(data)

    with progress.bar("saving", len(table)) as run:
        for name in table:
            run(name, write, name)
    end = container.header(metadata(), table)
    assert len(begin) == len(end), "the header has changed its length"
    file.seek(0)
    file.write(end)
    file.flush()
    os.fsync(file.fileno())


def number_in(path: str) -> str | None:
    """The number of the save that wrote a checkpoint; None for another file."""
    try:
        return json.loads(container.File(path).metadata[ENTRY])["save"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
