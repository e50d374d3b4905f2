"""The library's own code under JAX's settings: it never needs ranks to be promoted, and so on.

`test_contract.py` has the rules under these settings. Here is what is around them: functions on trees of
parameters, what is quantized how, and the docstrings' examples.
"""

import doctest
import functools
import importlib
import itertools
import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import haiku_implicit as hki
from haiku_implicit.quantized.numbers.formats import FORMATS, RECIPES
from tests.adapter_cases import METHODS
from tests.settings import setting
from tests.tiers import few

PACKAGE = pathlib.Path(hki.__file__).parent

# --- what promotes ranks, which tracing finds ---------------------------------------------------------

SIZE = 256  # (the blocks of some formats have so many)
X = jax.ShapeDtypeStruct((2, SIZE), jnp.float32)
KEY = jax.random.key(0)


def model(x):
    """A table, a layer, and two in a stack; no rank is promoted in it."""
    weight = lambda name: hk.get_parameter(name, (SIZE, SIZE), init=jnp.ones)  # noqa: E731
    layer = lambda x: jnp.tanh(x @ weight("w"))  # noqa: E731
    embedded = weight("embeddings")[jnp.array([[0], [3]])].sum(1)
    return hk.experimental.layer_stack(2)(layer)(layer(x) + embedded) @ weight("embeddings").T


MODEL = hk.without_apply_rng(hk.transform(model))
ADAPTERS = METHODS | {
    "lora of pissa": dict(rank=2, init="pissa"),
    "dora without alpha": dict(rank=2),
}
# The formats, and ways to find and store scales.
QUANTIZED = {
    **{f"{name} in groups": dict(dtype=name, group_size=32) for name in FORMATS},
    **{name: dict(dtype=name) for name in (*RECIPES, "int8", "int4")},
    "zero point": dict(dtype="int4", group_size=16, zero_point=True),
    "tiles": dict(dtype="int8", group_size=(16, 32)),
    "a scale for all": dict(dtype="int8", group_size="tensor"),
    "activations": dict(dtype="int8", activation="int8"),
    "mse": dict(dtype="int4", group_size=32, calibration="mse"),
    "double": dict(dtype="nf4", group_size=32, scale_dtype="double"),
    "along columns": dict(dtype="int4", group_size=32, axis=-1),
}


def traced(make):
    """Traces the arrays made of parameters, a gradient through them, and their dense twins."""

    def run(x):
        trained, frozen = hki.partition(make(MODEL.init(KEY, x)))
        apply = hki.transform_implicit(MODEL).apply
        whole = lambda trained: hki.with_vector_bank(hki.combine(trained, frozen))  # noqa: E731
        loss = lambda trained, x: jnp.sum(apply(whole(trained), x))  # noqa: E731
        return jax.grad(loss, (0, 1))(trained, x), hki.materialize(whole(trained))

    with setting("jax_numpy_rank_promotion"), hki.materialization("allow"):
        jax.eval_shape(run, X)


@pytest.mark.parametrize("name", few(ADAPTERS, "dora", "shira"))
def test_adapters_promote_no_rank(name):
    method = name.split()[0]
    traced(functools.partial(hki.add_adapter, key=KEY, method=method, **ADAPTERS[name]))


@pytest.mark.parametrize("name", few(QUANTIZED, "nf4 in groups", "zero point"))
def test_quantization_promotes_no_rank(name):
    traced(functools.partial(hki.quantize_params, **QUANTIZED[name]))


@pytest.mark.parametrize("name", ["dora", "trellis3", "rotated"])
def test_half_weights_under_strict_promotion(name):
    edits = {
        "dora": functools.partial(hki.add_adapter, key=KEY, method="dora", **ADAPTERS["dora"]),
        "trellis3": functools.partial(hki.quantize_params, dtype="trellis3"),
        "rotated": functools.partial(hki.quantize_params, dtype="int4", rotate=True),
    }
    w = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        edited = jax.eval_shape(edits[name], {"linear": {"w": w}})
    assert hki.tree_leaves_with_implicit(edited)[0].dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties"])
def test_combining_promotes_nothing(method):
    params = {"linear": {"w": jnp.ones((2, 8, 4))}}
    parts = [hki.get_adapter(hki.add_lora(params, i, rank=2)) for i in range(2)]
    options = {} if method == "linear" else dict(density=0.5, rank=2)
    options |= dict(key=KEY) if method == "dare_ties" else {}
    with setting("jax_numpy_rank_promotion"), jax.numpy_dtype_promotion("strict"):
        hki.combine_adapters(parts, [1.0, 0.5], method, **options)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["awq+gptq", "smoothquant"])
def test_calibration_promotes_no_rank(method):
    """With what the model's layers see, in numbers: that has to be finite."""
    of_maxima = method == "smoothquant"
    inputs = hki.input_maxima if of_maxima else hki.input_moments
    options = dict(dtype="int8", activation="int8") if of_maxima else dict(group_size=8)
    layers = hk.without_apply_rng(
        hk.transform(hk.experimental.layer_stack(2)(lambda x: jnp.tanh(hk.Linear(16, False)(x))))
    )
    x = jax.random.normal(KEY, (4, 16))
    params = layers.init(KEY, x)
    with setting("jax_numpy_rank_promotion"):
        found = inputs(layers.apply, params, [x])
        hki.quantize_with_inputs(params, found, method=method, **options)


def test_the_setting_is_one_that_finds_promotion():
    with pytest.raises(ValueError, match="rank_promotion"):
        traced(lambda params: jax.tree.map(lambda w: w * jnp.ones(SIZE), params))


# --- the docstrings' examples -------------------------------------------------------------------------

WITH_EXAMPLES = [
    path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text()
]
RANKS, LEAKS, DOUBLES = "jax_numpy_rank_promotion", "jax_check_tracer_leaks", "jax_enable_x64"
# What is the example's own: it promotes ranks, or writes float64 into an array of float32.
OF_THE_EXAMPLE = {
    ("haiku_implicit.arrays.constant", RANKS),
    ("haiku_implicit.core.dispatch", RANKS),
    ("haiku_implicit.layers.attention", RANKS),
    ("haiku_implicit.params.quantizing.calibrated", RANKS),
    ("haiku_implicit.params.haiku.hooks", DOUBLES),
    ("haiku_implicit.testing", RANKS),
    ("haiku_implicit.training.gradients", RANKS),
}
EXAMPLES = [
    pytest.param(*row, marks=pytest.mark.long if row[1] == LEAKS else ())  # JAX takes long to look
    for row in itertools.product(WITH_EXAMPLES, (RANKS, "jax_debug_nans", LEAKS, DOUBLES))
    if row not in OF_THE_EXAMPLE
]


def raised(module):
    """Examples that raise what they should not; what they print may be other than in the docstring."""
    found = []

    class Runner(doctest.DocTestRunner):
        def report_failure(self, *_):
            """Of a float64, say, more digits are printed."""

        def report_unexpected_exception(self, out, test, example, exc_info):
            found.append(f"{test.name}: {example.source}{exc_info[1]}")

    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module)):
        Runner(verbose=False).run(test, out=lambda _: None)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module, flag", EXAMPLES)
def test_examples(module, flag):
    with setting(flag):
        found = raised(module)
    assert not found, "\n".join(found)
