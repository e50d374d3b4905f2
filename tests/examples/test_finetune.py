"""The main job, on a tiny model: what it prints and saves, resuming, interruption, bad input."""

import os
import pathlib
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from absl import flags
from absl.testing import flagsaver

import finetune_smollm
import haiku_implicit as hki
import smollm
from tests.examples.tiny_llama import TINY, gguf_tensors, write_gguf

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "llama_golden.npz"
Q4_1 = gguf.GGMLQuantizationType.Q4_1
SMALL = dict(steps=4, save_every=2, batch_size=2, context=16, rank=2, eval_batches=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A 4-bit GGUF file of the tiny model, and a text of its vocabulary's letters."""
    folder = tmp_path_factory.mktemp("files")
    tensors = gguf_tensors(np.load(GOLDEN))
    matrices = {name: Q4_1 for name, x in tensors.items() if x.ndim == 2}
    letters = np.random.default_rng(0).choice(list("abcdefgh"), size=3000)
    text = folder / "text.txt"
    text.write_text("".join(letters))
    return write_gguf(folder / "tiny.gguf", tensors, types=matrices), text


@pytest.fixture
def job(files, tmp_path, capsys):
    """Runs the script in this process with flags; returns what it printed."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["finetune_smollm"])
    model, text = map(str, files)
    fixed = dict(gguf=model, text=text, adapter=str(tmp_path / "a.safetensors"), prompt="abc")

    def run(**changes):
        settings = {**SMALL, "sample_tokens": 3, **fixed, **changes}
        with flagsaver.flagsaver(**settings), hki.materialization("error"):
            finetune_smollm.main(["finetune_smollm"])
        return capsys.readouterr().out

    return run


def losses(output):
    return [float(x) for x in re.search(r"held-out loss\s+(\S+) -> (\S+)", output).groups()]


@pytest.mark.slow
def test_trains_and_reports(job, tmp_path):
    output = job(steps=30, learning_rate=0.01)
    before, after = losses(output)
    assert after < before - 0.3
    for word in (
        "LoRA of QuantizedMatrix",
        "of dense bytes",
        "sample before",
        "sample after",
        "tokens per second",
        "peak",
    ):
        assert word in output
    tensors = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    factor = "adapter/llama/layer_0/attention/q_proj/w.b"
    assert tensors[factor].shape == (2, TINY.dim) and np.abs(tensors[factor]).max() > 0


@pytest.mark.slow
def test_the_cache_changes_no_sample(files):
    """Token by token with a cache, or from all tokens before each one."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["finetune_smollm"])
    with flagsaver.flagsaver(**SMALL, sample_tokens=6, temperature=0.5):
        checkpoint = smollm.read_gguf(str(files[0]))
        prompt = list(checkpoint.tokenizer.encode("abc").ids)
        halves = hki.partition(finetune_smollm.load_params(checkpoint), trainable_dense=False)
        apply = jax.jit(finetune_smollm.make_model(checkpoint.config))
        ids, key = list(prompt), jax.random.key(0)
        for i in range(len(prompt) - 1, len(prompt) + 5):
            logits = apply(hki.combine(*halves), jnp.asarray([ids]))[0, -1]
            ids.append(int(jax.random.categorical(jax.random.fold_in(key, i), logits / 0.5)))
        got = finetune_smollm.make_sampler(checkpoint, prompt, *halves)(*halves)
    assert got == checkpoint.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bfloat16", "int8"])
def test_learns_in_few_bits(compute, job):
    before, after = losses(job(steps=30, learning_rate=0.01, compute=compute))
    assert after < before - 0.3


def test_what_products_compute_in_is_an_option(files):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["finetune_smollm"])
    checkpoint, found = smollm.read_gguf(str(files[0])), {}
    for compute in ("float32", "bfloat16", "int8"):
        with flagsaver.flagsaver(**SMALL, compute=compute):
            w = finetune_smollm.load_params(checkpoint)["llama/layer_0/mlp/up_proj"]["w"]
        found[compute] = w.dtype.name, w.a.dtype.name, w.w.codes.dtype.name, w.w.activation
    assert found == {
        "float32": ("float32", "float32", "uint8", None),
        "bfloat16": ("bfloat16", "float32", "uint8", None),
        "int8": ("float32", "float32", "uint8", "int8"),
    }


@pytest.mark.slow
def test_resuming_is_the_same_as_not_stopping(job, tmp_path):
    job(steps=4)
    whole = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    job(steps=2)
    assert "at step 2" in job(steps=4, resume=True)
    parts = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert whole.keys() == parts.keys()
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


@pytest.mark.slow
def test_an_earlier_adapter_is_kept(job, tmp_path):
    job(steps=2)
    first = (tmp_path / "a.safetensors").read_bytes()
    job(steps=2, seed=1)
    assert (tmp_path / "a.safetensors.bak").read_bytes() == first


@pytest.mark.slow
def test_interruption_loses_at_most_the_steps_since_the_last_save(job, tmp_path, monkeypatch):
    windows = finetune_smollm.windows

    def interrupt(tokens, key):
        if key[1] == 3:
            raise KeyboardInterrupt
        return windows(tokens, key)

    monkeypatch.setattr(finetune_smollm, "windows", interrupt)
    with pytest.raises(SystemExit, match="--resume"):
        job()
    monkeypatch.undo()
    assert "at step 2" in job(resume=True)


@pytest.mark.slow
def test_a_failed_save_leaves_the_last_one(job, tmp_path, monkeypatch):
    job(steps=2)
    saved = (tmp_path / "a.safetensors").read_bytes()

    def fail(*_):
        raise OSError("disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        job(resume=True)
    assert (tmp_path / "a.safetensors").read_bytes() == saved
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(gguf="missing.gguf"), "missing.gguf: No such file"),
        (dict(text="missing.txt"), "missing.txt: No such file"),
        (dict(prompt=""), "--prompt is empty"),
        (dict(prompt="a" * 17), "--prompt has 17 tokens, more than --context=16"),
        (dict(context=512), "takes at least 5130"),
        (dict(targets="no_such/w"), "no_such/w"),
        (dict(targets="("), "regular expression"),
        (dict(rank=1000), "rank"),
        (dict(resume=True), "cannot resume"),
        (dict(adapter="no/a.safetensors"), "--adapter=no/a.safetensors: the folder "),
    ],
)
def test_bad_input_ends_in_one_line(job, changes, message):
    with pytest.raises(SystemExit) as stopped:
        job(**changes)
    line = str(stopped.value)
    assert line.startswith("error: ") and message in line and "\n" not in line


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a model", None])
def test_bad_model_file(job, files, tmp_path, content):
    whole = files[0].read_bytes()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(SystemExit, match=r"error: .*bad.gguf: "):
        job(gguf=str(bad))


@pytest.mark.slow
def test_resuming_from_something_else(job, tmp_path):
    job(steps=2)
    with pytest.raises(SystemExit, match="--rank=2, now it is --rank=3"):
        job(resume=True, rank=3)
    (tmp_path / "a.safetensors").write_bytes(b"no tensors")
    with pytest.raises(SystemExit, match="cannot resume"):
        job(resume=True)


@pytest.mark.slow
def test_four_bit_run_equals_dense_run():
    """SmolLM2 itself: the logits of the 4-bit weights against those of the dequantized ones."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["finetune_smollm"])
    checkpoint = smollm.read_gguf(smollm.fetch(smollm.MODEL))
    params = finetune_smollm.load_params(checkpoint)
    dense = hki.materialize(checkpoint.params)
    apply = jax.jit(finetune_smollm.make_model(checkpoint.config))
    tokens = jnp.asarray(np.load(GOLDEN)["smollm_tokens"])
    with hki.materialization("error"):
        got = apply(params, tokens)
    # The factors `b` start at zero, so that LoRA changes nothing yet. Logits go up to 27.
    np.testing.assert_allclose(got, apply(dense, tokens), rtol=1e-4, atol=2e-4)
    held = sum(x.nbytes for x in jax.tree.leaves(hki.partition(params, trainable_dense=False)[1]))
    assert held < 0.2 * sum(x.nbytes for x in jax.tree.leaves(dense))
