"""`make_mox` and `eval_mox`: the expression of a model computes what the model does, bit for bit."""

import functools
import re
import threading

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_implicit.mox import eval_mox, make_mox, to_transformed
from tests.haiku_models import RNG, X, _scalar
from tests.mox_models import ALL, LARGE
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
    """A model with its expression, both as functions of the variables and the first argument."""

    def __init__(self, name):
        self.model = ALL[name]
        self.variables = self.model.variables()
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
        def fun(variables, arrays):
            first = self.structure.unflatten(arrays)
            return apply(*variables, RNG, first, *self.rest, **self.model.kwargs)

        return fun


case = functools.lru_cache(maxsize=1)(Case)


def arrays_only(fun):
    return lambda *args: list(filter(is_array, jax.tree.leaves(fun(*args))))


def number(fun):
    return lambda *args: _scalar(arrays_only(fun)(*args))


def batches(arrays):
    return [jnp.stack([x, x[::-1]]) for x in arrays]


def scanned(fun):
    def loop(variables, arrays):
        return jax.lax.scan(lambda c, x: (c, fun(variables, x)), 0, batches(arrays))

    return loop


# Of a function of variables and a list of arrays, one that JAX transforms.
WAYS = {
    "plain": lambda fun: fun,
    "grad": lambda fun: jax.grad(number(fun), (0, 1), allow_int=True),
    "vmap": lambda fun: (
        lambda variables, xs: jax.vmap(arrays_only(fun), (None, 0))(variables, batches(xs))
    ),
    "jvp": lambda fun: (
        lambda variables, xs: jax.jvp(
            lambda x: number(fun)(variables, [x, *xs[1:]]), xs[:1], xs[:1]
        )
    ),
    "hessian": lambda fun: (
        lambda variables, xs: jax.hessian(lambda t: number(fun)(variables, [t * xs[0], *xs[1:]]))(
            1.0
        )
    ),
    "scan": lambda fun: scanned(arrays_only(fun)),
    "checkpoint": lambda fun: jax.grad(jax.checkpoint(number(fun)), allow_int=True),
}
# What JAX can't differentiate, and what it can't from the front.
NO_GRADIENT = {"Embed", "while_loop", "while_with_module_in_condition"}
NO_TANGENT = {"Embed", "custom_pullbacks"}
# JAX leaves a loop out whose body is the identity, which it doesn't see through a module's call.
KEPT_LOOPS = {f"Recurrent({core}, dynamic_unroll)" for core in ("IdentityCore", "ResetCore")}
CASES = [
    (name, way)
    for name in ALL
    for way in WAYS
    if name not in KEPT_LOOPS
    and not (name in NO_GRADIENT and way in ("grad", "hessian", "checkpoint"))
    and not (name in NO_TANGENT and way in ("jvp", "hessian"))
    and not (name in LARGE and way not in ("plain", "grad"))
]
# Those of each kind, and one way for each.
QUICK = {
    "dropout": "vmap",
    "returned_inputs": "hessian",
    "no_arguments": "scan",
    "methods_and_self": "plain",
    "structures": "grad",
    "ints_and_flags": "jvp",
    "layer_stack_of_blocks": "grad",
    "scan_with_state": "plain",
    "batched_modules": "grad",
    "grad_over_scan_and_remat": "checkpoint",
    "derivatives": "plain",
    "custom_tangents": "hessian",
    "custom_pullbacks": "grad",
    "while_with_module_in_condition": "plain",
    "branches_with_state": "vmap",
    "jitted_modules": "plain",
    "lifted": "plain",
    "constants": "plain",
}


def program(fun, *args):
    return jax.jit(lambda *args: arrays_only(fun)(*args)).lower(*args).as_text()


@pytest.mark.every(6)
@pytest.mark.parametrize("name, way", few(CASES, *QUICK.items()))
def test_compiles_to_the_same(name, way):
    """What XLA is given is the same text, and so are the numbers."""
    c = case(name)
    original, evaluated = (program(WAYS[way](fun), c.variables, c.arrays) for fun in c.functions())
    assert evaluated == original


# XLA fuses what a function of `jax.numpy` does, and each equation is a program of its own here.
FUSED = {"dropout", "derivatives"}
EAGER = ["returned_inputs", "structures", "integers_and_booleans", "constants", "shared_module"]
EAGER += ["numpy_arguments", "dataclass_modules"]


@pytest.mark.parametrize("name", few(ALL, *EAGER))
def test_eager(name):
    """Made from arrays: the same trees with the same bits in them."""
    m = ALL[name]
    params, state = m.variables()
    mox = make_mox(m.transformed)(*m.args, **m.kwargs)
    original = m.transformed.apply(params, state, RNG, *m.args, **m.kwargs)
    evaluated = eval_mox(mox, params, state, RNG, *m.args, **m.kwargs)
    if name in FUSED:
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
        jax.tree.map(close, evaluated, original)
    else:
        assert_same(evaluated, original)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_numbers(way):
    c = case("layer_stack_of_blocks")
    original, evaluated = (jax.jit(WAYS[way](fun))(c.variables, c.arrays) for fun in c.functions())
    assert_same(evaluated, original)


# --- around it ------------------------------------------------------------------------------------


def paths(mox):
    return [node.path for node in mox.select(hk.Module)]


PATHS = ["mlp", "mlp/~/linear_0", "mlp/~/linear_1"]


def counted_mlp():
    """A model, and a list that grows when it is traced."""
    traced = []

    def model(x):
        traced.append(x)
        return hk.nets.MLP([5, 3])(x)

    return hk.transform(model), traced


@pytest.mark.parametrize("warm", [True, False])
def test_functions_that_the_user_jitted(warm):
    """Their caches hide no modules, and get no marks."""
    t, traced = counted_mlp()
    params, jitted = t.init(RNG, X), jax.jit(t.apply)
    program = jax.jit(lambda *args: t.apply(*args)).lower(params, None, X).as_text()
    if warm:
        jitted(params, None, X)
    mox = make_mox(hk.Transformed(t.init, jitted))(X)
    assert paths(mox) == PATHS
    before = len(traced)
    assert_same(jitted(params, None, X), eval_mox(mox, params, None, X))
    assert len(traced) == before + (not warm)
    assert "module_mark" not in str(jax.make_jaxpr(jitted)(params, None, X))
    evaluated = jax.make_jaxpr(functools.partial(eval_mox, mox))(params, None, X)
    assert "module_mark" not in str(evaluated)
    anew = jax.jit(lambda *args: t.apply(*args)).lower(params, None, X).as_text()
    assert anew == program


def test_making_within_a_model():
    """Marks of one expression are not in another, and what is evaluated in a model is a part of it."""
    found = []

    def model(x):
        inner = hk.transform(ALL["mlp"].fun)
        mox = make_mox(inner)(x)
        found.append(paths(mox))
        params = hk.lift(inner.init, name="lifted")(hk.maybe_next_rng_key(), x)
        return eval_mox(mox, params, None, hk.Linear(4)(x))

    t = hk.transform(model)
    params = t.init(RNG, X)
    mox = make_mox(t)(X)
    assert set(map(tuple, found)) == {tuple(PATHS)}
    assert paths(mox) == ["lifted", "linear", *(f"lifted/{path}" for path in PATHS)]
    assert_same(eval_mox(mox, params, None, X), t.apply(params, None, X))


def test_evaluating_an_expression_is_made_again():
    m = ALL["layer_stack_of_blocks"]
    params, state = m.variables()
    once = make_mox(m.transformed)(*m.args)
    again = make_mox(to_transformed(once))(*m.args)
    assert [repr(x) for x in again.select(hk.Module)] == [repr(x) for x in once.select(hk.Module)]
    assert_same(eval_mox(again, params, state, RNG, X), eval_mox(once, params, state, RNG, X))


def test_an_exception_in_the_model_leaves_nothing_behind():
    class Failing(hk.Module):
        def __call__(self, x):
            raise RuntimeError("in the model")

    fails = hk.transform(lambda x: Failing()(hk.Linear(4)(x)))
    with pytest.raises(RuntimeError, match="in the model"):
        make_mox(fails)(X, params={"linear": {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}})
    t, _ = counted_mlp()
    params = t.init(RNG, X)
    assert "module_mark" not in str(jax.make_jaxpr(t.apply)(params, None, X))
    assert paths(make_mox(t)(X)) == PATHS


def test_threads():
    """Traces of one thread have no marks while another makes an expression."""
    t, _ = counted_mlp()
    params = t.init(RNG, X)
    seen = []

    def other():
        seen.append(str(jax.make_jaxpr(lambda *args: t.apply(*args))(params, None, X)))
        seen.append(paths(make_mox(t)(X)))

    def model(x):
        x = hk.Linear(4)(x)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return hk.Linear(3)(x)

    assert paths(make_mox(hk.transform(model))(X)) == ["linear", "linear_1"]
    assert "module_mark" not in seen[0]
    assert seen[1] == PATHS


def test_names_of_modules_in_profiles():
    """Operations have the names that they have in the original."""
    m = ALL["layer_stack"]
    params, state = m.variables()
    evaluate = functools.partial(eval_mox, make_mox(m.transformed)(X))

    def names(apply):
        lowered = jax.jit(lambda *args: apply(*args)).lower(params, state, None, X)
        text = lowered.as_text(debug_info=True)
        return sorted(re.findall(r'loc\("([^"]*linear/[^"]*)"', text))

    assert names(evaluate) == names(m.transformed.apply) != []
