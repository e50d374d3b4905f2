"""Files that are damaged, or were made to do harm: one clear error, and no more memory than they have."""

import random
import struct
import tracemalloc
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki
from haiku_implicit.files.checksums import sums32
from tests.files.by_hand import CHECKSUM, ENTRY, change, header_of, item, tree, write
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("may_be_dense")

_BLOCK = 128 * 1021 * 8  # bytes, of which a checksum takes sums


def same(a, b):
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and bool((x == y).all()) for x, y in pairs if hasattr(x, "dtype"))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tree.safetensors"
    hki.save(path, tree())
    return path


def refused(path):
    """The one line of the error, if there is one; the tree otherwise."""
    try:
        return hki.load(path)
    except hki.CheckpointError as e:
        line = str(e)
        assert str(path) in line and "\n" not in line and len(line) < 1000
        return line


@pytest.mark.parametrize("share", few([0.04, 1.0], 0.04))
def test_a_byte_that_changed(path, share):
    """Anywhere: in the header's length, its keys, the metadata, the checksums, the data."""
    whole, wanted = path.read_bytes(), hki.load(path)
    draw = random.Random(0)
    for offset in range(len(whole)):
        if draw.random() > share:
            continue
        for flip in (1 << draw.randrange(8), draw.randrange(1, 256)):
            damaged = bytearray(whole)
            damaged[offset] ^= flip
            path.write_bytes(damaged)
            found = refused(path)
            assert isinstance(found, str) or same(found, wanted), (offset, flip, found)


@pytest.mark.parametrize("step", few([97, 1], 97))
def test_a_file_that_is_cut_off_or_goes_on(path, step):
    whole = path.read_bytes()
    for length in range(0, len(whole), step):
        path.write_bytes(whole[:length])
        assert isinstance(refused(path), str), length
    path.write_bytes(whole + b" ")
    assert "1 bytes of data" in refused(path) or "header tells" in refused(path)


def test_the_error_names_the_key_and_the_way_out(path):
    whole = bytearray(path.read_bytes())
    data = np.ones(4, jnp.bfloat16).tobytes()
    whole[whole.index(data)] ^= 1
    path.write_bytes(whole)
    with pytest.raises(
        hki.CheckpointError, match=r"mlp/~/linear/b: its bytes have the checksum .* damaged"
    ):
        hki.load(path)
    with pytest.raises(hki.CheckpointError, match="damaged"):
        hki.load(path, numpy=True)


def test_checksums_are_of_sums_of_columns_and_rows():
    data = np.random.default_rng(0).integers(0, 256, 2 * _BLOCK + 5, dtype=np.uint8)
    found = 0
    for block in (data[:_BLOCK], data[_BLOCK : 2 * _BLOCK]):
        words = struct.unpack(f"<{128 * 1021}Q", block.tobytes())
        sums = [sum(words[i::1021]) % 2**64 for i in range(1021)]
        sums += [sum(words[1021 * i : 1021 * (i + 1)]) % 2**64 for i in range(128)]
        found = zlib.crc32(struct.pack("<1149Q", *sums), found)
    found = zlib.crc32(data[2 * _BLOCK :].tobytes(), found)
    assert sums32(data) == found
    assert sums32(np.concatenate([data[:3], data])[3:]) == found  # (not aligned)


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        (0, 4096, 4096),
        (512, 1 << 20, 512),
        (0, 512 * 1021, 512),
        (0, 8168, 8168),
        (0, _BLOCK, _BLOCK),
        (8, 2 * _BLOCK - 8, 8),
    ],
)
def test_bytes_in_other_places_have_another_checksum(first, second, size):
    data = np.random.default_rng(0).integers(0, 256, 2 * _BLOCK + 5, dtype=np.uint8)
    moved = data.copy()
    moved[first : first + size] = data[second : second + size]
    moved[second : second + size] = data[first : first + size]
    assert sums32(moved) != sums32(data)


@pytest.mark.parametrize("byte", [0, _BLOCK - 1, _BLOCK + 8168, 2 * _BLOCK + 4])
def test_a_changed_bit_changes_the_checksum(byte):
    data = np.zeros(2 * _BLOCK + 5, np.uint8)
    changed = data.copy()
    changed[byte] = 128
    assert sums32(changed) != sums32(data)


def test_two_changed_bits_of_a_column_change_the_checksum():
    data = np.zeros(_BLOCK, np.uint8)
    data[[7, 7 + 8168]] = 128
    assert sums32(data) != sums32(np.zeros(_BLOCK, np.uint8))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_file_of_version_1(path, damaged):
    """What `save` wrote before version 3: a CRC-32 of all bytes of each tensor."""
    rows, data = header_of(path)

    def replace(node):
        if isinstance(node, list):
            return [*map(replace, node)]
        if not isinstance(node, dict):
            return node
        if node.pop("sums32", None):
            node["crc32"] = f"{zlib.crc32(data[slice(*rows[node['array']]['data_offsets'])]):08x}"
        return {key: replace(value) for key, value in node.items()}

    wanted = hki.load(path)
    change(path, lambda meta: replace(meta) | {"version": 1})
    if not damaged:
        assert same(hki.load(path), wanted)
        return
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(hki.CheckpointError, match="its bytes have the checksum"):
        hki.load(path)


# --- files that were made by hand ----------------------------------------------------------------


B = "mlp/~/linear/b"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update(version=4), "version 4 of the format; this haiku_implicit reads versions up to 3"),
        (lambda m: m.update(version=True), "version True"),
        (lambda m: m.pop("version") and None, "version None"),
        (lambda m: m.pop("tree") and None, "the tree: expected a table in the structure, found False"),
        (lambda m: m.update(tree=3), "the tree: expected a table in the structure, found 3"),
        (lambda m: m.update(files="x"), "files: expected names"),
        (lambda m: m.update(files=["../x"]), "files: expected names"),
        (lambda m: m.update(files=[".."]), "files: expected names"),
        (lambda m: m.update(files=["missing"]), "the file missing is missing"),
        (lambda m: item(m, 0, 0).update(type="os.system"), "mlp/~/linear/w: .* does not know the type 'os.system'"),
        (lambda m: item(m, 0, 0).update(type=["x"]), "mlp/~/linear/w: expected a type"),
        (lambda m: item(m, 0, 0).update(keys=["w", "a", "b", "c"]), r"mlp/~/linear/w: .* fields \['w', 'a', 'b', 'c'\]"),
        (lambda m: item(m, 0, 0).update(keys=["w", "a"]), "mlp/~/linear/w: 4 items, and 2 different keys"),
        (lambda m: item(m, 0, 0, 0)["static"].update(format={"x": 1}), "mlp/~/linear/w.w: the metadata of a .*QuantizedMatrix"),
        (lambda m: item(m, 0, 0)["static"].update(extra=1), r"static \['dtype', 'extra', 'shape'\]"),
        (lambda m: item(m, 0, 0).update(static=None), "mlp/~/linear/w: the metadata of a"),
        (lambda m: item(m, 0, 0).update(dense=["float32", [4, 5]]), "make a LoRA: they are float32.*where the file says"),
        (lambda m: item(m, 0, 0).update(dense=["x", [4, 4]]), "mlp/~/linear/w: "),
        (lambda m: item(m, 0, 0).update(dense=7), "expected a dtype and a shape"),
        (lambda m: item(m, 0)["items"].__setitem__(0, None) or item(m, 0).update(keys=["w", "w", "on"]), "2 different keys"),
        (lambda m: item(m, 0).update(keys=[["a"], {"x": 1}, 3]), "mlp/~/linear: the keys .* are not valid"),
        (lambda m: item(m, 0).update(keys=3), "mlp/~/linear: the keys 3 are not valid"),
        (lambda m: item(m, 0, 1).update(array="x"), "mlp/~/linear/b: is in the file, but not in the tree"),
        (lambda m: item(m, 0, 1).update(array=["x"]), "mlp/~/linear/b: not the description of an array"),
        (lambda m: item(m, 0, 1).update(array="mlp/~/linear/on"), "linear/on: is in the tree twice"),
        (lambda m: item(m, 0, 1).update(shape=[5]), r"mlp/~/linear/b: expected BF16\[5\], the header says BF16\[4\]"),
        (lambda m: item(m, 0, 1).update(shape=[-4]), "is not the shape of an array"),
        (lambda m: item(m, 0, 1).update(shape=[2**40, 2**40]), "is not the shape of an array"),
        (lambda m: item(m, 0, 1).update(shape=[1] * 99), "is not the shape of an array"),
        (lambda m: item(m, 0, 1).update(shape=None), "is not the shape of an array"),
        (lambda m: item(m, 0, 1).update(dtype="int16"), r"b: expected I16\[4\], the header says BF16\[4\]"),
        (lambda m: item(m, 0, 1).update(dtype="object"), "does not know the dtype 'object'"),
        (lambda m: item(m, 0, 1).update(dtype=[]), r"does not know the dtype \[\]"),
        (lambda m: item(m, 0, 1).update(dtype="key:x"), "does not know the dtype 'key:x'"),
        (lambda m: item(m, 0, 1).update(sums32="0"), "'0' is not a checksum"),
        (lambda m: item(m, 0, 1).update(sums32="00000000"), "mlp/~/linear/b: its bytes have the checksum"),
        (lambda m: item(m, 0, 1).update(file=1), "mlp/~/linear/b: is in a file number 1; there is none"),
        (lambda m: item(m, 0, 1).update(file=-1), "mlp/~/linear/b: is in a file number -1; there is none"),
        (lambda m: item(m, 0, 1).update(file=0.0), "mlp/~/linear/b: not the description"),
        (lambda m: item(m, 1, 0).update(value={"object": ["os.system", {}]}), "more/0: not a value"),
        (lambda m: item(m, 1, 0).update(value={"number": ["O", "00" * 8]}), "more/0: not a value"),
        (lambda m: item(m, 1, 0).update(value={"number": ["V999999999999", ""]}), "more/0: not a value"),
        (lambda m: item(m, 1, 0).update(value={"dtype": "no such"}), "more/0: not a value"),
        (lambda m: item(m, 1, 0).update(value={}), "more/0: not a value"),
        (lambda m: '{"version": 1, "version": 1}', "the key 'version' occurs twice"),
        (lambda m: '{"version": 1, "files": [], "tree": ' + '{"type":"list","items":[' * 5000, "too deeply"),
        (lambda m: '{"version": 1, "tree": ' + "9" * 5000 + "}", "not JSON"),
        (lambda m: "[]", "version None"),
        (lambda m: "{", "not JSON"),
    ],
)  # fmt: skip
def test_metadata_that_was_made_by_hand(edit, message, path):
    change(path, edit)
    with pytest.raises(hki.CheckpointError, match=message) as raised:
        hki.load(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_only_a_part_of_an_array_has_a_place_in_it(path):
    """A place of a whole array is not read: what is before it would be memory that nothing wrote."""
    expected = hki.load(path)["mlp/~/linear"]["b"]
    change(path, lambda m: item(m, 0, 1).update(start=[1]))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for options in ({}, {"shardings": place}):
        np.testing.assert_array_equal(hki.load(path, **options)["mlp/~/linear"]["b"], expected)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: r.pop(B), "mlp/~/linear/.*: its bytes should begin at"),
        (lambda r: r.update(extra=r[B]), "its bytes should begin at"),
        (lambda r: r.update({"extra": r.pop(B)}), "extra: is in the file, but not in the tree"),
        (lambda r: r.update(extra=dict(dtype="U8", shape=[0], data_offsets=[0, 0])), "extra: is in the file"),
        (lambda r: r[B].update(dtype="I16"), r"mlp/~/linear/b: expected BF16\[4\], the header says I16\[4\]"),
        (lambda r: r[B].update(dtype="X"), "mlp/~/linear/b: the dtype 'X'; known are"),
        (lambda r: r[B].update(dtype=None), "mlp/~/linear/b: the dtype None"),
        (lambda r: r[B].update(shape=[2, 2]), r"expected BF16\[4\], the header says BF16\[2, 2\]"),
        (lambda r: r[B].update(shape=[10**30]), "is not the shape of an array"),
        (lambda r: r[B].update(shape=[0, 10**30]), "is not the shape of an array"),
        (lambda r: r[B].update(shape=[-2, -2]), "is not the shape of an array"),
        (lambda r: r[B].update(shape=[4.0]), "is not the shape of an array"),
        (lambda r: r[B].update(shape=[True, 4]), "is not the shape of an array"),
        (lambda r: r[B].update(shape=[10**9]), "takes 2000000000 bytes, the header gives it 8"),
        (lambda r: r[B].update(data_offsets=[-8, 0]), "data_offsets should be two numbers"),
        (lambda r: r[B].update(data_offsets=[0, 8]), "should begin at"),
        (lambda r: r[B].update(data_offsets=[10**9, 10**9 + 8]), "should begin at"),
        (lambda r: r[B].update(data_offsets="x"), "data_offsets should be two numbers"),
        (lambda r: r.update({B: 3}), "mlp/~/linear/b: expected dtype, shape and data_offsets"),
        (lambda r: r.update(__metadata__=3), "__metadata__ should map texts to texts"),
        (lambda r: r["__metadata__"].update(x=3), "__metadata__ should map texts to texts"),
        (lambda r: r["__metadata__"].pop(ENTRY), "has no 'haiku_implicit'; the file is damaged"),
        (lambda r: r["__metadata__"].pop(CHECKSUM), "has no 'haiku_implicit.crc32'"),
        (lambda r: r["__metadata__"].update({CHECKSUM: "00000000"}), "does not have the checksum '00000000'"),
    ],
)  # fmt: skip
def test_a_table_that_was_made_by_hand(edit, message, path):
    change(path, rows=edit)
    with pytest.raises(hki.CheckpointError, match=message) as raised:
        hki.load(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{" * 100_000, "nested too deeply|not JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": [' + b"[" * 1_000_000, "nested too deeply"),
        (b'{"a":1,"a":2}', "the key 'a' occurs twice"),
        (b"{\xff}", "not JSON"),
        (b"{}garbage", "not JSON"),
        (
            b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
            "expected dtype, shape and data_offsets|too deeply",
        ),
    ],
)
def test_a_header_that_was_made_by_hand(header, message, path):
    write(path, header, b"")
    tracemalloc.start()
    with pytest.raises(hki.CheckpointError, match=message):
        hki.load(path)
    assert tracemalloc.get_traced_memory()[1] < 60e6
    tracemalloc.stop()


def test_a_length_that_is_not_there(path):
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(
        hki.CheckpointError, match=r"of its 10 bytes a header should take 4611686018427387904"
    ):
        hki.load(path)


def mutations(x, draw):
    """A random place of JSON, changed into something else."""
    junk = [
        None,
        True,
        -1,
        0,
        2**70,
        1.5,
        "x",
        "float32",
        [],
        {},
        [1],
        {"value": 1},
        {"array": "x"},
        float("nan"),
    ]
    if isinstance(x, dict) and x and draw.random() < 0.85:
        key = draw.choice(list(x))
        if draw.random() < 0.1:
            return {k: v for k, v in x.items() if k != key}
        return x | {key: mutations(x[key], draw)}
    if isinstance(x, list) and x and draw.random() < 0.85:
        i = draw.randrange(len(x))
        if draw.random() < 0.1:
            return x[:i] + x[i + 1 :]
        return [*x[:i], mutations(x[i], draw), *x[i + 1 :]]
    return draw.choice(junk)


@pytest.mark.parametrize("count", few([100, 5000], 100))
def test_random_changes_with_right_checksums(count, path):
    """An error, or some tree; nothing else happens."""
    whole = path.read_bytes()
    loaded = 0
    for seed in range(count):
        draw = random.Random(seed)
        path.write_bytes(whole)
        if draw.random() < 0.7:
            change(path, lambda m: m | {"tree": mutations(m["tree"], draw)})  # noqa: B023
        else:
            header, data = header_of(path)
            write(path, mutations(header, draw), data)
        loaded += not isinstance(refused(path), str)
    assert loaded < count / 2


def test_parts_of_a_checkpoint(path):
    hki.save(path, tree(), max_shard_bytes=30)
    parts = sorted(p for p in path.parent.iterdir() if p != path)
    with pytest.raises(
        hki.CheckpointError,
        match=r"a part of the checkpoint tree.safetensors, save \w{16}; load that",
    ):
        hki.load(parts[0])
    whole = parts[1].read_bytes()
    name = next(iter(safetensors.numpy.load_file(parts[1])))
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        parts[1].write_bytes(damaged)
        with pytest.raises(hki.CheckpointError, match=name):
            hki.load(path)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(hki.CheckpointError, match="is in the file, but not in the tree"):
        hki.load(path)
    parts[1].unlink()
    with pytest.raises(
        hki.CheckpointError, match=rf"the file {parts[1].name} is missing, which has {name}"
    ):
        hki.load(path)
