"""What each format and calibration costs in accuracy, on real weights.

    python -m benchmarks.fidelity                 # everything: results, table and plot
    python -m benchmarks.fidelity --cases=AWQ     # only those whose name the expression is found in
    python -m benchmarks.fidelity --report_only   # table and plot from the recorded results

Run it from the root of the repository. What is measured is told in `docs/fidelity.md`.
"""

import json
import math
import pathlib
import re
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
from benchmarks import result_files
from benchmarks import tables as markdown

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # whose scripts import each other by their bare names

import minilm  # noqa: E402
import smollm  # noqa: E402
from models import bert, llama  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "fidelity.json"
GGUF_RESULTS = RESULTS.with_name("gguf_fidelity.json")  # of `benchmarks.gguf_fidelity`
DOCUMENT = ROOT / "docs" / "fidelity.md"
IMAGE = ROOT / "docs" / "images" / "fidelity.png"

REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Only the table and the plot.")
ONLY = flags.DEFINE_string(
    "cases", "", "A regular expression: only cases whose name it is found in."
)
PERPLEXITY = flags.DEFINE_bool("perplexity", True, "Whether to score SmolLM2 as well.")

# Name: (options of `QuantizedMatrix.quantize`, the method that uses the calibration batch, if any).
BF16 = dict(scale_dtype="bfloat16")
W8A8 = dict(dtype="int8", calibration="mse", activation="int8", **BF16)
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "int8 per channel": (dict(dtype="int8", **BF16), None),
    "int8 per channel, mse": (dict(dtype="int8", calibration="mse", **BF16), None),
    "int8 per channel, mse, f32 scales": (dict(dtype="int8", calibration="mse"), None),
    "int8, fixed range ±0.5": (dict(dtype="int8", calibration="fixed,-0.5,0.5", **BF16), None),
    "fp8 e4m3 per channel": (dict(dtype="fp8_e4m3", **BF16), None),
    "fp8 e4m3 per channel, mse": (dict(dtype="fp8_e4m3", calibration="mse", **BF16), None),
    "fp8 e5m2 per channel": (dict(dtype="fp8_e5m2", **BF16), None),
    "mxfp8": (dict(dtype="mxfp8"), None),
    "mxfp8, mse": (dict(dtype="mxfp8", calibration="mse"), None),
    "int6, 64": (dict(dtype="int6", group_size=64, calibration="mse", **BF16), None),
    "nf4, 64": (dict(dtype="nf4", group_size=64), None),
    "nf4, 64, mse": (dict(dtype="nf4", group_size=64, calibration="mse", **BF16), None),
    "nf4, 64, double": (dict(dtype="nf4", group_size=64, scale_dtype="double"), None),
    "nf4, 64, double, mse": (
        dict(dtype="nf4", group_size=64, scale_dtype="double", calibration="mse"), None,
    ),
    "nf4, 128, mse": (dict(dtype="nf4", group_size=128, calibration="mse", **BF16), None),
    "int4, 32, minmax": (dict(dtype="uint4", group_size=32, **BF16), None),
    "int4, 32, zero point, mse": (
        dict(dtype="uint4", group_size=32, calibration="mse", **BF16), None,
    ),
    "int4, 64, zero point, hqq": (
        dict(dtype="uint4", group_size=64, calibration="hqq", **BF16), None,
    ),
    "int4, 64": (dict(dtype="int4", group_size=64, **BF16), None),
    "int4, 64, rms": (dict(dtype="int4", group_size=64, calibration="rms,2.5", **BF16), None),
    "int4, 64, percentile": (
        dict(dtype="int4", group_size=64, calibration="percentile,98", **BF16), None,
    ),
    "int4, 64, mse": (dict(dtype="int4", group_size=64, calibration="mse", **BF16), None),
    "int4, 128": (dict(dtype="int4", group_size=128, **BF16), None),
    "int4, 128, mse": (dict(dtype="int4", group_size=128, calibration="mse", **BF16), None),
    "int4 per channel": (dict(dtype="int4", **BF16), None),
    "int4 per channel, mse": (dict(dtype="int4", calibration="mse", **BF16), None),
    "fp4, 32, mse": (dict(dtype="fp4", group_size=32, calibration="mse", **BF16), None),
    "mxfp4": (dict(dtype="mxfp4"), None),
    "mxfp4, mse": (dict(dtype="mxfp4", calibration="mse"), None),
    "nvfp4": (dict(dtype="nvfp4"), None),
    "nvfp4, mse": (dict(dtype="nvfp4", calibration="mse"), None),
    "int3, 64, mse": (dict(dtype="int3", group_size=64, calibration="mse", **BF16), None),
    "int2, 32, mse": (dict(dtype="int2", group_size=32, calibration="mse", **BF16), None),
    "ternary, 64, mse": (dict(dtype="ternary", group_size=64, calibration="mse", **BF16), None),
    "binary, 64": (dict(dtype="binary", group_size=64, **BF16), None),
    "int4, 64, GPTQ": (dict(dtype="int4", group_size=64, calibration="mse", **BF16), "gptq"),
    "nf4, 64, GPTQ": (dict(dtype="nf4", group_size=64, calibration="mse", **BF16), "gptq"),
    "int3, 64, GPTQ": (dict(dtype="int3", group_size=64, calibration="mse", **BF16), "gptq"),
    "int4, 64, AWQ": (dict(dtype="int4", group_size=64, calibration="mse", **BF16), "awq"),
    "int4, 64, AWQ and GPTQ": (
        dict(dtype="int4", group_size=64, calibration="mse", **BF16), "awq+gptq",
    ),
    "nf4, 64, AWQ and GPTQ": (
        dict(dtype="nf4", group_size=64, calibration="mse", **BF16), "awq+gptq",
    ),
    "int4, 64, GPTQ × int8": (
        dict(dtype="int4", group_size=64, calibration="mse", activation="int8,groups", **BF16), "gptq",
    ),
    "int8 × int8": (W8A8, None),
    "int8 × int8, SmoothQuant": (W8A8, "smoothquant"),
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
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if ONLY.value else dict(cases={})
    results["dense"] = encoder.score(encoder.params) | (language.score(None) if language else {})
    chosen = {name: case for name, case in CASES.items() if re.search(ONLY.value, name)}
    for name, (options, method) in (progress := tqdm(chosen.items())):
        progress.set_description(name)
        record = encoder.case(options, method)
        if language is not None:
            record |= language.case(options, method)
        results["cases"][name] = record
        result_files.write(results, RESULTS)


def held(params: Params, chosen: Any) -> dict[str, float]:
    """Bits per weight of what is quantized."""
    arrays = [x for own in params.values() for x in own.values() if chosen(x)]
    return dict(bits=8 * sum(x.nbytes for x in arrays) / sum(x.size for x in arrays))


def linear_weights(params: Params) -> list[tuple[str, str]]:
    """The modules and names of MiniLM's linear weights."""
    return [(m, n) for m in params for n in params[m] if re.fullmatch(LINEAR, f"{m}/{n}")]


def is_quantized(x: Any) -> bool:
    return isinstance(x, hki.QuantizedMatrix | hki.ScaledMatrix)


class Inputs:
    """What the weights of a model are multiplied by, in all that methods ask for."""

    def __init__(self, apply: Any, params: Params, batches: list[Any], targets: str) -> None:
        self.params, self.targets = params, targets
        self.moments = hki.input_moments(apply, params, batches, targets=targets)
        self.maxima = hki.input_maxima(apply, params, batches, targets=targets)

    def quantized(self, options: dict[str, Any], method: str | None) -> tuple[Params, Params]:
        """The parameters with these weights quantized, and those to score."""
        if method is None:
            new = hki.quantize_params(self.params, targets=self.targets, **options)
        else:
            inputs = self.maxima if method == "smoothquant" else self.moments
            new = hki.quantize_with_inputs(self.params, inputs, method=method, **options)
        # Where activations are quantized, the dense weights are not what the model is.
        return new, new if "activation" in options else hki.materialize(new)


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
        self.apply = jax.jit(hki.use_implicit_args(hk.without_apply_rng(model).apply))
        self.batch = minilm.tokenize(files[1], minilm.read_documents(files[2]), 256)
        self.similarities = minilm.read_similarities(files[3])
        self.dense = np.asarray(self.apply(self.params, *self.batch))
        background = minilm.read_documents(smollm.fetch(minilm.BACKGROUND))
        calibration = minilm.tokenize(files[1], background[:128], 128)
        self.inputs = Inputs(
            lambda p, batch: self.apply(p, *batch), self.params, [calibration], LINEAR
        )

    def case(self, options: dict[str, Any], method: str | None) -> dict[str, float]:
        """The bits, the error of the weights, and the scores."""
        new, scored = self.inputs.quantized(options, method)
        return dict(**held(new, is_quantized), **self.error(new), **self.score(scored))

    def error(self, new: Params) -> dict[str, float]:
        """The error of the linear weights, relative to them."""
        dense = hki.materialize(new)
        pairs = [(dense[m][n], self.params[m][n]) for m, n in linear_weights(self.params)]
        error = sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)
        total = sum(float(jnp.sum(b**2)) for _, b in pairs)
        return dict(rms=math.sqrt(error / total))

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
        self.params = hki.materialize(checkpoint.params)
        model = hk.without_apply_rng(hk.transform(lambda t: llama.Llama(checkpoint.config)(t)))
        self.apply = hki.use_implicit_args(model.apply)
        text = smollm.read_text(smollm.fetch(smollm.SHAKESPEARE))
        ids = checkpoint.tokenizer.encode(text[-200_000:]).ids
        self.heldout = jnp.asarray(ids[-4 * 512 :]).reshape(4, 512)
        calibration = jnp.asarray(ids[: 8 * 256]).reshape(8, 256)
        self.inputs = Inputs(
            self.apply, self.params, [calibration[:4], calibration[4:]], r".*_proj/w"
        )
        self.loss = jax.jit(self._loss)

    def _loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(self.apply(params, tokens)[:, :-1])
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    def case(self, options: dict[str, Any], method: str | None) -> dict[str, float]:
        """The perplexity with quantized weights; nothing where groups do not divide its width, 576."""
        if 576 % (options.get("group_size") or 1):
            return {}
        return self.score(self.inputs.quantized(options, method)[1])

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
            for name, r in in_order(results).items()
        ),
        *(
            [f"Qwix 0.1.8: {name}", f"{bits:.2f}", f"{rms:.4f}", f"{cosine:.5f}", "–", "–"]
            for name, (bits, rms, cosine) in QWIX.items()
        ),
    ]  # fmt: skip
    markdown.replace(DOCUMENT, dict(fidelity=markdown.table(header, rows)))


def in_order(results: dict[str, Any]) -> dict[str, Any]:
    """The records of cases, in the order of the table above."""
    return {name: results["cases"][name] for name in CASES if name in results["cases"]}


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
    # (Methods that use a calibration batch have their least error elsewhere than in the weights.)
    ours = [(r["bits"], r["rms"]) for n, r in in_order(results).items() if CASES[n][1] is None]
    axes.scatter(*zip(*ours, strict=True), s=18, color="#1f6fb2", label="haiku_implicit")
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
