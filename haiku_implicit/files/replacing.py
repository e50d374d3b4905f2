"""Atomic replacement of files, also of files that other libraries write."""

import contextlib
import os
import secrets
from collections.abc import Iterator


def checked_target(path: str | os.PathLike[str]) -> str:
    """The path at which a file is written: `path`, or the target of its link.

    Raises:
      OSError: if the folder is missing, or something other than a file is there.
    """
    given, real = os.fspath(path), os.path.realpath(path)
    if os.path.isdir(real):
        raise IsADirectoryError(f"{given}: is a folder; give the name of a file")
    if os.path.exists(real) and not os.path.isfile(real):
        # (A file that replaces it would remove it, if the system allows that.)
        raise OSError(f"{given}: is a pipe or a device; give the name of a file")
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
        raise NotADirectoryError(f"{given}: {folder} is a file, and not a folder")
    raise FileNotFoundError(f"{given}: the folder {folder} is not there. Make it first")


@contextlib.contextmanager
def naming_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of the system name `path` in place of the temporary file next to it."""
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
        with contextlib.suppress(OSError):
            os.unlink(temporary)
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
