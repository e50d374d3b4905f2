"""The comparison of a function of implicit arrays with the same one of their dense twins."""

import jax
import numpy as np

import haiku_implicit as hki


def close(a, b, rtol):
    """In units of the largest magnitude."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def on_twins(fun):
    """The function of the dense twins of its arguments: one program, where JAX would compile each operation."""
    return jax.jit(lambda *args: fun(*hki.materialize(args)))


def same_without_dense(fun, *args, rtol):
    """Eagerly and compiled; nothing may become dense."""
    expected = on_twins(fun)(*args)
    with hki.materialization("error"):
        for run in (lambda f: f, jax.jit):
            found = hki.materialize(run(hki.use_implicit_args(fun))(*args))
            jax.tree.map(lambda a, b: close(a, b, rtol), found, expected)
