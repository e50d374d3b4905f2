"""What module expressions were made for, on whole models: against the models that are written that way."""

import functools
from unittest import mock

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import haiku_implicit as hki
from haiku_implicit.mox import make_mox
from models import bert, llama
from tests.mox.compare import close

RELU = '//custom_jvp_call[@name="relu"]'
KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (2, 8), 0, 50)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["everywhere", "one"])
def test_gelu_for_relu_in_resnet50(place):
    calls = []

    def activation(x):
        calls.append(x)
        return jax.nn.gelu(x) if place == "everywhere" or len(calls) == 30 else relu(x)

    relu, x = jax.nn.relu, jax.random.normal(KEY, (1, 32, 32, 3))
    model = hk.transform_with_state(lambda x: hk.nets.ResNet50(10)(x, is_training=True))
    params, state = jax.jit(model.init)(KEY, x)
    logits = params["res_net50/~/logits"]
    logits["w"] = jax.random.normal(KEY, logits["w"].shape)  # zeros at first
    mox = make_mox(model)(x, params=params, state=state)
    relus = mox.query(RELU)
    changed = mox.sub(relus if place == "everywhere" else relus[29], jax.nn.gelu)
    assert len(relus) == 49 and len(changed.query(RELU)) == (0 if place == "everywhere" else 48)
    got = jax.jit(changed.apply)(params, state, None, x)
    with mock.patch.object(jax.nn, "relu", activation):
        want = jax.jit(model.apply)(params, state, None, x)
    close(got, want)


def attention(x):
    layer = hk.MultiHeadAttention(2, 21, w_init=hk.initializers.VarianceScaling(), model_size=42)
    return layer(x, x, x)


@pytest.mark.slow
def test_attention_for_a_dense_layer():
    x = jax.random.normal(KEY, (4, 16))
    mox = make_mox(hk.transform(lambda x: hk.nets.MLP([64, 42, 10])(x)))(x)
    changed = mox.sub('//module_call[@type="Linear" and @output_size=42]', attention)
    params = changed.init(KEY, x)
    outer, inner = ({} for _ in range(2))
    for name, entry in params.items():
        path = name.removeprefix("mlp/~/linear_1/")
        (outer if path == name else inner)[path] = entry
    assert list(outer) == ["mlp/~/linear_0", "mlp/~/linear_2"]
    first, last = outer.values()
    h = jax.nn.relu(x @ first["w"] + first["b"])
    h = jax.nn.relu(hk.transform(attention).apply(inner, None, h))
    close(changed.apply(params, None, x), h @ last["w"] + last["b"])


# --- language models ------------------------------------------------------------------------------


def llama_model(tokens):
    return llama.Llama(llama.LlamaConfig(50, 16, 2, 2, 1, 32))(tokens)


def bert_model(tokens):
    config = bert.BertConfig(50, 16, 2, 2, 32, 8)
    return bert.Bert(config, name="bert")(tokens, jnp.ones(tokens.shape, bool))


def loss(apply, params):
    return jnp.sin(apply(params, TOKENS)).sum()


class LoRALinear(hk.Module):
    """A linear layer with a correction of low rank."""

    def __init__(self, output_size, with_bias=True, name=None):
        super().__init__(name=name)
        self.output_size = output_size

    def __call__(self, x):
        sizes = x.shape[-1], self.output_size
        w = hk.get_parameter("w", sizes, init=hk.initializers.VarianceScaling())
        a = hk.get_parameter("a", (sizes[0], 4), init=hk.initializers.RandomNormal())
        b = hk.get_parameter("b", (4, sizes[1]), init=hk.initializers.RandomNormal())
        return x @ w + x @ a @ b


@pytest.mark.slow
def test_lora_as_weights_and_as_modules():
    where = '//module_call[@type="Linear" and ancestor::module_call[@name="attention"]]'
    model = hk.without_apply_rng(hk.transform(llama_model))
    mox, params = make_mox(model)(TOKENS), model.init(KEY, TOKENS)
    weights = mox.parameters(where)
    assert len(weights) == 8
    modules = mox.sub(where, LoRALinear)
    dense, implicit = modules.init(KEY, TOKENS), hki.add_lora(params, KEY, rank=4, targets=weights)
    names = [name.removesuffix("/w") for name in weights]
    for name in names:
        new, weight = dense[f"{name}/lo_ra_linear"], implicit[name]["w"]
        implicit[name]["w"] = weight._replace(w=new["w"], a=new["a"], b=new["b"])
    (one, of_weights), (other, of_modules) = (
        jax.jit(hki.value_and_grad(functools.partial(loss, apply)))(p)
        for apply, p in ((mox.apply, implicit), (modules.apply, dense))
    )
    close(one, other)
    for name in names:
        grad, new = of_weights[name]["w"], of_modules[f"{name}/lo_ra_linear"]
        close((grad.a, grad.b), (new["a"], new["b"]))


def bottleneck(x):
    hidden = jax.nn.gelu(hk.Linear(4, name="adapter_down")(x))
    return x + hk.Linear(x.shape[-1], name="adapter_up")(hidden)


def with_adapters(model, tokens):
    """The model with an adapter after each block, by Haiku's own means."""

    def after(next_f, args, kwargs, context):
        out = next_f(*args, **kwargs)
        is_layer = isinstance(context.module, llama.Layer | bert.Layer)
        return bottleneck(out) if is_layer and context.method_name == "__call__" else out

    with hk.intercept_methods(after):
        return model(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("model, name", [(bert_model, "bert"), (llama_model, "llama")])
def test_adapters_behind_each_block(model, name):
    plain, written = (
        hk.without_apply_rng(hk.transform(fun))
        for fun in (model, functools.partial(with_adapters, model))
    )
    mox = make_mox(plain)(TOKENS).insert_after(f"{name}/layer_*", bottleneck)
    params = written.init(KEY, TOKENS)
    assert params.keys() == mox.init(KEY, TOKENS).keys() > plain.init(KEY, TOKENS).keys()
    losses, grads = zip(
        *(
            jax.jit(jax.value_and_grad(functools.partial(loss, x.apply)))(params)
            for x in (mox, written)
        ),
        strict=True,
    )
    close(*losses)
    close(*grads)
