"""The order in which rules are found (`primitive_handler`), step by step.

Each test makes types of its own, since a rule, once registered, stays. Rules are traced once and not
called again, so that they tell who they are by the number that they return.
"""

import dataclasses
import importlib.util
import sys
import textwrap
from typing import Union

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.extend.core import primitives as jex

import haiku_implicit as hki

X = jnp.array([3.0, 1.0])


def new_type(base=hki.ImplicitArray, **keywords):
    """A new implicit type, which holds its dense array plainly."""

    @dataclasses.dataclass
    class Held(base, **keywords):
        x: hki.ArrayValue

        def compute_shape(self):
            return self.x.shape

        def compute_dtype(self):
            return self.x.dtype

        def materialize(self):
            return self.x

    return Held


def number(n):
    """What rule number `n` returns."""
    return jnp.full(X.shape, n, X.dtype)


def who(fun, *args):
    """The number of the rule that answered."""
    out = hki.use_implicit_args(fun)(*args)
    assert out.shape == X.shape and (out == out[0]).all()
    return int(out[0])


@pytest.fixture(autouse=True)
def no_materialization(request):
    with hki.materialization("allow" if "may_be_dense" in request.fixturenames else "error"):
        yield


# --- what a rule is registered for -------------------------------------------------------------------


@pytest.mark.parametrize(
    "primitives",
    ["neg", "neg_p", lax.neg_p, ["neg"], (lax.sin_p, "neg"), {"neg"}, iter(["neg", "sin"])],
    ids=["name", "name_p", "primitive", "list", "tuple", "set", "iterator"],
)
def test_registered_by_name_object_or_several(primitives):
    held = new_type()

    @hki.primitive_handler(primitives)
    def rule(primitive, x: held, **params):
        assert isinstance(primitive, Primitive) and primitive.name in ("neg", "sin")
        return number(1)

    assert who(lax.neg, held(X)) == 1
    assert rule(lax.neg_p, held(X))[0] == 1, "the decorator returns the rule itself"


@pytest.mark.parametrize(
    "name, primitive",
    [
        ("pjit", jex.jit_p),
        ("jit", jex.jit_p),
        ("cumsum", lax.cumsum_p),
        ("custom_jvp_call", jex.custom_jvp_call_p),
        ("remat", None),
        ("checkpoint", None),
        ("shard_map", None),
    ],
)
def test_names_of_primitives_that_are_not_in_lax(name, primitive):
    held, seen = new_type(), []

    @hki.primitive_handler(name)
    def rule(primitive, x: held, **params):
        seen.append(primitive)
        return [number(1)] if primitive.multiple_results else number(1)

    mesh = jax.sharding.Mesh(jax.devices()[:1], "i")
    spec = jax.sharding.PartitionSpec()
    doubled = jax.custom_jvp(lambda x: x * 2)
    doubled.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * 2))
    calls = {
        "pjit": jax.jit(lambda x: x * 2),
        "jit": jax.jit(lambda x: x * 2),
        "cumsum": lax.cumsum,
        "remat": jax.checkpoint(lambda x: x * 2),
        "checkpoint": jax.checkpoint(lambda x: x * 2),
        "shard_map": jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec),
        "custom_jvp_call": doubled,
    }
    assert who(calls[name], held(X)) == 1
    assert primitive is None or seen[0] is primitive


@pytest.mark.parametrize("name", ["matmul", "no such thing", "", "add_p_p"])
def test_a_name_that_is_no_primitive(name):
    with pytest.raises(ValueError, match=f"primitives: no primitive is called '{name}'.*pass the"):
        hki.primitive_handler(["neg", name])


def test_a_primitive_of_the_users_own():
    held, own = new_type(), Primitive("own")
    own.def_abstract_eval(lambda x: x)
    own.def_impl(lambda x: x * 5)

    @hki.primitive_handler(own)
    def rule(primitive, x: held):
        return number(1)

    assert who(own.bind, held(X)) == 1
    np.testing.assert_array_equal(hki.use_implicit_args(own.bind)(X), X * 5)


# --- step 1: annotations, the most specific first ----------------------------------------------------


def test_a_subclass_is_served_by_its_parents_rule_unless_it_has_its_own():
    parent = new_type()
    child, other = new_type(parent), new_type(parent)

    @hki.primitive_handler("neg")
    def of_child(primitive, x: child, **params):
        return number(2)

    @hki.primitive_handler("neg", precedence=99)  # which does not count against a more specific one
    def of_parent(primitive, x: parent, **params):
        return number(1)

    assert [who(lax.neg, kind(X)) for kind in (parent, child, other)] == [1, 2, 1]


def test_the_more_specific_annotation_comes_first_however_registered():
    a = new_type()
    b = new_type()
    c = new_type()

    @hki.primitive_handler("atan2")
    def unannotated(primitive, x: a, y, **params):
        return number(1)

    @hki.primitive_handler("atan2")
    def any_value(primitive, x: a, y: b, **params):
        return number(2)

    @hki.primitive_handler("atan2")
    def dense(primitive, x: a, y: jax.Array, **params):
        return number(3)

    @hki.primitive_handler("atan2")
    def union(primitive, x: a, y: Union[b, c], **params):  # noqa: UP007
        return number(4)

    assert [who(lax.atan2, a(X), y) for y in (X, b(X), c(X), a(X))] == [3, 2, 4, 1]


@pytest.mark.parametrize("union", ["typing", "bar"])
def test_unions_match_each_of_their_members(may_be_dense, union):
    a, b, c = new_type(), new_type(), new_type()
    either = Union[a, b] if union == "typing" else a | b  # noqa: UP007

    @hki.primitive_handler("neg")
    def rule(primitive, x: either, **params):
        return number(1)

    assert who(lax.neg, a(X)) == who(lax.neg, b(X)) == 1
    np.testing.assert_array_equal(hki.use_implicit_args(lax.neg)(c(X)), -X)


def test_jax_array_means_dense_and_array_value_means_either(may_be_dense):
    a, b = new_type(), new_type()

    @hki.primitive_handler("atan2")
    def dense(primitive, x: a, y: jax.Array, **params):
        return number(1)

    @hki.primitive_handler("rem")
    def either(primitive, x: a, y: hki.ArrayValue, **params):
        return number(2)

    @hki.primitive_handler("pow")
    def implicit(primitive, x: a, y: hki.ImplicitArray, **params):
        return number(3)

    call = lambda fun, y: hki.use_implicit_args(fun)(a(X), y)  # noqa: E731
    for y in (X, np.asarray(X)):
        np.testing.assert_array_equal(call(lax.atan2, y), number(1))
        np.testing.assert_array_equal(call(lax.rem, y), number(2))
        np.testing.assert_allclose(call(lax.pow, y), X**X, rtol=1e-6)
    np.testing.assert_allclose(call(lax.atan2, b(X)), jnp.arctan2(X, X), rtol=1e-6)
    np.testing.assert_array_equal(call(lax.rem, b(X)), number(2))
    np.testing.assert_array_equal(call(lax.pow, b(X)), number(3))


def test_a_literal_is_a_dense_array_that_the_rule_may_read():
    held = new_type()

    @hki.primitive_handler("mul")
    def rule(primitive, x: held, y: jax.Array, **params):
        assert isinstance(y, jax.Array) and y.dtype == jnp.float32
        return number(1 if float(y) == 2.0 else 2)

    fun = hki.use_implicit_args(lambda x, n: lax.mul_p.bind(x, jnp.float32(n)))
    for wrap in (lambda f: f, lambda f: jax.jit(f, static_argnums=1)):
        assert wrap(fun)(held(X), 2.0)[0] == 1
        assert wrap(fun)(held(X), 3.0)[0] == 2


def test_string_annotations(tmp_path, monkeypatch):
    path = tmp_path / "rules_with_string_annotations.py"
    path.write_text(
        textwrap.dedent(
            '''
            from __future__ import annotations

            import dataclasses
            import jax
            import jax.numpy as jnp
            import haiku_implicit as hki

            @dataclasses.dataclass
            class Held(hki.ImplicitArray):
                x: hki.ArrayValue
                label: str = hki.aux_field(default="")

                def materialize(self) -> jax.Array:
                    return self.x

            @hki.primitive_handler("sub")
            def dense_second(primitive, x: Held, y: jax.Array, **params) -> jax.Array:
                return jnp.full((2,), 1.0)

            @hki.primitive_handler("sub")
            def dense_first(primitive, x: jax.Array, y: Held, **params) -> jax.Array:
                return jnp.full((2,), 2.0)

            @hki.primitive_handler("sub")
            def both(primitive, x: Held, y: "Held", **params) -> hki.ArrayValue:
                return Held(x.x - y.x)
            '''
        )
    )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    held = module.Held(X)
    assert who(lax.sub, held, X) == 1
    assert who(lax.sub, X, held) == 2
    out = hki.use_implicit_args(lax.sub)(held, held)
    assert type(out) is module.Held
    np.testing.assert_array_equal(out.x, jnp.zeros(2))


def test_varargs(may_be_dense):
    a, b = new_type(), new_type()

    @hki.primitive_handler("concatenate")
    def all_of_a(primitive, *operands: a, dimension):
        assert dimension == 0 and all(type(x) is a for x in operands)
        return a(primitive.bind(*(x.x for x in operands), dimension=dimension) + len(operands))

    @hki.primitive_handler("concatenate")
    def first_dense(primitive, x: jax.Array, *others: a, dimension):
        return primitive.bind(x, *(y.x for y in others), dimension=dimension) * 0

    concat = hki.use_implicit_args(lambda *xs: lax.concatenate(xs, 0))
    assert type(concat(a(X), a(X), a(X))) is a
    np.testing.assert_array_equal(concat(a(X), a(X), a(X)).x, jnp.tile(X, 3) + 3)
    np.testing.assert_array_equal(concat(X, a(X), a(X)), jnp.zeros(6))
    np.testing.assert_array_equal(concat(a(X), X), jnp.tile(X, 2))
    np.testing.assert_array_equal(concat(a(X), b(X)), jnp.tile(X, 2))


@pytest.mark.parametrize("higher", [0, 1])
def test_precedence_decides_between_rules_that_cannot_be_compared(higher):
    a = new_type()

    @hki.primitive_handler("atan2", precedence=5 * (higher == 0))
    def first(primitive, x: a, y, **params):
        return number(0)

    @hki.primitive_handler("atan2", precedence=5 * (higher == 1))
    def second(primitive, x, y: a, **params):
        return number(1)

    assert who(lax.atan2, a(X), a(X)) == higher
    assert who(lax.atan2, a(X), X) == 0
    assert who(lax.atan2, X, a(X)) == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_the_rule_registered_first_wins_a_tie(swapped):
    a = new_type()

    def first(primitive, x: a, y, **params):
        return number(0)

    def second(primitive, x, y: a, **params):
        return number(1)

    for rule in (second, first) if swapped else (first, second):
        hki.primitive_handler("atan2")(rule)
    assert who(lax.atan2, a(X), a(X)) == swapped


def test_the_last_of_all_rules_is_that_of_every_implicit_type():
    a = new_type()
    barrier = hki.use_implicit_args(lambda x: lax.stop_gradient(x))
    assert type(barrier(a(X))) is a

    @hki.primitive_handler("copy")
    def own(primitive, x: a, **params):
        return number(7)

    assert who(lax.copy_p.bind, a(X)) == 7


# --- redefinition ------------------------------------------------------------------------------------


def test_a_rule_of_the_same_annotations_replaces_the_one_before():
    a = new_type()
    inner = jax.jit(lambda x: lax.neg(x))
    fun = hki.use_implicit_args(lambda x: inner(x))
    nested = new_type()

    @hki.primitive_handler("sin")
    def through(primitive, x: nested, **params):
        return lax.neg(x.x)

    def define(n):
        @hki.primitive_handler("neg")
        def rule(primitive, x: a, **params):
            return number(n)

    for n in (1, 2, 3):
        define(n)
        # Neither in the wrapped function, nor in one that JAX has traced, nor in another rule is the
        # old one left.
        assert who(lax.neg, a(X)) == n
        assert fun(a(X))[0] == n
        assert who(lax.sin, nested(a(X))) == n


def test_a_rule_added_for_a_subclass_is_found_after_the_first_use():
    parent = new_type()
    child = new_type(parent)

    @hki.primitive_handler("neg")
    def of_parent(primitive, x: parent, **params):
        return number(1)

    assert who(lax.neg, child(X)) == 1

    @hki.primitive_handler("neg")
    def of_child(primitive, x: child, **params):
        return number(2)

    assert who(lax.neg, child(X)) == 2


# --- step 2: NotImplemented ----------------------------------------------------------------------------


def test_not_implemented_passes_on_to_the_next_rule(may_be_dense):
    parent = new_type()
    child = new_type(parent)

    @hki.primitive_handler("cumsum")
    def of_child(primitive, x: child, *, axis, reverse):
        return number(1) if reverse else NotImplemented

    @hki.primitive_handler("cumsum")
    def of_parent(primitive, x: parent, *, axis, reverse):
        return number(2) if x.x.dtype == jnp.float32 else NotImplemented

    assert who(lambda x: lax.cumsum(x, reverse=True), child(X)) == 1
    assert who(lax.cumsum, child(X)) == 2
    with hki.materialization_report() as report:
        out = hki.use_implicit_args(lax.cumsum)(child(X.astype(jnp.int32)))
    np.testing.assert_array_equal(out, [3, 4])
    assert report.count == 1


def test_not_implemented_of_a_rule_for_a_nested_operand(may_be_dense):
    a = new_type()

    @hki.primitive_handler("neg")
    def rule(primitive, x: a, **params):
        return NotImplemented

    np.testing.assert_array_equal(hki.use_implicit_args(lax.neg)(a(a(X))), -X)


def test_an_error_in_a_rule_is_not_hidden():
    a = new_type()

    @hki.primitive_handler("neg")
    def rule(primitive, x: a, **params):
        raise KeyError("of the rule")

    with pytest.raises(KeyError, match="of the rule"):
        hki.use_implicit_args(lax.neg)(a(X))


# --- step 3: commuting ---------------------------------------------------------------------------------

COMMUTATIVE = [lax.add, lax.mul, lax.max, lax.min, lax.eq, lax.ne]


@pytest.mark.parametrize("fun", COMMUTATIVE, ids=lambda f: f.__name__)
def test_a_commutative_primitive_puts_the_implicit_operand_first(fun):
    a = new_type()

    @hki.primitive_handler([f"{f.__name__}" for f in COMMUTATIVE])
    def rule(primitive, x: a, y: jax.Array, **params):
        assert type(x) is a
        return number(1)

    assert who(fun, a(X), X) == who(fun, X, a(X)) == 1


@pytest.mark.parametrize("fun", [lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor])
def test_bitwise_primitives_commute_too(fun):
    a, bits = new_type(), jnp.array([3, 1])

    @hki.primitive_handler(["and", "or", "xor"])
    def rule(primitive, x: a, y: jax.Array, **params):
        return jnp.full(x.shape, 1)

    assert who(fun, a(bits), bits) == who(fun, bits, a(bits)) == 1


@pytest.mark.parametrize("fun", [lax.sub, lax.div, lax.atan2, lax.lt])
def test_other_primitives_keep_their_order(may_be_dense, fun):
    a = new_type()

    @hki.primitive_handler(["sub", "div", "atan2", "lt"])
    def rule(primitive, x: a, y: jax.Array, **params):
        return number(9)

    assert who(fun, a(X), X) == 9
    got = hki.use_implicit_args(fun)(X[::-1], a(X))
    np.testing.assert_allclose(got, fun(X[::-1], X), rtol=1e-6)


def test_the_order_as_it_stands_is_tried_as_well():
    a = new_type()

    @hki.primitive_handler("mul")
    def dense_first(primitive, x: jax.Array, y: a, **params):
        return number(1)

    # Either order is right for `a * X`: this is the only rule.
    assert who(lax.mul, X, a(X)) == who(lax.mul, a(X), X) == 1

    @hki.primitive_handler("mul")
    def implicit_first(primitive, x: a, y: jax.Array, **params):
        return number(2) if params.get("sharding") is None and x.x.ndim == 1 else NotImplemented

    assert who(lax.mul, X, a(X)) == who(lax.mul, a(X), X) == 2


def test_not_implemented_in_one_order_falls_to_the_other():
    a = new_type()

    @hki.primitive_handler("mul")
    def implicit_first(primitive, x: a, y: jax.Array, **params):
        return NotImplemented

    @hki.primitive_handler("mul")
    def dense_first(primitive, x: jax.Array, y: a, **params):
        return number(1)

    assert who(lax.mul, X, a(X)) == who(lax.mul, a(X), X) == 1


def test_two_implicit_operands_come_as_they_stand_and_then_swapped():
    a, b, c = new_type(), new_type(), new_type()

    @hki.primitive_handler("add")
    def b_and_a(primitive, x: b, y: a, **params):
        return number(1)

    @hki.primitive_handler("add")
    def a_and_c(primitive, x: a, y: c, **params):
        return number(2)

    @hki.primitive_handler("add")
    def c_and_a(primitive, x: c, y: a, **params):
        return number(3)

    assert who(lax.add, a(X), b(X)) == who(lax.add, b(X), a(X)) == 1
    assert who(lax.add, a(X), c(X)) == 2
    assert who(lax.add, c(X), a(X)) == 3


@pytest.mark.parametrize("how", ["keyword", "attribute", "inherited"])
def test_commute_ops_false(may_be_dense, how):
    if how == "attribute":
        a = new_type()
        a.commute_ops = False
    else:
        a = new_type(commute_ops=False)
        a = new_type(a) if how == "inherited" else a
    b = new_type()

    @hki.primitive_handler("mul")
    def implicit_first(primitive, x: a, y: hki.ArrayValue, **params):
        return number(9)

    assert who(lax.mul, a(X), X) == 9
    np.testing.assert_array_equal(hki.use_implicit_args(lax.mul)(X, a(X)), X * X)
    # One operand of such a class is enough.
    assert who(lax.mul, a(X), b(X)) == 9
    np.testing.assert_array_equal(hki.use_implicit_args(lax.mul)(b(X), a(X)), X * X)


def test_the_results_of_swapped_operands_keep_the_rules_numbers():
    a = new_type()

    @hki.primitive_handler("add_jaxvals")  # what sums cotangents
    def rule(primitive, x: a, y: jax.Array, **params):
        return number(1)

    assert who(jex.add_jaxvals_p.bind, X, a(X)) == 1


# --- step 4: primitives that carry a jaxpr -------------------------------------------------------------


def test_a_rule_for_a_primitive_with_a_jaxpr_goes_before_retracing():
    a = new_type()

    @hki.primitive_handler("neg")
    def inside(primitive, x: a, **params):
        return number(1)

    @hki.primitive_handler("jit")
    def whole(primitive, x: a, *, name, **params):
        return [number(2)] if name == "special" else NotImplemented

    def special(x):
        return lax.neg(x)

    def plain(x):
        return lax.neg(x)

    assert who(jax.jit(special), a(X)) == 2
    assert who(jax.jit(plain), a(X)) == 1


def test_retraced_primitives_dispatch_inside():
    a = new_type()

    @hki.primitive_handler("neg")
    def inside(primitive, x: a, **params):
        return number(1)

    neg = lambda x: lax.neg(x)  # noqa: E731
    carriers = [
        jax.jit(neg),
        jax.checkpoint(neg),
        lambda x: lax.scan(lambda c, _: (c + neg(x), None), jnp.zeros(2), length=1)[0],
        lambda x: lax.cond(True, neg, lambda x: lax.neg(x) * 1, x),
        lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: c + neg(x), jnp.zeros(2)),
        lambda x: lax.fori_loop(0, 1, lambda _, c: c + neg(x), jnp.zeros(2)),
    ]
    assert [who(fun, a(X)) for fun in carriers] == [1] * len(carriers)


# --- step 5: materialization -----------------------------------------------------------------------------


def test_without_a_rule_the_operands_are_materialized_and_the_primitive_runs(may_be_dense):
    a, b = new_type(), new_type()
    with hki.materialization_report() as report:
        out = hki.use_implicit_args(lax.atan2)(a(X), b(X))
    np.testing.assert_allclose(out, lax.atan2(X, X), rtol=1e-6)
    assert report.count == 2
    with hki.materialization("error"), pytest.raises(hki.MaterializationError):
        hki.use_implicit_args(lax.atan2)(a(X), b(X))


# --- what a rule sees ------------------------------------------------------------------------------------


def test_fields_read_as_dense_arrays_in_a_rule_even_if_they_are_implicit():
    outer, inner = new_type(), new_type()

    @hki.primitive_handler("neg")
    def of_outer(primitive, x: outer, **params):
        assert isinstance(x.x, jax.Array) and x.x.shape == X.shape and x.x.dtype == X.dtype
        assert x.shape == X.shape
        return outer(jnp.sin(x.x))

    @hki.primitive_handler("sin")
    def of_inner(primitive, x: inner, **params):
        assert isinstance(x.x, jax.Array)
        return inner(x.x + 1)

    fun = hki.use_implicit_args(lax.neg)
    for wrap in (lambda f: f, jax.jit):
        out = wrap(fun)(outer(inner(X)))
        assert type(out) is outer and type(out.x) is inner
        np.testing.assert_array_equal(out.x.x, X + 1)
        out = wrap(fun)(outer(outer(inner(X))).x)
        assert type(out.x) is inner
        np.testing.assert_allclose(wrap(fun)(outer(X)).x, jnp.sin(X), rtol=1e-6)
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), outer(inner(X)))
    np.testing.assert_array_equal(jax.vmap(fun)(stacked).x.x, jnp.stack([X, 2 * X]) + 1)


def test_a_rule_may_return_an_inner_array_as_it_is():
    outer, inner = new_type(), new_type()

    @hki.primitive_handler("neg")
    def unwrap(primitive, x: outer, **params):
        return x.x

    out = hki.use_implicit_args(lax.neg)(outer(inner(X)))
    assert type(out) is inner
    np.testing.assert_array_equal(out.x, X)


def test_operands_and_parameters_arrive_as_the_primitive_has_them():
    a, seen = new_type(), []

    @hki.primitive_handler("dot_general")
    def rule(primitive, x: jax.Array, y: a, **params):
        seen.append((primitive, x.shape, type(y), params))
        return primitive.bind(x, y.x, **params)

    w = jnp.arange(6.0).reshape(2, 3)
    out = hki.use_implicit_args(lambda x, w: jnp.dot(x, w, precision="highest"))(X, a(w))
    np.testing.assert_allclose(out, X @ w, rtol=1e-6)
    ((primitive, shape, kind, params),) = seen
    assert primitive is lax.dot_general_p and shape == (2,) and kind is a
    assert params["dimension_numbers"] == (((0,), (0,)), ((), ()))
    assert params["precision"] == (lax.Precision.HIGHEST,) * 2


def test_a_rule_is_traced_once_for_operands_of_one_structure():
    a, seen = new_type(), []

    @hki.primitive_handler("neg")
    def rule(primitive, x: a, **params):
        seen.append(x.x)
        return a(-x.x)

    fun = hki.use_implicit_args(lambda x: lax.neg(lax.neg(x)))
    fun(a(X)), fun(a(X)), jax.jit(fun)(a(X))
    assert len(seen) == 1
    fun(a(X[:1]))
    assert len(seen) == 2


def test_multiple_results(may_be_dense):
    a, b = new_type(), new_type()

    @hki.primitive_handler("split")
    def rule(primitive, x: a, **params):
        first, second = hki.default_handler(primitive, x.x, **params)
        return a(first), second  # a tuple will do for the list

    cut = hki.use_implicit_args(lambda x: jnp.split(x, 2))
    first, second = cut(a(X))
    assert type(first) is a and isinstance(second, jax.Array)
    np.testing.assert_array_equal(first.x, X[:1])
    np.testing.assert_array_equal(second, X[1:])
    for got, want in zip(cut(b(X)), jnp.split(X, 2), strict=True):
        np.testing.assert_array_equal(got, want)


# --- default_handler -------------------------------------------------------------------------------------


def test_default_handler_on_dense_operands():
    assert hki.default_handler(lax.neg_p, jnp.float32(2)) == -2
    x = jnp.arange(4.0)
    out = hki.default_handler(lax.sort_p, x[::-1], x, dimension=0, is_stable=True, num_keys=1)
    assert isinstance(out, list)
    np.testing.assert_array_equal(out, [x, x[::-1]])


def test_default_handler_on_implicit_operands(may_be_dense):
    a, b = new_type(), new_type()

    @hki.primitive_handler("neg")
    def rule(primitive, x: b, **params):
        return b(-x.x)

    @hki.primitive_handler("sin")
    def by_default(primitive, x: a, **params):
        return hki.default_handler(lax.neg_p, b(x.x))

    out = hki.use_implicit_args(lax.sin)(a(X))
    assert type(out) is b
    np.testing.assert_array_equal(out.x, -X)
    with hki.materialization_report() as report:
        np.testing.assert_array_equal(hki.default_handler(lax.neg_p, a(X)), -X)
    assert report.count == 1


def test_default_handler_within_a_rule_for_the_same_type_goes_through_the_rules():
    a = new_type()

    @hki.primitive_handler(["neg", "abs"])
    def rule(primitive, x: a, **params):
        if primitive is lax.neg_p:
            return hki.default_handler(lax.abs_p, x)
        return number(4)

    assert who(lax.neg, a(X)) == 4
