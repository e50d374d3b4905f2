"""Files of parameters: one record after another, not compressed here."""

import pathlib
import struct

import jax.numpy as jnp
import numpy as np


class RecordError(Exception):
    """A record that is cut off."""


def encode_record(scope, name, value):
    value = np.ascontiguousarray(value)
    texts = [text.encode() for text in (scope, name, str(value.dtype))]
    shape = struct.pack(f"<{value.ndim}i", *value.shape)
    sizes = *map(len, texts), value.ndim, value.nbytes
    return struct.pack("<5i", *sizes) + b"".join(texts) + shape + value.tobytes()


def get_model_haiku_params(folder):
    files = sorted(pathlib.Path(folder).glob("*.bin"))
    if not files:
        raise FileNotFoundError(f"No models matched in {folder}")
    data, start, found = files[0].read_bytes(), 0, {}

    def taken(size):
        nonlocal start
        part, start = data[start : start + size], start + size
        if len(part) < size:
            raise RecordError(f"Incomplete record in {files[0]}")
        return part

    while start < len(data):
        *sizes, axes, nbytes = struct.unpack("<5i", taken(20))
        scope, name, dtype = (taken(size).decode() for size in sizes)
        shape = struct.unpack(f"<{axes}i", taken(4 * axes))
        value = np.frombuffer(taken(nbytes), dtype).reshape(shape)
        found.setdefault(scope, {})[name] = jnp.asarray(value)
    return found
