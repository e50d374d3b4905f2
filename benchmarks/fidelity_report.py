"""The cases of `benchmarks.fidelity`, and the tables and the plot of `docs/fidelity.md`."""

import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks import tables as markdown

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fidelity.json"
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

# llama.cpp's types, each with the case here of as many bits (up to .01) or fewer; without data.
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
    "Q3_K": "trellis3",
    "IQ3_S": "trellis3",
    "IQ3_XXS": "trellis3",
    "Q2_K": "trellis2",
    "IQ2_S": "trellis2",
    "IQ2_XS": "trellis2",
    "IQ2_XXS": "trellis2",
}

# Name: (type, the importance of inputs that the quantizer gets: "none" or "equal" without data).
LLAMA_CPP = {
    f"llama.cpp: {kind}{ending}": (kind, way)
    for kind in BESIDE_GGUF
    for ending, way in ((", no importance", "none"), (", equal", "equal"), (", imatrix", "data"))
}

# The formats of the table with and without data, beside llama.cpp's of 2 to 4.5 bits: (case without
# data, case with data).
WITH_DATA = {
    "int4, 64": ("int4, 64, mse", "int4, 64, GPTQ"),
    "nf4, 64": ("nf4, 64, mse", "nf4, 64, GPTQ"),
    "trellis4": ("trellis4", "trellis4, LDLQ"),
    "int3, 64": ("int3, 64, mse", "int3, 64, GPTQ"),
    "trellis3": ("trellis3", "trellis3, LDLQ"),
    "trellis2": ("trellis2", "trellis2, LDLQ"),
}
LLAMA_CPP_WITH_DATA = [
    "Q4_K", "IQ4_XS", "Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_S", "IQ2_XS", "IQ2_XXS"
]  # fmt: skip


def write() -> None:
    """Updates the tables and the plot from the recorded results."""
    results = recorded()
    markdown.replace(DOCUMENTS, tables(results))
    draw(results)


def recorded() -> dict[str, Any]:
    """Reads the results of `benchmarks.fidelity`."""
    return json.loads(RESULTS.read_text())


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Returns the tables of `docs/fidelity.md`, by name."""
    dense = results["dense"]
    header = ["format", "bits per weight", "relative RMS", "cosine", "Pearson", "perplexity"]
    rows = [
        ["dense", "32", "0", "1", f"{dense['pearson']:.3f}", _perplexity(dense)],
        *(
            [name, *_figures(r), f"{r['pearson']:.3f}", _perplexity(r)]
            for name, r in in_order(results, (*CASES, *LLAMA_CPP)).items()
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
        gguf=_beside_gguf(results),
        data=_with_data(results),
    )


def _beside_gguf(results: dict[str, Any]) -> str:
    """Returns a table of llama.cpp's types, each with the case here of about as many bits."""
    figures = ["bits", "relative RMS", "cosine", "perplexity"]
    rows = []
    for kind, name in BESIDE_GGUF.items():
        theirs, ours = without_data(results, kind), results["cases"][name]
        cells = [[*_figures(x), _perplexity(x)] for x in (theirs, ours)]
        rows.append([kind, *cells[0], name, *cells[1]])
    return markdown.table(["llama.cpp", *figures, "here", *figures], rows)


def without_data(results: dict[str, Any], kind: str) -> dict[str, float]:
    """Returns the record of a type of llama.cpp without data: the way with the smaller error."""
    ways = [results["cases"].get(f"llama.cpp: {kind}{x}") for x in (", no importance", ", equal")]
    return min(filter(None, ways), key=lambda record: record["rms"])


def with_and_without_data(results: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the records of formats without and with data, here and llama.cpp's, by their bits."""
    cases = results["cases"]
    found = {name: (cases[a], cases[b]) for name, (a, b) in WITH_DATA.items()}
    for kind in LLAMA_CPP_WITH_DATA:
        own = without_data(results, kind), cases[f"llama.cpp: {kind}, imatrix"]
        found[f"llama.cpp: {kind}"] = own
    return dict(sorted(found.items(), key=lambda item: -item[1][1]["bits"]))


def _with_data(results: dict[str, Any]) -> str:
    """Returns a table of formats without and with data."""
    rows = []
    for name, (without, given) in with_and_without_data(results).items():
        both = [f"{x['cosine']:.4f}" for x in (without, given)]
        rows.append([name, f"{given['bits']:.2f}", *both, *map(_perplexity, (without, given))])
    figures = ["cosine", "cosine, with data", "perplexity", "perplexity, with data"]
    return markdown.table(["format", "bits per weight", *figures], rows)


def _figures(record: dict[str, float]) -> list[str]:
    return [f"{record['bits']:.3f}", f"{record['rms']:.4f}", f"{record['cosine']:.5f}"]


def in_order(results: dict[str, Any], names: Iterable[str] = tuple(CASES)) -> dict[str, Any]:
    """Returns the records of cases that have embeddings, too, in the order of their names."""
    cases = results["cases"]
    return {name: cases[name] for name in names if "pearson" in cases.get(name, ())}


def _perplexity(record: dict[str, float]) -> str:
    return f"{record['perplexity']:.2f}" if "perplexity" in record else "–"


def draw(results: dict[str, Any]) -> None:
    """Plots error against bits: of weights, without data; of embeddings, with data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    ours = dict(s=18, color="#1f6fb2", label="haiku_implicit")
    llama_cpp = dict(s=22, marker="+", color="#3b8f4d", label="llama.cpp")
    bits = np.linspace(1, 8.6, 50)
    left.plot(bits, 2.0**-bits, color="#9a9a9a", label="rate–distortion bound, Gaussian source")
    # (Methods with a calibration batch minimize another error than the weights'.)
    records = [r for name, r in in_order(results).items() if CASES[name][1] is None]
    left.scatter(*_points(records, lambda r: r["rms"]), **ours)
    theirs = [(b, e) for b, e, _ in QWIX.values()]
    left.scatter(*zip(*theirs, strict=True), s=22, marker="x", color="#d07c1f", label="Qwix 0.1.8")
    records = [without_data(results, kind) for kind in BESIDE_GGUF]
    left.scatter(*_points(records, lambda r: r["rms"]), **llama_cpp)
    left.set(title="MiniLM's linear weights, without data", ylabel="relative RMS error")
    both = with_and_without_data(results)
    for style, names in (
        (ours, [*WITH_DATA]),
        (llama_cpp, [f"llama.cpp: {kind}" for kind in LLAMA_CPP_WITH_DATA]),
    ):
        points = _points([both[name][1] for name in names], lambda r: 1 - r["cosine"])
        right.scatter(*points, **style)
        for name, x, y in zip(names, *points, strict=True):
            short = name.removeprefix("llama.cpp: ")
            place = (4, -8 if short == "IQ3_S" else 3)  # Q3_K is near
            right.annotate(short, (x, y), place, textcoords="offset points", fontsize=7)
    right.set(title="MiniLM's embeddings, with data", ylabel="1 − cosine")
    for axes in (left, right):
        axes.set(yscale="log", xlabel="bits per weight, scales included")
        axes.title.set_fontsize(10)
        axes.set_axisbelow(True)
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE, dpi=160)
    plt.close(figure)


def _points(
    records: Iterable[dict[str, float]], error: Callable[[dict[str, float]], float]
) -> tuple[list[float], list[float]]:
    """Returns the bits, and the errors."""
    records = list(records)
    return [r["bits"] for r in records], [error(r) for r in records]
