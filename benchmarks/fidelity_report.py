"""The cases of `benchmarks.fidelity`, and the tables and the plot of `docs/fidelity.md`."""

import json
import pathlib
from typing import Any

import numpy as np

from benchmarks import tables as markdown

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fidelity.json"
GGUF_RESULTS = RESULTS.with_name("gguf_fidelity.json")  # from `benchmarks.gguf_fidelity`
DOCUMENTS = (
    ROOT / "docs" / "fidelity.md",
    ROOT / "benchmarks" / "results" / "fidelity.md",
)
IMAGE = ROOT / "docs" / "images" / "fidelity.png"

# Name: (options of `QuantizedMatrix.quantize`, the method that uses the calibration batch, if any).
BF16 = dict(scale_dtype="bfloat16")
F16 = dict(scale_dtype="float16", calibration="mse")
DOUBLE = dict(scale_dtype="double", calibration="mse")
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
    "int8, 32, mse": (dict(dtype="int8", group_size=32, **F16), None),
    "int6, 16, double, mse": (dict(dtype="int6", group_size=16, **DOUBLE), None),
    "int5, 32, zero point, mse": (dict(dtype="uint5", group_size=32, **F16), None),
    "int5, 32, zero point, double, mse": (dict(dtype="uint5", group_size=32, **DOUBLE), None),
    "int5, 32, mse": (dict(dtype="int5", group_size=32, **F16), None),
    "int6, 64": (dict(dtype="int6", group_size=64, calibration="mse", **BF16), None),
    "nf4, 32, mse": (dict(dtype="nf4", group_size=32, **F16), None),
    "nf4, 32, double, mse": (dict(dtype="nf4", group_size=32, **DOUBLE), None),
    "iq4_nl, 32, mse": (dict(dtype="iq4_nl", group_size=32, **F16), None),
    "iq4_nl, 32, double, mse": (dict(dtype="iq4_nl", group_size=32, **DOUBLE), None),
    "nf4, 64": (dict(dtype="nf4", group_size=64), None),
    "nf4, 64, mse": (dict(dtype="nf4", group_size=64, calibration="mse", **BF16), None),
    "nf4, 64, double": (dict(dtype="nf4", group_size=64, scale_dtype="double"), None),
    "nf4, 64, double, mse": (
        dict(dtype="nf4", group_size=64, scale_dtype="double", calibration="mse"), None,
    ),
    "nf4, 128, mse": (dict(dtype="nf4", group_size=128, calibration="mse", **BF16), None),
    "int4, 32, minmax": (dict(dtype="uint4", group_size=32, **BF16), None),
    "int4, 32, zero point, mse": (dict(dtype="uint4", group_size=32, **F16), None),
    "int4, 32, zero point, double, mse": (dict(dtype="uint4", group_size=32, **DOUBLE), None),
    "int4, 32, mse": (dict(dtype="int4", group_size=32, **F16), None),
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
    "trellis4": (dict(dtype="trellis4"), None),
    "int3, 64, mse": (dict(dtype="int3", group_size=64, calibration="mse", **BF16), None),
    "trellis3": (dict(dtype="trellis3"), None),
    "int3, 32, zero point, double, mse": (dict(dtype="uint3", group_size=32, **DOUBLE), None),
    "int3, 64, zero point, double, mse": (dict(dtype="uint3", group_size=64, **DOUBLE), None),
    "int2, 32, zero point, double, mse": (dict(dtype="uint2", group_size=32, **DOUBLE), None),
    "int2, 32, mse": (dict(dtype="int2", group_size=32, calibration="mse", **BF16), None),
    "trellis2": (dict(dtype="trellis2"), None),
    "ternary, 64, mse": (dict(dtype="ternary", group_size=64, calibration="mse", **BF16), None),
    "binary, 64": (dict(dtype="binary", group_size=64, **BF16), None),
    "int4, 64, GPTQ": (dict(dtype="int4", group_size=64, calibration="mse", **BF16), "gptq"),
    "nf4, 64, GPTQ": (dict(dtype="nf4", group_size=64, calibration="mse", **BF16), "gptq"),
    "int3, 64, GPTQ": (dict(dtype="int3", group_size=64, calibration="mse", **BF16), "gptq"),
    "nf4, 64, GPTQ in order": (
        dict(dtype="nf4", group_size=64, calibration="mse", **BF16), "gptq, in order",
    ),
    "int3, 64, GPTQ in order": (
        dict(dtype="int3", group_size=64, calibration="mse", **BF16), "gptq, in order",
    ),
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
    "trellis4, LDLQ": (dict(dtype="trellis4"), "gptq"),
    "trellis3, LDLQ": (dict(dtype="trellis3"), "gptq"),
    "trellis2, LDLQ": (dict(dtype="trellis2"), "gptq"),
    "int8 × int8": (W8A8, None),
    "int8 × int8, SmoothQuant": (W8A8, "smoothquant"),
    "int8 × int8, rotated": (W8A8 | dict(rotate=True), None),
    "int8 × int4": (W8A8 | dict(activation="int4"), None),
    "int8 × int4, rotated": (W8A8 | dict(activation="int4", rotate=True), None),
}  # fmt: skip

# Qwix 0.1.8 on the same weights, measured separately: bits per weight, relative RMS, cosine.
QWIX = {
    "int8 per channel": (8.07, 0.0099, 0.99949),
    "fp8 e4m3 per channel": (8.07, 0.0261, 0.99809),
    "nf4 tile 64": (4.50, 0.0939, 0.96692),
    "nf4 tile 128": (4.25, 0.0992, 0.96280),
    "int4 tile 32 minmax": (5.25, 0.0831, 0.96958),
    "int4 tile 128": (4.25, 0.1205, 0.93233),
    "int4 per channel": (4.07, 0.1473, 0.90327),
}

# The cases of the page's own table; the table of all cases is in `benchmarks/results/fidelity.md`.
MAIN = (
    "dense",
    "int8 per channel",
    "fp8 e4m3 per channel",
    "int6, 16, double, mse",
    "int5, 32, zero point, double, mse",
    "nf4, 64",
    "int4, 32, zero point, double, mse",
    "int4, 64",
    "mxfp4",
    "nvfp4, mse",
    "trellis4",
    "int3, 32, zero point, double, mse",
    "trellis3",
    "int2, 32, zero point, double, mse",
    "trellis2",
    "int4, 64, GPTQ",
    "nf4, 64, GPTQ",
    "nf4, 64, GPTQ in order",
    "int4, 64, AWQ",
    "int3, 64, GPTQ",
    "int3, 64, GPTQ in order",
    "trellis4, LDLQ",
    "trellis3, LDLQ",
    "trellis2, LDLQ",
    "int8 × int8",
    "int8 × int8, SmoothQuant",
    "int8 × int8, rotated",
    "int8 × int4",
    "int8 × int4, rotated",
    "Qwix 0.1.8: nf4 tile 64",
)

# llama.cpp's formats, each with the cases here of about as many bits.
BESIDE_GGUF = {
    "Q8_0": "int8, 32, mse",
    "Q6_K": "int6, 16, double, mse",
    "Q5_1": "int5, 32, zero point, mse",
    "Q5_K": "int5, 32, zero point, double, mse",
    "Q5_0": "int5, 32, mse",
    "Q4_1": "int4, 32, zero point, mse",
    "Q4_K": "int4, 32, zero point, double, mse",
    "Q4_0": "int4, 32, mse",
    "IQ4_NL": "iq4_nl, 32, mse",
    "IQ4_XS": "iq4_nl, 32, double, mse",
    "Q3_K": "int3, 32, zero point, double, mse",
    "IQ3_S": "int3, 32, zero point, double, mse",
    "Q2_K": "int2, 32, zero point, double, mse",
}


def write() -> None:
    """Updates the tables and the plot from the recorded results."""
    results, theirs = recorded()
    markdown.replace(DOCUMENTS, tables(results, theirs))
    draw(results, theirs)


def recorded() -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the results of `benchmarks.fidelity` and of `benchmarks.gguf_fidelity`."""
    return json.loads(RESULTS.read_text()), json.loads(GGUF_RESULTS.read_text())


def tables(results: dict[str, Any], theirs: dict[str, Any]) -> dict[str, str]:
    """Returns the tables of `docs/fidelity.md`, by name."""
    dense = results["dense"]
    header = ["format", "bits per weight", "relative RMS", "cosine", "Pearson", "perplexity"]
    rows = [
        ["dense", "32", "0", "1", f"{dense['pearson']:.3f}", _number(dense, "perplexity")],
        *(
            [name, *_figures(r), f"{r['pearson']:.3f}", _number(r, "perplexity")]
            for name, r in in_order(results).items()
        ),
        *(
            [f"Qwix 0.1.8: {name}", f"{bits:.2f}", f"{rms:.4f}", f"{cosine:.5f}", "–", "–"]
            for name, (bits, rms, cosine) in QWIX.items()
        ),
    ]
    main = [row for row in rows if row[0] in MAIN]
    return dict(
        main=markdown.table(header, main),
        fidelity=markdown.table(header, rows),
        gguf=_beside_gguf(results, theirs),
    )


def _beside_gguf(results: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Returns a table of llama.cpp's formats, each with the cases here of about as many bits."""
    figures = ["bits", "relative RMS", "cosine"]
    rows = []
    for kind, name in BESIDE_GGUF.items():
        # There are two ways to quantize without data: choose the one with the smaller error.
        ways = [theirs["cases"].get(f"{kind}{way}") for way in ("", ", no importance")]
        best = min(filter(None, ways), key=lambda record: record["rms"])
        rows.append([kind, *_figures(best), name, *_figures(results["cases"][name])])
    return markdown.table(["llama.cpp", *figures, "here", *figures], rows)


def _figures(record: dict[str, float]) -> list[str]:
    return [f"{record['bits']:.3f}", f"{record['rms']:.4f}", f"{record['cosine']:.5f}"]


def in_order(results: dict[str, Any]) -> dict[str, Any]:
    """Returns the records of cases, in the order of `CASES`."""
    return {name: results["cases"][name] for name in CASES if name in results["cases"]}


def _number(record: dict[str, float], name: str) -> str:
    return f"{record[name]:.2f}" if name in record else "–"


def draw(results: dict[str, Any], gguf: dict[str, Any]) -> None:
    """Plots error against bits, with the bound of a Gaussian source."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    bits = np.linspace(1, 8.6, 50)
    axes.plot(bits, 2.0**-bits, color="#9a9a9a", label="rate–distortion bound, Gaussian source")
    # (Methods with a calibration batch minimize another error than the weights'.)
    ours = [(r["bits"], r["rms"]) for n, r in in_order(results).items() if CASES[n][1] is None]
    axes.scatter(*zip(*ours, strict=True), s=18, color="#1f6fb2", label="haiku_implicit")
    theirs = [(b, e) for b, e, _ in QWIX.values()]
    axes.scatter(*zip(*theirs, strict=True), s=22, marker="x", color="#d07c1f", label="Qwix 0.1.8")
    of_gguf = [(gguf["cases"][kind]["bits"], gguf["cases"][kind]["rms"]) for kind in BESIDE_GGUF]
    axes.scatter(*zip(*of_gguf, strict=True), s=22, marker="+", color="#3b8f4d", label="llama.cpp")
    axes.set_yscale("log")
    axes.set(xlabel="bits per weight, scales included", ylabel="relative RMS error of the weights")
    axes.set_title("MiniLM's linear weights", fontsize=10)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE, dpi=160)
    plt.close(figure)
