"""Files that other libraries write, whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator


def checked_target(path: str | os.PathLike[str]) -> str:
    """Where a file is written: the path, or what it links to.

    Raises:
      OSError: if the folder is missing, or there is something else than a file.
    """
    given, real = os.fspath(path), os.path.realpath(path)
    if os.path.isdir(real):
        raise IsADirectoryError(f"{given}: is a folder; give the name of a file")
    if os.path.exists(real) and not os.path.isfile(real):
        # (A file that takes its place would remove it, if the system allows that.)
        raise OSError(f"{given}: is a pipe or a device; give the name of a file")
    check_folder(given, os.path.dirname(real))
    return real


def check_folder(given: str, folder: str) -> None:
    """Raises unless a folder is there.

    Args:
      given: the path that is written to, for the error.
      folder: where it is.

    Raises:
      OSError: if it is missing, or a file. Folders are not made: they may be a typing error.
    """
    if os.path.isdir(folder):
        return
    if os.path.exists(folder):
        raise NotADirectoryError(f"{given}: {folder} is a file, and not a folder")
    raise FileNotFoundError(f"{given}: the folder {folder} is not there. Make it first")


def named(error: OSError, path: str | os.PathLike[str]) -> OSError:
    """An error of the system about a path, in place of one about a temporary file beside it."""
    if error.errno is None:
        return error
    return OSError(error.errno, error.strerror, os.fspath(path))


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary name beside `path`, whose file takes its place once it is complete and on disk.

    Args:
      path: of the file, in a folder that is there.

    Yields:
      The name to write to. If what is done with it fails, the file at `path` stays as it was.

    Raises:
      OSError: if the file can't be written, or nothing was.
    """
    given, path = path, checked_target(path)
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(e, OSError):
            raise named(e, given) from None
        raise
    sync_folder(path)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text, whole or not at all."""
    with replaced(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
        file.write(text)


def sync_folder(path: str) -> None:
    """Brings the names in the folder of a file to disk, where the system can."""
    try:
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(folder)
    except OSError:  # some file systems of networks
        pass
    finally:
        os.close(folder)
