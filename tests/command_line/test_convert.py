"""`haiku-implicit convert`, by the program's `main`."""

import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki
from haiku_implicit.command_line.main import main

RNG = np.random.default_rng(0)
Q8_0 = gguf.GGMLQuantizationType.Q8_0
UP, BIAS = (RNG.normal(size=shape).astype(np.float32) for shape in ((8, 64), (8,)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A GGUF file, a folder of the hub with the same numbers, and names for both."""
    monkeypatch.chdir(tmp_path)
    writer = gguf.GGUFWriter("model.gguf", arch="test")
    writer.add_tensor("blk.0.up.weight", gguf.quantize(UP, Q8_0), raw_dtype=Q8_0)
    writer.add_tensor("blk.0.up.bias", BIAS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "hub").mkdir()
    hki.save("hub/model.safetensors", {"blk.0.up.weight": UP, "blk.0.up.bias": BIAS})
    names = {
        r"blk\.(\d+)\.(\w+)\.weight": r"model/layer_\1/\2/w",
        r"blk\.(\d+)\.(\w+)\.bias": r"model/layer_\1/\2/b",
    }
    (tmp_path / "names.json").write_text(json.dumps(names))
    (tmp_path / "bad.json").write_text('{"a": "b/w",}')
    return tmp_path


def run(capsys, *arguments):
    """The exit code, the output and the errors."""
    code = main(["convert", *arguments])
    return code, *capsys.readouterr()


def test_a_gguf_file(folder, capsys):
    code, out, _ = run(capsys, "model.gguf", "model", "--names=names.json")
    assert code == 0
    assert out == "model: 2 parameters, 576 bytes, 8.86 bits a number\n"
    params = hki.load("model")["model/layer_0/up"]
    assert isinstance(params["w"], hki.QuantizedMatrix)
    want = gguf.dequantize(gguf.quantize(UP, Q8_0), Q8_0).T
    np.testing.assert_array_equal(params["w"].materialize(), want)
    np.testing.assert_array_equal(params["b"], BIAS)
    code, out, _ = run(capsys, "model.gguf", "dense", "--names=names.json", "--dequantize=.*/w",
                       "--dtype=bfloat16", "--json")  # fmt: skip
    assert code == 0
    assert json.loads(out) == {
        "target": "dense", "from": "gguf", "parameters": 2, "nbytes": 1040, "bits": 16.0,
        "warnings": [],
    }  # fmt: skip
    dense = hki.load("dense")["model/layer_0/up"]["w"]
    np.testing.assert_array_equal(dense, want.astype(jnp.bfloat16))


def test_a_folder_of_the_hub(folder, capsys):
    for source in ("hub", "hub/model.safetensors"):
        if source != "hub":  # a file of this library is not one of another
            safetensors.numpy.save_file({"blk.0.up.weight": UP, "blk.0.up.bias": BIAS}, source)
        code, _, err = run(capsys, source, "model", "--names=names.json", "--overwrite")
        assert code == 0, err
        np.testing.assert_array_equal(hki.load("model")["model/layer_0/up"]["w"], UP.T)
    code, _, _ = run(capsys, "hub", "same", "--names=names.json", "--like=model")
    assert code == 0
    hki.save("other", {"model/layer_0/up": {"w": jnp.zeros((64, 8))}})
    code, _, err = run(capsys, "hub", "none", "--names=names.json", "--like=other")
    assert code == 1 and "model/layer_0/up/b: the model has no such parameter" in err
    assert not (folder / "none").exists()


def test_an_adapter_there_and_back(folder, capsys):
    params = {"model/layer_0/up": {"w": jnp.asarray(UP.T)}}
    tuned = hki.add_lora(params, 0, rank=2, alpha=3.0)
    tuned["model/layer_0/up"]["w"] = tuned["model/layer_0/up"]["w"]._replace(b=jnp.ones((2, 8)))
    hki.save("adapter", hki.get_adapter(tuned))
    (folder / "to.json").write_text(json.dumps({r"model/layer_(\d+)/up/w": r"layers.\1.up"}))
    (folder / "from.json").write_text(json.dumps({r"layers\.(\d+)\.up": r"model/layer_\1/up/w"}))
    code, out, err = run(capsys, "adapter", "peft", "--names=to.json", "--base_model=a/b")
    assert (code, out) == (0, "peft: weights with an adapter: 1\n"), err
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"]) == ("a/b", 2)
    code, _, err = run(capsys, "peft", "back", "--names=from.json")
    assert code == 0, err
    again = hki.set_adapter(params, hki.load("back"), check_base=False)
    jax.tree.map(np.testing.assert_allclose, hki.materialize(again), hki.materialize(tuned))


def test_a_gguf_file_and_back(folder, capsys):
    """Bit for bit by default; in another kind, or by patterns of tensors' names."""
    to = ("--names=names.json", "--metadata_from=model.gguf")
    assert run(capsys, "model.gguf", "model", "--names=names.json")[0] == 0
    code, out, err = run(capsys, "model", "again.gguf", *to, "--json")
    assert code == 0, err
    size = (folder / "again.gguf").stat().st_size
    fields = {"target": "again.gguf", "from": "saved", "parameters": 2, "nbytes": size}
    assert json.loads(out) == {**fields, "warnings": []}
    for kind, want in [("", "Q8_0"), ("--kind=Q4_K,F16", "F16"), ('--kind={".*": "Q4_0"}', "Q4_0")]:
        code, _, err = run(capsys, "model", "again.gguf", *to, "--overwrite", *filter(None, [kind]))
        assert code == 0, err
        old, new = (gguf.GGUFReader(name) for name in ("model.gguf", "again.gguf"))
        assert [t.name for t in new.tensors] == [t.name for t in old.tensors]
        assert [t.tensor_type.name for t in new.tensors] == [want, "F32"]
        if not kind:
            for a, b in zip(old.tensors, new.tensors, strict=True):
                np.testing.assert_array_equal(a.data, b.data)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["model.gguf", "model"], 2, "--names=FILE.json is missing"),
        (["model.gguf", "hub", "--names=names.json"], 1, "hub: is a folder; give the name of a file"),
        (["names.json", "model", "--names=names.json"], 1, "names.json: expected a GGUF file, one"),
        (["none", "model", "--names=names.json"], 1, "none: No such file or directory"),
        (["hub", "model", "--names=bad.json"], 1, "bad.json: not JSON ("),
        (["hub/model.safetensors", "m", "--names=names.json"], 1, "this library's file already"),
        (["hub/model.safetensors", "m", "--names=names.json", "--like=x"], 2, "--like is for models"),
        (["model.gguf", "model", "--names=names.json", "--dtype=int8"], 2, "dtype"),
        (["model.gguf", "model", "--names=names.json", "--dequantize=x"], 1, "dequantize"),
        (["hub", "new.gguf", "--names=names.json"], 2, "--metadata_from=FILE.gguf is missing"),
        (["model.gguf", "new.gguf", "--names=names.json", "--metadata_from=model.gguf"], 1,
         "model.gguf: not a safetensors or .npz file, but a GGUF file"),
        (["model.gguf", "m", "--names=names.json", "--kind=F16"], 2, "for a TARGET that ends in .gguf"),
        (["model.gguf", "m.npz", "--names=names.json"], 2, "m.npz: what is written is a file of safet"),
        (["model.gguf", "no/m", "--names=names.json"], 1, "no/m: the folder "),
        (["-", "m", "--names=names.json"], 2, "'-': standard input and output are not read"),
        (["/dev/null", "m", "--names=names.json"], 1, "this is a pipe or a device"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted(folder, capsys, arguments, code, message):
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (code, "") and message in err
    assert not (folder / "model").exists()
