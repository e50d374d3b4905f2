"""Sends functions over implicit parameters to a process that keeps its compiled programs.

A worker process takes functions and their arguments from the program, pickled by
cloudpickle. It keeps the compiled functions, so that only the first call compiles. A second worker
finds the programs of the first in JAX's persistent cache, and compiles nothing.

Anyone who may send a pickle to a process may run any code in it. So the worker listens on 127.0.0.1
only, and a connection must prove that it knows a random key (by HMAC, in `multiprocessing.connection`),
which the worker gets through a pipe at its start. The bytes are not encrypted. Do not bind it to
another address: between machines, use ssh's port forwarding.

    python examples/remote_functions.py
"""

import contextlib
import copyreg
import functools
import hashlib
import multiprocessing
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import cloudpickle
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import haiku_implicit as hki
from printing import heading, table

_WIDTH = flags.DEFINE_integer("width", 256, "Width of the model's layers, a multiple of 32.", 32)
_LAYERS = flags.DEFINE_integer("layers", 8, "Layers of the model.", 1)
_BATCH = flags.DEFINE_integer("batch", 32, "Examples in a call.", 1)
_WORKER = flags.DEFINE_boolean("worker", False, "Be the worker: the script starts it by itself.")

HOST = "127.0.0.1"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    if _WORKER.value:
        work()
        return
    with tempfile.TemporaryDirectory() as cache:
        with worker(cache) as address:
            calls_of_one_worker(*address)
            what_does_not_pickle(*address)
            strangers(address[0])
        with worker(cache) as address:
            a_second_worker(*address)


# --- the worker -------------------------------------------------------------------------------------


class Compilations:
    """Counts the programs that XLA compiles, and those that JAX's persistent cache has."""

    def __init__(self) -> None:
        self.asked = self.found = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, seconds: float, **about: Any) -> None:
        self.asked += event == "/jax/core/compile/backend_compile_duration"

    def _on_event(self, event: str, **about: Any) -> None:
        self.found += event == "/jax/compilation_cache/cache_hits"

    def now(self) -> np.ndarray:
        """Returns the numbers of programs that were compiled and that came from the cache."""
        return np.array([self.asked - self.found, self.found])


class Reply(NamedTuple):
    """The reply to a call.

    Attributes:
      value: the result, or the exception.
      compiled: the number of programs compiled for it.
      cached: the number of programs from JAX's persistent cache.
    """

    value: Any
    compiled: int
    cached: int


def work() -> None:
    """Serves authenticated clients, one after the other, until its standard input is closed."""
    key = bytes.fromhex(sys.stdin.readline())
    with Listener((HOST, 0), authkey=key) as listener:
        print(listener.address[1], flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        compilations = Compilations()
        while True:
            # A client without the key is refused, and may hang up at any time.
            with contextlib.suppress(multiprocessing.AuthenticationError, EOFError, OSError):
                with listener.accept() as connection:
                    serve(connection, compilations)


@functools.lru_cache(maxsize=32)
def compiled(function: bytes) -> Callable[..., Any]:
    """Returns the function in a pickle, compiled for its arguments."""
    return hki.auto_jit(cloudpickle.loads(function))


def serve(connection: Connection, compilations: Compilations) -> None:
    """Answers the calls of one client."""
    while True:
        function, arguments = connection.recv_bytes(), connection.recv_bytes()
        before = compilations.now()
        try:
            args, kwargs = cloudpickle.loads(arguments)
            value = jax.block_until_ready(compiled(function)(*args, **kwargs))
        except Exception as e:  # it belongs to the caller
            value = e
        counts = map(int, compilations.now() - before)
        connection.send_bytes(cloudpickle.dumps(tuple(Reply(value, *counts))))


@contextlib.contextmanager
def worker(cache: str) -> Iterator[tuple[int, bytes]]:
    """Starts a worker with a folder for JAX's persistent cache; yields its port and key."""
    key = secrets.token_bytes(32)
    settings = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, os.path.abspath(__file__), "--worker"]
    pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env={**os.environ, **settings}, **pipes) as process:
        print(key.hex(), file=process.stdin, flush=True)
        yield int(process.stdout.readline()), key
        process.stdin.close()


# --- the program ------------------------------------------------------------------------------------


def persistent_call(fun: Callable[..., Any], port: int, key: bytes) -> Callable[..., Reply]:
    """Returns the function, run by a worker. It is pickled once."""
    function = cloudpickle.dumps(fun)

    def call(*args: Any, **kwargs: Any) -> Reply:
        with Client((HOST, port), authkey=key) as connection:
            connection.send_bytes(function)
            connection.send_bytes(cloudpickle.dumps((args, kwargs)))
            reply = Reply(*cloudpickle.loads(connection.recv_bytes()))
        if isinstance(reply.value, Exception):
            raise reply.value
        return reply

    return call


def training_step() -> tuple[Callable[..., Any], Any, jax.Array, jax.Array]:
    """Returns a step of LoRA on an unmodified model in 4 bits, its parameters, inputs and targets."""
    width, layers = _WIDTH.value, _LAYERS.value
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([width] * layers)(x)))
    x, y = jax.random.normal(jax.random.key(0), (2, _BATCH.value, width))
    params = jax.jit(model.init)(jax.random.key(1), x)
    params = hki.quantize_params(params, dtype="int4", group_size=32)
    params = hki.add_lora(params, jax.random.key(2), rank=4)
    apply = hki.transform_implicit(model).apply

    def step(params: Any, x: jax.Array, y: jax.Array, *, loss: str = "squared") -> Any:
        def loss_of(params: Any) -> jax.Array:
            error = apply(params, x) - y
            return (error**2 if loss == "squared" else abs(error)).mean()

        return hki.value_and_grad(loss_of)(params)

    return step, params, x, y


def calls_of_one_worker(port: int, key: bytes) -> None:
    """Shows that the first call compiles, and others with equal function, flags and shapes do not."""
    step, params, x, y = training_step()
    remote = persistent_call(step, port, key)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    dense = sum(leaf.size * leaf.dtype.itemsize for leaf in hki.tree_leaves_with_implicit(params))
    heading("1. A worker that keeps what it has compiled")
    print(
        f"function: {len(cloudpickle.dumps(step))} bytes; parameters: {len(cloudpickle.dumps(params))} "
        f"bytes, for {stored} of LoRA on 4-bit weights ({dense} as dense arrays)"
    )
    rows, found = [], []
    for label, args, kwargs in (
        ("first call", (x, y), {}),
        ("second call", (x, y), {}),
        ("other inputs", (x + 1, y), {}),
        ("another flag", (x, y), {"loss": "absolute"}),
        ("the first flag", (x, y), {}),
    ):
        reply, seconds = timed(lambda args=args, kwargs=kwargs: remote(params, *args, **kwargs))
        check(reply.value, jax.jit(functools.partial(step, **kwargs))(params, *args))
        rows.append(
            [label, reply.compiled, reply.cached, f"{1e3 * seconds:.0f}", f"{reply.value[0]:.4f}"]
        )
        found.append(reply.compiled)
    table(["", "compiled", "from the cache", "ms", "loss"], rows)
    assert found[0] > 0 and found[1:] == [0, 0, 1, 0]
    try:
        remote(params, x[:, 1:], y)
    except Exception as e:
        print(f"an error of the function comes back: {type(e).__name__}")
    else:
        raise AssertionError("the shapes do not fit")


def a_second_worker(port: int, key: bytes) -> None:
    """Shows that another process finds the program in JAX's persistent cache."""
    step, params, x, y = training_step()
    reply, seconds = timed(lambda: persistent_call(step, port, key)(params, x, y))
    check(reply.value, jax.jit(step)(params, x, y))
    heading("3. A second worker, with JAX's persistent cache of the first")
    names = ["", "compiled", "from the cache", "ms", "loss"]
    row = ["first call", reply.compiled, reply.cached, f"{1e3 * seconds:.0f}"]
    table(names, [[*row, f"{reply.value[0]:.4f}"]])
    assert reply.compiled == 0 < reply.cached


def timed(call: Callable[[], Reply]) -> tuple[Reply, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def check(got: Any, want: Any) -> None:
    """Asserts that trees are equal up to rounding, and have the same implicit types."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


# --- objects that do not pickle -------------------------------------------------------------------


class Codebook:
    """Quantized vectors, and a lock, which cannot be pickled.

    It does not have a `__reduce__`, like a class of another library.
    """

    def __init__(self, vectors: hki.QuantizedMatrix):
        self.vectors, self.lock = vectors, threading.Lock()
        self.digest = hashlib.sha256(np.asarray(vectors.codes)).hexdigest()[:12]

    def scores(self, x: jax.Array) -> jax.Array:
        """Returns the products of `x` `[..., n]` with each vector."""
        with self.lock:
            return hki.use_implicit_args(jnp.dot)(x, self.vectors)


def reduce_codebook(book: Codebook) -> Any:
    """Returns the constructor, and its argument, an implicit array."""
    return Codebook, (book.vectors,)


def what_does_not_pickle(port: int, key: bytes) -> None:
    """Registers with `copyreg` how to pickle an object whose class does not support it."""
    n = _WIDTH.value
    vectors = jax.random.normal(jax.random.key(3), (n, 64))
    book = Codebook(hki.QuantizedMatrix.quantize(vectors, "int8"))
    x = jax.random.normal(jax.random.key(4), (n,))
    heading("2. copyreg: an object with a lock, and an implicit array in it")
    try:
        pickle.dumps(book)
    except TypeError as e:
        print(f"before: TypeError: {e}")
    else:
        raise AssertionError("a lock cannot be pickled")
    copyreg.pickle(Codebook, reduce_codebook)
    again = pickle.loads(pickle.dumps(book))
    remote = persistent_call(lambda book, x: book.scores(x), port, key)
    reply = remote(book, x)
    difference = abs(reply.value - book.scores(x)).max()
    print(
        f"after: {len(pickle.dumps(book))} bytes, {type(again.vectors).__name__} with digest "
        f"{again.digest}; difference of the worker's scores: {difference:.0e}"
    )
    assert again.digest == book.digest
    np.testing.assert_allclose(reply.value, book.scores(x), rtol=1e-4, atol=1e-4)
    copyreg.dispatch_table.pop(Codebook)


def strangers(port: int) -> None:
    """Shows that a client without the key is refused before the worker reads any of its data."""
    try:
        persistent_call(abs, port, secrets.token_bytes(32))(-1)
    except multiprocessing.AuthenticationError as e:
        print(f"\na client without the key: AuthenticationError: {e}")
    else:
        raise AssertionError("the worker took a call without the key")


if __name__ == "__main__":
    app.run(main)
