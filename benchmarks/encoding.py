"""Times the encoding of trellis codes, on the projections of SmolLM2's layers.

    python -m benchmarks.encoding

All 30 layers have the same shapes: each of three is encoded alone, without inputs. The first of them
also compiles. Times are of the processor, the sum over all threads: the machine may be busy.
"""

import re
import time
from collections.abc import Sequence

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
        seconds = []
        for layer in layers:
            start = time.process_time()
            jax.block_until_ready(jax.tree.leaves(hki.quantize_params(layer, dtype=name)))
            seconds.append(time.process_time() - start)
        print(name, *(f"{x:.2f}" for x in seconds), flush=True)


if __name__ == "__main__":
    app.run(main)
