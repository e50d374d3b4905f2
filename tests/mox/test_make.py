"""`make_mox` and `eval_mox`: the expression of a model computes what the model does, bit for bit."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_implicit.mox import eval_mox, make_mox, to_transformed
from tests import mox_models
from tests.haiku_models import RNG, X, _scalar
from tests.mox_models import ALL, FROM_PARAMETERS, LARGE, MODELS, OF_HAIKU
from tests.tiers import few


def assert_same(got, wanted):
    """Equal trees with the same bits in them."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if not hasattr(y, "dtype"):
            assert x == y
            continue
        assert (x.shape, x.dtype, jnp.asarray(x).weak_type) == (
            y.shape,
            y.dtype,
            jnp.asarray(y).weak_type,
        )
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def is_array(x):
    return isinstance(x, np.ndarray | jax.Array)


class Case:
    """A model with its expression, both as functions of parameters, state and first argument."""

    def __init__(self, name):
        self.model = ALL[name]
        self.params, self.state = self.model.variables()
        first, *self.rest = self.model.args
        arrays, self.structure = jax.tree.flatten(first)
        self.arrays = list(map(jnp.asarray, arrays))
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x, self.model.args
        )
        self.mox = make_mox(self.model.transformed)(*shapes, **self.model.kwargs)

    def functions(self):
        evaluate = functools.partial(eval_mox, self.mox)
        return [self.of_arrays(apply) for apply in (self.model.transformed.apply, evaluate)]

    def of_arrays(self, apply):
        def fun(params, arrays):
            first = self.structure.unflatten(arrays)
            return apply(params, self.state, RNG, first, *self.rest, **self.model.kwargs)

        return fun


case = functools.lru_cache(maxsize=1)(Case)


def arrays_only(fun):
    return lambda *args: list(filter(is_array, jax.tree.leaves(fun(*args))))


def number(fun):
    return lambda *args: _scalar(arrays_only(fun)(*args))


def batches(arrays):
    return [jnp.stack([x, x[::-1]]) for x in arrays]


def scanned(fun):
    def loop(params, arrays):
        return jax.lax.scan(lambda c, x: (c, fun(params, x)), 0, batches(arrays))

    return loop


# Of a function of parameters and a list of arrays, one that JAX transforms.
WAYS = {
    "plain": lambda fun: fun,
    "grad": lambda fun: jax.grad(number(fun), (0, 1), allow_int=True),
    "vmap": lambda fun: lambda params, xs: jax.vmap(arrays_only(fun), (None, 0))(params, batches(xs)),
    "jvp": lambda fun: lambda params, xs: jax.jvp(
        lambda x: number(fun)(params, [x, *xs[1:]]), xs[:1], xs[:1]
    ),
    "hessian": lambda fun: lambda params, xs: jax.hessian(
        lambda t: number(fun)(params, [t * xs[0], *xs[1:]])
    )(1.0),
    "scan": lambda fun: scanned(arrays_only(fun)),
    "checkpoint": lambda fun: jax.grad(jax.checkpoint(number(fun)), allow_int=True),
}
# What JAX can't differentiate, and what it can't from the front.
NO_GRADIENT = {"Embed", "while_loop", "while_with_module_in_condition"}
NO_TANGENT = {"Embed", "custom_pullbacks"}
# JAX leaves out of a loop what its body only hands through, which it doesn't see through the calls.
KEPT_LOOPS = {f"Recurrent({core}, dynamic_unroll)" for core in ("IdentityCore", "ResetCore")}
SLOW_TO_TRACE = {"nets.ResNet", "nets.MobileNetV1", "nets.VectorQuantizer", *LARGE}
NAMES = [name for name in ALL if name not in KEPT_LOOPS]
CASES = [
    (name, way)
    for name in NAMES
    for way in WAYS
    if not (name in NO_GRADIENT and way in ("grad", "hessian", "checkpoint"))
    and not (name in NO_TANGENT and way in ("jvp", "hessian"))
    and not (name in LARGE and way not in ("plain", "grad"))
]


def program(fun, *args):
    return jax.jit(lambda *args: arrays_only(fun)(*args)).lower(*args).as_text()


@pytest.mark.parametrize("name, way", CASES)
def test_compiles_to_the_same(name, way):
    """What XLA is given is the same text, and so are the numbers."""
    c = case(name)
    original, evaluated = (program(WAYS[way](fun), c.params, c.arrays) for fun in c.functions())
    assert evaluated == original


@pytest.mark.parametrize("name", list(ALL))
def test_eager(name):
    c = case(name)
    original, evaluated = (fun(c.params, c.arrays) for fun in c.functions())
    assert_same(evaluated, original)
