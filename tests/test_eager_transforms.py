"""Constructors and gradients inside of transformations that run at once, without `jax.jit`."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from tests.random_arrays import normal
from tests.tiers import few

use, dense = hki.use_implicit_args, hki.materialize
dot = use(jnp.matmul)
KEY = jax.random.key(0)
FULL = dict(shape=(8, 8), dtype=jnp.float32)
MODEL = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(8)(jnp.tanh(x))))


def params(w):
    return {"l": {"w": w, "b": jnp.linspace(0.0, 1.0, 8)}}


def loss(q, x):
    return jnp.sum(use(lambda q, x: jnp.tanh(x @ q["l"]["w"] + q["l"]["b"]))(q, x) ** 2)


def quantized(w, *options):
    return dense(hki.QuantizedMatrix.quantize(w, *(options or ["int8"])))


def with_lora(w):
    return hki.add_lora(params(w), KEY, rank=2)


def in_int8(w):
    return hki.quantize_params(params(w), dtype="int8")


def of_b(gradients, x):
    return gradients["l"]["b"] * jnp.ones_like(x)


# Functions of inputs and a weight, and the same with dense arrays alone.
PROGRAMS = {
    "Zeros": (
        lambda x, w: dot(x, w) + dense(use(jnp.cos)(dot(x, hki.Zeros(**FULL)))),
        lambda x, w: x @ w + 1,
    ),
    "SymbolicConstant": (
        lambda x, w: dense(dot(x, use(jnp.exp)(hki.SymbolicConstant(0.5, **FULL)))),
        lambda x, w: x @ jnp.full((8, 8), jnp.exp(0.5)),
    ),
    "zero_params": (
        lambda x, w: (
            dot(x, w) + dense(use(jnp.cos)(hki.zero_params(params(w), targets="l/b")["l"]["b"]))
        ),
        lambda x, w: x @ w + 1,
    ),
    "quantize_params": (lambda x, w: dot(x, in_int8(w)["l"]["w"]), lambda x, w: x @ quantized(w)),
    "int4": (
        lambda x, w: dot(x, hki.quantize_params(params(w), dtype="int4", group_size=4)["l"]["w"]),
        lambda x, w: x @ quantized(w, "int4", 4),
    ),
    "add_lora": (lambda x, w: dot(x, with_lora(w)["l"]["w"]), lambda x, w: x @ w),
    "QLoRA": (
        lambda x, w: dot(x, hki.add_lora(in_int8(w), KEY, rank=2)["l"]["w"]),
        lambda x, w: x @ quantized(w),
    ),
    "DoRA": (
        lambda x, w: dot(x, hki.add_adapter(params(w), KEY, "dora", rank=2)["l"]["w"]),
        lambda x, w: x @ w,
    ),
    "grad": (
        lambda x, w: of_b(hki.grad(loss)(with_lora(w), x), x),
        lambda x, w: of_b(jax.grad(loss)(params(w), x), x),
    ),
    "value_and_grad": (
        lambda x, w: of_b(hki.value_and_grad(loss)(in_int8(w), x)[1], x),
        lambda x, w: of_b(jax.grad(loss)(params(quantized(w)), x), x),
    ),
    "transform_implicit": (
        lambda x, w: hki.transform_implicit(MODEL).apply({"linear": in_int8(w)["l"]}, x),
        lambda x, w: MODEL.apply({"linear": dense(in_int8(w)["l"])}, x),
    ),
    "init": (
        lambda x, w: x @ hki.transform_implicit(MODEL).init(KEY, x)["linear"]["w"],
        lambda x, w: x @ MODEL.init(KEY, x)["linear"]["w"],
    ),
}


def in_shard_map(fun, **options):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"), **options)


def in_scan(fun):
    def run(x, w):
        with jax.disable_jit():
            return jax.lax.scan(lambda c, x: (c, fun(x, w)), None, x[None])[1][0]

    return run


WAYS = {
    "shard_map": in_shard_map,
    "shard_map without check_vma": lambda f: in_shard_map(f, check_vma=False),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[None], w)[0],
    "vmap of the weight": lambda f: lambda x, w: jax.vmap(f, (None, 0))(x, w[None])[0],
    "grad": lambda f: jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2)),
    "scan": in_scan,
    "checkify": lambda f: lambda *args: checkify.checkify(f, checkify.float_checks)(*args)[1],
    "pmap": lambda f: lambda x, w: jax.pmap(f, in_axes=(0, None))(x[None], w)[0],
}


QUICK = [(name, "shard_map") for name in ("Zeros", "zero_params", "value_and_grad")]


@pytest.mark.every(3)
@pytest.mark.filterwarnings("ignore:.*pmap:DeprecationWarning")
@pytest.mark.parametrize(
    "program, way", few([(program, way) for program in PROGRAMS for way in WAYS], *QUICK)
)
def test_what_runs_at_once(program, way, may_be_dense):
    x, w = normal((4, 8), 1), jax.random.normal(KEY, (8, 8)) / 2
    got, want = (WAYS[way](f)(x, w) for f in PROGRAMS[program])
    assert jnp.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)  # products in another order
