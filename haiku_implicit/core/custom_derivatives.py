"""Functions with custom derivative rules (`higher_order.py` has the other primitives with a jaxpr).

The body of a `jax.custom_jvp` or `jax.custom_vjp` is interpreted. Under differentiation its rule must
be used, which is written for dense arrays: the derivative of f(W + AB) with respect to A differs from
the derivative of f. So the operands go through `materialize` and its derivative, and the rule sees
dense values and tangents.

Whether a call is differentiated, and by which operands, is known only when JAX transforms it. So a call
is one primitive, `interpreted_call`. When JAX differentiates it, JAX says which leaves have tangents,
and the original function gets tangents for exactly these. So its rule gets the same information as in a
dense program (`symbolic_zeros`), and arrays that it closes over stay constant.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.core import primitives as jex
from jax.interpreters import ad, batching, mlir

from haiku_implicit.core import compat, structure
from haiku_implicit.core import materialization as events
from haiku_implicit.core.array import dense_struct, flatten, is_implicit
from haiku_implicit.core.higher_order import Operands, handles, retrace
from haiku_implicit.core.interpreter import densify, interpret, materialize_array
from haiku_implicit.core.typing import Array, Aval, EqnParams

_REFUSED = -1


@handles(jex.custom_jvp_call_p, jex.custom_vjp_call_p)
def custom_derivative(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs `jax.custom_jvp` and `jax.custom_vjp`, with their rules for the same derivatives."""
    has_jvp = "jvp_jaxpr_fun" in params
    primitive = jex.custom_jvp_call_p if has_jvp else jex.custom_vjp_call_p
    original = functools.partial(compat.bind, primitive, params=params)
    body: ClosedJaxpr = params["call_jaxpr"]
    if any(isinstance(effect, compat.CheckEffect) for effect in body.effects):
        reason = "its checks are found by checkify, which knows JAX's own primitives alone"
        return original([densify(x, primitive.name, reason) for x in operands])
    return _interpreted(body, original, primitive.name, operands)


def _interpreted(
    body: ClosedJaxpr, original: Callable[[list[Array]], list[Array]], name: str, operands: Operands
) -> list[Array]:
    """Interprets a function with a custom derivative rule on operands, some of them implicit.

    It is not known here whether a result will be differentiated. So a result stays implicit only if
    its leaves can take any dense tangent (`structure.free_summand`).

    Args:
      body: the jaxpr of the function.
      original: the function itself, of a list of dense operands, for derivatives.
      name: the name of its primitive.
      operands: its operands.
    """
    leaves, treedef = flatten(operands)
    if not any(map(_is_inexact, leaves)):
        with events.recording() as log:
            out = interpret(body.jaxpr, body.consts, operands)
        events.replay(log)
        return out
    new = retrace(body.jaxpr, body.consts, operands)
    places: list[Any] = list(map(_place_of_tangent, new.out))
    if None in places:
        target = [dense_struct(y) if i is None else y for y, i in zip(new.out, places, strict=True)]
        reason = f"the derivative rule of {name!r} knows dense arrays alone"
        new = retrace(body.jaxpr, body.consts, operands, structure.Coerce(target, name, reason))
        places = [i or 0 for i in places]
    events.replay(new.events)
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    literals = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]

    def run(values: list[Array]) -> list[Array]:
        return new.fun(*body.consts, *_with(literals, arrays, values))

    def with_rule(values: list[Array]) -> list[Array]:
        for y, place in zip(new.out, places, strict=True):
            if place == _REFUSED:
                jax.eval_shape(materialize_array, y)  # raises the type's own error
        xs = treedef.unflatten(_with(literals, arrays, values))
        return original([materialize_array(x) if is_implicit(x) else x for x in xs])

    starts = np.cumsum([0, *(len(jax.tree_util.tree_leaves(y)) for y in new.out)]).tolist()
    takers = [start + i for start, i in zip(starts, places, strict=False)]
    call = Call(name, run, with_rule, list(map(is_implicit, new.out)), takers)
    return new.rebuild(call_p.bind(*(leaves[i] for i in arrays), call=call))


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a function with a custom rule, as functions of the arrays in its operands.

    Attributes:
      name: the name of the original primitive.
      run: the interpreted body, which returns the leaves of the results.
      original: the function itself, whose results are dense.
      is_implicit: for each result, whether it is implicit in `run`.
      takers: for each result, the index of the leaf that takes its tangent.
      is_still: whether the results do not have tangents.
      jaxprs: the interpreted body, by the types of the arrays.
    """

    name: str
    run: Callable[[list[Array]], list[Array]]
    original: Callable[[list[Array]], list[Array]]
    is_implicit: list[bool]
    takers: list[int]
    is_still: bool = False
    jaxprs: dict[Any, ClosedJaxpr] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def still(self) -> "Call":
        """This call, with results that do not have tangents."""
        return dataclasses.replace(self, is_still=True)

    def mapped(self, **options: Any) -> "Call":
        """This call under `jax.vmap` with these options."""
        run, original = jax.vmap(self.run, **options), jax.vmap(self.original, **options)
        return dataclasses.replace(self, run=run, original=original, jaxprs={})

    def jaxpr(self, avals: tuple[Aval, ...]) -> ClosedJaxpr:
        """The interpreted body for arrays of these types."""
        if avals not in self.jaxprs:
            self.jaxprs[avals] = jax.make_jaxpr(self.run)(list(avals))
        return self.jaxprs[avals]


call_p = Primitive("interpreted_call")
call_p.multiple_results = True


def _run(*arrays: Array, call: Call) -> list[Array]:
    return call.run(list(arrays))


def _abstract(*avals: Aval, call: Call) -> tuple[list[Any], Any]:
    closed = call.jaxpr(avals)
    return closed.out_avals, closed.effects


def _jvp(primals: Sequence[Array], tangents: Sequence[Array], *, call: Call) -> Any:
    if call.is_still:
        leaves = call_p.bind(*primals, call=call)
        return leaves, list(map(_zero, leaves))
    dense, dots = derivative(call.original, primals, tangents)
    if not any(call.is_implicit):
        return dense, dots
    # If the derivative is differentiated again, the derivatives pass through the dense results.
    leaves = call_p.bind(*primals, call=call.still)
    leaf_dots = list(map(_zero, leaves))
    for i, implicit, y, dot in zip(call.takers, call.is_implicit, dense, dots, strict=True):
        leaves[i], leaf_dots[i] = _moving_as(leaves[i], y) if implicit else y, dot
    return leaves, leaf_dots


@jax.custom_jvp
def _moving_as(leaf: jax.Array, y: jax.Array) -> jax.Array:
    """Returns `leaf`, with the derivatives of `y`."""
    return leaf


@_moving_as.defjvp
def _moving_as_jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Any, Any]:
    return _moving_as(*primals), tangents[1]


def derivative(
    fun: Callable[[list[Array]], list[Array]], primals: Sequence[Array], tangents: Sequence[Array]
) -> tuple[list[Array], list[Array]]:
    """`jax.jvp` that takes and returns `ad.Zero` for the tangents of values that do not move."""
    moving = [i for i, t in enumerate(tangents) if not _is_zero(t)]
    moved: set[int] = set()

    def of_moving(*values: Array) -> list[Array]:
        results = fun(_with(primals, moving, values))
        return [_noting(moved.add, i)(y) for i, y in enumerate(results)]

    values, their_dots = (tuple(x[i] for i in moving) for x in (primals, tangents))
    out, dots = jax.jvp(of_moving, values, their_dots)
    pairs = enumerate(zip(out, dots, strict=True))
    return out, [dot if i in moved else _zero(y) for i, (y, dot) in pairs]


def _noting(note: Callable[[int], None], i: int) -> Callable[[Any], Any]:
    """An identity that calls `note(i)` when it is differentiated with a tangent."""
    same = jax.custom_jvp(lambda y: y)

    def jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Any, Any]:
        note(i)
        return primals[0], tangents[0]

    same.defjvp(jvp)
    return same


def _batch(axis: Any, arrays: Sequence[Array], dims: Sequence[Array], *, call: Call) -> Any:
    names = dict(axis_name=axis.name, spmd_axis_name=axis.spmd_name)
    new = call.mapped(in_axes=(list(dims),), out_axes=0, axis_size=axis.size, **names)
    out = call_p.bind(*arrays, call=new)
    return out, [0] * len(out)


call_p.def_impl(_run)
call_p.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[call_p] = _jvp
batching.fancy_primitive_batchers[call_p] = _batch
mlir.register_lowering(call_p, mlir.lower_fun(_run, multiple_results=True))


@handles(call_p)
def interpreted_again(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs a call of an interpreted program within a program that is interpreted now."""
    call: Call = params["call"]
    body = jax.make_jaxpr(lambda *arrays: call.run(list(arrays)))(*map(dense_struct, operands))

    def original(dense: Sequence[Array]) -> list[Array]:
        return call_p.bind(*dense, call=call)

    return _interpreted(body, original, call.name, operands)


def _with(values: Sequence[Array], places: Sequence[int], new: Sequence[Array]) -> list[Array]:
    """Returns a copy of the values with new ones at these positions."""
    mixed = list(values)
    for i, value in zip(places, new, strict=True):
        mixed[i] = value
    return mixed


def _place_of_tangent(y: Array) -> int | None:
    """The index of the leaf of a result that takes its tangent, or None if no leaf can.

    It is `_REFUSED` for a type that refuses to be dense (quantities with units), which is an error
    only under differentiation.
    """
    if not is_implicit(y):
        return 0
    try:
        return structure.free_summand(y)
    except Exception:  # any error that its `materialize` raises
        return _REFUSED


def _is_inexact(leaf: Array) -> bool:
    """Whether a leaf can be differentiated; literals of the program can't."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, np.inexact))


def _zero(y: Array) -> ad.Zero:
    return ad.Zero(jax.typeof(y).to_tangent_aval())


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0
