"""Arguments of a kind are taken, and refused, alike everywhere: patterns, random keys, slots."""

import inspect
import json
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from haiku_implicit import quantization as Q
from haiku_implicit.quantization import QtRule, QuantRule

PARAMS = {"l": {"w": np.ones((32, 8), np.float32), "b": np.ones(8, np.float32)}}
PARAMS, X = jax.device_put((PARAMS, np.ones((2, 32), np.float32)))
TUNED = hki.add_lora(PARAMS, 0, rank=2)
MODEL = hk.transform(lambda x: hk.Linear(8, name="l")(x))
RULE = [QtRule(weight_qtype="int8")]
SPEC = jax.sharding.PartitionSpec()


def apply(params, x):
    return x @ params["l"]["w"] + params["l"]["b"]


def loss(params):
    return apply(params, X).sum()


def made_with(context, hook):
    """Runs `init` of a layer under a creator or a getter."""

    def forward(x):
        with context(hook):
            return hk.Linear(4)(x)

    return hki.transform_implicit(hk.transform(forward)).init(jax.random.key(0), X)


def creator(hook):
    return made_with(hk.custom_creator, hook)


def getter(hook):
    return made_with(hk.custom_getter, hook)


def saved(path, tree):
    hki.save(path, tree)
    return path


def mesh():
    return jax.make_mesh((1,), ("a",))


# Every public function of a pattern, by its name and the argument; each is called with a pattern and a
# free path.
PATTERNS = {
    "AdapterBank.of targets": lambda p, _: hki.AdapterBank.of(PARAMS, capacity=2, rank=2, targets=p),
    "AdapterBank.of exclude": lambda p, _: hki.AdapterBank.of(PARAMS, capacity=2, rank=2, exclude=p),
    "Checkpoint.read only": lambda p, f: hki.open_checkpoint(saved(f, PARAMS)).read(only=p),
    "QtRule module_path": lambda p, _: QtRule(module_path=p, weight_qtype="int8"),
    "QuantRule module_path": lambda p, _: QuantRule(module_path=p, weight_qtype="int8"),
    "add_adapter targets": lambda p, _: hki.add_adapter(PARAMS, 0, "dora", rank=2, targets=p),
    "add_adapter exclude": lambda p, _: hki.add_adapter(PARAMS, 0, "dora", rank=2, exclude=p),
    "add_adapter patterns": lambda p, _: hki.add_adapter(
        PARAMS, 0, "dora", rank=2, patterns={p: {"rank": 1}}
    ),
    "add_adapter matrix_axes": lambda p, _: hki.add_adapter(
        PARAMS, 0, "dora", rank=2, matrix_axes={p: ((-2,), (-1,))}
    ),
    "add_lora targets": lambda p, _: hki.add_lora(PARAMS, 0, rank=2, targets=p),
    "add_lora exclude": lambda p, _: hki.add_lora(PARAMS, 0, rank=2, exclude=p),
    "auto_in_axes exclude": lambda p, _: hki.auto_in_axes(PARAMS, 32, exclude=p),
    "cache_creator targets": lambda p, _: creator(hki.cache_creator(targets=p)),
    "freeze trainable_dense": lambda p, _: hki.freeze(MODEL, PARAMS, trainable_dense=p),
    "freeze_declared trainable_dense": lambda p, _: hki.freeze_declared(
        optax.sgd(1.0), trainable_dense=p
    ),
    "freeze_keys trainable_dense": lambda p, _: hki.freeze_keys(
        optax.sgd(1.0), hki.LoRA, ["w"], trainable_dense=p
    ),
    "freeze_subtrees trainable_dense": lambda p, _: hki.freeze_subtrees(
        optax.sgd(1.0), [PARAMS], trainable_dense=p
    ),
    "get_adapter trainable_dense": lambda p, _: hki.get_adapter(TUNED, trainable_dense=p),
    "grad trainable_dense": lambda p, _: hki.grad(loss, trainable_dense=p)(TUNED),
    "input_maxima targets": lambda p, _: hki.input_maxima(apply, PARAMS, [X], targets=p),
    "input_maxima exclude": lambda p, _: hki.input_maxima(apply, PARAMS, [X], exclude=p),
    "input_moments targets": lambda p, _: hki.input_moments(apply, PARAMS, [X], targets=p),
    "input_moments exclude": lambda p, _: hki.input_moments(apply, PARAMS, [X], exclude=p),
    "load only": lambda p, f: hki.load(saved(f, PARAMS), only=p),
    "load_gguf dequantize": None,
    "load_hugging_face dequantize": lambda p, f: hki.load_hugging_face(
        saved(f"{f}.safetensors", {"l": jnp.ones((2, 3))}), lambda name: f"{name}/w", dequantize=p
    ),
    "lora_creator targets": lambda p, _: creator(hki.lora_creator(rank=2, targets=p)),
    "lora_getter targets": lambda p, _: getter(hki.lora_getter(rank=2, targets=p)),
    "lora_fa trainable_dense": lambda p, _: hki.lora_fa(optax.sgd(1.0), trainable_dense=p),
    "matching_rule rules": lambda p, _: Q.matching_rule([QuantRule(module_path=p)], "l"),
    "names_by_pattern patterns": lambda p, _: hki.names_by_pattern({p: "l/w"}),
    "partition trainable_dense": lambda p, _: hki.partition(TUNED, trainable_dense=p),
    "place specs": lambda p, _: hki.place(PARAMS, [(p, SPEC)], mesh()),
    "quantization_aware targets": lambda p, _: hki.quantization_aware(PARAMS, RULE, targets=p),
    "quantization_aware exclude": lambda p, _: hki.quantization_aware(PARAMS, RULE, exclude=p),
    "quantize_activations targets": lambda p, _: hki.quantize_activations(
        hki.quantize_params(PARAMS), targets=p
    ),
    "quantize_activations exclude": lambda p, _: hki.quantize_activations(
        hki.quantize_params(PARAMS), exclude=p
    ),
    "quantize_creator targets": lambda p, _: creator(hki.quantize_creator(targets=p)),
    "quantize_getter targets": lambda p, _: getter(hki.quantize_getter(targets=p)),
    "quantize_params targets": lambda p, _: hki.quantize_params(PARAMS, targets=p),
    "quantize_params exclude": lambda p, _: hki.quantize_params(PARAMS, exclude=p),
    "quantize_params matrix_axes": lambda p, _: hki.quantize_params(
        PARAMS, matrix_axes={p: ((-2,), (-1,))}
    ),
    "quantized_training targets": lambda p, _: hki.quantized_training(PARAMS, RULE, targets=p),
    "quantized_training exclude": lambda p, _: hki.quantized_training(PARAMS, RULE, exclude=p),
    "quantized_training_getter targets": lambda p, _: getter(
        hki.quantized_training_getter(RULE, targets=p)
    ),
    "read_names path": lambda p, f: (f.write_text(json.dumps({p: "l/w"})), hki.read_names(f)),
    "save_gguf kind": lambda p, f: hki.save_gguf(
        f"{f}.gguf", PARAMS, {"l.w": "l/w"}, kind={p: "F32"}, metadata={}
    ),
    "sensitivity targets": lambda p, _: hki.sensitivity(apply, PARAMS, [(X,)], {"8": {}}, targets=p),
    "sensitivity exclude": lambda p, _: hki.sensitivity(apply, PARAMS, [(X,)], {"8": {}}, exclude=p),
    "shardings specs": lambda p, _: hki.shardings(PARAMS, [(p, SPEC)], mesh()),
    "summary trainable_dense": lambda p, _: hki.summary(TUNED, trainable_dense=p),
    "value_and_grad trainable_dense": lambda p, _: hki.value_and_grad(loss, trainable_dense=p)(TUNED),
    "zero_params targets": lambda p, _: hki.zero_params(PARAMS, targets=p),
    "zero_params exclude": lambda p, _: hki.zero_params(PARAMS, targets=".*/w", exclude=p),
    "zeros_creator targets": lambda p, _: creator(hki.zeros_creator(p)),
    "zeros_getter targets": lambda p, _: getter(hki.zeros_getter(p)),
}  # fmt: skip
NAMES_OF_PATTERNS = {"targets", "exclude", "trainable_dense", "only", "patterns", "dequantize"}
# `load_gguf` and `load_hugging_face` read this argument in one function.
CALLED = {name: call for name, call in PATTERNS.items() if call}


def public(names):
    """`function argument` of all public functions and classes that have an argument of these names."""
    found = set()
    for name in hki.__all__:
        value = getattr(hki, name)
        own = {name: value}
        if inspect.isclass(value):
            own |= {f"{name}.{k}": getattr(value, k) for k in vars(value) if not k.startswith("_")}
        for label, x in own.items():
            if callable(x) and not (inspect.isclass(x) and issubclass(x, Exception)):
                arguments = inspect.signature(x).parameters
                found |= {f"{label} {argument}" for argument in arguments if argument in names}
    return found


def test_all_patterns_are_here():
    assert public(NAMES_OF_PATTERNS) <= set(PATTERNS)


@pytest.mark.parametrize("name", CALLED)
def test_what_is_no_regular_expression(name, tmp_path):
    argument = {"rules": "module_path", "path": "names"}.get(name.split()[1], name.split()[1])
    argument = "names" if name.startswith("names_by") else argument
    with pytest.raises(
        ValueError, match=rf"{argument}: .*'\[' is not a regular expression: untermin"
    ):
        CALLED[name]("[", tmp_path / "x")
    for wrong in (3, 1.5, re.compile(b"x")):
        if name == "read_names path":  # JSON has texts only
            continue
        with pytest.raises((TypeError, ValueError), match=rf"{argument}: .*regular expression"):
            CALLED[name](wrong, tmp_path / "x")


@pytest.mark.parametrize(
    "patterns",
    [{"l/w": 3}, {"l/w": None}, {"l/w": [("rank", 1)]}, [("l/w", {"rank": 1})], "l/w", 3],
)
def test_patterns_are_mappings_of_options(patterns):
    known = isinstance(patterns, dict)
    message = "options for 'l/w', such as" if known else "a mapping from regular .* to mappings of"
    with pytest.raises(TypeError, match=f"patterns: expected {message}"):
        hki.add_adapter(PARAMS, 0, "dora", rank=2, patterns=patterns)


@pytest.mark.parametrize("axes", [{"l/w": 3}, {"l/w": (-2, -1)}, {"l/w": None}])
def test_matrix_axes_are_two_sequences(axes):
    with pytest.raises(TypeError, match=r"matrix_axes: 'l/w': expected the axes of the rows and"):
        hki.add_lora(PARAMS, 0, rank=2, matrix_axes=axes)
    with pytest.raises(
        TypeError, match="matrix_axes: expected a mapping from names to axes, got 3"
    ):
        hki.add_lora(PARAMS, 0, rank=2, matrix_axes=3)


def test_a_name_that_is_no_regular_expression_has_its_axes():
    params = {"a[": {"w": jnp.ones((8, 2, 4))}, "b": {"w": jnp.ones((8, 2, 4))}}
    axes = {"a[/w": ((-3,), (-2, -1)), "b/.*": ((-3,), (-2, -1))}
    new = hki.add_lora(params, 0, rank=3, matrix_axes=axes)
    assert [new[name]["w"].matrix.shape for name in params] == [(8, 8), (8, 8)]


# --- random keys -------------------------------------------------------------------------------------

TRAINED = hki.quantized_training(
    PARAMS, [QtRule(weight_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform")]
)
ADAPTERS = [hki.get_adapter(hki.add_lora(PARAMS, i, rank=2)) for i in range(2)]


def rounded(key):
    """A gradient of a product, rounded with noise of the key."""
    rule = QtRule(weight_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform")
    product = lambda w: Q.einsum("ij,jk->ik", X, w, rule=rule, key=key).sum()  # noqa: E731
    return jax.grad(product)(PARAMS["l"]["w"])


KEYS = {
    "add_lora": lambda key: hki.add_lora(PARAMS, key, rank=2),
    "add_adapter": lambda key: hki.add_adapter(PARAMS, key, "dora", rank=2),
    "with_dropout": lambda key: hki.with_dropout(TUNED, key, 0.5),
    "with_rounding_key": lambda key: hki.with_rounding_key(TRAINED, key),
    "combine_adapters": lambda key: hki.combine_adapters(
        ADAPTERS, [0.5, 0.5], "dare", density=0.5, key=key
    ),
    "einsum": rounded,
}


def same(a, b):
    raw = lambda x: (  # noqa: E731
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(raw(x), raw(y)), a, b)


@pytest.mark.parametrize("name", KEYS)
def test_a_seed_is_a_key(name):
    want = KEYS[name](jax.random.key(7))
    for key in (7, np.int64(7), np.uint32(7), jnp.int32(7), jax.random.PRNGKey(7)):
        same(KEYS[name](key), want)


@pytest.mark.parametrize("name", KEYS)
def test_what_is_no_key(name):
    for wrong in (True, 1.5, "0", jnp.ones(2), np.zeros(3, np.int32), [0, 1], np.bool_(True)):
        with pytest.raises(
            TypeError, match="key: expected a random key, as .* or an integer seed, got"
        ):
            KEYS[name](wrong)
    with pytest.raises((TypeError, ValueError), match=r"key\b.*random key|random key.*\bkey="):
        KEYS[name](None)
    for several in (jax.random.split(jax.random.key(0), 3), np.zeros((3, 2), np.uint32)):
        with pytest.raises(
            ValueError, match=r"key: expected one random key, got an array of them, \[3"
        ):
            KEYS[name](several)
    with pytest.raises(
        ValueError, match="key: expected a seed of at most 64 bits, got 1180591620717"
    ):
        KEYS[name](2**70)


# --- slots -------------------------------------------------------------------------------------------

BANK = hki.AdapterBank.of(PARAMS, capacity=3, rank=2)
SLOTS = {
    "put": lambda slot: BANK.put(slot, hki.get_adapter(TUNED)).slots,
    "remove": lambda slot: BANK.remove(slot).slots,
    "select": lambda slot: BANK.select(slot),
}


@pytest.mark.parametrize("name", SLOTS)
def test_a_slot_is_an_integer_of_the_bank(name):
    for slot in (2, np.int8(2), jnp.int32(2), np.array(2)):
        same(SLOTS[name](slot), SLOTS[name](2))
    for wrong in (
        True,
        np.bool_(True),
        1.0,
        jnp.float32(1),
        -1,
        3,
        2**70,
        None,
        "1",
        jnp.arange(2),
    ):
        with pytest.raises(ValueError, match="slot: expected (an integer from )?0 to 2, got "):
            SLOTS[name](wrong)


@pytest.mark.parametrize("slots", [[True, False], [0.0, 1.0], [0, 3], [-1, 0], [[0]], 0])
def test_slots_of_a_batch(slots):
    with pytest.raises(ValueError, match="slots?: expected"):
        hki.with_bank(apply)(BANK, np.array(slots), X)


@pytest.mark.parametrize("capacity", [0, -1, True, 2.0, None, "2"])
def test_a_capacity_is_a_positive_integer(capacity):
    with pytest.raises(ValueError, match="capacity: expected an integer, 1 or more, got"):
        hki.AdapterBank.of(PARAMS, capacity=capacity, rank=2)
