"""One random case: a Haiku function, parameters and transformations, run on implicit and dense arrays."""

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import haiku_implicit as hki
from tests.random_programs import chains, models, trees

X = np.linspace(-1.0, 1.0, models.BATCH * models.WIDTH, dtype=np.float32)
X = np.roll(X, 7).reshape(models.BATCH, models.WIDTH)
# A tolerance for values of order one: a few roundings, which a program's own sensitivity may make larger.
TOLERANCE = 2e-4


class Case(NamedTuple):
    """A comparison.

    Attributes:
      program: the model, see `models`.
      params: its parameters, some implicit.
      state: its state, dense.
      chain: the transformations, innermost first.
      within: whether the interpreter runs the transformations (`use_implicit_args` of the transformed
        function), and not they what the interpreter traced (transformations of a wrapped one).
      eager: whether it runs without `jit` around all of it.
    """

    program: models.Program
    params: Any
    state: Any
    chain: list[str]
    within: bool
    eager: bool

    def __str__(self) -> str:
        order = "use_implicit_args of" if self.within else "of use_implicit_args"
        chain = " of ".join(reversed(self.chain)) or "no transformation"
        types = jax.tree.map(_described, self.params, is_leaf=_is_implicit)
        return f"program = {self.program}\nchain = {self.chain}  # {order} {chain}{', eagerly' * self.eager}\nparams = {types}"


class Disagreement(AssertionError):
    """That implicit and dense arrays give different results, or one of them none."""


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    program = models.draw(rng)
    model = hk.transform_with_state(models.function(program))
    params, state = jax.eval_shape(model.init, jax.random.key(0), X)
    values = np.random.default_rng(rng.randrange(2**32))
    state = jax.tree.map(lambda s: jnp.asarray(values.uniform(0, 1, s.shape), s.dtype), state)
    params = trees.draw_tree(rng, params)
    if jax.device_count() > 1:
        params = chains.placed(rng, params)
    return Case(
        program, params, state, chains.draw_chain(rng), rng.random() < 0.5, rng.random() < 0.03
    )


def check(case: Case) -> bool:
    """Compares a case with its dense twin.

    Returns:
      Whether there was something to compare: False, if the dense twin raises an error.

    Raises:
      Disagreement: with the first leaf of the results that differs.
    """
    twin, implicit = _functions(case)
    run = (lambda fun: fun) if case.eager else jax.jit  # type: ignore[var-annotated]
    both = run(lambda params, x: (implicit(params, x), twin(params, x)))
    try:
        got, want = both(case.params, X)
    except Exception as error:
        if _raises(run(twin), case):
            return False
        raise Disagreement(f"{type(error).__name__}: {error}\n{case}") from error
    problem = difference(got, want, lambda: both(nudged(case.params), X)[1])
    if problem:
        raise Disagreement(f"{problem}\n{case}")
    return True


def check_seeds(seeds: range) -> tuple[int, dict[int, str]]:
    """How many of these cases agree, and the errors of the others, by seed."""
    compared, failures = 0, {}
    gc.disable()  # 8 % of the time, and it finds next to nothing
    try:
        for seed in seeds:
            try:
                with hki.materialization("allow"):
                    compared += check(draw(seed))
            except Exception as error:
                failures[seed] = f"{type(error).__name__}: {error}"
    finally:
        gc.enable()
    return compared, failures


def _raises(fun: Any, case: Case) -> bool:
    try:  # it runs, as JAX raises some errors no sooner than when it lowers
        fun(case.params, X)
    except Exception:
        return True
    return False


def _functions(case: Case) -> tuple[Any, Any]:
    """The results from parameters and `x`: with dense arrays alone, and with implicit ones."""
    model = hk.transform_with_state(models.function(case.program))
    key = jax.random.key(1)

    def fun(params: Any, x: Any) -> Any:
        return model.apply(params, case.state, key, x)

    if case.within:
        whole = chains.composed(case.chain, fun)
        twin = lambda params, x: whole(hki.materialize(params), x)  # noqa: E731
        return twin, lambda params, x: hki.materialize(hki.use_implicit_args(whole)(params, x))
    # Derivatives by leaves, too, are those of the dense weights' formulas.
    twin = lambda params, x: fun(hki.materialize(params), x)  # noqa: E731
    wrapped = hki.use_implicit_args(fun)
    implicit = lambda params, x: hki.materialize(wrapped(params, x))  # noqa: E731
    return chains.composed(case.chain, twin), chains.composed(case.chain, implicit)


def difference(
    got: Any, want: Any, again: Callable[[], Any], on_the_way: Sequence[Any] = ()
) -> str | None:
    """The differences of two trees.

    Args:
      got, want: trees of arrays.
      again: computes `want` from arguments that differ by a rounding. What this changes may differ by as
        much: eight times if roundings are coarse, a hundred times if they are those of float32.
      on_the_way: dtypes that values are rounded to before the results are.
    """
    if jax.tree.structure(got) != jax.tree.structure(want):
        return f"{jax.tree.structure(got)}, expected {jax.tree.structure(want)}"
    moved = None
    for i, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        if (jnp.shape(a), jnp.result_type(a)) != (jnp.shape(b), jnp.result_type(b)):
            return f"leaf {i}: {jax.typeof(a)}, expected {jax.typeof(b)}"
        off = apart(a, b)
        limit = roundings(b, on_the_way) * (1 + largest(b))
        if not off <= limit:
            moved = jax.tree.leaves(again()) if moved is None else moved
            times = 100 if roundings(b, on_the_way) == TOLERANCE else 8
            if not off <= limit + times * apart(moved[i], b):
                return f"leaf {i}: off by {off:.2e}, of values up to {largest(b):.2e}"
    return None


def roundings(x: Any, on_the_way: Sequence[Any]) -> float:
    """The tolerance of results of order one: a few roundings to the coarsest dtype; none for integers."""
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    coarse = [d for d in (dtype, *on_the_way) if jnp.issubdtype(d, jnp.inexact)]
    return max(TOLERANCE, *(8 * float(jnp.finfo(d).eps) for d in coarse))


def numbers(x: Any) -> Any:
    """In doubles; the derivatives of integers, which are nothing, as zeros."""
    if jnp.result_type(x) == jax.dtypes.float0:
        return np.zeros(np.shape(x))
    return np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)


def apart(a: Any, b: Any) -> float:
    """The largest distance; where both are the same NaN or infinity there is none."""
    a, b = numbers(a), numbers(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        return float(np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0))


def largest(x: Any) -> float:
    x = np.abs(numbers(x))
    return float(np.max(x, initial=0.0, where=np.isfinite(x)))


def nudged(params: Any, dtype: Any = jnp.float32) -> Any:
    """Parameters that differ by about one rounding to a dtype, or to their own if that is coarser."""
    values = np.random.default_rng(0)

    def nudge(x: Any) -> Any:
        if not chains.is_float(x):
            return x
        eps = max(float(jnp.finfo(d).eps) for d in (dtype, x.dtype))
        noise = eps * values.choice([-1.0, 1.0], np.shape(x))
        return x * jnp.asarray(1 + noise, x.dtype)

    return jax.tree.map(nudge, params)


def _is_implicit(x: Any) -> bool:
    return isinstance(x, hki.ImplicitArray)


def _described(x: Any) -> str:
    """The types that are nested in an array, and its shape."""
    if not _is_implicit(x):
        return str(jax.typeof(x))
    parts = [getattr(x, name) for name in vars(x)]
    inner = [y for part in parts for y in (part if isinstance(part, tuple) else [part])]
    nested = ", ".join(_described(y) for y in inner if _is_implicit(y))
    return f"{type(x).__name__}[{','.join(map(str, x.shape))}]" + (f"({nested})" if nested else "")
