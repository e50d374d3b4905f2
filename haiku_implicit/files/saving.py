"""`save`: writes trees to safetensors files, atomically, from one process or several.

If arrays are on the devices of several processes, each process writes the parts on its devices.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from haiku_implicit.core import progress
from haiku_implicit.core.messages import see, type_error, value_error
from haiku_implicit.core.typing import Array, Tree
from haiku_implicit.files import container, dtypes, replacing
from haiku_implicit.files import structure as structures
from haiku_implicit.files.checksums import WRITTEN, Checksum, checksum_beside
from haiku_implicit.files.container import CHECKSUM, ENTRY, PART, VERSIONS, CheckpointError
from haiku_implicit.files.parts import Box, Part, box_of
from haiku_implicit.files.structure import Leaf, Structure, leaves_of, with_leaves

Path = str | os.PathLike[str]
# The key for checksums in a file of parts, which the writer of the main file reads.
_CHECKSUMS = "haiku_implicit.checksums"
_LEADER = 0


def save(path: Path, tree: Tree, *, max_shard_bytes: int = 2_000_000_000) -> None:
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
        raise value_error(f"max_shard_bytes: expected a positive integer, got {max_shard_bytes!r}")
    if not isinstance(path, str | os.PathLike):
        raise type_error(f"path: expected save(path, tree), got a {type(path).__name__} first")
    if os.fspath(path).lower().endswith(".gguf"):
        raise value_error(
            f"{os.fspath(path)}: expected the name of a safetensors file, which is what save writes, "
            "got that of a GGUF file. haiku_implicit.save_gguf writes these; or name it .safetensors"
        )
    structure, arrays = structures.describe(tree)
    for name, x in arrays.items():
        if isinstance(x, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{name}: a ShapeDtypeStruct, which has no values. Give arrays {see('no-values')}"
            )
    structures.check_readable(structure)
    _save(path, structure, arrays, max_shard_bytes)


def is_spread(x: Any) -> bool:
    """Whether parts of an array are on devices of other processes."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _save(
    given: str | os.PathLike[str],
    structure: Structure,
    arrays: Mapping[str, Array],
    max_shard_bytes: int,
) -> None:
    """Saves a tree of arrays. If they are on devices of several processes, all of these call this.

    After each step the processes tell each other whether it succeeded, so that one that fails does not
    keep the others waiting.
    """
    spread = any(map(is_spread, arrays.values()))
    me = jax.process_index() if spread else _LEADER
    plan, checksums = _planned(structure, arrays, max_shard_bytes), dict[str, Checksum]()
    path, count = os.path.realpath(given), len(plan.files) - 1
    agreed = functools.partial(_agreed, path, spread)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replacing.naming_errors(given))
        number, main = "0" * 16, None
        with agreed("begin"):
            replacing.checked_target(given)
            if me == _LEADER:
                number, main = replacing.start(path)
                stack.enter_context(main)
        number = _sent(number, me) if spread else number
        names = [replacing.shard_name(path, number, i, count) for i in range(1, count + 1)]
        files = zip(names, plan.files[1:], plan.writers[1:], strict=True)
        own = {name: tensors for name, tensors, writer in files if writer == me}
        try:
            with agreed("write its part"):
                part = {PART: f"{os.path.basename(path)}, save {number}"}
                for name, tensors in own.items():
                    _write(name, tensors, part, checksums, spread)
                if own:
                    replacing.sync_folder(path)
            with agreed("write the main file"):
                if main is not None:
                    _finish(main, path, number, plan, names, checksums)
        except BaseException:
            if main is None or os.path.exists(main.name):  # else it is the checkpoint by now
                for name in [*own, main.name] if main else own:
                    replacing.remove(name)
            raise
    if me == _LEADER:
        replacing.remove_leftovers(path, lambda: number_in(path))


def _sent(number: str, me: int) -> str:
    """The number of a save, which the leading process sends to all others."""
    sent = np.frombuffer(bytes.fromhex(number), np.uint8)
    received = multihost_utils.broadcast_one_to_all(sent, is_source=me == _LEADER)
    return np.asarray(received, np.uint8).tobytes().hex()


@contextlib.contextmanager
def _agreed(path: str, spread: bool, what: str) -> Iterator[None]:
    """Waits at its end for all processes, and raises in all of them if one has an error.

    (Only for an `Exception`, not for an interrupt of this process.) Does nothing unless arrays are
    spread over processes.
    """
    if not spread:
        yield
        return
    error = None
    try:
        yield
    except Exception as e:
        error = e
    failed = multihost_utils.process_allgather(np.array(error is not None))
    if error is not None:
        raise error
    if np.any(failed):
        others = ", ".join(map(str, np.flatnonzero(failed)))
        raise CheckpointError(
            f"{path}: not saved, as process {others} could not {what}; its own error says why"
        )


def _write(
    name: str,
    tensors: list[_Stored],
    part: dict[str, str],
    checksums: dict[str, Checksum],
    spread: bool,
) -> None:
    """Writes a file next to the main one, with its checksums if another process may write that."""

    def known() -> dict[str, str]:
        zero = Checksum(WRITTEN, 0)
        texts = {tensor.name: str(checksums.get(tensor.name, zero)) for tensor in tensors}
        return part | ({_CHECKSUMS: json.dumps(texts)} if spread else {})

    with open(name, "xb") as file:
        _write_file(file, tensors, checksums, known)


def _finish(
    main: BinaryIO,
    path: str,
    number: str,
    plan: _Plan,
    names: list[str],
    checksums: dict[str, Checksum],
) -> None:
    """Writes the main file, with own checksums and those in the files of other processes."""
    for name, writer in zip(names, plan.writers[1:], strict=True):
        if writer == _LEADER:
            continue
        try:
            texts = json.loads(container.File(name).metadata[_CHECKSUMS])
        except FileNotFoundError:
            raise CheckpointError(
                f"{name}: process {writer} has written it, and process {_LEADER} does not see it. Save "
                "to a folder that all processes share"
            ) from None
        checksums |= {tensor: Checksum(WRITTEN, int(x, 16)) for tensor, x in texts.items()}
    files = [os.path.basename(name) for name in names]
    metadata = functools.partial(_main_metadata, plan.structure, checksums, number, files)
    _write_file(main, plan.files[0], checksums, metadata)
    replacing.commit(main, path)
    replacing.sync_folder(path)


# --- one file ------------------------------------------------------------------------------------


def _write_file(
    file: BinaryIO,
    tensors: Sequence[_Stored],
    checksums: dict[str, Checksum],
    metadata: Callable[[], Mapping[str, str]],
) -> None:
    """Writes tensors to disk one by one, and adds their checksums to `checksums`.

    The header precedes them and may contain the checksums: it is written again at the end, with the
    same length.
    """
    # The widest dtypes first, so that each tensor begins at a multiple of its width.
    ordered = sorted(tensors, key=lambda tensor: -container.WIDTHS[tensor.row[1]])
    table = container.table([tensor.row for tensor in ordered])
    begin = container.header(metadata(), table)
    file.write(begin)

    def write(tensor: _Stored) -> None:
        data = tensor.read()
        checksum = checksum_beside(data)
        file.write(data.data)
        checksums[tensor.name] = checksum()

    with progress.bar("saving", len(table)) as run:
        for tensor in ordered:
            run(tensor.name, write, tensor)
    end = container.header(metadata(), table)
    assert len(begin) == len(end), "the header has changed its length"
    file.seek(0)
    file.write(end)
    file.flush()
    os.fsync(file.fileno())


def _main_metadata(
    structure: Structure, checksums: Mapping[str, Checksum], number: str, names: Sequence[str]
) -> dict[str, str]:
    """The metadata of a main file.

    Args:
      structure: the tree's structure.
      checksums: the tensors' checksums by name, as far as they are known.
      number: the number of the save.
      names: the names of the further files.
    """

    def known(leaf: Leaf) -> Leaf:
        parts = (part._replace(checksum=checksums.get(part.name)) for part in leaf.tensors)
        return leaf._replace(parts=tuple(parts))

    tree = structures.to_json(with_leaves(structure, known))
    found = {"version": VERSIONS[-1], "save": number, "files": list(names), "tree": tree}
    text = json.dumps(found, separators=(",", ":"))
    return {ENTRY: text, CHECKSUM: f"{zlib.crc32(text.encode()):08x}"}


def number_in(path: str) -> str | None:
    """The number of the save that wrote a checkpoint; None for another file."""
    try:
        return json.loads(container.File(path).metadata[ENTRY])["save"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- the plan ------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """A tensor to write.

    Attributes:
      name: the tensor's name.
      dtype: the name of its dtype: see `dtypes`.
      shape: its shape.
      read: returns its bytes, `[bytes]` uint8.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def row(self) -> tuple[str, str, tuple[int, ...]]:
        """The tensor's row in the file's table."""
        return self.name, *dtypes.stored_of(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return container.table([self.row])[self.name].stop


class _Plan(NamedTuple):
    """The files to write and their writers: the same in all processes.

    Attributes:
      structure: the tree's structure, with the file of each array.
      files: the tensors of each file. The first one is the main file.
      writers: the process that writes each file.
    """

    structure: Structure
    files: list[list[_Stored]]
    writers: list[int]


def _divided(tensors: Sequence[_Stored], max_shard_bytes: int) -> list[list[_Stored]]:
    """Divides tensors into files of at most `max_shard_bytes`; a larger tensor has its own file."""
    files: list[list[_Stored]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        if tensor.nbytes > room and files[-1]:
            files.append([])
            room = max_shard_bytes
        files[-1].append(tensor)
        room -= tensor.nbytes
    return files


def _planned(structure: Structure, arrays: Mapping[str, Array], max_shard_bytes: int) -> _Plan:
    leaves, processes = list(leaves_of(structure)), range(jax.process_count())
    taken, written = {leaf.name for leaf in leaves}, dict.fromkeys(processes, 0)
    main: list[_Stored] = []
    own: dict[int, list[_Stored]] = {process: [] for process in processes}
    parts: dict[str, list[Part]] = {leaf.name: [] for leaf in leaves}
    for leaf in leaves:
        x = arrays[leaf.name]
        if not is_spread(x):
            read = functools.partial(dtypes.bytes_of, x)
            main.append(_Stored(leaf.name, leaf.dtype, leaf.shape, read))
            parts[leaf.name] += leaf.tensors
            continue
        for box, process in _boxes(leaf, x, written):
            name = _name(leaf, box, taken)
            part = Part(name, 0, tuple(a for a, _ in box), tuple(b - a for a, b in box))
            read = functools.partial(_bytes_of, x, leaf, box)
            own[process].append(_Stored(name, leaf.dtype, part.shape, read))
            parts[leaf.name].append(part)
    files = _divided(main, max_shard_bytes)
    writers = [_LEADER] * len(files)
    for process, tensors in own.items():
        found = _divided(tensors, max_shard_bytes) if tensors else []
        files += found
        writers += [process] * len(found)
    places = {tensor.name: i for i, tensors in enumerate(files) for tensor in tensors}

    def placed(leaf: Leaf) -> Leaf:
        of_files = (part._replace(file=places[part.name]) for part in parts[leaf.name])
        return leaf._replace(parts=tuple(of_files))

    return _Plan(with_leaves(structure, placed), files, writers)


def _boxes(leaf: Leaf, x: jax.Array, written: dict[int, int]) -> list[tuple[Box, int]]:
    """The boxes of an array, each with its writer: the idlest of the processes that hold it.

    Adds their sizes to the bytes that each process writes.
    """
    holders: dict[Box, set[int]] = {}
    places: Any = x.sharding.devices_indices_map(x.shape)
    for device, index in places.items():
        holders.setdefault(box_of(index, x.shape), set()).add(device.process_index)
    if len(holders) > 1 and dtypes.is_key(x):
        raise CheckpointError(
            f"{leaf.name}: random keys that are split over processes. Save jax.random.key_data of them"
        )
    found = []
    for box, processes in sorted(holders.items()):
        process = min(processes, key=lambda p: (written[p], p))
        written[process] += 1 + int(np.prod([b - a for a, b in box])) * max(x.dtype.itemsize, 1)
        found.append((box, process))
    return found


def _name(leaf: Leaf, box: Box, taken: set[str]) -> str:
    """A unique name for a box of an array; the array's own name for all of it."""
    if box == tuple((0, n) for n in leaf.shape):
        return leaf.name
    name = f"{leaf.name}[{','.join(f'{a}:{b}' for a, b in box)}]"
    while name in taken:
        name += "'"
    taken.add(name)
    return name


def _bytes_of(x: jax.Array, leaf: Leaf, box: Box) -> np.ndarray:
    """The bytes of a box on a device of this process."""
    if dtypes.is_key(x):  # whole, on each of its devices
        return dtypes.bytes_of(x.addressable_data(0))
    shards = x.addressable_shards
    found = next(s.data for s in shards if box_of(s.index, leaf.shape) == box)
    return dtypes.bytes_of(found)
