"""Which products a program is made of, by the dtypes that they multiply."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def count_products(fun: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """Counts the products in the program that JAX traces a function to.

    A product in a loop counts once, however often the loop runs.

    Args:
      fun: a function of arrays.
      *args: what it is called with.

    Returns:
      How many products there are of each kind, such as `'int8 * int8'`.

    Example:
      >>> import jax.numpy as jnp
      >>> def fun(x):
      ...   return x @ x + jax.jit(jnp.dot)(x.astype("int8"), x.astype("int8"))
      >>> sorted(count_products(fun, jnp.ones((2, 2))).items())
      [('float32 * float32', 1), ('int8 * int8', 1)]
    """
    products = (
        eqn
        for eqn in _equations(jax.make_jaxpr(fun)(*args).jaxpr)
        if eqn.primitive.name in _PRODUCTS
    )
    return collections.Counter(
        " * ".join(x.aval.dtype.name for x in eqn.invars[:2]) for eqn in products
    )


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program, and of the programs in their parameters."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _equations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)
