"""Mutations of GGUF files: of their metadata, their table, and the counts and lengths in front of these."""

import struct
from typing import Any

import gguf

from tests.fuzzing import mutations

_STRING, _ARRAY = 8, 9
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT = b"general.alignment"
_KINDS = [int(kind) for kind in gguf.GGMLQuantizationType]


class Header:
    """A GGUF file in parts: values of the metadata are bytes, tensors `[name, dims, kind, offset]`."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 4
        self.version, num_tensors, num_keys = self._take("IQQ")
        self.metadata = [[self._text(), *self._value()] for _ in range(num_keys)]
        self.tensors = []
        for _ in range(num_tensors):
            name = self._text()
            (ndim,) = self._take("I")
            dims = list(self._take(f"{ndim}Q"))
            self.tensors.append([name, dims, *self._take("IQ")])
        self.body = data[-(-self.at // 32) * 32 :]

    def _take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return found

    def _text(self) -> bytes:
        (length,) = self._take("Q")
        self.at += length
        return self.data[self.at - length : self.at]

    def _value(self) -> tuple[int, bytes]:
        (kind,) = self._take("I")
        start = self.at
        self._skip(kind)
        return kind, self.data[start : self.at]

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._text()
        elif kind == _ARRAY:
            inner, count = self._take("IQ")
            for _ in range(count):
                self._skip(inner)
        else:
            self.at += _WIDTHS[kind]
        if self.at > len(self.data):
            raise ValueError("damaged")

    def written(self, draw: Any, lies: float) -> bytes:
        """The file; so many of its lengths and counts are wrong."""

        def number(n: int, layout: str = "Q") -> bytes:
            if draw.random() < lies:
                n = draw.choice((*mutations.NUMBERS, n + 1, max(0, n - 1)))
            return struct.pack(f"<{layout}", n % 256 ** struct.calcsize(layout))

        text = lambda x: number(len(x)) + x  # noqa: E731
        found = b"GGUF" + number(self.version, "I") + number(len(self.tensors))
        found += number(len(self.metadata))
        for key, kind, value in self.metadata:
            found += text(key) + number(kind, "I") + value
        for name, dims, kind, offset in self.tensors:
            found += text(name) + number(len(dims), "I") + b"".join(map(number, dims))
            found += number(kind, "I") + number(offset)
        return found + bytes(-len(found) % 32) + self.body


def mutated(data: bytes, draw: Any) -> bytes:
    """A GGUF file, changed."""
    try:
        header = Header(data)
    except Exception:  # it is damaged already
        return mutations.of_bytes(data, draw)
    kind = draw.random()
    if kind < 0.15:
        return mutations.of_bytes(data, draw)
    for _ in range(draw.choice((1, 1, 2))):
        (_change_metadata if kind < 0.45 else _change_table)(header, draw)
    return header.written(draw, draw.choice((0, 0, 0, 0.02, 0.1)))


def _change_metadata(header: Header, draw: Any) -> None:
    number = draw.choice(mutations.NUMBERS)
    array = lambda inner, count, rest=b"": struct.pack("<IQ", inner, count % 2**64) + rest  # noqa: E731
    deep = struct.pack("<IQ", _ARRAY, 1) * draw.choice((3, 100, 3000)) + array(0, 1, b"\0")
    new = draw.choice(
        (
            [_ALIGNMENT, 4, struct.pack("<I", number % 2**32)],
            [_ALIGNMENT, 10, struct.pack("<Q", number % 2**64)],
            [_ALIGNMENT, _STRING, struct.pack("<Q", 1) + b"8"],
            [_ALIGNMENT, _ARRAY, array(4, 1, struct.pack("<I", 8))],
            [b"x", _ARRAY, array(draw.choice([*_WIDTHS, _STRING, _ARRAY, 99]), number)],
            [b"x", _ARRAY, deep],
            [b"x", draw.choice((13, 99, 2**31)), bytes(8)],
            [b"x", 7, b"\7"],
            [b"\xff\xfe", 0, b"\0"],
            [b"x" * 5000, 0, b"\0"],
            [b"x", _STRING, struct.pack("<Q", number % 2**64) + b"text"],
            [b"x", _STRING, struct.pack("<Q", 2) + b"\xff\xfe"],
            [b"x", _ARRAY, array(0, 5000, bytes(5000))],
            list(draw.choice(header.metadata or [[b"", 0, b"\0"]])),
        )
    )
    header.metadata.insert(draw.randrange(len(header.metadata) + 1), new)


def _change_table(header: Header, draw: Any) -> None:
    if not header.tensors:
        return
    tensor = draw.choice(header.tensors)
    kind = draw.randrange(8)
    if kind == 0:
        tensor[0] = draw.choice((b"", b"\xff", header.tensors[0][0], b"other", b"x" * 300))
    elif kind == 1:
        tensor[1] = [
            draw.choice((*mutations.NUMBERS, *tensor[1])) for _ in range(draw.randrange(7))
        ]
    elif kind == 2:
        axis = draw.randrange(len(tensor[1]) or 1)
        tensor[1][axis : axis + 1] = [draw.choice((0, 1, 31, 32, 64, 256, 2**32, 2**63))]
    elif kind == 3:
        tensor[2] = draw.choice((*_KINDS, 4, 5, 36, 1000, 2**32 - 1))
    elif kind == 4:
        tensor[3] = draw.choice((*mutations.NUMBERS, len(header.body), len(header.body) - 1))
    elif kind == 5:
        header.tensors.remove(tensor)
    elif kind == 6:
        header.tensors.append(list(tensor))
    else:  # a tensor of another type that fits, behind the others
        name = draw.choice([k for k in gguf.GGMLQuantizationType if k in gguf.GGML_QUANT_SIZES])
        elements, width = gguf.GGML_QUANT_SIZES[name]
        rows, blocks = draw.choice(((1, 1), (3, 2), (2, 1)))
        header.body += bytes(-len(header.body) % 32)
        tensor[1:] = [[elements * blocks, rows], int(name), len(header.body)]
        header.body += draw.randbytes(width * blocks * rows)
