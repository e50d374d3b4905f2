"""Trees that the tests of files save, and when two of them are the same."""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule, QuantRule, QuantStats
from tests.cases import CASES


def bits(x):
    """What tells an array from all others."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(x)), bits(jax.random.key_data(x))
    host = np.asarray(x)
    return str(host.dtype), host.shape, getattr(x, "weak_type", False), host.tobytes()


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert type(found) is type(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if isinstance(b, jax.ShapeDtypeStruct):
            assert a == b and a.weak_type == b.weak_type
        elif hasattr(b, "dtype"):
            assert bits(a) == bits(b)
        else:
            assert type(a) is type(b) and a == b


@hki.register_tree_type
class Registered(NamedTuple):
    step: int
    params: Any


def static_quantized():
    stats = QuantStats({"absmax": jnp.array([[2.0]])}, jnp.array(1.0), mode="fixed")
    return hki.StaticQuantized.of(CASES["int8"]().with_activation("int8"), stats)


def trained():
    rule = QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
    return hki.TrainedQuantized(jnp.ones((4, 4)), rules=(rule, QuantRule(weight_qtype="nf4")))


OTHERS = {
    "static": static_quantized,
    "trained by rules": trained,
    "blocks": lambda: hki.QuantizedBlocks.quantize(jnp.ones((3, 5)), "int8", 8),
    "rounded": lambda: hki.QuantizedMatrix.quantize(jnp.ones((32, 4), jnp.bfloat16), "mxfp4"),
    "batched": lambda: CASES["lora of int4"](batch=(3,)),
    "stacked": lambda: CASES["view of lora"].stacked(0, 2),
    "constant nan": lambda: hki.SymbolicConstant(float("nan"), shape=(2,), dtype=jnp.float32),
}


def made(name):
    return OTHERS[name]() if name in OTHERS else CASES[name]()


def mlp_params():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 4])(x)))
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))
    params = hki.quantize_params(params, dtype="int4", group_size=4)
    return model, hki.add_lora(params, jax.random.key(1), rank=2, alpha=4.0)


def as_jax(x):
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x
