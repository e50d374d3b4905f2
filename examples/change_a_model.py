"""Changes models without their source: other functions, other modules, adapters, LoRA.

A query on the model's module expression makes each change, which is compared with a model that is
written that way. The weights are random; the adapters are trained on sequences that repeat.

    python examples/change_a_model.py
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
from haiku_implicit.mox import diff, make_mox
from models import bert, llama
from printing import heading, table

_SIZE = flags.DEFINE_integer("image_size", 64, "Height and width of ResNet50's input.", 32)
_WIDTH = flags.DEFINE_integer("width", 64, "Width of the BERT and the Llama, a multiple of 8.", 8)
_LAYERS = flags.DEFINE_integer("layers", 4, "Their layers.", 1)
_STEPS = flags.DEFINE_integer("steps", 60, "Steps of training of the adapters.", 1)

RELU = '//custom_jvp_call[@name="relu"]'
PROJECTIONS = '//module_call[@type="Linear" and ancestor::module_call[@name="attention"]]'
VOCABULARY, TIME, BATCH = 64, 16, 8


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    an_attention_for_a_layer()
    gelu_in_a_resnet()
    lora_in_every_projection()
    for kind in (BertWithAdapters, LlamaWithAdapters):
        train_adapters(kind)


@contextlib.contextmanager
def stages(what: str, count: int) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar over `count` steps, each of which is named when it begins."""
    shown = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}"
    with tqdm(total=count, desc=what, bar_format=shown, leave=False) as bar:

        def begin(name: str) -> None:
            bar.n += 1
            bar.set_postfix_str(name)  # also draws the bar

        yield begin


# --- an inner layer, and activations ---------------------------------------------------------------


def an_attention_for_a_layer() -> None:
    """Replaces a dense layer within a model by attention."""

    def model(x: jax.Array) -> jax.Array:
        return hk.nets.MLP([64, 42, 10])(x)

    def attention(x: jax.Array) -> jax.Array:
        w_init = hk.initializers.VarianceScaling()
        layer = hk.MultiHeadAttention(2, 21, w_init=w_init, model_size=42)
        return layer(x, x, x)

    x = jax.random.normal(jax.random.key(0), (4, 16))
    with stages("attention", 3) as begin:
        begin("the expression and the change")
        mox = make_mox(hk.transform(model))(x)
        changed = mox.sub('//module_call[@type="Linear" and @output_size=42]', attention)
        begin("init")
        params = changed.init(jax.random.key(1), x)
        begin("apply")
        out = changed.apply(params, None, x)
    heading("hk.Linear(42) becomes attention")
    print(diff(mox, changed).split("\n+    ")[0])
    print("new parameters:", ", ".join(name for name in params if "attention" in name))
    assert out.shape == (4, 10)
    assert "mlp/~/linear_1" not in params


def gelu_in_a_resnet() -> None:
    """Replaces ReLU by GELU, everywhere and in one place."""

    def model(x: jax.Array, is_training: bool) -> jax.Array:
        return hk.nets.ResNet50(10)(x, is_training)

    x = jax.random.normal(jax.random.key(0), (1, _SIZE.value, _SIZE.value, 3))
    resnet = hk.transform_with_state(model)
    rows = []
    with stages("ResNet50", 6) as begin:
        begin("init")
        params, state = jax.jit(resnet.init, static_argnums=2)(jax.random.key(1), x, True)
        # Its last layer starts at zero, which would hide the change.
        params = {
            **params,
            "res_net50/~/logits": jax.tree.map(lambda w: w + 0.01, params["res_net50/~/logits"]),
        }
        begin("the expression")
        mox = make_mox(resnet)(x, False, params=params, state=state)
        relus = mox.query(RELU)
        one = mox.query(f'//module_call[@name="block_group_2"]/module_call[@name="block_3"]{RELU}')
        for label, where in (("nowhere", []), ("in one place", one[-1:]), ("everywhere", relus)):
            begin(f"GELU {label}")
            changed = mox.sub(where, jax.nn.gelu) if where else mox
            logits, _ = jax.jit(changed.apply, static_argnums=4)(params, state, None, x, False)
            rows.append((label, len(changed.query(RELU)), len(changed.query("//function")), logits))
        begin("GELU written by hand")
        want, _ = resnet_with_gelu().apply(params, state, None, x, False)

    heading("ReLU becomes GELU in ResNet50")
    table(
        ["", "ReLUs", "GELUs", "change of the logits"],
        [[a, b, c, f"{abs(d - rows[0][3]).max():.4f}"] for a, b, c, d in rows],
    )
    assert [row[1] for row in rows] == [len(relus), len(relus) - 1, 0]
    assert abs(rows[1][3] - rows[0][3]).max() > 0
    np.testing.assert_allclose(rows[2][3], want, rtol=1e-3, atol=1e-4)


def resnet_with_gelu() -> Any:
    """The same change without the library: exchanges the one name that ResNet's source looks up."""

    def model(x: jax.Array, is_training: bool) -> jax.Array:
        original = jax.nn.relu
        try:
            jax.nn.relu = jax.nn.gelu
            return hk.nets.ResNet50(10)(x, is_training)
        finally:
            jax.nn.relu = original

    return hk.transform_with_state(model)


# --- LoRA, as a weight and as a module --------------------------------------------------------------


class LoRALinear(hk.Module):
    """A linear layer with a correction of low rank (https://arxiv.org/abs/2106.09685)."""

    def __init__(self, output_size: int, with_bias: bool = True, rank: int = 4, name: Any = None):
        super().__init__(name=name)
        assert not with_bias
        self.output_size, self.rank = output_size, rank

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., inputs]` to `[..., output_size]`."""
        sizes = x.shape[-1], self.output_size
        w = hk.get_parameter("w", sizes, init=hk.initializers.VarianceScaling())
        a = hk.get_parameter("a", (sizes[0], self.rank), init=hk.initializers.RandomNormal())
        b = hk.get_parameter("b", (self.rank, sizes[1]), init=jnp.zeros)
        return x @ w + x @ a @ b


def lora_in_every_projection() -> None:
    """Puts LoRA in the attention projections of a Llama: as implicit weights, and as modules."""
    tokens = repeating_tokens(jax.random.key(0))
    model = hk.without_apply_rng(hk.transform(lambda tokens: llama.Llama(llama_config())(tokens)))

    def gradients(apply: Any, params: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return cross_entropy(apply(params, tokens), tokens)

        return jax.jit(jax.value_and_grad(loss))(params)

    with stages("LoRA in a Llama", 4) as begin:
        begin("the expression and its weights")
        mox = make_mox(model)(tokens)
        weights = mox.parameters(PROJECTIONS)
        params = model.init(jax.random.key(1), tokens)
        implicit = hki.add_lora(params, jax.random.key(2), rank=4, targets=weights)
        begin("modules and theirs")
        modules = mox.sub(PROJECTIONS, LoRALinear)
        dense = modules.init(jax.random.key(1), tokens)
        for name in weights:
            module = name.removesuffix("/w")
            weight = implicit[module]["w"]
            dense[f"{module}/lo_ra_linear"] = dict(w=weight.w, a=weight.a, b=weight.b + 0.01)
            implicit[module]["w"] = weight._replace(b=weight.b + 0.01)
        begin("gradients of the weights")
        of_weights = gradients(mox.apply, implicit)
        begin("gradients of the modules")
        of_modules = gradients(modules.apply, dense)
    heading(f"LoRA in the {len(weights)} attention projections of a Llama")
    table(
        ["", "loss", "norm of the factors' gradients"],
        [
            ["implicit weights", f"{of_weights[0]:.6f}", f"{norm(of_weights[1], weights):.6f}"],
            [
                "modules",
                f"{of_modules[0]:.6f}",
                f"{norm(of_modules[1], weights, '/lo_ra_linear'):.6f}",
            ],
        ],
    )
    np.testing.assert_allclose(of_weights[0], of_modules[0], rtol=1e-5)
    for name in weights:
        module = name.removesuffix("/w")
        one, other = of_weights[1][module]["w"], of_modules[1][f"{module}/lo_ra_linear"]
        np.testing.assert_allclose(one.a, other["a"], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(one.b, other["b"], rtol=1e-3, atol=1e-5)


def norm(grads: Any, weights: list[str], suffix: str = "") -> float:
    """Returns the norm of the gradients of all factors."""
    found = [grads[name.removesuffix("/w") + suffix] for name in weights]
    factors = [(g["w"].a, g["w"].b) if not suffix else (g["a"], g["b"]) for g in found]
    return float(optax.global_norm(factors))


# --- adapters ---------------------------------------------------------------------------------------


def bottleneck(x: jax.Array) -> jax.Array:
    """An adapter (https://arxiv.org/abs/1902.00751) on `[..., dim]`, initially the identity."""
    hidden = jax.nn.gelu(hk.Linear(8, name="down")(x))
    return x + hk.Linear(x.shape[-1], w_init=jnp.zeros, name="up")(hidden)


class Adapter(hk.Module):
    """The adapter `bottleneck` as a module."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `bottleneck`."""
        return bottleneck(x)


class BertWithAdapters(bert.Bert):
    """A BERT written with an adapter behind each block."""

    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """See `bert.Bert`."""
        config = self.config
        x = hk.Embed(config.vocab_size, config.dim, name="words")(tokens)
        positions = hk.Embed(config.max_positions, config.dim, name="positions")
        x = x + positions(jnp.arange(tokens.shape[1]))
        x = x + hk.Embed(2, config.dim, name="segments")(jnp.zeros((), jnp.int32))
        x = bert.layer_norm(config, "embedding_norm")(x)
        for i in range(config.num_layers):
            x = bert.Layer(config, name=f"layer_{i}")(x, mask)
            x = Adapter(name=f"layer_{i}_adapter")(x)
        return x


class LlamaWithAdapters(llama.Llama):
    """A Llama written with an adapter behind each block."""

    def __call__(self, tokens: jax.Array, cache_length: int | None = None) -> jax.Array:
        """See `llama.Llama`."""
        embed = hk.Embed(self.config.vocab_size, self.config.dim, name="embed")
        x = embed(tokens)
        for i in range(self.config.num_layers):
            x = llama.Layer(self.config, name=f"layer_{i}")(x, cache_length)
            x = Adapter(name=f"layer_{i}_adapter")(x)
        x = llama.rms_norm(self.config, "final_norm")(x)
        return jnp.einsum("btd,vd->btv", x, embed.embeddings).astype(jnp.float32)


def train_adapters(by_hand: Any) -> None:
    """Trains adapters that are put into a model, and compares with a model written with them."""
    of_bert = issubclass(by_hand, bert.Bert)
    plain, name = (bert.Bert, "bert") if of_bert else (llama.Llama, "llama")
    tokens = repeating_tokens(jax.random.key(3))

    def model(cls: Any) -> Any:
        def apply(tokens: jax.Array) -> jax.Array:
            if not of_bert:
                return cls(llama_config(), name=name)(tokens)
            x = cls(bert_config(), name=name)(tokens, jnp.ones(tokens.shape, bool))
            return hk.Linear(VOCABULARY, name="head")(x)

        return hk.without_apply_rng(hk.transform(apply))

    with stages(name, 3) as begin:
        begin("the expression and the change")
        mox = make_mox(model(plain))(tokens)
        changed = mox.insert_after(
            f"{name}/layer_*",
            bottleneck,
            path=lambda node: f"{node.path}_adapter",
        )
        begin("init")
        params = changed.init(jax.random.key(4), tokens)
        begin("the loss before")
        before = cross_entropy(changed.apply(params, tokens), tokens)
    put, written = (
        train(apply, params, tokens, f"{name}, {how}")
        for apply, how in ((changed.apply, "put in"), (model(by_hand).apply, "by hand"))
    )
    heading(f"adapters behind the {_LAYERS.value} blocks of a {name}, {_STEPS.value} steps")
    table(
        ["", "loss before", "loss after"],
        [
            ["put into the model", f"{before:.5f}", f"{put:.5f}"],
            ["written by hand", f"{before:.5f}", f"{written:.5f}"],
        ],
    )
    np.testing.assert_allclose(put, written, rtol=1e-3)
    assert put < before


def train(apply: Any, params: Any, tokens: jax.Array, label: str) -> float:
    """Trains only the adapters, and returns the last loss."""
    optimizer = optax.adam(1e-2)

    def split(params: Any) -> tuple[Any, Any]:
        chosen = {k: v for k, v in params.items() if "_adapter" in k}
        return chosen, {k: v for k, v in params.items() if k not in chosen}

    @jax.jit
    def step(adapters: Any, state: Any) -> Any:
        def loss(adapters: Any) -> jax.Array:
            return cross_entropy(apply({**frozen, **adapters}, tokens), tokens)

        value, grads = jax.value_and_grad(loss)(adapters)
        updates, state = optimizer.update(grads, state)
        return value, optax.apply_updates(adapters, updates), state

    adapters, frozen = split(params)
    state = optimizer.init(adapters)
    for _ in (bar := tqdm(range(_STEPS.value), label, leave=False)):
        value, adapters, state = step(adapters, state)
        bar.set_postfix(loss=f"{value:.4f}", refresh=False)
    return float(value)


# --- data and models --------------------------------------------------------------------------------


def repeating_tokens(key: jax.Array) -> jax.Array:
    """Returns sequences in which a few tokens repeat, `[batch, time]` int32."""
    start = jax.random.randint(key, (BATCH, 4), 0, VOCABULARY)
    return jnp.tile(start, (1, TIME // 4))


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the mean negative log-likelihood of the next tokens, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


def llama_config() -> llama.LlamaConfig:
    width = _WIDTH.value
    return llama.LlamaConfig(VOCABULARY, width, _LAYERS.value, 4, 2, 2 * width)


def bert_config() -> bert.BertConfig:
    width = _WIDTH.value
    return bert.BertConfig(VOCABULARY, width, _LAYERS.value, 4, 2 * width, TIME)


if __name__ == "__main__":
    app.run(main)
