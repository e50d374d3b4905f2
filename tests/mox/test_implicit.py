"""Module expressions with implicit parameters and state: what `transform_implicit` gives, bit for bit."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.mox import eval_mox, make_mox, to_transformed
from tests.haiku_models import RNG, X, noise, waves, with_lora
from tests.mox_models import ALL
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("may_be_dense")


def every_matrix(module_name, name, value):
    return value.ndim >= 2 and jnp.issubdtype(value.dtype, jnp.floating)


KINDS = {
    "lora": functools.partial(with_lora, rank=1, targets=every_matrix),
    "int8": functools.partial(hki.quantize_params, dtype="int8", targets=every_matrix),
}


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        assert x.tobytes() == y.tobytes()


def program(fun, *args):
    return jax.jit(lambda *args: fun(*args)).lower(*args).as_text()


def check(t, evaluate, params, state, x):
    """Eager, compiled and differentiated; the latter two as texts of programs."""
    implicit = hki.transform_implicit(t).apply
    assert_same(evaluate(params, state, RNG, x), implicit(params, state, RNG, x))
    trained, frozen = hki.partition(params)

    def gradients(apply):
        def loss(trained, x):
            out, _ = apply(hki.combine(trained, frozen), state, RNG, x)
            return sum(jnp.sin(y).sum() for y in jax.tree.leaves(hki.materialize(out)))

        return jax.grad(loss)

    for make in (lambda apply: lambda params, x: apply(params, state, RNG, x), gradients):
        of = params if make is not gradients else trained
        assert program(make(evaluate), of, x) == program(make(implicit), of, x)


NAMES = ["mlp", "shared_module", "layer_stack_of_blocks", "gru_in_remat", "attention", "lifted"]
NAMES += [
    "batched_modules",
    "grad_over_scan_and_remat",
    "transparent_layer_stack",
    "vmap",
    "switch",
]
CASES = [(name, kind) for name in NAMES for kind in KINDS]


@pytest.mark.parametrize("name, kind", few(CASES, ("layer_stack_of_blocks", "int8")))
def test_implicit_parameters(name, kind):
    model = ALL[name]
    params, state = model.variables()
    mox = make_mox(model.transformed)(*model.args)
    implicit = KINDS[kind](params)
    check(model.transformed, functools.partial(eval_mox, mox), implicit, state, *model.args)


def creates_lora(x):
    with hk.custom_creator(hki.lora_creator(rank=2, init=waves)):
        return hk.nets.MLP([5, 3])(x)


def test_creators_in_the_model():
    t = hki.transform_implicit(hk.transform_with_state(creates_lora))
    params, state = t.init(RNG, X)
    params = noise(params)
    mox = make_mox(t)(X)
    assert [x.type_name for x in mox.select(hk.Linear)] == ["Linear", "Linear"]
    new_params, _ = to_transformed(mox).init(RNG, X)
    assert isinstance(new_params["mlp/~/linear_0"]["w"], hki.LoRA)
    dense = hk.transform_with_state(creates_lora)
    check(dense, functools.partial(eval_mox, mox), params, state, X)


def remembers(x):
    keys = hk.get_state("keys", (8, 16), init=jnp.zeros)
    step = hk.get_state("step", (), jnp.int32, init=jnp.zeros)
    row = hk.Linear(16)(x)
    keys = jax.lax.dynamic_update_slice(keys, row, (step, 0))
    hk.set_state("keys", keys)
    hk.set_state("step", step + 1)
    return row @ keys.T


@pytest.mark.slow
def test_quantized_caches():
    t = hk.transform_with_state(remembers)
    x = X[:1]
    params, state = t.init(RNG, x)
    state = {
        "~": dict(state["~"], keys=hki.QuantizedCache.quantize(state["~"]["keys"], "int8", axis=-1))
    }
    mox = make_mox(t)(x)
    check(t, functools.partial(eval_mox, mox), params, state, x)
    _, new = eval_mox(mox, params, state, None, x)
    assert isinstance(new["~"]["keys"], hki.QuantizedCache)


def test_an_expression_made_from_implicit_parameters():
    """They are what they stand for: it is evaluated with others, too."""
    t = hk.transform_with_state(ALL["mlp"].fun)
    params, state = t.init(RNG, X)
    lora, zeros = with_lora(params, rank=1), hki.zero_params(params, targets=every_matrix)
    mox = make_mox(t)(X, params=lora, state=state)
    for other in (lora, zeros, params):
        check(t, functools.partial(eval_mox, mox), other, state, X)


def test_of_an_expression_again():
    """`to_transformed`, `transform_implicit` and `make_mox` compose."""
    t = hk.transform_with_state(ALL["mlp"].fun)
    params, state = t.init(RNG, X)
    lora = with_lora(params, rank=1)
    once = to_transformed(make_mox(t)(X))
    for again in (
        once,
        hki.transform_implicit(once),
        hk.without_apply_rng(hki.transform_implicit(t)),
    ):
        mox = make_mox(again)(X)
        assert [x.path for x in mox.select(hk.Module)] == [
            "mlp",
            "mlp/~/linear_0",
            "mlp/~/linear_1",
        ]
        keys = [RNG] if "rng" in mox.interface.leading else []
        wanted = hki.transform_implicit(t).apply(lora, state, RNG, X)
        assert_same(eval_mox(mox, lora, state, *keys, X), wanted)


def test_a_warm_cache_of_transform_implicit_hides_nothing():
    t = hki.transform_implicit(hk.transform(ALL["mlp"].fun))
    params = t.init(RNG, X)
    t.apply(params, None, X)
    t = hk.without_apply_rng(t)
    t.apply(params, X)
    mox = make_mox(t)(X)
    assert len(mox.select(hk.Linear)) == 2
    assert_same(eval_mox(mox, params, X), t.apply(params, X))
