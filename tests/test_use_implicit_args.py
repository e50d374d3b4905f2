"""`use_implicit_args`: its arguments and results, and how it composes with JAX."""

import dataclasses
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

import haiku_implicit as hki
from tests.cases import Nought, Outer

use = hki.use_implicit_args
pytestmark = pytest.mark.usefixtures("may_be_dense")


@pytest.fixture
def w(key):
    """A LoRA weight `[3, 4]`."""
    keys = jax.random.split(key, 3)
    return hki.LoRA(*(jax.random.normal(k, s) for k, s in zip(keys, [(3, 4), (3, 2), (2, 4)])))  # noqa: B905


@pytest.fixture
def x(key):
    return jax.random.normal(key, (2, 3))


def close(got, want, rtol=1e-5):
    # float32 sums of a few terms, in another order than the dense twin takes them.
    chex.assert_trees_all_close(hki.materialize(got), want, rtol=rtol, atol=rtol)


# --- arguments ---------------------------------------------------------------------------------------


def test_keywords_and_defaults(w, x):
    @use
    def f(x, *, weight, scale=3.0):
        """Doc."""
        return x @ weight * scale

    close(f(x, weight=w), x @ hki.materialize(w) * 3)
    close(f(weight=w, x=x, scale=jnp.float32(2)), x @ hki.materialize(w) * 2)
    assert (f.__name__, f.__doc__) == ("f", "Doc.")
    assert str(inspect.signature(f)) == "(x, *, weight, scale=3.0)"


def test_implicit_arrays_at_any_depth(w, x):
    tree = {"layers": [{"w": w, "b": None}, ({"w": Outer(jnp.ones(4), jnp.ones(2))},)], "n": 3}

    @use
    def f(tree, x):
        assert tree["layers"][0]["b"] is None
        y = x @ tree["layers"][0]["w"]
        return {"y": y @ tree["layers"][1][0]["w"], "n": tree["n"]}

    out = f(tree, x)
    assert out["n"] == 3 and isinstance(out["n"], int)
    close(out["y"], x @ hki.materialize(w) @ jnp.ones((4, 2)))


def test_what_is_no_array_arrives_as_it_is(w):
    seen = []

    @use
    def f(w, *rest, **options):
        seen[:] = [*rest, *options.values()]
        return w

    values = [
        True,
        3,
        2.5,
        1j,
        "name",
        None,
        jnp.sin,
        len,
        ...,
        slice(1, 2),
        jnp.float32,
        b"x",
        object(),
    ]
    f(w, *values, option="relu")
    assert seen == [*values, "relu"]
    assert [type(v) for v in seen] == [type(v) for v in [*values, "relu"]]


def test_flags_branch_in_python(w, x):
    @use
    def f(w, x, transpose, activation):
        y = (x.T if transpose else x) @ w
        return {"relu": jax.nn.relu, "none": lambda y: y}[activation](y)

    dense = hki.materialize(w)
    close(f(w, x, False, "relu"), jax.nn.relu(x @ dense))
    close(f(w, x.T, True, "none"), x @ dense)


@pytest.mark.parametrize(
    "value", [np.ones((3, 4), np.float32), np.float32(2), np.int8(3), np.arange(4)]
)
def test_numpy_arrays_are_arrays(w, value):
    close(use(lambda w, v: w + v)(w, value), hki.materialize(w) + value)
    assert use(lambda w, v: isinstance(v, jax.Array))(w, value)


@pytest.mark.parametrize(
    "value", [np.array(["a", "b"]), np.array([None, {}]), np.datetime64("2020")]
)
def test_numpy_arrays_of_other_things_are_not(w, value):
    seen = []
    use(lambda w, v: seen.append(v))(w, value)
    assert seen[0] is value


def test_random_keys(w, key):
    f = use(lambda w, key: w + jax.random.normal(key, w.shape))
    want = hki.materialize(w) + jax.random.normal(key, w.shape)
    close(f(w, key), want)
    raw = jax.random.PRNGKey(0)
    close(f(w, raw), hki.materialize(w) + jax.random.normal(raw, w.shape))
    keys = use(lambda w, key: jax.random.split(key))(w, key)
    assert jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    chex.assert_trees_all_equal(
        jax.random.key_data(keys), jax.random.key_data(jax.random.split(key))
    )


def test_weak_types_promote_as_for_dense_arrays():
    w = Outer(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16))
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    out = use(lambda w, c: (w + c, w * 2.0, w + 1))(w, weak)
    assert [y.dtype for y in jax.tree.leaves(hki.materialize(out))] == [jnp.bfloat16] * 3
    assert use(lambda w, c: c)(w, weak).weak_type


def test_no_implicit_argument_at_all(x):
    close(use(lambda x: jnp.sin(x) + 1)(x), jnp.sin(x) + 1)
    assert use(lambda: 5)() == 5
    assert use(lambda: None)() is None


def test_the_function_sees_ordinary_arrays(w):
    def f(w):
        assert isinstance(w, jax.core.Tracer)
        assert (w.shape, w.dtype, w.ndim) == ((3, 4), jnp.float32, 2)
        return w.T[0] + len(w)

    close(use(f)(w), hki.materialize(w).T[0] + 3)


def test_wrapped_twice(w, x):
    close(use(use(lambda w, x: x @ w))(w, x), x @ hki.materialize(w))


def test_a_wrapped_function_within_a_wrapped_one(w, x):
    inner = use(lambda w, x: x @ w)
    close(use(lambda w, x: inner(w, x) + inner(w, x))(w, x), 2 * x @ hki.materialize(w))


def test_methods_and_partial_functions(w, x):
    class Model:
        @use
        def __call__(self, w, x):
            return x @ w

    close(Model()(w, x), x @ hki.materialize(w))
    close(use(functools.partial(jnp.dot, x))(w), x @ hki.materialize(w))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A module that is a pytree."""

    w: jax.Array
    scale: jax.Array

    def __call__(self, x, *, power=1):
        return x @ self.w * self.scale**power


@pytest.mark.parametrize(
    "fun",
    [
        lambda w: Layer(w, jnp.float32(2)),
        lambda w: functools.partial(lambda w, x, *, power: 2**power * x @ w, w, power=1),
        lambda w: functools.partial(functools.partial(lambda x, w: 2 * x @ w), w=w),
        lambda w: jax.tree_util.Partial(lambda w, x: 2 * x @ w, w),
    ],
)
def test_a_function_that_is_a_tree_may_hold_implicit_arrays(fun, w, x, never_dense):
    want = 2 * x @ hki.materialize(w)
    for transform in (lambda f: f, jax.jit):
        close(transform(use(fun(w)))(x), want)
        close(transform(lambda w: use(fun(w))(x))(w), want)
    got = jax.grad(lambda w: jnp.sum(use(fun(w))(x)))(w).b
    close(got, jax.grad(lambda w: jnp.sum(2 * x @ hki.materialize(w)))(w).b)


def test_what_else_such_a_function_holds_is_an_argument_only_with_an_implicit_one(w, x):
    def power(n, x):
        return x**2 if n else x  # `n` is concrete

    close(use(functools.partial(power, jnp.int32(2)))(x), x**2)
    close(use(Layer(hki.materialize(w), jnp.float32(2)))(x, power=2), 4 * x @ hki.materialize(w))
    close(use(Layer(w, jnp.float32(2)))(x, power=2), 4 * x @ hki.materialize(w))


def test_a_pull_back_that_is_returned_may_be_wrapped_again(w, x, never_dense):
    pull_back = use(lambda w, x: jax.vjp(lambda x: jnp.tanh(x @ w), x)[1])(w, x)
    want = jax.vjp(lambda x: jnp.tanh(x @ hki.materialize(w)), x)[1]
    ones = jnp.ones((2, 4))
    close(use(pull_back)(ones), want(ones))


def test_errors_of_the_function_arrive(w):
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        use(lambda w: jnp.ones((2, 5)) @ w)(w)


# --- results -------------------------------------------------------------------------------------------


def test_results_may_be_anything(w, x):
    out = use(lambda w, x: (x, None, "name", 3, {"f": jnp.sin, "x": [x + 1]}, np.ones(2)))(w, x)
    assert out[1:4] == (None, "name", 3) and out[4]["f"] is jnp.sin
    close([out[0], out[4]["x"], out[5]], [x, [x + 1], np.ones(2)])


def test_results_may_be_implicit(w):
    same, other = use(lambda w: (w, hki.LoRA(w.T @ w, jnp.ones((4, 1)), jnp.ones((1, 4)))))(w)
    assert isinstance(same, hki.LoRA)
    chex.assert_trees_all_equal(same, w)
    dense = hki.materialize(w)
    assert isinstance(other, hki.LoRA)
    close(other, dense.T @ dense + 1)


def test_an_implicit_field_of_an_implicit_result(w):
    out = use(lambda w: hki.LoRA(w, jnp.ones((3, 1)), jnp.ones((1, 4))))(w)
    assert isinstance(out.w, hki.LoRA)
    close(out, hki.materialize(w) + 1)


def test_rules_decide_what_results_are():
    out = use(lambda x, y: (-x, x * y, (x * y).T, x + y))(Outer(jnp.ones(2), jnp.ones(3)),
                                                           Outer(jnp.ones(2), jnp.ones(3)))  # fmt: skip
    assert [type(y) for y in out[:3]] == [Outer] * 3
    assert out[2].shape == (3, 2)
    assert isinstance(out[3], jax.Array)


def test_an_argument_that_is_not_used(w):
    assert use(lambda w: 1.0)(w) == 1.0
    close(use(lambda w: jnp.ones(2))(w), jnp.ones(2))


# --- from outside ----------------------------------------------------------------------------------------


def loss(w, x):
    return jnp.sum(jnp.sin(x @ w) ** 2)


def chain(w, gradient):
    """The gradient by the leaves, for the gradient by the dense twin."""
    return jax.vjp(hki.materialize, w)[1](gradient)[0]


def test_jit(w, x):
    close(jax.jit(use(loss))(w, x), loss(hki.materialize(w), x))


def test_grad(w, x):
    got = jax.grad(use(loss))(w, x)
    assert isinstance(got, hki.LoRA)
    close(jax.tree.leaves(got), jax.tree.leaves(chain(w, jax.grad(loss)(hki.materialize(w), x))))
    value, got_x = jax.value_and_grad(use(loss), argnums=1)(w, x)
    close(value, loss(hki.materialize(w), x))
    close(got_x, jax.grad(loss, argnums=1)(hki.materialize(w), x))


def test_jit_of_grad_of_jit(w, x):
    got = jax.jit(jax.grad(jax.jit(use(loss))))(w, x)
    close(jax.tree.leaves(got), jax.tree.leaves(chain(w, jax.grad(loss)(hki.materialize(w), x))))


def test_vmap(w, x):
    xs = jnp.stack([x, x + 1, -x])
    dense = hki.materialize(w)
    close(jax.vmap(use(loss), (None, 0))(w, xs), jax.vmap(loss, (None, 0))(dense, xs))
    ws = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 2 * leaf]), w)
    each = jax.vmap(hki.materialize)(ws)
    close(jax.vmap(use(loss))(ws, xs), jax.vmap(loss)(each, xs))
    got = jax.vmap(jax.grad(use(loss)))(ws, xs)
    want = jax.vmap(lambda w, x: chain(w, jax.grad(loss)(hki.materialize(w), x)))(ws, xs)
    close(jax.tree.leaves(got), jax.tree.leaves(want))


def test_vmap_of_an_implicit_result(w):
    ws = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), w)
    out = jax.vmap(use(lambda w: w))(ws)
    assert isinstance(out, hki.LoRA) and out.shape == (2, 3, 4)


def test_checkpoint(w, x):
    f = jax.checkpoint(use(loss))
    close(f(w, x), loss(hki.materialize(w), x))
    close(jax.tree.leaves(jax.grad(f)(w, x)), jax.tree.leaves(jax.grad(use(loss))(w, x)))


def test_eval_shape_and_make_jaxpr(w, x):
    out = jax.eval_shape(use(lambda w, x: (x @ w, w)), w, x)
    assert (out[0].shape, out[0].dtype) == ((2, 4), jnp.float32)
    assert isinstance(out[1], hki.LoRA) and out[1].a.shape == (3, 2)
    jaxpr = jax.make_jaxpr(use(lambda w, x: x @ w))(w, x)
    assert len(jaxpr.jaxpr.invars) == 4
    shapes = [v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars]
    assert (3, 4) not in shapes  # the weight is never made whole


def test_eval_shape_of_abstract_arguments(w, x):
    abstract = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), (w, x))
    assert jax.eval_shape(use(lambda w, x: x @ w), *abstract).shape == (2, 4)


@pytest.mark.slow
def test_higher_derivatives(w, x):
    def of_factors(f, a):
        return f(w._replace(a=a), x)

    implicit, dense = use(loss), lambda w, x: loss(hki.materialize(w), x)
    for derivative in (jax.hessian, jax.jacfwd, jax.jacrev):
        got, want = (derivative(functools.partial(of_factors, f))(w.a) for f in (implicit, dense))
        close(got, want, rtol=1e-4)  # second derivatives of a sum of squares: cancellation


def test_jvp_and_linearize(w, x):
    tangent = jax.tree.map(jnp.ones_like, w)
    dense = lambda w: loss(hki.materialize(w), x)  # noqa: E731
    implicit = lambda w: use(loss)(w, x)  # noqa: E731
    want = jax.jvp(dense, (w,), (tangent,))
    close(jax.jvp(implicit, (w,), (tangent,)), want)
    value, linear = jax.linearize(implicit, w)
    close((value, linear(tangent)), want)


def test_donation(w, x):
    step = jax.jit(
        use(lambda w, x: hki.LoRA(w * 1.0, jnp.ones((3, 2)), jnp.ones((2, 4)))), donate_argnums=0
    )
    dense = hki.materialize(w)
    donated = jax.tree.map(jnp.copy, w)
    out = step(donated, x)
    assert isinstance(out, hki.LoRA)
    close(out, dense + 2)


def test_ahead_of_time(w, x):
    compiled = jax.jit(use(loss)).lower(w, x).compile()
    close(compiled(w, x), loss(hki.materialize(w), x))


# --- inside ------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("outer", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_transformations_inside(w, x, outer):
    def f(w, x):
        return {
            "jit": jax.jit(loss)(w, x),
            "grad": jax.grad(loss)(w, x),
            "grad of x": jax.grad(loss, argnums=1)(w, x),
            "value": jax.value_and_grad(loss)(w, x),
            "vmap": jax.vmap(loss, (None, 0))(w, x),
            "vmap of w": jax.vmap(lambda r: jnp.sum(r**2), 1)(w),
            "checkpoint": jax.grad(jax.checkpoint(loss))(w, x),
            "jvp": jax.jvp(loss, (w, x), (w, x)),
            "vjp": jax.vjp(loss, w, x)[1](jnp.float32(2)),
            "linearize": jax.linearize(loss, w, x)[1](w, x),
            "jacfwd": jax.jacfwd(lambda x: x @ w)(x),
            "hessian": jax.hessian(lambda x: loss(w, x))(x),
        }

    close(outer(use(f))(w, x), f(hki.materialize(w), x), rtol=1e-4)  # second derivatives cancel


def test_shapes_inside(w, x):
    shapes = []

    @use
    def f(w, x):
        shapes.append(jax.eval_shape(jnp.dot, x, w).shape)
        shapes.append(jax.make_jaxpr(jnp.dot)(x, w).out_avals[0].shape)
        return w

    f(w, x)
    assert shapes == [(2, 4)] * 2


def test_the_gradient_inside_is_by_the_dense_weight(w, x):
    got = use(lambda w, x: jax.grad(loss)(w, x))(w, x)
    assert isinstance(got, jax.Array)
    close(got, jax.grad(loss)(hki.materialize(w), x))


# --- closures over tracers of an outer transformation ----------------------------------------------------------


def test_closure_in_jit(w, x):
    f = jax.jit(lambda c, w: use(lambda w: x @ w * c)(w))
    close(f(3.0, w), x @ hki.materialize(w) * 3)


def test_closure_in_grad(w, x):
    got = jax.grad(lambda c: use(lambda w: jnp.sum(x @ w * c**2))(w))(3.0)
    close(got, 6 * jnp.sum(x @ hki.materialize(w)))


def test_closure_in_vmap(w, x):
    got = jax.vmap(lambda row: use(lambda w: row @ w)(w))(x)
    close(got, x @ hki.materialize(w))


def test_closure_in_scan(w, x):
    def body(c, row):
        return c + 1, use(lambda w: c * row @ w)(w)

    got = jax.lax.scan(body, 1.0, x)[1]
    close(got, jnp.array([[1.0], [2.0]]) * (x @ hki.materialize(w)))


def test_closure_over_a_dense_tracer_of_the_function_itself(w, x):
    @use
    def f(w, x):
        return use(lambda: x @ w)()

    close(f(w, x), x @ hki.materialize(w))


def test_an_implicit_array_made_inside_is_boxed(w, x):
    close(use(lambda x: x @ hki.box(w))(x), x @ hki.materialize(w))
    with pytest.raises(TypeError, match="box"):
        use(lambda x: x @ w)(x)


# --- modes ---------------------------------------------------------------------------------------------------


def test_x64(x64):
    w = hki.LoRA(*(jnp.asarray(np.full(s, 0.1)) for s in [(3, 4), (3, 2), (2, 4)]))
    x = jnp.asarray(np.full((2, 3), 1 / 3))
    assert w.dtype == jnp.float64
    out = jax.jit(use(loss))(w, x)
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, loss(hki.materialize(w), x), rtol=1e-14)
    assert use(lambda w: w * np.float32(2))(w).dtype == jnp.float64


def test_numpy_rank_promotion_is_checked_as_ever(w):
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank"):
        use(lambda w: w + jnp.ones(4))(w)


def test_settings_within_the_function_are_those_of_its_equations(w, x):
    def f(w, x):
        with set_xla_metadata(tag="in_the_function"):
            y = jnp.sin(x) @ w
        return jnp.cos(y)

    lines = jax.jit(use(f)).lower(w, x).as_text().splitlines()
    has = {
        op: {"in_the_function" in line for line in lines if f".{op} " in line}
        for op in ("sine", "dot_general", "cosine")
    }
    assert has == {"sine": {True}, "dot_general": {True}, "cosine": {False}}


def test_disable_jit(w, x):
    with jax.disable_jit():
        close(use(loss)(w, x), loss(hki.materialize(w), x))
        close(
            use(lambda w, x: jax.lax.scan(lambda c, r: (c, r @ w), 0, x)[1])(w, x),
            x @ hki.materialize(w),
        )


def test_debug_nans(w, x):
    with jax.debug_nans(True):
        close(use(loss)(w, x), loss(hki.materialize(w), x))
        with pytest.raises(FloatingPointError):
            use(lambda w: jnp.log(-jnp.abs(w)))(w)


def test_threads(w, x):
    import concurrent.futures

    f = use(lambda w, x: jax.jit(loss)(w, x))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda i: f(w, x * i), range(8)))
    for i, out in enumerate(outs):
        close(out, loss(hki.materialize(w), x * i))


def test_zeros_of_a_static_shape():
    out = use(lambda w, x: x * w)(Nought(shape=(2, 3)), jnp.ones((2, 3)))
    assert isinstance(out, Nought) and out.shape == (2, 3)
