"""Every reader on what every writer wrote of the same parameters: the same numbers, or one error."""

import json
import pickle

import gguf
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki
from haiku_implicit.command_line.main import main

RNG = np.random.default_rng(0)
PARAMS = {
    f"block_{i}": {
        "w": RNG.standard_normal((4, 32), np.float32),
        "b": RNG.standard_normal(32, np.float32),
    }
    for i in range(3)
}
FLAT = {f"{module}/{name}": x for module, own in PARAMS.items() for name, x in own.items()}
NAMES = {name: hki.Place(name, tuple(range(x.ndim))) for name, x in FLAT.items()}


# --- writers: each returns what a user hands to a reader -------------------------------------------


def saved(folder, **options):
    hki.save(folder / "m.safetensors", PARAMS, **options)
    return folder / "m.safetensors"


def foreign(folder):
    safetensors.numpy.save_file(FLAT, folder / "m.safetensors")
    return folder / "m.safetensors"


def shards(folder, index=True):
    names = sorted(FLAT)
    files = [folder / f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    listed = {name: files[i // 2].name for i, name in enumerate(names)}
    for file in files:
        own = {name: FLAT[name] for name in names if listed[name] == file.name}
        safetensors.numpy.save_file(own, file)
    if index:
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": listed}))
    return files[1]


def hub(folder):
    shards(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "test"}))
    return folder


def archive(folder, save=np.savez):
    save(folder / "m.npz", **FLAT)
    return folder / "m.npz"


def pickled(folder, protocol):
    (folder / "m.pkl").write_bytes(pickle.dumps(PARAMS, protocol))
    return folder / "m.pkl"


def by_gguf(folder, **options):
    writer = gguf.GGUFWriter(folder / "m.gguf", arch="test", **options)
    for name, x in FLAT.items():
        writer.add_tensor(name, x)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    return sorted(folder.glob("*.gguf"))[-1]


def gguf_of_ours(folder):
    metadata = {"general.architecture": "test"}
    hki.save_gguf(folder / "m.gguf", PARAMS, NAMES, kind="F32", metadata=metadata)
    return folder / "m.gguf"


def converted(folder):
    status = main(
        ["convert", str(foreign(folder)), str(folder / "c.safetensors"), *by_names(folder)]
    )
    assert status == 0
    return folder / "c.safetensors"


def by_names(folder):
    path = folder / "names.json"
    path.write_text(json.dumps({name: NAMES[name]._asdict() for name in FLAT}))
    return [f"--names={path}"]


# What each file is, for the readers that take it.
WRITERS = {
    "save": (saved, "ours"),
    "save in several files": (lambda folder: saved(folder, max_shard_bytes=300), "ours"),
    "convert": (converted, "ours"),
    "safetensors": (foreign, "safetensors"),
    "a shard with an index": (shards, "shards"),
    "a shard without an index": (lambda folder: shards(folder, index=False), "shards"),
    "a folder of the hub": (hub, "hub"),
    "npz": (archive, "npz"),
    "compressed npz": (lambda folder: archive(folder, np.savez_compressed), "npz"),
    "pickle 2": (lambda folder: pickled(folder, 2), "pickle"),
    "pickle 5": (lambda folder: pickled(folder, 5), "pickle"),
    "gguf-py": (by_gguf, "gguf"),
    "gguf-py in several files": (lambda folder: by_gguf(folder, split_max_tensors=2), "gguf"),
    "save_gguf": (gguf_of_ours, "gguf"),
}


# --- readers --------------------------------------------------------------------------------------


def through_convert(path):
    target = path.parent / "target.safetensors"
    status = main(["convert", str(path), str(target), "--overwrite", *by_names(path.parent)])
    if status:
        raise ValueError(f"{path}: exit status {status}")
    return hki.load(target)


def part_by_part(path):
    with hki.open_checkpoint(path) as checkpoint:
        return {module: dict(checkpoint[module]) for module in checkpoint}


ARRAYS = {"ours", "safetensors", "npz"}
READERS = {
    "load": (hki.load, ARRAYS),
    "load numpy": (lambda path: hki.load(path, numpy=True), ARRAYS),
    "load like": (lambda path: hki.load(path, like=PARAMS), ARRAYS),
    "load only": (lambda path: hki.load(path, only=".*"), ARRAYS),
    "load pickle": (lambda path: hki.load(path, allow_pickle=True), {*ARRAYS, "pickle"}),
    "open_checkpoint": (part_by_part, ARRAYS),
    "load_hugging_face": (
        lambda path: hki.load_hugging_face(path, NAMES),
        {"ours", "safetensors", "shards", "hub"},
    ),
    "load_gguf": (lambda path: hki.load_gguf(path, NAMES), {"gguf"}),
    "convert": (through_convert, {"safetensors", "shards", "hub", "gguf"}),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_reader(writer, tmp_path, capsys):
    write, what = WRITERS[writer]
    path = write(tmp_path)
    for name, (read, reads) in READERS.items():
        if what in reads:
            found = read(path)
            assert found.keys() == PARAMS.keys(), name
            for module, own in PARAMS.items():
                assert found[module].keys() == own.keys(), name
                for key, x in own.items():
                    assert found[module][key].dtype == x.dtype, name
                    np.testing.assert_array_equal(found[module][key], x, err_msg=name)
        else:
            with pytest.raises((ValueError, OSError)) as raised:
                read(path)
            # A reader of split models names their first file.
            assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value), name
