"""Times calibrated quantization (GPTQ) by the number of layers and the size of the calibration batch.

    taskset -c 1 python -m benchmarks.calibration_cost

The layers have the widths of SmolLM2-135M's. Times are of the processor: the machine may be busy. The
first call includes tracing and compiling; the second one, of the same shapes, does not.
"""

import time
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from absl import app, flags

import haiku_implicit as hki

_LAYERS = flags.DEFINE_list("layers", ["1", "3", "6"], "Numbers of layers, with 4 sequences.")
_SEQUENCES = flags.DEFINE_list(
    "sequences", ["1", "4", "16"], "Numbers of sequences, with 3 layers."
)

WIDTH, HIDDEN, LENGTH = 576, 1536, 256


def main(argv: list[str]) -> None:
    del argv
    cases = [(int(n), 4) for n in _LAYERS.value] + [(3, int(n)) for n in _SEQUENCES.value]
    print(
        "layers, sequences of 256: seconds of a forward pass; of moments, GPTQ, and GPTQ in order, "
        "first and again"
    )
    for layers, sequences in dict.fromkeys(cases):
        jax.clear_caches()
        print(layers, sequences, *(f"{x:.2f}" for x in measure(layers, sequences)), flush=True)


def measure(layers: int, sequences: int) -> list[float]:
    """Returns the seconds of a compiled forward pass; of moments, GPTQ, GPTQ in order, twice each."""
    model = hk.without_apply_rng(hk.transform(lambda x: transformer(x, layers)))
    x = jax.random.normal(jax.random.key(0), (sequences, LENGTH, WIDTH))
    params = model.init(jax.random.key(1), x)
    apply = jax.jit(model.apply)
    jax.block_until_ready(apply(params, x))
    moments = hki.input_moments(model.apply, params, [x[:1, :8]])  # values do not change the time

    def of_moments() -> Any:
        return hki.input_moments(model.apply, params, [x])

    def of_gptq(carry: Any = None) -> Any:
        options: Any = dict(dtype="int4", group_size=64, carry=carry)
        return jax.tree.leaves(hki.quantize_with_inputs(params, moments, **options))

    def in_order() -> Any:
        return of_gptq((model.apply, [x]))

    twice = (of_moments, of_moments, of_gptq, of_gptq, in_order, in_order)
    return [seconds(lambda: apply(params, x)), *map(seconds, twice)]


def transformer(x: jax.Array, layers: int) -> jax.Array:
    for i in range(layers):
        h = norm(x)
        q, k, v = (
            linear(n, f"layer_{i}_{c}")(h) for c, n in zip("qkv", (WIDTH, 192, 192), strict=True)
        )
        scores = q @ jnp.tile(k, 3).swapaxes(-1, -2) / WIDTH**0.5
        x = x + linear(WIDTH, f"layer_{i}_o")(jax.nn.softmax(scores) @ jnp.tile(v, 3))
        h = norm(x)
        h = jax.nn.silu(linear(HIDDEN, f"layer_{i}_gate")(h)) * linear(HIDDEN, f"layer_{i}_up")(h)
        x = x + linear(WIDTH, f"layer_{i}_down")(h)
    return x


def norm(x: jax.Array) -> jax.Array:
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)


def linear(width: int, name: str) -> hk.Linear:
    return hk.Linear(width, name=name)


def seconds(fun: Callable[[], Any]) -> float:
    """Returns the seconds of processor time of one call."""
    start = time.process_time()
    jax.block_until_ready(fun())
    return time.process_time() - start


if __name__ == "__main__":
    app.run(main)
