"""`box`: an implicit array that is made inside traced code."""

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import haiku_implicit as hki
from tests.cases import CASES, Diagonal, Outer

use = hki.use_implicit_args
ARGS = (jnp.arange(6.0).reshape(3, 2), jnp.ones((3, 1)), jnp.array([[2.0, 3.0]]))


def make(w, a, b):
    """The function under test: a weight that exists inside only."""
    return hki.box(hki.LoRA(w, a, b, alpha=2.0))


def dense(w, a, b):
    return w + 2.0 * a @ b


def close(got, want, rtol=1e-6):
    chex.assert_trees_all_close(hki.materialize(got), want, rtol=rtol, atol=rtol)


# --- without an interpreter it is its dense value -----------------------------------------------------------


@pytest.fixture
def silent():
    """Without an interpreter nothing is materialized that could have been avoided."""
    with hki.materialization("error"):
        yield


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_every_type_eager_and_jit(name, silent):
    w = CASES[name](0)
    for run in (hki.box, jax.jit(hki.box), jax.jit(lambda w: hki.box(w) * 1)):
        np.testing.assert_array_equal(run(w), CASES[name].dense(w))
        assert isinstance(run(w), jax.Array)


def test_jit_of_what_is_made_inside(silent):
    close(jax.jit(make)(*ARGS), dense(*ARGS))


def test_of_a_dense_array(silent):
    x = jnp.ones(3)
    assert hki.box(x) is x


def test_grad(silent):
    def loss(make):
        return lambda *args: jnp.sum(jnp.sin(make(*args)))

    want = jax.jit(jax.grad(loss(dense), argnums=(0, 1, 2)))(*ARGS)
    close(jax.grad(loss(make), argnums=(0, 1, 2))(*ARGS), want)
    close(jax.jit(jax.grad(loss(make), argnums=(0, 1, 2)))(*ARGS), want)
    close(jax.grad(loss(make), argnums=1)(*ARGS), want[1])


def test_jvp_vjp_and_second_derivatives(silent):
    tangents = tuple(map(jnp.cos, ARGS))
    of_dense = jax.jit(lambda args, tangents: jax.jvp(dense, args, tangents))
    close(jax.jvp(make, ARGS, tangents), of_dense(ARGS, tangents))
    y, vjp = jax.vjp(make, *ARGS)
    close(vjp(jnp.sin(y)), jax.jit(lambda *args: jax.vjp(dense, *args)[1](jnp.sin(y)))(*ARGS))
    w, a, b = ARGS

    def of_factors(make):
        return lambda a, b: jnp.sum(jnp.sin(make(w, a, b)))

    found, expected = (jax.jit(jax.hessian(of_factors(f), (0, 1))) for f in (make, dense))
    close(found(a, b), expected(a, b))


def test_jvp_with_respect_to_something_else(silent):
    close(jax.jvp(lambda x: x * make(*ARGS), (2.0,), (1.0,)), (2 * dense(*ARGS), dense(*ARGS)))


@pytest.mark.parametrize("axes", [(0, 0, 0), (None, 0, 0), (None, 0, None), (2, 1, 0)])
def test_vmap(axes, silent):
    def batch(x, axis):
        return x if axis is None else jnp.stack([x, 2 * x, -x], axis)

    args = tuple(map(batch, ARGS, axes))
    want = jax.jit(jax.vmap(dense, axes))(*args)
    close(jax.vmap(make, axes)(*args), want)
    close(jax.jit(jax.vmap(make, axes))(*args), want)
    close(jax.vmap(make, axes, out_axes=-1)(*args), jnp.moveaxis(want, 0, -1))


@pytest.mark.slow
def test_vmap_of_vmap_and_of_grad(silent):
    args = jax.tree.map(lambda x: jnp.stack([jnp.stack([x, -x])] * 3), ARGS)
    close(jax.vmap(jax.vmap(make))(*args), jax.vmap(jax.vmap(dense))(*args))

    def gradient(make):
        return jax.vmap(jax.vmap(jax.grad(lambda *a: jnp.sum(make(*a) ** 2), argnums=2)))

    close(gradient(make)(*args), gradient(dense)(*args))


def test_vmap_of_a_type_without_batch_axes(silent):
    d = jnp.arange(6.0).reshape(2, 3)
    close(jax.vmap(lambda d: hki.box(Diagonal(d)))(d), jax.vmap(jnp.diag)(d))


def test_vmap_of_a_nested_one(silent):
    f = lambda u, a: hki.box(hki.LoRA(Outer(u, jnp.ones(2)), a, jnp.ones((1, 2))))  # noqa: E731
    u, a = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3, 1))
    close(jax.vmap(f)(u, a), u[:, :, None] + jnp.ones((2, 3, 2)))


def test_integers_among_the_leaves(silent):
    q = hki.QuantizedMatrix.quantize(ARGS[0], "int8")

    def f(scale):
        return jnp.sum(hki.box(q._replace(scale=scale)) ** 2)

    want = jax.grad(lambda s: jnp.sum(q._replace(scale=s).materialize() ** 2))
    close(jax.grad(f)(q.scale), jax.jit(want)(q.scale))
    scales = np.stack([q.scale, 2 * q.scale])
    close(jax.jit(jax.vmap(f))(scales), np.stack([jax.jit(f)(s) for s in scales]))


@pytest.mark.parametrize(
    "around", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"]
)
def test_in_loops_and_branches(around, silent):
    def f(make, *args):
        y = lax.scan(
            lambda c, i: (c + make(*args) * i, make(*args)), jnp.zeros((3, 2)), jnp.arange(2.0)
        )
        z = lax.fori_loop(0, 2, lambda i, c: c + make(*args), jnp.zeros((3, 2)))
        return y, z, lax.cond(True, lambda: make(*args), lambda: jnp.zeros((3, 2)))

    close(around(lambda *a: f(make, *a))(*ARGS), jax.jit(lambda *a: f(dense, *a))(*ARGS))
    total = lambda make: lambda *a: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(make, *a)))  # noqa: E731
    want = jax.jit(jax.grad(total(dense)))(*ARGS)
    close(jax.grad(around(total(make)))(*ARGS), want, rtol=1e-5)


def test_abstract_evaluation(silent):
    out = jax.eval_shape(make, *ARGS)
    assert (out.shape, out.dtype) == ((3, 2), jnp.float32)
    assert jax.make_jaxpr(make)(*ARGS).eqns[-1].primitive.name == "box"


def test_nothing_of_the_box_is_left_in_a_compiled_program():
    assert "box" not in jax.jit(make).lower(*ARGS).as_text().replace("make", "")


# --- with an interpreter it is the implicit array ---------------------------------------------------------------


WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
    "scan": lambda f: lambda *a: lax.scan(lambda c, _: (c, f(*a)), 0, None, length=1)[1][0],
    "cond": lambda f: lambda *a: lax.cond(a[0][0, 0] >= 0, f, f, *a),
    "vmap": lambda f: lambda *a: jax.vmap(f)(*jax.tree.map(lambda x: x[None], a))[0],
    "vmap of some": lambda f: lambda *a: jax.vmap(f, (None, 0, None))(a[0], a[1][None], a[2])[0],
}


@pytest.mark.combinations
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", WAYS)
def test_it_comes_out_implicit(name, outer, silent):
    out = outer(use(WAYS[name](make)))(*ARGS)
    assert isinstance(out, hki.LoRA)
    assert out.alpha == 2.0
    close(out, dense(*ARGS))


def test_what_follows_sees_the_implicit_array(silent):
    x = jnp.ones((4, 3))
    f = use(lambda x, *args: x @ make(*args))
    close(f(x, *ARGS), x @ dense(*ARGS))
    shapes = [v.aval.shape for eqn in jax.make_jaxpr(f)(x, *ARGS).eqns for v in eqn.outvars]
    assert (3, 2) not in shapes


def test_in_the_body_of_a_loop_whose_condition_has_none(silent):
    x = jnp.full((4, 3), 0.5)

    def f(make):
        def run(x, *args):
            return lax.while_loop(
                lambda c: c.sum() < 9, lambda c: c + x @ make(*args) @ args[2].T, x
            )

        return run

    close(use(f(make))(x, *ARGS), f(dense)(x, *ARGS))
    assert "box" not in str(jax.make_jaxpr(use(f(make)))(x, *ARGS))


def test_gradients_through_an_interpreted_box(silent):
    x = jnp.ones((4, 3))

    def loss(make):
        return lambda *args: jnp.sum(jnp.sin(x @ make(*args)))

    want = jax.jit(jax.grad(loss(dense), argnums=(0, 1, 2)))(*ARGS)
    close(jax.grad(use(loss(make)), argnums=(0, 1, 2))(*ARGS), want, rtol=1e-5)
    close(use(jax.grad(loss(make), argnums=(0, 1, 2)))(*ARGS), want, rtol=1e-5)


def test_a_differentiated_box_is_still_implicit(silent):
    """The primal of `jax.vjp` inside an interpreter does not change."""
    y, grads = use(
        lambda *args: (jax.vjp(make, *args)[0], jax.vjp(make, *args)[1](jnp.ones((3, 2))))
    )(*ARGS)
    assert isinstance(y, hki.LoRA)
    close(grads, jax.vjp(dense, *ARGS)[1](jnp.ones((3, 2))))


def test_box_of_an_implicit_argument_with_other_leaves(silent):
    """An argument taken apart and put together anew."""
    inner = Outer(jnp.arange(3.0), jnp.ones(2))
    out = use(lambda w, a, b: hki.box(hki.LoRA(w, a, b)))(inner, *ARGS[1:])
    assert isinstance(out, hki.LoRA) and isinstance(out.w, Outer)
    close(out, hki.materialize(inner) + ARGS[1] @ ARGS[2])


def test_box_of_a_box(silent):
    out = use(lambda w, a, b: hki.box(hki.LoRA(make(w, a, b), a, b)))(*ARGS)
    assert isinstance(out, hki.LoRA) and isinstance(out.w, hki.LoRA)
    close(out, dense(*ARGS) + ARGS[1] @ ARGS[2])


def test_without_any_argument(silent):
    out = use(lambda: hki.box(hki.Zeros(shape=(2,), dtype=jnp.float32)))()
    assert isinstance(out, hki.Zeros)
    assert hki.box(hki.Zeros(shape=(2,), dtype=jnp.float32)).tolist() == [0, 0]


def test_a_creator_in_a_haiku_model(silent):
    """How it plugs in: the same model is right with and without `transform_implicit`."""

    def creator(next_creator, shape, dtype, init, context):
        value = next_creator(shape, dtype, init)
        if context.name != "w":
            return value
        return hki.box(hki.LoRA(value, jnp.ones((shape[0], 1)), jnp.ones((1, shape[1]))))

    def model(x):
        with hk.custom_creator(creator):
            return hk.nets.MLP([5, 2])(x)

    x = jnp.ones((1, 3))
    plain = hk.without_apply_rng(hk.transform(model))
    implicit = hki.transform_implicit(plain)
    params, dense_params = implicit.init(jax.random.key(0), x), plain.init(jax.random.key(0), x)
    assert isinstance(params["mlp/~/linear_0"]["w"], hki.LoRA)
    close(params, dense_params)
    close(implicit.apply(params, x), plain.apply(dense_params, x), rtol=1e-5)
