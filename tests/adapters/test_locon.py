"""LoRA on the kernels of convolutions, against the dense kernel."""

import functools
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit import adapters
from tests.adapter_cases import normal
from tests.tiers import few


def locon(shape, rank=1, axis=-1, base=None, lead=()):
    """A kernel with a correction that is not zero."""
    w = normal((*lead, *shape)) if base is None else base
    made = adapters.LoCon.create(
        w, jax.random.key(0), rank=rank, alpha=3.0, axis=axis, kernel_ndim=len(shape)
    )
    return made._replace(b=normal(made.b.shape, 2))


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def test_what_it_stands_for():
    """`a · b` is the product of the matrices `[window * inputs, rank]` and `[rank, outputs]`."""
    w = locon((3, 2, 4, 6), rank=2)
    correction = np.reshape(w.a, (24, 2)) @ np.asarray(w.b) * 1.5
    close(hki.materialize(w), w.w + correction.reshape(w.shape))
    t = locon((3, 2, 6, 4), rank=2, axis=-2)  # as Haiku's transposed convolutions have them
    assert t.a.shape == (3, 2, 2, 4) and t.b.shape == (2, 6)
    correction = np.einsum("hwri,ro->hwoi", t.a, t.b) * 1.5
    close(hki.materialize(t), t.w + correction)


# The shape of the kernel, that of the images, options, the order of axes.
CONVOLUTIONS = {
    "1-d": ((5, 8, 12), (2, 9, 8), {}, None),
    "2-d": ((3, 3, 8, 12), (2, 9, 7, 8), {}, None),
    "3-d": ((2, 3, 1, 8, 12), (1, 5, 4, 3, 8), {}, None),
    "strides": ((3, 3, 8, 12), (2, 9, 7, 8), dict(window_strides=(2, 3), padding="VALID"), None),
    "dilation": ((3, 3, 8, 12), (2, 9, 7, 8), dict(rhs_dilation=(2, 1)), None),
    "groups": ((3, 3, 8, 12), (2, 9, 7, 16), dict(feature_group_count=2), None),
    "transposed": (
        (3, 3, 8, 12),
        (2, 5, 4, 8),
        dict(lhs_dilation=(2, 2), padding=[(2, 1)] * 2),
        None,
    ),
    "channels first": ((3, 3, 8, 12), (2, 8, 9, 7), {}, ("NCHW", "HWIO", "NCHW")),
    "mixed order": ((3, 3, 8, 12), (2, 8, 9, 7), {}, ("NCHW", "HWIO", "HNWC")),
}


def convolve(name):
    _, image, options, numbers = CONVOLUTIONS[name]
    spatial = "DHW"[-(len(image) - 2) :]
    numbers = numbers or ("N" + spatial + "C", spatial + "IO", "N" + spatial + "C")
    options = dict(window_strides=(1,) * len(spatial), padding="SAME") | options
    return lambda x, w: jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


def convolutions_in(fun, *args):
    return str(jax.make_jaxpr(fun)(*args)).count("conv_general_dilated[")


@pytest.mark.parametrize("rank", [1, 7])
@pytest.mark.parametrize("name", few(CONVOLUTIONS, "2-d", "groups", "mixed order"))
def test_convolutions_and_their_gradients(name, rank, never_dense):
    shape, image, *_ = CONVOLUTIONS[name]
    w, x, run = locon(shape, rank), normal(image, 1), convolve(name)
    implicit = hki.use_implicit_args(run)
    want = run(x, hki.materialize(w))
    close(implicit(x, w), want)
    # Two of them, unless the rank is so high that two cost more.
    few_channels = 3 * rank * (w.a.size / rank + 12) <= w.size and name != "groups"
    if name != "groups":
        assert convolutions_in(implicit, x, w) == (2 if few_channels else 1)

    trained, frozen = hki.partition(w)

    def loss(trained, x, run):
        return (run(x, hki.combine(trained, frozen)) ** 2).sum()

    got, dx = jax.jit(jax.grad(functools.partial(loss, run=implicit), argnums=(0, 1)))(trained, x)
    of_dense = lambda x, w: run(x, hki.materialize(w))  # noqa: E731
    wanted, dx_wanted = jax.grad(functools.partial(loss, run=of_dense), argnums=(0, 1))(trained, x)
    assert got.w is None and got.alpha is None
    jax.tree.map(functools.partial(close, tolerance=3e-5), (got, dx), (wanted, dx_wanted))


def test_what_it_does_not_know_is_dense(may_be_dense):
    """Groups of the batch, a kernel as the images, kernels that a `vmap` inside maps over."""
    w, x = locon((3, 3, 8, 12)), normal((4, 9, 7, 8), 1)
    convolution = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME"
    )
    order = ("NHWC", "HWIO", "NHWC")
    grouped = lambda x, w: convolution(x, w, dimension_numbers=order, batch_group_count=2)  # noqa: E731
    swapped = lambda x, w: convolution(w, x, dimension_numbers=("HWCN", "HWIO", "HWNC"))  # noqa: E731
    close(hki.use_implicit_args(grouped)(x, w), grouped(x, hki.materialize(w)))
    y = normal((2, 2, 8, 5), 1)
    close(hki.use_implicit_args(swapped)(y, w), swapped(y, hki.materialize(w)))
    stack = locon((3, 3, 8, 12), lead=(2,))
    mapped = lambda x, w: jax.vmap(lambda w: convolution(x, w, dimension_numbers=order))(w)  # noqa: E731
    close(hki.use_implicit_args(mapped)(x, stack), mapped(x, hki.materialize(stack)))


@pytest.mark.slow
def test_stacks_casts_and_vmap(never_dense):
    """Kernels of stacked layers, one of them, and images one by one."""
    w, x = locon((3, 3, 8, 8), lead=(4,)), normal((2, 5, 5, 8), 1)
    assert w.core_ndim == 4 and w.a.shape == (4, 3, 3, 8, 1)
    run = lambda x, w: jax.lax.conv_general_dilated(  # noqa: E731
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    dense = hki.materialize(w)
    scan = lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(run(x, w)), None), x, w)[0]  # noqa: E731
    close(hki.use_implicit_args(scan)(x, w), scan(x, dense))
    one, of_one = jax.tree.map(lambda leaf: leaf[1], w), dense[1]
    mapped = lambda x, w: jax.vmap(lambda x: run(x[None], w)[0])(x)  # noqa: E731
    close(hki.use_implicit_args(mapped)(x, one), mapped(x, of_one))
    half = lambda x, w: run(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype(jnp.float32)  # noqa: E731
    close(hki.use_implicit_args(half)(x, one), half(x, of_one), 3e-2)


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_quantized_kernels(dtype):
    base = hki.QuantizedMatrix.quantize(normal((3, 3, 8, 12)), dtype)
    w, x, run = locon((3, 3, 8, 12), base=base), normal((2, 5, 5, 8), 1), convolve("2-d")
    close(hki.use_implicit_args(run)(x, w), run(x, hki.materialize(w)))


def unet(x):
    x = hk.Conv2D(12, 3, name="conv")(x)
    x = hk.Conv2DTranspose(8, 3, stride=2, name="up")(jax.nn.relu(x))
    return hk.Linear(3, name="out")(x)


@pytest.mark.slow
def test_a_model(never_dense):
    """Convolutions, a transposed one, and matrices."""
    model = hk.without_apply_rng(hk.transform(unet))
    x = normal((2, 6, 6, 8), 1)
    params = model.init(jax.random.key(0), x)
    new = hki.add_adapter(
        params, 0, "locon", rank=1, alpha=2.0, patterns={"up/w": {"axis": -2}}, targets=".*/w"
    )
    kinds = {name: new[name]["w"].a.shape for name in ("conv", "up", "out")}
    assert kinds == {"conv": (3, 3, 8, 1), "up": (3, 3, 1, 12), "out": (8, 1)}
    for name in kinds:
        w = new[name]["w"]
        new[name]["w"] = w._replace(b=normal(w.b.shape, 3))
    apply = hki.transform_implicit(model).apply
    merged = hki.merge_adapters(new)
    close(apply(new, x), model.apply(merged, x))
    assert convolutions_in(apply, new, x) == 4


def test_nothing_of_the_size_of_a_kernel_is_made():
    """No equation of a step has a result that comes near the kernel in size."""
    w = jax.eval_shape(
        lambda: adapters.LoCon.create(
            jnp.zeros((3, 3, 512, 512)), jax.random.key(0), rank=4, alpha=1.0
        )
    )
    x = jax.ShapeDtypeStruct((1, 4, 4, 512), jnp.float32)
    run = hki.use_implicit_args(convolve("2-d"))
    trained, frozen = hki.partition(w)
    loss = lambda t, frozen, x: (run(x, hki.combine(t, frozen)) ** 2).sum()  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss))(trained, frozen, x)
    size = w.size

    def made(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
            for p in eqn.params.values():
                inner = getattr(p, "jaxpr", p)
                yield from made(inner) if hasattr(inner, "eqns") else ()

    assert max(made(jaxpr.jaxpr)) < size / 8


def test_a_large_adapter_is_no_stack():
    """The warning of stacks of matrices is for types that take kernels as such."""
    params = {"conv1_d": {"w": normal((3, 8, 8))}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hki.add_adapter(params, 0, "locon", rank=8)
    with pytest.warns(
        UserWarning, match="an adapter for each matrix: conv1_d/w .*3 adapters with 387"
    ):
        hki.add_lora(params, 0, rank=8)


def test_lora_on_kernels_says_so():
    """Nine small LoRAs on a kernel of 3 × 3 are a warning that names the method for kernels."""
    params = {"conv": {"w": normal((3, 3, 16, 8))}, "one": {"w": normal((3, 3, 1, 8))}}
    params |= {"conv_1x1": {"w": normal((1, 1, 16, 8))}, "linear": {"w": normal((16, 8))}}
    params["conv_in"] = params.pop("one")
    with pytest.warns(UserWarning) as found:
        new = hki.add_lora(params, 0, rank=2)
    texts = sorted(str(w.message) for w in found)
    assert [w.filename for w in found] == [__file__] * 2 and len(texts) == 2
    assert (
        "conv_in/w (float32[3,3,1,8]). For kernels of convolutions, the method 'locon'" in texts[0]
    )
    assert "prepare" not in texts[0]
    what = "for each matrix: conv/w (float32[3,3,16,8]: 9 adapters with 441 numbers for 1,152). "
    assert what + "The method 'locon'" in texts[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = hki.add_lora(params, 0, rank=2, exclude="conv_in/w", matrix_axes={})
        kernels = "conv(_in)?/w"
        both = hki.add_lora(params, 0, rank=2, exclude=kernels)
        both = hki.add_adapter(both, 0, "locon", rank=2, targets=kernels)
    assert np.array_equal(same["conv"]["w"].a, new["conv"]["w"].a)
    assert isinstance(both["conv_in"]["w"], hki.adapters.LoCon)
