"""Rotary positions and repeated heads: what EasyDeL's documentation says, and on implicit arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit import layers
from tests import random_arrays

B, N, S, D = 2, 3, 5, 8
use = hki.use_implicit_args


def normal(shape=(B, N, S, D), seed=0):
    return random_arrays.normal(shape, seed)


def tables(length, dtype=jnp.float32):
    angles = np.arange(length)[:, None] * 100.0 ** (-np.arange(0, D, 2) / D)
    angles = np.concatenate([angles, angles], -1)[None, None]
    return jnp.asarray(np.sin(angles), dtype), jnp.asarray(np.cos(angles), dtype)


OPERANDS = {
    "cache int8": lambda: hki.QuantizedCache.quantize(normal(), "int8", axis=-1),
    "cache int4": lambda: hki.QuantizedCache.quantize(normal(), "int4", axis=-1),
    "cache, groups": lambda: hki.QuantizedCache.quantize(normal(), "int4", 4, axis=-1),
    "matrix": lambda: hki.QuantizedMatrix.quantize(normal(), "int8"),
    "zeros": lambda: hki.Zeros(shape=(B, N, S, D), dtype=jnp.float32),
    "constant": lambda: hki.SymbolicConstant(0.5, shape=(B, N, S, D), dtype=jnp.float32),
    "lora": lambda: hki.LoRA(normal(), normal((B, N, S, 2), 1), normal((B, N, 2, D), 2)),
}


def rotary(x):
    return layers.apply_rotary_pos_emb(x, *tables(7))


FUNCTIONS = {
    "rotate_half": layers.rotate_half,
    "rotary": rotary,
    "bnsh": lambda x: layers.repeat_kv_bnsh(x, 3),
    "bsnh": lambda x: layers.repeat_kv_bsnh(x, 3),
}


def test_rotate_half():
    x = normal()
    want = np.concatenate([-x[..., D // 2 :], x[..., : D // 2]], -1)
    np.testing.assert_array_equal(layers.rotate_half(x), want)
    # Twice is half of a turn.
    np.testing.assert_array_equal(layers.rotate_half(layers.rotate_half(x)), -x)


def test_rotary_turns_pairs_by_the_angle_of_their_position():
    x = np.asarray(normal())
    sin, cos = tables(7)
    pairs = x[..., : D // 2] + 1j * x[..., D // 2 :]
    turn = np.asarray(cos + 1j * sin)[:, :, :S, : D // 2]
    got = layers.apply_rotary_pos_emb(jnp.asarray(x), sin, cos)
    want = np.concatenate([(pairs * turn).real, (pairs * turn).imag], -1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_rotary_products_depend_on_distance_alone():
    q, k = normal((1, 1, 1, D)), normal((1, 1, 1, D), 1)
    at = lambda x: layers.apply_rotary_pos_emb(jnp.repeat(x, 9, axis=2), *tables(9))  # noqa: E731
    scores = np.einsum("bhsd,bhtd->st", at(q), at(k))
    for i in range(-8, 9):
        np.testing.assert_allclose(np.ptp(np.diagonal(scores, i)), 0, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_are_those_of_promotion(dtype):
    x = normal().astype(jnp.bfloat16)
    assert layers.apply_rotary_pos_emb(x, *tables(S, dtype)).dtype == dtype
    assert layers.rotate_half(x).dtype == jnp.bfloat16
    assert layers.repeat_kv_bnsh(x, 2).dtype == jnp.bfloat16


@pytest.mark.parametrize("count", [1, 2, 4])
def test_repeated_heads(count):
    x = normal()
    np.testing.assert_array_equal(layers.repeat_kv_bnsh(x, count), np.repeat(x, count, 1))
    np.testing.assert_array_equal(layers.repeat_kv_bsnh(x, count), np.repeat(x, count, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: layers.repeat_kv_bnsh(x[0], 2), r"x: expected four axes .* \[3, 5, 8\]"),
        (lambda x: layers.repeat_kv_bsnh(x[0], 2), r"x: expected four axes"),
        (lambda x: layers.repeat_kv_bnsh(x, 0), "n_rep: expected at least 1, got 0"),
        (lambda x: layers.rotate_half(x[..., :3]), r"x: expected .* even .* \[2, 3, 5, 3\]"),
        (lambda x: layers.rotate_half(x[0, 0, 0, 0]), "x: expected .* even"),
        (lambda x: layers.apply_rotary_pos_emb(x, *tables(4)), "sin_: expected at least the 5"),
        (lambda x: layers.apply_rotary_pos_emb(x[0], *tables(7)), "tensor: expected four axes"),
        (lambda x: layers.apply_rotary_pos_emb(x, x, x[0]), "cos_: expected four axes"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(normal())


@pytest.mark.every(2)
@pytest.mark.combinations
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("operand", OPERANDS)
def test_on_implicit_operands(operand, function, may_be_dense):
    x, fun = OPERANDS[operand](), FUNCTIONS[function]
    dense = hki.materialize(x)
    want = fun(dense)
    close = lambda a, b: np.testing.assert_allclose(  # noqa: E731
        hki.materialize(a), b, rtol=1e-5, atol=1e-6
    )
    close(fun(x), want)  # from outside of a model
    close(use(fun)(x), want)
    close(jax.jit(use(fun))(x), want)
    stacked = jax.tree.map(lambda y: jnp.stack([y, y]), x)
    if operand not in ("zeros", "constant"):  # their shape is not that of leaves
        want_both = jnp.stack([want, want])
        close(jax.vmap(lambda x: hki.materialize(use(fun)(x)))(stacked), want_both)
        loop = use(lambda xs: jax.lax.scan(lambda c, x: (c, fun(x)), 0.0, xs)[1])
        close(loop(stacked), want_both)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_with_respect_to_factors(function, may_be_dense):
    x, fun = OPERANDS["lora"](), FUNCTIONS[function]
    loss = lambda x: jnp.sum(jnp.sin(fun(x)))  # noqa: E731
    got = jax.grad(use(loss))(x)
    whole = jax.grad(loss)(hki.materialize(x))
    np.testing.assert_allclose(got.a, whole @ jnp.swapaxes(x.b, -1, -2), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.b, jnp.swapaxes(x.a, -1, -2) @ whole, rtol=1e-4, atol=1e-5)


@pytest.mark.combinations
@pytest.mark.parametrize("operand", ["cache int8", "cache int4", "zeros", "lora", "matrix"])
@pytest.mark.parametrize("function", ["bnsh", "bsnh"])
def test_repeated_operands_stay_implicit(operand, function, never_dense):
    x = OPERANDS[operand]()
    got = FUNCTIONS[function](x)
    assert isinstance(got, hki.ImplicitArray)
    if operand.startswith("cache"):
        assert got.nbytes == x.nbytes


def test_zeros_stay_zeros(never_dense):
    zeros = OPERANDS["zeros"]()
    for fun in FUNCTIONS.values():
        assert isinstance(fun(zeros), hki.Zeros)


@pytest.mark.parametrize("function", ["bnsh", "bsnh"])
def test_attention_over_a_repeated_cache_copies_no_codes(function):
    """Of the whole attention with a quantized cache, XLA's room for values is that of the scores."""
    heads, time, depth, group = 2, 1024, 64, 8
    shape = (1, heads, time, depth) if function == "bnsh" else (1, time, heads, depth)
    cache = [hki.QuantizedCache.quantize(normal(shape, i), "int8", axis=-1) for i in (1, 2)]
    axes = "bhsd" if function == "bnsh" else "bshd"

    def attend(q, k, v):
        repeat = getattr(layers, f"repeat_kv_{function}")
        k, v = repeat(k, group), repeat(v, group)
        weights = jax.nn.softmax(jnp.einsum(f"bhtd,{axes}->bhts", q, k))
        return jnp.einsum(f"bhts,{axes}->bhtd", weights, v)

    q = normal((1, heads * group, 1, depth))
    program = jax.jit(use(attend)).lower(q, *cache).compile()
    repeated = group * cache[0].codes.nbytes
    assert program.memory_analysis().temp_size_in_bytes < repeated / 2
    np.testing.assert_allclose(program(q, *cache), attend(q, *hki.materialize(cache)), atol=1e-5)
