"""SmolLM2 with LoRA of Shakespeare merged into it, written to GGUF files, and run by llama.cpp.

`bash tests/run_other_programs.sh llama_cpp` runs it. It trains a few steps, writes a file of each kind,
and compares llama.cpp's logits and greedy tokens with those of the same file here.
"""

import ctypes
import gc
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import gguf
import haiku as hk
import jax
import llama_cpp
import numpy as np

import haiku_implicit as hki
import smollm
from models import llama

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "finetune_smollm.py"
STEPS, PROMPT, GENERATED = 10, 192, 32
# Blocks of 256 fit the 1536 of SmolLM2's `ffn_down`, and not the 576 of its other weights.
KINDS = {
    "F32": "F32",
    "F16": "F16",
    "Q8_0": "Q8_0",
    "Q4_1": "Q4_1",
    "Q4_0": "Q4_0",
    "Q6_K, Q8_0": ("Q6_K", "Q8_0"),
    "Q4_K, Q5_0": ("Q4_K", "Q5_0"),
}
# How far logits may be from those here in the root mean square, of their own deviation. Of a dense model
# llama.cpp computes what is computed here (float16 weights make it round activations to float16). Of a
# quantized one it rounds activations to 8 bits, which may move logits by as much as it does here.
DENSE_LIMITS = {"F32": 1e-4, "F16": 3e-3}
MOST_OF_ROUNDING = 1.5
# Functions of llama.cpp's library that decode blocks.
DECODERS = {
    "Q4_0": "q4_0", "Q4_1": "q4_1", "Q5_0": "q5_0", "Q5_1": "q5_1", "Q8_0": "q8_0", "Q2_K": "q2_K",
    "Q3_K": "q3_K", "Q4_K": "q4_K", "Q5_K": "q5_K", "Q6_K": "q6_K", "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_xs", "TQ2_0": "tq2_0", "MXFP4": "mxfp4",
}  # fmt: skip


def main() -> None:
    compare_blocks()
    source = smollm.fetch(smollm.MODEL)
    checkpoint = smollm.read_gguf(source)
    ids = checkpoint.tokenizer.encode(smollm.read_text(smollm.fetch(smollm.SHAKESPEARE))).ids
    tokens = np.asarray(ids[-20_000:][: PROMPT + 1])  # of the tenth that is held out
    apply = model_of(checkpoint.config)
    with tempfile.TemporaryDirectory() as folder:
        merged = fine_tuned(checkpoint.params, pathlib.Path(folder))
        before = loss_of(logits_here(apply, checkpoint.params, tokens[:-1]), tokens)
        print(f"loss without LoRA {before:.4f}\n")
        print(
            "| kind | MB | loss here | loss, llama.cpp | distance of logits | 8-bit activations here | "
            "same likeliest token | same greedy text |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
        )
        for name, kind in KINDS.items():
            path = pathlib.Path(folder) / "model.gguf"
            hki.save_gguf(path, merged, smollm.NAMES, kind=kind, metadata_from=source)
            compare(name, path, apply, tokens)


def compare_blocks() -> None:
    """Blocks decoded by llama.cpp, to the same numbers; and the errors of its own quantizer."""
    library = ctypes.CDLL(
        str(next(pathlib.Path(llama_cpp.__file__).parent.glob("lib/libggml-base.*")))
    )
    w = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    error = lambda x: np.linalg.norm(x - w) / np.linalg.norm(w)  # noqa: E731
    print(
        "| kind | error here | error, llama.cpp | ratio | of equal bytes |\n| --- | --- | --- | --- | --- |"
    )
    for kind, name in DECODERS.items():
        data = hki.to_ggml(w, kind, axis=-1)
        decoded, own = (np.zeros_like(w) for _ in range(2))
        decode = library[f"dequantize_row_{name}"]
        decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        decode(data.ctypes.data, decoded.ctypes.data, w.size)
        np.testing.assert_array_equal(
            decoded, hki.from_ggml(data, kind, axis=-1).materialize(), kind
        )
        theirs = np.zeros_like(data)
        quantize = library.ggml_quantize_chunk
        quantize.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p
        ]  # fmt: skip
        number = int(gguf.GGMLQuantizationType[kind])
        quantize(number, w.ctypes.data, theirs.ctypes.data, 0, *w.shape, None)
        decode(theirs.ctypes.data, own.ctypes.data, w.size)
        ratio, equal = error(decoded) / error(own), (data == theirs).mean()
        print(f"| {kind} | {error(decoded):.4f} | {error(own):.4f} | {ratio:.3f} | {equal:.0%} |")
        assert ratio < 1.001, (kind, ratio)
    print()


def model_of(config: llama.LlamaConfig) -> Any:
    model = hk.without_apply_rng(hk.transform(lambda tokens: llama.Llama(config)(tokens)))
    return jax.jit(hki.transform_implicit(model).apply)


def fine_tuned(params: Any, folder: pathlib.Path) -> Any:
    """Dense parameters, with what the example learns in a few steps."""
    adapter = folder / "adapter.safetensors"
    flags = [f"--steps={STEPS}", f"--adapter={adapter}", "--eval_batches=1", "--sample_tokens=0"]
    subprocess.run([sys.executable, EXAMPLE, *flags], check=True)
    trained = hki.load(adapter)["adapter"]
    # The example's own options: what it trained goes into the same places.
    with_lora = hki.add_lora(params, 0, rank=8, alpha=16.0, targets=".*_proj/w")
    _, base = hki.partition(with_lora, trainable_dense=False)
    return hki.merge_adapters(hki.combine(trained, base))


def compare(name: str, path: pathlib.Path, apply: Any, tokens: np.ndarray) -> None:
    """One line of the table, and the assertions."""
    params = smollm.read_gguf(path).params
    here = logits_here(apply, params, tokens[:-1])
    there, their_text = logits_there(path, tokens[:-1])
    text = greedy_here(apply, params, tokens[:-1])
    same = next(
        (i for i, (a, b) in enumerate(zip(text, their_text, strict=True)) if a != b), GENERATED
    )
    far, rounding = distance(here, there), 0.0
    if name not in DENSE_LIMITS:
        rounded = hki.quantize_activations(params, "int8,groups")
        rounding = distance(logits_here(apply, rounded, tokens[:-1]), here)
    agree = (here.argmax(-1) == there.argmax(-1)).mean()
    print(
        f"| {name} | {path.stat().st_size / 1e6:.0f} | {loss_of(here, tokens):.4f} | "
        f"{loss_of(there, tokens):.4f} | {far:.2g} | {rounding:.2g} | {agree:.1%} | {same} of {GENERATED} |",
        flush=True,
    )
    assert far < DENSE_LIMITS.get(name, MOST_OF_ROUNDING * rounding), (name, far, rounding)
    assert abs(loss_of(here, tokens) - loss_of(there, tokens)) < 0.03, name
    assert agree > (0.99 if name in DENSE_LIMITS else 0.9), (name, agree)


def logits_here(apply: Any, params: Any, tokens: np.ndarray) -> np.ndarray:
    """The logits of some tokens, in a window of one length, for which the model is compiled once."""
    window = np.zeros((1, PROMPT + GENERATED), np.int32)
    window[0, : len(tokens)] = tokens
    return np.asarray(apply(params, window))[0, : len(tokens)]


def greedy_here(apply: Any, params: Any, tokens: np.ndarray) -> list[int]:
    """What follows, the whole window again for each token."""
    text = tokens.tolist()
    while len(text) < len(tokens) + GENERATED:
        text.append(int(logits_here(apply, params, np.asarray(text))[-1].argmax()))
    return text[len(tokens) :]


def logits_there(path: pathlib.Path, tokens: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """llama.cpp's logits of the tokens, and the greedy ones that follow."""
    length = len(tokens) + GENERATED
    model = llama_cpp.Llama(
        str(path), n_ctx=length, n_batch=length, n_threads=2, logits_all=True, verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    model.eval(tokens.tolist())
    logits, text = np.array(model.scores[: len(tokens)]), []
    while len(text) < GENERATED:
        text.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(text[-1:])
    model.close()
    del model
    gc.collect()
    return logits, text


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The root mean square of the difference, for logits of deviation one."""
    return float(np.sqrt(np.mean((a - b) ** 2)) / np.std(a - a.mean(-1, keepdims=True)))


def loss_of(logits: np.ndarray, tokens: np.ndarray) -> float:
    """The next token's mean cross entropy in nats."""
    normalized = jax.nn.log_softmax(logits)
    return -float(np.mean(normalized[np.arange(len(tokens) - 1), tokens[1:]]))


if __name__ == "__main__":
    main()
