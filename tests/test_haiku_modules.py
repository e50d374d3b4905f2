"""Every module of Haiku with LoRA, quantized and zero parameters, compiled, against its dense twin.

In float64, because several modules normalize over a batch that is constant in some channel: what they
compute from rounding errors is then still small. XLA is told not to spend time on optimizing.
"""

import functools
import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haiku._src.integration import descriptors

import haiku_implicit as hki

pytestmark = pytest.mark.usefixtures("may_be_dense")
RNG = jax.random.PRNGKey(42)
MODULES = {d.name: d for d in descriptors.ALL_MODULES}

jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


@pytest.fixture(autouse=True)
def float64():
    """64-bit numbers for the time of a test."""
    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable(True):
        yield


def is_matrix(module_name, name, value):
    return jnp.issubdtype(value.dtype, jnp.floating) and value.ndim >= 2


def with_lora(params):
    """Rank 1; no factor is zero. (Random numbers would take longer to compile than most modules.)"""

    def init(key, shape, dtype):
        return jnp.cos(jnp.arange(math.prod(shape), dtype=dtype)).reshape(shape) / shape[-2]

    lora = hki.add_lora(params, 0, rank=1, alpha=0.5, targets=is_matrix, init=init)
    return jax.tree.map(lambda x: x + 0.1, lora)


IMPLICIT = {
    "lora": with_lora,
    "int8": functools.partial(hki.quantize_params, dtype="int8", targets=is_matrix),
    "int4": functools.partial(hki.quantize_params, dtype="int4", targets=is_matrix),
    "zeros": functools.partial(hki.zero_params, targets=lambda module_name, name, value: True),
}


def floats(tree):
    """The floating-point leaves."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]


def filled(shapes, seed, low):
    """Values for the shapes of parameters or state: deterministic, in ±1/sqrt(fan-in) or above `low`."""
    leaves, treedef = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)

    def fill(s):
        if not jnp.issubdtype(s.dtype, jnp.floating):
            return jnp.zeros(s.shape, s.dtype)
        if low is not None:
            return jnp.asarray(rng.uniform(low, low + 1, s.shape), jnp.float64)
        bound = 1 / math.sqrt(max(1, math.prod(s.shape[:-1])))
        return jnp.asarray(rng.uniform(-bound, bound, s.shape), jnp.float64)

    return treedef.unflatten(map(fill, leaves))


def scalar(tree):
    """A function of all numbers of a tree that weighs each differently."""
    parts = [jnp.vdot(y, jnp.sin(1.0 + jnp.arange(y.size)).reshape(y.shape)) for y in floats(tree)]
    return sum(parts, jnp.float64(0))


class Case:
    """A module of Haiku, its parameters, and its compiled function with gradients."""

    def __init__(self, name):
        d = MODULES[name]
        self.plain = hk.transform_with_state(lambda x: d.create()(x))
        if jnp.issubdtype(d.dtype, jnp.integer):
            self.x = jnp.arange(math.prod(d.shape), dtype=d.dtype).reshape(d.shape) % 6
        else:
            self.x = jnp.asarray(np.random.default_rng(0).uniform(size=d.shape), jnp.float64)
        params, state = jax.eval_shape(self.plain.init, RNG, self.x)
        self.params, self.state = filled(params, 1, None), filled(state, 2, 0.5)
        self.dense = jit(differentiated(functools.partial(self.loss, self.plain.apply)))

    def loss(self, apply, params, x):
        """A number that every result enters, and the results."""
        out = hki.materialize(apply(params, self.state, RNG, x))
        return scalar(out), out


@functools.lru_cache(maxsize=1)  # the kinds of one module are tested in a row
def case(name):
    """One for each module: its compiled dense function serves all kinds of parameters."""
    return Case(name)


def differentiated(loss):
    return jax.grad(loss, (0, 1), has_aux=True, allow_int=True)


@pytest.mark.parametrize("kind", IMPLICIT)
@pytest.mark.parametrize("name", MODULES)
def test_module(name, kind):
    c = case(name)
    parameters = list(hk.data_structures.traverse(c.params))
    make = IMPLICIT[kind] if any(kind == "zeros" or is_matrix(*p) for p in parameters) else dict
    apply = hki.transform_implicit(c.plain).apply

    @jit
    def implicit(params, x):
        trained, frozen = hki.partition(make(params))

        def loss(trained, x):
            return c.loss(apply, hki.combine(trained, frozen), x)

        return differentiated(loss)(trained, x), hki.materialize(hki.combine(trained, frozen))

    @jit
    def chained(params, by_dense):
        trained, frozen = hki.partition(make(params))
        dense = lambda trained: hki.materialize(hki.combine(trained, frozen))  # noqa: E731
        return jax.vjp(dense, trained)[1](by_dense)[0]

    ((by_params, by_x), out), dense = implicit(c.params, c.x)
    (by_dense, dense_by_x), expected = c.dense(dense, c.x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8), out, expected)
    grads, wanted = (by_params, by_x), (chained(c.params, by_dense), dense_by_x)
    for a, b in zip(floats(grads), floats(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
