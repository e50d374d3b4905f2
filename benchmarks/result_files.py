"""Writes results as JSON files, with one line for each case, so that diffs are readable."""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any


def write(results: Any, path: pathlib.Path) -> None:
    """Writes results to a temporary file, which then replaces the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(to_text(results) + "\n")
    os.replace(temporary, path)


def to_text(value: Any, indent: str = "") -> str:
    """Returns JSON in which a dictionary that holds no other one takes one line.

    >>> print(to_text({"turns": 2, "cases": [{"rows": 1, "seconds": [0.5, 0.25]}, {"rows": 8}]}))
    {
     "turns": 2,
     "cases": [
      {"rows": 1, "seconds": [0.5, 0.25]},
      {"rows": 8}
     ]
    }
    """
    if not any(isinstance(part, dict) for part in _parts(value)):
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{json.dumps(name)}: {to_text(part, inner)}" for name, part in value.items()]
        first, last = "{}"
    else:
        lines = [to_text(part, inner) for part in value]
        first, last = "[]"
    body = f",\n{inner}".join(lines)
    return f"{first}\n{inner}{body}\n{indent}{last}"


def _parts(value: Any) -> Iterator[Any]:
    """Yields all values inside a value."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield part
            yield from _parts(part)
