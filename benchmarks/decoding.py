"""Measures tokens per second of SmolLM2: dense and quantized weights and caches, and llama.cpp.

    python -m benchmarks.decoding                # all cores, by the clock: results and tables
    taskset -c 1 python -m benchmarks.decoding   # one core, by processor time
    HAIKU_IMPLICIT_NATIVE_TARGET=x86-64-v3 python -m benchmarks.decoding  # for AVX2
    python -m benchmarks.decoding --report_only  # tables from the recorded results

Run it from the root of the repository, with nothing else running on the machine. All cases take turns,
so that other load on the machine affects each of them; ratios are medians over all turns.
llama.cpp is timed if `xllamacpp` is installed (its wheel has a compiled llama.cpp, for AVX2), on the
same file, with as many threads.
"""

import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
from benchmarks import result_files
from benchmarks import tables as markdown
from benchmarks.machine import about_this_machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # its scripts import each other by name

import decoding  # noqa: E402
import smollm  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "decoding.json"
DOCUMENTS = (
    ROOT / "benchmarks" / "results" / "quantized_matmul.md",
    ROOT / "docs" / "quantization_speed.md",
)

TURNS = flags.DEFINE_integer("turns", 5, "How often each time is taken.", 1)
TOKENS = flags.DEFINE_integer("decoded_tokens", 64, "How many tokens are decoded.", 2)
PROMPT = flags.DEFINE_integer("prompt_tokens", 128, "How many tokens come before them.", 1)
CHOSEN = flags.DEFINE_list("cases", None, "Numbers of the cases, from 0; None for all.")
REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Only the tables.")

# Weights, the dtype of rounded activations, and the format of the cache.
CASES = [
    ("f32", "f32", "f32"),
    ("f32", "f32", "int8"),
    ("int8, per channel", "f32", "int8"),
    ("int8, per channel", "int8", "int8"),
    ("4 bits, as in the file", "f32", "f32"),
    ("4 bits, as in the file", "f32", "int8"),
    ("4 bits, as in the file", "f32", "int4"),
    ("4 bits, as in the file", "int8,groups", "int8"),
    ("4 bits, as in the file", "int8", "int8"),
]
LLAMA = ("4 bits, llama.cpp", "int8,groups", "f16")
# Seconds of one turn for the prompt and for the tokens after it, and these tokens.
Turn = tuple[float, float, list[int]]

THREADS = len(os.sched_getaffinity(0))
clock = time.process_time if THREADS == 1 else time.perf_counter
RUN = f"{os.environ.get('HAIKU_IMPLICIT_NATIVE_TARGET') or 'native'}, {THREADS}"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if not REPORT_ONLY.value:
        run = measure()
        runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        result_files.write(runs | {RUN: run}, RESULTS)
        print(f"wrote {RESULTS}")
    markdown.replace(DOCUMENTS, tables(json.loads(RESULTS.read_text())))


# --- measuring -----------------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    """Returns the seconds of all turns, the bytes held, and the decoded tokens."""
    path = smollm.fetch(smollm.MODEL)
    checkpoint = smollm.read_gguf(path)
    weights = all_weights(checkpoint)
    text = smollm.fetch(smollm.SHAKESPEARE).read_text()
    prompt = checkpoint.tokenizer.encode(text[: 20 * PROMPT.value]).ids[: PROMPT.value]
    cases, functions = [], []
    chosen = CASES if CHOSEN.value is None else [CASES[int(i)] for i in CHOSEN.value]
    for name, activations, cache in tqdm(chosen, desc="compiling"):
        params = weights[name]
        if activations != "f32":
            params = hki.quantize_activations(params, activations)
        run, held = ours(checkpoint.config, params, cache, prompt)
        case = dict(weights=name, activations=activations, cache=cache)
        cases.append(dict(case, bytes=_bytes(params), cache_bytes=held))
        functions.append(run)
    if (theirs := llama_cpp(path, prompt)) is not None:
        case = dict(zip(("weights", "activations", "cache"), LLAMA, strict=True))
        cases.append(dict(case, bytes=path.stat().st_size))
        functions.append(theirs)
    for run in functions:
        run()
    for case in cases:
        case.update(prefill=[], decode=[])
    for _ in tqdm(range(TURNS.value), desc="turns"):
        for case, run in zip(cases, functions, strict=True):
            prefill, decode, tokens = run()
            case["prefill"].append(prefill)
            case["decode"].append(decode)
            case["tokens"] = tokens
    about = about_this_machine("jax", "jaxlib", "haiku-implicit", "xllamacpp")
    return dict(
        environment=dict(about, **{"llama.cpp": instructions_of_llama_cpp()}),
        prompt=PROMPT.value,
        cases=cases,
    )


def all_weights(checkpoint: Any) -> dict[str, Any]:
    """Returns the parameters by the name of their format."""
    of_file = checkpoint.params
    dense = hki.materialize(of_file)
    int8 = hki.quantize_params(dense, dtype="int8", targets=r".*_proj/w")
    # (With a scale for each token; the head is the transpose of this weight.)
    int8 = hki.quantize_params(int8, dtype="int8", axis=-1, targets=r".*/embed/.*")
    return {"f32": dense, "int8, per channel": int8, "4 bits, as in the file": of_file}


def ours(config: Any, params: Any, cache: str, prompt: list[int]) -> tuple[Callable[[], Turn], int]:
    """Returns a function that runs a turn of this library, and the bytes of the cache."""
    model = decoding.make_model(config, len(prompt) + TOKENS.value, cache)
    decoder, empty = decoding.make_decoder(model), decoding.empty_cache(model)

    def run() -> Turn:
        state = jax.block_until_ready(jax.tree.map(jnp.copy, empty))
        start = clock()
        token, state = decoder.read(params, state, np.asarray([prompt], np.int32))
        token.block_until_ready()
        middle = clock()
        tokens, state = decoder.write(params, state, token, TOKENS.value - 1)
        tokens.block_until_ready()
        return middle - start, clock() - middle, [int(token[0]), *map(int, tokens)]

    return run, _bytes(empty)


def llama_cpp(path: pathlib.Path, prompt: list[int]) -> Callable[[], Turn] | None:
    """Returns a function that runs a turn of llama.cpp, if it is installed."""
    try:
        import xllamacpp
    except ImportError:
        return None
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.verbosity = str(path), 512, 1, 0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = THREADS
    server = xllamacpp.Server(options)
    request = dict(prompt=prompt, temperature=0.0, cache_prompt=False, ignore_eos=True)

    def answer(count: int, **more: Any) -> tuple[float, Any]:
        start = clock()
        answer = server.handle_completions(dict(request, n_predict=count, **more))
        return clock() - start, answer["choices"][0]

    found = answer(TOKENS.value, logprobs=1)[1]["logprobs"]["content"]
    tokens = [token["id"] for token in found]

    def run() -> Turn:
        prefill = answer(1)[0]
        return prefill, answer(TOKENS.value)[0] - prefill, tokens

    return run


def instructions_of_llama_cpp() -> str:
    """Returns what llama.cpp says of its compilation; nothing if it is not installed."""
    try:
        import xllamacpp
    except ImportError:
        return ""
    return xllamacpp.get_system_info().strip()


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


# --- reporting -----------------------------------------------------------------------------------


def tables(runs: dict[str, Any]) -> dict[str, str]:
    """Returns the Markdown tables by their names in the documents."""
    return {
        "decoding environment": "\n".join(f"- {name}: {_about(run)}" for name, run in runs.items()),
        "decoding": _details(runs["native, 2"]),
        "decoding llama.cpp": _compared(runs),
    }


def _about(run: dict[str, Any]) -> str:
    about, case = run["environment"], run["cases"][0]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    if about.get("llama.cpp"):
        versions += f"; llama.cpp: {about['llama.cpp']}"
    return (
        f"{about['date']}, {about['cpu']}, {about['cores']} cores; {versions}. "
        f"{run['prompt']} tokens of prompt, {len(case['tokens'])} decoded, "
        f"{len(case['decode'])} turns."
    )


def _details(run: dict[str, Any]) -> str:
    """Returns a table of all that was measured in a run."""
    cases = run["cases"]
    dense = cases[0]
    count = len(dense["tokens"])
    rows = []
    for case in cases:
        same = next(
            (i for i, (a, b) in enumerate(zip(case["tokens"], dense["tokens"], strict=True)) if a != b),
            count,
        )  # fmt: skip
        rows.append(
            [
                case["weights"],
                case["activations"],
                case["cache"],
                f"{case['bytes'] / 1e6:.0f}",
                f"{case['cache_bytes'] / 1e6:.2f}" if "cache_bytes" in case else "",
                f"{run['prompt'] / statistics.median(case['prefill']):.0f}",
                f"{_ratio(dense['prefill'], case['prefill']):.2f}",
                f"{(count - 1) / statistics.median(case['decode']):.1f}",
                f"{(count - 1) / min(case['decode']):.1f}",
                f"{_ratio(dense['decode'], case['decode']):.2f}",
                str(same),
            ]
        )
    header = ["weights", "activations", "cache", "weights, MB", "cache, MB", "prompt, tokens/s",
              "to dense", "decoding, tokens/s", "best", "to dense", "same tokens"]  # fmt: skip
    return markdown.table(header, rows)


def _compared(runs: dict[str, Any]) -> str:
    """Returns a table of the tokens per second of all runs, and of their ratios to llama.cpp."""
    names = [*CASES[4:6], *CASES[7:], LLAMA]
    rows = {name: list(name) for name in names}
    header = ["weights", "activations", "cache"]
    for title, run in runs.items():
        header += [f"{title}: prompt", "decoding"]
        tokens = len(run["cases"][0]["tokens"]) - 1
        cases = {(c["weights"], c["activations"], c["cache"]): c for c in run["cases"]}
        for name, row in rows.items():
            for part, count in (("prefill", run["prompt"]), ("decode", tokens)):
                if name not in cases:
                    row.append("")
                    continue
                case = cases[name]
                speed = count / statistics.median(case[part])
                row.append(f"{speed:.0f} ({_ratio(cases[LLAMA][part], case[part]):.2f})")
    return markdown.table(header, list(rows.values()))


def _ratio(a: Sequence[float], b: Sequence[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    app.run(main)
