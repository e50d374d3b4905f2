"""Merging and unmerging, and what went wrong with it elsewhere."""

import dataclasses
import json
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki
from tests.adapter_cases import METHODS, adapted, normal

LOST = ("dora", "trained_rows", "hira")


def moved(params, by=0.3):
    """Adapters with other numbers than those they begin with."""
    trained, frozen = hki.partition(params, trainable_dense=False)
    leaves, treedef = jax.tree.flatten(trained)
    new = [x + by * normal(x.shape, i) for i, x in enumerate(leaves)]
    return hki.combine(treedef.unflatten(new), frozen)


def close(got, want, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), got, want)


@pytest.mark.every(24)
@pytest.mark.parametrize("use", ["matrix", "attention", "layers"])
@pytest.mark.parametrize("method", [m for m in METHODS if m not in LOST])
def test_unmerging_gives_the_base_back(method, use):
    params = hki.combine(*adapted(method, use, "dense"))
    base = hki.set_adapter(params, None)
    merged = hki.merge_adapters(params)
    assert np.abs(merged["layer"]["w"] - base["layer"]["w"]).max() > 1e-3
    close(hki.unmerge_adapters(merged, hki.get_adapter(params)), base)


@pytest.mark.parametrize("method", LOST)
def test_what_does_not_keep_its_base_is_not_unmerged(method):
    params = hki.combine(*adapted(method, "matrix", "dense"))
    merged = hki.merge_adapters(params)
    with pytest.raises(
        ValueError, match=r"layer/w: (DoRA|TrainedRows|HiRA) does not keep .* Keep the base"
    ):
        hki.unmerge_adapters(merged, hki.get_adapter(params))


def test_a_factor_of_zero_is_not_unmerged():
    w = hki.adapters.IA3(normal((4, 3)), jnp.array([1.0, 0.0, 2.0]))
    params = {"layer": {"w": w}}
    with pytest.raises(ValueError, match="layer/w: a factor is zero"):
        hki.unmerge_adapters(hki.merge_adapters(params), hki.get_adapter(params))


def test_unmerging_wants_dense_weights_of_the_same_model():
    params = moved(hki.add_lora({"layer": {"w": normal((4, 4)), "b": jnp.ones(4)}}, 0, rank=1))
    merged, adapter = hki.merge_adapters(params), hki.get_adapter(params)
    with pytest.raises(ValueError, match=r"layer/w: expected the dense weight .* got LoRA"):
        hki.unmerge_adapters(params, adapter)
    other = {"layer": {**merged["layer"], "b": jnp.zeros(4)}}
    with pytest.raises(ValueError, match="layer/b: this parameter was another one"):
        hki.unmerge_adapters(other, adapter)
    hki.unmerge_adapters(other, adapter, check_base=False)
    with pytest.raises(
        ValueError, match="layer/w: the adapter is for this weight, which is not there"
    ):
        hki.unmerge_adapters({"other": merged["layer"]}, adapter)


# --- weights in two places -----------------------------------------------------------------------


def tied(adapter_on):
    """One array as two parameters, of which some get one adapter."""
    table = normal((8, 4))
    params = {"embed": {"embeddings": table}, "head": {"w": table}}
    lora = moved(hki.add_lora({"x": {"w": table}}, 0, rank=2))["x"]["w"]
    for module in adapter_on:
        params[module] = dict.fromkeys(params[module], lora)
    return params, lora


def test_one_weight_with_one_adapter_stays_one_array():
    params, lora = tied(["embed", "head"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = hki.merge_adapters(params)
    assert merged["embed"]["embeddings"] is merged["head"]["w"]
    close(merged["head"]["w"], lora.materialize())


def test_the_same_arrays_in_another_arrangement_are_another_weight():
    lora = hki.LoRA(normal((4, 6)), normal((4, 2), 1), normal((2, 6), 2))
    view = hki.MatrixView.of(normal((4, 2, 3)), [-3], [-2, -1], lambda _: lora)
    merged = hki.merge_adapters({"a": {"w": lora}, "b": {"w": view}})
    assert merged["a"]["w"].shape == (4, 6) and merged["b"]["w"].shape == (4, 2, 3)
    close(merged["b"]["w"].reshape(4, 6), lora.materialize())


@pytest.mark.parametrize("at", ["embed", "head"])
def test_a_merge_says_which_weights_it_unties(at):
    params, lora = tied([at])
    with pytest.warns(UserWarning, match=rf"{at}/\w+: .* same array as .* has no adapter"):
        merged = hki.merge_adapters(params)
    for module, values in merged.items():
        want = lora.materialize() if module == at else params[module]
        close(next(iter(values.values())), want if module == at else next(iter(want.values())))


def test_constants_are_not_tied():
    zeros = hki.zero_params({"a": {"w": jnp.ones((8, 4))}}, targets=True)["a"]["w"]
    lora = hki.LoRA(zeros, normal((8, 1)), normal((1, 4)))
    params = {"a": {"w": lora}, "b": {"w": zeros}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hki.merge_adapters(params)


# --- cases of other libraries' users -------------------------------------------------------------


def test_a_model_with_tied_embeddings_computes_the_same_once_merged():
    """peft#2018, peft#2864: merged into the head, the adapter also changed the embedding.

    In Haiku a tied weight is one parameter. An adapter on it acts at both ends, before and after.
    """

    def forward(ids):
        embed = hk.Embed(8, 4, name="embed")
        x = jnp.tanh(hk.Linear(4)(embed(ids)))
        return x @ embed.embeddings.T

    model = hk.without_apply_rng(hk.transform(forward))
    ids = jnp.array([1, 5, 2])
    params = model.init(jax.random.key(0), ids)
    apply = hki.transform_implicit(model).apply
    lora = moved(hki.add_lora(params, 0, rank=2, targets="embed/embeddings"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = hki.merge_adapters(lora)
    close(apply(lora, ids), model.apply(merged, ids))
    # Both ends: with the adapter at one of them the logits are others.
    table, w = merged["embed"]["embeddings"], merged["linear"]
    x = jnp.tanh(params["embed"]["embeddings"][ids] @ w["w"] + w["b"])
    assert np.abs(x @ table.T - model.apply(merged, ids)).max() > 1e-2


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_an_embedding_may_be_of_both_ends(tied, tmp_path):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "ensure_weight_tying": tied}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    parts = {"A": normal((2, 8)), "B": normal((4, 2), 1)}
    tensors = {f"base_model.model.wte.lora_embedding_{k}": np.array(x) for k, x in parts.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapter = hki.load_peft(tmp_path, {"wte": "embed/embeddings"})
    assert [str(w.message).partition(": wte: ")[2][:35] for w in said] == (
        [] if tied else ["PEFT adapts the look-up alone, unless"[:35]]
    )
    base = {"embed": {"embeddings": normal((8, 4), 2)}}
    want = base["embed"]["embeddings"] + 2 * (parts["A"].T @ parts["B"].T)
    close(hki.merge_adapters(hki.set_adapter(base, adapter))["embed"]["embeddings"], want)


def test_an_adapter_is_not_merged_onto_another_base():
    """unsloth-zoo#810: trained on 4-bit weights, merged into the ones they were made of."""
    dense = {"layer": {"w": normal((8, 4))}}
    quantized = hki.quantize_params(dense, dtype="nf4")
    adapter = hki.get_adapter(moved(hki.add_lora(quantized, 0, rank=1)))
    with pytest.raises(
        ValueError, match="layer/w: the adapter was made for another base than this"
    ):
        hki.set_adapter(dense, adapter)
    whole = hki.set_adapter(quantized, adapter)
    want = hki.materialize(whole["layer"]["w"])
    close(hki.merge_adapters(whole)["layer"]["w"], want)
    by_choice = hki.set_adapter(dense, adapter, check_base=False)
    delta = want - hki.materialize(quantized["layer"]["w"])
    close(hki.merge_adapters(by_choice)["layer"]["w"], dense["layer"]["w"] + delta)


@pytest.mark.parametrize("missing", ["lora_alpha", "r"])
def test_an_alpha_that_is_missing_is_an_error(missing, tmp_path):
    """sglang#34359: without it, adapters were applied 16 times too strongly."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 32, "target_modules": ["q"]}
    del config[missing]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    a, b = np.ones((2, 4), np.float32), np.ones((3, 2), np.float32)
    tensors = {f"base_model.model.q.lora_{k}.weight": x for k, x in (("A", a), ("B", b))}
    safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"{missing}: expected a number, got None"):
        hki.load_peft(tmp_path, {"q": "layer/w"})


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_the_damage_of_requantizing_is_told(dtype):
    """By weight, and of the outputs of the model on a batch."""
    base = {"layer": {"w": normal((32, 16))}}
    params = moved(hki.add_lora(hki.quantize_params(base, dtype=dtype, group_size=8), 0, rank=2))
    with warnings.catch_warnings(record=True) as warned:
        merged = hki.merge_adapters(params, requantize=True)
    assert ["rounding again" in str(w.message) for w in warned] == [True] * (dtype == "int4")
    assert type(merged["layer"]["w"]) is hki.QuantizedMatrix
    apply = hki.use_implicit_args(lambda params, x: x @ params["layer"]["w"])
    x = normal((5, 32), 3)
    found = hki.compare_params(params, merged, apply=apply, args=(x,))
    exact, rounded = (np.asarray(hki.materialize(p["layer"]["w"])) for p in (params, merged))
    relative = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    of_outputs = np.linalg.norm(x @ rounded - x @ exact) / np.linalg.norm(x @ exact)
    np.testing.assert_allclose(found.rows[0].relative, relative, rtol=1e-4)
    np.testing.assert_allclose(found.outputs, of_outputs, rtol=1e-3)
    low, high = {"int4": (0.03, 0.3), "int8": (0.001, 0.02)}[dtype]
    assert low < relative < high


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error"),
    [(dict(dtype="trellis4"), 0.075), (dict(dtype="int4", rotate=True), 0.1)],
)
def test_rotated_weights_are_tuned_saved_merged_and_served_small(options, error, tmp_path):
    def forward(x):
        return hk.Linear(32, with_bias=False)(jnp.tanh(hk.Linear(96, with_bias=False)(x)))

    plain, x = hk.without_apply_rng(hk.transform(forward)), normal((64, 64))
    base = hki.quantize_params(plain.init(jax.random.key(0), x), **options)
    model, trained = hki.freeze(plain, hki.add_lora(base, 0, rank=4))
    step = jax.value_and_grad(lambda p: ((model.apply(p, x) - normal((64, 32), 1)) ** 2).mean())
    losses = []
    for _ in range(3):
        loss, grads = step(trained)
        losses.append(loss)
        trained = jax.tree.map(lambda p, g: p - 20 * g, trained, grads)
    assert losses[2] < 0.99 * losses[0]
    hki.save(tmp_path / "tuned", model.params(trained))
    tuned = hki.load(tmp_path / "tuned")
    merged, dense = hki.merge_lora(tuned, requantize=True), hki.merge_lora(tuned)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    for own in ("linear", "linear_1"):
        want = dense[own]["w"]
        lost = jnp.linalg.norm(hki.materialize(merged[own]["w"]) - want)
        assert 0.2 * error < lost / jnp.linalg.norm(want) < error
    hki.save(tmp_path / "merged", merged)
    served = jax.jit(hki.transform_implicit(plain).apply)
    got, want = served(hki.load(tmp_path / "merged"), x), plain.apply(hki.materialize(merged), x)
    close(got, want)


@pytest.mark.every(2)
@pytest.mark.parametrize("options", [dict(dtype="int8", rotate=True), dict(dtype="trellis3")])
def test_requantizing_without_a_change_keeps_the_codes(options):
    """Also of a stack, of a column of zeros, and of a weight with another one's scale."""
    w = normal((2, 64, 32)).at[..., 3].set(0)
    base = hki.quantize_params({"m": {"w": w}}, matrix_axes={}, **options)
    lora = hki.add_lora(base, 0, rank=1, matrix_axes={})
    with pytest.raises(
        ValueError, match="requantize: expected True or False, got 'int4'. True keeps"
    ):
        hki.merge_lora(lora, requantize="int4")
    again = hki.merge_lora(lora, requantize=True)
    close(hki.materialize(again), hki.materialize(base), 1e-6)
    column = jnp.zeros((2, 1, 32)).at[..., 3].set(1)
    lora["m"]["w"] = lora["m"]["w"]._replace(b=column)
    want = hki.merge_lora(lora)["m"]["w"][..., 3]
    again = hki.materialize(hki.merge_lora(lora, requantize=True))["m"]["w"][..., 3]
    assert jnp.linalg.norm(again - want) < 0.3 * jnp.linalg.norm(
        want
    )  # (trellis3: 0.27 for one column)


@pytest.mark.slow
def test_a_type_that_is_not_quantized_again_is_said():
    w = hki.adapters.Rotated.quantize(normal((64, 32)), lambda w, _: w)
    lora = hki.add_lora({"a": {"w": w}}, 0, rank=2)
    with pytest.warns(UserWarning, match="a/w: merged into a dense weight, since Rotated"):
        merged = hki.merge_lora(lora, requantize=True)
    np.testing.assert_array_equal(merged["a"]["w"], hki.merge_lora(lora)["a"]["w"])


@dataclasses.dataclass
class _Half(hki.ImplicitArray, core_ndim=2):
    """A weight of the user's, in float16."""

    half: jax.Array = hki.frozen_field()

    def materialize(self):
        return self.half.astype(jnp.float32)

    def requantize(self, w):
        return self._replace(half=w.astype(jnp.float16))


def test_a_type_of_the_users_is_quantized_again_by_its_method():
    base = hki.ScaledMatrix(_Half(jnp.ones((4, 3), jnp.float16)), jnp.arange(1.0, 5))
    lora = hki.LoRA(base, normal((4, 2)), normal((2, 3), 1))
    merged = hki.merge_lora({"w": lora}, requantize=True)["w"]
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    assert merged.matrix.half.dtype == jnp.float16
    np.testing.assert_allclose(hki.materialize(merged), hki.materialize(lora), rtol=1e-3, atol=1e-3)


@dataclasses.dataclass
class _Tenths(_Half):
    """A weight of tenths."""

    def requantize(self, w):
        return self._replace(half=(jnp.round(10 * w) / 10).astype(jnp.float16))


def test_a_correction_that_rounding_spoils_is_said():
    """Of 1 + d, which becomes 1 or 1.1: an error of more than half of d, from .034 to .066."""
    sizes = (0.02, 0.066, 0.068, 0.1)

    def tuned(d):
        base = _Tenths(jnp.ones((4, 3), jnp.float16))
        return {"w": hki.LoRA(base, jnp.full((4, 1), d), jnp.ones((1, 3)))}

    tree = {str(d): tuned(d) for d in (0.0, *sizes)}
    with pytest.warns(UserWarning, match="requantize: rounding again") as found:
        merged = hki.merge_adapters(tree, requantize=True)
    [warning] = found
    assert " of 0.02/w, 0.066/w. Keep the adapter" in str(warning.message)
    for d in sizes:
        error = np.linalg.norm(hki.materialize(merged[str(d)]["w"]) - (1 + d))
        assert (error > np.linalg.norm(np.full((4, 3), d)) / 2) == (d < 0.067)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hki.merge_adapters(tree)
        jax.jit(lambda tree: hki.merge_adapters(tree, requantize=True))(tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "size", "lost"),
    [
        (dict(dtype="trellis3"), 0.005, (0.99, 1.01)),  # the codes stay as they are
        (dict(dtype="int4", group_size=32), 0.005, (0.9, 1.2)),
        # Scales by the largest magnitude are others than those of "mse": the rounding begins anew.
        (dict(dtype="int4", group_size=32, calibration="mse"), 0.005, (10, 25)),
        (dict(dtype="int8", calibration="mse"), 0.1, (0.01, 0.15)),
    ],
)
def test_a_small_correction_is_lost_in_few_bits(options, size, lost):
    base = hki.quantize_params({"m": {"w": normal((256, 64))}}, **options)
    tuned = moved(hki.add_lora(base, 0, rank=2))
    before, after = (hki.materialize(x)["m"]["w"] for x in (base, tuned))
    factor = size * np.linalg.norm(before) / np.linalg.norm(after - before)
    tuned["m"]["w"] = tuned["m"]["w"]._replace(b=factor * tuned["m"]["w"].b)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        merged = hki.merge_adapters(tuned, requantize=True)
    want = hki.materialize(tuned)["m"]["w"]
    correction, error = want - before, hki.materialize(merged)["m"]["w"] - want
    ratio = np.linalg.norm(error) / np.linalg.norm(correction)
    assert lost[0] < ratio < lost[1]
    assert any("rounding again" in str(w.message) for w in found) == (ratio > 0.5)
