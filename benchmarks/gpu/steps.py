"""Times training steps on a GPU: all weights, LoRA, and LoRA on quantized weights.

The models are a Llama, and AlphaFold 3's Pairformer with targets for its outputs.

    python -m benchmarks.gpu.steps --steps_output=steps.json
    python -m benchmarks.gpu.steps --steps_output=steps.json --steps_report_only  # the table

LoRA's rank is 16, on all matrices but the embedding and attention's biases of pairs; the model's own
loop trains it with `hki.freeze`.
"""

import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from absl import app, flags

import haiku_implicit as hki
from benchmarks import result_files
from benchmarks import tables as markdown
from benchmarks.gpu import products

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))  # its scripts import each other by name

from models import llama, pairformer  # noqa: E402

OUTPUT = flags.DEFINE_string("steps_output", "gpu_steps.json", "The results' file.")
LAYERS = flags.DEFINE_integer("steps_layers", 12, "Layers of the Llama.", 1)
WIDTH = flags.DEFINE_integer("steps_width", 2048, "Width of the Llama, a multiple of 128.", 128)
BATCH = flags.DEFINE_list("steps_batch", ["8x512", "1x512"], "The Llama's, [sequences x tokens].")
BLOCKS = flags.DEFINE_integer("steps_blocks", 48, "Blocks of the Pairformer.", 1)
CROPS = flags.DEFINE_list("steps_crops", ["384"], "Tokens of the complex that it gets.")
REPORT_ONLY = flags.DEFINE_bool("steps_report_only", False, "Only the table, from the results.")
METHOD = flags.DEFINE_string("steps_method", None, "The only method that runs.")
COMPILE = flags.DEFINE_bool("steps_compile", True, "Compile all methods together first.")
NUMBER = flags.DEFINE_integer("steps_number", 10, "Steps that are timed.", 0)

RANK = 16
Step = Callable[..., Any]
Dense = Callable[[], tuple[Any, Any]]
Loss = Callable[[Any, Any, Any], jax.Array]


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
    for model, batches in (("Llama", BATCH.value), ("Pairformer", CROPS.value)):
        for batch in batches:
            for name in METHODS if METHOD.value is None else [METHOD.value]:
                cases.append(dict(model=model, batch=batch, method=name))
                cases[-1] |= measure(model, name, batch)
                print(json.dumps(cases[-1]), flush=True)
    if METHOD.value is None:
        sizes = dict(layers=LAYERS.value, width=WIDTH.value, blocks=BLOCKS.value, rank=RANK)
        result_files.write(
            dict(environment=products.environment()) | sizes | dict(cases=cases), path
        )


def compile_beforehand() -> None:
    """Fills JAX's compilation cache, each method in a process of its own."""
    if METHOD.value is None and COMPILE.value:
        command = [sys.executable, "-m", "benchmarks.gpu.steps", *sys.argv[1:], "--steps_number=0"]
        started = [subprocess.Popen([*command, f"--steps_method={name}"]) for name in METHODS]
        for process in started:
            process.wait()


def measure(of: str, name: str, batch: str) -> dict[str, Any]:
    """Returns seconds and bytes of one step of a model."""
    loss_of, data = MODELS[of].loss, MODELS[of].batch(batch)
    model, params = METHODS[name](MODELS[of].dense)
    optimizer = optax.adam(1e-4)
    state = optimizer.init(params)
    start = time.perf_counter()
    step = traced(model, loss_of, optimizer, params, state, data)
    traced_at = time.perf_counter()
    compiled = step.lower().compile()
    memory = compiled.memory_analysis()
    params, state, loss = compiled(params, state, data)
    first = float(loss)
    times = [math.nan]
    for _ in range(NUMBER.value):
        begin = time.perf_counter()
        params, state, loss = compiled(params, state, data)
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
    model: Any, loss_of: Loss, optimizer: optax.GradientTransformation, *arguments: Any
) -> jax.stages.Traced:
    """Traces a step for these parameters, state and batch."""
    return jax.jit(step_of(model, loss_of, optimizer), donate_argnums=(0, 1)).trace(*arguments)


def step_of(model: Any, loss_of: Loss, optimizer: optax.GradientTransformation) -> Step:
    """Returns a training step as people write it, which knows nothing of this library."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: loss_of(model, p, batch))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def dense_llama() -> tuple[Any, Any]:
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


def tokens_of(batch: str) -> jax.Array:
    shape = [int(n) for n in batch.split("x")]
    return jax.random.randint(jax.random.key(1), shape, 0, 32_000)


def next_tokens(model: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the cross entropy of each sequence's next tokens."""
    logits = model.apply(params, tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def dense_pairformer() -> tuple[Any, Any]:
    """Returns the model and its initial parameters, in bfloat16."""
    config = pairformer.PairformerConfig(num_blocks=BLOCKS.value)
    model = hk.without_apply_rng(hk.transform(lambda *x: pairformer.Pairformer(config)(*x)))
    return model, jax.jit(model.init)(jax.random.key(0), *complex_of("8")[0])


def complex_of(tokens: str) -> tuple[Any, Any]:
    """Returns random representations of tokens and pairs, and targets for both."""
    n, config = int(tokens), pairformer.PairformerConfig()
    shapes = [(n, config.single), (n, n, config.pair)] * 2
    keys = jax.random.split(jax.random.key(1), 4)
    x = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    return tuple(x[:2]), tuple(x[2:])


def squared_errors(model: Any, params: Any, batch: Any) -> jax.Array:
    """Returns the sum of both outputs' mean squared errors."""
    inputs, targets = batch
    outputs = zip(model.apply(params, *inputs), targets, strict=True)
    return sum(jnp.mean((y - target).astype(jnp.float32) ** 2) for y, target in outputs)


class Model(NamedTuple):
    """A model to train: how it is made, its batches by their flag's text, and its loss."""

    dense: Dense
    batch: Callable[[str], Any]
    loss: Loss


MODELS = {
    "Llama": Model(dense_llama, tokens_of, next_tokens),
    "Pairformer": Model(dense_pairformer, complex_of, squared_errors),
}


def frozen(dense: Dense, quantize: Callable[[Any], Any] = lambda params: params) -> tuple[Any, Any]:
    """Returns the model with LoRA on weights that `quantize` made, and LoRA's factors."""
    model, params = dense()
    params = hki.add_lora(quantize(params), jax.random.key(1), rank=RANK, exclude=EXCLUDED)
    return hki.freeze(model, params)


EXCLUDED = ".*(embed|norm|/bias/).*"


def quantized(name: str, group: int | None) -> Callable[[Any], Any]:
    """Returns `quantize_params` for the matrices that have LoRA."""
    return lambda params: hki.quantize_params(
        params, dtype=name, group_size=group, exclude=EXCLUDED
    )


METHODS: dict[str, Callable[[Dense], tuple[Any, Any]]] = {
    "all weights": lambda dense: dense(),
    "LoRA": frozen,
    "LoRA on int8": lambda dense: frozen(dense, quantized("int8", None)),
    "LoRA on int4, groups of 128": lambda dense: frozen(dense, quantized("int4", 128)),
    "LoRA on nf4, groups of 64": lambda dense: frozen(dense, quantized("nf4", 64)),
}


def table(results: dict[str, Any]) -> str:
    """Returns the Markdown table, with times relative to a step of all weights."""
    about = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    text = (
        f"Measured on {about['date']}: {about['device']}; {versions}. Steps of a Llama with "
        f"{results['layers']} layers of width {results['width']}, and of a Pairformer of AlphaFold 3's "
        f"widths with {results['blocks']} blocks; LoRA of rank {results['rank']}:\n\n"
    )
    cases = results["cases"]
    whole = {(c["model"], c["batch"]): c["time"] for c in cases if c["method"] == "all weights"}
    lines = [
        [
            f"{case['model']}, {case['batch']}",
            case["method"],
            f"{case['time'] * 1e3:.1f}",
            f"{case['time'] / whole[case['model'], case['batch']]:.2f}",
            *(f"{case[name] / 1e9:.2f}" for name in ("weights", "arguments", "temporaries")),
        ]
        for case in cases
    ]
    header = [
        "model, batch",
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
