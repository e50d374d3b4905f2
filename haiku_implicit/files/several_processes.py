"""Saves a checkpoint from one or several processes: each writes the arrays on its devices."""

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from haiku_implicit.core.typing import Array
from haiku_implicit.files import container, dtypes, naming
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.parts import Box, Part, box_of
from haiku_implicit.files.replacing import checked_target, named, sync_folder
from haiku_implicit.files.structure import Leaf, Structure, leaves_of, with_leaves
from haiku_implicit.files.writing import (
    PART,
    Stored,
    divided,
    main_metadata,
    number_in,
    part_text,
    write_file,
)

# The key for checksums in a file of parts, which the writer of the main file reads.
_CRCS = "haiku_implicit.crcs"
_LEADER = 0


def is_spread(x: Any) -> bool:
    """Whether parts of an array are on devices of other processes."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


class _Plan(NamedTuple):
    """The files to write and their writers: the same in all processes.

    Attributes:
      structure: the tree's structure, with the file of each array.
      files: the tensors of each file. The first one is the main file.
      writers: the process that writes each file.
    """

    structure: Structure
    files: list[list[Stored]]
    writers: list[int]


def save(
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
    me, agreed = (jax.process_index(), _agreed) if spread else (_LEADER, _alone)
    plan, crcs = _planned(structure, arrays, max_shard_bytes), dict[str, int]()
    path, count = os.path.realpath(given), len(plan.files) - 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(_naming(given))
        number, main = _begun(given, me, stack, agreed)
        number = _sent(number, me) if spread else number
        names = [naming.shard_name(path, number, i, count) for i in range(1, count + 1)]
        own = [i for i in range(1, count + 1) if plan.writers[i] == me]
        try:
            with agreed(path, "write its part"):
                for i in own:
                    part = {PART: part_text(path, number)}
                    _write(names[i - 1], plan.files[i], part, crcs, spread)
                if own:
                    sync_folder(path)
            with agreed(path, "write the main file"):
                if main is not None:
                    _finish(main, path, number, plan, names, crcs)
        except BaseException:
            if main is None or os.path.exists(main.name):  # else it is the checkpoint by now
                for name in [names[i - 1] for i in own] + ([main.name] if main else []):
                    naming.remove(name)
            raise
    if me == _LEADER:
        naming.remove_leftovers(path, lambda: number_in(path))


@contextlib.contextmanager
def _naming(given: str | os.PathLike[str]) -> Iterator[None]:
    """Names the file in errors of the system, in place of a temporary one."""
    try:
        yield
    except OSError as e:
        raise named(e, given) from None


def _begun(
    given: str | os.PathLike[str], me: int, stack: contextlib.ExitStack, agreed: Any
) -> tuple[str, BinaryIO | None]:
    """Begins a save: returns its number and, in the leading process, its main file."""
    number, main = "0" * 16, None
    with agreed(os.path.realpath(given), "begin"):
        path = checked_target(given)
        if me == _LEADER:
            number, main = naming.start(path)
            stack.enter_context(main)
    return number, main


def _sent(number: str, me: int) -> str:
    """The number of a save, which the leading process sends to all others."""
    sent = np.frombuffer(bytes.fromhex(number), np.uint8)
    received = multihost_utils.broadcast_one_to_all(sent, is_source=me == _LEADER)
    return np.asarray(received, np.uint8).tobytes().hex()


def _alone(path: str, what: str) -> contextlib.AbstractContextManager[None]:
    """The counterpart of `_agreed` in a save by one process."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def _agreed(path: str, what: str) -> Iterator[None]:
    """Waits at its end for all processes, and raises in all of them if one has an error.

    (Only for an `Exception`, not for an interrupt of this process.)
    """
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
    name: str, tensors: list[Stored], part: dict[str, str], crcs: dict[str, int], spread: bool
) -> None:
    """Writes a file next to the main one, with its checksums if another process may write that."""

    def known() -> dict[str, str]:
        texts = {tensor.name: f"{crcs.get(tensor.name, 0):08x}" for tensor in tensors}
        return part | ({_CRCS: json.dumps(texts)} if spread else {})

    with open(name, "xb") as file:
        write_file(file, tensors, crcs, known)


def _finish(
    main: BinaryIO, path: str, number: str, plan: _Plan, names: list[str], crcs: dict[str, int]
) -> None:
    """Writes the main file, with own checksums and those in the files of other processes."""
    for name, writer in zip(names, plan.writers[1:], strict=True):
        if writer == _LEADER:
            continue
        try:
            texts = json.loads(container.File(name).metadata[_CRCS])
        except FileNotFoundError:
            raise CheckpointError(
                f"{name}: process {writer} has written it, and process {_LEADER} does not see it. Save "
                "to a folder that all processes share"
            ) from None
        crcs |= {tensor: int(crc, 16) for tensor, crc in texts.items()}
    files = [os.path.basename(name) for name in names]
    metadata = functools.partial(main_metadata, plan.structure, crcs, number, files)
    write_file(main, plan.files[0], crcs, metadata)
    naming.commit(main, path)
    sync_folder(path)


# --- the plan ------------------------------------------------------------------------------------


def _planned(structure: Structure, arrays: Mapping[str, Array], max_shard_bytes: int) -> _Plan:
    leaves = list(leaves_of(structure))
    taken, written = {leaf.name for leaf in leaves}, dict.fromkeys(range(jax.process_count()), 0)
    main: list[Stored] = []
    own: dict[int, list[Stored]] = {process: [] for process in written}
    boxes: dict[str, list[tuple[str, Box]]] = {}
    for leaf in leaves:
        x = arrays[leaf.name]
        if not is_spread(x):
            read = functools.partial(dtypes.bytes_of, x)
            main.append(Stored(leaf.name, leaf.dtype, leaf.shape, read))
            continue
        boxes[leaf.name] = []
        for box, process in _boxes(leaf, x, written):
            name = leaf.name if _is_all(box, leaf) else _name(leaf, box, taken)
            boxes[leaf.name].append((name, box))
            shape = tuple(b - a for a, b in box)
            read = functools.partial(_bytes_of, x, leaf, box)
            tensor = Stored(name, leaf.dtype, shape, read)
            own[process].append(tensor)
            written[process] += tensor.nbytes
    files = divided(main, max_shard_bytes)
    writers = [_LEADER] * len(files)
    for process, tensors in own.items():
        found = divided(tensors, max_shard_bytes) if tensors else []
        files += found
        writers += [process] * len(found)
    places = {tensor.name: i for i, tensors in enumerate(files) for tensor in tensors}

    def placed(leaf: Leaf) -> Leaf:
        if leaf.name in places:
            return leaf._replace(file=places[leaf.name])
        parts = [
            Part(name, places[name], tuple(a for a, _ in box), tuple(b - a for a, b in box))
            for name, box in boxes[leaf.name]
        ]
        return leaf._replace(parts=tuple(parts))

    return _Plan(with_leaves(structure, placed), files, writers)


def _boxes(leaf: Leaf, x: jax.Array, written: Mapping[int, int]) -> list[tuple[Box, int]]:
    """The boxes of an array, each with its writer: the idlest of the processes that hold it."""
    holders: dict[Box, set[int]] = {}
    places: Any = x.sharding.devices_indices_map(x.shape)
    for device, index in places.items():
        holders.setdefault(box_of(index, x.shape), set()).add(device.process_index)
    if len(holders) > 1 and _is_key(x):
        raise CheckpointError(
            f"{leaf.name}: random keys that are split over processes. Save jax.random.key_data of them"
        )
    more = dict(written)
    found = []
    for box, processes in sorted(holders.items()):
        process = min(processes, key=lambda p: (more[p], p))
        more[process] += 1 + int(np.prod([b - a for a, b in box])) * max(x.dtype.itemsize, 1)
        found.append((box, process))
    return found


def _is_all(box: Box, leaf: Leaf) -> bool:
    return box == tuple((0, n) for n in leaf.shape)


def _name(leaf: Leaf, box: Box, taken: set[str]) -> str:
    """A unique name for a part of an array."""
    name = f"{leaf.name}[{','.join(f'{a}:{b}' for a, b in box)}]"
    while name in taken:
        name += "'"
    taken.add(name)
    return name


def _bytes_of(x: jax.Array, leaf: Leaf, box: Box) -> np.ndarray:
    """The bytes of a box on a device of this process."""
    if _is_key(x):  # whole, on each of its devices
        return dtypes.bytes_of(x.addressable_data(0))
    shards = x.addressable_shards
    found = next(s.data for s in shards if box_of(s.index, leaf.shape) == box)
    return dtypes.bytes_of(found)


def _is_key(x: jax.Array) -> bool:
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))
