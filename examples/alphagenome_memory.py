"""Prints what a training step of AlphaGenome takes in memory, by method and by length.

The sizes are XLA's own (`memory_analysis` of the compiled step of `finetune_alphagenome.py`, whose
flags it has, too). It compiles for shapes, so that no weights are made, and for a device that need
not be there (`--gpu`, `--tpu`). Nothing is trained; with `--run`, two steps are timed.

    python examples/alphagenome_memory.py --repo=PATH --methods=heads,lora,nf4 --lengths=131072
    JAX_PLATFORMS=cpu python examples/alphagenome_memory.py --repo=PATH --gpu=a100_sxm_40.txtpb
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python examples/alphagenome_memory.py --tpu=v5p:2x2x1
"""

import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import dense_twin
import finetune_alphagenome as tuning
import haiku_implicit as hki
from errors import InputError, main_of

_METHODS = flags.DEFINE_list("methods", list(tuning.METHODS), "Methods, of those of --method.")
_LENGTHS = flags.DEFINE_list("lengths", ["2048"], "Bases of a sequence, multiples of 2048.")
_TPU = flags.DEFINE_string(
    "tpu", None, "Compile for a TPU that need not be there, such as v5p:2x2x1; needs libtpu."
)
_GPU = flags.DEFINE_string(
    "gpu",
    None,
    "Compile for a GPU that need not be there: a file of XLA's target_config/specs, such "
    "as a100_sxm_40.txtpb; needs jax-cuda12-plugin or jax-cuda13-plugin.",
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
    step, args = of_shapes(library, tuning.batch_of(library, 0), device_of_flags())
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


def device_of_flags() -> jax.Device:
    """The device that the flags name, which need not be there, or this machine's."""
    if not (_GPU.value or _TPU.value):
        return jax.devices()[0]
    options: dict[str, Any] = dict(platform="tpu", topology_name=_TPU.value)
    try:
        if _GPU.value:
            config = pathlib.Path(_GPU.value).expanduser().read_text()
            options = dict(topology_name="", topology="1x1x1", target_config=config)
            options["platform"] = "cuda"
        return topologies.get_topology_desc(**options).devices[0]
    except Exception as error:  # (JAX does not say which)
        raise InputError(
            f"--tpu={_TPU.value} --gpu={_GPU.value}: {error}. Expected a TPU such as v5p:2x2x1, or a "
            "file of XLA's folder xla/backends/gpu/target_config/specs"
        ) from error


def of_shapes(
    library: tuning.Library, batch: Any, device: jax.Device
) -> tuple[Any, tuple[Any, ...]]:
    """The training step and the shapes of its arguments, on a device.

    No array is made, so the frozen ones are arguments, too: they travel with the model's state.
    """
    forward = tuning.forward_of(library)
    params, state = jax.eval_shape(forward.init, jax.random.PRNGKey(0), batch)
    if device.platform == "cpu":
        forward = dense_twin.with_products_for_cpus(forward, params, state, [batch])
    # A function of its own: JAX would return the halves of the method before.
    trained, frozen = jax.eval_shape(lambda params: tuning.halves(params), params)
    model = hki.transform_implicit(forward)

    def predict(trained: Any, held: Any, rng: Any, batch: Any) -> Any:
        return model.apply(hki.combine(trained, held[0]), held[1], rng, batch)

    moments = jax.eval_shape(tuning.optimizer().init, trained)
    place = SingleDeviceSharding(device)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (trained, (frozen, state), moments, batch),
    )
    return library.finetune.get_train_step(predict, tuning.optimizer()), args


def memory_of_device() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get("bytes_limit", float("inf")))


def timed(step: Any, shapes: tuple[Any, ...]) -> float:
    """Returns the seconds of the second step, for arrays of ones."""
    args = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
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
