"""`haiku_implicit.testing`: right types pass, and each way to be wrong is found by name."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import haiku_implicit as hki
from haiku_implicit.testing import OPERATIONS, check_type
from tests.cases import CASES
from tests.random_arrays import normal


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "zeros", "int8", "outer"])
def test_types_of_the_library(name):
    check_type(lambda seed: CASES[name](seed), rtol=1e-3, atol=1e-4)


@dataclasses.dataclass
class Diagonal(hki.ImplicitArray, core_ndim=2):
    """A right one, whose subclasses below are wrong."""

    d: hki.ArrayValue

    def materialize(self):
        return self.d[..., None] * jnp.eye(self.d.shape[-1], dtype=self.d.dtype)


class OfAnotherDtype(Diagonal):
    def compute_dtype(self):
        return jnp.dtype(jnp.bfloat16)


class WithAWrongRule(Diagonal):
    pass


class WithAWrongGradient(Diagonal):
    pass


@hki.primitive_handler("neg")
def keep(primitive, w: WithAWrongRule):
    return w


@hki.primitive_handler("tanh")
def stop(primitive, w: WithAWrongGradient, **params):
    return jnp.tanh(jax.lax.stop_gradient(w.materialize()))


def diagonal(cls):
    return lambda seed: cls(normal((3,), seed))


FEW = {name: OPERATIONS[name] for name in ("negative", "tanh", "x @ w", "first")}


@pytest.mark.slow
def test_a_right_type_passes_and_what_is_dense_is_listed():
    report = check_type(
        diagonal(Diagonal),
        lambda w: jax.vmap(jnp.diag)(w.d) if w.ndim > 2 else jnp.diag(w.d),
        operations=FEW,
    )
    assert {"neg", "tanh", "dot_general"} <= {event.primitive for event, _ in report}


@pytest.mark.parametrize(
    "cls, message",
    [
        (OfAnotherDtype, r"the array itself: AssertionError: it says that it is bfloat16\[3, 3\]"),
        (WithAWrongRule, "negative, eager: (.|\n)*negative, vmap: (.|\n)*negative, scan: "),
        (WithAWrongGradient, "^1 failures:\ntanh, differentiated: "),
    ],
)
def test_wrong_types_are_found(cls, message):
    dense = lambda w: w.d[..., None] * jnp.eye(3)  # noqa: E731
    with pytest.raises(AssertionError, match=message):
        check_type(diagonal(cls), dense, operations=FEW)
