"""Models in several files: a part is never taken for the whole."""

import json
import pathlib
import shutil

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki
from haiku_implicit.command_line.main import main

NAMES = hki.names_by_pattern({r"layer\.(\d+)\.weight": hki.Place(r"layer_\1/w", (0, 1))})
WEIGHTS = {f"layer.{i}.weight": np.full((2, 32), i, np.float32) for i in range(6)}
WHOLE = {NAMES(name).path.partition("/")[0]: {"w": w} for name, w in WEIGHTS.items()}


def write_gguf(folder, weights=WEIGHTS, **options):
    """Files of two tensors each, as the package divides a model, in the manner of `gguf-split`."""
    folder.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(folder / "m.gguf", arch="test", **{"split_max_tensors": 2, **options})
    writer.add_uint32("test.block_count", 6)
    for name, w in weights.items():
        writer.add_tensor(name, w)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def write_shards(folder, index=False):
    """Files of two tensors each, as transformers writes them."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    listed = {}
    for i, file in enumerate(files):
        own = {f"layer.{j}.weight": WEIGHTS[f"layer.{j}.weight"] for j in (2 * i, 2 * i + 1)}
        safetensors.numpy.save_file(own, file)
        listed |= dict.fromkeys(own, file.name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return files


def same(found):
    jax.tree.map(np.testing.assert_array_equal, found, WHOLE)
    assert found.keys() == WHOLE.keys()


def refused(message, load, *args):
    with pytest.raises(hki.CheckpointError, match=message):
        load(*args)


# --- GGUF ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(3))
def test_any_file_of_a_split_model_is_the_model(part, tmp_path):
    path = write_gguf(tmp_path)[part]
    same(hki.load_gguf(path, NAMES))
    reader = hki.open_gguf(path)
    assert [t.name for t in reader.tensors] == list(WEIGHTS)
    assert reader.fields["test.block_count"].contents() == 6  # only the first file has it
    same(hki.load_gguf(reader, NAMES))
    hki.save_gguf(tmp_path / "one.gguf", WHOLE, NAMES, metadata_from=path)
    same(hki.load_gguf(tmp_path / "one.gguf", NAMES))
    fields = gguf.GGUFReader(tmp_path / "one.gguf").fields
    assert "test.block_count" in fields and not any(key.startswith("split") for key in fields)


def test_a_first_file_without_tensors(tmp_path):
    files = write_gguf(tmp_path, small_first_shard=True)
    assert len(files) == 4 and not gguf.GGUFReader(files[0]).tensors
    same(hki.load_gguf(files[0], NAMES))


def test_files_of_a_split_model_that_are_not_there(tmp_path):
    first, second, third = write_gguf(tmp_path)
    renamed = shutil.copy(first, tmp_path / "renamed.gguf")
    for load in (lambda x: hki.load_gguf(x, NAMES), hki.open_gguf):
        refused(r"file 1 of 3 .* to end in -00001-of-00003.gguf", load, renamed)
    second.unlink()
    third.unlink()
    message = r"file 1 of 3 .* not beside it: m-00002-of-00003.gguf, m-00003-of-00003.gguf"
    for load in (lambda x: hki.load_gguf(x, NAMES), hki.open_gguf):
        refused(message, load, first)


def test_files_that_are_not_of_one_model(tmp_path):
    files = write_gguf(tmp_path / "a")
    load = lambda: hki.load_gguf(files[0], NAMES)  # noqa: E731

    def fails(message, **changes):
        for name, source in changes.items():
            shutil.copy(source, tmp_path / "a" / f"m-0000{name[1]}-of-00003.gguf")
        refused(message, load)
        write_gguf(tmp_path / "a")

    fails("m-00002-of-00003.gguf: expected file 2 of 3 .* got file 3 of 3", _2=files[2])
    fails("expected file 2 of 3 .* got file 3 of 3", _2=files[2], _3=files[1])  # exchanged
    refused(r"00001-of-00003.gguf, whose other files|expected it to end in -00003-of-00003",
            hki.load_gguf, shutil.copy(files[2], tmp_path / "m-00001-of-00003.gguf"), NAMES)  # fmt: skip
    fewer = write_gguf(tmp_path / "b", {name: WEIGHTS[name] for name in list(WEIGHTS)[:5]})
    fails("expected file 2 of 3 and 6 tensors in all, got file 2 of 3 and 5", _2=fewer[1])
    names = [f"layer.{i}.weight" for i in (4, 5, 0, 1, 2, 3)]
    other = write_gguf(tmp_path / "c", {name: WEIGHTS[name] for name in names})
    fails("layer.0.weight: .*m-00001-of-00003.gguf has it, too", _2=other[1])
    split = write_gguf(tmp_path / "d", split_max_tensors=0, split_max_size=0)
    fails("m-00003-of-00003.gguf: expected file 3 of 3 .* got file 1 of 1", _3=split[0])


def test_a_file_that_is_a_part_by_its_name_alone(tmp_path):
    (path,) = write_gguf(tmp_path, split_max_tensors=0, split_max_size=0)
    same(hki.load_gguf(path, NAMES))
    path = path.rename(tmp_path / "m-00001-of-00002.gguf")
    shutil.copy(path, tmp_path / "m-00002-of-00002.gguf")
    for load in (lambda x: hki.load_gguf(x, NAMES), hki.open_gguf):
        refused(r"name one of 2 .* others are m-00002-of-00002.gguf.* rename it", load, path)


# --- safetensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [False, True], ids=["no index", "index"])
def test_any_shard_is_the_model(index, tmp_path):
    files = write_shards(tmp_path, index)
    for path in (tmp_path, *files):
        same(hki.load_hugging_face(path, NAMES))


@pytest.mark.parametrize("index", [False, True], ids=["no index", "index"])
def test_shards_that_are_not_there(index, tmp_path):
    files = write_shards(tmp_path, index)
    files[0].unlink()
    files[1].unlink()
    for path in (tmp_path, files[2]):
        message = (
            r"into 3 files, of which these are not .*: model-00001-of-00003.*, model-00002-of-"
        )
        refused(message, hki.load_hugging_face, path, NAMES)


def test_an_index_of_another_name_and_files_without_numbers(tmp_path):
    for i in range(2):
        own = {name: w for name, w in WEIGHTS.items() if (int(name[6]) < 3) == (i == 0)}
        safetensors.numpy.save_file(own, tmp_path / f"{'ab'[i]}.safetensors")
    listed = {name: f"{'ab'[int(name[6]) >= 3]}.safetensors" for name in WEIGHTS}
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    for path in (tmp_path, tmp_path / "a.safetensors", tmp_path / "b.safetensors"):
        same(hki.load_hugging_face(path, NAMES))


def two_files(folder, names, index=None, listed=(0, 1)):
    """A model of six tensors in two files, of which an index lists some."""
    folder.mkdir(exist_ok=True)
    of_tensors = {}
    for i, name in enumerate(names):
        own = dict(list(WEIGHTS.items())[3 * i : 3 * i + 3])
        safetensors.numpy.save_file(own, folder / name)
        of_tensors |= dict.fromkeys(own, name) if i in listed else {}
    if index:
        (folder / index).write_text(json.dumps({"weight_map": of_tensors}))
    return [folder / name for name in names]


def test_an_index_counts_also_if_a_file_has_the_name_of_a_whole_model(tmp_path):
    names = ("model.safetensors", "model_extra.safetensors")
    files = two_files(tmp_path, names, "model.safetensors.index.json")
    for path in (tmp_path, *files):
        same(hki.load_hugging_face(path, NAMES))
    refused("one of 2 files .* others are model_extra", hki.load, files[0])
    write_shards(tmp_path, index=True)  # another form of the model, beside the whole one
    safetensors.numpy.save_file(WEIGHTS, tmp_path / names[0])
    for path in (tmp_path, files[0]):
        same(hki.load_hugging_face(path, NAMES))
    assert list(hki.load(files[0])[""]) == list(WEIGHTS)


def test_an_index_that_lists_fewer_files_than_their_names_say(tmp_path):
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    files = two_files(tmp_path, names, "model.safetensors.index.json", listed=[0])
    message = r"index.json: weight_map: expected all 2 files that the name model-00001-of.*, got 1"
    for path in (tmp_path, *files):
        refused(message, hki.load_hugging_face, path, NAMES)
    refused(message, hki.load, files[1])
    safetensors.numpy.save_file(WEIGHTS, tmp_path / "other.safetensors")
    same(hki.load_hugging_face(tmp_path / "other.safetensors", NAMES))


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model-0000{}-of-00002.fp16.safetensors", "model.safetensors.index.fp16.json"),
        ("model.fp16-0000{}-of-00002.safetensors", "model.safetensors.index.fp16.json"),
        ("{}.safetensors", "model.safetensors.index.fp16.json"),
        ("model-0000{}-of-00002.fp16.safetensors", None),
        ("0000{}-of-00002.safetensors", None),
        ("model_0000{}-of-00002.safetensors", None),
        ("model.0000{}-of-00002.safetensors", None),
    ],
)
def test_other_names_of_shards(name, index, tmp_path):
    files = two_files(tmp_path, [name.format(i) for i in (1, 2)], index)
    for path in (tmp_path, *files):
        same(hki.load_hugging_face(path, NAMES))
    for one, other in (files, files[::-1]):
        refused(f"one of 2 files .* others are {other.name}", hki.load, one)
    files[1].unlink()
    refused(files[1].name, hki.load_hugging_face, files[0], NAMES)


def test_an_index_of_a_variant_comes_second(tmp_path):
    two_files(
        tmp_path, [f"fp16-{i}-of-2.safetensors" for i in (1, 2)], "d.safetensors.index.fp16.json"
    )
    files = write_shards(tmp_path, index=True)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "d.safetensors.index.json")
    files[1].unlink()
    refused("are not beside it: model-00002", hki.load_hugging_face, tmp_path, NAMES)


def test_files_that_are_numbered_without_their_count(tmp_path):
    first, second = two_files(tmp_path, [f"consolidated.0{i}.safetensors" for i in (0, 1)])
    for path in (first, second):
        same(hki.load_hugging_face(path, NAMES))
    refused("one of 2 files .* others are consolidated.01", hki.load, first)
    first.unlink()
    for load in (hki.load, lambda x: hki.load_hugging_face(x, NAMES)):
        refused("are not beside it: consolidated.00", load, second)
    same_names = second.rename(first)
    assert list(hki.load_hugging_face(same_names, NAMES)) == ["layer_3", "layer_4", "layer_5"]


def test_numbers_without_zeros_before_them(tmp_path):
    files = [tmp_path / f"model-{i}-of-10.safetensors" for i in range(1, 11)]
    for i, file in enumerate(files):
        safetensors.numpy.save_file({f"layer.{i}.weight": np.ones((1, 2), np.float32)}, file)
    for path in (tmp_path, files[0], files[9]):
        assert len(hki.load_hugging_face(path, NAMES)) == 10


def test_a_file_that_is_no_part_is_read_alone(tmp_path):
    write_shards(tmp_path, index=True)
    only = {"layer.7.weight": np.ones((1, 2), np.float32)}
    for name in ("other", "other-7-of-9x", "model-00009-of-00003", "model-1-of-1"):
        safetensors.numpy.save_file(only, tmp_path / f"{name}.safetensors")
        found = hki.load_hugging_face(tmp_path / f"{name}.safetensors", NAMES)
        assert list(found) == ["layer_7"]
        assert list(hki.load(tmp_path / f"{name}.safetensors")) == [""]


def test_shards_of_two_models(tmp_path):
    files = write_shards(tmp_path)
    for file in files:
        shutil.copy(file, file.with_name(file.name.replace("model", "old")))
    refused("neither model.safetensors nor", hki.load_hugging_face, tmp_path, NAMES)
    same(hki.load_hugging_face(files[1], NAMES))


def test_a_tensor_that_two_shards_have(tmp_path):
    """The index says which one counts. Without, it is an error."""
    first, second, _ = write_shards(tmp_path, index=True)
    stale = {
        name: -w for name, w in WEIGHTS.items() if name in ("layer.0.weight", "layer.4.weight")
    }
    own = {name: WEIGHTS[name] for name in ("layer.2.weight", "layer.3.weight")}
    safetensors.numpy.save_file(own | stale, second)
    for path in (tmp_path, first, second):
        same(hki.load_hugging_face(path, NAMES))
    (tmp_path / "model.safetensors.index.json").unlink()
    message = (
        r"00002-of-00003.safetensors: layer.0.weight: .*00001-of-00003.safetensors has it, too"
    )
    refused(message, hki.load_hugging_face, tmp_path, NAMES)


def test_a_checkpoint_of_this_library_in_several_files(tmp_path):
    path = tmp_path / "model.safetensors"
    hki.save(path, WEIGHTS, max_shard_bytes=600)
    parts = sorted(tmp_path.glob("model.safetensors.*"))
    assert len(parts) == 2
    same(hki.load_hugging_face(path, NAMES))
    same(hki.load_hugging_face(tmp_path, NAMES))
    refused("a part of the checkpoint model", hki.load_hugging_face, parts[0], NAMES)
    parts[-1].unlink()
    refused(f"the file {parts[-1].name} is missing", hki.load_hugging_face, path, NAMES)


# --- what reads one file -------------------------------------------------------------------------


@pytest.mark.parametrize("index", [False, True], ids=["no index", "index"])
def test_load_refuses_a_shard_and_names_the_others(index, tmp_path, capsys):
    path = write_shards(tmp_path, index)[1]
    message = (
        r"one of 3 files .* are model-00001-of-00003.*, model-00003-of.*hugging_face reads all"
    )
    for load in (hki.load, hki.open_checkpoint):
        refused(message, load, path)
    assert main(["inspect", str(path)]) == 1
    assert "model-00003-of-00003.safetensors" in capsys.readouterr().err
    hki.save(path, WHOLE)  # of this library, a file is what it is
    same(hki.load(path))


@pytest.mark.parametrize("write", [write_gguf, write_shards])
def test_convert(write, tmp_path, capsys):
    files = write(tmp_path / "model")
    (tmp_path / "names.json").write_text(
        json.dumps({r"layer\.(\d+)\.weight": {"path": r"layer_\1/w", "axes": [0, 1]}})
    )

    def convert(source):
        options = [f"--names={tmp_path / 'names.json'}", "--overwrite"]
        return main(["convert", str(source), str(tmp_path / "out"), *options])

    assert convert(files[2]) == 0
    same(hki.load(tmp_path / "out"))
    pathlib.Path(tmp_path / "out").unlink()
    files[0].unlink()
    capsys.readouterr()
    assert convert(files[2]) == 1
    assert files[0].name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
