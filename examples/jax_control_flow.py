"""Runs the branches and loops of a JAX tutorial on implicit arrays.

They are from "JAX Advanced Techniques" by Robert Dyro and Spencer Richards: `where`, `cond` and
`select` with their effects on gradients, and loops of fixed and variable length, with a history. Each
is compared with Python's own `if`, `for` and `while` on dense arrays.

    python examples/jax_control_flow.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import haiku_implicit as hki
from printing import heading, table

_SIZE = flags.DEFINE_integer("size", 64, "States of the linear system, a multiple of 32.", 32)
_STEPS = flags.DEFINE_integer("steps", 100, "The most steps of a loop that may end early.", 20)
_BATCH = flags.DEFINE_integer("batch", 8, "Systems that run together.", 2)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    branches()
    nan_lesson()
    batched_cond()
    with hki.materialization("error"):  # no loop makes the matrix dense
        loops_of_fixed_length()
        loops_that_end_early()


# --- branches ---------------------------------------------------------------------------------------


def branches() -> None:
    """Writes `if` as `where`, `select`, `cond` and `switch`, between products with two weights."""
    a, b = lora(jax.random.key(0)), int4(jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (_SIZE.value,))
    dense_a, dense_b = hki.materialize((a, b))

    ways = {
        "jnp.where": lambda c, a, b, x: jnp.where(c, x @ a, x @ b),
        "lax.select": lambda c, a, b, x: jax.lax.select(c, x @ a, x @ b),
        "jnp.select": lambda c, a, b, x: jnp.select([c], [x @ a], x @ b),
        "lax.cond": lambda c, a, b, x: jax.lax.cond(c, lambda x: x @ a, lambda x: x @ b, x),
        "lax.cond on weights": lambda c, a, b, x: x @ jax.lax.cond(c, lambda: a, lambda: b),
        "lax.switch": lambda c, a, b, x: jax.lax.switch(
            1 - c, [lambda x: x @ a, lambda x: x @ b], x
        ),
    }
    heading("1. if: a LoRA weight or a 4-bit one")
    rows = []
    for name, way in ways.items():
        run = jax.jit(hki.use_implicit_args(way))
        with hki.materialization_report() as report, hki.materialization("allow"):
            got = [run(c, a, b, x) for c in (True, False)]
        computes = "one branch" if "cond[" in str(jax.make_jaxpr(run)(True, a, b, x)) else "both"
        made_dense = ", ".join(sorted(event.type_name for event, _ in report)) or "-"
        error = max(abs(got[0] - x @ dense_a).max(), abs(got[1] - x @ dense_b).max())
        rows.append([name, computes, made_dense, f"{error:.0e}"])
        assert error < 1e-4
    table(["", "computes", "made dense", "difference from Python's if"], rows)


def nan_lesson() -> None:
    """Shows that the gradient of `where` is NaN if the untaken branch's is; `cond`'s gradient is not.

    A batched `cond` also gives no NaN: it is a `select`, but JAX stops the gradients of the branch
    that an example does not take.
    """
    w = lora(jax.random.key(0))

    def where(w: Any, x: jax.Array) -> jax.Array:
        y = (x @ w).sum()
        return jnp.where(y > 0, jnp.sqrt(y), 0.0)

    def cond(w: Any, x: jax.Array) -> jax.Array:
        y = (x @ w).sum()
        return jax.lax.cond(y > 0, jnp.sqrt, lambda y: 0.0 * y, y)

    def double_where(w: Any, x: jax.Array) -> jax.Array:
        y = (x @ w).sum()
        safe = jnp.where(y > 0, y, 1.0)  # the branch that is not taken gets a harmless number
        return jnp.where(y > 0, jnp.sqrt(safe), 0.0)

    heading("2. The NaN lesson: sqrt(y) if y > 0 else 0, at y = 0, with respect to LoRA's factors")
    rows = []
    x, zero = hki.materialize(w).sum(axis=1), jnp.zeros(_SIZE.value)  # y is |x|², and 0
    both = jnp.stack([zero, x])
    for fun in (where, cond, double_where):
        fun = hki.use_implicit_args(fun)
        gradient = jax.jit(hki.value_and_grad(fun))
        (value, grads), (_, elsewhere) = gradient(w, zero), gradient(w, x)
        mapped = jax.vmap(gradient, (None, 0))(w, both)[1]
        of_mapped = hki.grad(lambda w, fun=fun: jax.vmap(fun, (None, 0))(w, both).sum())(w)
        found = [grads.b[0, 0], mapped.b[0, 0, 0], of_mapped.b[0, 0]]
        rows.append([fun.__name__, value, *found, f"{norm(elsewhere):.4f}"])
    names = ["", "value", "gradient", "vmap of the gradient", "gradient of a vmap", "norm at y > 0"]
    table(names, rows)
    of_where, of_cond, of_double = ([bool(jnp.isnan(x)) for x in row[2:5]] for row in rows)
    assert of_where == [True, True, True]
    assert of_cond == of_double == [False, False, False]
    assert len({row[-1] for row in rows}) == 1


def norm(grads: hki.LoRA) -> jax.Array:
    return jnp.sqrt((grads.a**2).sum() + (grads.b**2).sum())


def batched_cond() -> None:
    """Under `vmap`, a `cond` with a predicate for each example computes both branches."""
    w, small = lora(jax.random.key(0)), int4(jax.random.key(1))
    xs = jax.random.normal(jax.random.key(2), (_BATCH.value, _SIZE.value))

    @hki.use_implicit_args
    def route(c: jax.Array, w: Any, small: Any, x: jax.Array) -> jax.Array:
        return jax.lax.cond(c, lambda x: x @ w, lambda x: x @ small, x)

    each, one = jax.vmap(route, (0, None, None, 0)), jax.vmap(route, (None, None, None, 0))
    cs = jnp.arange(_BATCH.value) % 2 == 0
    heading("3. cond under vmap")
    rows = []
    for label, run, c in (
        ("one predicate for all", one, cs[0]),
        ("one for each example", each, cs),
    ):
        jaxpr = jax.make_jaxpr(run)(c, w, small, xs)
        rows.append([label, count(jaxpr, "cond"), count(jaxpr, "select_n")])
    table(["", "cond", "select"], rows)
    dense = hki.materialize((w, small))
    want = [x @ (dense[0] if c else dense[1]) for c, x in zip(cs, xs, strict=True)]
    np.testing.assert_allclose(
        jax.jit(each)(cs, w, small, xs), jnp.stack(want), rtol=1e-3, atol=1e-4
    )
    assert rows[0][1] == 1 and rows[1][1] == 0 and rows[1][2] > 0
    print("(jax.lax.map keeps the cond, and takes one example after the other)")


def count(jaxpr: Any, name: str) -> int:
    """Counts a primitive in a jaxpr, at the top and within `jit`."""
    found = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found += equation.primitive.name == name
        if equation.primitive.name in ("jit", "pjit"):
            found += count(equation.params["jaxpr"], name)
    return found


# --- loops ------------------------------------------------------------------------------------------


def loops_of_fixed_length() -> None:
    """Computes the tutorial's scaled Fibonacci numbers by `scan`, and matrix powers by `fori_loop`."""
    a, x0 = transition(), jnp.ones(_SIZE.value)
    steps, dense = 10, np.asarray(hki.materialize(a))

    def fibonacci(carry: Any, multiplier: jax.Array) -> Any:
        before, current = carry
        following = multiplier * current + before
        return (current, following), following

    factors = jax.random.normal(jax.random.key(0), (10,))
    start = jnp.array(1.0), jnp.array(1.0)
    numbers = jnp.concatenate([jnp.stack(start), jax.lax.scan(fibonacci, start, factors)[1]])
    want = [1.0, 1.0]
    for factor in np.asarray(factors):
        want.append(factor * want[-1] + want[-2])
    np.testing.assert_allclose(numbers, want, rtol=1e-4)

    @jax.jit
    @hki.use_implicit_args
    def powers(a: Any, x0: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, steps, lambda i, x: a @ x, x0)

    @jax.jit
    @hki.use_implicit_args
    def history(a: Any, x0: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (a @ x, a @ x), x0, length=steps)[1]

    @jax.jit
    @hki.use_implicit_args
    def each_its_own(stack: Any, x0: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, a: (a @ x, None), x0, stack)[0]

    by_hand = [np.asarray(x0)]
    for _ in range(steps):
        by_hand.append(dense @ by_hand[-1])
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * steps), a)  # a stack of LoRA weights

    heading(
        f"4. Loops of fixed length: x -> A x, A a LoRA on a {type(a.w).__name__} {list(a.shape)}"
    )
    rows = []
    for name, x in (
        ("fori_loop, the last x", powers(a, x0)),
        ("scan, the last of the history", history(a, x0)[-1]),
        ("scan over a stack of A's", each_its_own(stack, x0)),
    ):
        rows.append([name, f"{jnp.linalg.norm(x):.4f}", f"{abs(x - by_hand[-1]).max():.0e}"])
    table(["", f"norm of x after {steps} steps", "difference from a Python loop"], rows)
    np.testing.assert_allclose(history(a, x0), np.stack(by_hand[1:]), rtol=1e-3, atol=1e-4)
    assert all(float(row[2]) < 1e-3 for row in rows)

    slope = jax.jit(hki.value_and_grad(lambda a: (history(a, x0) ** 2).sum()))(a)[1]

    def of_dense(b: jax.Array) -> jax.Array:
        matrix, x, total = a._replace(b=b).materialize(), x0, 0.0
        for _ in range(steps):
            x = matrix @ x
            total += (x**2).sum()
        return total

    want = jax.grad(of_dense)(a.b)
    error = jnp.linalg.norm(slope.b - want) / jnp.linalg.norm(want)
    print(f"gradient of the history with respect to LoRA's b: relative difference {error:.0e}")
    assert error < 1e-3


def loops_that_end_early() -> None:
    """Runs until |x| is below a bound: `while_loop`, and `scan` with `cond`, which keeps a history."""
    a, most = transition(), _STEPS.value
    xs = jnp.linspace(1, 8, _BATCH.value)[:, None] * jnp.ones(_SIZE.value)
    bound = jnp.float32(1.0)
    goes_on = lambda x: jnp.linalg.norm(x) > bound  # noqa: E731

    @hki.use_implicit_args
    def by_while(a: Any, x: jax.Array) -> Any:
        def body(it_x: Any) -> Any:
            return it_x[0] + 1, a @ it_x[1]

        return jax.lax.while_loop(lambda it_x: goes_on(it_x[1]) & (it_x[0] < most), body, (0, x))

    @hki.use_implicit_args
    def by_scan(a: Any, x: jax.Array) -> Any:
        def step(it_x: Any, _: None) -> Any:
            it_x = jax.lax.cond(
                goes_on(it_x[1]), lambda it, x: (it + 1, a @ x), lambda it, x: (it, x), *it_x
            )
            return it_x, it_x

        return jax.lax.scan(step, (0, x), length=most)

    @hki.use_implicit_args
    def with_history(a: Any, x: jax.Array) -> Any:
        """A `while_loop` that writes its history: it stops early and keeps the history."""

        def body(it_x_h: Any) -> Any:
            it, x, history = it_x_h
            x = a @ x
            return it + 1, x, history.at[it].set(x)

        start = 0, x, jnp.full((most, *x.shape), jnp.nan)
        return jax.lax.while_loop(
            lambda it_x_h: goes_on(it_x_h[1]) & (it_x_h[0] < most), body, start
        )

    dense = np.asarray(hki.materialize(a))
    counts, last, histories = [], [], []
    for x in np.asarray(xs):
        history = []
        while np.linalg.norm(x) > bound and len(history) < most:
            x = dense @ x
            history.append(x)
        counts.append(len(history))
        last.append(x)
        histories.append(history)

    heading(
        f"5. Loops that end early: until |x| < {bound:.0f}, at most {most} steps, {_BATCH.value} starts"
    )
    in_batch = lambda f: jax.jit(jax.vmap(f, (None, 0)))(a, xs)  # noqa: E731
    its, ends = in_batch(by_while)
    (scan_its, scan_ends), (all_its, all_xs) = in_batch(by_scan)
    hist_its, hist_ends, kept = in_batch(with_history)
    table(
        ["", "steps of each", "difference from Python's while"],
        [
            ["Python", *both(counts, last, last)],
            ["while_loop", *both(its, ends, last)],
            ["scan with cond", *both(scan_its, scan_ends, last)],
            ["while_loop with a history", *both(hist_its, hist_ends, last)],
        ],
    )
    for got in (its, scan_its, hist_its):
        np.testing.assert_array_equal(got, counts)
    for got in (ends, scan_ends, hist_ends):
        np.testing.assert_allclose(got, np.stack(last), rtol=1e-3, atol=1e-4)
    for i, (n, history) in enumerate(zip(counts, histories, strict=True)):
        np.testing.assert_array_equal(all_its[i], np.minimum(np.arange(1, most + 1), n))
        if n:
            np.testing.assert_allclose(all_xs[i, :n], np.stack(history), rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(kept[i, :n], np.stack(history), rtol=1e-3, atol=1e-4)
        assert np.isnan(kept[i, n:]).all()
    assert 0 < max(counts) < most and len(set(counts)) > 1
    show = counts.index(max(counts))
    norms = [f"{x:.2f}" for x in np.linalg.norm(kept[show, : counts[show]], axis=-1)]
    print(f"history of |x| from start {show}: {' '.join(norms[:6])} ... {' '.join(norms[-3:])}")


def both(counts: Any, ends: Any, want: Any) -> list[str]:
    return [
        " ".join(map(str, np.asarray(counts))),
        f"{abs(np.asarray(ends) - np.stack(want)).max():.0e}",
    ]


# --- weights and output ---------------------------------------------------------------------------


def int4(key: jax.Array) -> hki.QuantizedMatrix:
    n = _SIZE.value
    w = jax.random.normal(key, (n, n)) / n**0.5
    return hki.QuantizedMatrix.quantize(w, "int4", group_size=32)


def lora(key: jax.Array) -> hki.LoRA:
    """Returns LoRA of rank 2 on an 8-bit weight."""
    n, keys = _SIZE.value, jax.random.split(key, 3)
    w = hki.QuantizedMatrix.quantize(jax.random.normal(keys[0], (n, n)) / n**0.5, "int8")
    a, b = jax.random.normal(keys[1], (n, 2)) / n**0.5, jax.random.normal(keys[2], (2, n)) / n**0.5
    return hki.LoRA(w, a, b)


def transition() -> hki.LoRA:
    """Returns a matrix with fading powers: 0.8 of the identity and noise, in 8 bits, plus LoRA."""
    n, keys = _SIZE.value, jax.random.split(jax.random.key(7), 3)
    w = 0.8 * jnp.eye(n) + 0.1 * jax.random.normal(keys[0], (n, n)) / n**0.5
    factors = jax.random.normal(keys[1], (n, 2)) / n, jax.random.normal(keys[2], (2, n)) / n
    return hki.LoRA(hki.QuantizedMatrix.quantize(w, "int8"), *factors)


if __name__ == "__main__":
    app.run(main)
