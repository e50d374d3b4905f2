"""Module expressions of models that others have published: AlphaFold 2 and ProteinMPNN.

The first run downloads 38 MB, see ``published.py``.
"""

import collections
import functools
import re
from unittest import mock

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.mox import load, make_mox, save
from tests.mox import published
from tests.mox.compare import close, same_bits

pytestmark = pytest.mark.slow


def long(name):
    """A model that takes minutes: another test, or another model, shows the same with `--slow`."""
    return pytest.param(name, marks=pytest.mark.long)


@functools.cache
def case(name):
    """A model, and its expression."""
    model = published.MODELS[name]()
    return model, make_mox(model.transformed)(*model.args, params=model.params)


def lowered(apply, arguments):
    """Of a new function, since JAX keeps what it has traced, and a model may have been changed."""
    return jax.jit(lambda *args: apply(*args)).lower(*arguments)


@functools.cache
def original(name):
    """The model itself: the operations of its program, and its results."""
    model, _ = case(name)
    program = lowered(model.transformed.apply, model.arguments)
    return operations(program), program.compile()(*model.arguments)


def result(apply, model):
    return lowered(apply, model.arguments).compile()(*model.arguments)


def reloaded(mox, folder):
    save(folder / "mox.json", mox)
    return load(folder / "mox.json")


def loss(apply, params, args):
    results = jax.tree.leaves(apply(params, *args))
    floats = [x for x in results if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.sin(x).mean() for x in floats)


def operations(program):
    """Without the names of values: loops take theirs in another order."""
    return re.findall(r"stablehlo\.\w+|call @\w+", program.as_text())


@pytest.mark.parametrize("name", published.MODELS)
def test_evaluates_to_the_same_bits(name):
    model, mox = case(name)
    wanted, results = original(name)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))
    program = lowered(mox.apply, model.arguments)
    assert operations(program) == wanted
    same_bits(program.compile()(*model.arguments), results)


@pytest.mark.parametrize("name", ["evoformer", long("alphafold"), "mpnn_score", "mpnn_sample"])
def test_evaluates_to_the_same_bits_without_jit(name):
    model, mox = case(name)
    same_bits(mox.apply(*model.arguments), model.transformed.apply(*model.arguments))


@pytest.mark.parametrize("name", published.MODELS)
def test_saved_and_loaded(name, tmp_path):
    model, mox = case(name)
    new = reloaded(mox, tmp_path)
    same_bits(result(new.apply, model), original(name)[1])
    assert new.query("//module_call/@path") == mox.query("//module_call/@path")


# (The gradient of the whole AlphaFold takes XLA two minutes to compile.)
@pytest.mark.parametrize("name", [long("evoformer"), "mpnn_score", "mpnn_sample"])
def test_gradients(name, tmp_path):
    """Those of the original, of its expression, and of one from a file."""
    model, mox = case(name)

    def gradient(apply):
        run = lambda params, *args: apply(params, published.RNG, *args)  # noqa: E731
        fun = jax.grad(functools.partial(loss, run), (0, 1), allow_int=True)
        return jax.jit(fun)(model.params, model.args)

    wanted = gradient(model.transformed.apply)
    assert all(np.any(np.asarray(x)) for x in jax.tree.leaves(wanted[0]))
    same_bits(gradient(mox.apply), wanted)
    same_bits(gradient(reloaded(mox, tmp_path).apply), wanted)


# An attention of AlphaFold has three calls: to choose a kernel, for four rows in a loop, for the rest.
CALLS = {
    "evoformer": dict(EvoformerIteration=1, Attention=12, Linear=18, LayerNorm=24),
    "alphafold": dict(EvoformerIteration=2, Attention=27, InvariantPointAttention=1),
    "mpnn_score": dict(EncLayer=3, DecLayer=3, Linear=43, LayerNorm=16),
    "mpnn_sample": dict(EncLayer=3, DecLayer=3, Linear=43, LayerNorm=16),
}


@pytest.mark.parametrize("name", CALLS)
def test_queries(name):
    _, mox = case(name)
    calls = collections.Counter(mox.query("//module_call/@type"))
    assert {kind: calls[kind] for kind in CALLS[name]} == CALLS[name]


@pytest.mark.parametrize("name", ["evoformer", long("alphafold")])
def test_another_activation_within_the_stacks(name):
    """As the model is that was written with it."""
    model, mox = case(name)
    with mock.patch.object(jax.nn, "relu", jax.nn.gelu):
        written = result(model.transformed.apply, model)
    changed = mox.sub('//custom_jvp_call[@name="relu"]', jax.nn.gelu)
    assert changed.query('count(//custom_jvp_call[@name="relu"])') == 0
    same_bits(result(changed.apply, model), written)
    one, other = jax.tree.leaves(written), jax.tree.leaves(original(name)[1])
    assert any(np.any(x != y) for x, y in zip(one, other, strict=True))


def test_new_parameters_in_the_stack_of_the_evoformer():
    """Each of its two layers has parameters of its own."""
    model, mox = case("evoformer")

    def scaled(x):
        gain = hk.get_parameter("gain", x.shape[-1:], init=hk.initializers.RandomNormal(0.1, 1.0))
        return jax.nn.relu(x) * gain

    changed = mox.sub('//custom_jvp_call[@name="relu"]', scaled)
    params = jax.jit(changed.init)(jax.random.PRNGKey(0), *model.args)
    gains = [x["gain"] for x in params.values() if "gain" in x]
    assert len(gains) == 2 and {len(gain) for gain in gains} == {2}
    assert not any((gain[0] == gain[1]).any() for gain in gains)


def test_lora_in_the_attention_of_the_evoformer():
    """By query; values and gradients are those of the weights that it stands for, in the original."""
    model, mox = case("evoformer")
    apply = model.transformed.apply
    attention = mox.parameters('//module_call[@type="Attention"]')
    projections = [path for path in attention if path.endswith("_w")]
    axes = hki.infer_matrix_axes(apply, model.params, published.RNG, *model.args)
    lora = hki.add_lora(model.params, 0, rank=2, alpha=4.0, targets=projections, matrix_axes=axes)
    trained, frozen = hki.partition(lora, trainable_dense=False)
    trained = jax.tree.map(lambda x: x + 0.05 * published.cosines(*x.shape), trained)

    def of_factors(run):
        fun = lambda trained: loss(run, hki.combine(trained, frozen), model.args)  # noqa: E731
        return jax.jit(jax.value_and_grad(fun))(trained)

    with hki.materialization("error"):
        got = of_factors(lambda params, *args: mox.apply(params, published.RNG, *args))
    wanted = of_factors(lambda params, *args: apply(hki.materialize(params), published.RNG, *args))
    assert len(projections) == len(jax.tree.leaves(trained)) / 2 == 20  # `a` and `b` of each
    close(got, wanted)
