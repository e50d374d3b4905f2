"""Counts floating-point operations of equations, from shapes."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from haiku_implicit.mox.program.tree import Atom, Equation, Node


def flops(node: Node) -> int:
    """Counts the floating-point operations of a node.

    - A product (`dot_general`, a convolution) takes two for each pair of numbers that it multiplies;
      padding of a convolution is not counted.
    - A reduction takes one for each number that it adds to another.
    - Equations that only move data take none.
    - Other equations take one for each element of their results: `exp` counts as much as `add`.
    - The body of a scan counts once per step, and the body of a `while` once, because the number of its
      steps is unknown. A condition counts as its most expensive branch.

    The result equals XLA's (`jax.jit(f).lower(x).cost_analysis()`, flops plus transcendentals), except
    for loops, whose bodies XLA counts once, cumulative sums and random numbers.
    """
    if not isinstance(node, Equation):
        return sum(map(flops, node.children))
    name = node.primitive.name
    if name in _MOVES:
        return 0
    if name in _RULES:
        return _RULES[name](node.eqn)
    if node.bodies:
        of_bodies = [flops(body) for body in node.bodies]
        return times(node) * (max(of_bodies) if name == "cond" else sum(of_bodies))
    return sum(map(_size, node.outputs))


def times(node: Equation) -> int:
    """How often the bodies of an equation run; 1 if that is unknown."""
    return int(node.eqn.params["length"]) if node.primitive.name == "scan" else 1


def label_of_loop(node: Equation) -> str:
    """The primitive of an equation with bodies, and how often they run: `scan × 12`."""
    number = times(node)
    return f"{node.primitive.name} × {number}" if number != 1 else str(node.primitive.name)


def _size(atom: Atom) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _of_dot(eqn: Any) -> int:
    """Counts a product; in a ragged one, each row is multiplied by one of the matrices."""
    numbers = eqn.params.get("dimension_numbers")
    numbers = numbers or eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (contracted, _), _ = numbers
    shape = eqn.invars[0].aval.shape
    return 2 * _size(eqn.outvars[0]) * math.prod(shape[i] for i in contracted)


def _of_conv(eqn: Any) -> int:
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs, out = (x.aval.shape for x in (*eqn.invars, *eqn.outvars))
    pairs = lhs[numbers.lhs_spec[0]] // params["batch_group_count"]
    pairs *= rhs[numbers.rhs_spec[0]] * rhs[numbers.rhs_spec[1]]
    axes = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    windows = zip(params["window_strides"], params["padding"], strict=True)
    dilations = zip(params["lhs_dilation"], params["rhs_dilation"], strict=True)
    each = zip(axes, windows, dilations, strict=True)
    for (i, j, k), (stride, (low, _)), (of_lhs, of_rhs) in each:
        # The pairs of a kernel's and a result's position that meet a number, not padding.
        at = np.arange(out[k])[:, None] * stride + np.arange(rhs[j]) * of_rhs - low
        pairs *= int(((at >= 0) & (at % of_lhs == 0) & (at // of_lhs < lhs[i])).sum())
    return 2 * pairs


def _of_reduction(eqn: JaxprEqn) -> int:
    return sum(map(_size, eqn.invars)) - sum(map(_size, eqn.outvars))


def _of_windows(eqn: JaxprEqn) -> int:
    return _size(eqn.outvars[0]) * (math.prod(eqn.params["window_dimensions"]) - 1)


def _of_scatter(eqn: JaxprEqn) -> int:
    return _size(eqn.invars[-1])


_MOVES = frozenset(
    "all_gather bitcast_convert_type broadcast_in_dim concatenate copy copy_p device_put dynamic_slice "
    "dynamic_update_slice expand_dims gather iota optimization_barrier pad pvary random_seed "
    "random_unwrap random_wrap reshape rev scatter sharding_constraint slice split squeeze "
    "stop_gradient transpose".split()
)

_RULES: dict[str, Callable[[Any], int]] = {
    "dot_general": _of_dot,
    "ragged_dot_general": _of_dot,
    "conv_general_dilated": _of_conv,
    **dict.fromkeys(
        "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
        "reduce_xor".split(),
        _of_reduction,
    ),
    **dict.fromkeys(
        "reduce_window reduce_window_max reduce_window_min reduce_window_sum".split(), _of_windows
    ),
    **dict.fromkeys("scatter-add scatter-mul scatter-min scatter-max".split(), _of_scatter),
}
