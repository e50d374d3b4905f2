"""`diff`: an empty text for the same program, and lines that say what is different for another one."""

import functools
import itertools
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_implicit.mox import diff, load, make_mox, save
from tests.mox_models import ALL
from tests.tiers import few

X4 = jnp.ones((2, 4))


def made(fun):
    return make_mox(hk.transform_with_state(fun))(X4)


def captured(values):
    return lambda x: x * np.asarray(values, np.float32)


def summed(reverse):
    return lambda x: jax.lax.cumsum(x, reverse=reverse)


def in_scan(f):
    return lambda x: jax.lax.scan(lambda c, y: (f(c, y), c), x[0], x)


def branches(f):
    return lambda x: jax.lax.cond(x.sum() > 0, f, jnp.tanh, x)


def two(f):
    return lambda x: f(jnp.sin(x), jnp.cos(x))


def linear(x):
    return hk.Linear(4)(x)


def random(x, threefry):
    with jax.threefry_partitionable(threefry):
        return x + jax.random.uniform(jax.random.key(0), x.shape)


def of_names(*names):
    def fun(x):
        first, *_ = [hk.Linear(4, name=name)(x) for name in names]
        return first

    return fun


# By a name, two programs, and a part of what is said of their difference.
DIFFERENT = {
    "number": (lambda x: x * 2.0, lambda x: x * 3.0, "mul.*: operand 1 is 3.0"),
    "sign of zero": (lambda x: x + 0.0, lambda x: x + -0.0, "operand 1 is -0.0"),
    "array": (captured([0, 1, 2, 3]), captured([0, 1, 2, 4]), r"\[0.0, 1.0, 2.0, 4.0\]"),
    "large array": (captured(np.eye(4)[:2] * 3), captured(np.eye(4)[2:] * 3), "operand . is"),
    "order": (two(lambda a, b: a - b), two(lambda a, b: b - a), "operand 0 is the result of <cos"),
    "wiring": (
        lambda x: (jnp.sin(x), jnp.sin(jnp.sin(x))),
        lambda x: (jnp.sin(x), jnp.sin(x), jnp.sin(x))[::2],
        "operand 0 is array 0 of the arguments",
    ),
    "results": (
        two(lambda a, b: (a, b)),
        two(lambda a, b: (b, a)),
        "result 0 is the result of <cos",
    ),
    "structure": (lambda x: (x, x), lambda x: [x, x], r"\+results \[array, array\]"),
    "parameter of an equation": (summed(False), summed(True), "reverse=true"),
    "settings": (
        functools.partial(random, threefry=True),
        functools.partial(random, threefry=False),
        "threefry_partitionable=False",
    ),
    "in a loop": (in_scan(lambda c, y: c - y), in_scan(lambda c, y: y - c), "argument 1 of jaxpr"),
    "number in a loop": (in_scan(lambda c, y: c * 2), in_scan(lambda c, y: c * 3), "is 3.0"),
    "in a branch": (branches(lambda x: x * 2), branches(lambda x: x * 3), "is 3.0"),
    "results of a loop": (
        lambda x: jax.lax.scan(lambda c, y: (c + y, (jnp.sin(c), jnp.cos(c))), x[0], x),
        lambda x: jax.lax.scan(lambda c, y: (c + y, (jnp.sin(c), jnp.cos(c))[::-1]), x[0], x),
        "result 1 is the result of <cos",
    ),
    "path": (of_names("a"), of_names("b"), r"\+<b: Linear"),
    "parameter": (of_names("a", "b"), of_names("b", "a"), "<b: Linear"),
    "class": (linear, lambda x: hk.Bias(name="linear")(x), "Bias"),
    "state": (lambda x: x, lambda x: hk.get_state("s", (), init=jnp.zeros) + x, "state ~/s"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_different_is_said(name):
    one, other, said = DIFFERENT[name]
    a, b = made(one), made(other)
    lines = diff(a, b).split("\n")
    assert {line[0] for line in lines} <= {"-", "+"}
    assert re.search(said, "\n".join(lines)), lines
    assert diff(b, a) and diff(a, made(one)) == diff(b, made(other)) == ""


SAVED = sorted(ALL.keys() - {"structures", "ints_and_flags"})  # whose arguments no file can have


def expression(name):
    fun, args, kwargs = ALL[name]
    return make_mox(hk.transform_with_state(fun))(*args, **kwargs)


@pytest.mark.parametrize("name", few(ALL, "mlp", "structures"))
def test_the_same_program_has_no_difference(name):
    assert diff(expression(name), expression(name)) == ""


@pytest.mark.parametrize("name", few(SAVED, "mlp", "while_with_module_in_condition"))
def test_what_is_loaded_has_no_difference(name, tmp_path):
    mox = expression(name)
    save(tmp_path / "mox.json", mox)
    assert diff(mox, load(tmp_path / "mox.json")) == ""


def test_changes_that_give_other_programs():
    mox = made(lambda x: hk.nets.MLP([4, 4, 4], name="m")(x))
    l0, l1, l2 = (f"m/~/linear_{i}" for i in range(3))
    changed = {
        "sub": mox.sub(l0, jnp.tanh),
        "none": mox.sub(l1, None),
        "after": mox.insert_after(l0, lambda x: x * 2),
        "after, other number": mox.insert_after(l0, lambda x: x * 3),
        "zeros": mox.patch(l0, jnp.zeros((2, 4))),
        "ones": mox.patch(l0, jnp.ones((2, 4))),
        "share": mox.share({l1: l0}),
        "share another": mox.share({l2: l0}),
        "rename": mox.rename(l0, "other"),
        "taps": mox.taps(l0),
        "taps another": mox.taps(l1),
        "truncate": mox.truncate(l1),
        "extract": mox.extract(l1),
    }
    for (_, a), (_, b) in itertools.combinations({"mox": mox, **changed}.items(), 2):
        assert diff(a, b) and diff(b, a)


def test_lines_for_a_node_that_is_dropped_are_of_it_alone():
    mox = made(lambda x: jnp.cos(jnp.sin(hk.Linear(4)(x))))
    assert diff(mox, mox.sub("//sin", None)).split("\n") == [
        "-<sin: f32[2,4] -> f32[2,4]>",
        "+<sin: function: f32[2,4] -> f32[2,4]>",
    ]
