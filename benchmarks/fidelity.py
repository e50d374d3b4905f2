"""What each format and calibration costs in accuracy, on real weights.

    python -m benchmarks.fidelity                 # everything: results, table and plot
    python -m benchmarks.fidelity --report_only   # table and plot from the recorded results

Run it from the root of the repository. What is measured is told in `docs/fidelity.md`.
"""

import json
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
from benchmarks import tables as markdown

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # whose scripts import each other by their bare names

import minilm  # noqa: E402
import quantized_blocks  # noqa: E402
import smollm  # noqa: E402
from models import bert, llama  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "fidelity.json"
DOCUMENT = ROOT / "docs" / "fidelity.md"
IMAGE = ROOT / "docs" / "images" / "fidelity.png"

REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Only the table and the plot.")
PERPLEXITY = flags.DEFINE_bool("perplexity", True, "Whether to score SmolLM2 as well.")

# Name: (options of `QuantizedMatrix.quantize`, whether the calibration batch is used).
BF16 = dict(scale_dtype="bfloat16")
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "int8 per channel": (dict(dtype="int8", **BF16), False),
    "int8 per channel, mse": (dict(dtype="int8", calibration="mse", **BF16), False),
    "fp8 e4m3 per channel": (dict(dtype="fp8_e4m3", **BF16), False),
    "fp8 e4m3 per channel, mse": (dict(dtype="fp8_e4m3", calibration="mse", **BF16), False),
    "mxfp8": (dict(dtype="mxfp8"), False),
    "mxfp8, mse": (dict(dtype="mxfp8", calibration="mse"), False),
    "int6, 64": (dict(dtype="int6", group_size=64, calibration="mse", **BF16), False),
    "nf4, 64": (dict(dtype="nf4", group_size=64), False),
    "nf4, 64, mse": (dict(dtype="nf4", group_size=64, calibration="mse", **BF16), False),
    "nf4, 64, double": (dict(dtype="nf4", group_size=64, scale_dtype="double"), False),
    "nf4, 64, double, mse": (
        dict(dtype="nf4", group_size=64, scale_dtype="double", calibration="mse"), False,
    ),
    "nf4, 128, mse": (dict(dtype="nf4", group_size=128, calibration="mse", **BF16), False),
    "int4, 32, minmax": (dict(dtype="uint4", group_size=32, **BF16), False),
    "int4, 32, zero point, mse": (
        dict(dtype="uint4", group_size=32, calibration="mse", **BF16), False,
    ),
    "int4, 64, zero point, hqq": (
        dict(dtype="uint4", group_size=64, calibration="hqq", **BF16), False,
    ),
    "int4, 128": (dict(dtype="int4", group_size=128, **BF16), False),
    "int4, 128, mse": (dict(dtype="int4", group_size=128, calibration="mse", **BF16), False),
    "int4 per channel": (dict(dtype="int4", **BF16), False),
    "int4 per channel, mse": (dict(dtype="int4", calibration="mse", **BF16), False),
    "mxfp4": (dict(dtype="mxfp4"), False),
    "mxfp4, mse": (dict(dtype="mxfp4", calibration="mse"), False),
    "nvfp4": (dict(dtype="nvfp4"), False),
    "nvfp4, mse": (dict(dtype="nvfp4", calibration="mse"), False),
    "int3, 64, mse": (dict(dtype="int3", group_size=64, calibration="mse", **BF16), False),
    "int2, 32, mse": (dict(dtype="int2", group_size=32, calibration="mse", **BF16), False),
    "ternary, 64, mse": (dict(dtype="ternary", group_size=64, calibration="mse", **BF16), False),
    "binary, 64": (dict(dtype="binary", group_size=64, **BF16), False),
    "int4, 64, GPTQ": (dict(dtype="int4", group_size=64, calibration="mse", **BF16), True),
    "nf4, 64, GPTQ": (dict(dtype="nf4", group_size=64, calibration="mse", **BF16), True),
    "int3, 64, GPTQ": (dict(dtype="int3", group_size=64, calibration="mse", **BF16), True),
}  # fmt: skip

# Qwix 0.1.8 on the same weights, measured apart: bits per weight, relative RMS, cosine.
QWIX = {
    "int8 per channel": (8.07, 0.0099, 0.99949),
    "fp8 e4m3 per channel": (8.07, 0.0261, 0.99809),
    "nf4 tile 64": (4.50, 0.0939, 0.96692),
    "nf4 tile 128": (4.25, 0.0992, 0.96280),
    "int4 tile 32 minmax": (5.25, 0.0831, 0.96958),
    "int4 tile 128": (4.25, 0.1205, 0.93233),
    "int4 per channel": (4.07, 0.1473, 0.90327),
}

LINEAR = r"bert/layer_.*/w"
Params = dict[str, dict[str, Any]]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if not REPORT_ONLY.value:
        measure()
    results = json.loads(RESULTS.read_text())
    write_table(results)
    draw(results)


def measure() -> None:
    """Scores all cases, and writes the results after each."""
    encoder = Encoder()
    language = Language() if PERPLEXITY.value else None
    results: dict[str, Any] = dict(
        dense=dict(encoder.score(encoder.params), **(language.score(None) if language else {})),
        cases={},
    )
    for name, (options, with_inputs) in (progress := tqdm(CASES.items())):
        progress.set_description(name)
        record = encoder.case(options, with_inputs)
        if language is not None:
            record |= language.case(options, with_inputs)
        results["cases"][name] = record
        temporary = RESULTS.with_suffix(".tmp")
        temporary.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(temporary, RESULTS)


def held(params: Params, chosen: Any) -> dict[str, float]:
    """Bits per weight of what is quantized."""
    arrays = [x for own in params.values() for x in own.values() if chosen(x)]
    return dict(bits=8 * sum(x.nbytes for x in arrays) / sum(x.size for x in arrays))


def is_quantized(x: Any) -> bool:
    return isinstance(x, hki.QuantizedMatrix)


class Encoder:
    """MiniLM on the Lee documents: its linear weights are quantized."""

    def __init__(self) -> None:
        config = bert.BertConfig()
        files = [
            smollm.fetch(s)
            for s in (minilm.WEIGHTS, minilm.TOKENIZER, minilm.DOCUMENTS, minilm.SIMILARITIES)
        ]
        self.params = jax.tree.map(jnp.asarray, minilm.load_params(files[0], config))
        model = hk.transform(lambda *x: bert.embed_sentences(config, *x))
        self.apply = jax.jit(hk.without_apply_rng(model).apply)
        self.batch = minilm.tokenize(files[1], minilm.read_documents(files[2]), 256)
        self.similarities = minilm.read_similarities(files[3])
        self.dense = np.asarray(self.apply(self.params, *self.batch))
        background = minilm.read_documents(smollm.fetch(minilm.BACKGROUND))
        calibration = minilm.tokenize(files[1], background[:128], 128)
        self.moments = hki.input_moments(
            lambda p, batch: self.apply(p, *batch), self.params, [calibration], targets=LINEAR
        )

    def case(self, options: dict[str, Any], with_inputs: bool) -> dict[str, float]:
        """The bits, the error of the weights, and the scores."""
        if with_inputs:
            new = hki.quantize_with_inputs(self.params, self.moments, **options)
        else:
            new = hki.quantize_params(self.params, targets=LINEAR, **options)
        dense = hki.materialize(new)
        pairs = [
            (dense[m][n], self.params[m][n])
            for m in new for n in new[m] if is_quantized(new[m][n])
        ]  # fmt: skip
        error = sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)
        total = sum(float(jnp.sum(b**2)) for _, b in pairs)
        return dict(**held(new, is_quantized), rms=math.sqrt(error / total), **self.score(dense))

    def score(self, params: Params) -> dict[str, float]:
        """The mean cosine to the dense embeddings, and Pearson's correlation with people."""
        found = np.asarray(self.apply(params, *self.batch))
        pairs = np.triu_indices(len(found), 1)
        own, theirs = (found @ found.T)[pairs], self.similarities[pairs]
        return dict(
            cosine=float((found * self.dense).sum(-1).mean()),
            pearson=float(np.corrcoef(own, theirs)[0, 1]),
        )


class Language:
    """SmolLM2 on Shakespeare: all its linear weights are quantized, from the dequantized file."""

    def __init__(self) -> None:
        checkpoint = smollm.read_gguf(smollm.fetch(smollm.MODEL))
        params = smollm.params_from_tensors(checkpoint.tensors, quantized_blocks.matrix)
        self.params = hki.materialize(jax.tree.map(jnp.asarray, params))
        model = hk.without_apply_rng(hk.transform(lambda t: llama.Llama(checkpoint.config)(t)))
        self.apply = model.apply
        text = smollm.read_text(smollm.fetch(smollm.SHAKESPEARE))
        ids = checkpoint.tokenizer.encode(text[-200_000:]).ids
        self.heldout = jnp.asarray(ids[-4 * 512 :]).reshape(4, 512)
        calibration = jnp.asarray(ids[: 8 * 256]).reshape(8, 256)
        self.moments = hki.input_moments(
            self.apply, self.params, [calibration[:4], calibration[4:]], targets=r".*_proj/w"
        )
        self.loss = jax.jit(self._loss)

    def _loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(self.apply(params, tokens)[:, :-1])
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    def case(self, options: dict[str, Any], with_inputs: bool) -> dict[str, float]:
        """The perplexity with quantized weights."""
        if with_inputs:
            new = hki.quantize_with_inputs(self.params, self.moments, **options)
        else:
            new = hki.quantize_params(self.params, targets=r".*_proj/w", **options)
        return self.score(hki.materialize(new))

    def score(self, params: Params | None) -> dict[str, float]:
        """The perplexity of the held-out text."""
        params = self.params if params is None else params
        return dict(perplexity=math.exp(float(self.loss(params, self.heldout))))


# --- the report ------------------------------------------------------------------------------------


def write_table(results: dict[str, Any]) -> None:
    """Replaces the table of `docs/fidelity.md`."""
    dense = results["dense"]
    header = ["format", "bits per weight", "relative RMS", "cosine", "Pearson", "perplexity"]
    rows = [
        ["dense", "32", "0", "1", f"{dense['pearson']:.3f}", _number(dense, "perplexity")],
        *(
            [name, f"{r['bits']:.3f}", f"{r['rms']:.4f}", f"{r['cosine']:.5f}",
             f"{r['pearson']:.3f}", _number(r, "perplexity")]
            for name, r in results["cases"].items()
        ),
        *(
            [f"Qwix 0.1.8: {name}", f"{bits:.2f}", f"{rms:.4f}", f"{cosine:.5f}", "–", "–"]
            for name, (bits, rms, cosine) in QWIX.items()
        ),
    ]  # fmt: skip
    markdown.replace(DOCUMENT, dict(fidelity=markdown.table(header, rows)))


def _number(record: dict[str, float], name: str) -> str:
    return f"{record[name]:.2f}" if name in record else "–"


def draw(results: dict[str, Any]) -> None:
    """Plots error against bits, with the bound of a Gaussian source."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    bits = np.linspace(1, 8.6, 50)
    axes.plot(bits, 2.0**-bits, color="#9a9a9a", label="rate–distortion bound, Gaussian source")
    ours = [(r["bits"], r["rms"], n) for n, r in results["cases"].items() if "GPTQ" not in n]
    axes.scatter(*zip(*[(b, e) for b, e, _ in ours], strict=True), s=18, color="#1f6fb2",
                 label="haiku_implicit")  # fmt: skip
    theirs = [(b, e) for b, e, _ in QWIX.values()]
    axes.scatter(*zip(*theirs, strict=True), s=22, marker="x", color="#d07c1f", label="Qwix 0.1.8")
    axes.set_yscale("log")
    axes.set(xlabel="bits per weight, scales included", ylabel="relative RMS error of the weights")
    axes.set_title("MiniLM's linear weights", fontsize=10)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE, dpi=160)
    plt.close(figure)


if __name__ == "__main__":
    app.run(main)
