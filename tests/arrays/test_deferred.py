"""Weights that a model standardizes or normalizes, against the dense weight."""

import dataclasses
import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit.core.sharding import shard_specs
from haiku_implicit.quantization import QtRule
from tests.tiers import few

use = hki.use_implicit_args
SHAPE = (8, 6)
KERNEL = (3, 2, 8, 6)


def normal(seed, *shape, scale=0.5):
    return jax.device_put(np.random.default_rng(seed).normal(0.2, scale, shape).astype(np.float32))


def int8(shape, seed=0):
    return hki.QuantizedMatrix.quantize(normal(seed, *shape), "int8")


def lora(w, seed=1, rank=2):
    *batch, n, m = w.shape
    return hki.LoRA(w, normal(seed, *batch, n, rank), normal(seed + 1, *batch, rank, m), 3.0)


def int4(shape, axis):
    options = dict(group_size=2, axis=axis, zero_point=True)
    return hki.QuantizedMatrix.quantize(normal(0, *shape), "int4", **options)


MAKE = {
    "lora": lambda shape: lora(normal(0, *shape)),
    "int8": int8,
    "int8 by rows": lambda shape: hki.QuantizedMatrix.quantize(normal(0, *shape), "int8", axis=-1),
    "int4": lambda shape: int4(shape, -2),
    "int4 by rows": lambda shape: int4(shape, -1),
    "nf4": lambda shape: hki.QuantizedMatrix.quantize(normal(0, *shape), "nf4"),
    "lora of int8": lambda shape: lora(int8(shape)),
    "lora of int4 by rows": lambda shape: lora(int4(shape, -1)),
    "scaled": lambda shape: hki.ScaledMatrix(int8(shape), normal(3, *shape[:-1])),
    "fake": lambda shape: hki.FakeQuantized(normal(0, *shape)),
    "trained": lambda shape: hki.TrainedQuantized(normal(0, *shape)),
}
# A few are in the quick tier.
QUICK = ("lora", "int8", "lora of int4 by rows")


def standardized(axes, w, gain):
    """As NFNets do it."""
    mean = jnp.mean(w, axis=axes, keepdims=True)
    var = jnp.var(w, axis=axes, keepdims=True)
    fan_in = np.prod([w.shape[i] for i in axes])
    factor = jax.lax.rsqrt(jnp.maximum(var * fan_in, 1e-4)) * gain
    return w * factor - mean * factor


def normalized(axes, w, gain):
    return gain * w / jnp.linalg.norm(w, axis=axes[0] if len(axes) == 1 else None, keepdims=True)


def centered(axes, w, gain):
    return gain * (jnp.mean(w, axes, keepdims=True) - w) / jnp.max(jnp.abs(w), axes, keepdims=True)


def by_column_maxima(axes, w, gain):
    return w / jnp.max(w, axes, keepdims=True) + jnp.min(w**2, axes, keepdims=True) * gain


PRODUCTS = {
    "linear": (SHAPE, lambda x, w: x @ w),
    "conv": (
        KERNEL,
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
    ),
}
INPUTS = {"linear": (4, 8), "conv": (1, 4, 4, 8)}
RECIPES = {f.__name__: f for f in (standardized, normalized, centered, by_column_maxima)}


def dense_of(w):
    """The dense twin, and its derivative: by `materialize`."""
    return hki.materialize(w)


def close(got, want, tolerance=2e-4):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance
        ),
        got,
        want,
    )


def floating(w):
    """The floating leaves, and a function that makes the array of them."""
    leaves, treedef = jax.tree.flatten(w)
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def rebuilt(values):
        new = list(leaves)
        for i, value in zip(places, values, strict=True):
            new[i] = value
        return treedef.unflatten(new)

    return [leaves[i] for i in places], rebuilt


def all_ways(run, weight, w, x, gain):
    """Results and gradients, and those of a stack of two under `vmap` and in a scan."""
    values, rebuilt = floating(w)

    def loss(values, x, gain):
        return jnp.sum(jnp.sin(run(weight(rebuilt(values)), x, gain)))

    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), w)
    mapped = jax.vmap(lambda w: run(weight(w), x, gain))(both)
    return run(weight(w), x, gain), jax.grad(loss, (0, 1, 2))(values, x, gain), mapped


@pytest.mark.every(6)
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("recipe", few(RECIPES, "standardized"))
@pytest.mark.parametrize("name", few(MAKE, *QUICK))
def test_standardized_weights(name, recipe, product):
    shape, multiply = PRODUCTS[product]
    axes = tuple(range(len(shape) - 1))
    w, x = MAKE[name](shape), normal(5, *INPUTS[product])
    gain = normal(6, shape[-1]) + 1

    def model(w, x, gain):
        return multiply(x, RECIPES[recipe](axes, w, gain))

    compiled = jax.jit(lambda w, x, gain: all_ways(use(model), lambda w: w, w, x, gain))
    if name == "trained":  # without rules it is dense in products
        w = w._replace(rules=())
    got = compiled(w, x, gain)
    want = jax.jit(lambda w, x, gain: all_ways(model, dense_of, w, x, gain))(w, x, gain)
    close(got, want)
    close(use(model)(w, x, gain), want[0])
    scanned = use(lambda ws: jax.lax.scan(lambda c, w: (c, model(w, x, gain)), 0, ws)[1])
    close(scanned(jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), w)), want[2])


@pytest.mark.every(2)
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("axes", [(1,), (0, 1)])
@pytest.mark.parametrize("name", few(MAKE, *QUICK))
def test_other_axes(name, axes):
    """Statistics of rows, of columns, and of the whole weight."""
    w, x = MAKE[name](SHAPE), normal(5, 4, 8)
    for recipe in (standardized, centered):
        run = lambda w, x, recipe=recipe: x @ recipe(axes, w, jnp.float32(1.5))  # noqa: E731
        close(jax.jit(use(run))(w, x), jax.jit(run)(dense_of(w), x))


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", few(MAKE, *QUICK))
@pytest.mark.slow
def test_reductions(name):
    w = MAKE[name]((2, *SHAPE))
    for axes in ((0, 1), (1, 2), (2,), (0, 1, 2)):
        for reduce in (jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.var):
            run = functools.partial(reduce, axis=axes)
            close(use(run)(w), run(dense_of(w)))
    close(use(lambda w: jnp.sum(w * w))(w), jnp.sum(dense_of(w) ** 2))


@pytest.mark.slow
def test_bfloat16():
    for make in (MAKE["lora of int4 by rows"], int8):
        w, x = make((64, 48)), normal(5, 4, 64).astype(jnp.bfloat16)

        def run(w, x):
            return x @ standardized((0,), w.astype(jnp.bfloat16), jnp.bfloat16(1.5))

        with hki.materialization("error"):
            got = jax.jit(use(run))(w, x)
        assert got.dtype == jnp.bfloat16
        close(got, run(dense_of(w), x), 4e-2)


LARGE = {
    "lora": lambda shape: lora(normal(0, *shape)),
    "int8": int8,
    "int4": lambda shape: hki.QuantizedMatrix.quantize(normal(0, *shape), "int4", 32),
    "lora of int8": lambda shape: lora(int8(shape)),
    "lora of int4 by rows": lambda shape: lora(
        hki.QuantizedMatrix.quantize(normal(0, *shape[:2], 1031, 1024), "int4", 32, axis=-1)
    ),
}
STATISTICS = {
    "var": lambda w: (jnp.mean(w, (0, 1, 2)), jnp.var(w, (0, 1, 2))),
    "var of all": lambda w: jnp.var(w),
    "norm of rows": lambda w: jnp.linalg.norm(w[0, 0], axis=1),
    "largest": lambda w: jnp.max(jnp.abs(w)),
}


def temporary_bytes(program, *args):
    return jax.jit(program).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", few(["int8", "lora of int8"], "lora of int8"))
@pytest.mark.slow
def test_no_dense_weight_in_a_standardized_layer(name):
    w, x = LARGE[name]((1024, 1031)), normal(5, 4, 1024)
    gain = jnp.ones(1031)
    layer = use(lambda w, x, gain: x @ standardized((0,), w, gain))
    values, rebuilt = floating(w)
    loss = lambda t, v, x, gain: jnp.sum(jnp.sin(layer(rebuilt([*v, *t]), x, gain)))  # noqa: E731
    trained = len(values) - (2 if "lora" in name else 0)
    args = values[trained:], values[:trained], x, gain
    assert temporary_bytes(layer, w, x, gain) <= w.size * 4 / 8
    assert temporary_bytes(jax.grad(loss, 2), *args) <= w.size * 4 / 8
    # A product's gradient with respect to its scales copies the codes, a quarter of the dense weight.
    assert temporary_bytes(jax.grad(loss, (0, 2, 3)), *args) <= w.size * 4 * (1 / 8 + 1 / 4)
    close(layer(w, x, gain), x @ standardized((0,), dense_of(w), gain), 1e-3)


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("statistic", few(STATISTICS, "var"))
@pytest.mark.parametrize("name", few(LARGE, "lora", "lora of int8"))
def test_no_dense_weight(name, statistic):
    """Neither forward nor backward, by XLA's own account."""
    w, fun = LARGE[name]((1, 1, 1024, 1031)), use(STATISTICS[statistic])
    values, rebuilt = floating(w)

    def loss(values):
        return sum(
            jax.tree.leaves(jax.tree.map(lambda y: jnp.sum(jnp.sin(y)), fun(rebuilt(values))))
        )

    trained = values[1:] if "lora" in name else []
    programs = [
        (fun, (w,)),
        (jax.grad(lambda t, v: loss([*v, *t])), (trained, values[: len(values) - len(trained)])),
    ]
    for program, args in programs:
        assert temporary_bytes(program, *args) <= w.size * 4 / 8
    close(fun(w), STATISTICS[statistic](dense_of(w)), 1e-3)


class WSConv(hk.Conv2D):
    """Haiku's convolution with a standardized kernel, as NFNets have it."""

    def __call__(self, x):
        shape = (*self.kernel_shape, x.shape[-1], self.output_channels)
        w = hk.get_parameter("w", shape, init=hk.initializers.VarianceScaling())
        gain = hk.get_parameter("gain", shape[-1:], init=jnp.ones)
        w = standardized((0, 1, 2), w, gain)
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def resnet(x):
    x = WSConv(8, 3, name="stem")(x)

    def block(x):
        h = WSConv(8, 3, name="first")(jax.nn.silu(x))
        return x + 0.2 * WSConv(8, 1, name="second")(jax.nn.silu(h))

    x = hk.remat(block)(x)
    return hk.Linear(3)(x.mean((1, 2)))


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("kind", few(["lora", "int8", "lora of int8", "trained", "qat"], "int8"))
@pytest.mark.slow
def test_model(kind):
    model = hk.without_apply_rng(hk.transform(resnet))
    x = normal(1, 2, 6, 6, 4)
    params = jax.jit(model.init)(jax.random.key(0), x)
    if "int8" in kind:
        params = hki.quantize_params(params, targets=".*/w")
    if "lora" in kind:
        params = hki.add_lora(params, jax.random.key(1), rank=2, targets=".*/w")
    if kind == "trained":
        params = hki.quantized_training(params, [QtRule(weight_qtype="int8", act_qtype="int8")])
    if kind == "qat":
        params = hki.quantization_aware(params, [QtRule(weight_qtype="int8")], targets=".*/w")
    implicit = hki.transform_implicit(model)
    got = jax.jit(implicit.apply)(params, x)
    want = model.apply(hki.materialize(params), x)
    close(got, want, 0.1 if kind == "trained" else 1e-4)
    if kind == "trained":
        assert not np.array_equal(got, want)  # its products are quantized
    trainable, frozen = hki.partition(params)
    loss = lambda run: lambda t: jnp.sum(run(t) ** 2)  # noqa: E731
    grads = jax.jit(jax.grad(loss(lambda t: implicit.apply(hki.combine(t, frozen), x))))(trainable)
    if "lora" in kind:
        run = lambda t: model.apply(hki.materialize(hki.combine(t, frozen)), x)  # noqa: E731
        close(grads, jax.grad(loss(run))(trainable), 1e-3)


@pytest.mark.parametrize("name", QUICK)
def test_other_functions_become_dense_as_before(name):
    w = MAKE[name](SHAPE)
    full = normal(9, *SHAPE)
    functions = [jnp.exp, lambda w: w + full, lambda w: jnp.square(w) + full, jnp.cumsum]
    functions += [lambda w: normal(5, 4, 8) @ jnp.square(w), lambda w: jnp.argmax(w, 0)]
    for fun in functions:
        with hki.materialization("allow"), hki.materialization_report() as report:
            got = use(fun)(w)
        close(hki.materialize(got), fun(dense_of(w)))
        assert report.count == 1 or (name.startswith("lora") and fun is functions[1])


def test_what_quantizes_activations():
    """It still does in a shifted product; a kernel is reported, as its convolution would not."""
    w, x = int8(SHAPE).with_activation("int8"), normal(5, 4, 8)
    row = normal(6, 1, 6)
    with hki.materialization("error"):
        got = use(lambda w: x @ (w - row))(w)
    close(got, use(lambda w: x @ w)(w) - x @ jnp.broadcast_to(row, SHAPE))
    assert not np.allclose(got, x @ (dense_of(w) - row), atol=1e-6)
    kernel = int8(KERNEL).with_activation("int8")
    for fun in (lambda w: w - row, lambda w: w * normal(7, 8, 1)):
        with pytest.raises(hki.MaterializationError), hki.materialization("error"):
            use(fun)(kernel)


@pytest.mark.slow
def test_a_cache_is_not_a_weight():
    q = int8((2, 3, *SHAPE))
    cache = hki.QuantizedCache(codes=q.codes, scale=q.scale, format=q.format)
    for fun in (
        jnp.sum,
        jnp.square,
        lambda w: w - 1,
        lambda w: jnp.broadcast_to(w, (2, 2, 3, 8, 6)),
    ):
        with hki.materialization("allow"), hki.materialization_report() as report:
            got = use(fun)(cache)
        close(hki.materialize(got), fun(dense_of(cache)))
        assert isinstance(got, hki.QuantizedCache) or report.count == 1


def test_explicit_mesh():
    """Where axes of a mesh are explicit, results are those of the dense weight, too."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    w, x, gain = MAKE["lora of int8"](SHAPE), normal(5, 4, 8), normal(6, 6) + 1
    model = lambda w, x: x @ standardized((0,), w, gain)  # noqa: E731
    want = model(dense_of(w), x)
    set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
    with set_mesh(mesh), hki.materialization("allow"):
        for spec in (P(None, "x"), P("x", None)):
            specs = jax.tree.leaves(shard_specs(w, spec, mesh))
            leaves, treedef = jax.tree.flatten(w)
            placed = [
                jax.device_put(y, NamedSharding(mesh, s))
                for y, s in zip([*leaves, x], [*specs, P()], strict=True)
            ]
            close(jax.jit(use(model))(treedef.unflatten(placed[:-1]), placed[-1]), want)


def test_export():
    """A square can be written to a file and read again."""
    w = MAKE["lora of int8"](SHAPE)
    square = use(jnp.square)(w)
    exported = export.export(jax.jit(use(jnp.sum)))(square)
    again = export.deserialize(exported.serialize())
    close(again.call(square), jnp.sum(dense_of(w) ** 2))
    rows = MAKE["lora"]((1, 6))
    (length,) = export.symbolic_shape("n")
    repeat = use(lambda w, x: jnp.broadcast_to(w, x.shape) + x)
    struct = jax.ShapeDtypeStruct((length, 6), jnp.float32)
    exported = export.export(jax.jit(repeat))(rows, struct)
    close(exported.call(rows, jnp.ones((3, 6))), dense_of(rows) + jnp.ones((3, 6)))


def test_across_boundaries():
    """A deferred square that is used twice, and goes through `jit`, `cond`, `scan` and `checkpoint`."""
    w = MAKE["lora of int8"](SHAPE)

    def fun(w):
        square = jax.jit(jnp.square)(w)
        either = jax.lax.cond(w.sum() > 0, lambda s: s, lambda s: -s, square)
        _, sums = jax.lax.scan(lambda c, i: (c, square.sum() * i), 0, jnp.arange(3.0))
        moved = jax.lax.fori_loop(0, 3, lambda i, w: w + normal(8, 1, 6), w)
        return square.max(0), either.sum(1), sums, jax.checkpoint(jnp.min)(square), moved

    with hki.materialization("allow"):
        close(hki.materialize(jax.jit(use(fun))(w)), fun(dense_of(w)))


@pytest.mark.slow
def test_per_example_gains():
    w, x, gains = MAKE["lora of int8"](SHAPE), normal(5, 4, 8), normal(6, 3, 6) + 1
    fun = lambda w, gains: jax.vmap(lambda g: x @ standardized((0,), w, g))(gains)  # noqa: E731
    with hki.materialization("allow"):
        close(use(fun)(w, gains), fun(dense_of(w), gains))


@pytest.mark.every(3)
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", MAKE)
def test_repeated_row(name):
    """As the learned key that some attention layers put before those of each example."""
    w = MAKE[name]((1, 6, 1) if "int4" in name and "rows" not in name else (1, 1, 6))
    for repeat in (
        lambda w: jnp.tile(w, (4, 1, 1)),
        lambda w: jnp.tile(w, (4, 2, 3)),
        lambda w: jnp.repeat(w, 4, 0),
        lambda w: jnp.broadcast_to(w, (4, 6, 6)),
    ):
        got = use(repeat)(w)
        assert isinstance(got, jax.Array)
        close(got, repeat(dense_of(w)))


@dataclasses.dataclass
class Exponential(hki.ImplicitArray):
    """exp(x), with a rule for products."""

    x: Any

    def compute_shape(self):
        return self.x.shape

    def compute_dtype(self):
        return self.x.dtype

    def materialize(self):
        return jnp.exp(self.x)


@hki.primitive_handler("mul")
def add_exponents(primitive, a: Exponential, b: Exponential):
    return Exponential(a.x + b.x)


@dataclasses.dataclass
class EqualToIt(hki.ImplicitArray):
    """Equal to an `Exponential`."""

    x: Any

    compute_shape = Exponential.compute_shape
    compute_dtype = Exponential.compute_dtype
    materialize = Exponential.materialize

    def equivalent(self):
        return Exponential(self.x)


def test_the_square_of_a_type_is_the_product_of_an_equal_one(never_dense):
    found = jax.jit(use(lambda w: w * w))(EqualToIt(normal(0, 3, 2)))
    assert isinstance(found, Exponential)
    np.testing.assert_allclose(found.x, 2 * normal(0, 3, 2))


def test_the_gradient_of_a_square_that_only_the_dense_array_has():
    """The product of the dense arrays keeps all parameters of its equation, which its gradient reads."""
    params = {"m": {"w": normal(0, 4, 3)}}
    w = hki.add_adapter(params, 0, "low_rank_diagonal", rank=1)["m"]["w"]
    square = lambda w: (w * w).sum()  # noqa: E731
    with hki.materialization("allow"):
        found = jax.jit(jax.grad(hki.use_implicit_args(square)))(w)
    expected = jax.jit(jax.grad(lambda w: square(hki.materialize(w))))(w)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
