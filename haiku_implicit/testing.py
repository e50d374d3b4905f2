"""`check_type`: a test of a new implicit type, for use outside this library."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import progress
from haiku_implicit.core.array import (
    ImplicitArray,
    flatten,
    is_implicit,
    num_batch_axes,
    static_items,
)
from haiku_implicit.core.dispatch import rules
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.materialization import (
    MaterializationReport,
    materialization,
    materialization_report,
)
from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.core.typing import Array

Operation = Callable[[Any], Any]

# Functions of one array of any rank. Those that fail for the dense array are skipped.
OPERATIONS: dict[str, Operation] = {
    "identity": lambda w: w,
    "plus a number": lambda w: w + 1.5,
    "times a number": lambda w: w * -0.5,
    "divided by a number": lambda w: w / 3,
    "negative": lambda w: -w,
    "plus itself": lambda w: w + w,
    "times itself": lambda w: w * w,
    "plus a dense array": lambda w: w + _like(w),
    "times a dense array": lambda w: _like(w) * w,
    "times a row": lambda w: w * _like(w)[..., :1, :],
    "times a column": lambda w: w * _like(w)[..., :1],
    "tanh": jnp.tanh,
    "abs": jnp.abs,
    "compared": lambda w: w > 0,
    "where": lambda w: jnp.where(_like(w) > 0, w, 0),
    "clipped": lambda w: jnp.clip(w, -0.5, 0.5),
    "bfloat16": lambda w: w.astype(jnp.bfloat16),
    "integers": lambda w: (10 * w).astype(jnp.int32),
    "x @ w": lambda w: jnp.swapaxes(_like(w), -1, -2) @ w,
    "w @ x": lambda w: w @ jnp.swapaxes(_like(w), -1, -2),
    "x @ w.T": lambda w: _like(w) @ jnp.swapaxes(w, -1, -2),
    "w.T @ w": lambda w: jnp.swapaxes(w, -1, -2) @ w,
    "vector @ w": lambda w: _like(w)[..., :, 0] @ w if w.ndim == 2 else w,
    "sum": jnp.sum,
    "sums of rows": lambda w: w.sum(-1),
    "means of columns": lambda w: w.mean(-2),
    "largest": lambda w: w.max(-1),
    "softmax": jax.nn.softmax,
    "cumulative sums": lambda w: jnp.cumsum(w, -1),
    "sorted": lambda w: jnp.sort(w, -1),
    "transposed": jnp.transpose,
    "raveled": jnp.ravel,
    "with an axis more": lambda w: w[None],
    "broadcast": lambda w: jnp.broadcast_to(w, (2, *w.shape)),
    "first": lambda w: w[0],
    "last column": lambda w: w[..., -1],
    "some rows": lambda w: w[jnp.array([0, -1, 0])],
    "some columns": lambda w: w[..., jnp.array([0, -1, 0])],
    "half": lambda w: w[: (w.shape[0] + 1) // 2],
    "every other column": lambda w: w[..., ::2],
    "reversed": lambda w: w[::-1],
    "sliced where it runs": lambda w: jax.lax.dynamic_slice_in_dim(w, jnp.int32(0), 1),
    "written to": lambda w: w.at[0].set(0),
    "twice, side by side": lambda w: jnp.concatenate([w, w], -1),
    "next to a dense array": lambda w: jnp.concatenate([w, _like(w)]),
    "stacked": lambda w: jnp.stack([w, w]),
    "in a loop": lambda w: jax.lax.fori_loop(0, 3, lambda i, w: w * 0.5, w),
    "in a branch": lambda w: jax.lax.cond(_like(w).sum() > 0, lambda w: w, lambda w: -w, w),
}


def _like(w: Array) -> jax.Array:
    """Makes a dense array without zeros, with the shape and dtype of another one."""
    values = np.cos(np.arange(int(np.prod(w.shape)))).reshape(w.shape)
    return jnp.asarray(values, w.dtype)


def check_type(
    make: Callable[[int], ImplicitArray],
    dense: Callable[[Any], jax.Array] = materialize_array,
    *,
    operations: dict[str, Operation] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> MaterializationReport:
    """Runs arrays of a type through common functions, and compares with the dense arrays.

    Each function runs eagerly and under `jit`, its derivative in all floating leaves under `jit`, and,
    for types with batch axes (`core_ndim`), under `vmap` and in a `scan` over two arrays.

    Args:
      make: makes an array of the type from a seed, always with the same shape.
      dense: makes the dense array of an array (or of a batch of them), with JAX's functions. If
        possible, it should not use `materialize`.
      operations: functions of one array, by names for errors. None: `OPERATIONS`, all of which take
        20 s of processor time or more to compile. In a terminal with tqdm, a bar shows the progress.
      rtol, atol: the tolerances of all comparisons.

    Returns:
      A report of the materialized arrays; `print` shows it as a table. (They are not errors, since
      rules only add speed.)

    Raises:
      AssertionError: if results, derivatives, the shape or the dtype differ from the dense array's, or
        if a function raises. It lists all failures, with the type's rules for the primitives there.
      TypeError: if `make` does not make an implicit array.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.testing import check_type
      >>> @dataclasses.dataclass
      ... class Diagonal(hki.ImplicitArray, core_ndim=2):
      ...     d: jax.Array
      ...     def materialize(self):
      ...         return self.d[..., None] * jnp.eye(self.d.shape[-1])
      >>> def make(seed):
      ...     return Diagonal(jax.random.normal(jax.random.key(seed), (4,)))
      >>> report = check_type(make, operations={'x @ w': lambda w: jnp.ones((2, 4)) @ w})
      >>> [event.primitive for event, count in report][0]
      'dot_general'
    """
    every = OPERATIONS if operations is None else operations
    if not callable(make) or not is_implicit(w := make(0)):
        got = f"a function that returns {type(w).__name__}" if callable(make) else repr(make)
        raise type_error(f"make: expected a function that returns an implicit array, got {got}")
    with materialization("allow"), materialization_report() as report:
        failures = _said("the array itself", {"": _failure(_check_array, make, dense, rtol, atol)})
        if failures:
            every = {}  # its functions would fail as well
        with progress.bar("functions", len(every)) as run:
            for name, fun in every.items():
                failures += run(name, _failures_of, name, fun, make, dense, rtol, atol)
    if failures:
        raise AssertionError(f"{len(failures)} failures of {w!r}:\n" + "\n".join(failures))
    return report


def _failures_of(
    name: str,
    fun: Operation,
    make: Callable[[int], ImplicitArray],
    dense: Callable[[Any], jax.Array],
    rtol: float,
    atol: float,
) -> list[str]:
    """The failures of one function, in all ways to run it."""
    w = make(0)
    if not _allowed(fun, dense(w)):
        return []
    found = {way: _failure(check, dense, rtol, atol) for way, check in _ways(make, fun)}
    return _said(name, found, _rules_for(fun, w) if any(found.values()) else "")


def _failure(check: Callable[..., None], *args: Any) -> str:
    try:
        check(*args)
    except Exception as error:  # any error is reported
        lines = [line for line in str(error).splitlines() if line.strip()][:4]
        return f"{type(error).__name__}: {' '.join(lines)}"
    return ""


def _said(name: str, found: dict[str, str], note: str = "") -> list[str]:
    """A line for each failure of a function, with all ways to run it that fail so."""
    ways = {failure: [w for w, f in found.items() if f == failure] for failure in found.values()}
    return [
        f"{', '.join([name, *filter(None, own)])}: {failure}{note}"
        for failure, own in ways.items()
        if failure
    ]


def _rules_for(fun: Operation, w: ImplicitArray) -> str:
    """Names the rules of the array's own type for the primitives of a function."""
    own = {cls for cls in type(w).__mro__ if issubclass(cls, ImplicitArray)} - {ImplicitArray}
    program = str(jax.make_jaxpr(fun)(jax.ShapeDtypeStruct(w.shape, w.dtype)))
    found = [
        f"{primitive.name} by {getattr(method.rule, '__name__', method.rule)}"
        for primitive, methods in rules().items()
        if re.search(rf"\b{primitive.name}\b", program)
        for method in methods
        if own & set(method.types)
    ]
    return f" (rules of {type(w).__name__}: {', '.join(dict.fromkeys(found)) or 'none'})"


def _check_array(
    make: Callable[[int], Any], dense: Callable[[Array], jax.Array], rtol: float, atol: float
) -> None:
    """Checks the fields of an array, its shape and dtype, its flattening, its repr, and a batch."""
    w = make(0)
    _check_fields(w)
    want = dense(w)
    assert (w.shape, w.dtype) == (want.shape, want.dtype), (
        f"it says that it is {w.dtype}{list(w.shape)}, and stands for {want.dtype}{list(want.shape)}"
    )
    leaves, treedef = flatten(w)
    again = treedef.unflatten(leaves)
    assert jax.tree.structure(again) == treedef and hash(treedef) == hash(jax.tree.structure(again))
    repr(treedef.unflatten([object()] * len(leaves)))  # JAX unflattens with placeholders
    if _can_be_stacked(w):
        stacked = _stacked(make)
        try:
            found = materialize_array(stacked)
        except Exception as error:
            raise value_error(
                f"core_ndim={w.core_ndim} promises that materialize() accepts batch axes, which come "
                "first in each field (for a number x: self.x[..., None, None]), and for two arrays, "
                f"stacked, it raises {error}"
            ) from error
        _compare(found, jnp.stack([dense(make(0)), dense(make(1))]), rtol, atol)


def _check_fields(w: ImplicitArray) -> None:
    """Checks that fields hold arrays, and metadata values that are hashable."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(w):
        if not hasattr(leaf, "shape"):
            raise type_error(
                f"the field {jax.tree_util.keystr(keys, simple=True)} holds {leaf!r}, which is no "
                "array. Give it jnp.asarray(...), or declare it as metadata, with hki.aux_field()"
            )
    for name, value in static_items(w).items():
        if isinstance(value, jax.Array | np.ndarray):
            raise type_error(
                f"the field {name} is declared with aux_field(), for hashable metadata, and holds an "
                "array. A field of arrays needs no declaration, or frozen_field() if it is not trained"
            )


def _can_be_stacked(w: ImplicitArray) -> bool:
    return w.core_ndim is not None and not num_batch_axes(w)


def _stacked(make: Callable[[int], Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), make(0), make(1))


def _allowed(fun: Operation, dense: jax.Array) -> bool:
    """Whether a function takes an array of this shape and dtype."""
    try:
        jax.eval_shape(fun, dense)
    except (TypeError, ValueError, IndexError):
        return False
    return True


def _ways(make: Callable[[int], Any], fun: Operation) -> Iterator[tuple[str, Callable[..., None]]]:
    """Yields the ways to run a function, each with a check."""
    implicit = use_implicit_args(fun)

    def check(run: Operation, want: Operation, w: Array) -> Callable[..., None]:
        def compare(dense: Callable[[Array], jax.Array], rtol: float, atol: float) -> None:
            _compare(run(w), want(dense(w)), rtol, atol)

        return compare

    yield "eager", check(implicit, fun, make(0))
    yield "jit", check(jax.jit(implicit), fun, make(0))

    def check_gradients(dense: Callable[[Array], jax.Array], rtol: float, atol: float) -> None:
        got, want = (_gradients(f, make(0)) for f in (implicit, lambda w: fun(dense(w))))
        for a, b in zip(got, want, strict=True):
            _compare(a, b, max(rtol, coarse), max(atol, coarse))

    result = jax.eval_shape(lambda: fun(materialize_array(make(0))))
    coarse = 2e-2 if result.dtype.itemsize < 4 else 0.0  # derivatives pass through the cast
    if jnp.issubdtype(result.dtype, jnp.floating):
        yield "differentiated", check_gradients
    if not _can_be_stacked(make(0)):
        return
    stacked = _stacked(make)
    yield "vmap", check(jax.jit(jax.vmap(implicit)), jax.vmap(fun), stacked)
    scanned = use_implicit_args(lambda ws: jax.lax.scan(lambda _, w: (None, fun(w)), None, ws)[1])
    yield "scan", check(jax.jit(scanned), jax.vmap(fun), stacked)


def _gradients(fun: Operation, w: Array) -> list[jax.Array]:
    """Differentiates a weighted sum of the results with respect to each floating leaf."""
    leaves, treedef = flatten(w)
    dtypes = [x.dtype for x in leaves]
    floating = [
        i for i, d in enumerate(dtypes) if jnp.issubdtype(d, jnp.floating) and d.itemsize > 1
    ]

    def total(values: list[jax.Array]) -> jax.Array:
        mixed = list(leaves)
        for i, value in zip(floating, values, strict=True):
            mixed[i] = value
        out = fun(treedef.unflatten(mixed))
        out = materialize_array(out) if is_implicit(out) else out
        return (out * _like(out)).sum().astype(jnp.float32)

    return jax.jit(jax.grad(total))([leaves[i] for i in floating])


def _compare(got: Any, want: jax.Array, rtol: float, atol: float) -> None:
    got = materialize_array(got) if is_implicit(got) else jnp.asarray(got)
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (
        f"got {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
    )
    coarse = 2e-2 if jnp.issubdtype(want.dtype, jnp.floating) and want.dtype.itemsize < 4 else 0
    a, b = (np.asarray(x, np.float64) for x in (got, want))
    np.testing.assert_allclose(a, b, rtol=max(rtol, coarse), atol=max(atol, coarse))
