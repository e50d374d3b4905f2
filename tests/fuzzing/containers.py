"""Mutations of safetensors files, those of `haiku_implicit.save` with checksums that are right again."""

import json
import math
import zlib
from typing import Any

import numpy as np

from haiku_implicit.files import dtypes
from haiku_implicit.files.checksums import sums32
from haiku_implicit.files.container import CHECKSUM, ENTRY, METADATA, WIDTHS, is_shape
from tests.fuzzing import mutations

_MOST = 1 << 14  # bytes that a tensor is given which becomes larger


def parsed(data: bytes) -> tuple[dict[str, Any], bytes] | None:
    """The header of a file and the bytes behind it; None if it is damaged."""
    length = int.from_bytes(data[:8], "little")
    try:
        rows = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        return None
    return (rows, data[8 + length :]) if isinstance(rows, dict) else None


def written(rows: Any, payload: bytes, draw: Any) -> bytes:
    """A file of this header, with one length in a hundred that is wrong."""
    text = mutations.text_of(rows, draw)
    length = draw.choice(mutations.NUMBERS[:-1]) if draw.random() < 0.01 else len(text)
    return length.to_bytes(8, "little") + text + payload


def mutated(files: dict[str, Any], name: str, draw: Any) -> dict[str, Any]:
    """A folder with one of its safetensors files changed."""
    found = parsed(files[name])
    if found is None or draw.random() < 0.1:
        return files | {name: mutations.of_bytes(files[name], draw)}
    rows, payload = found
    meta = _tree_in(rows)
    kind = draw.random()
    if meta is not None and kind < 0.75:
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            meta = meta | {"tree": mutations.of_json(meta.get("tree"), draw)}
        if draw.random() < 0.03:
            meta = mutations.of_json(meta, draw)
        if draw.random() < 0.8:
            return files | _fitting(files, name, meta, draw)
        return files | {name: written(_sealed(rows, meta), payload, draw)}
    if kind < 0.9:
        rows, payload = _retyped(rows, payload, draw)
    else:
        rows = mutations.of_json(rows, draw)
    return files | {name: written(rows, payload, draw)}


def _tree_in(rows: dict[str, Any]) -> Any:
    try:
        meta = json.loads(rows[METADATA][ENTRY])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return meta if isinstance(meta, dict) else None


def _sealed(rows: dict[str, Any], meta: Any) -> dict[str, Any]:
    """A header with this structure and its checksum."""
    try:
        text = json.dumps(meta)
    except (RecursionError, ValueError):
        text = '{"version":1,"tree":' + '{"type":"list","items":[' * 5000
    entry = {ENTRY: text, CHECKSUM: f"{zlib.crc32(text.encode(errors='surrogatepass')):08x}"}
    own = rows.get(METADATA)
    return rows | {METADATA: (own if isinstance(own, dict) else {}) | entry}


def _fitting(files: dict[str, Any], name: str, meta: Any, draw: Any) -> dict[str, Any]:
    """All files of a checkpoint, with the tensors that a changed structure asks for, if it can be.

    So what follows the table's checks is reached: types that are made of arrays of other shapes.
    """
    names = meta.get("files") if isinstance(meta, dict) else None
    if not isinstance(names, list) or not all(isinstance(x, str) for x in names):
        names = []
    names = [name, *names]
    old: dict[str, bytes] = {}
    for file in names:
        found = parsed(files[file]) if isinstance(files.get(file), bytes) else None
        for key, row in (found[0] if found else {}).items():
            if isinstance(row, dict) and "data_offsets" in row:
                start, stop = row["data_offsets"]
                old[key] = found[1][start:stop]
    tensors: list[dict[str, bytes]] = [{} for _ in names]
    tables: list[dict[str, Any]] = [{} for _ in names]
    special = draw.random() < 0.2
    for leaf in _leaves(meta):
        _fit(leaf, old, tensors, tables, draw if special else None)
    changed = {}
    for file, table, data in zip(names, tables, tensors, strict=True):
        found = parsed(files[file]) if isinstance(files.get(file), bytes) else None
        rows = {METADATA: found[0][METADATA]} if found and METADATA in found[0] else {}
        rows = _sealed(rows, meta) if file == name else rows
        changed[file] = written(rows | table, b"".join(data.values()), draw)
    return changed


def _leaves(meta: Any) -> list[dict[str, Any]]:
    owners = [own[key] for own, key in mutations.parts_of({"": meta})]
    return [x for x in owners if isinstance(x, dict) and isinstance(x.get("array"), str)]


def _fit(leaf: dict[str, Any], old: Any, tensors: Any, tables: Any, draw: Any) -> None:
    """Gives an array, or its parts, tensors in the files."""
    parts = leaf.get("parts")
    for part in parts if isinstance(parts, list) and parts else [leaf]:
        if not isinstance(part, dict) or not is_shape(part.get("shape")):
            return
        file, key = part.get("file", 0), part.get("array")
        if type(file) is not int or not 0 <= file < len(tensors) or not isinstance(key, str):
            return
        try:
            dtype, shape = dtypes.stored_of(leaf.get("dtype"), tuple(part["shape"]))
        except (KeyError, AttributeError, TypeError):
            return
        size = math.prod(shape) * WIDTHS[dtype]
        if size > _MOST:
            return
        data = old.get(key) or b"\1"
        data = (data * (size // len(data) + 1))[:size]
        if draw is not None and size:
            data = draw.choice((b"\xff", b"\0", b"\x7f", b"\x80\x7f", b"\0\0\x80\x7f"))
            data = (data * size)[:size]
        start = sum(map(len, tensors[file].values()))
        tensors[file][key] = data
        offsets = [start, start + size]
        tables[file][key] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        part["sums32"] = f"{sums32(np.frombuffer(data, np.uint8)):08x}"


def _retyped(rows: dict[str, Any], payload: bytes, draw: Any) -> tuple[dict[str, Any], bytes]:
    """A valid file of other tensors: one gone, of another name, dtype, shape or contents, or new."""
    tensors = {}
    for key, row in rows.items():
        if isinstance(row, dict) and "data_offsets" in row:
            start, stop = row["data_offsets"]
            tensors[key] = [row.get("dtype"), row.get("shape"), payload[start:stop]]
    if tensors:
        key = draw.choice(list(tensors))
        kind = draw.randrange(7)
        dtype, shape, data = tensors[key]
        if kind == 0:
            del tensors[key]
        elif kind == 1:
            other = draw.choice([*tensors, *mutations.TEXTS])
            tensors[key.rpartition(".")[0] + "." + other.rpartition(".")[2]] = tensors.pop(key)
        elif kind == 2:
            tensors[key][0] = dtype = draw.choice(list(WIDTHS))
        elif kind == 3:
            tensors[key][1] = draw.choice(([], [0], [1], [*shape[::-1]], [*shape, 1], [2, *shape]))
        elif kind == 4:
            i = draw.randrange(len(shape)) if shape else 0
            tensors[key][1] = [
                *shape[:i],
                draw.choice((0, 1, 2, 3, 5, 8, 64, 100)),
                *shape[i + 1 :],
            ]
        elif kind == 5:
            tensors[key][2] = draw.choice(
                (b"\xff", b"\0", b"\x80\x7f", b"{}", b'{"shape":[1,1]}  ')
            )
        else:
            data = mutations.of_json_file(data, draw) if data[:1] in (b"{", b"[") else data[::-1]
            tensors[key] = [dtype, [len(data)] if dtype == "U8" else shape, data]
    found: dict[str, Any] = {METADATA: rows[METADATA]} if METADATA in rows else {}
    end, contents = 0, []
    for key, (dtype, shape, data) in tensors.items():
        size = math.prod(shape) * WIDTHS.get(dtype, 1) if is_shape(shape) else len(data)
        if size > _MOST:
            continue
        contents.append((data or b"\0") * (size // max(1, len(data)) + 1))
        contents[-1] = contents[-1][:size]
        found[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return found, b"".join(contents)
