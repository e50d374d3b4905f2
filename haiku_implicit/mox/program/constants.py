"""Comparison of constants: values in arguments and results that are not arrays."""

import dataclasses
import functools
import numbers
from typing import Any

import jax
import numpy as np


def identical(x: Any, y: Any) -> bool:
    """Whether one constant can stand for another in every program.

    Both must have the same type and the same value, also in containers. So 1, 1.0 and True are three
    constants, and 0.0 and -0.0 are two. NaN equals NaN.
    """
    if x is y:
        return True
    if type(x) is not type(y) or isinstance(x, jax.core.Tracer):
        return False
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return _same_arrays(x, y)
    if isinstance(x, numbers.Number) and not isinstance(x, int):
        return repr(x) == repr(y)
    parts = _parts_of(x)
    return bool(np.all(x == y)) if parts is None else _same_parts(parts, _parts_of(y))


def same_structure(x: Any, y: Any) -> bool:
    """Whether two tree definitions are equal and have identical constants (keys, static fields)."""
    if x is None or y is None:
        return x is y
    if x.num_nodes == x.num_leaves == y.num_nodes == y.num_leaves == 1:  # the most common case
        return True
    children, others = x.children(), y.children()
    same = len(children) == len(others) and identical(x.node_data(), y.node_data())
    return same and all(map(same_structure, children, others))


def _same_arrays(x: Any, y: Any) -> bool:
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = map(jax.random.key_data, (x, y))
    x, y = np.asarray(x), np.asarray(y)
    if x.dtype.hasobject:
        return all(map(identical, x.ravel().tolist(), y.ravel().tolist()))
    return x.tobytes() == y.tobytes()


def _parts_of(x: Any) -> Any:
    """The items of a container, as a sequence or a dict; None for anything else."""
    if isinstance(x, tuple | list | dict):
        return x
    if isinstance(x, set | frozenset):
        return dict.fromkeys(x)
    if isinstance(x, slice):
        return x.start, x.stop, x.step
    if isinstance(x, functools.partial):
        return x.func, x.args, x.keywords
    equals: Any = type(x).__eq__
    if dataclasses.is_dataclass(x) and not isinstance(x, type) and equals is not object.__eq__:
        return [getattr(x, field.name, None) for field in dataclasses.fields(x) if field.compare]
    return None


def _same_parts(xs: Any, ys: Any) -> bool:
    if len(xs) != len(ys):
        return False
    if not isinstance(xs, dict):
        return all(map(identical, xs, ys))
    keys = {key: key for key in ys}  # a key 1 finds True, too
    return all(
        key in keys and identical(key, keys[key]) and identical(xs[key], ys[key]) for key in xs
    )
