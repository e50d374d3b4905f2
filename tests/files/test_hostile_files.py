"""What files that were changed at random (`tests/fuzzing`) have found: one clean error for each."""

import json
import os
import pathlib
import pickle
import struct
import tracemalloc
import warnings
import zipfile

import gguf
import haiku as hk
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit import mox
from haiku_implicit.command_line.main import main
from haiku_implicit.core.array import IncompleteError
from tests.adapter_cases import CASES as ADAPTERS
from tests.files.by_hand import change, item, tree


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def refused(message, load, *args, **options):
    """The error is one line, and comes before any memory is taken."""
    tracemalloc.start()
    try:
        with warnings.catch_warnings(), pytest.raises(ValueError, match=message) as raised:
            warnings.simplefilter("error")
            load(*args, **options)
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 2000


# --- paths without a file -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_folder_with_a_pipe_or_a_device_in_it(kind, tmp_path):
    def put(name):
        if os.path.lexists(tmp_path / name):
            os.unlink(tmp_path / name)
        os.mkfifo(tmp_path / name) if kind == "pipe" else os.symlink("/dev/zero", tmp_path / name)

    hki.save(tmp_path / "model.safetensors", {"a": jnp.ones(2)})
    put("config.json")
    refused(
        "config.json: not a JSON file, but a pipe or a device", hki.load_hugging_face, tmp_path, {}
    )
    put("adapter_config.json")
    hki.save(tmp_path / "adapter_model.safetensors", {"a": jnp.ones(2)})
    refused("adapter_config.json: not a JSON file", hki.load_peft, tmp_path, {})
    refused("not a JSON file", hki.read_names, tmp_path / "adapter_config.json")
    hki.save(tmp_path / "parted", tree(), max_shard_bytes=30)
    put(next(p.name for p in tmp_path.iterdir() if p.name.startswith("parted.")))
    refused("expected a safetensors file, and this is not a file", hki.load, tmp_path / "parted")


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: item(m, 0, 0, 0)["static"].update(format="x"), "do not make a QuantizedMatrix"),
        (lambda m: item(m, 0, 0, 0)["static"].update(format=1.5), "do not make a QuantizedMatrix"),
        (lambda m: item(m, 0).update(keys=["w", 1, "on"]), "a dict whose keys JAX can't sort"),
        (lambda m: item(m, 0, 0).update(items=[*item(m, 0, 0)["items"][:2], None, None]), "is in the file, but"),
    ],
)  # fmt: skip
def test_metadata_that_does_not_fit_a_type(edit, message, path):
    hki.save(path, tree())
    change(path, lambda meta: edit(meta))
    refused(message, hki.load, path)


def test_a_dtype_that_is_none(path):
    hki.save(path, {"m": {"w": hki.Zeros(shape=(2,), dtype=jnp.float32)}})

    def edit(meta):
        item(meta, 0, 0)["static"]["dtype"] = 10**50
        item(meta, 0, 0).pop("dense")

    change(path, edit)
    refused("m/w: ", hki.load, path)


def test_factors_that_do_not_fit(path):
    """The shape of the weight is right, and a product of the factors is not possible."""
    hki.save(path, hki.add_lora({"m": {"w": jnp.ones((4, 4))}}, 0, rank=2))
    name, shape = "m/w.a", dict(shape=[8, 1])
    change(path, lambda m: item(m, 0, 0, 1).update(shape), lambda rows: rows[name].update(shape))
    refused("m/w: its arrays do not make a LoRA", hki.load, path)


def test_names_of_tensors_with_lines_in_them(path):
    hki.save(path, {"a": jnp.ones(2)})
    change(path, rows=lambda rows: rows.update({"b\n\x1b[0m": rows.pop("a")}))
    refused(r"b\\n\\x1b\[0m: is in the file, but not in the tree", hki.load, path)


def test_dicts_that_jax_cannot_sort_are_not_written(path):
    with pytest.raises(hki.CheckpointError, match="x: a dict whose keys JAX can't sort"):
        hki.save(path, {"x": {1: jnp.ones(2), "a": jnp.ones(2)}})


# --- npz and pickles -----------------------------------------------------------------------------


def npz(path, members, times=1):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, data in members * times:
            file.writestr(name, data)


def npy(header, data=b""):
    header = header.encode() + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (8589934592,), }", "a/w: .*takes 34359738368 bytes"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", "is not the shape"),
        ("{'descr': '|V0', 'fortran_order': False, 'shape': (2147483648,), }", "not numbers"),
        ("{'descr': '<M8[ns]', 'fortran_order': False, 'shape': (2,), }", "not numbers"),
        ("[4", "a/w: "),
        ("(" * 500, "a/w: "),
    ],
)  # fmt: skip
def test_headers_of_npz(header, message, path):
    npz(path, [("a/w.npy", npy(header, bytes(8)))])
    refused(message, hki.load, path)


def test_archives_of_much(path):
    whole = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4,), }", bytes(4))
    npz(path, [("a/w.npy", whole)], times=2)
    refused("a/w: is in the file twice", hki.load, path)
    npz(path, [("a/w.npy", whole)])
    data = path.read_bytes()
    at = data.index(b"PK\1\2")  # its directory says that it is stored in many more bytes
    path.write_bytes(data[: at + 20] + struct.pack("<I", 1 << 30) + data[at + 24 :])
    refused("1073741824 bytes of arrays in a file of", hki.load, path)
    path.write_bytes(data[: at + 10] + struct.pack("<H", 97) + data[at + 12 :])  # a compression
    refused("file: ", hki.load, path)


def of_much(make, depth):
    found = make(())
    for _ in range(depth):
        found = make([found] * 10)
    return pickle.dumps({"a": found})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (of_much(list, 12), "much more room"),
        (of_much(tuple, 40), "much more room"),
        (b"\x80\x04}r\xff\xff\xff\x7f(.", "not a whole pickle|pickle"),
        (b"\x80\x05\x8e\0\0\0\0\0\1\0\0abc.", "not a whole pickle"),
        (pickle.dumps({1: np.ones(2), "a": np.ones(2)}), "a dict whose keys JAX can't sort"),
        (b"P1\n.", "not a whole pickle"),
    ],
)
def test_pickles_of_much(data, message, path):
    path.write_bytes(data)
    refused(message, hki.load, path, allow_pickle=True)


# --- GGUF ----------------------------------------------------------------------------------------


def gguf_file(path, metadata=(), tensors=(("a", (4,), 0, 0),), data=bytes(64)):
    """A file of keys with bytes of values, and of rows `(name, dims, type, offset)`."""
    text = lambda x: struct.pack("<Q", len(x)) + x  # noqa: E731
    found = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata:
        found += text(key.encode()) + value
    for name, dims, kind, offset in tensors:
        found += text(name.encode()) + struct.pack(
            f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset
        )
    path.write_bytes(found + bytes(-len(found) % 32) + data)
    return path


def array_of(kind, count, data=b""):
    return struct.pack("<IIQ", 9, kind, count) + data


ALIGNMENT = "general.alignment"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (dict(metadata=[("x", array_of(0, 2**60))]), "damaged"),  # ran and took memory for ever
        (dict(metadata=[("x", array_of(0, 5000))]), "before its metadata is complete"),
        (dict(metadata=[("x", array_of(9, 1, struct.pack("<IQ", 9, 1) * 3000))]), "in 9 lists"),
        (dict(metadata=[("x", struct.pack("<IB", 0, 1))] * 2), "the key 'x' occurs twice"),
        (dict(metadata=[(ALIGNMENT, struct.pack("<II", 4, 0))]), "should be a power of two"),
        (dict(metadata=[(ALIGNMENT, struct.pack("<If", 6, 8.0))]), "should be a power of two"),
        (dict(metadata=[("x", struct.pack("<I", 99))]), "a value of the type 99"),
        (dict(metadata=[("x", array_of(9, 2**17, array_of(4, 0)[4:] * 2**17))]), "lists in lists"),
        (
            dict(metadata=[("x" * 2**16, struct.pack("<IB", 0, 1))]),
            "a text of 65,536 bytes in its meta",
        ),
        (
            dict(tensors=[("a", (4,), 0, 0), ("b", (4,), 0, 8)]),
            "'b' begins at byte .*, within another",
        ),
        (dict(tensors=[("a", (4,), 0, 0), ("a", (4,), 0, 32)]), "the tensor 'a' occurs twice"),
        (dict(tensors=[("a", (2**62, 2**62), 0, 0)]), "is not the shape of an array"),
        (dict(tensors=[("a", (0, 2**62), 0, 0)]), "is not the shape of an array"),
        (dict(tensors=[("a", (33,), 2, 0)]), "blocks of Q4_0 have 32 numbers"),
        (dict(tensors=[("a", (4,), 99, 0)]), "has the type 99, which is not known"),
        (dict(tensors=[("a", (4,), 0, 2**63)]), "ends at byte"),
        (dict(tensors=[("a", (1,) * 9, 0, 0)]), "has 9 axes"),
    ],
)
def test_headers_of_gguf(parts, message, path):
    gguf_file(path, **parts)
    names = lambda name: f"m/{name}"  # noqa: E731
    refused(message, hki.load_gguf, path, names)
    if "not known" in message:  # such a tensor can be left out
        assert hki.open_gguf(path).tensors[0].data is None
    else:
        refused(message, hki.open_gguf, path)


def test_a_text_of_many_bytes_takes_no_memory(path):
    length = 1 << 28
    text = struct.pack("<IQ", 8, length)
    gguf_file(path, [("x", text)], [])
    os.truncate(path, length + 500)
    refused("a text of 268,435,456 bytes in its metadata", hki.load_gguf, path, {})


def test_a_gguf_file_as_the_package_reads_it(path):
    """Also a scalar and an empty tensor."""
    tensors = [("a", (), 0, 0), ("b", (3, 2), 1, 32), ("c", (0, 2), 0, 64)]
    metadata = [(ALIGNMENT, struct.pack("<II", 4, 64)), ("x", array_of(4, 2, bytes(8)))]
    gguf_file(path, metadata, tensors, bytes(range(63)) * 4)
    assert len(path.read_bytes()) > 300
    found = hki.load_gguf(path, lambda name: f"m/{name}", dtype=None)["m"]
    assert found["a"].shape == () and found["c"].shape == (2, 0)
    wanted = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    for name in "bc":
        assert found[name].dtype == wanted[name].dtype
        np.testing.assert_array_equal(found[name], wanted[name])


# --- others --------------------------------------------------------------------------------------


LORA = hki.LoRA(jnp.ones((12, 8)), jnp.ones((12, 2)), jnp.ones((2, 8)))


@pytest.mark.parametrize(
    ("name", "field"),
    [("oft", "upper"), ("vera", "e"), ("fourierft", "column"), ("vblora", "of_a"), ("lora", "a")],
)
def test_what_a_half_of_an_adapter_lacks_is_told_where_it_is_used(name, field, path):
    """A file can hold what `partition` gives, and so any field can be missing."""
    whole = LORA if name == "lora" else ADAPTERS[name]((), jnp.ones((12, 8)))
    hki.save(path, {"w": whole._replace(**{field: None})})
    half = hki.load(path)["w"]
    assert getattr(half, field) is None and half.shape == (12, 8)
    message = f"{field} is None, so that it stands for no array.*put them together again"
    for use in (hki.materialize, hki.use_implicit_args(lambda w: jnp.ones((3, 12)) @ w)):
        with pytest.raises(IncompleteError, match=message):
            use(half)


def test_a_text_in_the_place_of_a_number(path, capsys):
    hki.save(path, {"w": LORA})

    def text(meta):
        assert item(meta, 0)["keys"][-1] == "factor"
        item(meta, 0)["items"][-1] = {"value": "text"}

    change(path, text)
    refused("w: its arrays do not make a LoRA: expected .* numbers, found a str", hki.load, path)
    assert main(["inspect", str(path)]) == 1
    assert str(path) in capsys.readouterr().err
    wrong = {"w": LORA._replace(factor="text")}
    refused("w: expected arrays and numbers, found a str", hki.save, path, wrong)


def test_a_float_in_the_place_of_an_integer(path):
    """Also where the same weight has been read before: 0.0 is equal to 0."""
    hki.save(path, {"w": hki.QuantizedMatrix.quantize(jnp.ones((4, 3)), "int8")})
    hki.load(path)
    change(path, lambda meta: item(meta, 0)["static"].update(padding=0.0))
    refused("w: its arrays do not make a QuantizedMatrix: 'float' object cannot", hki.load, path)


def test_an_array_without_parts(path):
    hki.save(path, {"a": jnp.ones((4, 3))})

    def none(meta):
        item(meta, 0)["parts"] = []

    change(path, none)
    refused(r"a: its 0 parts do not make an array \[4, 3\]; the file is damaged", hki.load, path)


def test_an_error_of_jax_with_two_lines(path):
    made = mox.make_mox(hk.transform(lambda x: x @ x))(jnp.ones((2, 2)))
    mox.save(path, made)
    text = path.read_text()
    assert '"preferred_element_type"' in text
    path.write_text(text.replace('"preferred_element_type"', '"two\\nlines"'))
    refused("is not a valid module expression: .*two.nlines", mox.load, path)


def test_numbers_that_a_dtype_does_not_have(path):
    hki.save(path, {"up.weight": np.array([[1e300, 1.0]])})
    with pytest.warns(UserWarning, match=r"up.weight: has numbers that float32 does not have"):
        found = hki.load_hugging_face(path, {"up.weight": "up/w"})
    np.testing.assert_array_equal(found["up"]["w"], [[np.inf], [1.0]])
    kept = hki.load_hugging_face(path, {"up.weight": "up/w"}, dtype=None)
    np.testing.assert_array_equal(kept["up"]["w"], [[1e300], [1.0]])


def test_an_index_with_names_that_no_file_has(tmp_path):
    index = {"weight_map": {"a": "x\0y"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("weight_map: a: expected a file beside it", hki.load_hugging_face, tmp_path, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": 10**400}, "lora_alpha: expected a number, got 1000"),
        ({"lora_alpha": float("nan")}, "lora_alpha: expected a number"),
        ({"alpha_pattern": {"q": None}}, "alpha_pattern: 'q': expected a number, got None"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern: '\(': not a regular expression"),
        ({"peft_type": [[0] * 1000]}, "peft_type: expected 'LORA'"),
    ],
)
def test_configurations_of_peft(change, message, tmp_path):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6} | change
    pathlib.Path(tmp_path / "adapter_config.json").write_text(json.dumps(config))
    parts = {"lora_A": np.ones((2, 5)), "lora_B": np.ones((4, 2))}
    tensors = {f"base_model.model.q.{part}.weight": x for part, x in parts.items()}
    hki.save(tmp_path / "adapter_model.safetensors", tensors)
    refused(message, hki.load_peft, tmp_path, {"q": "q/w"})


def test_a_configuration_of_peft_that_is_a_text(tmp_path):
    pathlib.Path(tmp_path / "adapter_config.json").write_text('"LORA"')
    hki.save(tmp_path / "adapter_model.safetensors", {"a": np.ones(2)})
    refused("adapter_config.json: expected a mapping, got 'LORA'", hki.load_peft, tmp_path, {})


@pytest.mark.parametrize(
    "tensors", [[jnp.ones(2)], {3: jnp.ones(2)}, {"base_model.model.q.lora_A": 5}]
)
def test_adapters_of_other_trees(tensors, tmp_path):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
    pathlib.Path(tmp_path / "adapter_config.json").write_text(json.dumps(config))
    hki.save(tmp_path / "adapter_model.safetensors", tensors)
    refused("not a tensor of LoRA or DoRA|no adapter in it", hki.load_peft, tmp_path, {})
