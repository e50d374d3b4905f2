"""Uses your own types in models that someone else wrote: zeros, a Toeplitz and a Kronecker matrix.

A type is a dataclass that says how to make the dense array, with rules for operations without it.
Nothing here is a part of the library, and the models import nothing of it.

    python examples/own_type.py
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
from dense_twin import difference, size_of
from models import gpt2
from printing import heading, table

_WIDTH = flags.DEFINE_integer("width", 256, "Width of the models, a multiple of 16.", 16)
_LAYERS = flags.DEFINE_integer("layers", 2, "Layers of the GPT-2.", 1)

# The rules that ran, in order.
RAN: list[str] = []


def noted(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a rule so that it records each run in `RAN`."""

    @functools.wraps(rule)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        left = " (NotImplemented)" if result is NotImplemented else ""
        RAN.append(rule.__name__ + left)
        return result

    return run


# --- zeros, in thirty lines -------------------------------------------------------------------------


@dataclasses.dataclass
class MyZeros(hki.ImplicitArray):
    """Zeros, which take no memory."""

    default_dtype = jnp.float32

    def materialize(self) -> jax.Array:
        return jnp.zeros(self.shape, self.dtype)


@hki.primitive_handler("add")
@noted
def add_nothing(primitive: Any, zeros: MyZeros, other: hki.ArrayValue) -> Any:
    """Returns the other operand of a sum with zeros."""
    shape = jnp.broadcast_shapes(zeros.shape, other.shape)
    return other if other.shape == shape else jnp.broadcast_to(other, shape)


@hki.primitive_handler("mul")
@noted
def multiply_by_nothing(primitive: Any, zeros: MyZeros, other: hki.ArrayValue) -> MyZeros:
    """Returns zeros for a product with zeros."""
    shape = jnp.broadcast_shapes(zeros.shape, other.shape)
    return MyZeros(shape=shape, dtype=zeros.dtype)


@hki.primitive_handler("broadcast_in_dim")
@noted
def broadcast(primitive: Any, zeros: MyZeros, *, shape: Any, **params: Any) -> MyZeros:
    """Broadcasts zeros: Haiku repeats a bias for each row of a batch before it is added."""
    return MyZeros(shape=shape, dtype=zeros.dtype)


# --- weights that are made of less ------------------------------------------------------------------


@dataclasses.dataclass
class Toeplitz(hki.ImplicitArray):
    """A matrix `[n, m]` that is constant along its diagonals.

    Attributes:
        d: The diagonals from the upper right to the lower left corner, `[n + m - 1]`.
        n: The number of rows.
    """

    d: jax.Array
    n: int = hki.aux_field()

    def compute_shape(self) -> tuple[int, int]:
        return self.n, self.d.shape[-1] - self.n + 1

    def compute_dtype(self) -> Any:
        return self.d.dtype

    def materialize(self) -> jax.Array:
        n, m = self.shape
        return self.d[np.arange(n)[:, None] - np.arange(m) + m - 1]


@hki.binary_handler("dot_general")
@noted
def correlate(call: Any, x: jax.Array, w: Toeplitz) -> Any:
    """Computes a product with a Toeplitz matrix as a correlation, by a Fourier transform."""
    if len(call.contracted[1]) != 1 or call.batch[1] or not x.dtype == w.dtype == jnp.float32:
        return NotImplemented
    (of_x,), (of_w,) = call.contracted
    # The transposed matrix has the diagonals in reverse order.
    d, m = (w.d, w.shape[1]) if of_w == 0 else (w.d[::-1], w.shape[0])
    products = jnp.fft.rfft(d) * jnp.fft.rfft(jnp.moveaxis(x, of_x, -1), len(d)).conj()
    y = jnp.fft.irfft(products, len(d))[..., m - 1 :: -1]
    return jnp.moveaxis(y, -1, 0) if call.w_first else y


@hki.binary_handler("dot_general", precedence=1)
@noted
def build_small(call: Any, x: jax.Array, w: Toeplitz) -> Any:
    """Builds a small matrix, which is faster; this rule has precedence over `correlate`."""
    return call(x, w.materialize()) if len(w.d) < 32 else NotImplemented


@hki.binary_handler("dot_general")
@noted
def dot_with_nothing(call: Any, x: hki.ArrayValue, zeros: MyZeros) -> MyZeros:
    """Returns zeros for any other operand; JAX itself determines the shape of the result."""
    run = functools.partial(call.primitive.bind, **call.params)
    out = jax.eval_shape(run, *(y.aval for y in call.ordered(x, zeros)))
    return MyZeros(shape=out.shape, dtype=out.dtype)


@dataclasses.dataclass
class Kronecker(hki.ImplicitArray):
    """The matrix `a ⊗ b`, in which each element of `a` multiplies all of `b`."""

    a: jax.Array
    b: jax.Array

    def materialize(self) -> jax.Array:
        return jnp.kron(self.a, self.b)


@hki.binary_handler("dot_general")
@noted
def multiply_by_factors(call: Any, x: jax.Array, w: Kronecker) -> Any:
    """Reshapes the contracted axis to a matrix; each factor multiplies one side."""
    if len(call.contracted[1]) != 1 or call.batch[1]:
        return NotImplemented
    (of_x,), (of_w,) = call.contracted
    a, b = (w.a, w.b) if of_w == 0 else (w.a.T, w.b.T)
    x = jnp.moveaxis(x, of_x, -1)
    matrix = x.reshape(*x.shape[:-1], len(a), len(b))
    options = {k: call.params[k] for k in ("precision", "preferred_element_type")}
    y = jnp.einsum("...ij,ik,jl->...kl", matrix, a, b, **options)
    y = y.reshape(*x.shape[:-1], -1)
    return jnp.moveaxis(y, -1, 0) if call.w_first else y


# --- the types in use -----------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    zeros_in_functions()
    which_rule_runs()
    check_the_types()
    models = zeros_in_a_network, toeplitz_in_a_network, kronecker_in_gpt2
    rows = [compared() for compared in tqdm(models, "models", leave=False)]
    heading("on models that someone else wrote")
    table(
        "weights bytes dense FLOPs dense outputs gradients materialized".split(),
        rows,
    )
    print("(outputs, gradients: largest difference to the dense twin, relative to its largest)")


def zeros_in_functions() -> None:
    """Shows the results of functions of zeros, and an operation without a rule."""
    heading("zeros of one's own")
    zeros, ones = MyZeros(shape=(2, 3)), jnp.ones(3)
    rows = []
    for text, run, want, dense in (
        ("(zeros + ones)[0, 0]", lambda: (zeros_plus(zeros, ones))[0, 0], 1.0, 0),
        ("(1 + zeros) * zeros", lambda: jax.jit(times)(zeros, zeros), 0.0, 0),
        ("sin(zeros), without a rule", lambda: sine(zeros), 0.0, 1),
    ):
        with hki.materialization("allow"), hki.materialization_report() as report:
            result = run()
        rows.append([text, brief(result), report.count])
        np.testing.assert_array_equal(hki.materialize(result), np.full(result.shape, want))
        assert report.count == dense
    table(["", "result", "materialized"], rows)


zeros_plus = hki.use_implicit_args(lambda x, y: x + y)
times = hki.use_implicit_args(lambda x, y: (1 + x) * y)
sine = hki.use_implicit_args(jnp.sin)


@dataclasses.dataclass
class OneSided(MyZeros, commute_ops=False):
    """Zeros whose rules are never called with the operands swapped."""


def which_rule_runs() -> None:
    """Shows swapped operands, rules that decline a case, precedence, and rules for two types."""
    zeros, one_sided = MyZeros(shape=(40, 40)), OneSided(shape=(40, 40))
    small, large = (Toeplitz(jnp.cos(jnp.arange(2.0 * n - 1)), n) for n in (10, 40))
    x = jnp.sin(jnp.arange(1600.0)).reshape(40, 40)
    cases: list[tuple[str, Any, Any, Any]] = [
        ("zeros + x", jnp.add, zeros, x),
        ("x + zeros", jnp.add, x, zeros),
        ("x + zeros, commute_ops=False", jnp.add, x, one_sided),
        ("x - zeros", jnp.subtract, x, zeros),
        ("x @ toeplitz [10, 10]", jnp.matmul, x[:, :10], small),
        ("x @ toeplitz [40, 40]", jnp.matmul, x, large),
        ("einsum('ij,ij', x, toeplitz)", functools.partial(jnp.einsum, "ij,ij"), x, large),
        ("zeros @ toeplitz", jnp.matmul, zeros, large),
    ]
    heading("which rule runs")
    rows = []
    for text, fun, left, right in tqdm(cases, "rules", leave=False):
        jax.clear_caches()  # rules run only while JAX traces
        RAN.clear()
        with hki.materialization("allow"), hki.materialization_report() as report:
            result = hki.use_implicit_args(fun)(left, right)
        want = fun(hki.materialize(left), hki.materialize(right))
        np.testing.assert_allclose(hki.materialize(result), want, rtol=1e-4, atol=1e-4)
        rows.append([text, ", ".join(RAN) or "none", type_name(result), report.count])
    table(["", "rules, in their order", "result", "materialized"], rows)
    ran = [row[1].replace(" (NotImplemented)", "-").split(", ") for row in rows]
    assert ran[:4] == [["add_nothing"], ["add_nothing"], ["none"], ["none"]]
    assert ran[4:6] == [["build_small"], ["build_small-", "correlate"]]
    assert ran[6:] == [["build_small-", "correlate-"], ["dot_with_nothing"]]
    assert [row[3] for row in rows] == [0, 0, 1, 1, 0, 0, 1, 0]


def check_the_types() -> None:
    """Checks values, derivatives, batches, loops; without `operations` it runs some fifty functions."""
    operations = {
        "x @ w": lambda w: jnp.ones((2, w.shape[0])) @ w,
        "w @ x": lambda w: w @ jnp.ones(w.shape[1]),
    }

    def toeplitz(seed: int) -> Toeplitz:
        return Toeplitz(jax.random.normal(jax.random.key(seed), (35,)), 24)

    def kronecker(seed: int) -> Kronecker:
        a, b = jax.random.normal(jax.random.key(seed), (2, 4, 3))
        return Kronecker(a, b)

    heading("hki.testing.check_type, on " + " and ".join(operations))
    makes = {"Toeplitz": toeplitz, "Kronecker": kronecker}
    for name, make in tqdm(makes.items(), "types", leave=False):
        report = hki.testing.check_type(make, operations=operations)
        tqdm.write(f"{name}: right, {report.count} materialized")
        assert report.count == 0


def zeros_in_a_network() -> list[Any]:
    """Puts zeros into the biases of Haiku's MLP."""
    model, params, x = network()
    new = {k: own | dict(b=MyZeros(shape=own["b"].shape)) for k, own in params.items()}
    return compare("MyZeros for biases of hk.nets.MLP", model, new, x)


def toeplitz_in_a_network() -> list[Any]:
    """Puts Toeplitz matrices into the weights of Haiku's MLP."""
    model, params, x = network()

    def weight(w: jax.Array, seed: int) -> Toeplitz:
        n, m = w.shape
        return Toeplitz(jax.random.normal(jax.random.key(seed), (n + m - 1,)) / math.sqrt(n), n)

    new = {k: own | dict(w=weight(own["w"], i)) for i, (k, own) in enumerate(params.items())}
    return compare("Toeplitz weights in hk.nets.MLP", model, new, x)


def kronecker_in_gpt2() -> list[Any]:
    """Puts Kronecker matrices into all projections of a GPT-2: query-key-value, output, up and down."""
    width = _WIDTH.value
    config = gpt2.Gpt2Config(256, width, _LAYERS.value, 4, 4 * width, 64)
    model = hk.without_apply_rng(hk.transform(lambda tokens: gpt2.Gpt2(config)(tokens)))
    tokens = jnp.arange(64).reshape(2, 32)
    params = model.init(jax.random.key(0), tokens)

    def weight(w: jax.Array, seed: int) -> Kronecker:
        # Each factor has about the square root of the rows, and of the columns.
        n, m = (2 ** (int(math.log2(size & -size)) // 2) for size in w.shape)
        shapes = (n, m), (w.shape[0] // n, w.shape[1] // m)
        keys = jax.random.split(jax.random.key(seed))
        a, b = (
            jax.random.normal(k, s) / math.sqrt(s[0]) for k, s in zip(keys, shapes, strict=True)
        )
        return Kronecker(a, b)

    new = {
        k: own | dict(w=weight(own["w"], i)) if "w" in own else own
        for i, (k, own) in enumerate(params.items())
    }
    return compare("Kronecker weights in GPT-2", model, new, tokens)


def network() -> tuple[hk.Transformed, Any, jax.Array]:
    """Returns Haiku's own perceptron, parameters and a batch."""
    width = _WIDTH.value
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([width, width, 16])(x)))
    x = jax.random.normal(jax.random.key(0), (8, width))
    return model, model.init(jax.random.key(1), x), x


def compare(label: str, model: hk.Transformed, params: Any, x: jax.Array) -> list[Any]:
    """Returns a row of the table: the model on implicit parameters, and on dense ones."""

    def both(apply: Any) -> Any:
        def loss(params: Any) -> Any:
            y = apply(params, x)
            return jnp.square(y).mean(), y

        return jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params).compile()

    with hki.materialization("allow"), hki.materialization_report() as report:
        implicit = both(hki.transform_implicit(model).apply)

    def twin(params: Any, x: jax.Array) -> Any:
        """Runs the unmodified model on the matrices, and hides from XLA how they are made."""
        return model.apply(jax.lax.optimization_barrier(hki.materialize(params)), x)

    dense = both(twin)
    ((_, y), grads), ((_, want), want_grads) = implicit(params), dense(params)
    errors = [difference(y, want), difference(grads, want_grads)]
    assert max(errors) < 1e-4 and report.count == 0, (errors, str(report))
    flops = [f"{run.cost_analysis()['flops'] / 1e6:.2f} M" for run in (implicit, dense)]
    sizes = [f"{size_of(p):,}" for p in (params, hki.materialize(params))]
    return [label, *sizes, *flops, *(f"{error:.0e}" for error in errors), report.count]


def brief(x: Any) -> str:
    """Returns an implicit array or a number unchanged, and a dense array's shape."""
    if isinstance(x, hki.ImplicitArray):
        return repr(x)
    return f"dense {list(x.shape)}" if x.ndim else str(x)


def type_name(x: Any) -> str:
    return type(x).__name__ if isinstance(x, hki.ImplicitArray) else "dense"


if __name__ == "__main__":
    app.run(main)
