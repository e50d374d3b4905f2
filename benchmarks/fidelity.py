"""Measures the accuracy that each format and calibration loses, on real weights.

    python -m pip install -e '.[bench]' xllamacpp==2026.10.11549
    python -m benchmarks.fidelity                 # everything: results, tables and plot
    python -m benchmarks.fidelity --cases=AWQ     # only cases whose names match the expression
    python -m benchmarks.fidelity --report_only   # tables and plot from the recorded results

Run it from the root of the repository. `docs/fidelity.md` describes the measurements.
(xllamacpp has llama.cpp's own quantizer.)
"""

import functools
import json
import math
import operator
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
from benchmarks import fidelity_report as report
from benchmarks import gguf_fidelity, result_files

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # its scripts import each other by name

import hub  # noqa: E402
import minilm  # noqa: E402
import smollm  # noqa: E402
from models import bert, llama  # noqa: E402

REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Only the table and the plot.")
ONLY = flags.DEFINE_string(
    "cases", "", "A regular expression: only cases whose name it is found in."
)
COSINE = flags.DEFINE_bool("cosine", True, "Whether to score MiniLM.")
PERPLEXITY = flags.DEFINE_bool("perplexity", True, "Whether to score SmolLM2 as well.")

LLAMA_CPP = flags.DEFINE_string(
    "llama_cpp", None, "llama.cpp's shared library, with `ggml_quantize_chunk`; None: xllamacpp's."
)

LINEAR = r"bert/layer_.*/w"
Params = dict[str, dict[str, Any]]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if not REPORT_ONLY.value:
        measure()
    report.write()


def measure() -> None:
    """Scores all cases, and writes the results after each; with `--cases`, into the recorded ones."""
    encoder = Encoder() if COSINE.value else None
    language = Language() if PERPLEXITY.value else None
    results: dict[str, Any] = (
        json.loads(report.RESULTS.read_text()) if ONLY.value else dict(cases={})
    )
    models = [model for model in (encoder, language) if model is not None]
    old = results.setdefault("dense", {})
    results["dense"] = functools.reduce(operator.or_, [m.score(m.params) for m in models], old)
    for name, quantize in (progress := tqdm(chosen_cases().items())):
        progress.set_description(name)
        if new := [own for model in models if (own := model.case(quantize)) is not None]:
            old = results["cases"].get(name, {})
            results["cases"][name] = functools.reduce(operator.or_, new, old)
            result_files.write(results, report.RESULTS)


class Quantized(NamedTuple):
    """A model's parameters with quantized weights.

    Attributes:
        bits: Per weight.
        dense: The parameters as dense arrays.
        scored: The parameters to score: with quantized activations, other ones than the dense.
    """

    bits: float
    dense: Params
    scored: Params


def chosen_cases() -> dict[str, Callable[["Inputs"], Quantized | None]]:
    """Returns the cases that `--cases` chooses: what each makes of a model; None: it does not fit."""
    found: dict[str, Callable[[Inputs], Quantized | None]] = {}
    for name, (options, method) in report.CASES.items():
        if re.search(ONLY.value, name):
            found[name] = functools.partial(Inputs.quantized, options=options, method=method)
    theirs = {name: way for name, way in report.LLAMA_CPP.items() if re.search(ONLY.value, name)}
    if theirs:
        quantizer = gguf_fidelity.Quantizer(LLAMA_CPP.value)
        for name, (kind, way) in theirs.items():
            if way == "none" and quantizer.requires_importance(kind):
                continue
            found[name] = functools.partial(
                Inputs.rounded, quantizer=quantizer, kind=kind, importance=way
            )
    return found


class Inputs:
    """The inputs of a model's weights, with the statistics that each method needs."""

    def __init__(self, apply: Any, params: Params, batches: list[Any], targets: str) -> None:
        self.params, self.targets, self.model = params, targets, (apply, batches)
        paths = [(module, name) for module in params for name in params[module]]
        self.weights = [own for own in paths if re.fullmatch(targets, "/".join(own))]

    @functools.cached_property
    def moments(self) -> dict[str, jax.Array]:
        return hki.input_moments(self.model[0], self.params, self.model[1], targets=self.targets)

    @functools.cached_property
    def maxima(self) -> dict[str, jax.Array]:
        return hki.input_maxima(self.model[0], self.params, self.model[1], targets=self.targets)

    def quantized(self, options: dict[str, Any], method: str | None) -> Quantized | None:
        """Quantizes the weights here; returns None if groups do not divide the width."""
        group = options.get("group_size") or 1
        if any(self.params[m][n].shape[0] % group for m, n in self.weights):
            return None
        if method is None:
            new = hki.quantize_params(self.params, targets=self.targets, **options)
        else:
            inputs = self.maxima if method == "smoothquant" else self.moments
            method, carried, _ = method.partition(", in order")
            carry = self.model if carried else None
            new = hki.quantize_with_inputs(
                self.params, inputs, method=method, carry=carry, **options
            )
        dense = hki.materialize(new)
        return Quantized(self.bits(new), dense, new if "activation" in options else dense)

    def bits(self, params: Params) -> float:
        """Returns the bits per weight that these weights have in other parameters."""
        weights = [params[module][name] for module, name in self.weights]
        return 8 * sum(x.nbytes for x in weights) / sum(x.size for x in weights)

    def rounded(self, quantizer: gguf_fidelity.Quantizer, kind: str, importance: str) -> Quantized:
        """Rounds the weights to a type of llama.cpp.

        Args:
          quantizer: llama.cpp's.
          kind: the type's name in GGML.
          importance: of the inputs of each weight. "data": the sums of their squares over the
            calibration batch (llama.cpp has the means, which give the same codes); "equal": one for
            each input; "none": none is given.
        """
        weights = {(m, n): np.asarray(self.params[m][n], np.float32) for m, n in self.weights}
        given = {
            "data": lambda path: np.diag(self.moments["/".join(path)]),
            "equal": lambda path: np.ones(len(weights[path])),
        }.get(importance)
        found = quantizer.rounded(kind, weights, given and {path: given(path) for path in weights})
        new = {module: dict(own) for module, own in self.params.items()}
        for (module, name), weight in found.items():
            new[module][name] = jnp.asarray(weight)
        return Quantized(gguf_fidelity.bits(kind), new, new)


class Encoder:
    """MiniLM on the Lee documents: its linear weights are quantized."""

    def __init__(self) -> None:
        config, _, self.params = hub.load(minilm.fetch())
        files = [smollm.fetch(s) for s in (minilm.TOKENIZER, minilm.DOCUMENTS, minilm.SIMILARITIES)]
        model = hk.without_apply_rng(hk.transform(lambda *x: bert.embed_sentences(config, *x)))
        self.apply = jax.jit(hki.use_implicit_args(model.apply))
        self.batch = minilm.tokenize(files[0], minilm.read_documents(files[1]), 256)
        self.similarities = minilm.read_similarities(files[2])
        self.dense = np.asarray(self.apply(self.params, *self.batch))
        background = minilm.read_documents(smollm.fetch(minilm.BACKGROUND))
        calibration = minilm.tokenize(files[0], background[:128], 128)
        self.inputs = Inputs(model.apply, self.params, [calibration], LINEAR)

    def case(self, quantize: Callable[[Inputs], Quantized | None]) -> dict[str, float] | None:
        """Returns the bits, the error of the weights, and the scores."""
        new = quantize(self.inputs)
        if new is None:
            return None
        return dict(bits=new.bits, **self.error(new.dense), **self.score(new.scored))

    def error(self, dense: Params) -> dict[str, float]:
        """Returns the error of the linear weights, relative to the weights."""
        pairs = [(dense[m][n], self.params[m][n]) for m, n in self.inputs.weights]
        error = sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)
        total = sum(float(jnp.sum(b**2)) for _, b in pairs)
        return dict(rms=math.sqrt(error / total))

    def score(self, params: Params) -> dict[str, float]:
        """Returns the mean cosine to the dense embeddings, and Pearson's correlation with people."""
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

    def case(self, quantize: Callable[[Inputs], Quantized | None]) -> dict[str, float] | None:
        """Returns the perplexity with quantized weights."""
        new = quantize(self.inputs)
        return None if new is None else self.score(new.scored)

    def score(self, params: Params) -> dict[str, float]:
        """Returns the perplexity of the held-out text."""
        return dict(perplexity=math.exp(float(self.loss(params, self.heldout))))


if __name__ == "__main__":
    app.run(main)
