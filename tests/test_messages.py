"""The messages that `docs/sharp_edges.md` explains are those that people see, and the ways out work."""

import re
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from tests.pages import DOCS

PARAMS = {"a": {"w": jnp.ones((8, 8))}}
X = jnp.ones((2, 8))
TUNED = hki.add_lora(hki.quantize_params(PARAMS), 0, rank=2)
TRAINED, FROZEN = hki.partition(TUNED)


def product(params):
    return (X @ params["a"]["w"]).sum()


LOSS = hki.use_implicit_args(product)


def plain_optax():
    optimizer = optax.adam(0.1)
    optimizer.update(hki.grad(product)(TUNED), optimizer.init(TUNED), TUNED)


def other_half():
    grads = jax.grad(lambda trained: LOSS(hki.combine(trained, FROZEN)))(TRAINED)
    optax.adam(0.1).update(grads, optax.adam(0.1).init(FROZEN), TRAINED)


def trained(rank):
    """The arrays that training gets from `hki.freeze`."""
    model = hk.transform(lambda x: hk.Linear(8, name="a", with_bias=False)(x))
    return hki.freeze(model, hki.add_lora(PARAMS, 0, rank=rank))[1]


def cast(params, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), params)


def batch_norm():
    norm = lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=False)  # noqa: E731
    hk.transform_with_state(norm).init(jax.random.key(0), X)


# JAX has the first one up to 0.9, then the second one.
OF_OTHER_ARRAYS, OF_ANOTHER_JAX = sorted(
    ["Dict key mismatch", "pytree structure error: different ... has"],
    reverse=jax.__version_info__ >= (0, 10),
)
# By the beginning of a message on the page, or all of it: what leads to it.
MISTAKES = {
    "grad requires real- or complex-valued inputs": lambda: jax.grad(LOSS)(TUNED),
    "pytree structure error: different types": plain_optax,
    "... was used as if it were a dense array.": lambda: product(TUNED),
    "... is None": lambda: LOSS(hki.partition(hki.add_lora(PARAMS, 0, rank=2))[0]),
    "... are None": lambda: LOSS(TRAINED),
    "None is not a valid value": lambda: jax.tree.map(
        jnp.array, TRAINED, is_leaf=lambda x: x is None
    ),
    "with_dropout: expected": lambda: hki.value_and_grad(
        lambda p: product(hki.with_dropout(p, 0, 0.5))
    )(TUNED),
    "targets: ... matches none": lambda: hki.add_lora(PARAMS, 0, rank=2, targets="attention"),
    "... stays dense": lambda: hki.quantize_params(
        {**PARAMS, "b": {"w": jnp.ones((9, 8))}}, group_size=8
    ),
    "an adapter has more numbers": lambda: hki.add_lora(
        {"a": {"w": jnp.ones((8, 4, 4))}}, 0, rank=4, matrix_axes={}
    ),
    "nothing says which axes of": lambda: hki.add_lora(
        {"a": {"w": jnp.ones((8, 4, 4))}}, 0, rank=2
    ),
    "... was materialized": lambda: hki.use_implicit_args(lambda p: jnp.sin(p["a"]["w"]))(TUNED),
    "codes of ...": lambda: LOSS(cast(TUNED, jnp.float8_e4m3fn)),
    "Indexer must have": lambda: LOSS(
        cast(hki.add_adapter(PARAMS, 0, "trained_rows", ids=[3]), jnp.bfloat16)
    ),
    "unsupported operand type(s) for *: 'float' and 'NoneType'": other_half,
    "add got incompatible shapes": lambda: optax.adam(0.1).update(
        trained(4), optax.adam(0.1).init(trained(2)), trained(4)
    ),
    OF_OTHER_ARRAYS: lambda: optax.adam(0.1).update(
        trained(2), optax.adam(0.1).init(PARAMS), trained(2)
    ),
    "The number of updates": lambda: optax.adamw(0.1).update(
        trained(2), optax.adam(0.1).init(trained(2)), trained(2)
    ),
    "No value for 'average'": batch_norm,
}
OF_TYPEOF = "Triggering __jax_array__() during abstractification is no longer supported."
OF_JAX_ALONE = "Unable to initialize backend 'tpu'"
# `test_freeze.py` sees these, on JAX from 0.9 on.
OF_REFERENCES = [
    "Received incompatible devices for jitted computation",
    "Too many leaves for PyTreeDef; expected ...",
]


def messages():
    """Those in the first column of the page's table."""
    page = (DOCS / "sharp_edges.md").read_text()
    section = page.partition("\n## If you see this message\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| ", section, re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`(.*?)`(?:, |$)", row)]


def said(mistake):
    """The text of the error, or of the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            mistake()
        except Exception as error:
            return " ".join(str(error).split())
    return " ".join(str(warning.message) for warning in found)


@pytest.mark.parametrize("start", MISTAKES)
def test_a_message_on_the_page_is_what_people_see(start):
    [message] = [x for x in messages() if x.startswith(start)]
    pattern = ".*".join(re.escape(part.strip()) for part in message.split("..."))
    assert re.search(pattern, said(MISTAKES[start])), (message, said(MISTAKES[start]))


def test_each_message_is_tried():
    tried = *MISTAKES, OF_ANOTHER_JAX
    rest = [x for x in messages() if not x.startswith(tried)]
    assert rest == [*OF_REFERENCES, OF_TYPEOF, OF_JAX_ALONE]
    assert len(messages()) == len(tried) + len(rest)


def test_the_type_of_an_implicit_array():
    weight = TUNED["a"]["w"]
    message = said(lambda: jax.typeof(weight))
    if jax.__version_info__ < (0, 9):  # These call `__jax_array__`, which has its own message.
        assert message.startswith(OF_TYPEOF) or "was used as if it were a dense array" in message
    else:
        assert message.startswith(OF_TYPEOF)
    assert weight.aval == jax.typeof(PARAMS["a"]["w"])
    turned = hki.use_implicit_args(lambda w: jax.lax.transpose(w, (1, 0)))(weight)
    np.testing.assert_array_equal(hki.materialize(turned), PARAMS["a"]["w"].T)


def test_the_ways_out():
    loss, grads = hki.value_and_grad(product)(TUNED)
    optimizer = hki.freeze_declared(optax.adam(0.1))
    updates, _ = optimizer.update(grads, optimizer.init(TUNED), TUNED)
    stepped = hki.apply_updates(TUNED, updates)
    assert LOSS(stepped) < loss
    grads = jax.grad(lambda trained: LOSS(hki.combine(trained, FROZEN)))(TRAINED)
    assert grads["a"]["w"].b.shape == (2, 8)
    half = hki.use_implicit_args(lambda p: cast(p, jnp.bfloat16))(TUNED)
    assert half["a"]["w"].w.codes.dtype == jnp.int8 and half["a"]["w"].dtype == jnp.bfloat16
    assert LOSS(half) == LOSS(TUNED) == 128


def test_what_has_no_message():
    """As the page says: a dense base is trained, and casts make codes large."""
    params = hki.add_lora(PARAMS, 0, rank=2)
    optimizer = optax.adamw(0.1)
    updates, _ = optimizer.update(jax.grad(LOSS)(params), optimizer.init(params), params)
    new = optax.apply_updates(params, updates)
    assert (np.asarray(new["a"]["w"].w) != 1).all()
    large = cast(TUNED, jnp.bfloat16)
    assert large["a"]["w"].w.codes.nbytes == 2 * TUNED["a"]["w"].w.codes.nbytes
    assert LOSS(large) == LOSS(TUNED)
