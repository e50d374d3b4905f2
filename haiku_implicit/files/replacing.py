"""Atomic replacement of files: temporary names, the files of a save, and leftovers of others."""

import contextlib
import importlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from haiku_implicit.core.messages import see

# Windows lacks such locks, but open files cannot be deleted there.
fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

# Each save has its own number, which is in the names of all files that it writes.
_NUMBER = "[0-9a-f]{16}"


def checked_target(path: str | os.PathLike[str]) -> str:
    """The path at which a file is written: `path`, or the target of its link.

    Raises:
      OSError: if the folder is missing, or something other than a file is there.
    """
    given, real = os.fspath(path), os.path.realpath(path)
    if os.path.isdir(real):
        raise IsADirectoryError(f"{given}: is a folder; give the name of a file {see('files')}")
    if os.path.exists(real) and not os.path.isfile(real):
        # (A file that replaces it would remove it, if the system allows that.)
        raise OSError(f"{given}: is a pipe or a device; give the name of a file {see('files')}")
    check_folder(given, os.path.dirname(real))
    return real


def check_folder(given: str, folder: str) -> None:
    """Raises unless a folder exists.

    Args:
      given: the path to write to, for the error.
      folder: the folder of `given`.

    Raises:
      OSError: if it is missing, or a file. Folders are not made: the name may be a typo.
    """
    if os.path.isdir(folder):
        return
    if os.path.exists(folder):
        raise NotADirectoryError(f"{given}: {folder} is a file, and not a folder {see('files')}")
    raise FileNotFoundError(
        f"{given}: the folder {folder} is not there. Make it first {see('files')}"
    )


@contextlib.contextmanager
def naming_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of the system name `path` instead of the temporary file next to it."""
    try:
        yield
    except OSError as e:
        raise e if e.errno is None else OSError(e.errno, e.strerror, os.fspath(path)) from None


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[str]:
    """Replaces the file at `path` by a temporary one, once that is complete and on disk.

    Args:
      path: the file, in an existing folder.

    Yields:
      The temporary name to write to. If the block fails, the file at `path` is kept.

    Raises:
      OSError: if the file can't be written, or nothing was.
    """
    given, path = path, checked_target(path)
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}")
    try:
        with naming_errors(given):
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    sync_folder(path)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file atomically."""
    with replaced(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
        file.write(text)


def sync_folder(path: str) -> None:
    """Brings the names in the folder of a file to disk, if the system can."""
    try:
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(folder)
    except OSError:  # some network file systems
        pass
    finally:
        os.close(folder)


# --- the files of a save ---------------------------------------------------------------------------


def temporary_name(path: str, number: str) -> str:
    """The name under which the main file is written before it is renamed."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{number}.part")


def shard_name(path: str, number: str, index: int, count: int) -> str:
    """The name of a file with tensors that do not fit into the main file; `index` counts from 1."""
    return f"{path}.{number}-{index:05}-of-{count:05}.safetensors"


def number_of(path: str, name: str) -> str | None:
    """The number of the save that wrote `name` next to the main file; None for any other file."""
    main = re.escape(os.path.basename(path))
    shard = rf"{main}\.({_NUMBER})-\d{{5,}}-of-\d{{5,}}\.safetensors"
    found = re.fullmatch(shard, name) or re.fullmatch(rf"\.{main}\.({_NUMBER})\.part", name)
    return found[1] if found else None


def start(path: str) -> tuple[str, BinaryIO]:
    """Returns a number for a save and its temporary file, locked while it is open."""
    while True:
        number = secrets.token_hex(8)
        name = temporary_name(path, number)
        file = open(name, "x+b")  # noqa: SIM115
        # Another save may have removed it as a leftover before it was locked.
        if _lock(file) is not False and _is_at(name, file):
            return number, file
        file.close()
        remove(name)


def _is_at(name: str, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.stat(name), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def commit(file: BinaryIO, path: str) -> None:
    """Renames a temporary file to `path` while it is open and so locked against other saves."""
    if fcntl is None:
        file.close()  # Windows does not rename open files
    os.replace(file.name, path)


def _lock(file: BinaryIO) -> bool | None:
    """Locks a file. Returns False if it is locked already, None if the system lacks such locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_leftovers(path: str, current: Callable[[], str | None]) -> None:
    """Removes the files of replaced and killed saves, but not of the present save or running ones.

    Args:
      path: the main file.
      current: returns the number of the save that wrote the main file, or None if it can't be told. It
        is called last, to see files that were renamed in the meantime.
    """
    folder = os.path.dirname(path)
    found = {name: number for name in os.listdir(folder) if (number := number_of(path, name))}
    dead = {number for number in set(found.values()) if _has_ended(path, number)}
    kept = current()
    for name, number in found.items():
        if number in dead and kept not in (None, number):
            remove(os.path.join(folder, name))


def _has_ended(path: str, number: str) -> bool:
    """Whether a save is no longer running. Removes the temporary file of a killed save."""
    name = temporary_name(path, number)
    try:
        with open(name, "r+b") as file:
            ended = _lock(file) is True
            if ended:
                remove(name)  # while it is locked: see `start`
            return ended
    except FileNotFoundError:
        return True
    except OSError:
        return False


def remove(path: str) -> None:
    """Removes a file, if that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)
