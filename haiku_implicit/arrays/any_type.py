"""Rules that hold for every implicit type: what leaves a tensor's value alone acts on the leaves."""

from typing import Any

import jax

from haiku_implicit.core import compat
from haiku_implicit.core.array import ImplicitArray, flatten
from haiku_implicit.core.compat import Primitive
from haiku_implicit.core.dispatch import primitive_handler


@primitive_handler(compat.IDENTITIES)
def identity(primitive: Primitive, x: ImplicitArray, **params: Any) -> Any:
    """`copy`, `stop_gradient`, `checkpoint_name`, ...: leaf by leaf."""
    out = jax.tree.map(lambda leaf: compat.bind(primitive, [leaf], params)[0], x)
    return [out] if primitive.multiple_results else out


@primitive_handler("optimization_barrier")
def optimization_barrier(primitive: Primitive, *operands: Any) -> list[Any]:
    """One barrier over the leaves of all operands."""
    leaves, treedef = flatten(list(operands))
    return treedef.unflatten(primitive.bind(*leaves))
