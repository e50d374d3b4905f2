"""Files of dataclasses: an `.npz` whose keys are paths with colons."""

import dataclasses
import typing

import numpy as np


def dump(file, value):
    np.savez(file, **dict(_flat(value, "")))


def load(file, kind):
    tree = {}
    for path, value in np.load(file).items():
        *folders, last = path.split(":")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = value
    return _typed(kind, tree)


def _flat(value, prefix):
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif isinstance(value, tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return [(prefix, np.asarray(value))]
    join = f"{prefix}:" if prefix else ""
    return [pair for key, own in value.items() for pair in _flat(own, f"{join}{key}")]


def _typed(kind, value):
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _typed(own, value[name]) for name, own in hints.items()})
    if typing.get_origin(kind) is tuple:
        (item, _) = typing.get_args(kind)
        return tuple(_typed(item, value[str(i)]) for i in range(len(value)))
    return value if kind is dict else kind(value)
