"""Measures the first call that makes adapters or quantized weights for AlphaGenome.

    python -m benchmarks.alphagenome_made --repo=PATH

Each row is a process of its own, so that nothing is compiled before. The weights are random, in the
shapes of the checkout. Times are seconds of the processor, so that other work counts less.
"""

import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

# For the scripts of examples/, which import each other by their bare names.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
import finetune_alphagenome as tuning
import haiku_implicit as hki
import presets
from errors import main_of

WAYS: dict[str, Callable[[Any], Any]] = {
    "add_lora": lambda params: hki.add_lora(params, 0, rank=tuning.rank(), exclude=hki.BIASES),
    "preset": tuning.with_adapters,
    **{
        dtype: lambda params, dtype=dtype: hki.quantize_params(
            params,
            dtype=dtype,
            group_size=None if dtype == "int8" else flags.FLAGS.group_size,
            targets=presets.read("alphagenome").quantized,
        )
        for dtype in ("int8", "nf4", "int4")
    },
}
_WAYS = flags.DEFINE_list("ways", list(WAYS), "add_lora, the adapters of the preset, or a dtype.")
_COMPILED = "/jax/core/compile/backend_compile_duration"


def run() -> None:
    """Measures one way here, or each of several in a process of its own."""
    logging.set_verbosity(logging.WARNING)
    if len(_WAYS.value) == 1:
        return measure(_WAYS.value[0])
    print(f"{'':10}{'weights':>8}{'first call':>12}{'second':>9}{'programs':>10}", flush=True)
    for way in _WAYS.value:
        subprocess.run([sys.executable, "-m", __spec__.name, *sys.argv[1:], f"--ways={way}"])


def measure(way: str) -> None:
    """Prints the number of new weights, seconds of two calls, and programs that the first compiled."""
    params = random_params()
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event == _COMPILED else None
    )
    seconds, programs = [], []
    for _ in range(2):
        started = time.process_time()
        made = jax.block_until_ready(WAYS[way](params))
        seconds.append(time.process_time() - started)
        programs.append(len(compiled))
    leaves = jax.tree.leaves(made, is_leaf=lambda x: isinstance(x, hki.ImplicitArray))
    count = sum(isinstance(x, hki.ImplicitArray) for x in leaves)
    print(f"{way:10}{count:8}{seconds[0]:10.2f} s{seconds[1]:7.2f} s{programs[0]:10}", flush=True)


def random_params() -> Any:
    """Weights in AlphaGenome's shapes, with repeated random numbers."""
    library = tuning.load_library()
    batch = tuning.batch_of(library, 0)
    params, _ = jax.eval_shape(tuning.forward_of(library).init, jax.random.PRNGKey(0), batch)
    noise = np.random.default_rng(0).normal(0, 0.05, 1 << 20).astype(np.float32)
    made = jax.tree.map(lambda x: jax.device_put(np.resize(noise, x.shape).astype(x.dtype)), params)
    return jax.block_until_ready(made)


if __name__ == "__main__":
    app.run(main_of(run))
