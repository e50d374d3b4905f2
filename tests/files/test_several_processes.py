"""Checkpoints of several processes: which process writes and reads which array, and the errors."""

import itertools
import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit.files import dtypes, replacing, saving
from haiku_implicit.files.checksums import Checksum
from haiku_implicit.files.parts import Part, assembled, parts_from_json, parts_to_json
from haiku_implicit.files.saving import number_in
from tests.devices import run_on_devices, run_together
from tests.files.trees import assert_same
from tests.random_arrays import normal

# The rows of `w` and `c` are split over the devices `d`; the rest is everywhere.
SPECS = {
    "w": P("d"),
    "c": P(None, "d"),
    "all": P(),
    "key": P(),
    "weak": P(),
    "b": P("d"),
    "n": None,
}


def tree():
    """A tree that is equal in each process, and in the test."""
    w = normal((16, 8))
    lora = hki.add_lora(hki.quantize_params({"l": {"w": w}}, dtype="int4", group_size=4), 1, rank=2)
    return {
        "w": lora["l"]["w"],
        "c": jnp.arange(24.0).reshape(3, 8).astype(jnp.complex64) * (1 + 2j),
        "all": jnp.arange(6, dtype=jnp.bfloat16),
        "key": jax.random.key(5),
        "weak": jnp.asarray(3.0),
        "b": jnp.arange(8) % 3 == 0,
        "n": 7,
        "host": np.arange(3, dtype=np.int16),
    }


def places_of(found, mesh, specs=SPECS):
    """Where each part of it goes."""
    arrays = {name: found[name] for name in specs if name != "n"}
    return hki.shardings(arrays, {name: specs[name] for name in arrays}, mesh)


SAVES = """
import haiku_implicit as hki
from jax.sharding import AxisType, PartitionSpec as P
from tests.files.test_several_processes import SPECS, places_of, tree
from tests.files.trees import assert_same
path, = sys.argv[1:]

mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
whole = tree()
places = places_of(whole, mesh)
here = dict(whole)
for name, place in places.items():
    here[name] = jax.jit(lambda x: x, out_shardings=place)(whole[name])
hki.save(path, here, max_shard_bytes=60)

everywhere = places | {"n": None, "host": None}
def check(shardings):
    found = hki.load(path, like=whole, shardings=shardings)
    for x, place in zip(*map(jax.tree.leaves, ({k: found[k] for k in places}, shardings)), strict=False):
        assert x.sharding.is_equivalent_to(place, x.ndim), (x.sharding, place)
    gathered = jax.jit(lambda t: t, out_shardings=jax.sharding.NamedSharding(mesh, P()))
    local = lambda x: x.addressable_data(0)
    local = jax.tree.map(local, gathered({k: found[k] for k in places}))
    assert_same(local | {"n": found["n"], "host": found["host"]}, hki.load(path))
    assert_same(hki.load(path), whole | {"host": jax.numpy.asarray(whole["host"])})
    assert found["weak"].weak_type and found["n"] == 7

check(everywhere)
# Split along other axes, by other devices.
turned = SPECS | {"w": P(None, "d"), "c": P(), "all": P(), "b": P()}
check(places_of(whole, mesh, turned) | {"n": None, "host": None})

# Where one process cannot write, both fail, and nothing changes.
from haiku_implicit.files import saving
real = saving._write
def full(*args):
    raise OSError(28, "no space left on device")
if jax.process_index() == 1:
    saving._write = full
try:
    hki.save(path, here | {"n": 8})
    raise AssertionError("saved")
except (OSError, hki.CheckpointError) as e:
    print("error:", e)
saving._write = real
assert hki.load(path, only="n")["n"] == 7

keys = jax.jit(lambda: jax.random.split(jax.random.key(0), 4), out_shardings=jax.sharding.NamedSharding(mesh, P("d")))()
try:
    hki.save(path, {"keys": keys})
except hki.CheckpointError as e:
    print("keys:", e)
print("done")
"""


@pytest.mark.slow
def test_two_processes_save_load_and_fail_together(tmp_path):
    path = tmp_path / "run.safetensors"
    first, second = run_together(SAVES, 2, str(path), devices=2)
    assert first.endswith("done\n"), first
    assert second.endswith("done\n"), second
    assert f"error: {path}: not saved, as process 1 could not write its part" in first
    assert "error: [Errno 28] no space left on device" in second
    assert (
        "keys: keys: random keys that are split over processes. Save jax.random.key_data" in first
    )
    # Another program, with one device, reads it whole; and a NumPy one.
    assert_same(hki.load(path), tree() | {"host": jnp.asarray(tree()["host"])})
    views = hki.load(path, numpy=True)
    np.testing.assert_array_equal(views["c"], tree()["c"])
    with hki.open_checkpoint(path) as checkpoint:
        assert checkpoint.structs["w"].w.codes.shape == (8, 8)
        np.testing.assert_array_equal(checkpoint["b"], tree()["b"])
    # Each process wrote its own, in files of at most 60 bytes, but for one tensor in any case.
    names = [file for file in path.parent.iterdir() if file != path]
    assert len(names) > 4
    assert {replacing.number_of(str(path), file.name) for file in names} == {number_in(path)}
    stored = [set(safetensors.numpy.load_file(name)) for name in names]
    assert {"b[0:2]", "b[2:4]", "b[4:6]", "b[6:8]"} <= set().union(*stored)
    assert not any({"b[0:2]", "b[4:6]"} <= found for found in stored)
    assert sum("all" in found for found in stored) == 1


@pytest.fixture
def parted(tmp_path, monkeypatch):
    """A checkpoint as of two processes, of which each has every other row of `b`, from one process."""

    def boxes(leaf, x, written):
        if leaf.name != "b":
            return [(tuple((0, n) for n in leaf.shape), 0)]
        return [(((i, i + 2),), 0) for i in range(0, 8, 2)]

    def bytes_of(x, leaf, box):
        return dtypes.bytes_of(x[tuple(slice(*ends) for ends in box)])

    path = tmp_path / "run.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(saving, "is_spread", lambda x: isinstance(x, jax.Array))
        patch.setattr(saving, "_boxes", boxes)
        patch.setattr(saving, "_bytes_of", bytes_of)
        hki.save(path, {name: x for name, x in tree().items() if name != "key"}, max_shard_bytes=60)
    return path


def test_parts_are_read_as_a_whole(parted, tmp_path):
    found = hki.load(parted)
    wanted = {name: x for name, x in tree().items() if name != "key"}
    assert_same(found, wanted | {"host": jnp.asarray(wanted["host"])})
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert_same(hki.load(parted, shardings=place), found)
    np.testing.assert_array_equal(hki.load(parted, numpy=True)["b"], wanted["b"])
    with hki.open_checkpoint(parted) as checkpoint:
        assert checkpoint.structs["b"].shape == (8,)
    hki.save(parted, {"n": 1})
    assert list(tmp_path.iterdir()) == [parted]  # files of parts are removed, as others are


def test_a_file_of_a_process_that_is_missing_or_damaged(parted, tmp_path):
    files = [file for file in tmp_path.iterdir() if file != parted]
    [of_b] = [file for file in files if "b[4:6]" in safetensors.numpy.load_file(file)]
    data = of_b.read_bytes()
    of_b.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(hki.CheckpointError, match=r"its bytes have the checksum"):
        hki.load(parted)
    of_b.unlink()
    with pytest.raises(hki.CheckpointError, match=f"the file {of_b.name} is missing, which has"):
        hki.load(parted)


def change(path, edit):
    """Changes the metadata of a main file, under a right checksum."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    meta = json.loads(header["__metadata__"]["haiku_implicit"])
    edit(meta)
    text = json.dumps(meta)
    header["__metadata__"]["haiku_implicit"] = text
    header["__metadata__"]["haiku_implicit.crc32"] = f"{zlib.crc32(text.encode()):08x}"
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + size :])


WRONG = {
    "a hole": lambda parts: parts.pop(),
    "twice": lambda parts: parts.__setitem__(1, parts[0]),
    "overlap": lambda parts: parts[1].update(start=[1]),
    "too long": lambda parts: parts[-1].update(shape=[3]),
    "not a part": lambda parts: parts.__setitem__(0, 3),
    "no name": lambda parts: parts[0].pop("array"),
    "another rank": lambda parts: parts[0].update(start=[0, 0]),
    "no checksum": lambda parts: parts[0].update(sums32="x"),
    "no file": lambda parts: parts[0].update(file=99),
    "no number of a file": lambda parts: parts[0].pop("file"),
    "no place": lambda parts: parts[0].pop("start"),
    "a place before the array": lambda parts: parts[0].update(start=[-1]),
}


def test_parts_that_do_not_tile_are_refused(parted):
    good = parted.read_bytes()
    for name, wrong in WRONG.items():
        parted.write_bytes(good)

        def edit(meta, wrong=wrong):
            items = dict(zip(meta["tree"]["keys"], meta["tree"]["items"], strict=True))
            wrong(items["b"]["parts"])

        change(parted, edit)
        with pytest.raises(hki.CheckpointError) as raised:
            hki.load(parted)
        found = str(raised.value)
        one_of = (
            "parts do not make",
            "is not the shape",
            "is not a place in an array",
            "a list of parts",
            "description of an array",
            "is not a checksum",
            "there is none",
        )
        assert any(text in found for text in one_of), (name, found)


def test_boxes_of_parts():
    """Each box of a grid of parts, against a slice of the whole."""
    whole = np.arange(42).reshape(6, 7)
    cuts = [[0, 2, 5, 6], [0, 3, 7]]
    parts = [
        Part(f"{i},{j}", 1, (i, j), (k - i, n - j), Checksum("sums32", 0))
        for i, k in itertools.pairwise(cuts[0])
        for j, n in itertools.pairwise(cuts[1])
    ]
    assert parts_from_json(parts_to_json(parts), (6, 7), "x") == tuple(parts)

    def read(part):
        return whole[tuple(slice(a, b) for a, b in part.box)]

    for a in range(7):
        for b in range(a, 7):
            for c, d in ((0, 7), (1, 2), (2, 4), (3, 7), (4, 4)):
                found = assembled(parts, ((a, b), (c, d)), read)
                np.testing.assert_array_equal(found, whole[a:b, c:d])
    assert assembled([Part("s", 0, (), (), 0)], (), lambda _: np.asarray(3)) == 3


def test_shardings_that_do_not_fit(tmp_path):
    path = tmp_path / "x"
    hki.save(path, {"m": {"w": jnp.ones((2, 2))}})
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for shardings in (place, {"m": place}, {"m": {"w": place}}, {"m": {"w": None}}):
        np.testing.assert_array_equal(hki.load(path, shardings=shardings)["m"]["w"], 1)
    with pytest.raises(
        ValueError, match="shardings: expected one sharding, or a tree of them that is"
    ):
        hki.load(path, shardings={"n": place})
    with pytest.raises(
        TypeError, match="shardings: expected a jax.sharding.Sharding or None, got P"
    ):
        hki.load(path, shardings=P())


PLACED = """
import tempfile
import jax, numpy as np, haiku_implicit as hki
from jax.sharding import AxisType, PartitionSpec as P
from tests.files.test_several_processes import places_of, tree
from tests.files.trees import assert_same
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
whole = tree()
places = places_of(whole, mesh) | {"n": None, "host": None}
with tempfile.TemporaryDirectory() as folder:
    hki.save(folder + "/x", whole)
    found = hki.load(folder + "/x", shardings=places)
    np.savez(folder + "/y.npz", **{"m//w": np.arange(16.0, dtype=np.float32)})
    other = hki.load(folder + "/y.npz", shardings=jax.sharding.NamedSharding(mesh, P("d")))["m"]["w"]
assert other.addressable_shards[1].data.tolist() == [4, 5, 6, 7]
assert found["w"].w.codes.addressable_shards[0].data.shape == (8, 2)
assert_same(found | {"host": whole["host"]}, whole)
print("done")
"""


@pytest.mark.slow
def test_one_process_reads_onto_its_devices():
    assert run_on_devices(PLACED, 4) == "done"
