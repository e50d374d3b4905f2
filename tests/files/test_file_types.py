"""Files given to what does not read them: one error that says what they are, and what reads them."""

import gzip
import os
import pickle
import struct
import zipfile

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki

PARAMS = {"linear": {"w": np.ones((64, 3), np.float32), "b": np.zeros(3, np.float32)}}
NAMES = {"out.weight": "linear/w", "out.bias": "linear/b"}
METADATA = {"general.architecture": "test"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One of everything."""
    path = tmp_path_factory.mktemp("kinds")
    hki.save(path / "saved", PARAMS)
    safetensors.numpy.save_file({"out.bias": np.zeros(3, np.float32)}, path / "foreign")
    hki.save_gguf(path / "gguf", PARAMS, NAMES, kind="F32", metadata=METADATA)
    (path / "pickle").write_bytes(pickle.dumps(PARAMS))
    np.savez(path / "arrays.npz", **{"linear/w": PARAMS["linear"]["w"]})
    joined = {
        "params:mesh/~/linear:w": np.ones(2),
        "keys:0": np.ones(2),
        "license": np.array("text"),
    }
    np.savez(path / "graphcast.npz", **joined)
    with zipfile.ZipFile(path / "torch", "w") as file:
        file.writestr("archive/data.pkl", b"x")
    with zipfile.ZipFile(path / "zip", "w") as file:
        file.writestr("readme", b"x")
    for name, data in {
        "empty": b"",
        "json": b'{"a": [1, 2, 3]}',
        "page": b"<!DOCTYPE html><html></html>",
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 12\n",
        "noise": bytes(range(128, 255)),
        "af3.bin": struct.pack("<5i", 8, 14, 5, 1, 2) + b"__meta____identifier__uint8\2\0\0\0ab",
        "af3.bin.zst": b"\x28\xb5\x2f\xfd" + bytes(range(100)),
        "noise.bin.zst.1": bytes(range(255, 128, -1)),
        "gzip": gzip.compress(b"bytes"),
        "lz4": b"\x04\x22\x4d\x18" + bytes(range(100)),
        "folders/orbax/_METADATA": b"{}",
        "folders/steps/100/_CHECKPOINT_METADATA": b"{}",
        "folders/peft/adapter_config.json": b"{}",
        "folders/hub/model.safetensors": (path / "foreign").read_bytes(),
        "folders/plain/model.gguf": b"GGUF",
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    os.mkfifo(path / "pipe")
    return path


# What each is, and what the error says of the way out.
KINDS = {
    "saved": ("a file that haiku_implicit.save wrote", "haiku_implicit.load reads it"),
    "foreign": ("a safetensors file", "haiku_implicit.load_hugging_face by the names"),
    "gguf": ("a GGUF file", "haiku_implicit.load_gguf reads it"),
    "pickle": ("a pickle", "allow_pickle=True"),
    "arrays.npz": ("an .npz file", "haiku_implicit.load reads it"),
    "graphcast.npz": ("names are keys joined by ':'", "graphcast.checkpoint.load"),
    "af3.bin": ("parameters of AlphaFold 3", "haiku_implicit.load reads it"),
    "af3.bin.zst": ("compressed by zstd", "load reads the parameters of AlphaFold 3"),
    "noise.bin.zst.1": (
        "a piece of what zstd compressed",
        "load reads the parameters of AlphaFold 3",
    ),
    "gzip": ("compressed by zlib, gzip or bz2", "allow_pickle=True) reads a pickle in it"),
    "lz4": ("compressed by lz4", "Unpack it first"),
    "torch": ("a file that torch.save wrote", "as safetensors"),
    "zip": ("a zip archive", "Unpack"),
    "empty": ("an empty file", "copy it again"),
    "json": ("a text", "Give the file with the arrays"),
    "page": ("a web page", "Download"),
    "lfs": ("a pointer of Git LFS", "git lfs pull"),
    "noise": ("127 bytes that begin with", "copy it again"),
    "pipe": ("a pipe or a device", "into a file first"),
    "folders/orbax": ("a checkpoint of Orbax", "haiku_implicit.load reads its dicts"),
    "folders/steps": ("a folder of checkpoints of Orbax", "Give the folder of one of them"),
    "folders/peft": ("a folder of PEFT", "haiku_implicit.load_peft reads it"),
    "folders/hub": ("a folder in the layout of the Hugging Face hub", "load_hugging_face reads it"),
    "folders/plain": ("a folder", "Give a file in it, such as model.gguf"),
}
# Each function, and what it does read.
LOADERS = {
    "load": (hki.load, {"saved", "foreign", "arrays.npz", "af3.bin"}),
    "open_checkpoint": (hki.open_checkpoint, {"saved", "foreign", "arrays.npz", "af3.bin"}),
    "load_gguf": (lambda path: hki.load_gguf(path, NAMES), {"gguf"}),
    "open_gguf": (hki.open_gguf, {"gguf"}),
    "load_hugging_face": (
        lambda path: hki.load_hugging_face(path, lambda name: None),
        {"saved", "foreign", "folders/hub"},
    ),
    "load_peft": (lambda path: hki.load_peft(path, {}), set()),
    "mox.load": (hki.mox.load, set()),
    "metadata_from": (
        lambda path: hki.save_gguf(
            path.parent / "new", PARAMS, NAMES, kind="F32", metadata_from=path
        ),
        {"gguf"},
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_what_a_file_is(folder, name):
    loader, reads = LOADERS[name]
    for kind, (what, way_out) in KINDS.items():
        path = folder / kind
        if kind in reads:
            loader(path)
            continue
        if kind == "folders/orbax" and name in ("load", "open_checkpoint"):
            continue  # Orbax takes seconds; see test_published_forms.py
        with pytest.raises((ValueError, OSError)) as raised:
            loader(path)
        line = str(raised.value)
        assert str(path) in line and "\n" not in line, line
        own_words = (name, kind) in {
            ("mox.load", "json"),  # which says what is missing in the JSON
            ("mox.load", "page"),
            ("mox.load", "lfs"),
            ("load_peft", "folders/peft"),  # and what in the folder
            ("load_hugging_face", "folders/plain"),
            ("load", "af3.bin.zst"),  # and what in the archive
            ("open_checkpoint", "af3.bin.zst"),
        }
        assert own_words or (what in line and way_out in line), (kind, line)
    with pytest.raises(FileNotFoundError, match="absent"):
        loader(folder / "absent")


def test_a_truncated_gguf_file_says_what_is_not_there(tmp_path):
    path = tmp_path / "model.gguf"
    params = {f"l{i}": {"w": jnp.ones((64, 8))} for i in range(3)}
    names = {f"blk.{i}.weight": f"l{i}/w" for i in range(3)}
    tokens = {"tokenizer.tokens": ["a", "bc"], "tokenizer.scores": [1.0, 2.0]}
    hki.save_gguf(path, params, names, kind="Q8_0", metadata={**METADATA, **tokens})
    whole, reader = path.read_bytes(), gguf.GGUFReader(path)
    second = reader.tensors[1]
    start, stop = second.data_offset, second.data_offset + second.n_bytes
    for length in (start, start + 1, stop - 1):
        path.write_bytes(whole[:length])
        message = (
            f"truncated .* ends at byte {length:,}, and the tensor blk.1.weight reaches from byte "
            f"{start:,} to byte {stop:,}. Copy it again"
        )
        with pytest.raises(hki.CheckpointError, match=message):
            hki.open_gguf(path)
    for length, where in (
        (6, "header"),
        (30, "metadata"),
        (reader.tensors[0].field.offset + 4, "table"),
    ):
        path.write_bytes(whole[:length])
        with pytest.raises(hki.CheckpointError, match=f"byte {length}, before its {where}"):
            hki.load_gguf(path, names)


WRITERS = {
    "save": lambda path: hki.save(path, PARAMS),
    "save_gguf": lambda path: hki.save_gguf(path, PARAMS, NAMES, kind="F32", metadata=METADATA),
    "plot_memory": lambda path: hki.plot_memory(hki.summary(PARAMS), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_cannot_be_written_is_named_as_it_was_given(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo("pipe.png")
    long = "x" * 250 + ".png"  # there is no room for the temporary name's own letters
    for path, message in {
        "folder.png": "folder.png: is a folder",
        "no/model.png": "no/model.png: the folder .*/no is not there. Make it first",
        "file/model.png": "file/model.png: .*/file is a file, and not a folder",
        "pipe.png": "pipe.png: is a pipe or a device",
        long: f"'{long}'$",
    }.items():
        with pytest.raises(OSError, match=message):
            WRITERS[name](path)
    assert sorted(os.listdir()) == ["file", "folder.png", "pipe.png"]


def test_a_folder_of_peft_is_made_in_one_that_is_there(tmp_path):
    params = hki.add_lora(PARAMS, 0, rank=1)
    adapter = hki.get_adapter(params)
    hki.save_peft(tmp_path / "new", adapter, {"linear/w": "linear"})
    with pytest.raises(FileNotFoundError, match=r"no.peft: the folder .*no is not there"):
        hki.save_peft(tmp_path / "no" / "peft", adapter, {"linear/w": "linear"})
    with pytest.raises(NotADirectoryError, match="is a file; give the name of a folder"):
        hki.save_peft(tmp_path / "new" / "adapter_config.json", adapter, {"linear/w": "linear"})
    with pytest.raises(hki.CheckpointError, match="a file in a folder of PEFT. Give the folder"):
        hki.load_peft(tmp_path / "new" / "adapter_config.json", {})


def test_save_does_not_write_safetensors_under_the_name_of_gguf(tmp_path):
    for name in ("model.gguf", "MODEL.GGUF"):
        with pytest.raises(ValueError, match=rf"{name}: .* haiku_implicit\.save_gguf writes these"):
            hki.save(tmp_path / name, PARAMS)
    assert not list(tmp_path.iterdir())
