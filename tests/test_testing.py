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


@dataclasses.dataclass
class WithANumber(Diagonal):
    by: float = 2.0


@dataclasses.dataclass
class WithAnArrayAsMetadata(Diagonal):
    by: hki.ArrayValue = hki.aux_field(default_factory=lambda: jnp.float32(2))


class WithoutBatches(Diagonal):
    def materialize(self):
        return self.d[:, None] * jnp.eye(self.d.shape[0])


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
        (WithAWrongRule, r"\nnegative, eager, jit: .* \(rules of WithAWrongRule: neg by keep\)"),
        (
            WithAWrongGradient,
            r"^1 failures of WithAWrongGradient\(.*:\ntanh, differentiated: .* by stop\)",
        ),
        (
            WithANumber,
            r"(?s)^1 failures of .*the field by holds 2\.0.*declare it .* hki\.aux_field\(\)",
        ),
        (
            WithAnArrayAsMetadata,
            r"(?s)^1 failures of .*the field by is declared with aux_field\(\)",
        ),
        (
            WithoutBatches,
            r"(?s)^1 failures of .*core_ndim=2 promises that materialize\(\) accepts batch axes",
        ),
    ],
)
def test_wrong_types_are_found(cls, message):
    dense = lambda w: w.d[..., None] * jnp.eye(3)  # noqa: E731
    with pytest.raises(AssertionError, match=message):
        check_type(diagonal(cls), dense, operations=FEW)


@pytest.mark.parametrize(
    "make, got",
    [
        (lambda seed: jnp.ones(3), "a function that returns ArrayImpl"),
        (Diagonal(jnp.ones(3)), r"Diagonal\(float32\[3,3\], d=float32\[3\]\)"),
    ],
)
def test_what_makes_no_array_is_refused(make, got):
    with pytest.raises(TypeError, match=f"make: expected a function .* implicit array, got {got}"):
        check_type(make)
