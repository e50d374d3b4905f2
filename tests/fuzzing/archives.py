"""Mutations of `.npz` files and of pickles."""

import codecs
import collections
import importlib
import io
import pickle
import pickletools
import struct
import warnings
import zipfile
from typing import Any

import haiku as hk
import numpy as np

from tests.fuzzing import mutations

# --- npz -----------------------------------------------------------------------------------------

_HEADERS = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }",
    "{'descr': '<f4', 'fortran_order': True, 'shape': (%d, 2), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (0, %d, %d), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (%d,), }",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (%d,), }",
    "{'descr': '|S0', 'fortran_order': False, 'shape': (%d,), }",
    "{'descr': '<U%d', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '|V%d', 'fortran_order': False, 'shape': (2,), }",
    "{'descr': [('a', '<f4', (%d,))], 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-%d,), }",
    "{'descr': '<M8[ns]', 'fortran_order': False, 'shape': (%d,), }",
    "{'descr': '<f4', 'fortran_order': 3, 'shape': %d}",
    "{'descr': None, 'shape': (%d,)}",
    "[%d",
    "(" * 500 + "%d",
    "-" * 3000 + "%d",
)


def mutated_npz(data: bytes, draw: Any) -> bytes:
    """An `.npz` file, changed."""
    kind = draw.random()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            members = [[x.filename, file.read(x), x.compress_type] for x in file.infolist()]
    except Exception:  # whatever is wrong with it by now
        return mutations.of_bytes(data, draw)
    if kind < 0.3 or not members:
        return mutations.of_bytes(data, draw)
    if kind < 0.45:  # the directory, in the end
        at = max(0, data.find(b"PK\1\2"))
        return data[:at] + mutations.of_bytes(data[at:], draw)
    member = draw.choice(members)
    what = draw.randrange(6)
    if what == 0:
        member[0] = draw.choice((*mutations.TEXTS, "../x.npy", "/a/b.npy", "a/b", members[0][0]))
    elif what == 1:
        member[1] = mutations.of_bytes(member[1], draw)
    elif what == 2:
        members.append(list(member))
    elif what == 3:
        member[1] = member[1] + bytes(draw.choice((1, 1 << 20)))
        member[2] = zipfile.ZIP_DEFLATED
    else:
        text = draw.choice(_HEADERS)
        text = text.replace("%d", str(draw.choice(mutations.NUMBERS))) + "\n"
        version = draw.choice((b"\1\0", b"\2\0", b"\3\0", b"\7\0"))
        size = struct.pack("<H" if version == b"\1\0" else "<I", len(text))
        member[1] = b"\x93NUMPY" + version + size + text.encode() + bytes(24)
    return _zip(members)


def _zip(members: list[Any]) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w") as file:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, data, compression in members:
            info = zipfile.ZipInfo(name.replace("\0", "0").replace("\ud800", "s"))
            info.compress_type = compression
            file.writestr(info, data)
    return out.getvalue()


# --- pickles -------------------------------------------------------------------------------------


class Call:
    """In a pickle, what a function returns, and a state that is then set."""

    def __init__(self, *parts: Any):
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


def _argument(draw: Any, depth: int = 0) -> Any:
    if depth < 2 and draw.random() < 0.2:
        return _call(draw, depth + 1)
    return draw.choice(
        (
            lambda: None,
            lambda: draw.choice(mutations.NUMBERS),
            lambda: -1,
            lambda: 1.5,
            lambda: draw.choice(("latin1", "f4", "<", ">", "b", "C", "F", "x", "O", "V8", "M8[s]")),
            lambda: draw.choice((b"", b"b", bytes(16), bytearray(8))),
            lambda: tuple(
                draw.choice((0, 1, 2, 4, -1, 2**40, 2**62)) for _ in range(draw.randrange(4))
            ),
            lambda: np.dtype(draw.choice(("f4", "i1", "b1", "c16", "V4", "O", "U2", "M8[s]"))),
            lambda: np.ndarray,
            lambda: {"a": np.ones(2)},
            lambda: collections.OrderedDict(a=1),
            lambda: np.arange(4.0),
            lambda: np.float32(2),
            lambda: hk.data_structures.to_immutable_dict({"a": {"b": np.ones(2)}}),
            lambda: float("nan"),
            lambda: {"a", "b"},
            lambda: frozenset([1]),
            lambda: 1 + 2j,
        )
    )()


def _call(draw: Any, depth: int = 0) -> Any:
    """A call of what the unpickler knows, with arguments of any kind."""
    argument = lambda: _argument(draw, depth)  # noqa: E731
    core = importlib.import_module("numpy.core" if np.__version__ < "2" else "numpy._core")
    functions = [core.multiarray._reconstruct, core.numeric._frombuffer, np.dtype]
    functions += [core.multiarray.scalar, collections.OrderedDict, codecs.encode]
    functions += [type(hk.data_structures.to_immutable_dict({}))]
    function, args, *state = draw.choice(
        (
            (draw.choice(functions), tuple(argument() for _ in range(draw.randrange(5)))),
            (functions[0], (np.ndarray, (0,), b"b"), tuple(argument() for _ in range(5))),
            (functions[0], (np.ndarray, (0,), b"b"), argument()),
            (functions[1], (bytes(24), np.dtype("f4"), argument(), draw.choice("CFX"))),
            (functions[1], (argument(), np.dtype("f4"), (2, 3), "C")),
            (
                np.dtype,
                ("f4", False, True),
                tuple(argument() for _ in range(draw.choice((7, 8, 9)))),
            ),
            (functions[3], (np.dtype("f4"), argument())),
        )
    )
    if not state and draw.random() < 0.2:
        state = [argument()]
    if draw.random() < 0.1:
        state[:] = [None, iter([argument()]), iter([("a", argument())])]
    return Call(function, args, *state)


def _laughs(draw: Any) -> bytes:
    """A small pickle of much: lists or tuples of the same one, or places that are far away."""
    depth, width = draw.choice(((12, 10), (40, 2), (3, 3))), draw.choice((2, 10))
    kind = draw.randrange(7)
    if kind == 0:
        found: Any = []
        for _ in range(depth[0]):
            found = [found] * depth[1]
        return pickle.dumps({"a": found})
    if kind == 1:
        found = ()
        for _ in range(depth[0]):
            found = (found,) * width
        return pickle.dumps({"a": found})
    if kind == 2:
        found = ("a",)
        for _ in range(min(depth[0], 12)):
            found = (found,) * 2
        return pickle.dumps({found: np.ones(2)})
    number = draw.choice(mutations.NUMBERS)
    if kind == 3:
        return b"\x80\x04}r" + struct.pack("<I", number % 2**32) + b"."
    if kind == 4:
        code = draw.choice((b"\x8e", b"\x8d", b"\x96"))
        return b"\x80\x05" + code + struct.pack("<Q", number % 2**64) + b"abc."
    if kind == 5:
        return b"\x80\x04\x8b" + struct.pack("<i", number % 2**31) + b"abc."
    looped: list[Any] = []
    looped.append(looped)
    return pickle.dumps({"a": looped})


def mutated_pickle(data: bytes, draw: Any) -> bytes:
    """A changed pickle (its bytes, operations or calls), or one made to do harm."""
    kind = draw.random()
    if kind < 0.35:
        return mutations.of_bytes(data, draw)
    if kind < 0.7:
        return _of_operations(data, draw)
    if kind < 0.95:
        tree = {"linear": {"w": np.ones((2, 3), np.float32), "b": _call(draw)}}
        try:
            return pickle.dumps(tree, draw.randrange(6))
        except Exception:  # Python doesn't pickle everything that might be in a pickle
            return mutations.of_bytes(data, draw)
    return _laughs(draw)


def _of_operations(data: bytes, draw: Any) -> bytes:
    """A pickle with some of its operations gone, twice there, or elsewhere."""
    try:
        places = [at for _, _, at in pickletools.genops(data)]
    except Exception:  # it is damaged already
        return mutations.of_bytes(data, draw)
    ends = [*places[1:], len(data)]
    operations = [data[a:b] for a, b in zip(places, ends, strict=True)]
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(operations))
        count = draw.choice((1, 1, 2, 5))
        part = operations[at : at + count]
        kind = draw.randrange(4)
        if kind in (0, 3):
            del operations[at : at + count]
        if kind in (1, 3):
            to = draw.randrange(len(operations) + 1)
            operations[to:to] = part
        if kind == 2:
            codes = (b"N", b"}", b"]", b")", b"0", b"2", b"R", b"b", b"(", b"t", b"u", b"a", b"s")
            operations[at] = draw.choice((*codes, b"e", b"\x81", b"\x90", b"\x8f", b"K\7", b"\x94"))
    return b"".join(operations)
