"""Decoding with a cache: the logits of the whole sequence, a part at a time."""

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import decoding
import haiku_implicit as hki
from models import llama
from tests.tiers import few

CONFIG = llama.LlamaConfig(
    vocab_size=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=48
)
TOKENS = jax.random.randint(jax.random.key(1), (1, 9), 0, 61)


@pytest.fixture(scope="module")
def whole():
    model = hk.without_apply_rng(hk.transform(lambda t: llama.Llama(CONFIG)(t)))
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)
    return params, jax.jit(model.apply)(params, TOKENS)


# Relative to the logits. A cache of n bits rounds keys and values by up to half a step, which is
# 1/254 or 1/14 of a vector's largest element.
@pytest.mark.parametrize(
    "cache, tolerance", few([("f32", 1e-5), ("int8", 0.01), ("int4", 0.15)], ("int8", 0.01))
)
@pytest.mark.slow
def test_logits_are_those_of_the_whole_sequence(cache, tolerance, whole, never_dense):
    params, want = whole
    model = decoding.make_model(CONFIG, 12, cache)
    state = decoding.empty_cache(model)
    apply = jax.jit(model.apply)
    out = []
    for part in (TOKENS[:, :5], TOKENS[:, 5:7], TOKENS[:, 7:8], TOKENS[:, 8:]):
        logits, state = apply(params, state, None, part)
        out.append(logits)
    got = jnp.concatenate(out, axis=1)
    assert jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2)) < tolerance
    kinds = {
        type(x) for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, hki.ImplicitArray))
    }
    assert (hki.QuantizedCache in kinds) == (cache != "f32")
    held = sum(x.nbytes for x in jax.tree.leaves(state)) - 2 * 4  # without the two positions
    vectors, depth = 2 * 2 * 12 * 2, 8  # layers, keys and values, positions, heads
    assert held == vectors * {"f32": 4 * depth, "int8": depth + 4, "int4": depth // 2 + 4}[cache]


@pytest.mark.slow
def test_generation_is_greedy_and_leaves_the_state(whole):
    params, _ = whole
    model = decoding.make_model(CONFIG, 12, "int8")
    decoder, state = decoding.make_decoder(model), decoding.empty_cache(model)
    prompt = TOKENS[0, :4].tolist()
    tokens = decoder.generate(params, state, prompt, 5)
    assert tokens == decoder.generate(params, state, prompt, 5) and len(tokens) == 5
    assert decoder.generate(params, state, prompt, 1) == tokens[:1]
    dense = hk.without_apply_rng(hk.transform(lambda t: llama.Llama(CONFIG)(t))).apply
    logits = dense(params, jnp.asarray([prompt + tokens[:-1]]))[0, 3:]
    # Each is the most likely one, or as likely as the rounding of the cache leaves it.
    chosen = logits[jnp.arange(5), jnp.asarray(tokens)]
    assert (chosen > logits.max(-1) - 0.1).all()
