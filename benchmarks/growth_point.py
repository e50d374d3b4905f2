"""Takes one measurement of `benchmarks.growth` in its own process, so peak memory is the case's own.

    python -m benchmarks.growth_point '{"implementation": "library", "sizes": {"depth": 6}}'

The last line of its output is the record as JSON.
"""

import cProfile
import json
import os
import pstats
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """The settings of one measurement.

    Attributes:
      implementation: a key of `benchmarks.implementations.available()`.
      sizes: fields of `benchmarks.models.Sizes`.
      adapters: the number of sets of LoRA factors, from which each example uses one; None: one set,
        and no gather.
      devices: the number of devices of this CPU that share the batch.
      compiled: whether the step is compiled and run.
      runs: how often the compiled step is timed.
    """

    implementation: str
    sizes: dict[str, Any]
    adapters: int | None = None
    devices: int = 1
    compiled: bool = True
    runs: int = 10


def main(argv: list[str]) -> None:
    case = Case(**json.loads(argv[1]))
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={case.devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(measured(case)))


def measured(case: Case) -> dict[str, float]:
    """Measures counts, seconds, bytes and the loss of one case.

    Returns:
      `equations` of the jaxpr and `operations` of StableHLO; `calls` of functions, in Python and C,
      while the step is traced; `trace` and `lower`, seconds of processor time with empty caches; if
      the step is compiled, `compile` and `step`, seconds of wall-clock time; `temporary_bytes`,
      `bytes_sent` by each device, the `peak_bytes` of the process, and the `loss`.
    """
    import jax

    from benchmarks import counts, stages

    make_step, arguments = _made(case)
    record: dict[str, float] = {}
    _trace(*_made(_small(case)))  # imports, and other one-time work of a process
    jax.clear_caches()
    with stages.no_garbage_collection():
        start = time.process_time()
        traced = _trace(make_step, arguments)
        between = time.process_time()
        lowered = traced.lower()
        record.update(trace=between - start, lower=time.process_time() - between)
    record["equations"] = counts.equations(traced.jaxpr.jaxpr)
    record["operations"] = counts.operations(lowered)
    if case.compiled:
        record.update(_compiled(lowered, arguments, case))
        # In kilobytes, on Linux. For this run only: profiling comes after it.
        record["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    jax.clear_caches()
    with cProfile.Profile() as profile:
        _trace(make_step, arguments)
    record["calls"] = pstats.Stats(profile).total_calls
    return record


def _small(case: Case) -> Case:
    """Returns the case with one layer."""
    return case._replace(sizes=dict(case.sizes, depth=1))


def _trace(make_step: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
    import jax

    return jax.jit(make_step()).trace(*arguments)


def _compiled(lowered: Any, arguments: tuple[Any, ...], case: Case) -> dict[str, float]:
    import jax

    from benchmarks import collectives_text, stages

    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=stages.UNFUSED)
    record = dict(compile=time.perf_counter() - start)
    record["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    record["bytes_sent"] = collectives_text.sent(compiled.as_text())
    record["loss"] = float(compiled(*arguments)[0])
    seconds = []
    for _ in range(case.runs):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
    return dict(record, step=statistics.median(seconds))


def _made(case: Case) -> tuple[Callable[[], Any], tuple[Any, ...]]:
    """Returns a function that makes a new training step, and its arguments, placed on the devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from benchmarks import implementations, models, stages

    sizes = models.Sizes(**case.sizes)
    tokens, params = _example(sizes)
    trainable, frozen = implementations.arguments(case.implementation, params)
    make_loss = implementations.available()[case.implementation]
    if case.adapters is not None:
        trainable = jax.tree.map(lambda x: jnp.stack([x] * case.adapters), trainable)
    mesh = jax.make_mesh((case.devices,), ("batch",), axis_types=(AxisType.Auto,))
    trainable, frozen = jax.device_put((trainable, frozen), NamedSharding(mesh, P()))
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("batch")))

    def make_step() -> Any:
        loss = make_loss(sizes)
        return stages.training_step(
            loss if case.adapters is None else _of_bank(loss, case.adapters)
        )

    return make_step, (trainable, frozen, tokens)


def _example(sizes: Any) -> tuple[Any, Any]:
    """Returns tokens, and parameters of the model by hand, without running `init`, which compiles."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks import models

    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, sizes.vocabulary, (sizes.batch, sizes.length)), jnp.int32)
    init = models.transformed(sizes, by_hand=True).init
    shapes = jax.eval_shape(init, jax.random.key(0), tokens)
    return tokens, jax.tree.map(
        lambda x: jnp.asarray(0.05 * rng.standard_normal(x.shape), x.dtype), shapes
    )


def _of_bank(loss: Any, adapters: int) -> Any:
    """Returns the mean loss of examples that each have the factors of their own adapter."""
    import jax
    import jax.numpy as jnp

    def of_all(bank: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
        def of_one(slot: jax.Array, tokens: jax.Array) -> jax.Array:
            return loss(jax.tree.map(lambda x: x[slot], bank), frozen, tokens[None])

        slots = jnp.arange(len(tokens)) % adapters
        return jax.vmap(of_one)(slots, tokens).mean()

    return of_all


if __name__ == "__main__":
    main(sys.argv)
