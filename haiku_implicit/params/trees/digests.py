"""Digests of arrays, by which files tell whether frozen weights are still the same."""

import dataclasses
import hashlib
import json
import zlib
from typing import Any

import jax
import numpy as np

from haiku_implicit.core.array import data_names, flatten_one_level, is_implicit, static_items
from haiku_implicit.core.typing import Array


def digest(value: Array) -> str:
    """A digest of an array's types, shapes and bytes, dense or implicit, in 16 hexadecimal digits.

    Structs stand for arrays of any bytes. None has no bytes.
    """
    found = hashlib.blake2b(digest_size=8)

    def add(x: Array) -> None:
        if is_implicit(x):
            found.update(f"{type(x).__name__}{_static(x)}".encode())
            for part in flatten_one_level(x)[0]:
                add(part)
            return
        if x is None:
            return
        if isinstance(x, jax.ShapeDtypeStruct):
            found.update(f"{x.dtype}{x.shape}".encode())
            return
        if not hasattr(x, "dtype"):  # a Python number
            x = np.asarray(x)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            x = jax.random.key_data(x)
        array = np.ascontiguousarray(x)
        found.update(f"{array.dtype.name}{array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)

    add(value)
    return found.hexdigest()


def _static(x: Array) -> list[tuple[str, Any]]:
    """The static metadata; fields that a class got later count from their first other value on."""
    later = {f.name: f.default for f in dataclasses.fields(x) if f.metadata.get("later")}
    items = sorted(static_items(x).items())
    return [(name, own) for name, own in items if name not in later or own != later[name]]


def options(path: str, value: Array) -> dict[str, str]:
    """The types and static metadata of an array and of the implicit arrays in it, by their names."""
    if not is_implicit(value):
        return {}
    found = {f"{path}: type": type(value).__name__}
    found |= {f"{path}: {name}": repr(x) for name, x in static_items(value).items()}
    for name in data_names(type(value)):
        found |= options(f"{path}/{name}", getattr(value, name))
    return found


def text_of(value: Array) -> str:
    """The dtype and the shape of an array or a struct, and the value of a single number."""
    if not hasattr(value, "dtype"):  # a Python number
        return repr(value)
    text = f"{value.dtype}{list(value.shape)}"
    is_known = not isinstance(value, jax.ShapeDtypeStruct) and np.size(value) == 1
    if is_known and jax.dtypes.issubdtype(value.dtype, np.number):
        text += f" {np.asarray(value).item()}"
    return text


def as_rows(texts: dict[str, str]) -> np.ndarray:
    """Texts as rows of an array of digests, whose first row `0, 0, 0, bytes` no digest is."""
    packed = zlib.compress(json.dumps(texts).encode())
    packed += bytes(-len(packed) % 16)
    rows = np.frombuffer(packed, np.uint32).reshape(-1, 4)
    return np.concatenate([np.array([[0, 0, 0, len(packed)]], np.uint32), rows])


def split_rows(rows: np.ndarray) -> tuple[np.ndarray, dict[str, str]]:
    """The digests, and the texts that `as_rows` put behind them; older files have none."""
    starts = np.flatnonzero(~rows[:, :3].any(1))
    if not starts.size:
        return rows, {}
    packed = np.ascontiguousarray(rows[starts[0] + 1 :], np.uint32).tobytes()
    try:
        texts = json.loads(zlib.decompressobj().decompress(packed))
    except (zlib.error, ValueError):  # damaged; only messages need them
        texts = {}
    return rows[: starts[0]], texts
