"""Compares this library's LoRA in AlphaGenome with the same LoRA written by hand, as programs.

    python -m benchmarks.alphagenome_by_hand --repo=PATH

By hand, an interceptor of `hk.Linear` adds the products of two more parameters, and a getter adds such
products to the kernels of convolutions. Both programs are a whole training step, for the same weights,
with the flags of `examples/finetune_alphagenome.py`. Times are seconds of the processor, so that other
work counts less; nothing is run.
"""

import gc
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging

# For the scripts of examples/, which import each other by their bare names.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
import dense_twin
import finetune_alphagenome as tuning
import haiku_implicit as hki
import presets
from errors import main_of

_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each is traced, after once before.", 1)
_COMPILE = flags.DEFINE_integer("compiled", 1, "How often each is compiled.", 0)

# A step and its arguments, of which arrays are shapes.
Program = tuple[Any, tuple[Any, ...]]


def run() -> None:
    logging.set_verbosity(logging.WARNING)
    library = tuning.load_library()
    batch = tuning.batch_of(library, 0)
    loss = tuning.loss_of(library)
    makers = {
        "by hand": lambda model: by_hand(model, batch),
        "this library": lambda model: with_library(model, batch),
    }
    models = {
        "by hand": hk.transform_with_state(with_adapters_by_hand(loss)),
        "this library": hk.transform_with_state(loss),
    }
    traced: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for number in range(_ROUNDS.value + 1):
        for name in list(makers)[:: 1 - 2 * (number % 2)]:
            seconds = costs(*makers[name](models[name]))
            traced[name] += [seconds] if number else []
    for i, what in enumerate(("traced", "lowered")):
        show(what, {k: statistics.median(x[i] for x in v) for k, v in traced.items()})
    if _COMPILE.value:
        found = {k: compiled(makers[k](on_device(models[k], batch))) for k in makers}
        show("compiled", {k: x[0] for k, x in found.items()})
        show("MB of temporaries", {k: x[1] / 1e6 for k, x in found.items()})


def show(what: str, found: dict[str, float]) -> None:
    hand, own = found.values()
    print(
        f"{what:18}" + "".join(f"{k} {x:8.2f}  " for k, x in found.items()) + f"{own / hand:6.2f}"
    )


def costs(step: Any, args: tuple[Any, ...]) -> tuple[float, float]:
    """Returns the seconds to trace and to lower a step."""
    jax.clear_caches()
    gc.collect()
    with tuning.kernels_may_be_summed():
        times = [time.process_time()]
        traced = step.trace(*args)
        times.append(time.process_time())
        traced.lower()
        times.append(time.process_time())
    return times[1] - times[0], times[2] - times[1]


def compiled(program: Program) -> tuple[float, int]:
    """Returns the seconds to compile a step, the least of several, and bytes of temporaries."""
    step, args = program
    found = []
    for _ in range(_COMPILE.value):
        jax.clear_caches()
        with tuning.kernels_may_be_summed():
            lowered = step.lower(*args)
        started = time.process_time()
        executable = lowered.compile()
        found.append(time.process_time() - started)
    return min(found), executable.memory_analysis().temp_size_in_bytes


def on_device(model: hk.TransformedWithState, batch: Any) -> hk.TransformedWithState:
    """The model with products that a CPU has, if this is one."""
    if jax.default_backend() != "cpu":
        return model
    params, state = dense_twin.random_params(model, batch)
    return dense_twin.with_products_for_cpus(model, params, state, [batch])


# --- the two programs -----------------------------------------------------------------------------


def step_of(loss: Callable[..., Any], trained: Any, frozen: Any, state: Any, batch: Any) -> Program:
    """A training step of a loss of trained and frozen arrays, and its arguments."""
    optimizer = tuning.optimizer()

    @jax.jit
    def step(trained: Any, frozen: Any, state: Any, moments: Any, batch: Any) -> Any:
        take = jax.value_and_grad(lambda t: loss(t, frozen, state, batch), has_aux=True)
        (value, new), grads = take(trained)
        updates, moments = optimizer.update(grads, moments, trained)
        return optax.apply_updates(trained, updates), new, moments, value

    return step, (trained, frozen, state, jax.eval_shape(optimizer.init, trained), batch)


def by_hand(model: hk.TransformedWithState, batch: Any) -> Program:
    params, state = jax.eval_shape(model.init, jax.random.PRNGKey(0), batch)
    is_trained = lambda module, name, value: (  # noqa: E731
        name.startswith("lora_") or tuning.is_head(module, name, value)
    )

    def loss(trained: Any, frozen: Any, state: Any, batch: Any) -> Any:
        merged = hk.data_structures.merge(frozen, trained)
        (value, *_), new = model.apply(merged, state, None, batch)
        return value, new

    return step_of(loss, *hk.data_structures.partition(is_trained, params), state, batch)


def with_library(model: hk.TransformedWithState, batch: Any) -> Program:
    params, state = jax.eval_shape(model.init, jax.random.PRNGKey(0), batch)
    whole = presets.read("alphagenome").trained_whole
    halves = jax.eval_shape(
        lambda params: hki.partition(tuning.with_adapters(params), trainable_dense=whole), params
    )
    wrapped = hki.transform_implicit(model)

    def loss(trained: Any, frozen: Any, state: Any, batch: Any) -> Any:
        (value, *_), new = wrapped.apply(hki.combine(trained, frozen), state, None, batch)
        return value, new

    return step_of(loss, *halves, state, batch)


def with_adapters_by_hand(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of modules with two more parameters for each weight of the preset."""
    adapters = presets.read("alphagenome").adapters
    of_linear, of_kernel = (re.compile(adapters[name]) for name in ("lora", "locon"))

    def factors(rows: tuple[int, ...], columns: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
        init = hk.initializers.RandomUniform(-0.01, 0.01)
        a = hk.get_parameter("lora_a", (*rows, tuning.rank()), init=init)
        b = hk.get_parameter("lora_b", (tuning.rank(), columns), init=jnp.zeros)
        return a.astype(dtype), b.astype(dtype)

    def interceptor(call: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
        module, out = context.module, call(*args, **kwargs)
        own = type(module) is hk.Linear and context.method_name == "__call__"
        if not (own and of_linear.fullmatch(f"{module.module_name}/w")):
            return out
        a, b = factors(args[0].shape[-1:], out.shape[-1], args[0].dtype)
        return out + (args[0] @ a) @ b

    def getter(call: Any, value: Any, context: hk.GetterContext) -> Any:
        w = call(value)
        if not of_kernel.fullmatch(context.full_name):
            return w
        a, b = factors(w.shape[:-1], w.shape[-1], w.dtype)
        return w + a @ b

    def adapted(batch: Any) -> Any:
        with hk.intercept_methods(interceptor), hk.custom_getter(getter):
            return function(batch)

    return adapted


if __name__ == "__main__":
    app.run(main_of(run))
