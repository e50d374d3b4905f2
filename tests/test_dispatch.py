"""Rules: each step of the order that `primitive_handler` documents, and its errors."""

import dataclasses
import re
from typing import Any, Optional, Union

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import haiku_implicit as hki
from haiku_implicit.core.binary import fits
from tests.rules_with_string_annotations import Row

use = hki.use_implicit_args


def new_type(base=hki.ImplicitArray, **keywords):
    """An implicit type of its own for each test, as rules are never taken back."""

    @dataclasses.dataclass
    class Plain(base, **keywords):
        x: hki.ArrayValue

        def materialize(self):
            return self.x * 1

    return Plain


def tagged(tag):
    """A rule's result that tells which rule it was: all elements are `tag`."""
    return jnp.full((2,), float(tag))


def run(fun, *args):
    return float(hki.materialize(use(fun)(*args))[0])


ONES = jnp.ones(2)


@pytest.mark.parametrize(
    "result, got",
    [(jnp.ones(1), "float32[1]"), (jnp.ones(2, jnp.int32), "int32[2]")],
    ids=["shape", "dtype"],
)
def test_a_rule_keeps_to_shape_and_dtype(result, got):
    A = new_type()

    @hki.primitive_handler("sin")
    def rule(primitive, x: A, **params):
        return result

    expected = (
        f"a rule for sin of Plain float32[2] returned {got}; "
        "expected arrays, dense or implicit: float32[2]"
    )
    for f in (use(jnp.sin), jax.jit(use(jnp.sin))):
        with pytest.raises(TypeError, match=re.escape(expected)):
            f(A(ONES))


# --- how rules are registered ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "primitive",
    [lax.sin_p, "sin", "sin_p", [lax.sin_p], ["sin", "cos"], ("sin",), iter(["cos", lax.sin_p])],
    ids=["object", "name", "name_p", "list", "names", "tuple", "iterator"],
)
def test_a_primitive_is_an_object_a_name_or_several(primitive):
    T = new_type()

    @hki.primitive_handler(primitive)
    def rule(primitive, x: T, **params):
        return tagged(5)

    assert run(lax.sin, T(ONES)) == 5


@pytest.mark.parametrize(
    "name",
    "pjit jit remat checkpoint shard_map cholesky custom_jvp_call dot_general scatter_add scan".split(),
)
def test_names_of_primitives_that_jax_exports_elsewhere(name):
    assert callable(hki.primitive_handler(name))


@pytest.mark.parametrize("name", ["sinus", "jnp.sin", "", "__name__"])
def test_an_unknown_name(name):
    with pytest.raises(
        ValueError, match=f"primitives: no primitive is called '{name}'.*pass the primitive"
    ):
        hki.primitive_handler(name)


def test_something_that_is_no_primitive():
    for wrong in (jnp.sin, 3, [lax.sin]):
        with pytest.raises(TypeError, match="primitives: expected primitives or their names, got"):
            hki.primitive_handler(wrong)


def test_the_decorator_returns_the_rule():
    T = new_type()

    def rule(primitive, x: T, **params):
        return tagged(1)

    assert hki.primitive_handler("sin")(rule) is rule


def test_a_rule_gets_the_primitive_the_operands_and_the_parameters():
    T, seen = new_type(), []

    @hki.primitive_handler("reduce_sum")
    def rule(primitive, x: T, *, axes, **params):
        seen.append((primitive, type(x), axes))
        return hki.default_handler(primitive, x.x * 2, axes=axes, **params)

    assert use(lambda w: w.sum(0))(T(jnp.ones((3, 2)))).tolist() == [6, 6]
    assert seen == [(lax.reduce_sum_p, T, (0,))]


@pytest.mark.parametrize("nested", [False, True])
def test_a_rule_need_not_take_parameters_that_are_none(nested):
    A = new_type()

    @hki.primitive_handler("reduce_min")
    def least(primitive, x: A):
        return tagged(1)

    @hki.primitive_handler("broadcast_in_dim")
    def broadcast(primitive, x: A, *, shape, broadcast_dimensions):
        return tagged(2)

    x = A(hki.Zeros(shape=(1,), dtype=ONES.dtype) if nested else jnp.ones(1))
    assert run(lambda x: lax.broadcast_in_dim(x, (2,), (0,)), x) == 2  # `sharding` is None
    with pytest.raises(TypeError, match="least.* unexpected keyword argument 'axes'"):
        use(lambda x: lax.reduce_min(x, [0]))(x)


def test_an_operand_may_be_called_as_a_parameter_that_is_none():
    A = new_type()

    @hki.primitive_handler("broadcast_in_dim")
    def broadcast(primitive, sharding: A, *, shape, broadcast_dimensions):
        return jnp.broadcast_to(sharding.x + 1, shape)

    assert run(lambda x: lax.broadcast_in_dim(x, (2,), (0,)), A(jnp.ones(1))) == 2


def test_a_later_rule_of_the_same_signature_replaces_the_earlier():
    T = new_type()
    for tag in (1, 2):

        @hki.primitive_handler("sin")
        def rule(primitive, x: T, *, tag=tag, **params):
            return tagged(tag)

    assert run(lax.sin, T(ONES)) == 2


def test_a_new_rule_is_seen_by_functions_that_were_traced_before():
    T = new_type()
    f = use(jax.jit(lambda w: lax.sin(w) + 0))

    @hki.primitive_handler("sin")
    def first(primitive, x: T, **params):
        return tagged(1)

    assert f(T(ONES))[0] == 1

    @hki.primitive_handler("sin")
    def second(primitive, x: T, **params):
        return tagged(2)

    assert f(T(ONES))[0] == 2


# --- step 1: annotations, specificity, precedence -----------------------------------------------------------


def test_step_1_a_subclass_is_more_specific():
    A = new_type()
    B = new_type(A)
    C = new_type(B)

    @hki.primitive_handler("sin")
    def for_a(primitive, x: A, **params):
        return tagged(1)

    @hki.primitive_handler("sin")
    def for_b(primitive, x: B, **params):
        return tagged(2)

    @hki.primitive_handler("sin")
    def for_any(primitive, x: hki.ImplicitArray, **params):
        return NotImplemented if not isinstance(x, A) else tagged(3)

    assert [run(lax.sin, T(ONES)) for T in (A, B, C)] == [1, 2, 2]


def test_step_1_all_operands_count():
    A, B = new_type(), new_type()

    @hki.primitive_handler("sub")
    def a_and_anything(primitive, x: A, y: hki.ArrayValue, **params):
        return tagged(1)

    @hki.primitive_handler("sub")
    def a_and_dense(primitive, x: A, y: jax.Array, **params):
        return tagged(2)

    @hki.primitive_handler("sub")
    def a_and_b(primitive, x: A, y: B, **params):
        return tagged(3)

    @hki.primitive_handler("sub")
    def dense_and_a(primitive, x: jax.Array, y: A, **params):
        return tagged(4)

    a, b = A(ONES), B(ONES)
    assert [run(lax.sub, *args) for args in [(a, a), (a, ONES), (a, b), (ONES, a)]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "annotation",
    [hki.ArrayValue, Any, hki.ImplicitArray | jax.Array, Union[hki.ImplicitArray, jax.Array]],  # noqa: UP007
)
def test_step_1_annotations_for_dense_or_implicit(annotation):
    A = new_type()

    @hki.primitive_handler("sub")
    def rule(primitive, x: A, y: annotation, **params):
        return tagged(1)

    assert run(lax.sub, A(ONES), ONES) == run(lax.sub, A(ONES), A(ONES)) == 1


def test_step_1_no_annotation_means_dense_or_implicit():
    A = new_type()

    @hki.primitive_handler("sub")
    def rule(primitive, x: A, y, **params):
        return tagged(1)

    assert run(lax.sub, A(ONES), ONES) == run(lax.sub, A(ONES), A(ONES)) == 1


def test_step_1_a_union_of_types():
    A, B, C = new_type(), new_type(), new_type()

    @hki.primitive_handler("sin")
    def rule(primitive, x: A | B, **params):
        return tagged(1)

    @hki.primitive_handler("sin")
    def for_b(primitive, x: B, **params):
        return tagged(2)

    assert [run(lax.sin, T(ONES)) for T in (A, B)] == [1, 2]
    with hki.materialization("allow"):
        np.testing.assert_allclose(use(lax.sin)(C(ONES)), jnp.sin(ONES))


@dataclasses.dataclass
class Named(hki.ImplicitArray):
    """A type that an annotation names by a text."""

    x: Any

    def materialize(self):
        return self.x


def test_step_1_a_union_with_a_text():
    D = new_type()

    @hki.primitive_handler(["tan", "sub"])
    def rule(primitive, x: Union["Named", jax.Array], *others: Optional["Named"], **params):
        return tagged(1)

    with hki.materialization("allow"):
        np.testing.assert_allclose(use(lax.tan)(D(ONES)), jnp.tan(ONES))
    assert run(lax.tan, Named(ONES)) == 1


def test_step_1_a_union_with_any_is_for_all_types():
    A, B = new_type(), new_type()

    own = Primitive("own")  # the rule is for all types, in all tests of this process
    own.def_abstract_eval(lambda x: x)

    @hki.primitive_handler(own)
    def rule(primitive, x: A | Any, **params):
        return tagged(1)

    assert run(own.bind, B(ONES)) == 1


def test_step_1_the_later_rule_of_equal_types():
    A = new_type()
    B = type("B", (A,), {})

    @hki.primitive_handler("acos")
    def first(primitive, x: A, **params):
        return tagged(1)

    @hki.primitive_handler("acos")
    def second(primitive, x: A | B, **params):
        return tagged(2)

    assert run(lax.acos, A(ONES)) == run(lax.acos, B(ONES)) == 2


def test_step_1_an_annotation_that_is_no_class_is_left_to_plum():
    A = new_type()

    @hki.primitive_handler(["sin", "cos"])
    def for_lists(primitive, x: list[int], **params):
        return tagged(1)

    @hki.primitive_handler("cos")
    def rule(primitive, x: A, **params):
        return tagged(2)

    assert run(lax.cos, A(ONES)) == 2
    with hki.materialization("allow"):
        np.testing.assert_allclose(use(lax.sin)(A(ONES)), jnp.sin(ONES))


def test_step_1_string_annotations():
    w = Row(jnp.arange(4.0))
    out = use(jnp.cosh)(w)
    assert isinstance(out, Row)
    np.testing.assert_allclose(hki.materialize(out), jnp.cosh(hki.materialize(w)), rtol=1e-6)
    assert isinstance(use(lax.add)(w, hki.Zeros(shape=(3, 4), dtype=jnp.float32)), Row)
    assert use(lax.add)(w, w).row.tolist() == [0, 2, 4, 6]


def test_step_1_a_string_may_name_a_type_of_the_function_around_the_rule():
    Local = new_type()

    @hki.primitive_handler("sin")
    def rule(primitive, x: "Local", **params):
        return tagged(1)

    assert run(lax.sin, Local(ONES)) == 1


def test_step_1_rules_are_read_in_the_order_of_their_definition():
    A, B = new_type(), new_type()

    def define(kind, tag):
        @hki.primitive_handler(["sin", "cos"])
        def rule(primitive, x: kind, **params):
            return tagged(tag)

    define(A, 1)
    define(A, 2)  # for the same types, before the first use
    assert (run(lax.sin, A(ONES)), run(lax.cos, A(ONES))) == (2, 2)
    define(A, 3)  # and after it
    define(B, 4)
    C = new_type(base=A)  # a subclass of a type whose rules were used
    assert [run(lax.sin, T(ONES)) for T in (A, B, C)] == [3, 4, 3]
    assert run(lax.cos, C(ONES)) == 3


def test_step_1_a_default_value_of_another_type_is_an_error_at_once():
    A = new_type()
    with pytest.raises(TypeError, match="not an instance"):

        @hki.primitive_handler("sin")
        def rule(primitive, x: A = 1, **params):
            return tagged(1)

    with hki.materialization("allow"):
        np.testing.assert_allclose(use(lax.sin)(A(ONES)), jnp.sin(ONES))


def test_step_1_variable_operands():
    A = new_type()

    @hki.primitive_handler("concatenate")
    def rule(primitive, *operands: A, **params):
        return jnp.full((2 * len(operands),), float(len(operands)))

    assert run(lambda *xs: lax.concatenate(xs, 0), *[A(ONES)] * 3) == 3
    with hki.materialization("allow"):
        dense = use(lambda *xs: lax.concatenate(xs, 0))(A(ONES), ONES)
    assert dense.tolist() == [1] * 4  # not the rule's, which is not for a dense operand


def test_step_1_dense_operands_of_every_kind():
    A, seen = new_type(), []

    @hki.primitive_handler("add")
    def rule(primitive, x: A, y: jax.Array, **params):
        seen.append(isinstance(y, jax.Array))
        return hki.default_handler(primitive, x.x, y, **params)

    w = A(ONES)
    for f in (
        lambda w: lax.add(w, np.ones(2, np.float32)),
        lambda w: w + 1.0,
        lambda w: w + jnp.ones(2),
    ):
        assert use(f)(w).tolist() == [2, 2]
        assert jax.jit(use(f))(w).tolist() == [2, 2]
    assert all(seen) and seen


def test_step_1_precedence_decides_between_equals():
    A = new_type()

    @hki.primitive_handler("sub", precedence=-1)
    def low(primitive, x: A, y: Any, **params):
        return tagged(1)

    @hki.primitive_handler("sub", precedence=2)
    def high(primitive, x: Any, y: A, **params):
        return tagged(2)

    @hki.primitive_handler("sub", precedence=1)
    def middle(primitive, x: A, y: A, **params):
        return tagged(3)

    assert run(lax.sub, A(ONES), A(ONES)) == 3  # the most specific, whatever the precedence
    assert run(lax.sub, A(ONES), ONES) == 1
    assert run(lax.sub, ONES, A(ONES)) == 2


def test_step_1_of_rules_that_cannot_be_compared_the_first_registered():
    A = new_type()

    @hki.primitive_handler("sub")
    def first(primitive, x: A, y: hki.ArrayValue, **params):
        return tagged(1)

    @hki.primitive_handler("sub")
    def second(primitive, x: hki.ArrayValue, y: A, **params):
        return tagged(2)

    assert run(lax.sub, A(ONES), A(ONES)) == 1


def test_step_1_and_of_those_the_one_of_higher_precedence():
    A = new_type()

    @hki.primitive_handler("sub")
    def first(primitive, x: A, y: hki.ArrayValue, **params):
        return tagged(1)

    @hki.primitive_handler("sub", precedence=1)
    def second(primitive, x: hki.ArrayValue, y: A, **params):
        return tagged(2)

    assert run(lax.sub, A(ONES), A(ONES)) == 2


# --- step 2: NotImplemented ------------------------------------------------------------------------------------


def test_step_2_not_implemented_passes_on_from_the_most_specific():
    A = new_type()
    B = new_type(A)
    C = new_type(B)
    order = []

    def register(kind, tag, declines):
        @hki.primitive_handler("sin")
        def rule(primitive, x: kind, **params):
            order.append(tag)
            return NotImplemented if declines else tagged(tag)

    register(hki.ImplicitArray, 4, True)
    register(B, 2, True)
    register(A, 3, False)
    register(C, 1, True)
    assert run(lax.sin, C(ONES)) == 3
    assert order == [1, 2, 3]


def test_step_2_if_all_decline_the_operand_is_materialized():
    A = new_type()

    @hki.primitive_handler("sin")
    def rule(primitive, x: A, **params):
        return NotImplemented

    with hki.materialization_report() as report, hki.materialization("allow"):
        np.testing.assert_allclose(use(lax.sin)(A(ONES)), jnp.sin(ONES))
    assert report.count == 1


@pytest.mark.parametrize("nested", [False, True])
def test_step_2_a_rule_that_forgets_to_return_is_named(nested):
    A = new_type()

    @hki.primitive_handler("sin")
    def forgetful(primitive, x: A, **params):
        pass

    x = A(hki.Zeros(shape=ONES.shape, dtype=ONES.dtype) if nested else ONES)
    with pytest.raises(TypeError, match="forgetful.* for sin returned None; expected .* NotImpl"):
        use(lax.sin)(x)


def test_step_2_a_rule_may_decline_by_parameters():
    A = new_type()

    @hki.primitive_handler("transpose")
    def rule(primitive, x: A, *, permutation):
        return A(x.x.T) if permutation == (1, 0) else NotImplemented

    with hki.materialization("allow"):
        assert isinstance(use(lambda w: w.T)(A(jnp.ones((2, 3)))), A)
        out = use(lambda w: w.transpose(0, 2, 1))(A(jnp.ones((2, 3, 4))))
    assert isinstance(out, jax.Array) and out.shape == (2, 4, 3)


# --- step 3: commutative primitives ------------------------------------------------------------------------------

COMMUTATIVE = {
    "add": lax.add, "mul": lax.mul, "max": lax.max, "min": lax.min, "eq": lax.eq, "ne": lax.ne,
}  # fmt: skip


@pytest.mark.parametrize("name", COMMUTATIVE)
def test_step_3_the_implicit_operand_comes_first(name):
    A = new_type()

    @hki.primitive_handler(name)
    def rule(primitive, x: A, y: jax.Array, **params):
        return hki.default_handler(primitive, x.x, y, **params)

    y = jnp.array([0.5, 1.0])
    want = COMMUTATIVE[name](ONES, y)
    with hki.materialization("error"):
        for args in [(A(ONES), y), (y, A(ONES))]:
            np.testing.assert_array_equal(use(COMMUTATIVE[name])(*args), want)


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_step_3_bitwise(name):
    A = new_type()
    fun = getattr(lax, f"bitwise_{name}")

    @hki.primitive_handler(name)
    def rule(primitive, x: A, y: jax.Array, **params):
        return hki.default_handler(primitive, x.x, y, **params)

    x, y = jnp.array([1, 2]), jnp.array([3, 2])
    with hki.materialization("error"):
        np.testing.assert_array_equal(use(fun)(y, A(x)), fun(y, x))


def test_step_3_sums_of_cotangents_commute():
    A = new_type()

    @hki.primitive_handler("add_jaxvals")
    def rule(primitive, x: A, y: jax.Array, **params):
        return tagged(7)

    add = jax.extend.core.primitives.add_jaxvals_p.bind
    assert run(add, ONES, A(ONES)) == run(add, A(ONES), ONES) == 7


@pytest.mark.parametrize("fun", [lax.sub, lax.div, lax.pow, lax.lt])
def test_step_3_other_primitives_do_not_commute(fun):
    A = new_type()
    name = fun.__name__

    y = jnp.array([3.0, 3.0])
    of_rule = ~fun(ONES, y) if fun is lax.lt else tagged(7)

    @hki.primitive_handler(name)
    def rule(primitive, x: A, y: jax.Array, **params):
        return of_rule

    with hki.materialization("allow"):
        np.testing.assert_array_equal(use(fun)(y, A(ONES)), fun(y, ONES))
        np.testing.assert_array_equal(use(fun)(A(ONES), y), of_rule)


def test_step_3_unless_the_class_says_not():
    A = new_type(commute_ops=False)

    @hki.primitive_handler("add")
    def rule(primitive, x: A, y: jax.Array, **params):
        return tagged(7)

    with hki.materialization("allow"):
        assert run(lax.add, ONES, A(ONES)) == 2
        assert run(lax.add, A(ONES), ONES) == 7


def test_step_3_one_of_two_implicit_operands_that_says_not_is_enough():
    A, B = new_type(commute_ops=False), new_type()

    @hki.primitive_handler("add")
    def rule(primitive, x: A, y: B, **params):
        return tagged(7)

    with hki.materialization("allow"):
        assert run(lax.add, A(ONES), B(ONES)) == 7
        assert run(lax.add, B(ONES), A(ONES)) == 2


def test_step_3_both_implicit_tries_both_orders():
    A, B = new_type(), new_type()

    @hki.primitive_handler("mul")
    def rule(primitive, x: A, y: B, **params):
        return tagged(7)

    assert run(lax.mul, A(ONES), B(ONES)) == run(lax.mul, B(ONES), A(ONES)) == 7


@pytest.mark.parametrize("implicit_first", [True, False])
def test_step_3_the_order_of_orders(implicit_first):
    A, order = new_type(), []

    @hki.primitive_handler("add")
    def second(primitive, x: jax.Array, y: A, **params):
        order.append("as it stands")
        return NotImplemented

    @hki.primitive_handler("add")
    def first(primitive, x: A, y: jax.Array, **params):
        order.append("implicit first")
        return NotImplemented

    with hki.materialization("allow"):
        run(lax.add, *((A(ONES), ONES) if implicit_first else (ONES, A(ONES))))
    assert order == ["implicit first", "as it stands"]


def test_step_3_swapped_operands_arrive_in_the_annotated_order():
    A, seen = new_type(), []

    @hki.primitive_handler("mul")
    def rule(primitive, x: A, y, **params):
        seen.append((type(x), y.shape))
        return hki.default_handler(primitive, x.x, y, **params)

    np.testing.assert_array_equal(
        use(lax.mul)(jnp.array([3.0, 4.0]), A(jnp.array([2.0, 5.0]))), [6, 20]
    )
    assert seen == [(A, (2,))]


# --- step 4: primitives that carry a jaxpr -----------------------------------------------------------------------


def test_step_4_a_jaxpr_is_retraced():
    A = new_type()

    @hki.primitive_handler("sin")
    def rule(primitive, x: A, **params):
        return A(lax.sin(x.x))

    with hki.materialization("error"):
        out = use(jax.jit(jnp.sin))(A(ONES))
    assert isinstance(out, A)


def test_step_4_but_a_rule_for_it_comes_first():
    A = new_type()

    @hki.primitive_handler("jit")
    def rule(primitive, x: A, *, name, **params):
        return [tagged(7)] if name == "special" else NotImplemented

    def special(x):
        return x + 1

    with hki.materialization("allow"):
        assert run(jax.jit(special), A(ONES)) == 7
        assert run(jax.jit(lambda x: x + 2), A(ONES)) == 3


# --- step 5: materialization ----------------------------------------------------------------------------------------


def test_step_5_without_a_rule_the_primitive_runs_on_the_dense_array():
    A = new_type()
    with pytest.warns(hki.MaterializationWarning, match="no rule handles it in 'sin'"):
        np.testing.assert_allclose(use(lax.sin)(A(ONES)), jnp.sin(ONES))


def test_step_5_all_implicit_operands_are_materialized():
    A = new_type()
    with hki.materialization("allow"), hki.materialization_report() as report:
        np.testing.assert_array_equal(use(lax.atan2)(A(ONES), A(ONES)), lax.atan2(ONES, ONES))
    assert report.count == 2


# --- default_handler, results and nested operands ----------------------------------------------------------------------


def test_default_handler_on_dense_operands():
    assert float(hki.default_handler(lax.neg_p, jnp.float32(2))) == -2
    low, high = hki.default_handler(lax.split_p, jnp.arange(4), sizes=(1, 3), axis=0)
    assert (low.tolist(), high.tolist()) == ([0], [1, 2, 3])


def test_default_handler_dispatches_on_implicit_operands():
    A, B = new_type(), new_type()

    @hki.primitive_handler("neg")
    def for_a(primitive, x: A):
        return hki.default_handler(primitive, B(x.x))

    @hki.primitive_handler("neg")
    def for_b(primitive, x: B):
        return tagged(7)

    assert run(lax.neg, A(ONES)) == 7


def test_default_handler_of_a_primitive_with_several_results():
    A = new_type()

    @hki.primitive_handler("split")
    def rule(primitive, x: A, **params):
        return [A(part) for part in hki.default_handler(primitive, x.x, **params)]

    parts = use(lambda w: lax.split(w, (1, 3), 0))(A(jnp.arange(4.0)))
    assert [type(p) for p in parts] == [A, A]
    assert parts[1].x.tolist() == [1, 2, 3]


def test_default_handler_of_a_primitive_that_carries_a_jaxpr():
    A = new_type()

    @hki.primitive_handler("jit")
    def rule(primitive, x: A, **params):
        return hki.default_handler(primitive, x.x, **params)

    assert run(jax.jit(lambda x: x + 1), A(ONES)) == 2


def test_a_field_reads_as_a_dense_array_even_where_it_is_implicit():
    A, B = new_type(), new_type()
    seen = []

    @hki.primitive_handler("neg")
    def for_a(primitive, x: A):
        seen.append(isinstance(x.x, jax.Array))
        return A(-x.x)

    @hki.primitive_handler("neg")
    def for_b(primitive, x: B):
        return B(x.x + 10)

    with hki.materialization("error"):
        out = use(lax.neg)(A(B(ONES)))
    assert isinstance(out, A) and isinstance(out.x, B)
    assert out.x.x.tolist() == [11, 11]
    assert all(seen)


def test_a_nested_rule_may_decline():
    A = new_type()

    @hki.primitive_handler("sin")
    def rule(primitive, x: A, **params):
        return NotImplemented

    with hki.materialization("allow"):
        np.testing.assert_allclose(use(lax.sin)(A(A(ONES))), jnp.sin(ONES))


def test_jax_names_a_rule_that_branches_on_a_value():
    T = new_type()

    @hki.primitive_handler("sign")
    def branches_on_a_value(primitive, x: T, **params):
        return x.x if x.x[0] > 0 else -x.x

    with pytest.raises(
        jax.errors.TracerBoolConversionError, match="the function branches_on_a_value"
    ):
        use(jnp.sign)(T(ONES))


def test_an_error_in_a_rule_is_not_swallowed():
    A = new_type()

    @hki.primitive_handler("sin")
    def rule(primitive, x: A, **params):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use(lax.sin)(A(ONES))


def test_a_primitive_of_ones_own():
    from jax.extend.core import Primitive

    A = new_type()
    own_p = Primitive("own")
    own_p.def_impl(lambda x: x * 2)
    own_p.def_abstract_eval(lambda x: x)

    @hki.primitive_handler(own_p)
    def rule(primitive, x: A):
        return A(x.x * 3)

    assert use(own_p.bind)(A(ONES)).x.tolist() == [3, 3]
    B = new_type()
    with hki.materialization("allow"):
        assert use(own_p.bind)(B(ONES)).tolist() == [2, 2]


def test_rules_run_under_transformations():
    A = new_type(core_ndim=1)

    @hki.primitive_handler("sin")
    def rule(primitive, x: A, **params):
        return A(lax.sin(x.x, **params))

    x = jnp.arange(3.0)
    f = use(lambda w: lax.sin(w))
    with hki.materialization("error"):
        for g in (
            f,
            jax.jit(f),
            jax.vmap(f),
            use(jax.vmap(jnp.sin)),
            use(lambda w: lax.map(lax.sin, w)),
        ):
            np.testing.assert_allclose(g(A(x[:, None])).x, jnp.sin(x)[:, None], rtol=1e-6)
        grads = jax.grad(lambda w: hki.materialize(f(w)).sum())(A(x))
    np.testing.assert_allclose(grads.x, jnp.cos(x), rtol=1e-6)


# --- rules are traced, and their traces kept --------------------------------------------------------------------------------


def test_a_rule_is_traced_once_for_operands_of_one_structure():
    T, seen = new_type(), []

    @hki.primitive_handler("neg")
    def rule(primitive, x: T, **params):
        seen.append(x.shape)
        return T(-x.x)

    f = use(lambda x: lax.neg(lax.neg(x)))
    for g in (f, f, jax.jit(f)):
        assert hki.materialize(g(T(ONES))).tolist() == [1, 1]
    assert seen == [(2,)]
    f(T(jnp.ones(3)))
    assert seen == [(2,), (3,)]


def test_a_new_rule_is_seen_by_rules_that_were_traced_before():
    outer, inner = new_type(), new_type()
    child = new_type(inner)

    @hki.primitive_handler("cos")
    def through(primitive, x: outer, **params):
        return lax.neg(x.x)

    @hki.primitive_handler("neg")
    def of_inner(primitive, x: inner, **params):
        return tagged(1)

    assert run(lax.cos, outer(child(ONES))) == run(lax.neg, child(ONES)) == 1

    @hki.primitive_handler("neg")
    def of_child(primitive, x: child, **params):
        return tagged(2)

    assert run(lax.cos, outer(child(ONES))) == run(lax.neg, child(ONES)) == 2


def test_a_rule_may_read_a_literal():
    T = new_type()

    @hki.primitive_handler("mul")
    def rule(primitive, x: T, y: jax.Array, **params):
        return tagged(1 if float(y) == 2 else 2)

    f = use(lambda x, n: lax.mul_p.bind(x, jnp.float32(n)))
    for g in (f, jax.jit(f, static_argnums=1)):
        assert [g(T(ONES), n)[0] for n in (2.0, 3.0, 2.0)] == [1, 2, 1]


@pytest.mark.parametrize("nested", [False, True])
def test_a_rule_sees_that_its_operands_are_one_array(nested):
    A = new_type()

    @hki.primitive_handler(["mul", "sub"])
    def rule(primitive, x: A, y: hki.ArrayValue):
        return tagged(1 if x is y else 2)

    @hki.primitive_handler("select_n")
    def choose(primitive, which, x: A, y: hki.ArrayValue):
        return tagged(1 if x is y else 2)

    make = lambda x: A(A(x)) if nested else A(x)  # noqa: E731
    a, b = make(ONES), make(ONES)
    for fun in (lax.mul, lax.sub, lambda x, y: lax.select(ONES > 0, x, y)):
        assert run(lambda x, fun=fun: fun(x, x), a) == 1
        assert run(fun, a, b) == 2


def test_a_product_with_itself_is_a_square_unless_its_type_has_a_rule():
    A, B = new_type(), new_type()

    @hki.primitive_handler("square")
    def square(primitive, x: A | B):
        return tagged(1)

    @hki.primitive_handler("mul")
    def times(primitive, x: B, y: hki.ArrayValue):
        return tagged(2)

    assert run(lambda x: x * x, A(ONES)) == 1
    assert run(lambda x: x * x, B(ONES)) == 2
    with hki.materialization("allow"):
        assert run(lambda x, y: x * y, A(ONES), A(2 * ONES)) == 2.0


def test_literals_are_told_apart_by_their_bits():
    """By these a rule is traced: nan is equal to itself, and 0 is not -0."""
    T, seen = new_type(), []

    @hki.primitive_handler("mul")
    def rule(primitive, x: T, y: jax.Array, **params):
        seen.append(float(y))
        return x.x / y

    f = use(lambda x, n: lax.mul_p.bind(x, jnp.float32(n)))
    with np.errstate(divide="ignore"):
        got = [float(f(T(ONES), float(n))[0]) for n in ("0", "-0", "nan", "nan")]
    assert repr(got) == "[inf, -inf, nan, nan]"
    assert repr(seen) == "[0.0, -0.0, nan]"


def test_a_rule_may_read_what_a_program_computes_of_literals():
    T, seen = new_type(), []

    @hki.primitive_handler("mul")
    def rule(primitive, x: T, y: jax.Array, **params):
        seen.append((float(y), y.dtype.name))
        return x.x * y

    for n in (np.float32(2), np.float32(3)):
        assert run(lambda x, n=n: lax.mul(x, lax.integer_pow(lax.neg(n), 3)), T(ONES)) == -(n**3)
    assert seen == [(-8, "float32"), (-27, "float32")]


# --- one rule for both orders ----------------------------------------------------------------------


def test_binary_handler_is_called_for_both_orders():
    A, calls = new_type(warn_on_materialize=False), []

    @hki.binary_handler(["sub", "dot_general"])
    def rule(call, x: jax.Array, w: A):
        calls.append((call.primitive.name, call.w_first))
        return call(x + 1, w.x)

    x, w = jnp.array([1.0, 2.0]), A(jnp.array([3.0, 5.0]))
    np.testing.assert_array_equal(use(lambda x, w: x - w)(x, w), [-1, -2])
    np.testing.assert_array_equal(use(lambda x, w: w - x)(x, w), [1, 2])
    assert float(use(lambda x, w: x @ w)(x, w)) == float(use(lambda x, w: w @ x)(x, w)) == 21
    names = ["sub", "sub", "dot_general", "dot_general"]
    assert calls == list(zip(names, [False, True] * 2, strict=True))


def test_binary_handler_gives_the_axes_of_each_operand():
    A, seen = new_type(), []

    @hki.binary_handler("dot_general")
    def rule(call, x: jax.Array, w: A):
        seen.append((call.contracted, call.batch))
        assert call.ordered(x, w) == ((w, x) if call.w_first else (x, w))
        return call(x, w.x)

    x, w = jnp.ones((2, 3, 4)), A(jnp.ones((4, 3, 5)))
    numbers = (((2,), (0,)), ((1,), (1,)))
    out = use(lambda x, w: lax.dot_general(x, w, numbers))(x, w)
    mirrored = tuple(pair[::-1] for pair in numbers)
    back = use(lambda x, w: lax.dot_general(w, x, mirrored))(x, w)
    assert (out.shape, back.shape) == ((3, 2, 5), (3, 5, 2))
    assert seen == [numbers] * 2


@pytest.mark.parametrize("numbers", [(((1,), (0,)), ((3, 0), (2, 1))), (((), ()), ((2,), (0,)))])
def test_binary_handler_gives_the_axes_of_the_result(numbers):
    A, found = new_type(), []

    @hki.binary_handler("dot_general")
    def note(call, x: jax.Array, w: A):
        found.append(call.in_result(x, w))
        return call(x, w.x)

    (of_x, of_w), (batch_x, batch_w) = numbers
    x, w = np.zeros((2, 3, 5, 7)), np.zeros((3, 2, 7, 11))
    w = w if of_x else np.zeros((5, 4, 6))
    out = use(lambda x, w: lax.dot_general(x, w, numbers))(x, A(w))
    swapped = (of_w, of_x), (batch_w, batch_x)
    back = use(lambda x, w: lax.dot_general(w, x, swapped))(x, A(w))
    for result, places in zip((out, back), found, strict=True):
        for operand, contracted, own in zip((x, w), (of_x, of_w), places, strict=True):
            assert sorted({*own, *contracted}) == [*range(operand.ndim)]
            assert all(operand.shape[i] == result.shape[j] for i, j in own.items())


def test_binary_handler_passes_on_and_takes_any_second_type():
    A = new_type(commute_ops=False)

    @hki.binary_handler("atan2", precedence=1)
    def declines(call, x: Any, w: A):
        return NotImplemented

    @hki.binary_handler("atan2")
    def rule(call, x, w: A):  # no annotation: dense or implicit
        return tagged(7 if call.w_first else 8)

    w = A(ONES)
    assert [run(jnp.arctan2, w, ONES), run(jnp.arctan2, ONES, w)] == [7, 8]
    assert run(jnp.arctan2, w, w) == 8  # both orders fit: as the operands stand, with `w` second
    assert hki.binary_handler("atan2")(rule) is rule


@pytest.mark.parametrize(
    "shape, of_w, kept",
    [((), (2, 3), True), ((2, 3), (2, 3), True), ((1, 3), (2, 3), True), ((2, 1), (2, 3), True),
     ((), (), True), ((3,), (2, 3), False), ((2, 3), (3,), False), ((2, 3), (2, 1), False), ((2, 3), (1, 3), False)],
)  # fmt: skip
def test_which_operands_leave_a_shape_as_it_is(shape, of_w, kept):
    assert fits(np.ones(shape), np.ones(of_w)) is kept
    assert kept == (np.broadcast_shapes(shape, of_w) == of_w and len(shape) in (0, len(of_w)))


def test_binary_handler_takes_no_other_types_than_it_is_annotated_with():
    A = new_type()

    @hki.binary_handler("rem")
    def rule(call, x: jax.Array, w: A):
        return tagged(9)

    w = A(3 * ONES)
    assert [run(lax.rem, ONES, w), run(lax.rem, w, ONES)] == [9, 9]
    with hki.materialization("allow"):
        assert run(lax.rem, w, A(2 * ONES)) == 1


def test_errors_of_binary_handler():
    def rule(call, x: jax.Array, w: hki.ImplicitArray): ...

    with pytest.raises(ValueError, match="no primitive is called 'nothing'"):
        hki.binary_handler("nothing")(rule)
    with pytest.raises(TypeError, match="expected primitives or their names"):
        hki.binary_handler(3)(rule)
    A = new_type()

    @hki.binary_handler("nextafter")
    def forgot_to_return(call, x: jax.Array, w: A): ...

    with pytest.raises(TypeError, match="forgot_to_return.* for nextafter returned None"):
        use(jnp.nextafter)(ONES, A(ONES))
