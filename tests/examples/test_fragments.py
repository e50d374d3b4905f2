"""Code in the pages that goes on with what a reader has: it runs with a small model in its place."""

import contextlib
import functools
import pathlib
import types
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
import smollm
from haiku_implicit.quantization import QtRule
from models.cached_attention import CachedAttention, Sizes
from tests.examples import tiny_llama
from tests.pages import DOCS, SINGLE, code_blocks, name_of

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
X = jnp.ones((2, 8))


def mlp(name):
    """A model without state, and its parameters."""
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 8], name=name)(x)))
    return model, model.init(jax.random.key(0), X)


def run(code, **names):
    """The names after some code; `names` are those that it goes on with."""
    scope = dict(hk=hk, hki=hki, jax=jax, jnp=jnp, **names)
    exec(compile(code, "a page", "exec"), scope)
    return scope


def attention(code, folder):
    found = run(code, CachedAttention=CachedAttention, sizes=Sizes(2, 1, 4, 4))
    x, mask = jnp.ones((1, 2, 8)), jnp.ones((1, 4), bool)
    _, state = found["model"].init(jax.random.key(0), x, mask)
    assert hki.QuantizedCache in map(type, hki.tree_leaves_with_implicit(state))


def a_type_in_files(code, folder):
    found = run(code, NamedTuple=NamedTuple, Any=Any, __name__="fragments")
    hki.save(folder / "file", found["Training"](3, {"w": X}))
    assert hki.load(folder / "file").step == 3


def quantized_training(code, folder):
    found = run(code, QtRule=QtRule, params=mlp("llama")[1])
    assert isinstance(found["params"]["llama/~/linear_0"]["w"], hki.TrainedQuantized)


def static_scales(code, folder):
    params = {name: {"w": jnp.ones((8, 8))} for name in ("mixture/up", "a/router", "head")}
    found = run(code, functools=functools, QtRule=QtRule, params=params, axes={})
    kinds = {name: type(x["w"]).__name__ for name, x in found["params"].items()}
    assert kinds == dict.fromkeys(("mixture/up", "head"), "TrainedQuantized") | {
        "a/router": "ArrayImpl"
    }


def serving(code, folder):
    t, dense = mlp("net")
    t = hki.transform_implicit(t)
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    params = hki.quantized_training(dense, [rule])
    found = run(code, t=t, params=params, state={}, images=X)
    np.testing.assert_allclose(found["logits"], t.apply(dense, X), rtol=0.1, atol=0.05)


def a_folder_of_the_hub(code, folder):
    tokens = jnp.array([[1, 2, 3]])
    code = code.replace("path/to/folder", str(DATA / "hub" / "gpt2"))
    found = run(code, tokens=tokens)
    assert found["logits"].shape[:2] == (1, 3)


def a_gguf_file(code, folder):
    tensors = tiny_llama.gguf_tensors(np.load(DATA / "llama_golden.npz"))
    source = tiny_llama.write_gguf(folder / "source.gguf", tensors)
    params = smollm.read_gguf(source).params
    lora = hki.add_lora(params, 0, rank=2, targets=".*_proj/w")
    with contextlib.chdir(folder):
        run(code, params=lora, smollm=smollm, source=source)
    again = smollm.read_gguf(folder / "shakespeare.gguf").params
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), hki.materialize(again), params
    )


class AlphaGenome(hk.Module):
    def __call__(self, x):
        with hk.name_scope("mha_block"):
            x = hk.Linear(8, name="q_layer")(x)
        x = hk.Conv1D(8, 3)(x[None])[0]
        with hk.name_scope("head"):
            return hk.Linear(8)(x)


def alphagenome(code, folder):
    """The steps on a small model with the names of the preset."""
    forward = hk.transform_with_state(lambda x: AlphaGenome(name="alphagenome")(x))
    params, state = forward.init(jax.random.key(0), X)
    steps = []
    finetune = types.SimpleNamespace(get_train_step=lambda *args: steps.append(args))
    found = run(code, forward=forward, params=params, optimizer=None, finetune=finetune)
    kinds = {type(x["w"]).__name__ for x in found["params"].values()}
    assert kinds == {"LoRA", "LoCon", "ArrayImpl"}
    assert set(found["trained"]["alphagenome/head/linear"]) == {"w", "b"}
    assert steps[0][0] == found["model"].apply


class GraphNet(hk.Module):
    def __call__(self, x):
        return self._networks_builder()(x).var()

    def _networks_builder(self):
        return hk.nets.MLP([32, 32], name="processor_edges_0_mlp")


def graph_net():
    model = hk.transform_with_state(lambda x: GraphNet(name="mesh_gnn")(x))
    return model, *model.init(jax.random.key(0), jnp.eye(32))


def graphcast(code, folder):
    dense, params, _ = graph_net()
    found = run(code, params=params, loss_fn=dense)["params"]
    assert {name for own in found.values() for name in own} == {"w_lora_a", "w_lora_b"}


def graphcast_training(code, folder):
    dense, params, state = graph_net()
    model, trained = hki.freeze(dense, hki.add_lora(params, 0, rank=2))

    def grads_fn(params, state, inputs, targets, forcings):
        loss = lambda params: model.apply(params, state, None, inputs)[0] + targets * forcings  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        return value, {}, state, grads

    data = dict(train_inputs=jnp.eye(32), train_targets=1.0, train_forcings=1.0)
    with_configs = functools.partial
    names = dict(grads_fn=grads_fn, with_configs=with_configs, optax=optax)
    found = run(code, params=trained, state=state, **names, **data)
    before, after = (
        model.apply(p, state, None, jnp.eye(32))[0] for p in (trained, found["params"])
    )
    assert after < 0.9 * before


def graphcast_merged(code, folder):
    dense, params, state = graph_net()
    model, trained = hki.freeze(dense, hki.add_lora(params, 0, rank=2))
    found = run(code, dense=dense, model=model)["merged"]
    got, want = (m.apply(trained, state, None, jnp.eye(32))[0] for m in (found, model))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def alphafold2(code, folder):
    def loss(x):
        w = hk.get_parameter("query_w", [32, 4, 8], init=hk.initializers.RandomNormal())
        return jnp.einsum("ni,ihw->nhw", x, w).var()

    model, key, batch = hk.transform(loss), jax.random.key(0), jnp.eye(32)
    params = model.init(key, batch)
    found = run(code, model=model, params=params, key=key, batch=batch)
    assert found["grads"]["~"]["query_w_lora_b"].shape == (4, 32)  # one matrix, and not 32
    np.testing.assert_allclose(found["loss"], model.apply(params, key, batch), rtol=1e-5)


def proteinmpnn(code, folder):
    model = hk.transform(lambda x: hk.nets.MLP([16, 8], name="net")(x))
    key, params = jax.random.key(0), mlp("net")[1]
    names = dict(nll=lambda apply, *args: apply(*args), key=key, batch=X)
    found = run(code, model=model, params=params, **names)
    assert found["grads"]["net/~/linear_0"]["w_lora_b"].any()
    np.testing.assert_allclose(found["loss"], model.apply(params, key, X).mean(), rtol=1e-5)


def alphafold3(code, folder):
    """On a weight of each form that the preset has axes for, and one more."""
    trunk, head = "__layer_stack_no_per_layer/trunk_pairformer", "diffusion_head/transformer"
    shapes = {
        f"{trunk}/pair_attention1/gating_query": (64, 32),
        f"{trunk}/pair_attention1/k_projection": (2, 16, 32),
        f"{head}/transformerv_projection": (32, 4, 16),
        f"{head}/pair_logits_projection": (32, 4, 2),
        f"{head}/transformertransition2": (32, 64),
    }
    params = {path: {"weights": jnp.ones(shape)} for path, shape in shapes.items()}
    dense = hk.transform(lambda x: x)
    found = run(code, params=params, key=jax.random.key(0), forward=dense)
    first = {path: next(iter(own.values())).shape for path, own in found["trained"].items()}
    assert first == dict.fromkeys(shapes, (32, 4))
    kinds = {row.kind for row in hki.summary(found["params"]).rows}
    assert all("LoRA of QuantizedMatrix int4" in kind for kind in kinds)


# By pages, in their order. The client in docs/serving.md is in tests/examples/test_serve.py.
FRAGMENTS = {
    "attention.md": [attention],
    "files.md": [a_type_in_files],
    "qwix.md": [quantized_training, static_scales, serving],
    "models.md": [a_folder_of_the_hub],
    "gguf.md": [a_gguf_file],
    "finetune_alphafold2.md": [alphafold2],
    "finetune_alphafold3.md": [alphafold3],
    "finetune_alphagenome.md": [alphagenome],
    "finetune_graphcast.md": [graphcast, graphcast_training, graphcast_merged],
    "finetune_proteinmpnn.md": [proteinmpnn],
}
ELSEWHERE = ["index.md", "serving.md"]


def without_output(page):
    return [code for code, shown in code_blocks(page) if not shown]


@pytest.mark.slow
@pytest.mark.all_slow
@pytest.mark.parametrize(
    "page, index", [(p, i) for p, own in FRAGMENTS.items() for i in range(len(own))]
)
def test_a_fragment_runs(page, index, tmp_path):
    FRAGMENTS[page][index](without_output(DOCS / page)[index], tmp_path)


def test_no_code_is_left_out():
    pages = {name_of(page): len(without_output(page)) for page in SINGLE}
    pages = {name: count for name, count in pages.items() if count and name not in ELSEWHERE}
    assert pages == {name: len(own) for name, own in FRAGMENTS.items()}
