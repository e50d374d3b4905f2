"""`box`: its dense value in JAX alone, the implicit array itself to an interpreter around it."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import haiku_implicit as hki

N, M, BATCH = 3, 2, 4


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(scale=0.5, size=shape), jnp.float32)


@dataclasses.dataclass
class Codes(hki.ImplicitArray, core_ndim=2):
    """A type with integer leaves, as quantized weights have them."""

    codes: hki.ArrayValue
    scale: hki.ArrayValue

    def materialize(self):
        return self.codes * self.scale


@dataclasses.dataclass
class Diagonal(hki.ImplicitArray):
    """A type without batch axes."""

    d: hki.ArrayValue

    def materialize(self):
        return jnp.diag(self.d)


CODES = jnp.arange(N * M, dtype=jnp.int8).reshape(N, M)


def codes(scale):
    return Codes(
        jnp.broadcast_to(CODES, (*scale.shape[:-1], M)) if scale.ndim > 1 else CODES, scale
    )


# What is boxed, from the leaves; its dense twin; the shapes of the leaves.
KINDS = {
    "lora": (
        lambda w, a, b: hki.LoRA(w, a, b, 3.0),
        lambda w, a, b: w + 3 * a @ b,
        [(N, M), (N, 1), (1, M)],
    ),
    "nested types": (
        lambda w, a, b: hki.LoRA(hki.LoRA(w, a, b), a, b),
        lambda w, a, b: w + 2 * a @ b,
        [(N, M), (N, 1), (1, M)],
    ),
    # A box holds tracers of whatever is around it, so of a box as well.
    "nested boxes": (
        lambda w, a, b: hki.LoRA(hki.box(hki.LoRA(w, a, b)), a, b),
        lambda w, a, b: w + 2 * a @ b,
        [(N, M), (N, 1), (1, M)],
    ),
    "integer leaves": (codes, lambda s: CODES * s, [(N, 1)]),
    "no batch axes": (Diagonal, jnp.diag, [(N,)]),
}


def leaves_of(kind, *batch, seed=0):
    return [normal(seed + i, *batch, *shape) for i, shape in enumerate(KINDS[kind][2])]


def eager(fun):
    return fun


def gradient(fun):
    return lambda *leaves: jax.grad(lambda xs: jnp.sin(fun(*xs)).sum())(leaves)


def vjp(fun):
    def run(*leaves):
        out, pullback = jax.vjp(fun, *leaves)
        return out, pullback(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))

    return run


def jvp(fun):
    return lambda *leaves: jax.jvp(fun, leaves, tuple(jnp.cos(x) for x in leaves))


def jvp_of_last(fun):
    """The other leaves are not perturbed: their tangents are symbolic zeros."""
    return lambda *xs: jax.jvp(lambda x: fun(*xs[:-1], x), xs[-1:], (jnp.cos(xs[-1]),))


def stacked(transform):
    """A transformation that maps over a leading axis of all leaves, made in here."""
    return lambda fun: lambda *xs: transform(fun)(*(jnp.stack([x, 2 * x, jnp.sin(x)]) for x in xs))


def partly(fun):
    """A batch axis of the last leaf alone, and not in front."""
    in_axes = lambda xs: [None] * (len(xs) - 1) + [xs[-1].ndim]  # noqa: E731
    return lambda *xs: jax.vmap(fun, in_axes(xs))(*xs[:-1], jnp.stack([xs[-1], xs[-1] ** 2], -1))


def in_scan(fun):
    def run(*leaves):
        body = lambda c, x: (c + 1, (fun(*(c * y for y in leaves)), fun(*leaves) * x))  # noqa: E731
        return lax.scan(body, 1.0, jnp.arange(2.0))

    return run


WAYS = {
    "eager": eager,
    "jit": jax.jit,
    "grad": gradient,
    "vjp": vjp,
    "jvp": jvp,
    "jvp of the last": jvp_of_last,
    "vmap": stacked(jax.vmap),
    "vmap of the last": partly,
    "vmap of vmap": stacked(lambda fun: jax.vmap(stacked(jax.vmap)(fun))),
    "vmap of grad": stacked(lambda fun: jax.vmap(gradient(fun))),
    "grad of vmap": lambda fun: gradient(stacked(jax.vmap)(fun)),
    "second derivative": lambda fun: gradient(lambda *xs: gradient(fun)(*xs)[-1]),
    "scan": in_scan,
    "checkpoint": jax.checkpoint,
    "grad of checkpoint": lambda fun: gradient(jax.checkpoint(fun)),
    "cond": lambda fun: lambda *xs: lax.cond(xs[0].sum() < 9, fun, lambda *ys: 0 * fun(*ys), *xs),
}


def close(got, want):
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)


def quick(fun):
    # What the compiled program computes is looked at, not how fast.
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def wanted(kind, way):
    return quick(WAYS[way](KINDS[kind][1]))(*leaves_of(kind))


@pytest.mark.parametrize("run", ["alone", "alone, compiled", "interpreted"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_its_value_is_the_dense_array(kind, way, run, may_be_dense):
    fun = WAYS[way](lambda *leaves: hki.box(KINDS[kind][0](*leaves)))
    if run == "alone":
        got = fun(*leaves_of(kind))
    else:
        wrapped = hki.use_implicit_args(fun) if run == "interpreted" else fun
        got = quick(lambda *leaves: hki.materialize(wrapped(*leaves)))(*leaves_of(kind))
    close(got, wanted(kind, way))


@pytest.mark.parametrize("kind", ["lora", "nested types", "nested boxes", "integer leaves"])
@pytest.mark.parametrize(
    "way", ["eager", "jit", "vmap", "vmap of the last", "vmap of vmap", "checkpoint"]
)
def test_an_interpreter_reads_the_implicit_array(kind, way, never_dense):
    make, _, _ = KINDS[kind]
    out = hki.use_implicit_args(WAYS[way](lambda *leaves: hki.box(make(*leaves))))(*leaves_of(kind))
    assert isinstance(out, Codes if kind == "integer leaves" else hki.LoRA)
    assert isinstance(getattr(out, "w", None), hki.LoRA) == kind.startswith("nested")


def test_results_of_loops_stay_implicit(never_dense):
    def fun(w, a, b):
        return lax.scan(lambda c, x: (c, hki.box(hki.LoRA(x * w, a, b))), w, jnp.arange(2.0))[1]

    out = hki.use_implicit_args(fun)(*leaves_of("lora"))
    assert isinstance(out, hki.LoRA) and out.shape == (2, N, M)


def test_the_primal_stays_implicit_under_differentiation_inside(never_dense):
    """What is differentiated inside the interpreted function reaches the rules of the type."""

    def fun(w, a, b, x):
        return jax.value_and_grad(lambda a: (x @ hki.box(hki.LoRA(w, a, b))).sum())(a)

    w, a, b = leaves_of("lora")
    x = normal(9, 5, N)
    want = jax.value_and_grad(lambda a: (x @ (w + a @ b)).sum())(a)
    close(hki.use_implicit_args(fun)(w, a, b, x), want)
    close(fun(w, a, b, x), want)


def test_without_batch_axes_it_becomes_dense_under_vmap(may_be_dense):
    out = hki.use_implicit_args(jax.vmap(lambda d: hki.box(Diagonal(d))))(normal(0, BATCH, N))
    assert isinstance(out, jax.Array)
    close(out, jax.vmap(jnp.diag)(normal(0, BATCH, N)))


def test_boxed_arguments_of_the_interpreted_function(never_dense):
    """Implicit leaves of a box: the box is of an argument that is itself implicit."""
    w, a, b = leaves_of("lora")
    inner = hki.LoRA(w, 2 * a, b)
    fun = hki.use_implicit_args(lambda w: hki.box(hki.LoRA(w, a, b)))
    out = fun(inner)
    assert isinstance(out.w, hki.LoRA)
    close(hki.materialize(out), w + 3 * a @ b)


def test_integers_have_no_gradient():
    grads = jax.grad(lambda c: hki.box(c).sum(), allow_int=True)(Codes(CODES, jnp.ones((N, 1))))
    assert grads.codes.dtype == jax.dtypes.float0
    close(grads.scale, CODES.sum(1, keepdims=True).astype(jnp.float32))


@pytest.mark.parametrize(
    "x", [jnp.arange(3.0), np.arange(3.0), 2.5], ids=["jax", "numpy", "number"]
)
def test_dense_values_are_returned_as_they_are(x):
    assert hki.box(x) is x


def test_what_has_no_leaves():
    zeros = hki.Zeros(shape=(N,))
    fun = lambda x: x + hki.box(zeros)  # noqa: E731
    x = normal(0, N)
    for run in (fun, jax.jit(fun), hki.use_implicit_args(fun), lambda x: jax.vmap(fun)(x[None])[0]):
        close(run(x), x)
    assert isinstance(hki.use_implicit_args(lambda: hki.box(zeros))(), hki.Zeros)
