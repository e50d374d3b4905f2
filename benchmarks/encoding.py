"""Times the encoding of trellis codes, on the projections of SmolLM2's layers.

    python -m benchmarks.encoding

All 30 layers have the same shapes: each of three is encoded alone, without inputs and with the moments
of random ones (LDLQ), whose values do not change the time. The first of them also compiles. Times are
of the processor, the sum over all threads: the machine may be busy.
"""

import functools
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import app

import haiku_implicit as hki
from benchmarks.fidelity import smollm


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    params = smollm.read_gguf(smollm.fetch(smollm.MODEL)).params
    layers = [
        hki.materialize({m: x for m, x in params.items() if re.search(rf"layer_{i}/.*_proj", m)})
        for i in range(3)
    ]
    print(sum(x.size for x in jax.tree.leaves(layers[0])), "numbers in a layer")
    for name in ("trellis2", "trellis3", "trellis4"):
        for way, quantize in (("alone", hki.quantize_params), ("with inputs", _with_inputs)):
            seconds = []
            for layer in layers:
                start = time.process_time()
                jax.block_until_ready(jax.tree.leaves(quantize(layer, dtype=name)))
                seconds.append(time.process_time() - start)
            print(name, way, *(f"{x:.2f}" for x in seconds), flush=True)


def _with_inputs(layer: Any, *, dtype: str) -> Any:
    """Quantizes a layer with the moments of inputs that are normally distributed."""
    sizes = {f"{module}/w": own["w"].shape[0] for module, own in layer.items()}
    return hki.quantize_with_inputs(layer, {p: _moments(n) for p, n in sizes.items()}, dtype=dtype)


@functools.cache
def _moments(size: int) -> jax.Array:
    x = jax.random.normal(jax.random.key(0), (2 * size, size))
    return x.T @ x


if __name__ == "__main__":
    app.run(main)
