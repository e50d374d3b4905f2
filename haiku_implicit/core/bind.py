"""Running a primitive on dense operands, so that differentiating and batching it is worked out once."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad, partial_eval

from haiku_implicit.core import compat


def bind(primitive: compat.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Runs a primitive on dense operands.

    Under differentiation or `vmap` JAX works out anew, at every use, what becomes of a primitive,
    but once only for a jitted function. The functions of `jax.numpy` are jitted for that, and the
    equations of a jaxpr, which are what is left of them, get it back here (`docs/benchmarks.md`).
    """
    if primitive in DIFFERENTIABLE and any(map(_is_transformed, operands)):
        try:
            fun = _jitted_primitive(primitive, tuple(params.items()))
        except TypeError:  # parameters that are not hashable
            return compat.bind(primitive, operands, params)
        return fun(*operands)
    return compat.bind(primitive, operands, params)


# JAX's own primitives with a derivative. (One of the user's may have no lowering, which jit needs.)
DIFFERENTIABLE = {
    primitive
    for name in dir(jax.lax)
    if name.endswith("_p") and (primitive := getattr(jax.lax, name)) in ad.primitive_jvps
}


def _is_transformed(x: Any) -> bool:
    """Whether a value is traced by something else than the making of a jaxpr."""
    return isinstance(x, jax.core.Tracer) and not isinstance(x, partial_eval.DynamicJaxprTracer)


@functools.lru_cache(maxsize=4096)
def _jitted_primitive(primitive: compat.Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    def fun(*operands: Any) -> list[Any]:
        return compat.bind(primitive, operands, dict(params))

    fun.__name__ = fun.__qualname__ = primitive.name
    return jax.jit(fun, inline=compat.INLINE)
