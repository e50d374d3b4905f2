"""`jax.custom_jvp` and `jax.custom_vjp` of implicit arrays under `vmap`, in all orders with other calls."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.experimental.ode import odeint

import haiku_implicit as hki
from tests.random_arrays import normal
from tests.tiers import few

use = hki.use_implicit_args


def with_jvp():
    """A product with a wrong derivative, so that its rule has to be used."""
    f = jax.custom_jvp(lambda x, w: x @ w)
    f.defjvp(lambda p, t: (p[0] @ p[1], 2 * (t[0] @ p[1]) + 0.5 * (p[0] @ t[1])))
    return f


def with_vjp():
    f = jax.custom_vjp(lambda x, w: x @ w)
    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda s, g: (2 * g @ s[1].T, 0.5 * s[0].T @ g))
    return f


def in_scan(f, w, x):
    return lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0]


def in_cond(f, w, x):
    return lax.cond(x[0, 0] > 2, lambda x: x, lambda x: f(x, w), x)


CALLS = {
    "plain": lambda f, w, x: f(x, w),
    "jit": lambda f, w, x: jax.jit(f)(x, w),
    "cond": in_cond,
    "scan": in_scan,
    "remat": lambda f, w, x: jax.checkpoint(f)(x, w),
    "vmap": lambda f, w, x: jax.vmap(lambda row: f(row[None], w)[0])(x),
    "cond in scan": lambda f, w, x: in_scan(lambda c, w: in_cond(f, w, c), w, x),
}


def stacked(f, w, x):
    """The results for two weights and one input."""
    return hki.materialize(jax.vmap(f, (0, None))(w, x))


# How the value y is differentiated by the input.
TRANSFORMED = {
    "value and gradient": lambda f: (
        lambda w, x: jax.value_and_grad(
            lambda x: (lambda y: (jnp.sum(y**2), y))(stacked(f, w, x)), has_aux=True
        )(x)
    ),
    "mapped gradient": lambda f: jax.vmap(
        jax.grad(lambda w, x: hki.materialize(f(w, x)).sum(), 1), (0, None)
    ),
    "mapped inputs": lambda f: (
        lambda w, x: jax.grad(lambda x: hki.materialize(jax.vmap(f)(w, x)).sum())(
            jnp.stack([x, 2 * x])
        )
    ),
    "gradient of gradient": lambda f: (
        lambda w, x: jax.grad(
            lambda x: jnp.sum(jnp.tanh(jax.grad(lambda x: jnp.sum(stacked(f, w, x) ** 2))(x) / 50))
        )(x)
    ),
    "remat": lambda f: (
        lambda w, x: jax.grad(lambda x: jax.checkpoint(lambda x: stacked(f, w, x))(x).sum())(x)
    ),
}


def agrees(function, call, transformed, within, x):
    w = hki.QuantizedMatrix.quantize(normal((6, 6)) / 3, "int8")
    w = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), w)

    def fun(w, x):
        return CALLS[call](function, w, x)

    transform = TRANSFORMED[transformed]
    got = (use(transform(fun)) if within else transform(use(fun)))(w, x)
    want = transform(lambda w, x: fun(hki.materialize(w), x))(w, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # float32; a few sums in another order.
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


CASES = list(itertools.product(CALLS, TRANSFORMED, ["within", "outside"]))
QUICK = [
    ("plain", "value and gradient", "outside"),
    ("jit", "value and gradient", "outside"),
    ("cond", "remat", "outside"),
    ("scan", "mapped gradient", "within"),
]


@pytest.mark.every(3)
@pytest.mark.parametrize("rule", [with_jvp, with_vjp])
@pytest.mark.parametrize("call, transformed, order", few(CASES, *QUICK))
def test_gradients_of_mapped_calls(rule, call, transformed, order, may_be_dense):
    # As many rows as columns: a result with its mapped axis in another place has the same shape.
    x = normal((6, 6), 5)
    agrees(rule(), call, transformed, order == "within", x)


@pytest.mark.parametrize("rule", [with_jvp, with_vjp])
def test_one_function_in_several_ways(rule, may_be_dense):
    # JAX keeps the traced rule of a function, and may find that of another way of using it.
    function, x = rule(), jnp.ones((2, 6))
    for transformed in TRANSFORMED:
        agrees(function, "jit", transformed, False, x)


@pytest.mark.parametrize("rule", [with_jvp, with_vjp])
def test_a_result_that_does_not_depend_on_what_is_mapped(rule, may_be_dense):
    # That of zeros and mapped inputs: its derivative depends on them.
    function = rule()
    w = hki.Zeros(shape=(6, 6), dtype=jnp.float32)
    x = jnp.stack([jnp.ones((2, 6)), 2 * jnp.ones((2, 6))])

    def fun(w, x):
        return jax.jit(function)(x, w)

    def transformed(f):
        return jax.value_and_grad(lambda x: jnp.sum((hki.materialize(jax.vmap(f)(x)) - 1) ** 2))

    got = transformed(lambda x: use(fun)(w, x))(x)
    want = transformed(lambda x: fun(jnp.zeros((6, 6)), x))(x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


# --- what a rule is told, and what a function closes over -------------------------------------------

TABLE = jnp.linspace(0.5, 1.0, 6)
COUNT = jnp.arange(6)
SymbolicZero = jax.custom_derivatives.SymbolicZero


def closes_over_arrays(x, w):
    made_here = jnp.linspace(1.0, 2.0, 6)
    f = jax.custom_vjp(lambda x, w: jnp.tanh(x @ w) * TABLE * made_here + COUNT)
    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda s, g: (2 * g @ s[1].T, 0.5 * s[0].T @ g))
    return f(x, w)


def refuses_a_derivative(x, w):
    def forward(x, w, t):
        assert not t.perturbed
        return x.value @ w.value * t.value, (x.value, w.value)

    f = jax.custom_vjp(lambda x, w, t: x @ w * t)
    f.defvjp(
        forward,
        lambda s, g: (2 * g @ s[1].T, 0.5 * s[0].T @ g, None),
        symbolic_zeros=True,
    )
    return f(x, w, jnp.arange(6.0))


def is_told(x, w):
    """The gradients are multiples that say what moves, and which cotangents are zeros."""

    def forward(x, w, t):
        moves = jnp.float32(x.perturbed + 2 * w.perturbed + 4 * t.perturbed)
        return f(x.value, w.value, t.value), (x.value, w.value, moves)

    def backward(saved, cotangents):
        x, w, moves = saved
        zeros = [isinstance(c, SymbolicZero) for c in cotangents]
        g = cotangents[0] * (moves + 10 * zeros[1] + 20 * zeros[2])
        return g @ w.T, x.T @ g, jnp.zeros(6)

    f = jax.custom_vjp(lambda x, w, t: (x @ w * t, x * 3, COUNT))
    f.defvjp(forward, backward, symbolic_zeros=True)
    return f(x, w, jnp.arange(6.0))[0]


def after_a_rule_that_gives_zeros(x, w):
    def pair_rule(primals, tangents):
        (w, t), (dw, dt) = primals, tangents
        return pair(w, t), (dw if isinstance(dw, SymbolicZero) else jnp.cos(w) * dw, dt)

    def forward(x, t):
        assert not t.perturbed
        return x.value * t.value, t.value

    pair = jax.custom_jvp(lambda w, t: (jnp.sin(w), t))
    pair.defjvp(pair_rule, symbolic_zeros=True)
    f = jax.custom_vjp(lambda x, t: x * t)
    f.defvjp(forward, lambda t, g: (g * t * 3, None), symbolic_zeros=True)
    return x @ f(*pair(w, jnp.arange(6.0)))


def has_static_arguments(x, w):
    f = jax.custom_vjp(lambda h, k, x, w: h(x @ w) * k, nondiff_argnums=(0, 1))
    f.defvjp(
        lambda h, k, x, w: (h(x @ w) * k, (x, w)),
        lambda h, k, s, g: (k * g @ s[1].T, s[0].T @ h(g)),
    )
    return f(jnp.tanh, 3, x, w)


def is_converted(x, w):
    """`jax.closure_convert`, as solvers have it: the weight becomes an argument."""
    solve = jax.custom_vjp(lambda fun, x, *held: fun(x, *held), nondiff_argnums=(0,))
    solve.defvjp(
        lambda fun, *args: (fun(*args), args),
        lambda fun, args, g: tuple(2 * y for y in jax.vjp(fun, *args)[1](g)),
    )
    fun, held = jax.closure_convert(lambda x: jnp.tanh(x @ w), x)
    return solve(fun, x, *held)


def optimizes_remat(x, w):
    f = jax.custom_vjp(lambda x, w: jnp.tanh(x @ w))
    f.defvjp(
        lambda x, w: (jnp.tanh(x @ w), (x, w)),
        lambda s, g: (2 * g @ s[1].T, 0.5 * s[0].T @ g),
        optimize_remat=True,
    )
    return f(x, w)


def has_integers(x, w):
    def backward(saved, g):
        i, x, w = saved
        full = jnp.zeros(x.shape, g.dtype).at[i].add(g)
        return None, 2 * full @ w.T, 0.5 * x.T @ full

    f = jax.custom_vjp(lambda i, x, w: (x @ w)[i])
    f.defvjp(lambda i, x, w: ((x @ w)[i], (i, x, w)), backward)
    return f(jnp.array([1, 0, 1]), x, w)


RULES = [
    closes_over_arrays,
    refuses_a_derivative,
    is_told,
    after_a_rule_that_gives_zeros,
    has_static_arguments,
    is_converted,
    optimizes_remat,
    has_integers,
]

# Those whose results are as their inputs are.
SQUARE = [rule for rule in RULES if rule is not has_integers]


def operands():
    keys = jax.random.split(jax.random.key(0), 3)
    w, a, b = (
        jax.random.normal(k, s) / 3 for k, s in zip(keys, [(6, 6), (6, 2), (2, 6)], strict=True)
    )
    int4 = hki.QuantizedMatrix.quantize(w, "int4")
    return {
        "lora": hki.LoRA(w, a, b),
        "int8": hki.QuantizedMatrix.quantize(w, "int8"),
        "qlora": hki.LoRA(int4, a, b),
        "dora": hki.add_adapter({"l": {"w": w}}, jax.random.key(1), "dora", rank=2)["l"]["w"],
        "zeros": hki.Zeros(shape=(6, 6)),
        "constant": hki.SymbolicConstant(0.5, shape=(6, 6), dtype=jnp.float32),
    }


WAYS = {
    "grad": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda x, *rest: jax.vmap(f, (0, *[None] * len(rest)))(x[None], *rest)[0],
    "scan": lambda f: (
        lambda x, *rest: lax.scan(lambda c, _: (c + f(x, *rest), None), 0.0, None, 2)[0]
    ),
    "cond": lambda f: lambda x, *rest: lax.cond(x[0, 0] > -9, f, lambda *_: 0.0, x, *rest),
}


def of_leaves(fun, w):
    """A loss as a function of the inputs and of the leaves of `w` that can be differentiated."""
    leaves, treedef = jax.tree.flatten(w)
    moving = [i for i, y in enumerate(leaves) if jnp.issubdtype(y.dtype, np.inexact)]

    def loss(x, *values):
        mixed = dict(enumerate(leaves)) | dict(zip(moving, values, strict=True))
        return jnp.sum(fun(x, treedef.unflatten([mixed[i] for i in range(len(leaves))])) ** 2)

    return loss, [leaves[i] for i in moving]


def same_gradients(rule, w, way, argnums, transform=lambda f: f):
    x = normal((6, 6), 9)
    loss, values = of_leaves(use(rule), w)
    twin, _ = of_leaves(lambda x, w: rule(x, hki.materialize(w)), w)
    places = tuple(i for i in argnums if i <= len(values))
    got = transform(jax.grad(WAYS[way](loss), places))(x, *values)
    want = transform(jax.grad(WAYS[way](jax.jit(twin)), places))(x, *values)
    assert isinstance(w, hki.Zeros) or max(jnp.abs(y).max() for y in want) > 0.1
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-4, atol=1e-4)  # float32 sums in another order


@pytest.mark.every(2)
@pytest.mark.parametrize("rule", RULES)
def test_rules_are_told_the_same_as_in_a_dense_program(rule, may_be_dense):
    for argnums in [(0,), (2, 3)]:  # LoRA's base does not move, but its operand does
        same_gradients(rule, operands()["lora"], "grad", argnums)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["lora", "int8", "qlora", "dora", "zeros", "constant"])
def test_rules_in_all_ways(rule, kind, may_be_dense):
    w = operands()[kind]
    for i, way in enumerate(WAYS):
        same_gradients(rule, w, way, [(0,), (0, 1, 2, 3)][i % 2])


def test_one_program_differentiated_by_other_operands(may_be_dense):
    """JAX keeps a jitted program, and asks its rules anew about what moves."""
    loss, values = of_leaves(use(is_told), operands()["lora"])
    twin, _ = of_leaves(lambda x, w: is_told(x, hki.materialize(w)), operands()["lora"])
    x = jnp.ones((6, 6))
    jitted, dense = jax.jit(loss), jax.jit(twin)
    first, wanted = (jax.vjp(f, x, *values)[1] for f in (jitted, dense))
    pairs = [
        *(
            (jax.grad(f, i)(x, *values) for f in (jitted, dense))
            for i in [(0,), (2, 3), (0, 2), (0,)]
        ),
        (first(jnp.float32(1)), wanted(jnp.float32(1))),  # of the first trace, after all others
    ]
    for got, want in pairs:
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4)


@pytest.mark.slow
def test_doubles_and_derivatives_of_derivatives(x64, may_be_dense):
    w = jax.tree.map(lambda y: y.astype(jnp.float64), operands()["lora"])
    for rule in (closes_over_arrays, has_static_arguments, is_converted, has_integers):
        same_gradients(rule, w, "jit", (0, 2, 3))
        loss, values = of_leaves(use(rule), w)
        twin, _ = of_leaves(lambda x, w, rule=rule: rule(x, hki.materialize(w)), w)
        x = jnp.linspace(-1, 1, 36).reshape(6, 6)

        def second(f, x=x, values=values):
            by_a = jax.grad(lambda x, *values: jnp.sum(jax.grad(f, 2)(x, *values) ** 2), (0, 3))
            return by_a(x, *values)

        for a, b in zip(second(loss), second(jax.jit(twin)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_a_closed_over_weight_is_an_error_as_in_a_dense_program(may_be_dense):
    def model(w, x):
        f = jax.custom_vjp(lambda x: x @ w)
        f.defvjp(lambda x: (x, None), lambda _, g: (g,))
        return f(x).sum()

    w, x = operands()["lora"], jnp.ones((2, 6))
    for fun in (lambda w: use(model)(w, x), lambda w: jax.jit(model)(hki.materialize(w), x)):
        with pytest.raises(Exception, match="closed-over value"):
            jax.grad(fun)(w)


@pytest.mark.slow
def test_odeint_in_a_model(may_be_dense):
    def solved(x, w):
        return odeint(lambda y, t: jnp.tanh(y @ w), x, jnp.linspace(0.0, 1.0, 3))

    same_gradients(solved, operands()["lora"], "grad", (0, 2, 3))


def test_checks_within_are_found(may_be_dense):
    def checked(w, x):
        checkify.check(jnp.all(x < 0), "all are negative")
        return x @ w

    f = jax.custom_vjp(checked)
    f.defvjp(lambda w, x: (x @ w, (w, x)), lambda s, g: (2 * s[1].T @ g, g @ s[0].T))
    w = operands()["lora"]
    for sign in (1.0, -1.0):
        error, y = checkify.checkify(use(f))(w, jnp.full((2, 6), sign))
        assert (error.get() is not None) == (sign > 0)
        np.testing.assert_allclose(
            y, sign * hki.materialize(w).sum(0)[None].repeat(2, 0), rtol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_functions_with_rules(seed, may_be_dense):
    """A rule on the result of another one, in one way within another, by some of the operands."""
    draw = np.random.default_rng(seed)
    kind = draw.choice(["lora", "int8", "qlora", "dora"])
    first, second = draw.choice(SQUARE, 2)
    outer, inner = (WAYS[name] for name in draw.choice(list(WAYS), 2))

    def model(x, w):
        return second(jnp.tanh(first(x, w)) / 3, w)

    w = operands()[kind]
    loss, values = of_leaves(use(model), w)
    twin, _ = of_leaves(lambda x, w: model(x, hki.materialize(w)), w)
    count = int(draw.integers(1, len(values) + 2))
    places = tuple(int(i) for i in sorted(draw.choice(len(values) + 1, count, replace=False)))
    x = normal((6, 6), seed)
    got, want = (jax.grad(outer(inner(f)), places)(x, *values) for f in (loss, jax.jit(twin)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * max(1.0, float(jnp.abs(b).max())))


@jax.custom_vjp
def with_another_factor(w):
    return w * 2


with_another_factor.defvjp(lambda w: (w * 2, w), lambda w, c: (c * w * w,))


@pytest.mark.parametrize("jit", [False, True])
def test_forward_over_reverse_of_a_rule_for_reverse(jit):
    """A rule that JAX can't differentiate forward: the inner gradient has used it before."""
    x = jnp.ones((2, 4))
    q = hki.LoRA(jnp.eye(4), jnp.ones((4, 2)), jnp.full((2, 4), 0.1), alpha=2.0)

    def loss(w):
        return ((x @ with_another_factor(w)) ** 4).sum() / 1e4

    def hvp(fun):
        run = lambda q: jax.jvp(jax.grad(fun), (q,), (q,))[1]  # noqa: E731
        return (jax.jit(run) if jit else run)(q)

    want = hvp(lambda q: loss(hki.materialize(q)))
    got = hvp(hki.use_implicit_args(loss))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    assert np.abs(got.a).max() > 0


def test_a_call_that_was_differentiated_before_it_is_mapped():
    """One program, which JAX keeps: its gradient, and then the gradient of it under `vmap`."""
    x = jnp.ones((2, 4))
    qs = hki.LoRA(
        jnp.stack([jnp.eye(4), 2 * jnp.eye(4)]), jnp.ones((2, 4, 1)), jnp.full((2, 1, 4), 0.1)
    )
    first = jax.tree.map(lambda leaf: leaf[0], qs)

    @jax.custom_vjp
    def transposed(w):  # by numbers of axes that a batch would change
        return w.T * 2

    transposed.defvjp(lambda w: (w.T * 2, w), lambda w, c: (c.T * w * w,))

    def loss(w):
        return ((x @ transposed(w)) ** 4).sum() / 1e4

    fun = jax.jit(hki.use_implicit_args(loss))
    dense = jax.jit(lambda q: loss(hki.materialize(q)))

    def of_all(f):
        return jax.grad(lambda qs: (jax.vmap(f)(qs) * jnp.array([1.0, 3.0])).sum())

    jax.grad(fun)(first)
    got, want = of_all(fun)(qs), of_all(dense)(qs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
