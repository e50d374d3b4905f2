"""Mutations of bytes, of JSON, and of folders of files. A case is `{name: bytes or Special}`."""

import json
from typing import Any, NamedTuple

# What may stand in place of a number, in JSON or in a field of bytes.
NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 127, 255, 256, 1000, 2**15, 2**16, 2**31 - 1, 2**31)
NUMBERS += (2**32 - 1, 2**32, 2**40, 2**53, 2**56, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = (
    "",
    "x",
    "float32",
    "int4",
    "int8",
    "uint4",
    "nf4",
    "../x",
    "/etc/passwd",
    "a/b",
    "a//b",
    ".",
)
TEXTS += (
    "..",
    "\0",
    "\ud800",
    "é" * 40,
    "key:threefry2x32",
    "key:x",
    "V99999999",
    "O",
    "O8",
    "m8[ns]",
)
TEXTS += ("float8_e4m3fn", "bool", "complex64", "float64", "i4,i4", "(2,)f4", "x" * 300, "%s{}\n")


class Special(NamedTuple):
    """Something in place of a file.

    Attributes:
      kind: 'link', 'pipe' or 'folder'.
      target: of a link.
    """

    kind: str
    target: str = ""


SPECIALS = (
    *(Special("link", to) for to in ("/dev/zero", "/dev/null", "missing", "..", "/etc/passwd")),
    Special("link", "itself"),
    Special("pipe"),
    Special("folder"),
)

# How files of other kinds begin.
_HEADS = (
    b"",
    b"PK\x03\x04",
    b"PK\x05\x06" + bytes(18),
    b"\x1f\x8b\x08\0",
    b"\x93NUMPY\x01\0",
    b"GGUF",
)
_HEADS += (
    b"\x80\x04",
    b"\xff" * 16,
    b"{",
    b"[" * 3000,
    b"\x28\xb5\x2f\xfd",
    b"version https://git-lfs",
)


def of_bytes(data: bytes, draw: Any) -> bytes:
    """Something else at a random place, or a part that is gone, twice there, or cut off."""
    at = draw.randrange(len(data) + 1)
    if draw.random() < 0.5:
        at = draw.randrange(min(len(data), 200) + 1)  # where the header is
    end = min(len(data), at + draw.choice((1, 1, 2, 4, 8, 16, 100)))
    kind = draw.randrange(9)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[end:]
    if kind == 2:
        return data[:at] + draw.randbytes(draw.choice((1, 2, 8, 100))) + data[at:]
    if kind == 3:
        return data[:end] + data[at:end] * draw.choice((1, 2, 50)) + data[end:]
    if kind == 4:
        width = draw.choice((1, 2, 4, 8))
        number = draw.choice(NUMBERS) % 256**width
        return data[:at] + number.to_bytes(width, "little") + data[at + width :]
    if kind == 5:
        head = draw.choice(_HEADS)
        return head + data[draw.choice((0, len(head))) :]
    if kind == 6:
        other = draw.randrange(len(data) + 1)
        return data[:at] + data[other : other + end - at] + data[end:]
    damaged = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 20)) if damaged else 0):
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


# --- JSON ----------------------------------------------------------------------------------------


def junk(draw: Any) -> Any:
    """A value that was hardly expected."""
    return draw.choice(
        (
            lambda: None,
            lambda: draw.random() < 0.5,
            lambda: draw.choice(NUMBERS),
            lambda: -draw.choice(NUMBERS),
            lambda: draw.choice(
                (0.0, -0.0, 1.5, 1e308, 5e-324, float("nan"), float("-inf"), 10**400)
            ),
            lambda: draw.choice(TEXTS),
            lambda: draw.choice(([], {}, [[]], [0], [1, 2], {"": None}, [None] * 40, {"value": 1})),
            lambda: [draw.choice(NUMBERS[:12]) for _ in range(draw.randrange(5))],
            lambda: [draw.choice((0, 1, 2**31, 2**40, 2**55)) for _ in range(draw.randrange(1, 5))],
            lambda: nested(draw.choice((30, 200, 900, 3000)), draw.random() < 0.5),
        )
    )()


def nested(depth: int, mapping: bool) -> Any:
    """Containers within containers."""
    found: Any = []
    for _ in range(depth):
        found = {"a": found} if mapping else [found]
    return found


def parts_of(x: Any) -> list[tuple[Any, Any]]:
    """All places in JSON, as `(container, key)`."""
    found = []
    waiting = [x]
    while waiting:
        own = waiting.pop()
        keys = range(len(own)) if isinstance(own, list) else own if isinstance(own, dict) else ()
        for key in keys:
            found.append((own, key))
            waiting.append(own[key])
    return found


def of_json(x: Any, draw: Any) -> Any:
    """JSON with a random place changed: into junk, a near number, or what is elsewhere; or gone."""
    x = json.loads(json.dumps(x))
    places = parts_of(x)
    if not places or draw.random() < 0.02:
        return junk(draw)
    own, key = draw.choice(places)
    kind, value = draw.randrange(7), own[key]
    if kind == 0:
        del own[key]
    elif kind == 1:
        other, name = draw.choice(places)
        own[key] = json.loads(json.dumps(other[name]))
    elif kind == 2 and isinstance(own, list):
        own.insert(key, json.loads(json.dumps(value)))
    elif kind == 2:
        own[draw.choice(TEXTS)] = value
    elif kind == 3 and isinstance(own, list):
        draw.shuffle(own)
    elif kind == 3:
        own[draw.choice(TEXTS)] = own.pop(key)
    elif kind == 4 and type(value) in (int, float):
        own[key] = draw.choice((value + 1, value - 1, value * 2, -value, value / 2, value // 2))
    elif kind == 4 and type(value) is str:
        same = [o[k] for o, k in places if type(o[k]) is str]
        own[key] = draw.choice(same)
    else:
        own[key] = junk(draw)
    return x


def text_of(x: Any, draw: Any) -> bytes:
    """JSON as a text, a few times with something in it that only texts can have."""
    try:
        text = json.dumps(x, separators=(",", ":"))
    except (RecursionError, ValueError):  # numbers of too many digits
        text = "[" * 5000 + "]" * 5000
    if draw.random() < 0.9:
        return text.encode()
    kind = draw.randrange(5)
    at = text.find(":", draw.randrange(len(text)) if text else 0) + 1
    if kind == 0 and at:
        return f"{text[:at]}{'9' * draw.choice((30, 5000))}{text[at:]}".encode()
    if kind == 1 and at:
        return f"{text[:at]}{'[' * draw.choice((50, 900, 100_000))}{text[at:]}".encode()
    if kind == 2 and text.startswith("{") and len(text) > 2:
        return f"{text[:-1]},{text[1:]}".encode()  # each key twice
    if kind == 3:
        return text.encode(draw.choice(("utf-16", "utf-32", "utf-8-sig")))
    return of_bytes(text.encode(), draw)


def of_json_file(data: bytes, draw: Any) -> bytes:
    """A file of JSON."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return of_bytes(data, draw)
    try:
        for _ in range(draw.choice((1, 1, 2, 4))):
            found = of_json(found, draw)
    except RecursionError:  # what was put in is nested too deeply to be changed again
        pass
    return text_of(found, draw)


# --- folders -------------------------------------------------------------------------------------


def of_folder(files: dict[str, Any], draw: Any) -> dict[str, Any]:
    """A folder in which a file is gone, another one, twice there, or something other than a file."""
    files = dict(files)
    name = draw.choice(list(files))
    other = draw.choice(list(files))
    kind = draw.randrange(4)
    if kind == 0 and len(files) > 1:
        del files[name]
    elif kind == 1:
        files[name] = files[other]
    elif kind == 2:
        files[name], files[other] = files[other], files[name]
    else:
        files[name] = draw.choice(SPECIALS)
    return files
