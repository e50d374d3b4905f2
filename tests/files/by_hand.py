"""A checkpoint, and changes of its metadata and its table, as somebody might make them by hand."""

import json
import zlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import CASES

ENTRY, CHECKSUM = "haiku_implicit", "haiku_implicit.crc32"


def tree():
    key = jax.random.key(3)
    state = hk.data_structures.to_immutable_dict({"count": jnp.int32(3)})
    weights = {"w": CASES["lora of int4"](), "b": np.ones(4, jnp.bfloat16), "on": np.array([True])}
    return {"mlp/~/linear": weights, "more": (5, None, [jnp.ones(0)], key, state)}


def header_of(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path, header, data, text=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def change(path, edit=lambda tree: None, rows=lambda rows: None):
    """Edits the metadata, with the right checksum, and the table."""
    header, data = header_of(path)
    meta = json.loads(header["__metadata__"][ENTRY])
    meta = edit(meta) or meta
    text = meta if isinstance(meta, str) else json.dumps(meta)
    header["__metadata__"] = {ENTRY: text, CHECKSUM: f"{zlib.crc32(text.encode()):08x}"}
    rows(header)
    write(path, header, data)


def item(meta, *indices):
    """A part of the tree in the metadata."""
    found = meta["tree"]
    for i in indices:
        found = found["items"][i]
    return found
