"""Functions with a derivative rule of their own, as `higher_order.py` has the other primitives.

The body of a `jax.custom_jvp` or `jax.custom_vjp` is interpreted. Under differentiation its rule must
be used, which is written for dense arrays: the derivative of f(W + AB) with respect to A is not that of
f. So the operands go through `materialize` and its derivative, and the rule sees dense values and
tangents.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.extend.core import primitives as jex
from jax.interpreters import ad, batching, mlir

from haiku_implicit.core import compat, structure
from haiku_implicit.core import materialization as events
from haiku_implicit.core.array import dense_struct, flatten, is_implicit
from haiku_implicit.core.higher_order import Operands, Params, handles
from haiku_implicit.core.interpreter import interpret, materialize_array
from haiku_implicit.core.retrace import Retraced, retrace
from haiku_implicit.core.sharding import mapped_first

_REFUSED = -1


@handles(jex.custom_jvp_call_p, jex.custom_vjp_call_p)
def custom_derivative(operands: Operands, params: Params) -> list[Any]:
    """`jax.custom_jvp` and `jax.custom_vjp`, with the same rule for the same derivatives.

    It is not known here whether a result will be differentiated. So it stays implicit only if any dense
    tangent can be a tangent of its leaves (`structure.free_summand`).
    """
    closed = params["call_jaxpr"]
    has_jvp = "jvp_jaxpr_fun" in params
    primitive = jex.custom_jvp_call_p if has_jvp else jex.custom_vjp_call_p
    if not any(map(_is_inexact, jax.tree_util.tree_leaves(operands))):
        with events.recording() as log:
            out = interpret(closed.jaxpr, closed.consts, operands)
        events.replay(log)
        return out
    new = retrace(closed.jaxpr, closed.consts, operands)
    places: list[Any] = list(map(_place_of_tangent, new.out))
    if None in places:
        target = [dense_struct(y) if i is None else y for y, i in zip(new.out, places, strict=True)]
        reason = f"the derivative rule of {primitive.name!r} knows dense arrays alone"
        coerce = structure.Coerce(target, primitive.name, reason)
        new = retrace(closed.jaxpr, closed.consts, operands, coerce)
        places = [i or 0 for i in places]
    events.replay(new.events)
    leaves, treedef = flatten(operands)

    def original(leaves: Sequence[Any]) -> list[Any]:
        values = treedef.unflatten(leaves)
        dense = [materialize_array(x) if is_implicit(x) else x for x in values]
        return compat.bind(primitive, dense, params)

    call = _Call(new, closed.consts, original, places)
    fun = _with_jvp(call) if has_jvp else _with_vjp(call, leaves)
    return new.rebuild(fun(*leaves))


class _Call(NamedTuple):
    """A call of such a function, as functions of the leaves of its operands.

    Attributes:
      interpreted: its body.
      consts: of the body.
      original: the function itself, called with dense operands; its results are dense.
      places: for each result of the body the leaf that takes its tangent.
    """

    interpreted: Retraced
    consts: Sequence[Any]
    original: Callable[[Sequence[Any]], list[Any]]
    places: list[int]

    def run(self, *leaves: Any) -> list[Any]:
        """The leaves of the results."""
        return _aligned(self.interpreted.fun(*self.consts, *leaves), leaves)

    def results(
        self, fun: Callable[..., list[Any]], leaves: Sequence[Any], dense: Any
    ) -> list[Any]:
        """The results that are differentiated: as the rule has them, the implicit ones as `fun` has."""
        if not any(map(is_implicit, self.interpreted.out)):
            return dense
        out = self.interpreted.rebuild(fun(*leaves))
        for y, i in zip(out, self.places, strict=True):
            if i == _REFUSED:
                materialize_array(y)  # raises the type's own error
        return [y if is_implicit(y) else d for y, d in zip(out, dense, strict=True)]

    def of_moving(self, leaves: Sequence[Any], moving: Sequence[int]) -> Callable[..., list[Any]]:
        """The original as a function of the perturbed leaves alone, so that no large zeros are made."""

        def fun(*values: Any) -> list[Any]:
            mixed = list(leaves)
            for i, value in zip(moving, values, strict=True):
                mixed[i] = value
            return self.original(mixed)

        return fun


def _with_jvp(call: _Call) -> Callable[..., list[Any]]:
    """The interpreted function with the rule of the original `jax.custom_jvp`."""
    fun = jax.custom_jvp(call.run)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, t in enumerate(tangents) if not _is_zero(t)]
        values, dots_of = (tuple(x[i] for i in moving) for x in (primals, tangents))
        dense, dots = jax.jvp(call.of_moving(primals, moving), values, dots_of)
        out = call.results(fun, primals, dense)
        tangents_of = map(structure.tangent_leaves, out, dots, call.places)
        return _aligned(flatten(out)[0], primals), [dot for leaves in tangents_of for dot in leaves]

    fun.defjvp(jvp, symbolic_zeros=True)
    return fun


def _with_vjp(call: _Call, leaves: Sequence[Any]) -> Callable[..., list[Any]]:
    """The interpreted function with the rule of the original `jax.custom_vjp`.

    A `jax.custom_jvp` around the original is less code, but has no derivative under `vmap`. The
    derivative is by all leaves, also by those that stay still. What is saved for `backward` may not
    depend on which ones move (`symbolic_zeros`): JAX keeps how it is saved in one place for all.
    """
    number_of_leaves = len(leaves)
    differentiable = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]
    fun = jax.custom_vjp(call.run)

    def forward(*leaves: Any) -> tuple[list[Any], Any]:
        moving = tuple(leaves[i] for i in differentiable)
        dense, pull_back = jax.vjp(call.of_moving(leaves, differentiable), *moving)
        return _aligned(flatten(call.results(fun, leaves, dense))[0], leaves), pull_back

    def backward(pull_back: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        sizes = [len(jax.tree_util.tree_leaves(y)) for y in call.interpreted.out]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        own = [cotangents[i + j] for i, j in zip(starts, call.places, strict=True)]
        grads = dict(zip(differentiable, pull_back(own), strict=True))
        return tuple(map(grads.get, range(number_of_leaves)))

    fun.defvjp(forward, backward)
    return fun


_aligned_p = Primitive("aligned")


def _aligned(results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Results that `vmap` maps over their first axis if any operand is mapped, and over none if not.

    `vmap` takes the mapped axes of a function's results from its body, and uses them for those of its
    rule. If a rule has another axis, or none, the values are wrong. Here body and rule are different
    programs, so that must be said.
    """
    return [_aligned_p.bind(y, *operands) for y in results]


def _batch(arrays: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, int]:
    return _aligned_p.bind(*mapped_first(arrays, axes)), 0


def _first(y: Any, *_: Any) -> Any:
    return y


_aligned_p.def_impl(_first)
_aligned_p.def_abstract_eval(_first)
ad.primitive_jvps[_aligned_p] = lambda primals, tangents: (_aligned_p.bind(*primals), tangents[0])
batching.primitive_batchers[_aligned_p] = _batch
mlir.register_lowering(_aligned_p, lambda _, y, *others: [y])


@handles(_aligned_p)
def _result(operands: Operands, params: Params) -> list[Any]:
    """The result, implicit or not. The functions that it was made for are interpreted anew."""
    return operands[:1]


def _place_of_tangent(y: Any) -> int | None:
    """The leaf of a result that takes its tangent, or None if no leaf can.

    `_REFUSED` for a type that refuses to be dense (quantities with units), which is an error only
    under differentiation.
    """
    if not is_implicit(y):
        return 0
    try:
        return structure.free_summand(y)
    except Exception:  # whatever its `materialize` raises
        return _REFUSED


def _is_inexact(leaf: Any) -> bool:
    """Whether a leaf can be differentiated; literals of the program can't."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, np.inexact))


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0
