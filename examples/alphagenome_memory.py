"""Prints what a training step of AlphaGenome takes in memory, by method and by length.

The sizes are XLA's own (`memory_analysis` of the compiled step of `finetune_alphagenome.py`, whose
flags it has, too). Nothing is trained; with `--run`, two steps are timed.

    python examples/alphagenome_memory.py --repo=PATH --methods=heads,lora,nf4 --lengths=131072
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python examples/alphagenome_memory.py --tpu=v5p:2x2x1
"""

import time
from typing import Any, NamedTuple

import jax
from absl import app, flags, logging
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import finetune_alphagenome as tuning
import haiku_implicit as hki
from errors import InputError, main_of

_METHODS = flags.DEFINE_list("methods", list(tuning.METHODS), "Methods, of those of --method.")
_LENGTHS = flags.DEFINE_list("lengths", ["2048"], "Bases of a sequence, multiples of 2048.")
_TPU = flags.DEFINE_string(
    "tpu", None, "Compile for a TPU that need not be there, such as v5p:2x2x1; needs libtpu."
)
_RUN = flags.DEFINE_bool("run", False, "Time a step, the second of two, where it fits.")


class Row(NamedTuple):
    """Bytes of a step of one method and length."""

    weights: int
    moments: int
    results: int
    temporaries: int
    compile_seconds: float
    step_seconds: float | None

    @property
    def together(self) -> int:
        return self.weights + self.moments + self.results + self.temporaries


def run() -> None:
    """Compiles a step for each method and length, and prints a row for each."""
    logging.set_verbosity(logging.WARNING)
    wrong = [x for x in _LENGTHS.value if not x.isdigit() or int(x) % 2048 or int(x) < 2048]
    if wrong or set(_METHODS.value) - set(tuning.METHODS):
        raise InputError(
            f"--lengths={','.join(_LENGTHS.value)} --methods={','.join(_METHODS.value)}: expected "
            f"multiples of 2048 and methods of {', '.join(tuning.METHODS)}"
        )
    library = tuning.load_library()
    print(
        f"{'GB':7}{'bases':>9}{'weights':>9}{'moments':>9}{'results':>9}{'temporary':>10}", end=""
    )
    print(f"{'together':>10}{'compiled in':>13}{'step':>9}")
    for method in _METHODS.value:
        flags.FLAGS["method"].value = method
        for length in map(int, _LENGTHS.value):
            flags.FLAGS["length"].value = length
            try:
                show(method, length, measured(library))
            except jax.errors.JaxRuntimeError as error:
                print(f"{method:7}{length:9,}  {str(error).splitlines()[0]:.120}", flush=True)


def measured(library: tuning.Library) -> Row:
    """Compiles the training step of the method and the length that the flags name."""
    batch = tuning.batch_of(library, 0)
    if _TPU.value:
        return row_of(*of_shapes(library, batch, _TPU.value))
    forward, params, state = tuning.pretrained(library, batch)
    model, tuned = tuning.frozen_model(forward, tuning.quantized(params), None)
    del params
    step = library.finetune.get_train_step(model.apply, tuning.optimizer())
    args = tuned.trained, state, tuned.optimizer, batch
    row = row_of(step, args)
    if _RUN.value and row.together < memory_of_device():
        row = row._replace(step_seconds=timed(step, args))
    return row


def row_of(step: Any, args: tuple[Any, ...]) -> Row:
    """Compiles a training step for its arguments."""
    started = time.perf_counter()
    with tuning.kernels_may_be_summed():
        compiled = step.lower(*args).compile()
    sizes: Any = compiled.memory_analysis()
    moments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[2]))
    return Row(
        sizes.argument_size_in_bytes - moments,
        moments,
        sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
        time.perf_counter() - started,
        None,
    )


def of_shapes(library: tuning.Library, batch: Any, topology: str) -> tuple[Any, tuple[Any, ...]]:
    """The training step and the shapes of its arguments, on a device that need not be there.

    No array is made, so the frozen ones are arguments, too: they travel with the model's state.
    """
    forward = tuning.forward_of(library)
    params, state = jax.eval_shape(forward.init, jax.random.PRNGKey(0), batch)
    trained, frozen = jax.eval_shape(tuning.halves, params)
    model = hki.transform_implicit(forward)

    def predict(trained: Any, held: Any, rng: Any, batch: Any) -> Any:
        return model.apply(hki.combine(trained, held[0]), held[1], rng, batch)

    moments = jax.eval_shape(tuning.optimizer().init, trained)
    try:
        device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    except Exception as error:  # (JAX does not say which)
        raise InputError(f"--tpu={topology}: {error}. Expected one such as v5p:2x2x1") from error
    place = SingleDeviceSharding(device)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (trained, (frozen, state), moments, batch),
    )
    return library.finetune.get_train_step(predict, tuning.optimizer()), args


def memory_of_device() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get("bytes_limit", float("inf")))


def timed(step: Any, args: tuple[Any, ...]) -> float:
    """Returns the seconds of the second step."""
    with tuning.kernels_may_be_summed():
        jax.block_until_ready(step(*args))
    started = time.perf_counter()
    jax.block_until_ready(step(*args))
    return time.perf_counter() - started


def show(method: str, length: int, row: Row) -> None:
    sizes = row.weights, row.moments, row.results, row.temporaries, row.together
    widths = 9, 9, 9, 10, 10
    text = "".join(f"{x / 1e9:{width}.3f}" for x, width in zip(sizes, widths, strict=True))
    step = "" if row.step_seconds is None else f"{row.step_seconds:7.2f} s"
    print(f"{method:7}{length:9,}{text}{row.compile_seconds:11.0f} s{step:>9}", flush=True)


if __name__ == "__main__":
    app.run(main_of(run))
