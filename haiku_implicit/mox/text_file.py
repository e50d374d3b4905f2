"""Text in files that are there whole, or not at all."""

import os
import pathlib
import uuid

PathLike = str | os.PathLike[str]


def write(path: PathLike, text: str) -> None:
    """Writes a file under a temporary name, and renames it. What was there before is not lost."""
    target = pathlib.Path(path)
    new = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with new.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)
