"""Every implicit type through every primitive, against its dense twin.

All operations of one table on one case in one way (eagerly, under `jit`, ...) are one test, which
collects its failures: the dense results they are compared with then come from one compiled program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import haiku_implicit as hki
from haiku_implicit.core import dispatch, interpreter
from tests import primitive_ops
from tests.cases import CASES, SHAPE, matrix
from tests.primitive_ops import MODULES, TABLES, UNEXPORTED, primitive_named
from tests.settings import SETTINGS, setting
from tests.tiers import few

pytestmark = [pytest.mark.of_each, pytest.mark.usefixtures("may_be_dense")]


def operations(table, without=(), alone=True):
    """`{label: function}` for the functions of a table whose primitive this version of JAX has.

    Args:
      table: primitive names and their functions.
      without: primitives to leave out.
      alone: whether each is compiled alone, and once for all types. A program of all operations
        leaves out what is slow to compile, and `w` as both operands.
    """
    return {
        f"{name}[{i}]": fun
        for name, functions in table.items()
        if name not in without and (primitive_named(name) is not None or name in UNEXPORTED)
        if jax.default_backend() == "cpu" or name not in primitive_ops.ON_CPUS
        for i, fun in enumerate(functions)
        if alone
        or not (name in primitive_ops.SLOW_TO_COMPILE or isinstance(fun, primitive_ops.Both))
    }


# Cases that meet all primitives. To the others a primitive without a rule is what it is to these: the
# array is made dense (see `test_materialize_is_the_dense_twin`), and so they meet the rest alone.
WHOLE = {"lora", "int8", "zeros", "constant", "outer"}


def operations_of(name, table=None, **options):
    """The operations for a case, of the table for its dtype if none is given."""
    case = CASES[name]
    ops = operations(TABLES[case.dtype] if table is None else table, **options)
    if name in WHOLE or case.dtype != jnp.float32:
        return ops
    served = has_rules(type(case(1)))
    return {label: fun for label, fun in ops.items() if named(label) in served}


@functools.cache
def has_rules(kind):
    """The names of the primitives that a type has a rule for, or that have functions inside."""

    def mentions(method):
        types = (*method.types, method.varargs)
        return any(isinstance(t, type) and t is not object and issubclass(kind, t) for t in types)

    rules = {p.name for p, methods in dispatch.rules().items() if any(map(mentions, methods))}
    return rules | {primitive.name for primitive in interpreter.HIGHER_ORDER}


def named(label):
    """The name that a primitive of the table has for itself."""
    name = label.split("[")[0]
    return getattr(primitive_named(name), "name", name)


# --- the table itself ------------------------------------------------------------------------------


def primitives_in(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive
        for sub in jax.tree.leaves(list(eqn.params.values())):
            sub = getattr(sub, "jaxpr", sub)
            if isinstance(sub, jax.extend.core.Jaxpr):
                yield from primitives_in(sub)


@pytest.mark.parametrize(
    "table, shape, dtype",
    [
        *((table, SHAPE, dtype) for dtype, table in TABLES.items()),
        (primitive_ops.BATCHED, (2, 1, 4, 4), jnp.float32),
    ],
    ids=["float32", "int32", "uint32", "complex64", "batched"],
)
def test_each_function_binds_the_primitive_that_it_stands_for(table, shape, dtype):
    struct = jax.ShapeDtypeStruct(shape, dtype)
    wrong = []
    for label, fun in operations(table).items():
        name = label.split("[")[0]
        bound = set(primitives_in(jax.make_jaxpr(fun)(struct, struct).jaxpr))
        if primitive_named(name) not in bound and name not in {p.name for p in bound}:
            wrong.append(label)
    assert not wrong


def test_every_primitive_of_jax_is_in_the_table_or_an_exception():
    covered = {name for table in TABLES.values() for name in table}
    covered |= {name for names in primitive_ops.EXCEPTIONS.values() for name in names.split()}
    known = {primitive_named(name) for name in covered}
    missing = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, Primitive) and value not in known
    }
    assert not missing


# --- comparing -------------------------------------------------------------------------------------


def equal(got, want, label, failures):
    """Notes where two trees of results differ in structure, shape, dtype or value."""
    got, want = hki.materialize(got), want
    if jax.tree.structure(got) != jax.tree.structure(want):
        failures.append(f"{label}: {jax.tree.structure(got)}, expected {jax.tree.structure(want)}")
        return
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype != b.dtype or a.shape != b.shape:
            failures.append(f"{label}: {a.dtype}{a.shape}, expected {b.dtype}{b.shape}")
        elif not close(a, b):
            failures.append(f"{label}: {a!r}, expected {b!r}")


def close(a, b):
    # float32 has 1.2e-7; chains such as a reverse-mode eigendecomposition lose two digits of it.
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return np.array_equal(a, b)
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    rtol = 1e-2 if a.dtype == jnp.bfloat16 else 2e-5
    return np.allclose(a.astype(wide), b.astype(wide), rtol=rtol, atol=rtol, equal_nan=True)


class Failures(list):
    """Collects the errors of single operations; a test ends with `check`."""

    def run(self, label, fun, *args):
        """The result of a call, or None where it raised."""
        try:
            return fun(*args)
        except Exception as e:
            self.append(f"{label}: {type(e).__name__}: {str(e)[:300]}")
            return None

    def compare(self, label, got, want):
        if got is not None:
            equal(got, want, label, self)

    def compare_all(self, got, want):
        for label in got:
            self.compare(label, got[label], want[label])
        self.check()

    def check(self):
        assert not self, "\n".join([f"{len(self)} operations failed", *self])


@functools.cache
def dense_results(dtype, shape):
    """A compiled program: the results of all operations on dense arrays."""
    ops = operations(table_of(dtype, shape))
    struct = jax.ShapeDtypeStruct(shape, dtype)
    program = jax.jit(lambda w, x: {label: fun(w, x) for label, fun in ops.items()})
    return program.lower(struct, struct).compile(QUICK)  # which `jax.clear_caches` leaves alone


@functools.cache
def dense_gradients(dtype, shape):
    """A compiled program: the gradients of all operations by both operands."""
    ops = operations(table_of(dtype, shape), primitive_ops.NOT_DIFFERENTIABLE, alone=False)
    struct = jax.ShapeDtypeStruct(shape, dtype)
    program = jax.jit(lambda w, x: {label: gradients(fun, w, x) for label, fun in ops.items()})
    return program.lower(struct, struct).compile(QUICK)


def table_of(dtype, shape):
    return TABLES[dtype] if shape == SHAPE else primitive_ops.BATCHED


def gradients(fun, w, x):
    """The cotangents of both operands, for cotangents of the results that depend on nothing."""
    out, vjp = jax.vjp(fun, w, x)
    return vjp(jax.tree.map(cotangent, out))


def cotangent(y):
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        return np.zeros(y.shape, jax.dtypes.float0)
    return jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype)


@functools.cache
def other(dtype, shape=SHAPE):
    """The dense operand."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return matrix(jax.random.key(7), shape).astype(dtype)
    return jax.random.randint(jax.random.key(7), shape, 1, 9).astype(dtype)


def dense(case, w):
    """The dense twin; if it is what JAX computes, by one program."""
    if case.dense is hki.materialize:
        return jax.jit(hki.materialize)(w)
    return jax.device_put(np.asarray(case.dense(w)))


@functools.cache
def operands(name, batch=()):
    """An implicit array, its dense twin, and the dense operand: made once for all ways of running."""
    case = CASES[name]
    w = case(1, batch)
    return w, dense(case, w), other(case.dtype, (*batch, *SHAPE))


ALL = pytest.mark.parametrize("name", CASES)
# One of each family goes through the ways that compile all operations; the slow tier has the others.
SOME = ("int8",)
ALL_SLOWLY = pytest.mark.parametrize("name", few(CASES, *SOME))
FLOATING = pytest.mark.parametrize(
    "name",
    few((n for n, case in CASES.items() if jnp.issubdtype(case.dtype, jnp.inexact)), *SOME),
)
BATCHED = [name for name, case in CASES.items() if case.batched and case.dtype == jnp.float32]


def on_implicit(fun):
    return lambda w, x: hki.materialize(hki.use_implicit_args(fun)(w, x))


def compiled(ops, failures, *args):
    """The results of all operations from one compiled program; errors are noted."""

    def program(*args):
        return {label: failures.run(label, fun, *args) for label, fun in ops.items()}

    return jax.jit(program).lower(*args).compile(QUICK)(*args)


# What XLA's optimizations take to compile is half as much again, and they are not under test.
QUICK = {"xla_backend_optimization_level": 0}


def one_by_one(results):
    """Stacks the results of several runs, with NumPy: JAX would compile for each shape."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def on_both(case, each):
    """Two dense operands, and the results of all operations on the dense `each` of two with them."""
    x = other(case.dtype)
    xs = jnp.stack([x, x[::-1]])
    program = dense_results(case.dtype, SHAPE)
    return xs, one_by_one([program(v, x) for v, x in zip(each, xs, strict=True)])


@functools.cache
def two_examples(name):
    """An implicit array of two examples (one for both where it has no batch axes), and dense ones.

    Returns:
      The implicit array, the dense operands, and the results of all operations on both examples.
    """
    batched = CASES[name].batched
    w, twin, _ = operands(name, (2,) if batched else ())
    return w, *on_both(CASES[name], twin if batched else [twin] * 2)


# --- the contract ----------------------------------------------------------------------------------


@ALL
def test_materialize_is_the_dense_twin(name):
    case = CASES[name]
    for batch in [(), (2, 3)] if case.batched else [()]:
        w, want, _ = operands(name, batch)
        assert (w.shape, w.dtype) == ((*batch, *SHAPE), case.dtype)
        got = hki.materialize(w)
        assert (got.shape, got.dtype) == (w.shape, w.dtype)
        np.testing.assert_array_equal(got, want)


# What the others leave to this test are some primitives without a rule, which make any array dense.
EAGER = ("constant", "trellis", "cache int8", "deferred", "diagonal")


@pytest.mark.parametrize("name", few(CASES, *EAGER, "constant int", "outer complex"))
def test_eager(name):
    """All functions, or what `test_scan` leaves out: the others are the same code in one program."""
    case, failures = CASES[name], Failures()
    w, twin, x = operands(name)
    want = dense_results(case.dtype, SHAPE)(twin, x)
    compiled_too = {} if name in WHOLE - {"constant"} else operations_of(name, alone=False)
    for label, fun in operations_of(name).items():
        if label in compiled_too:
            continue
        failures.compare(label, failures.run(label, on_implicit(fun), w, x), want[label])
    failures.check()


# `test_scan` runs an int8 array in one program, `test_eager` a constant.
@pytest.mark.parametrize("name", few(sorted(WHOLE), "lora"))
def test_jit(name):
    case, failures = CASES[name], Failures()
    w, twin, x = operands(name)
    ops = operations_of(name, alone=False)
    got = compiled({label: on_implicit(fun) for label, fun in ops.items()}, failures, w, x)
    failures.compare_all(got, dense_results(case.dtype, SHAPE)(twin, x))


@FLOATING
def test_grad(name):
    case = CASES[name]
    without = primitive_ops.NOT_DIFFERENTIABLE
    without = without | primitive_ops.SINGULAR_DERIVATIVE if case.singular else without
    ops = operations_of(name, without=without, alone=False)
    check_gradients(ops, *operands(name))


def check_gradients(ops, w, twin, x):
    """By the leaves of `w` with the chain rule through the dense twin, and by `x`."""
    failures = Failures()
    grads = {label: functools.partial(gradients, on_implicit(fun)) for label, fun in ops.items()}
    got = compiled(grads, failures, w, x)
    want = dense_gradients(twin.dtype.type, twin.shape)(twin, x)
    back = jax.vmap(lambda w, g: jax.vjp(hki.materialize, w)[1](g), (None, 0))
    chain = jax.jit(back)(w, np.stack([want[label][0] for label in ops]))
    for i, label in enumerate(ops):
        if got[label] is None:
            continue
        by_w, by_x = got[label]
        expected = [g[i] for g in jax.tree.leaves(chain) if g.dtype != jax.dtypes.float0]
        by_w = [g for g in jax.tree.leaves(by_w) if g.dtype != jax.dtypes.float0]
        failures.compare(f"{label} by w", by_w, expected)
        failures.compare(f"{label} by x", by_x, want[label][1])
    failures.check()


@ALL_SLOWLY
def test_vmap_of_the_wrapped_function(name):
    """The leaves are batched, and the interpreter runs on batch tracers."""
    case, failures = CASES[name], Failures()
    ws = case.stacked(1, 2)
    xs, want = on_both(case, [dense(case, case(seed)) for seed in (1, 2)])
    ops = operations_of(name, without=primitive_ops.NOT_BATCHABLE, alone=False)
    ops = {label: jax.vmap(on_implicit(fun)) for label, fun in ops.items()}
    failures.compare_all(compiled(ops, failures, ws, xs), want)


@ALL_SLOWLY
def test_vmap_within_the_wrapped_function(name):
    """JAX batches before dispatch: the rules meet primitives with batch axes."""
    case, failures = CASES[name], Failures()
    w, xs, want = two_examples(name)
    ops = operations_of(name, without=primitive_ops.NOT_BATCHABLE, alone=False)
    axes = (0 if case.batched else None, 0)
    ops = {label: on_implicit(jax.vmap(fun, axes)) for label, fun in ops.items()}
    failures.compare_all(compiled(ops, failures, w, xs), want)


@ALL_SLOWLY
def test_scan(name):
    """All operations in the body of one loop, over `w` where it can be sliced."""
    case, failures = CASES[name], Failures()
    w, xs, want = two_examples(name)
    ops = operations_of(name, alone=False)

    def loop(w, xs):
        def body(carry, slices):
            v, x = slices if case.batched else (w, slices)
            return carry + 1, {label: fun(v, x) for label, fun in ops.items()}

        return lax.scan(body, 0, (w, xs) if case.batched else xs)[1]

    failures.compare_all(jax.jit(on_implicit(loop)).lower(w, xs).compile(QUICK)(w, xs), want)


EAGERLY = {"dynamic_slice", "dynamic_update_slice", "gather", "scan"}


@pytest.mark.parametrize(
    "name, mode",
    few(
        [(name, mode) for name in BATCHED for mode in ("jit", "grad")]
        + [(name, mode) for name in BATCHED if name in WHOLE for mode in ("eager", "vmap")],
        *[("lora of int4", "jit"), ("int8", "grad"), ("int8", "eager"), ("outer", "vmap")],
    ),
)
def test_batch_axes(name, mode):
    """Slicing, stacking and contracting batches of matrices, `[2, 1, 4, 4]`.

    A rule is traced and compiled in the eager mode too (`test_eager` runs all of them), so that it
    is the same code in both: eagerly, only loops and operations with arrays of indices are run.
    """
    case, failures, shape = CASES[name], Failures(), (2, 1, *SHAPE)
    w, twin, x = operands(name, shape[:2])
    ops = operations_of(name, primitive_ops.BATCHED)
    if mode == "eager":
        ops = {label: fun for label, fun in ops.items() if label.split("[")[0] in EAGERLY}
    if mode == "grad":
        without = primitive_ops.NOT_DIFFERENTIABLE  # what `dense_gradients` has
        ops = operations_of(name, primitive_ops.BATCHED, without=without, alone=False)
        return check_gradients(ops, w, twin, x)
    want = dense_results(case.dtype, shape)(twin, x)
    if mode == "vmap":
        ops = operations_of(name, primitive_ops.BATCHED, without=primitive_ops.NOT_BATCHABLE)
        x, want = x[None], {label: jax.tree.map(lambda a: a[None], want[label]) for label in ops}
        ops = {label: jax.vmap(fun, (None, 0)) for label, fun in ops.items()}
    ops = {label: on_implicit(fun) for label, fun in ops.items()}
    if mode == "eager":
        got = {label: failures.run(label, fun, w, x) for label, fun in ops.items()}
    else:
        got = compiled(ops, failures, w, x)
    failures.compare_all(got, want)


# --- JAX's settings --------------------------------------------------------------------------------


ONE_AT_A_TIME = "jax_disable_jit", "jax_debug_nans"


@pytest.mark.slow
@pytest.mark.parametrize("flag", SETTINGS)
@pytest.mark.parametrize("name", CASES)
def test_under_a_setting(name, flag):
    """What dense arrays can do under a setting of JAX, implicit ones can, and come to the same."""
    failures, case = Failures(), CASES[name]
    w, twin, x = operands(name)
    ops = operations_of(name, alone=False)
    with setting(flag):
        if flag in ONE_AT_A_TIME:
            want = one_at_a_time(ops, Failures(), twin, x)
        else:
            want = dense_under(flag, case.dtype, tuple(ops))(twin, x)
        if flag == "jax_debug_nans":
            # Whether JAX tells of a NaN depends on what it has compiled before.
            want = {label: None if has_nan(y) else y for label, y in want.items()}
        ops = {label: on_implicit(fun) for label, fun in ops.items() if want[label] is not None}
        run = one_at_a_time if flag in ONE_AT_A_TIME else compiled
        failures.compare_all(run(ops, failures, w, x), want)
    assert len(ops) > len(want) / 2


@functools.cache
def dense_under(flag, dtype, labels):
    """A compiled program: what dense arrays can do under a setting, and None for what they can't."""
    ops = operations(table_of(dtype, SHAPE))
    ops = {label: ops[label] for label in labels}
    struct = jax.ShapeDtypeStruct(SHAPE, dtype)

    def program(w, x):
        return {label: Failures().run(label, fun, w, x) for label, fun in ops.items()}

    with setting(flag):
        return jax.jit(program).lower(struct, struct).compile(QUICK)


def one_at_a_time(ops, failures, *args):
    return {label: failures.run(label, fun, *args) for label, fun in ops.items()}


def has_nan(tree):
    arrays = map(np.asarray, jax.tree.leaves(tree))
    return any(np.isnan(y).any() for y in arrays if jnp.issubdtype(y.dtype, jnp.inexact))
