"""The mixture of experts, the U-Net and the Pairformer, against the same in NumPy and float64."""

import functools
import itertools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from models import diffusion, mixture, pairformer
from tests.dense_twin import close, same_without_dense
from tests.haiku_models import noise
from tests.random_arrays import normal
from tests.tiers import few

MIXTURE = mixture.MixtureConfig(
    vocab_size=19, dim=16, num_layers=1, num_heads=4, num_kv_heads=2, hidden_dim=12, num_experts=5
)
PAIRFORMER = pairformer.PairformerConfig(8, 4, 2, single_heads=2, pair_heads=2, factor=2)
UNET = diffusion.UnetConfig(channels=2, widths=(4, 8), num_groups=2, num_heads=2, time_dim=6)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


# --- Mixture --------------------------------------------------------------------------------------


def loop_over_experts(params, x):
    """Every expert computes every row; the router's weights leave out most of it."""
    out = np.zeros_like(x)
    scores = x @ params["mixture/~route/router"]["w"]
    for row, score in enumerate(scores):
        best = np.argsort(-score)[: MIXTURE.experts_per_token]
        for expert, weight in zip(best, softmax(score[best]), strict=True):
            gate, up, down = (
                params[f"mixture/{n}_proj"]["w"][expert] for n in ("gate", "up", "down")
            )
            out[row] += weight * ((silu(x[row] @ gate) * (x[row] @ up)) @ down)
    return out


@functools.cache
def mixture_block():
    """The block as a function of a matrix of rows, its parameters, and rows."""
    model = hk.without_apply_rng(hk.transform(lambda x: mixture.Mixture(MIXTURE)(x)))
    x = normal((9, 16), 1)
    return model.apply, noise(jax.jit(model.init)(jax.random.key(0), x)), loop_over_experts, (x,)


# --- U-Net ----------------------------------------------------------------------------------------


def conv(p, x, stride=1):
    """With XLA's padding, which for stride 2 and even sizes is one row after the last."""
    size = p["w"].shape[0]
    total = max(size - stride, 0)
    low, high = total // 2, total - total // 2
    x = np.pad(x, [(0, 0), (low, high), (low, high), (0, 0)])
    height, width = ((n - size) // stride + 1 for n in x.shape[1:3])
    out = 0
    for i in range(size):
        for j in range(size):
            rows = x[:, i : i + height * stride : stride, j : j + width * stride : stride]
            out = out + rows[:, :height, :width] @ p["w"][i, j]
    return out + p["b"]


def group_norm(p, x):
    groups = x.reshape(len(x), -1, UNET.num_groups, x.shape[-1] // UNET.num_groups)
    mean, var = groups.mean((1, 3), keepdims=True), groups.var((1, 3), keepdims=True)
    return ((groups - mean) / np.sqrt(var + 1e-5)).reshape(x.shape) * p["scale"] + p["offset"]


def unet(params, images, steps):
    def p(name):
        return params[f"unet/{name}"]

    def linear(name, x):
        return x @ p(name)["w"] + p(name)["b"]

    def residual(name, x):
        h = conv(p(f"{name}/conv_1"), silu(group_norm(p(f"{name}/norm_1"), x)))
        h = h + linear(f"{name}/time", silu(time))[:, None, None]
        h = conv(p(f"{name}/conv_2"), silu(group_norm(p(f"{name}/norm_2"), h)))
        return h + (conv(p(f"{name}/skip"), x) if f"unet/{name}/skip" in params else x)

    half = UNET.time_dim // 2
    angles = steps[:, None] * 10_000.0 ** (-np.arange(half) / (half - 1))
    time = linear(
        "time_2", silu(linear("time_1", np.concatenate([np.sin(angles), np.cos(angles)], -1)))
    )
    first = residual("down_0", conv(p("first"), images))
    second = residual("down_1", conv(p("shrink_0"), first, stride=2))
    y = group_norm(p("attention/norm"), second)
    heads = (len(y), -1, UNET.num_heads, y.shape[-1] // UNET.num_heads)
    q, k, v = (linear(f"attention/{n}", y).reshape(heads) for n in ("query", "key", "value"))
    weights = softmax(np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(heads[-1]))
    mixed = np.einsum("bhts,bshd->bthd", weights, v).reshape(y.shape)
    x = residual("up_1", np.concatenate([second + linear("attention/output", mixed), second], -1))
    x = conv(p("grow_1"), np.kron(x, np.ones((1, 2, 2, 1))))
    x = residual("up_0", np.concatenate([x, first], -1))
    return conv(p("last"), silu(group_norm(p("final_norm"), x)))


@functools.cache
def unet_model():
    model = hk.without_apply_rng(hk.transform(lambda *x: diffusion.Unet(UNET)(*x)))
    images = normal((2, 4, 6, 2), 1)
    inputs = images, np.asarray([3.0, 250.0], np.float32)
    return model.apply, noise(jax.jit(model.init)(jax.random.key(0), *inputs)), unet, inputs


# --- Pairformer -----------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def flat_pairformer(*inputs):
    return jnp.concatenate([x.ravel() for x in pairformer.Pairformer(PAIRFORMER)(*inputs)])


def every_block(params, single, pair):
    """The loops of the paper's algorithms 17, 12 to 15, 11 and 24."""
    n = range(len(single))
    for block in range(PAIRFORMER.num_blocks):

        def p(name, leaf="w", block=block):
            of_blocks = "pairformer/__layer_stack_no_per_layer/pairformer/~block"
            return params[f"{of_blocks}/{name}"][leaf][block]

        def norm(x, name, p=p):
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            return x * p(name, "scale") + p(name, "offset")

        def transition(x, name, p=p, norm=norm):
            h = norm(x, f"{name}/norm")
            return (silu(h @ p(f"{name}/gate")) * (h @ p(f"{name}/up"))) @ p(f"{name}/down")

        def heads(x, number):
            return x.reshape(*x.shape[:-1], number, -1)

        for name in ("outgoing_edges", "incoming_edges"):
            z = norm(pair, f"{name}/norm")
            a, b = (
                sigmoid(z @ p(f"{name}/{side}_gate")) * (z @ p(f"{name}/{side}"))
                for side in ("left", "right")
            )
            out = np.zeros_like(pair)
            for i, j, k in itertools.product(n, n, n):
                out[i, j] += a[i, k] * b[j, k] if name == "outgoing_edges" else a[k, i] * b[k, j]
            out = norm(out, f"{name}/center_norm") @ p(f"{name}/output")
            pair = pair + sigmoid(z @ p(f"{name}/gate")) * out
        for name in ("starting_node", "ending_node"):
            z = norm(pair, f"{name}/norm")
            q, k, v = (
                heads(z @ p(f"{name}/{x}"), PAIRFORMER.pair_heads)
                for x in ("query", "key", "value")
            )
            bias, mixed = z @ p(f"{name}/bias"), np.zeros_like(q)
            for i, j, h in itertools.product(n, n, range(PAIRFORMER.pair_heads)):
                if name == "starting_node":
                    other, values = k[i, :, h], v[i, :, h]
                    own_bias = bias[j, :, h]
                else:
                    other, values = k[:, j, h], v[:, j, h]
                    own_bias = bias[:, i, h]
                scores = other @ q[i, j, h] / np.sqrt(q.shape[-1]) + own_bias
                mixed[i, j, h] = softmax(scores) @ values
            gated = sigmoid(z @ p(f"{name}/gate")) * mixed.reshape(z.shape)
            pair = pair + gated @ p(f"{name}/output")
        pair = pair + transition(pair, "pair_transition")
        s = norm(single, "single_attention/norm")
        q, k, v = (
            heads(s @ p(f"single_attention/{x}"), PAIRFORMER.single_heads)
            for x in ("query", "key", "value")
        )
        q = q + heads(p("single_attention/query", "b"), PAIRFORMER.single_heads)
        bias, mixed = norm(pair, "single_attention/pair_norm") @ p("single_attention/bias"), 0 * q
        for i, h in itertools.product(n, range(PAIRFORMER.single_heads)):
            weights = softmax(k[:, h] @ q[i, h] / np.sqrt(q.shape[-1]) + bias[i, :, h])
            mixed[i, h] = weights @ v[:, h]
        gated = sigmoid(s @ p("single_attention/gate")) * mixed.reshape(s.shape)
        single = single + gated @ p("single_attention/output")
        single = single + transition(single, "single_transition")
    return np.concatenate([single.ravel(), pair.ravel()])


@functools.cache
def pairformer_model():
    model = hk.without_apply_rng(hk.transform(flat_pairformer))
    inputs = normal((3, 8), 1), normal((3, 3, 4), 2)
    return model.apply, noise(jax.jit(model.init)(jax.random.key(0), *inputs)), every_block, inputs


MODELS = {"mixture": mixture_block, "unet": unet_model}


@pytest.mark.slow
def test_the_pairformer_is_the_algorithms():
    """Values alone: sums along a direction cancel too much for a slope in float32."""
    apply, params, formula, inputs = pairformer_model()
    close(jax.jit(apply)(params, *inputs), formula(doubles(params), *doubles(inputs)), 1e-5)


def doubles(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.mark.parametrize("name", few(MODELS, "mixture"))
def test_values_and_gradients_are_those_of_the_formula(name):
    """The gradient along a direction is the difference quotient of the formula in float64."""
    apply, params, formula, inputs = MODELS[name]()
    want = formula(doubles(params), *doubles(inputs))
    mix = normal(want.shape, 2)

    def loss(params, x):
        out = apply(params, x, *inputs[1:])
        return (out * mix).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, inputs[0])
    close(out, want, 1e-5)
    at, along = doubles((params, inputs[0])), doubles(noise(jax.tree.map(np.zeros_like, grads), 5))

    def moved(step):
        here = jax.tree.map(lambda x, d: x + step * d, at, along)
        return (formula(here[0], here[1], *doubles(inputs[1:])) * np.asarray(mix, np.float64)).sum()

    slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
    found = sum(jax.tree.leaves(jax.tree.map(lambda g, d: np.vdot(doubles(g), d), grads, along)))
    np.testing.assert_allclose(found, slope, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_leaf_has_its_gradient(name):
    """Along each parameter alone, so that none hides behind others."""
    apply, params, formula, inputs = MODELS[name]()
    grads = jax.jit(jax.grad(lambda params: (apply(params, *inputs) ** 2).sum()))(params)
    at = doubles(params)
    for module, own in grads.items():
        for name, grad in own.items():
            along = np.cos(np.arange(grad.size)).reshape(grad.shape)

            def moved(step, module=module, name=name, along=along):
                value = at[module] | {name: at[module][name] + step * along}
                return (formula(at | {module: value}, *doubles(inputs)) ** 2).sum()

            slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
            np.testing.assert_allclose(np.vdot(grad, along), slope, rtol=1e-3, atol=1e-2)


def lora(params):
    return noise(hki.add_lora(params, 0, rank=2))


def int4(params):
    return hki.quantize_params(params, dtype="int4", group_size=4)


WAYS = {
    "lora": lora,
    "int8": lambda params: hki.quantize_params(params, dtype="int8"),
    "int4": int4,
    "qlora": lambda params: lora(int4(params)),
}
WHOLE = {
    "mixture": (
        lambda x: mixture.MixtureOfExperts(MIXTURE)(x),
        (np.arange(12).reshape(2, 6) % 19,),
    ),
    "unet": (
        lambda *x: diffusion.Unet(UNET)(*x),
        (np.ones((2, 4, 6, 2), np.float32), np.asarray([3.0, 250.0])),
    ),
    "pairformer": (flat_pairformer, (normal((3, 8), 1), normal((3, 3, 4), 2))),
}
EXPERTS = [f"mixture_of_experts/layer_0/mixture/{n}_proj" for n in ("gate", "up", "down")]


def whole_model(name, way):
    """A model with implicit parameters, these, and inputs."""
    forward, inputs = WHOLE[name]
    model = hk.without_apply_rng(hk.transform(forward))
    params = noise(jax.jit(model.init)(jax.random.key(0), *inputs))
    return model.apply, WAYS[way](params), inputs


def check_gradients(apply, params, *inputs):
    """Against those of the dense twin; nothing may become dense."""

    def loss(params):
        return (apply(params, *inputs) ** 2).sum()

    with hki.materialization("error"):
        got = jax.jit(hki.value_and_grad(hki.use_implicit_args(loss)))(params)
    of_twin = hki.value_and_grad(lambda params: loss(hki.materialize(params)))
    jax.tree.map(functools.partial(close, rtol=1e-4), got, jax.jit(of_twin)(params))


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("way", WAYS)
def test_implicit_parameters_stay_implicit(name, way):
    apply, params, inputs = whole_model(name, way)
    implicit = [
        x for own in params.values() for x in own.values() if isinstance(x, hki.ImplicitArray)
    ]
    assert len(implicit) > 5
    if name == "mixture":
        assert all(isinstance(params[name]["w"], hki.ImplicitArray) for name in EXPERTS)
    same_without_dense(apply, params, *inputs, rtol=1e-4)
    check_gradients(apply, params, *inputs)


@pytest.mark.slow
def test_experts_stay_in_four_bits_while_lora_is_trained():
    apply, params, _, inputs = mixture_block()
    params = WAYS["qlora"](params)
    assert {type(own["w"].w) for own in params.values()} == {hki.QuantizedMatrix}
    check_gradients(apply, params, *inputs)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: mixture.MixtureConfig(**(vars(MIXTURE) | dict(experts_per_token=6))), "experts_per_token 6 is not between 1 and num_experts 5"),
        (lambda: diffusion.UnetConfig(widths=(4, 6), num_groups=4), r"widths \(4, 6\) are not all multiples of num_groups 4"),
        (lambda: diffusion.UnetConfig(num_heads=3), "width 128 is not a multiple of num_heads 3"),
    ],
)  # fmt: skip
def test_impossible_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
