"""Every module of Haiku with LoRA, quantized and zero parameters, compiled, against its dense twin.

In float64, because several modules normalize over a batch that is constant in some channel: what they
compute from rounding errors is then still small.
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
from tests.haiku_models import RNG, Case, with_lora
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("may_be_dense")
MODULES = {d.name: d for d in descriptors.ALL_MODULES}


def small_resnet():
    """One block of each kind (with a projection or without, strided or not), where Haiku has 16."""
    channels = dict(channels_per_group=(8, 16, 24, 32), initial_conv_config=dict(output_channels=8))
    return descriptors.Training(hk.nets.ResNet((2, 1, 1, 2), 10, **channels))


MODULES["nets.ResNet"] = MODULES["nets.ResNet"]._replace(create=small_resnet)


@pytest.fixture(autouse=True)
def float64():
    """64-bit numbers for the time of a test."""
    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable(True):
        yield


def is_matrix(module_name, name, value):
    """Whether a parameter can be LoRA or quantized: more than the default targets."""
    return jnp.issubdtype(value.dtype, jnp.floating) and value.ndim >= 2


IMPLICIT = {
    "lora": functools.partial(with_lora, rank=1, targets=is_matrix),
    "int8": functools.partial(hki.quantize_params, dtype="int8", targets=is_matrix),
    "int4": functools.partial(hki.quantize_params, dtype="int4", targets=is_matrix),
    "zeros": functools.partial(hki.zero_params, targets=lambda module_name, name, value: True),
}


def filled(shapes, seed, low):
    """Deterministic values for parameters, in ±1/sqrt(fan-in), or for state, above `low`."""
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


@functools.lru_cache(maxsize=1)  # the kinds of one module are tested in a row
def case(name):
    """A module of Haiku with parameters."""
    d = MODULES[name]
    plain = hk.transform_with_state(lambda x: d.create()(x))
    if jnp.issubdtype(d.dtype, jnp.integer):
        x = jnp.arange(math.prod(d.shape), dtype=d.dtype).reshape(d.shape) % 6
    else:
        x = jnp.asarray(np.random.default_rng(0).uniform(size=d.shape), jnp.float64)
    params, state = jax.eval_shape(plain.init, RNG, x)
    return Case(plain, filled(params, 1, None), filled(state, 2, 0.5), x)


# To a model int4 is what int8 is: some are enough.
OF_INT4 = {"Linear", "Conv2D", "ConvND", "Embed", "MultiHeadAttention", "nets.MLP"}
CASES = [(name, kind) for name in MODULES for kind in IMPLICIT if kind != "int4" or name in OF_INT4]
WIDEST = {"nets.ResNet", "nets.MobileNetV1"}  # of what the other modules are of
QUICK = [
    (name, kind) for name, kind in CASES if name in OF_INT4 or kind == "lora" and name not in WIDEST
]


@pytest.mark.every(4)
@pytest.mark.parametrize("name, kind", few(CASES, *QUICK))
def test_module(name, kind):
    c = case(name)
    parameters = list(hk.data_structures.traverse(c.params))
    # A module without such parameters is run as it is.
    make = IMPLICIT[kind] if any(kind == "zeros" or is_matrix(*p) for p in parameters) else dict
    c.check(make, tolerance=1e-6)
