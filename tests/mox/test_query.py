"""Nodes of module expressions by XPath, glob, class and predicate."""

import enum
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_implicit.mox import load, make_mox, save
from tests.mox.bodies import BODIES

X = jnp.ones((2, 4))


class Odd(hk.Module):
    """Whose constructor has arguments of all kinds, some named as attributes of every call."""

    def __init__(self, type="t", method=None, path="p", inputs=7, name=None, **others):
        super().__init__(name=name)

    def __call__(self, x):
        return x + 1


class Kind(enum.Enum):
    FIRST = 1


def expression(fun, *args):
    return make_mox(hk.transform_with_state(fun))(*(args or (X,)))


def odd(**arguments):
    return expression(lambda x: Odd(name="odd", **arguments)(x))


def names(nodes):
    return [x.name for x in nodes]


@functools.cache
def small():
    """Two blocks of a normalization, linear layers and relus, and a head."""

    def f(x):
        for size in (8, 16):
            x = hk.LayerNorm(-1, True, False, name="norm")(x)
            x = jax.nn.relu(hk.Linear(size, with_bias=size == 8, name="linear")(x))
        return hk.Linear(2, name="head")(x)

    return expression(f)


@pytest.mark.parametrize(
    "xpath, expected",
    [
        ('//module_call[@type="Linear" and @output_size > 5]', ["linear", "linear_1"]),
        (
            '//module_call[@type="Linear" and (@output_size=2 or @output_size=8)]',
            ["linear", "head"],
        ),
        ("//module_call[@output_size * 2 = 16]", ["linear"]),
        ("//dot_general[ancestor::module_call[@name='head']]/..", ["head"]),
        ("//module_call[not(.//dot_general)]", ["norm", "norm_1"]),
        ('//module_call[preceding::custom_jvp_call[@name="relu"]]', ["norm_1", "linear_1", "head"]),
        ("//module_call[following-sibling::*[1][@name='relu']]", ["linear", "linear_1"]),
        ("//module_call[@name='head'] | //module_call[@name='norm']", ["norm", "head"]),
        ("(//module_call)[2]", ["linear"]),
        ("//module_call[last()]", ["head"]),
        ("/mox/module_call[position() < 3]", ["norm", "linear"]),
        ("//module_call[starts-with(@path, 'lin') and @with_bias]", ["linear"]),
        ("//module_call[@type='Linear'][not(@with_bias)]", ["linear_1"]),
        ("//module_call[@eps < 0.001]", ["norm", "norm_1"]),
        (
            "//module_call[@type='LayerNorm'][@create_scale][not(@create_offset)]",
            ["norm", "norm_1"],
        ),
        ("//module_call[count(.//*) > 1000]", []),
        ("//module_call[@inputs='float32[2,8] float32[3]']", []),
        ("//module_call[contains(@outputs, '[2,16]')]", ["linear_1"]),
    ],
)
def test_xpath(xpath, expected):
    assert names(small().query(xpath)) == expected


def test_values_in_place_of_nodes():
    assert small().query("count(//dot_general)") == 3.0
    assert small().query("//module_call[@type='Linear']/@output_size") == ["8", "16", "2"]
    assert small().query("string(//module_call[1]/@type)") == "LayerNorm"
    assert small().query("boolean(//conv_general_dilated)") is False
    assert small().query("sum(//module_call/@output_size)") == 26.0


@pytest.mark.parametrize(
    "xpath, count",
    [
        ('//module_call[@name="linear"]', 1),
        ("//*[@name='relu']", 4),
        ("//mox[@name='relu']", 0),
        ('//module_call[@type="Linear"][1]', 1),
        ('//*[@name="nothing"]', 0),
        ("""//*[@name='//*[@name="relu"]']""", 0),
        ('//broadcast_in_dim[@broadcast_dimensions.given="(1,)"]', 4),
    ],
)
def test_a_query_for_one_attribute_takes_a_quicker_way_to_the_same(xpath, count):
    found = small().query(xpath)
    assert len(found) == count and found == small().query(f"{xpath} | //none")


def test_nodes_come_in_the_order_in_which_they_run():
    found = small().query("//module_call/preceding::module_call | //module_call")
    assert names(found) == ["norm", "linear", "norm_1", "linear_1", "head"]
    assert found == small().select(hk.Module)


def test_constructors_are_hidden_unless_asked_for():
    mox = expression(lambda x: hk.nets.MLP([3, 2])(x))
    assert mox.query("count(//module_call)") == 3.0
    assert mox.query("count(//module_call)", constructors=True) == 6.0
    assert {x.method for x in mox.query("//module_call")} == {"__call__"}
    made = mox.query('//module_call[@method="__init__"]', constructors=True)
    assert sorted(names(made)) == ["linear_0", "linear_1", "mlp"]


def test_arguments_that_are_called_as_an_attribute_of_every_call():
    mox = odd(type="mine", method="m", path="here", inputs=9)
    (node,) = mox.query("//module_call[@type='Odd' and @arg.type='mine']")
    assert [node] == mox.query("//*[@name='odd' and @path='odd' and @method='__call__']")
    assert [node] == mox.query("//*[@arg.name='odd' and @arg.path='here' and @arg.method='m']")
    assert [node] == mox.query("//*[@inputs='float32[2,4]' and @arg.inputs=9]")
    (equation,) = expression(lambda x: jax.jit(lambda y: y + 1)(x)).query("//jit")
    assert equation.name == "<lambda>"


@pytest.mark.parametrize(
    "given, text",
    [
        (True, "true"),
        (2, "2"),
        ((2, 2), "2"),
        ([2, 2], "2"),
        ((2,), "2"),
        ((2, 3), "2 3"),
        (((1, 1), (1, 1)), "1"),
        ((True, True), "true"),
        ((), ""),
        (0, "0"),
        (0.5, "0.5"),
        (np.float32(0.5), "0.5"),
        (jnp.bfloat16, "bfloat16"),
        (np.dtype("int8"), "int8"),
        (np.int32, "int32"),
        (jax.nn.gelu, "gelu"),
        (functools.partial(jax.nn.gelu, approximate=False), "gelu"),
        (hk.Linear, "Linear"),
        (hk.initializers.Constant(1.0), "Constant"),
        (np.zeros((3, 4), np.float32), "float32[3,4]"),
        (jnp.zeros(3), "float32[3]"),
        ({"a": 1, "b": np.zeros(3)}, "a=1 b=float64[3]"),
        (Kind.FIRST, "FIRST"),
        ("SAME", "SAME"),
        ("a\nb", "a b"),  # as XML has it in an attribute
        ("null \0 bell \a", "null \ufffd bell \ufffd"),
        ("\ud800 ü 😀 <b>&\"'", "\ufffd ü 😀 <b>&\"'"),
    ],
)
def test_how_an_argument_is_written(given, text):
    mox = odd(value=given)
    (found,) = mox.query("//module_call/@value")
    assert found.replace("\n", " ") == text
    if isinstance(given, tuple | list):
        assert mox.query("//module_call/@value.given") == [str(given)]
    if isinstance(given, int) and given is not True:
        assert len(mox.query(f"//module_call[@value = {given}]")) == 1


@pytest.mark.parametrize("given", [False, None, (False, False), [None]])
def test_what_is_false_or_none_is_no_attribute(given):
    assert odd(value=given).query("//module_call[@value]") == []
    assert len(odd(value=given).query("//module_call[not(@value)]")) == 1


@pytest.mark.parametrize(
    "condition, instead",
    [
        ('@with_bias="false"', "not(@with_bias)"),
        ("@with_bias = 'False'", "not(@with_bias)"),
        ("@with_bias != 'true'", "@with_bias"),
        ('"true"=@with_bias', "@with_bias"),
        ("attribute::b_init = 'None'", "not(@b_init)"),
    ],
)
def test_texts_for_booleans_are_refused(condition, instead):
    with pytest.raises(ValueError, match=r"In place of .* write ") as error:
        small().query(f"//module_call[{condition}]")
    assert f"write {instead} (docs" in str(error.value)


def test_a_text_that_was_given_is_no_boolean():
    assert len(odd(mode="none").query("//module_call[@mode='none']")) == 1
    assert len(small().query("//module_call[@with_bias = true()]")) == 2
    assert len(small().query("//module_call[@with_bias = false()][@type='Linear']")) == 1


@pytest.mark.parametrize("name", ["a b", "1st", "ªx", "x:y", "größe", "<", ""])
def test_names_that_are_not_xml_names(name):
    mox = odd(**{name: 5})
    assert mox.query("count(//module_call/@*[.=5])") == 1.0


def test_primitives_whose_names_are_not_xml_names():
    made = jax.extend.core.Primitive("3 is <odd>")
    made.def_abstract_eval(lambda x: x)
    made.def_impl(lambda x: x)
    (node,) = expression(lambda x: made.bind(x)).query("//_3_is__odd_")
    assert node.primitive is made


@pytest.mark.parametrize(
    "xpath",
    [
        "//[",
        "",
        "//module_call[@a=",
        "nonsense(1)",
        "//foo:bar",
        "\0",
        "//module_call[$v]",
        "(" * 10_000,
        "document('file:///etc/passwd')",
        "//*[re:test(@name, 'a')]",
    ],
)
def test_what_is_no_xpath_is_one_error(xpath):
    with pytest.raises(ValueError, match="^query: .* is not an XPath expression: "):
        small().query(xpath)


def test_globs():
    def f(x):
        return x + hk.nets.MLP([3, 4], name="a")(x) + hk.nets.MLP([5, 4], name="b")(x)

    mox = expression(f)
    assert [x.path for x in mox["*/~/linear_0"]] == ["a/~/linear_0", "b/~/linear_0"]
    assert [x.path for x in mox["**/linear_1"]] == ["a/~/linear_1", "b/~/linear_1"]
    assert [x.path for x in mox["a/**"]] == ["a", "a/~/linear_0", "a/~/linear_1"]
    assert [x.path for x in mox["[ab]"]] == ["a", "b"]
    assert len(mox["**"]) == 6
    with pytest.raises(KeyError, match="a/~/linear_0"):
        mox["a/linear_0"]
    with pytest.raises(KeyError, match="~/linear_1"):
        mox["**/linear_7"]


def test_classes_and_predicates():
    class MyLinear(hk.Linear):
        pass

    mox = expression(lambda x: jnp.tanh(hk.Linear(3)(MyLinear(4, name="mine")(x))))
    assert names(mox.select(hk.Linear)) == ["mine", "linear"]
    assert names(mox.select(MyLinear)) == ["mine"]
    assert mox.select(hk.Conv2D) == []
    (tanh,) = mox.select(lambda x: x.name == "tanh")
    assert tanh.primitive is jax.lax.tanh_p
    with pytest.raises(TypeError, match=r"select: expected a class .* got 3"):
        mox.select(3)


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_what_is_in_bodies_is_found(model):
    mox = expression(model)
    (node,) = mox.query(BODIES[model])
    assert node.type_name == "Linear"
    assert [node] == mox["**/inner"] == mox.select(hk.Linear)
    assert mox.query("count(//dot_general)") == 1.0
    (path,) = mox.query('//module_call[@type="Linear"]/@path')
    assert (path, "w") in mox.interface.params
    assert [node] == mox[path]


def test_a_function_with_a_derivative_rule_has_its_name():
    mox = expression(lambda x: jax.nn.silu(jax.nn.relu(x)))
    (relu,) = mox.query('//custom_jvp_call[@name="relu"]')
    assert relu.name == "relu"
    assert mox.query('//custom_jvp_call[@name="relu"]/body/*') != []


def test_the_view_of_a_changed_expression_is_its_own():
    new = small().sub('//custom_jvp_call[@name="relu"]', jnp.tanh)
    assert new.query("count(//custom_jvp_call)") == 0.0
    assert small().query("count(//custom_jvp_call)") == 2.0
    assert new.query("count(//function/tanh)") == 2.0


def recurrent(ids):
    """A network whose core has an initial state, and with embeddings that are read in a property."""
    embed, core = hk.Embed(7, 4, name="embed"), hk.GRU(4, name="core")
    x, _ = hk.dynamic_unroll(core, embed(ids.T), core.initial_state(2))
    return x @ embed.embeddings.T


@pytest.mark.slow
def test_a_class_and_a_glob_mean_calls_of_modules_themselves():
    ids = jnp.array([[0, 3, 2], [1, 6, 5]])
    t = hk.transform(recurrent)
    params, mox = t.init(jax.random.key(0), ids), make_mox(t)(ids)
    assert set(mox.query("//module_call/@method")) == {"__call__", "initial_state", "embeddings"}
    for where in (hk.GRU, "core", "**/core", [hk.GRU], ["core"]):
        changed = mox.insert_after(where, lambda out: (out[0] * 2, out[1]))
        assert set(mox.taps(where).apply(params, None, ids)[1]) == {"core"}
        twice = np.asarray(t.apply(params, None, ids)) * 2
        np.testing.assert_allclose(changed.apply(params, None, ids), twice, rtol=1e-6)
    again = mox.sub(hk.Embed, hk.Embed, path="new")
    assert set(again.init(jax.random.key(0), ids)) == {*params, "new/embed"}
    alone = mox.extract("embed")
    np.testing.assert_array_equal(
        alone.apply(params, None, ids.T), params["embed"]["embeddings"][ids.T]
    )
    every = mox.taps("//module_call").apply(params, None, ids)[1]
    other = {"core.initial_state", "embed.embeddings", "embed.embeddings:1"}
    assert set(every) == {"embed", "core", *other}


def test_a_module_that_is_not_called_itself_is_found_by_its_methods():
    class Coder(hk.Module):
        def encode(self, x):
            return self.decode(hk.Linear(4)(x))

        def decode(self, x):
            return x * 2

    mox = expression(lambda x: Coder(name="coder")(x) if False else Coder(name="coder").encode(x))
    assert [x.method for x in mox.select(Coder)] == ["encode", "decode"]
    assert [x.method for x in mox["coder"]] == ["encode", "decode"]
    assert mox.truncate(Coder).query("count(//mul)") == 1.0  # the outermost
    with pytest.raises(
        ValueError, match="is 2 nodes, and has to be one: <norm:.* Give one of them"
    ):
        small().extract("norm*")


def test_a_list_of_anything():
    mox = small()
    first, *_ = mox.select(hk.Linear)
    found = mox.taps(["head", hk.LayerNorm, first, "//dot_general"])
    values = ["norm", "linear", "norm_1", "head", "head/dot_general"]
    assert set(values) <= set(found.interface.results.tree.merge([0] * 9)[1])
    assert mox.parameters(["head", "norm*"]) == ["head/b", "head/w", "norm/scale", "norm_1/scale"]


@pytest.mark.parametrize(
    "where, said",
    [
        (hk.Conv2D, "There are modules of the classes LayerNorm, Linear"),
        ("//erf_inv", "classes LayerNorm, Linear, and the equations add, broadcast_in_dim"),
        ("//Linear", "Calls of Linear are .//module_call"),
        ("//dot_generl", "There are dot_general"),
        ('//module_call[@type="Liner"]', "There are Linear"),
        ('//module_call[@name="haed"]', "There are head"),
        (lambda node: False, "and the equations add"),
        ([], "There are modules"),
    ],
)
def test_what_is_not_found(where, said):
    with pytest.raises(ValueError, match=f"^where: nothing in the expression is .*{said}"):
        small().sub(where, None)


def test_a_class_that_a_file_only_names(tmp_path):
    save(tmp_path / "mox.json", small())
    loaded = load(tmp_path / "mox.json")
    with pytest.raises(ValueError, match=r"types=\[Linear\].*@type=\"Linear\""):
        loaded.sub(hk.Linear, None)
    assert len(load(tmp_path / "mox.json", types=[hk.Linear]).select(hk.Linear)) == 3


@pytest.mark.parametrize("where", [3, None, 1.5, {"a": 1}])
def test_what_does_not_choose_nodes(where):
    with pytest.raises(TypeError, match="^where: expected an XPath, a glob"):
        small().sub(where, None)


def test_a_predicate_that_not_every_node_has_an_answer_to():
    with pytest.raises(AttributeError) as e:
        small().select(lambda node: node.path == "head")
    assert any("getattr(node, 'path', '')" in note for note in e.value.__notes__)
