"""Times training steps of a Llama on a GPU: all weights, LoRA, and LoRA on quantized weights.

    python -m benchmarks.gpu.steps --steps_output=steps.json
    python -m benchmarks.gpu.steps --steps_output=steps.json --steps_report_only  # the table

LoRA's rank is 16, on all matrices but the embedding; the model's own loop trains it with `hki.freeze`.
"""

import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from absl import app, flags

import haiku_implicit as hki
from benchmarks import result_files
from benchmarks import tables as markdown
from benchmarks.gpu import products
from examples.models import llama

OUTPUT = flags.DEFINE_string("steps_output", "gpu_steps.json", "The results' file.")
LAYERS = flags.DEFINE_integer("steps_layers", 12, "Layers of the model.", 1)
WIDTH = flags.DEFINE_integer("steps_width", 2048, "Width of the model, a multiple of 128.", 128)
BATCH = flags.DEFINE_list("steps_batch", ["8x512", "1x512"], "Batches, [sequences x tokens].")
REPORT_ONLY = flags.DEFINE_bool("steps_report_only", False, "Only the table, from the results.")
METHOD = flags.DEFINE_string("steps_method", None, "The only method that runs.")
COMPILE = flags.DEFINE_bool("steps_compile", True, "Compile all methods together first.")
NUMBER = flags.DEFINE_integer("steps_number", 10, "Steps that are timed.", 0)

RANK = 16
Step = Callable[..., Any]


def main(argv: Sequence[str]) -> None:
    del argv
    path = pathlib.Path(OUTPUT.value)
    if not REPORT_ONLY.value:
        measure_all(path)
    if METHOD.value is None:
        markdown.replace(products.DOCUMENTS, {"gpu steps": table(json.loads(path.read_text()))})


def measure_all(path: pathlib.Path) -> None:
    """Measures all steps; writes the results if no method is chosen."""
    compile_beforehand()
    cases = []
    for batch in BATCH.value:
        for name in METHODS if METHOD.value is None else [METHOD.value]:
            cases.append(dict(batch=batch, method=name) | measure(name, batch))
            print(json.dumps(cases[-1]), flush=True)
    if METHOD.value is None:
        about = dict(environment=products.environment(), layers=LAYERS.value, width=WIDTH.value)
        result_files.write(about | dict(rank=RANK, cases=cases), path)


def compile_beforehand() -> None:
    """Fills JAX's compilation cache, each method in a process of its own."""
    if METHOD.value is None and COMPILE.value:
        command = [sys.executable, "-m", "benchmarks.gpu.steps", *sys.argv[1:], "--steps_number=0"]
        started = [subprocess.Popen([*command, f"--steps_method={name}"]) for name in METHODS]
        for process in started:
            process.wait()


def measure(name: str, batch: str) -> dict[str, Any]:
    """Returns seconds and bytes of one step."""
    shape = [int(n) for n in batch.split("x")]
    tokens = jax.random.randint(jax.random.key(1), shape, 0, 32_000)
    model, params = METHODS[name]()
    optimizer = optax.adam(1e-4)
    state = optimizer.init(params)
    start = time.perf_counter()
    step = traced(model, optimizer, params, state, tokens)
    traced_at = time.perf_counter()
    compiled = step.lower().compile()
    memory = compiled.memory_analysis()
    params, state, loss = compiled(params, state, tokens)
    first = float(loss)
    times = [math.nan]
    for _ in range(NUMBER.value):
        begin = time.perf_counter()
        params, state, loss = compiled(params, state, tokens)
        loss.block_until_ready()
        times.append(time.perf_counter() - begin)
    whole = model.params(params) if hasattr(model, "params") else params
    return dict(
        time=statistics.median(times[1:] or times),
        trace=traced_at - start,
        loss=[first, float(loss)],
        weights=sum(leaf.nbytes for leaf in jax.tree.leaves(whole)),
        trained=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
    )


def traced(
    model: Any, optimizer: optax.GradientTransformation, *arguments: Any
) -> jax.stages.Traced:
    """Traces a step for these parameters, state and tokens."""
    return jax.jit(step_of(model, optimizer), donate_argnums=(0, 1)).trace(*arguments)


def step_of(model: Any, optimizer: optax.GradientTransformation) -> Step:
    """Returns a training step as people write it, which knows nothing of this library."""

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def dense() -> tuple[Any, Any]:
    """Returns the model and random bfloat16 parameters."""
    width = WIDTH.value
    config = llama.LlamaConfig(32_000, width, LAYERS.value, width // 128, width // 128, width * 3)
    model = hk.without_apply_rng(hk.transform(lambda tokens: llama.Llama(config)(tokens)))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    draw = jax.jit(
        lambda s: jax.random.normal(jax.random.key(0), s, jnp.bfloat16) / 50, static_argnums=0
    )
    return model, jax.tree.map(
        lambda leaf: draw(leaf.shape) if leaf.ndim > 1 else draw(leaf.shape) + 1, shapes
    )


def frozen(quantize: Callable[[Any], Any] = lambda params: params) -> tuple[Any, Any]:
    """Returns the model with LoRA on weights that `quantize` made, and LoRA's factors."""
    model, params = dense()
    params = hki.add_lora(quantize(params), jax.random.key(1), rank=RANK, exclude=EXCLUDED)
    return hki.freeze(model, params)


EXCLUDED = ".*(embed|norm).*"


def quantized(name: str, group: int | None) -> Callable[[Any], Any]:
    """Returns `quantize_params` for the matrices that have LoRA."""
    return lambda params: hki.quantize_params(
        params, dtype=name, group_size=group, exclude=EXCLUDED
    )


METHODS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "all weights": dense,
    "LoRA": frozen,
    "LoRA on int8": lambda: frozen(quantized("int8", None)),
    "LoRA on int4, groups of 128": lambda: frozen(quantized("int4", 128)),
    "LoRA on nf4, groups of 64": lambda: frozen(quantized("nf4", 64)),
}


def table(results: dict[str, Any]) -> str:
    """Returns the Markdown table, with times relative to a step of all weights."""
    about = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    text = (
        f"Measured on {about['date']}: {about['device']}; {versions}. Steps of a Llama with "
        f"{results['layers']} layers of width {results['width']}, LoRA of rank {results['rank']}:\n\n"
    )
    cases = results["cases"]
    dense = {case["batch"]: case["time"] for case in cases if case["method"] == "all weights"}
    lines = [
        [
            case["batch"],
            case["method"],
            f"{case['time'] * 1e3:.1f}",
            f"{case['time'] / dense[case['batch']]:.2f}",
            *(f"{case[name] / 1e9:.2f}" for name in ("weights", "arguments", "temporaries")),
        ]
        for case in cases
    ]
    header = [
        "batch",
        "trained",
        "ms",
        "of all weights'",
        "weights, GB",
        "arguments",
        "temporaries",
    ]
    return text + markdown.table(header, lines)


if __name__ == "__main__":
    app.run(main)
