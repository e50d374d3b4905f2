"""Files that other libraries write, whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary name beside `path`, whose file takes its place once it is complete and on disk.

    Args:
      path: of the file. Its folder is made if it is missing.

    Yields:
      The name to write to. If what is done with it fails, the file at `path` stays as it was.

    Raises:
      OSError: if the file can't be written, or nothing was.
    """
    path = os.path.realpath(path)
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path}: is a folder; give the name of a file")
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(path)


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
