"""Rules for two operands, each written once for both orders."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Any

import jax

from haiku_implicit.core import compat
from haiku_implicit.core.dispatch import as_primitives, primitive_handler
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.core.typing import Array, EqnParam, Primitive, Result

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class BinaryCall:
    """A program's call of a product or another function of two operands, for `binary_handler`.

    It is hashable, except for the call of a ragged product.

    Attributes:
      primitive: the primitive.
      params: its parameters, for the operands in the order of the program.
      w_first: whether that order is `w`, `x`.
      others: further operands: the sizes of the groups in a ragged product.
    """

    primitive: Primitive
    params: EqnParam
    w_first: bool
    others: tuple[Array, ...] = ()

    def __hash__(self) -> int:
        return hash((self.primitive, frozenset(self.params.items()), self.w_first))

    def __call__(self, x: Array, w: Array) -> Array:
        """Runs the primitive with the same parameters on other operands, in the program's order."""
        return default_handler(self.primitive, *self.operands(x, w), **self.params)

    def ordered(self, x: Array, w: Array) -> tuple[Any, Any]:
        """Returns the operands in the order of the program."""
        return (w, x) if self.w_first else (x, w)

    def operands(self, x: Array, w: Array) -> tuple[Any, ...]:
        """Returns all operands in the order of the program."""
        return (*self.ordered(x, w), *self.others)

    @property
    def contracted(self) -> tuple[Axes, Axes]:
        """The contracted axes of `x` and of `w` in a `dot_general`."""
        return self.ordered(*self.params["dimension_numbers"][0])

    @property
    def batch(self) -> tuple[Axes, Axes]:
        """The batch axes of `x` and of `w` in a `dot_general`."""
        return self.ordered(*self.params["dimension_numbers"][1])

    def in_result(self, x: Array, w: Array) -> tuple[dict[int, int], dict[int, int]]:
        """The axes that a `dot_general`'s result has of `x` and of `w`: its axis by theirs.

        The result has the batch axes, then the free axes of the first operand, then the second's.
        """
        found, start = [], len(self.batch[0])
        numbers = self.params["dimension_numbers"]
        for y, contracted, batch in zip(self.ordered(x, w), *numbers, strict=True):
            free = [i for i in range(y.ndim) if i not in (*contracted, *batch)]
            own = {axis: i for i, axis in enumerate(batch)}
            found.append(own | {axis: start + i for i, axis in enumerate(free)})
            start += len(free)
        return self.ordered(*found)


def fits(x: Array, w: Array) -> bool:
    """Whether an elementwise primitive with a dense `x` keeps the shape of `w`."""
    if x.ndim != w.ndim:
        return bool(x.ndim == 0)
    return all(i in (1, j) for i, j in zip(x.shape, w.shape, strict=True))


Rule = Callable[[BinaryCall, Array, Array], Result]


def binary_handler(
    primitives: Primitive | str | Iterable[Primitive | str], precedence: int = 0
) -> Callable[[Rule], Rule]:
    """Registers one rule for both orders of two operands: for `x @ w` and for `w @ x`.

    The rule is called as `rule(call, x, w)`, with operands that match the annotations of `x` and `w`.
    `call(x, w)` runs the primitive on other operands, in the order of the program; `call.primitive`,
    `call.params` and `call.w_first` describe the call. For a `dot_general`, `call.contracted` and
    `call.batch` are pairs (axes of `x`, axes of `w`), and `call.in_result(x, w)` says where the other
    axes are in the result. In a ragged product, `call.others` has the sizes of the groups, which
    `call(x, w)` passes on. Otherwise the rule is as `primitive_handler` describes it.

    Args:
      primitives: primitives of two operands, as for `primitive_handler`.
      precedence: as for `primitive_handler`.

    Returns:
      The decorator; it returns the rule unchanged.

    Raises:
      ValueError: for a name that no primitive has.
      TypeError: for anything other than primitives and names.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> @dataclasses.dataclass
      ... class Negative(hki.ImplicitArray):
      ...   value: jax.Array
      ...   def materialize(self):
      ...     return -self.value
      >>> @hki.binary_handler(['dot_general', 'conv_general_dilated'])
      ... def multiply_by_negative(call, x: jax.Array, w: Negative):
      ...   return -call(x, w.value)
      >>> w = Negative(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
      >>> x = jnp.array([1.0, 0.0])
      >>> [y.tolist() for y in hki.use_implicit_args(lambda x, w: (x @ w, w @ x))(x, w)]
      [[-1.0, -2.0], [-1.0, -3.0]]
    """

    def register(rule: Rule) -> Rule:
        def x_first(primitive: Primitive, x: Array, w: Array, **params: EqnParam) -> Result:
            return rule(BinaryCall(primitive, params, False), x, w)

        def w_first(primitive: Primitive, w: Array, x: Array, **params: EqnParam) -> Result:
            return rule(BinaryCall(primitive, params, True), x, w)

        def x_first_in_groups(
            primitive: Primitive, x: Array, w: Array, sizes: jax.Array, **params: EqnParam
        ) -> Result:
            return rule(BinaryCall(primitive, params, False, (sizes,)), x, w)

        def w_first_in_groups(
            primitive: Primitive, w: Array, x: Array, sizes: jax.Array, **params: EqnParam
        ) -> Result:
            return rule(BinaryCall(primitive, params, True, (sizes,)), x, w)

        hints = typing.get_type_hints(rule)
        _, x, w = list(inspect.signature(rule).parameters)[:3]
        pairs = (x_first, x_first_in_groups), (w_first, w_first_in_groups)
        for of_two, in_groups in pairs:
            for one_order, own in ((of_two, plain), (in_groups, ragged)):
                one_order.__annotations__ |= {"x": hints.get(x, Any), "w": hints.get(w, Any)}
                one_order.__name__ = one_order.__qualname__ = rule.__name__
                primitive_handler(own, precedence)(one_order)
        return rule

    resolved = as_primitives(primitives)
    ragged = [p for p in resolved if p is compat.ragged_dot_general_p]
    plain = [p for p in resolved if p not in ragged]
    return register
