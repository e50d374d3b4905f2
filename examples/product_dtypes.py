"""Lists the products in a program: their dtypes, shapes and modules."""

import collections
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

# The operation of each primitive.
_PRODUCTS = {
    "conv_general_dilated": "conv_general_dilated",
    "dot_general": "dot_general",
    "ragged_dot_general": "ragged_dot",
    "quantized_matmul": "quantized_matmul",  # the library's own, for stored weights
}


class Product(NamedTuple):
    """A product in a program.

    Attributes:
      operation: the name of the JAX function.
      scope: the module's name, within the names of transformations.
      dtypes, shapes: the dtypes and shapes of the two operands.
    """

    operation: str
    scope: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands as text, each like `int8[2, 3]`."""
        return tuple(f"{d}{list(s)}" for d, s in zip(self.dtypes, self.shapes, strict=True))

    @property
    def is_backward(self) -> bool:
        """Whether it computes a gradient."""
        return "transpose(" in self.scope

    @property
    def is_of_integers(self) -> bool:
        """Whether both operands are 8-bit codes."""
        return self.dtypes == ("int8", "int8")

    def is_in(self, module: str) -> bool:
        """Whether the last part of a module's name is in the scope."""
        return module.split("/")[-1] in re.split(r"\W+", self.scope)


def products_in(fun: Callable[..., Any], *args: Any) -> list[Product]:
    """Returns the products in the jaxpr of a function, in its order.

    A product in a loop counts once, however often the loop runs.

    Args:
      fun: a function of arrays.
      *args: its arguments.
    """

    def within(jaxpr: Jaxpr, outer: str) -> Iterator[Product]:
        for eqn in jaxpr.eqns:
            scope = f"{outer}/{eqn.source_info.name_stack}"
            if eqn.primitive.name in _PRODUCTS:
                lhs, rhs = (v.aval for v in eqn.invars[:2])
                dtypes, shapes = (lhs.dtype.name, rhs.dtype.name), (lhs.shape, rhs.shape)
                yield Product(_PRODUCTS[eqn.primitive.name], scope, dtypes, shapes)
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(inner):
                    jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                    yield from within(jaxpr, scope)

    return list(within(jax.make_jaxpr(fun)(*args).jaxpr, ""))


def count_products(fun: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """Counts a program's products of each kind, such as `'int8 * int8'`.

    Example:
      >>> import jax.numpy as jnp
      >>> def fun(x):
      ...   return x @ x + jax.jit(jnp.dot)(x.astype("int8"), x.astype("int8"))
      >>> sorted(count_products(fun, jnp.ones((2, 2))).items())
      [('float32 * float32', 1), ('int8 * int8', 1)]
    """
    return collections.Counter(" * ".join(p.dtypes) for p in products_in(fun, *args))


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)
