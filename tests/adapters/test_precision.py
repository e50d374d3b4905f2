"""What is trained on weights of 16 bits: float32, computed in the dtype of the model."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from tests import adapter_cases

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 16)).astype(jnp.bfloat16)
W = (jax.random.normal(jax.random.key(1), (16, 12)) / 4).astype(jnp.bfloat16)
PARAMS = {"linear": {"w": W}}

METHODS = {m: own for m, own in adapter_cases.METHODS.items() if m not in ("locon", "vblora")}


def product(params, x=X):
    return hki.use_implicit_args(lambda p, x: x @ p["linear"]["w"])(params, x)


def trained_of(params):
    return jax.tree.leaves(hki.partition(params, False)[0])


@pytest.mark.every(12)
@pytest.mark.parametrize("base", ["bfloat16", "int8"])
@pytest.mark.parametrize("method", METHODS)
def test_trained_arrays_have_32_bits(method, base):
    params = PARAMS if base == "bfloat16" else hki.quantize_params(PARAMS, dtype="int8")
    tuned = hki.add_adapter(params, KEY, method, **METHODS[method])
    assert tuned["linear"]["w"].dtype == jnp.bfloat16
    assert {x.dtype.name for x in trained_of(tuned)} == {"float32"}
    out = jax.jit(product)(tuned)
    assert out.dtype == jnp.bfloat16
    # These turn or rescale the weight, in its dtype, or sum over its rows in two parts.
    if method not in ("boft", "oft", "dora", "trained_rows"):
        np.testing.assert_array_equal(
            np.asarray(out, np.float32), np.asarray(product(params), np.float32)
        )
    gradients = jax.grad(lambda p: product(p).astype(jnp.float32).sum(), allow_int=True)(tuned)
    assert {x.dtype.name for x in trained_of(hki.partition(gradients, False)[0])} == {"float32"}


def test_another_dtype_on_request():
    tuned = hki.add_lora(PARAMS, KEY, rank=2, dtype=jnp.bfloat16)
    assert {x.dtype.name for x in trained_of(tuned)} == {"bfloat16"}
    wide = hki.add_lora({"linear": {"w": W.astype(jnp.float32)}}, KEY, rank=2, dtype="bfloat16")
    assert {x.dtype.name for x in trained_of(wide)} == {"bfloat16"}
    with pytest.raises(TypeError, match="dtype: expected a floating dtype or None, got 'int8'"):
        hki.add_lora(PARAMS, KEY, rank=2, dtype="int8")


@pytest.mark.every(9)
@pytest.mark.parametrize("method", adapter_cases.METHODS)
def test_narrow_trained_arrays_are_not_rounded_again(method):
    """A float32 weight with bfloat16 arrays stands for what these stand for in float32."""
    shape = (3, 16, 12) if method == "locon" else (16, 12)
    params = {"linear": {"w": jax.random.normal(KEY, shape)}}
    tuned = hki.add_adapter(params, KEY, method, dtype="bfloat16", **adapter_cases.METHODS[method])
    trained, frozen = hki.partition(tuned, False)
    trained = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(KEY, x.shape).astype(x.dtype), trained
    )
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), trained)

    @hki.use_implicit_args
    def results(w):
        return w, w.sum(-2), w[jnp.array([2, 0, 1])]

    def of(trained):
        params = hki.combine(trained, frozen)
        params = hki.with_vector_bank(params) if method == "vblora" else params
        return hki.materialize(results(params["linear"]["w"]))

    found, expected = of(trained), of(wide)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_factors_and_weights_of_eight_bits_become_dense():
    """JAX does not promote float8 to other floats."""
    for w_dtype, dtype in (("float32", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")):
        params = {"linear": {"w": W.astype(w_dtype)}}
        w = hki.add_lora(params, KEY, rank=2, dtype=dtype)["linear"]["w"]
        w = w._replace(b=w.b + 0.5)
        expected = w.w.astype("float32") + w.a.astype("float32") @ w.b.astype("float32")
        found = hki.materialize(w)
        assert found.dtype == w_dtype
        bits = 2.0 ** -jnp.finfo(w_dtype).nmant
        np.testing.assert_allclose(found.astype("float32"), expected, rtol=bits, atol=bits / 8)


def test_a_bank_holds_the_dtype_of_the_products():
    bank = hki.AdapterBank.of(PARAMS, capacity=2, rank=2)
    tuned = hki.add_lora(PARAMS, KEY, rank=2)
    tuned = jax.tree.map(lambda x: x + 0.1 if x.dtype == jnp.float32 and x.ndim > 1 else x, tuned)
    bank = bank.put(1, hki.get_adapter(tuned))
    a, b, scale = bank.slots["linear/w"]
    assert (a.dtype, b.dtype, scale.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    for number, expected in enumerate((PARAMS, tuned)):
        found = product(bank.select(number))
        np.testing.assert_array_equal(
            *(np.asarray(x, np.float32) for x in (found, product(expected)))
        )


def losses(dtype, rate, steps=300):
    """The losses of LoRA on a bfloat16 model that learns another matrix."""
    target = W + (
        jax.random.normal(KEY, (16, 2)) @ jax.random.normal(jax.random.key(5), (2, 12)) / 8
    )
    x = jax.random.normal(jax.random.key(7), (64, 16)).astype(jnp.bfloat16)
    t = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(12, with_bias=False)(x)))
    model, params = hki.freeze(t, hki.add_lora(PARAMS, KEY, rank=2, dtype=dtype))
    optimizer = optax.adam(rate)
    wanted = x.astype(jnp.float32) @ target.astype(jnp.float32)

    def loss(p):
        return ((model.apply(p, x).astype(jnp.float32) - wanted) ** 2).mean()

    @jax.jit
    def step(run, _):
        params, state = run
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    (end, _), found = jax.lax.scan(step, (params, optimizer.init(params)), None, steps)
    moved = np.mean(np.asarray(end["linear"]["w_lora_a"] != params["linear"]["w_lora_a"]))
    return np.asarray(found), moved


def test_small_steps_are_not_rounded_away():
    """The curve of float32 factors beside that of factors in the dtype of the weights."""
    wide, moved = losses(None, 1e-5)
    narrow, moved_narrow = losses(jnp.bfloat16, 1e-5)
    assert moved == 1 and moved_narrow < 0.5
    gained, gained_narrow = wide[0] - wide[-1], narrow[0] - narrow[-1]
    assert gained > 0 and gained_narrow < gained


@pytest.mark.slow
@pytest.mark.parametrize("method", [hki.adapters.OFT, hki.adapters.BOFT])
def test_rotations_of_doubles_are_doubles(x64, method):
    draw = np.random.default_rng(0).normal
    w = jnp.asarray(draw(size=(8, 3)))
    new = method.create(w, KEY, block_size=4)
    dense = hki.materialize(new._replace(upper=jnp.asarray(draw(size=new.upper.shape))))
    assert dense.dtype == np.float64
    np.testing.assert_allclose((dense**2).sum(0), (w**2).sum(0), rtol=1e-13)


@pytest.mark.slow
def test_dora_of_doubles_has_the_lengths_of_doubles(x64):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)))
    new = hki.adapters.DoRA.create(w, KEY, rank=2)
    dense = hki.materialize(new._replace(b=new.b + 0.5))
    lengths = np.sqrt((np.asarray(dense) ** 2).sum(0))
    np.testing.assert_allclose(lengths, new.magnitude, rtol=1e-13)
