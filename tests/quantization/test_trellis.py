"""Trellis codes in a rotated matrix: codes, encoders, products and options, beside the contract for every type."""

import functools
import pickle

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.adapters import Hadamard, Rotated
from haiku_implicit.core import serialization
from haiku_implicit.params.trees import digests
from haiku_implicit.quantized.cpu import build, native
from haiku_implicit.quantized.types import trellis
from tests.dense_twin import same_without_dense
from tests.devices import run_on_devices
from tests.native_targets import TARGETS, with_compiler
from tests.random_arrays import normal

BITS = pytest.mark.parametrize("bits", [2, 3, 4])


def made(bits=3, shape=(64, 96), axis=-1, dtype=None, seed=0):
    w = hki.TrellisMatrix.encode(
        normal(shape if axis == -1 else (*shape[:-2], *shape[:-3:-1]), seed), bits
    )
    w = w._replace(axis=axis, shape=None)
    return w if dtype is None else w._replace(dtype=dtype)


def quantized(dtype="trellis3", shape=(96, 64), seed=0, **options):
    return hki.quantize_params({"m": {"w": normal(shape, seed)}}, dtype=dtype, **options)["m"]["w"]


# --- codes ---------------------------------------------------------------------------------------


@BITS
@pytest.mark.parametrize("length", [4, 576])
def test_decoded_by_the_definition(bits, length):
    """Each number is of the 12 bits from its first on, in a circle of bits for each sequence."""
    count, steps = trellis.sequences(length)
    lanes = count * steps // 16
    words = np.random.default_rng(0).integers(0, 2**16, (3, bits * lanes), np.uint16)
    found = hki.materialize(hki.TrellisMatrix(jnp.asarray(words), length, bits))
    factor, mixed, bias, _ = trellis.CODES[bits]
    expected = np.empty((3, 16, lanes))
    for row, numbers in zip(words, expected, strict=True):
        for circle in range(count):
            own = slice(circle * steps // 16, (circle + 1) * steps // 16)
            stream = row.reshape(bits, lanes)[:, own].T.tobytes()
            stream = int.from_bytes(stream + stream, "little")
            for i in range(steps):
                window = (stream >> i * bits & 4095).to_bytes(2, "little")
                pair = (int.from_bytes(window, "little") * factor % 2**16).to_bytes(2, "little")
                if mixed:
                    pair = [(x + y + 1) // 2 for x, y in zip(pair, window, strict=True)]
                numbers[i % 16, own.start + i // 16] = (sum(pair) - bias) / 64
    np.testing.assert_array_equal(found, expected.reshape(3, -1)[:, :length])


@BITS
def test_error_of_normal_numbers(bits):
    """Near the bound 2^-bits, where codes for single numbers have .34, .19 and .10."""
    w = normal((16, 512))
    rms = trellis.CODES[bits].rms
    q = hki.TrellisMatrix.encode(w * rms, bits)
    assert q.nbytes * 8 == bits * w.size
    error = float(jnp.std(hki.materialize(q) / rms - w))
    assert error < {2: 0.276, 3: 0.142, 4: 0.074}[bits]


@pytest.mark.every(3)
@with_compiler
@pytest.mark.parametrize(("bits", "width"), [(2, 32), (3, 384), (4, 32)])
def test_both_encoders_find_the_same_codes(bits, width):
    steps = trellis.sequences(width)[1]
    w, factor = normal((2, 5, width)), jnp.triu(normal((2, 5, 5), 1)) + 3 * jnp.eye(5)
    encode = jax.jit(trellis.encode, static_argnums=(2, 3))
    for own in (factor, jnp.zeros((2, 0, 0))) if bits == 3 else (factor,):
        found = jax.jit(native.trellis_encoder(bits, steps))(w, own)
        np.testing.assert_array_equal(found, encode(w, own, bits, steps))


def test_encoding_under_transformations():
    w = normal((2, 8, 64))
    encode = functools.partial(hki.TrellisMatrix.encode, bits=2)
    whole = encode(w)
    for found in (jax.jit(encode)(w), jax.vmap(encode)(w)):
        np.testing.assert_array_equal(found.words, whole.words)
    assert jax.eval_shape(encode, w).shape == w.shape


# --- operations ----------------------------------------------------------------------------------


@pytest.mark.combinations
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("equation", ["bn,nm->bm", "nm,bm->nb", "sbn,nm->sbm", "ab,nm->abnm"])
def test_products(axis, equation):
    w = made(axis=axis)
    x, _ = equation.split("->")[0].replace("nm", "").strip(",").split(",") + [""]
    sizes = dict(n=64, m=96, b=3, s=2, a=2)
    y = normal([sizes[i] for i in x], 1)
    pair = (w, y) if equation.startswith("nm") else (y, w)
    same_without_dense(functools.partial(jnp.einsum, equation), *pair, rtol=1e-5)


@pytest.mark.slow
def test_products_in_blocks():
    """A large matrix is decoded block after block, also for the gradient."""
    w, x = made(4, (1024, 288)), normal((2, 1024), 1)

    def loss(x, w):
        return jnp.sin(x @ w).sum()

    same_without_dense(lambda x, w: (x @ w, x @ w @ w.T), x, w, rtol=1e-5)
    same_without_dense(jax.grad(loss), x, w, rtol=1e-4)
    program = jax.jit(hki.use_implicit_args(jax.grad(loss))).lower(x, w).compile()
    assert program.memory_analysis().temp_size_in_bytes < w.size * 4 / 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_stacked_layers(dtype):
    w, x = made(3, (3, 32, 32), dtype=dtype), normal((2, 32), 1).astype(dtype)
    run = lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]  # noqa: E731
    same_without_dense(run, x, w, rtol=1e-5 if dtype == jnp.float32 else 2e-2)
    over = lambda x, w: jax.vmap(lambda w: x @ w)(w)  # noqa: E731
    same_without_dense(over, x, w, rtol=1e-5 if dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize("axis", [-1, -2])
def test_parts(axis):
    w, ids = made(3, (64, 320), axis), jnp.array([[0, 63, 5], [-1, 64, 31]])
    rows = (lambda w: w[ids], lambda w: jnp.take(w, ids, axis=0), lambda w: w[:, ids])
    functions = (*rows, lambda w: w.T, lambda w: jnp.take(w, ids, axis=1, mode="clip"))
    run = jax.jit(lambda w: [fun(w) for fun in functions])
    dense = hki.materialize(w)
    with hki.materialization("error"):
        found = hki.materialize(hki.use_implicit_args(run)(w))
    jax.tree.map(np.testing.assert_array_equal, found, run(dense))
    # (Older versions of JAX index every other column by a gather.)
    every_other = functools.partial(
        jax.lax.slice_in_dim, start_index=8, limit_index=24, stride=2, axis=1
    )
    cut = (lambda w: w[8:24]) if axis == -1 else every_other
    with hki.materialization("error"):
        part = hki.use_implicit_args(cut)(w)
    assert isinstance(part, hki.TrellisMatrix)
    np.testing.assert_array_equal(hki.materialize(part), cut(dense))


def test_casts_are_exact():
    w = made(4)
    for dtype in (jnp.bfloat16, jnp.float16):
        narrow = hki.use_implicit_args(lambda w, dtype=dtype: w.astype(dtype))(w)
        assert isinstance(narrow, hki.TrellisMatrix) and narrow.dtype == dtype
        np.testing.assert_array_equal(narrow.materialize().astype(jnp.float32), w.materialize())


# --- kernels -------------------------------------------------------------------------------------


@with_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_other_targets(target, monkeypatch):
    assert build.available()  # under its own prefix
    prefix = f"{build.PREFIX}trellis_{target}_"
    build.register(prefix, TARGETS[target])
    monkeypatch.setattr(build, "PREFIX", prefix)
    for bits in (2, 3, 4):
        for activation in (None, "int8"):
            test_kernels(bits, activation)


def rounded(x):
    """The nearest codes of 8 bits, by NumPy, times their scales: those of rows."""
    largest = np.abs(x).max(-1, keepdims=True)
    scale = np.maximum(largest * np.float32(1 / 127.5), np.float32(2.0**-63))
    codes = np.clip(np.rint(x * (1 / scale)), -128, 127)
    return codes.astype(np.float64) * scale


@with_compiler
@BITS
@pytest.mark.parametrize("activation", [None, "int8"])
def test_kernels(bits, activation):
    """Products with few rows, and decoded numbers for many, beside the definition."""
    assert build.available()
    rng = np.random.default_rng(bits)
    shapes = (5, 4, 1), (17, 96, 3), (33, 576, 14), (70, 768, 1), (64, 512, 2), (9, 32, 40)
    for rows, length, m in shapes:
        count, steps = trellis.sequences(length)
        words = rng.integers(0, 2**16, (2, rows, count * steps * bits // 16), np.uint16)
        decode = functools.partial(trellis.decode, bits=bits, steps=steps)
        kernel = functools.partial(native.trellis_decode, bits=bits, steps=steps)
        numbers = jax.jit(decode)(words)
        np.testing.assert_array_equal(jax.jit(kernel)(words), numbers)
        dense = np.asarray(numbers[..., :length], np.float64)
        for axis in (-1, -2):
            w = hki.TrellisMatrix(jnp.asarray(words), length, bits, axis, activation)
            run = functools.partial(native.native_matmul, q=w, order=(0, 1, 2), dtype=jnp.float32)
            x = rng.standard_normal((2, m, rows if axis == -1 else length)).astype(np.float32)
            x[:, -1] *= 1e-12
            multiplied = x if activation is None else rounded(x)
            wanted = multiplied @ (dense if axis == -1 else np.swapaxes(dense, -1, -2))
            size = np.abs(wanted).max(-1, keepdims=True)
            np.testing.assert_allclose(jax.jit(run)(x) / size, wanted / size, atol=1e-6)


@pytest.mark.parametrize("axis", [-1, -2])
def test_activations_of_any_size(axis):
    """Each row of activations has its own scale, and infinities and NaNs stay in their rows."""
    w = made(axis=axis)
    x = normal((8, 64), 1) * jnp.array([1e-25, 1, 1e25, 0, 1, 1, 1e-33, 1e36])[:, None]
    x = x.at[4, 3].set(jnp.inf).at[5, 7].set(jnp.nan)
    found = np.asarray(jax.jit(hki.use_implicit_args(jnp.matmul))(x, w), np.float64)
    with np.errstate(invalid="ignore"):
        wanted = np.asarray(x, np.float64) @ np.asarray(hki.materialize(w), np.float64)
    for row, of_dense in zip(found, wanted, strict=True):
        size = np.abs(of_dense[np.isfinite(of_dense)]).max(initial=0)
        np.testing.assert_allclose(row, of_dense, rtol=1e-6, atol=2e-7 * size)


def test_words_of_an_earlier_code():
    with pytest.raises(TypeError, match="uint16, got uint32, of an earlier code: encode"):
        hki.TrellisMatrix(jnp.zeros((4, 6), jnp.uint32), 64, 3)


def test_words_that_a_cast_of_the_tree_changed():
    q = hki.TrellisMatrix.encode(normal((4, 64)), 3)
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), q)
    with pytest.raises(
        TypeError, match="'trellis3' are uint16, and cannot be read as bfloat16.*#cast"
    ):
        hki.materialize(cast)


@pytest.mark.parametrize("axis", [-1, -2])
def test_words_of_an_earlier_code_that_no_constructor_has_seen(axis):
    """As in a pickle of an earlier version: half as many words, of 32 bits."""
    w = made(axis=axis)
    earlier = lambda words: np.asarray(words).view(np.uint32)  # noqa: E731
    leaves, treedef = jax.tree.flatten(w)
    kept = pickle.dumps(jax.tree.unflatten(treedef, map(earlier, leaves)))
    multiply = jax.jit(hki.use_implicit_args(jnp.matmul))
    for use in (hki.materialize, lambda w: multiply(jnp.ones((2, 64)), w), lambda w: w.shape):
        with pytest.raises(TypeError, match="uint16, got uint32, of an earlier code: encode"):
            use(pickle.loads(kept))


@pytest.mark.parametrize("rows", [1, 33])
def test_programs_call_kernels_unless_they_are_exported(rows):
    w, x = made(3, (64, 96)), normal((rows, 64), 1)
    product = jax.jit(hki.use_implicit_args(lambda x, w: x @ w))
    kernel = build.PREFIX + ("TrellisMatmul" if rows == 1 else "TrellisDecode")
    assert (kernel in product.lower(x, w).as_text()) == build.available()
    exported = jax.export.export(product)(x, w)
    assert build.PREFIX not in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize()).call(x, w)
    np.testing.assert_allclose(again, product(x, w), rtol=1e-5, atol=1e-5)


def test_without_kernels(monkeypatch):
    w, x = made(2, (64, 96)), normal((2, 64), 1)
    monkeypatch.setenv("HAIKU_IMPLICIT_NATIVE", "0")
    product = jax.jit(hki.use_implicit_args(lambda x, w: x @ w))
    assert build.PREFIX not in product.lower(x, w).as_text()
    np.testing.assert_allclose(product(x, w), x @ w.materialize(), rtol=1e-5, atol=1e-5)


def test_summary_names_the_bits():
    row = hki.summary({"m": {"w": quantized("trellis4")}}).rows[0]
    assert row.kind.endswith("TrellisMatrix trellis4")


# --- rotations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 6, 64, 96])
def test_hadamard_is_a_rotation(length):
    rotation = Hadamard.random(length)
    dense = np.asarray(jax.jit(hki.materialize)(rotation))
    np.testing.assert_allclose(dense @ dense.T, np.eye(length), atol=1e-6)
    np.testing.assert_allclose(np.abs(dense).max(), rotation.block**-0.5, rtol=1e-6)
    x = normal((3, length))
    same_without_dense(lambda x, r: (x @ r, r @ x.T, x @ r.T), x, rotation, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "dtype", "tolerance"),
    [(4, "float32", 1e-6), (8, "float32", 1e-6), (16, "bfloat16", 1e-2), (32, "float16", 1e-3)]
    + [(64, "float32", 1e-6), (128, "float32", 1e-6), (256, "float32", 1e-6)],
)
def test_rotations_by_the_kernel(block, dtype, tolerance):
    """All numbers of passes; products, transposes, gradients and batches."""
    x, rotation = normal((2, 5, 3 * block)).astype(dtype), Hadamard.random(3 * block)

    def run(x):
        gradient = jax.grad(lambda x: (rotation.times(x[0]) ** 2 * jnp.arange(3 * block)).sum())
        back = rotation.transposed()
        mapped = [jax.vmap(r.times, 1, 1)(x) for r in (rotation, back)]
        return *mapped, gradient(x.astype(jnp.float32))

    program = jax.jit(run).lower(x)
    assert ("haiku_implicit_Hadamard" in program.as_text()) == (block >= 8 and build.available())
    both = [[(i & j).bit_count() for j in range(block)] for i in range(block)]
    matrix = np.kron(np.eye(3), (-1.0) ** np.array(both)) / block**0.5
    first = np.random.RandomState(0).randint(0, 256, -(-3 * block // 8)).astype(np.uint8)
    signs = 1 - 2.0 * np.unpackbits(first, bitorder="little")[: 3 * block]
    matrix = signs[:, None] * matrix
    wide = np.asarray(x, np.float64)
    gradient = np.zeros_like(wide)
    gradient[0] = 2 * wide[0] @ matrix * np.arange(3 * block) @ matrix.T
    for got, want in zip(
        program.compile()(x), (wide @ matrix, wide @ matrix.T, gradient), strict=True
    ):
        atol = tolerance * np.abs(want).max()
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=atol)
    np.testing.assert_array_equal(rotation.times(x[0]), jax.jit(rotation.times)(x[0]))


def test_rotations_of_implicit_inputs_stay_implicit():
    rotation, zeros = Hadamard.random(64), hki.Zeros(shape=(4, 64), dtype=jnp.float32)
    lora = hki.LoRA(normal((8, 64)), normal((8, 2)), normal((2, 64)))
    with hki.materialization("error"):
        assert isinstance(hki.use_implicit_args(rotation.times)(zeros), hki.Zeros)
        got = hki.use_implicit_args(lambda x: rotation.times(x) @ jnp.eye(64))(lora)
    np.testing.assert_allclose(got, rotation.times(lora.materialize()), atol=1e-5)


def test_products_without_rows():
    w = hki.quantize_params({"linear": {"w": normal((128, 32))}}, dtype="trellis3")["linear"]["w"]
    multiply = hki.use_implicit_args(jnp.matmul)
    assert multiply(jnp.ones((0, 128)), w).shape == (0, 32)
    assert jax.jit(multiply)(jnp.ones((2, 0, 128)), w).shape == (2, 0, 32)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((254, 64), dict(dtype="trellis3"), r"fewer than 8 inputs .*a/w"),
        ((255, 64), dict(dtype="int4", rotate=True), r"fewer than 8 inputs .*a/w"),
        ((256, 4), dict(dtype="trellis4"), r"do not get smaller.*multiple of 32.*a/w"),
    ],
)
def test_warns_of_weights_that_gain_nothing(shape, options, message):
    with pytest.warns(UserWarning, match=message) as caught:
        hki.quantize_params({"a": {"w": normal(shape)}, "b": {"w": normal((64, 64))}}, **options)
    assert len(caught) == 1 and "b/w" not in str(caught[0].message)


def test_rotation_spreads_outliers():
    """One large input spoils the others' scale without a rotation."""
    w = normal((128, 32)).at[7].mul(30)
    params = {"m": {"w": w}}

    def error(**options):
        new = hki.quantize_params(params, dtype="int4", **options)["m"]["w"]
        return float(jnp.linalg.norm(hki.materialize(new) - w))

    assert error(rotate=True) < 0.5 * error()


def test_rotated_products():
    w, x = quantized(), normal((5, 96), 1)
    assert isinstance(w, Rotated) and w.nbytes * 8 / w.size < 3 + 16 / 96 + 1 / 64 + 0.01
    same_without_dense(lambda x, w: (x @ w, x @ w @ w.T, x @ -w), x, w, rtol=1e-5)
    same_without_dense(jax.grad(lambda x, w: jnp.sin(x @ w).sum()), x, w, rtol=1e-4)


# --- rounded activations -------------------------------------------------------------------------

TOGETHER = "int8,tensor"  # all rows have one scale


@pytest.mark.parametrize("native_way", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_activations_are_rounded(transposed, native_way, monkeypatch):
    """The rounding of `QuantizedMatrix`, with the gradient one, on every way."""
    if not native_way:
        monkeypatch.setenv("HAIKU_IMPLICIT_NATIVE", "0")
    w, x = made(3, (64, 96)).with_activation("int8"), normal((3, 96 if transposed else 64), 1)
    dense, dot = np.asarray(hki.materialize(w), np.float64), lambda x, w: x @ w
    if transposed:
        dense, dot = dense.T, lambda x, w: x @ w.T
    dot = hki.use_implicit_args(dot)
    wanted = rounded(np.asarray(x)) @ dense
    mapped = jax.vmap(dot, in_axes=(0, None))
    scanned = lambda x, w: jax.lax.scan(lambda _, x: (None, dot(x, w)), None, x)[1]  # noqa: E731
    for run in (dot, jax.jit(dot), mapped, scanned):
        np.testing.assert_allclose(run(x, w), wanted, atol=2e-6 * np.abs(wanted).max())
    ways = np.cos(np.arange(wanted.shape[-1]))
    gradient = jax.grad(lambda x: (dot(x, w) * ways).sum())(x)
    np.testing.assert_allclose(gradient, np.broadcast_to(dense @ ways, x.shape), atol=1e-4)
    found = dot(x.at[1, 5].set(jnp.inf).at[2].set(0), w)
    assert np.isnan(found[1]).all() and not found[2].any()
    np.testing.assert_allclose(found[0], wanted[0], atol=2e-6 * np.abs(wanted).max())


def test_rotated_inputs_are_rounded(tmp_path):
    """After their rotation; each way to the option gives the same tree, also through a file."""
    x, params = normal((5, 96), 1).at[:, 7].mul(50), {"m": {"w": normal((96, 64))}}
    given = hki.quantize_params(params, dtype="trellis3", activation="int8")
    later = hki.quantize_activations(hki.quantize_params(params, dtype="trellis3"))
    assert jax.tree.structure(given) == jax.tree.structure(later)
    hki.save(tmp_path / "params", given)
    w = hki.load(tmp_path / "params")["m"]["w"]
    assert w.w.matrix.activation == w.requantize(params["m"]["w"]).w.matrix.activation == "int8"
    turned = np.asarray(jax.jit(jnp.matmul)(x, hki.materialize(w.rotation)))
    wanted = rounded(turned) @ np.asarray(hki.materialize(w.w), np.float64)
    found = jax.jit(hki.use_implicit_args(jnp.matmul))(x, w)
    step = np.abs(turned).max() / 128 * np.abs(hki.materialize(w.w)).max()  # a tie
    assert np.abs(found - wanted).max() < step
    assert np.median(np.abs(found - wanted)) < 1e-5 * np.abs(wanted).max()
    plain = hki.quantize_activations(later, None)
    np.testing.assert_allclose(found, x @ hki.materialize(w), atol=0.02 * np.abs(wanted).max())
    assert plain["m"]["w"].w.matrix.activation is None


def test_files_from_before_there_were_rounded_activations():
    w = made()
    node = serialization.node_of(w)
    _, aux = node.parts(w)
    data = serialization.encode_node(node, aux)
    assert data["static"].pop("activation") is None
    assert serialization.decode_node(node, data) == tuple(aux)
    words = jnp.arange(64 * 6, dtype=jnp.uint16).reshape(64, 6)
    plain = hki.TrellisMatrix(words, length=32, bits=3, axis=-1)
    assert digests.digest(plain) == "ff4b05efbbaf3265"  # by the version before
    assert digests.digest(plain.with_activation("int8")) != "ff4b05efbbaf3265"
    del data["static"]["bits"]
    with pytest.raises(ValueError, match="the class now has"):
        serialization.decode_node(node, data)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("activation", ["int4", "int8,groups", "int8,rms,7", "mxfp8", TOGETHER])
def test_other_roundings(activation, axis):
    """As for a `QuantizedMatrix` of one group in each row."""
    w = made(2, (64, 96), axis)
    like = hki.QuantizedMatrix.quantize(hki.materialize(w), "int8", axis=axis)
    x = normal((3, 64), 1) * jnp.array([[1.0], [0.1], [3.0]])
    run = jax.jit(hki.use_implicit_args(jnp.matmul))

    def added(w, dense):
        return run(x, w.with_activation(activation)) - x @ dense

    error = added(w, hki.materialize(w))
    of_like = added(like, hki.materialize(like))
    assert (
        np.abs(error).max() > 1e-4
        and np.abs(error - of_like).max() < 0.02 * np.abs(x @ w.materialize()).max()
    )


@pytest.mark.slow
def test_activations_of_other_products_are_rounded():
    w = made(3, (64, 96)).with_activation("int8")
    dense = np.asarray(hki.materialize(w), np.float64)
    x = normal((6, 64), 1)
    wanted = rounded(np.asarray(x)) @ dense
    of_images = hki.use_implicit_args(
        lambda x, w: jax.lax.conv_general_dilated(
            x[:, None, :], w[None], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        )
    )
    of_groups = hki.use_implicit_args(
        lambda x, w: jax.lax.ragged_dot(x, w[None], jnp.array([6], jnp.int32))
    )
    for found in (of_images(x, w)[:, 0], of_groups(x, w)):
        np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())


# --- the user's way in ---------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["trellis3", "int4"])
def test_inputs_lessen_the_error_of_products(dtype):
    """LDLQ, and GPTQ after a rotation, beside the nearest codes."""
    w, x = normal((64, 96)), normal((256, 64), 1) @ normal((64, 64), 2, scale=0.2)
    params, options = {"m": {"w": w}}, dict(dtype=dtype)
    options |= dict(rotate=True) if dtype == "int4" else {}

    def error(new):
        return float(jnp.linalg.norm(x @ (hki.materialize(new["m"]["w"]) - w)))

    nearest = hki.quantize_params(params, **options)
    fitted = hki.quantize_with_inputs(params, {"m/w": x.T @ x}, **options)
    assert jax.tree.structure(fitted) == jax.tree.structure(nearest)
    assert error(fitted) < 0.7 * error(nearest)


def test_saved_and_adapted(tmp_path):
    params = {"m": {"w": quantized("trellis4")}}
    hki.save(tmp_path / "params", params)
    loaded = hki.load(tmp_path / "params")
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    adapted = hki.add_lora(loaded, jax.random.key(0), rank=2)["m"]["w"]
    assert isinstance(adapted, hki.LoRA) and isinstance(adapted.w, Rotated)
    adapted = adapted._replace(b=adapted.b + 1)
    same_without_dense(lambda x, w: x @ w, normal((3, 96), 1), adapted, rtol=1e-5)


@pytest.mark.slow
def test_structs_and_stacks():
    struct = jax.ShapeDtypeStruct((2, 96, 64), jnp.bfloat16)
    quantize = functools.partial(hki.quantize_params, dtype="trellis3", matrix_axes={})
    of_struct = quantize({"m": {"w": struct}})
    w = normal((2, 96, 64)).astype(jnp.bfloat16)
    of_array = quantize({"m": {"w": w}})
    assert jax.tree.structure(of_struct) == jax.tree.structure(of_array)
    dense = hki.materialize(of_array["m"]["w"]).astype(jnp.float32)
    assert dense.shape == w.shape and float(jnp.std(dense - w)) < 0.17


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dtype="trellis3", group_size=32), "'trellis3' has no group_size"),
        (dict(dtype="trellis3", activation="int9"), "activation: expected one of"),
        (dict(dtype="trellis3", axis=-1), "axis: dtype 'trellis3' is for axis -2"),
        (dict(dtype="trellis3", rotate=False), "rotate: the codes of 'trellis3' need the rotation"),
        (dict(dtype="int4", rotate=True, axis=-1), "axis: rotated weights are for axis -2"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        quantized(**options)
    for method in ("awq", "smoothquant"):
        with pytest.raises(ValueError, match=f"expected 'gptq' for trellis .*, got '{method}'"):
            inputs = {"m/w": jnp.eye(96)}
            hki.quantize_with_inputs(
                {"m": {"w": normal((96, 64))}}, inputs, method=method, dtype="trellis2"
            )


def test_groups_of_activations_divide_the_inputs():
    params, w = {"m": {"w": normal((48, 64))}}, made(3, (48, 64))
    options = dict(dtype="trellis3", activation="mxfp8")
    message = "activation: 'mxfp8' has groups of 32 inputs, which do not divide 48; use .* exclude="
    for run in (
        lambda: hki.quantize_params(params, **options),
        lambda: hki.quantize_with_inputs(params, {"m/w": jnp.eye(48)}, **options),
        lambda: hki.quantize_activations({"m": {"w": w}}, "mxfp8"),
    ):
        with pytest.raises(ValueError, match=rf"^m/w \(.*48,64.*\): {message}"):
            run()
    with pytest.raises(ValueError, match=f"^{message}"):
        w.with_activation("mxfp8")
    assert w.with_activation("nvfp4").activation == "nvfp4"  # groups of 16


def test_two_bits_without_inputs_warn():
    with pytest.warns(UserWarning, match="quantize_with_inputs"):
        quantized("trellis2")


def test_zeros_and_wrong_numbers():
    w = normal((64, 32)).at[:, 3].set(0)
    assert not hki.materialize(quantized_of(w))[:, 3].any()
    with pytest.raises(ValueError, match="finite"):
        quantized_of(w.at[1, 1].set(jnp.nan))
    found = jax.jit(lambda w: hki.materialize(quantized_of(w)))(w.at[1, 1].set(jnp.nan))
    assert np.isnan(found[:, 1]).all() and np.isfinite(found[:, 2]).all()


def quantized_of(w):
    return hki.quantize_params({"m": {"w": w}}, dtype="trellis3")["m"]["w"]


@pytest.mark.parametrize("options", [dict(dtype="trellis3"), dict(dtype="int4", rotate=True)])
def test_tables_are_not_rotated_unless_they_are_named(options):
    params = {"embed": {"embeddings": jnp.ones((64, 32))}, "linear": {"w": jnp.ones((32, 64))}}
    with pytest.warns(UserWarning, match="embed/embeddings .* in another call without a rotation"):
        new = hki.quantize_params(params, **options)
    assert new["embed"]["embeddings"] is params["embed"]["embeddings"]
    assert isinstance(new["linear"]["w"], hki.adapters.Rotated)
    named = hki.quantize_params(params, targets=["embed/embeddings"], **options)
    assert isinstance(named["embed"]["embeddings"], hki.adapters.Rotated)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_weights_of_any_magnitude(size):
    w = normal((64, 32), 0)
    scaled = jnp.where(jnp.arange(32) % 2, w, w * size)
    got = hki.quantize_params({"m": {"w": scaled}}, dtype="trellis3")["m"]["w"]
    got = hki.materialize(got) / jnp.where(jnp.arange(32) % 2, 1, size)
    assert jnp.linalg.norm(got - w) < 0.16 * jnp.linalg.norm(w)


ON_A_MESH = """
import jax, jax.numpy as jnp, haiku_implicit as hki
from jax.sharding import AxisType, PartitionSpec as P
w, x = jax.random.normal(jax.random.key(0), (48, 576)), jax.random.normal(jax.random.key(1), (4, 48))
product = jax.jit(hki.use_implicit_args(lambda w, x: x @ w))
for kind in (AxisType.Explicit, AxisType.Auto):
    mesh = jax.make_mesh((2,), ("m",), axis_types=(kind,))
    for bits in (2, 3, 4):
        params = hki.quantize_params({"l": {"w": w}}, dtype=f"trellis{bits}")
        wanted = x @ hki.materialize(params["l"]["w"])
        for spec in (P("m", None), P(None, "m")):
            got = product(hki.place(params, spec, mesh)["l"]["w"], x)
            assert jnp.abs(got - wanted).max() < 1e-4, (kind, bits, spec)
            rounded = hki.quantize_activations(params)
            wanted8 = product(rounded["l"]["w"], x)
            got = product(hki.place(rounded, spec, mesh)["l"]["w"], x)
            assert 1e-3 < jnp.abs(wanted8 - wanted).max() and jnp.abs(got - wanted8).max() < 1e-4, (kind, bits, spec)
print("right")
"""


@pytest.mark.slow
def test_products_on_a_mesh():
    assert run_on_devices(ON_A_MESH, 2).splitlines()[-1] == "right"
