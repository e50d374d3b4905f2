"""Digests of arrays, by which files tell whether frozen weights are still the same."""

import hashlib

import jax
import numpy as np

from haiku_implicit.core.array import flatten_one_level, is_implicit, static_items
from haiku_implicit.core.typing import Array


def digest(value: Array) -> str:
    """A digest of an array's types, shapes and bytes, dense or implicit, in 16 hexadecimal digits.

    Structs stand for arrays of any bytes. None has no bytes.
    """
    found = hashlib.blake2b(digest_size=8)

    def add(x: Array) -> None:
        if is_implicit(x):
            found.update(f"{type(x).__name__}{sorted(static_items(x).items())}".encode())
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
