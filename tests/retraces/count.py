"""A wrapped model that is traced again and again, and the objects that are alive after it."""

import collections
import gc
import os
import pathlib
import types
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

import haiku_implicit as hki

WIDTH, ROWS = 8, 4
# One of so many traces is of a gradient.
GRADIENTS_EVERY = 10
# After so many traces of new shapes a program would clear JAX's caches.
CLEAR_EVERY = 100


def _model() -> Any:
    """A new function each time: products, a loop, a branch, a checkpoint and a function with its own jvp."""

    def forward(x: Any) -> Any:
        x = jax.nn.relu(hk.Linear(WIDTH)(x))
        w = hk.get_parameter("w", (WIDTH, WIDTH), init=jnp.zeros)
        step = lambda c, _: (jnp.tanh(c @ w), None)  # noqa: E731
        x, _ = jax.lax.scan(step, x, length=2)
        x = jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x)
        return hk.Linear(WIDTH)(jax.checkpoint(jnp.sin)(x))

    return hk.without_apply_rng(hk.transform(forward))


def _params() -> Any:
    params = _model().init(jax.random.key(0), jnp.ones((ROWS, WIDTH)))
    params = hki.quantize_params(params, dtype="int8")
    return hki.add_lora(params, jax.random.key(1), rank=2)


class Retraces:
    """Traces a loss, and sometimes its gradient, many times.

    Args:
      dense: whether parameters are dense, and nothing of this library is in between.
      way: 'functions' for a new function each time, 'shapes' for one function and new shapes.
    """

    def __init__(self, dense: bool, way: str):
        self.dense, self.way, self.done = dense, way, 0
        params = _params()
        self.params = hki.materialize(params) if dense else params
        self.apply = self._apply()

    def _apply(self) -> Any:
        model = _model()
        return (model if self.dense else hki.transform_implicit(model)).apply

    def step(self) -> None:
        """One trace."""
        apply = self._apply() if self.way == "functions" else self.apply
        rows = ROWS if self.way == "functions" else ROWS + self.done
        grad = jax.value_and_grad if self.dense else hki.value_and_grad
        x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
        loss = lambda params, x: apply(params, x).sum()  # noqa: E731
        # (A gradient takes three times as long to trace.)
        jax.jit(loss if self.done % GRADIENTS_EVERY else grad(loss)).trace(self.params, x)
        self.done += 1
        if self.way == "shapes" and self.done % CLEAR_EVERY == 0:
            jax.clear_caches()


class Alive(NamedTuple):
    """The objects and the memory of the process.

    Attributes:
      objects: objects of this library's classes, and functions that are defined in it.
      jaxprs: of JAX.
      everything: objects that the garbage collector knows.
      resident: bytes of the process.
    """

    objects: int
    jaxprs: int
    everything: int
    resident: int


def alive() -> Alive:
    """The objects that are alive after a collection."""
    gc.collect()
    everything = gc.get_objects()
    kinds = collections.Counter(map(kind_of, everything))
    jaxprs = sum(isinstance(x, Jaxpr) for x in everything)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return Alive(
        sum(n for kind, n in kinds.items() if kind),
        jaxprs,
        len(everything),
        pages * os.sysconf("SC_PAGESIZE"),
    )


def kind_of(x: Any) -> str:
    """The kind of an object of this library; '' for any other."""
    function = isinstance(x, types.FunctionType)
    module = x.__module__ if function else type(x).__module__
    if not isinstance(module, str) or module.partition(".")[0] != "haiku_implicit":
        return ""
    return f"{module}.{x.__qualname__ if function else type(x).__qualname__}"


def work(dense: bool, way: str, total: int, points: list[int], pipe: Any) -> None:
    """In a process of its own: sends how many traces were made, and at some points what is alive."""
    retraces = Retraces(dense, way)
    for done in range(1, total + 1):
        retraces.step()
        if done in points or done % 10 == 0:
            pipe.send((done, alive() if done in points else None))
