"""Parameters in the forms in which models are published: weight for weight, array by array."""

import contextlib
import gzip
import pickle
import struct
import sys
import tracemalloc
import zipfile

import haiku as hk
import jax
import joblib
import ml_dtypes
import numpy as np
import pytest
from joblib.numpy_pickle import NumpyArrayWrapper

import haiku_implicit as hki
from haiku_implicit.files import orbax_folders
from tests.files.trees import assert_same

RNG = np.random.default_rng(0)


def arrays():
    return {
        "evoformer/attention": {
            "query_w": RNG.standard_normal((4, 2, 3)).astype(np.float32),
            "scale": np.asfortranarray(RNG.standard_normal((3, 5)).astype(np.float32)),
        },
        "head": {"b": np.arange(7, dtype=np.int8), "none": np.zeros((0, 3), np.float32)},
        "one": {"count": np.array(3, np.int32), "big": np.arange(3, dtype=">f4")},
    }


def native(tree):
    return jax.tree.map(lambda x: np.asarray(x, x.dtype.newbyteorder("="), order="C"), tree)


@contextlib.contextmanager
def peak_below(limit):
    """At most so many bytes are taken at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


# --- ColabDesign: pickles of joblib ---------------------------------------------------------------


@pytest.fixture(params=[None, 16])
def alignment(request, monkeypatch):
    """Whether joblib aligns arrays; since its version 1.2 it does."""
    monkeypatch.setattr(NumpyArrayWrapper.__init__, "__defaults__", (False, request.param))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_joblib(protocol, alignment, tmp_path):
    tree = {"num_edges": 48, "noise": 0.2, "model_state_dict": arrays(), "names": ["a", (1, None)]}
    tree["same"] = tree["model_state_dict"]["head"]
    joblib.dump(tree, tmp_path / "v_48_020.pkl", protocol=protocol)
    found = hki.load(tmp_path / "v_48_020.pkl", allow_pickle=True, numpy=True)
    wanted = jax.tree.map(lambda x: native(x) if isinstance(x, np.ndarray) else x, tree)
    assert_same(found, wanted)
    part = hki.load(tmp_path / "v_48_020.pkl", allow_pickle=True, only=".*/query_w", numpy=True)
    part = part["model_state_dict"]["evoformer/attention"]
    assert_same(part, {"query_w": wanted["model_state_dict"]["evoformer/attention"]["query_w"]})
    with pytest.raises(hki.CheckpointError, match=r"but a pickle.*allow_pickle=True"):
        hki.load(tmp_path / "v_48_020.pkl")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"w": np.array([{}])}, "it has an array of 'O8'"),
        ({"w": np.array(["a"])}, "it has an array of 'U1'"),
        ({"w": np.ones(2).view(np.recarray)}, r"it has numpy\.(rec\.)?recarray"),
        ({"w": np.ones(2), "call": print}, r"it has builtins\.print"),
    ],
)
def test_other_objects_in_joblib(tree, message, tmp_path):
    joblib.dump(tree, tmp_path / "file")
    with pytest.raises(hki.CheckpointError, match=message):
        hki.load(tmp_path / "file", allow_pickle=True)


def test_joblib_that_is_not_whole(tmp_path):
    joblib.dump({"w": np.arange(6, dtype=np.float32), "b": np.ones(2)}, tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    for length in range(1, len(whole)):
        (tmp_path / "file").write_bytes(whole[:length])
        with pytest.raises(hki.CheckpointError, match="file: "):
            hki.load(tmp_path / "file", allow_pickle=True)
    many = whole.replace(b"K\x06\x85", b"J\xff\xff\xff\x7f\x85")  # the shape (6,)
    assert many != whole
    (tmp_path / "file").write_bytes(many)
    with peak_below(2e6), pytest.raises(hki.CheckpointError, match="it should have .* more bytes"):
        hki.load(tmp_path / "file", allow_pickle=True)


def compressed(tree, path, how):
    if how == "gzip of a pickle":
        path.write_bytes(gzip.compress(pickle.dumps(tree)))
    else:
        joblib.dump(tree, path, compress=how)


@pytest.mark.parametrize("how", [1, 9, True, ("zlib", 7), "gzip", "bz2", "gzip of a pickle"])
def test_compressed_pickles(how, tmp_path):
    tree = {"steps": 3, "params": arrays()}
    tree["params"]["long"] = {"w": np.arange(1 << 13)}  # several pieces
    compressed(tree, tmp_path / "file", how)
    found = hki.load(tmp_path / "file", allow_pickle=True, numpy=True)
    assert_same(found, {"steps": 3, "params": native(tree["params"])})
    with pytest.raises(hki.CheckpointError, match=r"but compressed by .*allow_pickle=True"):
        hki.load(tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    for length in (1, 2, 3, 5, 10, 11, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "file").write_bytes(whole[:length])
        with pytest.raises(hki.CheckpointError, match="file: "):
            hki.load(tmp_path / "file", allow_pickle=True)
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 255
    (tmp_path / "file").write_bytes(changed)
    with pytest.raises(hki.CheckpointError, match="file: "):
        hki.load(tmp_path / "file", allow_pickle=True)


@pytest.mark.parametrize("how", ["zlib", "gzip", "bz2"])
def test_compressed_pickles_take_no_more_memory_than_they_may(how, tmp_path):
    compressed({"w": np.zeros(1 << 24, np.int8)}, tmp_path / "file", how)
    assert (tmp_path / "file").stat().st_size < 1e6
    message = "it should have 16777216 more bytes.*Unpack a larger file first"
    with peak_below(6e6), pytest.raises(hki.CheckpointError, match=message):
        hki.load(tmp_path / "file", allow_pickle=True)
    compressed({"call": print}, tmp_path / "file", how)
    with pytest.raises(hki.CheckpointError, match=r"it has builtins\.print"):
        hki.load(tmp_path / "file", allow_pickle=True)


@pytest.mark.parametrize("how", ["lzma", "xz"])
def test_lzma_is_unpacked_first(how, tmp_path):
    compressed(arrays(), tmp_path / "file", how)
    with pytest.raises(hki.CheckpointError, match=r"but compressed by lzma\. Unpack it first"):
        hki.load(tmp_path / "file", allow_pickle=True)


# --- AlphaFold 2: npz -------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_read_array_by_array(save, tmp_path):
    """Opening reads headers alone, and an array takes its own memory alone."""
    size = 1 << 20
    tree = {f"evoformer/block_{i}": {"w": np.full(size, i, np.float32)} for i in range(8)}
    flat = {f"{module}//{name}": x for module, x in tree.items() for name, x in x.items()}
    save(tmp_path / "params.npz", **flat)
    with peak_below(size), hki.open_checkpoint(tmp_path / "params.npz") as checkpoint:
        assert checkpoint.structs["evoformer/block_3"]["w"].shape == (size,)
        assert len(checkpoint) == 8
    with peak_below(14 * size):  # not 32: the member's bytes, and what NumPy makes of them
        found = hki.load(tmp_path / "params.npz", only=".*block_5/w", numpy=True)
    assert_same(found, {"evoformer/block_5": tree["evoformer/block_5"]})
    assert_same(hki.load(tmp_path / "params.npz", numpy=True), tree)


def test_a_member_whose_bytes_were_changed(tmp_path):
    np.savez(tmp_path / "params.npz", **{"a//w": np.arange(64, dtype=np.float32)})
    data = bytearray((tmp_path / "params.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "params.npz") as file:
        at = file.infolist()[0].header_offset + 300
    data[at] ^= 1
    (tmp_path / "params.npz").write_bytes(data)
    with pytest.raises(hki.CheckpointError, match=r"params.npz: a//w: .*CRC"):
        hki.load(tmp_path / "params.npz")


def test_immutable_dicts_of_haiku(tmp_path):
    tree = native(arrays())
    joblib.dump(hk.data_structures.to_immutable_dict(tree), tmp_path / "params")
    assert_same(hki.load(tmp_path / "params", allow_pickle=True, numpy=True), tree)


# --- AlphaFold 3: records ---------------------------------------------------------------------------


def record(scope, name, x, dtype=None, size=None):
    """A record as `alphafold3.model.params` describes it."""
    texts = [text.encode() for text in (scope, name, dtype or str(x.dtype))]
    data = np.ascontiguousarray(x).tobytes()
    head = struct.pack("<5i", *map(len, texts), x.ndim, len(data) if size is None else size)
    return head + b"".join(texts) + struct.pack(f"<{x.ndim}i", *x.shape) + data


def of_alphafold3():
    tree = native(arrays())
    tree["head"]["half"] = RNG.standard_normal((2, 3)).astype(ml_dtypes.bfloat16)
    tree["__meta__"] = {"__identifier__": np.frombuffer(b"0123", np.uint8)}
    return tree


def records(tree):
    return b"".join(record(scope, name, x) for scope, y in tree.items() for name, x in y.items())


def packed(data):
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def thirds(data):
    third = len(data) // 3
    return [data[:third], data[third : 2 * third], data[2 * third :]]


FORMS = {
    "af3.bin": lambda data: {"af3.bin": data},
    "af3.bin.zst": lambda data: {"af3.bin.zst": packed(data)},
    "af3.bin.zst.1": lambda data: {
        f"af3.bin.zst.{i}": x for i, x in enumerate(thirds(packed(data)))
    },
    "af3.0.bin": lambda data: {f"af3.{i}.bin": x for i, x in enumerate(thirds(data))},
    "af3.2.bin.zst": lambda data: {
        f"af3.{i}.bin.zst": packed(x) for i, x in enumerate(thirds(data), 8)
    },
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("by_folder", [False, True])
def test_records(name, by_folder, tmp_path):
    tree = of_alphafold3()
    for own, data in FORMS[name](records(tree)).items():
        (tmp_path / own).write_bytes(data)
    (tmp_path / "WEIGHTS_TERMS_OF_USE.md").write_text("terms")
    path = tmp_path if by_folder else sorted(tmp_path.glob("af3*"))[-1]
    assert_same(hki.load(path, numpy=True), tree)
    assert_same(
        jax.device_get(hki.load(path, only="head/half")), {"head": {"half": tree["head"]["half"]}}
    )
    with hki.open_checkpoint(path, numpy=True) as checkpoint:
        for module in reversed(list(checkpoint)):  # against the order of the file
            for key in checkpoint[module]:
                assert_same(checkpoint[module][key], tree[module][key])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pytorch_model.bin"], "but a folder. Give a file"),
        (["adapter_model.bin", "adapter_config.json"], "but a folder of PEFT"),
    ],
)
def test_a_folder_with_another_programs_file_of_the_same_suffix(names, message, tmp_path):
    for name in names:
        (tmp_path / name).write_bytes(b"PK of torch.save")
    with pytest.raises(IsADirectoryError, match=message):
        hki.load(tmp_path)


def test_a_folder_of_two_models(tmp_path):
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(records(of_alphafold3()))
    with pytest.raises(IsADirectoryError, match="but a folder. Give a file"):
        hki.load(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (record("a", "w", np.ones(2)) * 2, "a/w: is in the file twice"),
        (record("a", "w", np.ones(2), size=8), r"a/w: float64\[2\] takes 16 bytes, it has 8"),
        (record("a", "w", np.ones(2)) + record("a", "b", np.ones(2), "object"), "a/b: there is no dtype object"),
        (record("a", "w", np.ones(2)) + b"\xff" * 20, "a record of .* bytes; it is damaged"),
        (record("a", "w", np.ones(2)) + struct.pack("<5i", 1, 1, 4, 1, 2**31 - 1) + b"abint8" + struct.pack("<i", 2**31 - 1), "ends 2147483647 bytes before"),
        (record("a", "w", np.ones(2)) + record("b", "w", np.ones((2, 2)))[:-1], "ends 1 bytes before"),
        (record("a", "w", np.ones(2)) + b"ab", "ends 18 bytes before"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pack", [bytes, packed])
def test_records_that_are_damaged(data, message, pack, tmp_path):
    (tmp_path / "af3.bin").write_bytes(pack(data))
    with peak_below(8e6), pytest.raises(hki.CheckpointError, match=f"af3.bin: .*{message}"):
        hki.load(tmp_path / "af3.bin")


def test_zstd_that_is_damaged(tmp_path):
    whole = packed(records(of_alphafold3()))
    for cut in range(4, len(whole), 7):
        for data in (whole[:cut], whole[:cut] + b"\xff" + whole[cut + 1 :]):
            if data != whole:
                (tmp_path / "af3.bin.zst").write_bytes(data)
                with contextlib.suppress(hki.CheckpointError):  # a change may be one of an array
                    hki.load(tmp_path / "af3.bin.zst")
    for data in (whole[:-1], packed(b"")):
        (tmp_path / "af3.bin.zst").write_bytes(data)
        with pytest.raises(hki.CheckpointError, match="copy it again|no records"):
            hki.load(tmp_path / "af3.bin.zst")


def test_zstd_without_its_package(tmp_path, monkeypatch):
    (tmp_path / "af3.bin.zst").write_bytes(packed(b"x"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"af3.bin.zst: .*pip install zstandard"):
        hki.load(tmp_path / "af3.bin.zst")


# --- AlphaGenome: folders of Orbax ------------------------------------------------------------------


@pytest.fixture
def orbax():
    from orbax import checkpoint  # which takes seconds; the quick tests do without it

    return checkpoint


def without_empty(tree):
    """Orbax does not save arrays without elements."""
    tree["head"].pop("none")
    return native(tree)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 1 << 28])
def test_orbax(group, orbax, tmp_path, monkeypatch):
    """Parameters and state, as AlphaGenome has them, in groups of any size."""
    monkeypatch.setattr(orbax_folders, "_GROUP", group)
    params, state = (
        without_empty(arrays()),
        {"norm/~/mean_ema": {"average": np.ones(2, np.float32)}},
    )
    params["head"]["half"] = np.ones((2, 3), ml_dtypes.bfloat16)
    params["empty"] = {}
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", (params, state))
    assert_same(hki.load(tmp_path / "model", numpy=True), [params, state])
    found_params, found_state = hki.load(tmp_path / "model")
    assert_same(jax.device_get(found_params), params)
    with hki.open_checkpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.structs[0]["head"]["b"].dtype == np.int8
        found = checkpoint[0].read(only="evoformer.*/query_w")
    wanted = {"evoformer/attention": {"query_w": params["evoformer/attention"]["query_w"]}}
    assert_same(jax.device_get(found), wanted)


@pytest.mark.slow
def test_orbax_that_is_damaged(orbax, tmp_path):
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", without_empty(arrays()))
    for file in (tmp_path / "model").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(
        hki.CheckpointError, match="model: a checkpoint of Orbax, which can't read it"
    ):
        hki.load(tmp_path / "model")


def test_orbax_without_its_package(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "_METADATA").write_text("{}")
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"model: .*pip install orbax-checkpoint"):
        hki.load(tmp_path / "model")
