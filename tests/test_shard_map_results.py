"""What `jax.shard_map` hands out: implicit where it is like an operand, and split as that is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from tests.devices import run_on_devices
from tests.random_arrays import normal

use = hki.use_implicit_args


def mesh():
    return jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def write(cache, x):
    return lax.dynamic_update_slice(cache, x, (0, 1, 0, 0))


def make_cache(name="int8", shape=(2, 4, 2, 8)):
    return hki.QuantizedCache.quantize(normal(shape), name, axis=-1)


@pytest.mark.combinations
@pytest.mark.parametrize("spec", [P(), P("i"), P(None, "i"), P(None, None, "i")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_cache_that_is_written_stays_one(spec, check_vma, never_dense):
    cache, x = make_cache(), jnp.ones((2, 1, 2, 8))
    specs = dict(mesh=mesh(), in_specs=(spec, spec), out_specs=spec, check_vma=check_vma)
    got = jax.jit(use(jax.shard_map(write, **specs)))(cache, x)
    assert isinstance(got, hki.QuantizedCache) and got.nbytes == cache.nbytes
    np.testing.assert_array_equal(hki.materialize(got), hki.materialize(use(write)(cache, x)))


@pytest.mark.slow
def test_what_is_like_no_operand_is_dense():
    """Of another shape, type or spec."""
    cache = make_cache()
    w = hki.QuantizedMatrix.quantize(normal((4, 4), 1), "int8")
    for fun, x, outs in (
        (lambda x: x[:1], cache, P()),
        (lambda x: x, cache, P("i")),
        (lambda x: x.T, w, P()),
    ):
        specs = dict(mesh=mesh(), in_specs=P(), out_specs=outs)
        with hki.materialization_report() as report, hki.materialization("allow"):
            got = use(jax.shard_map(fun, **specs))(x)
        assert isinstance(got, jax.Array) and [e.primitive for e, _ in report] == ["shard_map"]
        np.testing.assert_array_equal(got, fun(hki.materialize(x)))


PROGRAM = """
import itertools
import jax, jax.numpy as jnp, numpy as np, haiku_implicit as hki
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
use = hki.use_implicit_args
hki.materialization("allow").__enter__()
x = jax.random.normal(jax.random.key(0), (4, 4, 2, 8))

def rows(w):  # each device writes where it is
    at = lax.axis_index("i") * 2 + lax.axis_index("j")
    return w.at[:, 0].set(jnp.full((w.shape[0], *w.shape[2:]), at + 1.0))

def times(w):
    return w * (1.0 + lax.axis_index("i"))

made = {
    "cache": hki.QuantizedCache.quantize(x, "int8", axis=-1),
    "groups": hki.QuantizedCache.quantize(x, "int4", 4, axis=-1),
    "tensor": hki.QuantizedMatrix.quantize(x, "int8", "tensor"),
    "lora": hki.LoRA(x, jnp.ones((4, 4, 2, 1)), jnp.ones((4, 4, 1, 8))),
}
specs = [P(("i", "j")), P("i", "j"), P(None, "i", "j"), P("i", None, None, "j")]
kept = set()
cases = itertools.product(made.items(), specs, (rows, times))
for check, ((name, w), spec, fun) in zip(itertools.cycle([True, True, False]), cases):
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
    got, want = use(mapped)(w), mapped(hki.materialize(w))
    np.testing.assert_allclose(hki.materialize(got), want, rtol=0.02, atol=0.02)
    if isinstance(got, hki.ImplicitArray):
        kept.add(name)
assert kept >= {"cache", "groups", "lora"}, kept
"""


@pytest.mark.slow
def test_on_several_devices():
    """Leaves that all devices share would differ from device to device: then the result is dense."""
    assert run_on_devices(PROGRAM + 'print("done")', 4) == "done"
