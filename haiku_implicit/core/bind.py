"""`bind`: runs a primitive on dense operands, and lets JAX differentiate and batch it only once."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad, partial_eval

from haiku_implicit.core import compat
from haiku_implicit.core.typing import Array, EqnParams, Primitive


def bind(primitive: Primitive, operands: Sequence[Array], params: EqnParams) -> list[Array]:
    """Runs a primitive on dense operands.

    Under differentiation or `vmap`, JAX transforms a bare primitive again at every use, but a jitted
    function only once. The functions of `jax.numpy` are jitted for that reason. A jaxpr holds only
    their primitives, so each primitive is jitted here (`docs/benchmarks.md`).
    """
    if primitive in DIFFERENTIABLE and any(map(_is_transformed, operands)):
        static = tuple(params.items())
        if is_hashable(static):
            return _jitted_primitive(primitive)(static, *operands)
    return compat.bind(primitive, operands, params)


def is_hashable(x: Any) -> bool:
    """Whether a value, such as the parameters of a primitive, can be static.

    Callers branch on the result, not in a handler, which would chain later errors to a TypeError.
    """
    try:
        hash(x)
    except TypeError:
        return False
    return True


# JAX's own primitives with a derivative. (A user's primitive may lack a lowering, which jit needs.)
DIFFERENTIABLE = {
    primitive
    for name in dir(jax.lax)
    if name.endswith("_p") and (primitive := getattr(jax.lax, name)) in ad.primitive_jvps
}


def _is_transformed(x: Any) -> bool:
    """Whether a value is traced for a transformation, not only to make a jaxpr."""
    return isinstance(x, jax.core.Tracer) and not isinstance(x, partial_eval.DynamicJaxprTracer)


@functools.lru_cache(maxsize=4096)
def _jitted_primitive(primitive: Primitive) -> Any:
    def fun(params: tuple[tuple[str, Any], ...], *operands: Array) -> list[Array]:
        return compat.bind(primitive, operands, dict(params))

    fun.__name__ = fun.__qualname__ = primitive.name
    return jax.jit(fun, static_argnums=0, inline=compat.INLINE)
