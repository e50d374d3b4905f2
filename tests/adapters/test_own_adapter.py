"""Adapters by their class: those of a user beside those of the library."""

import dataclasses
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from tests.adapter_cases import METHODS, normal
from tests.tiers import few


@dataclasses.dataclass
class Columns(hki.adapters.Adapter):
    """A factor for each column, and a second one with an option."""

    field_axes = {"factor": "m"}
    factor: Any

    @classmethod
    def create(cls, weight, rng, *, spread, shift=0.0):
        shape = (*weight.shape[:-2], weight.shape[-1])
        return cls(weight, 1 + shift + spread * jax.random.normal(rng, shape, weight.dtype))

    def equivalent(self):
        return hki.ScaledMatrix(self.w, self.factor, -1)


@dataclasses.dataclass
class Anything(hki.adapters.Adapter, method="any"):
    """Takes any option."""

    factor: Any

    @classmethod
    def create(cls, w, key, **options):
        return cls(w, jnp.full(w.shape[:-1], float(len(options))))

    def equivalent(self):
        return hki.ScaledMatrix(self.w, self.factor, -2)


def base():
    return {"layer": {"w": normal((6, 4)), "b": jnp.ones(4)}, "stack": {"w": normal((2, 6, 4), 1)}}


@pytest.mark.slow
@pytest.mark.parametrize("method", few([Columns, "columns"], Columns))
def test_an_own_type_goes_the_whole_way(method, tmp_path, never_dense):
    params = hki.add_adapter(base(), 0, method, spread=0.5, patterns={"stack/w": {"shift": 2.0}})
    again = hki.add_adapter(base(), 0, Columns, spread=0.5, patterns={"stack/w": {"shift": 2.0}})
    jax.tree.map(np.testing.assert_array_equal, again, params)
    w, stack = params["layer"]["w"], params["stack"]["w"]
    assert isinstance(w, Columns) and params["layer"]["b"] is not None and w.factor.shape == (4,)
    assert 1.0 < float(stack.factor.mean()) - float(w.factor.mean()) < 3.0
    trained, _ = hki.partition(params, trainable_dense=False)
    assert [x.shape for x in jax.tree.leaves(trained)] == [(4,), (2, 4)]
    x = normal((3, 6), 2)
    loss = lambda params: ((x @ params["layer"]["w"]) ** 2).sum()  # noqa: E731
    grads = hki.grad(loss, trainable_dense=False)(params)
    want = jax.grad(lambda f: ((x @ (w.w * f)) ** 2).sum())(w.factor)
    np.testing.assert_allclose(grads["layer"]["w"].factor, want, rtol=1e-5)
    hki.save(tmp_path / "adapter", hki.get_adapter(params))
    again = hki.set_adapter(base(), hki.load(tmp_path / "adapter"))
    jax.tree.map(np.testing.assert_array_equal, again, params)
    merged = hki.merge_adapters(params)
    np.testing.assert_allclose(merged["layer"]["w"], w.w * w.factor, rtol=1e-6)
    back = hki.unmerge_adapters(merged, hki.get_adapter(params))
    np.testing.assert_allclose(back["stack"]["w"], base()["stack"]["w"], rtol=1e-5)
    quantized = hki.quantize_params(base(), dtype="int8")
    new = hki.add_adapter(quantized, 0, method, spread=0.0, targets="layer/w")
    np.testing.assert_array_equal(
        hki.materialize(new["layer"]["w"]), hki.materialize(quantized["layer"]["w"])
    )


IN_ANOTHER_PROCESS = """
import sys
import haiku_implicit as hki
from tests.adapters.test_own_adapter import base  # defines the types, too
folder = sys.argv[1]
params = hki.set_adapter(base(), hki.load(folder + "/adapter"))
print(type(params["layer"]["w"]).__name__, type(hki.load(folder + "/params")["stack"]["w"]).__name__)
hki.save(folder + "/merged", hki.merge_adapters(params))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", [Columns, "columns"])
def test_an_own_type_is_trained_and_saved_and_merged_in_another_process(method, tmp_path):
    params, x = hki.add_adapter(base(), 0, method, spread=0.5), normal((8, 6), 2)
    optimizer = hki.freeze_declared(optax.adam(0.05), trainable_dense=False)

    def loss(params):
        y = jnp.tanh(x @ params["layer"]["w"] + params["layer"]["b"]) @ params["stack"]["w"][0].T
        return ((y - 1) ** 2).mean()

    @jax.jit
    def step(params, state):
        value, grads = hki.value_and_grad(loss, trainable_dense=False)(params)
        updates, state = optimizer.update(grads, state, params)
        return hki.apply_updates(params, updates), state, value

    new, state, losses = params, optimizer.init(params), []
    for _ in range(10):
        new, state, value = step(new, state)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, hki.set_adapter(new, None), base())
    hki.save(tmp_path / "adapter", hki.get_adapter(new))
    hki.save(tmp_path / "params", new)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["Columns", "Columns"], done.stderr
    merged = hki.load(tmp_path / "merged")
    for module in ("layer", "stack"):
        w = new[module]["w"]
        np.testing.assert_allclose(merged[module]["w"], w.w * w.factor[..., None, :], rtol=1e-6)


@pytest.mark.parametrize("name", few(METHODS, "lora", "locon"))
def test_a_class_is_its_name(name):
    kind = hki.LoRA if name == "lora" else type(
        hki.add_adapter({"w": normal((16, 8))}, 0, name, **METHODS[name])["w"])  # fmt: skip
    params = {"layer": {"w": normal((16, 8))}}
    one, two = (hki.add_adapter(params, 0, m, **METHODS[name]) for m in (name, kind))
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert type(one["layer"]["w"]) is kind


def test_any_options():
    new = hki.add_adapter(base(), 0, "any", targets="layer/w", one=1, two=2)["layer"]["w"]
    np.testing.assert_array_equal(new.factor, [2.0] * 6)


def test_the_last_definition_counts_and_a_name_of_the_library_is_refused():
    def defined(name, value):
        return dataclasses.make_dataclass(
            name, [("factor", Any)], bases=(hki.adapters.Adapter,),
            namespace={
                "create": classmethod(lambda cls, w, key: cls(w, jnp.full(w.shape[-1], value))),
                "equivalent": lambda self: hki.ScaledMatrix(self.w, self.factor, -1),
            },
        )  # fmt: skip

    defined("RanTwice", 1.0)
    defined("RanTwice", 2.0)
    new = hki.add_adapter(base(), 0, "rantwice", targets="layer/w")["layer"]["w"]
    np.testing.assert_array_equal(new.factor, [2.0] * 4)
    own = defined("OFT", 3.0)
    try:
        with pytest.raises(ValueError, match="method: 'oft' is the name of .*OFT and .*OFT. Give"):
            hki.add_adapter(base(), 0, "oft")
        assert type(hki.add_adapter(base(), 0, own, targets="layer/w")["layer"]["w"]) is own
        options = dict(block_size=2, targets="layer/w")
        assert hki.add_adapter(base(), 0, hki.adapters.OFT, **options)["layer"]["w"].upper.size == 3
    finally:
        del own.create  # the name is the library's again
    assert hki.add_adapter(base(), 0, "oft", **options)


class NoCreate(hki.adapters.Adapter):
    pass


@pytest.mark.parametrize(
    "method, options, error, message",
    [
        (NoCreate, {}, TypeError, "method: expected a subclass of .*Adapter .* create"),
        ("nocreate", {}, ValueError, "method: expected one of .*'lora'.*or a subclass"),
        (hki.Zeros, {}, TypeError, "method: expected a subclass of .*got .*Zeros"),
        (3, {}, TypeError, "method: expected a subclass .*got 3"),
        (Columns, {}, ValueError, "method 'Columns': expected the options spread, shift .optional"),
        (Columns, dict(rank=2), ValueError, "'Columns': expected .*, got rank"),
        (hki.adapters.DoRA, {}, ValueError, "'DoRA': expected the options rank, alpha .optional"),
        ("dora", dict(rank=0), ValueError, "rank: expected a positive integer, got 0"),
        ("dora", dict(rank=2, patterns={"layr/w": {"rank": 1}}), ValueError,
         "patterns: 'layr/w' matches none of the 2 weights that get an adapter .*Nearest: layer/w"),
        ("lora", dict(rank=2, patterns={"layer/b": {"rank": 1}}), ValueError,
         "patterns: 'layer/b' matches none of the 2 weights"),
        ("lora", dict(rank=2, patterns={"[": {"rank": 1}}), ValueError,
         "patterns: .* is not a regular expression"),
        ("lora", dict(rank=2, patterns={"layer/w": 3}), TypeError,
         "patterns: expected options for 'layer/w', such as .*, got 3"),
        ("lora", dict(rank=2, patterns=["layer/w"]), TypeError, "patterns: expected a mapping from"),
    ],
)  # fmt: skip
def test_errors(method, options, error, message):
    with pytest.raises(error, match=message):
        hki.add_adapter(base(), 0, method, **options)


def test_what_create_returns_is_checked():
    kind = dataclasses.make_dataclass(
        "Wrong", [], bases=(hki.adapters.Adapter,),
        namespace={"create": classmethod(lambda cls, w, key: cls(w[:, :2]))},
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"layer/w .*Wrong.create: expected a Wrong of the shape"):
        hki.add_adapter(base(), 0, kind, targets="layer/w")


def test_a_pattern_may_make_a_rank_fit():
    params = {"wide": {"w": normal((8, 8))}, "narrow": {"w": normal((8, 2))}}
    new = hki.add_adapter(params, 0, "lora", rank=4, patterns={"narrow/w": {"rank": 2}})
    assert (new["wide"]["w"].rank, new["narrow"]["w"].rank) == (4, 2)


@dataclasses.dataclass
class Sharing(Columns):
    """Adds a module, by a function that is no class method."""

    @staticmethod
    def with_shared(params, key, **options):
        return {**params, "shared": {"k": jnp.ones(2)}}


@dataclasses.dataclass(init=False)
class OwnLoRA(hki.LoRA):
    """A LoRA by another name."""


def test_a_shared_module_and_a_subclass_of_lora():
    assert "shared" in hki.add_adapter(base(), 0, Sharing, spread=0.5)
    w = hki.add_adapter(base(), 0, OwnLoRA, rank=2)["layer"]["w"]
    same = hki.add_lora(base(), 0, rank=2)["layer"]["w"]
    assert type(w) is OwnLoRA
    np.testing.assert_array_equal(w.a, same.a)
