"""Numbers that a jaxpr holds as literals. Rules can read them, and operations on them are folded."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from haiku_implicit.core import compat
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.bind import DIFFERENTIABLE
from haiku_implicit.core.typing import Array


@contextlib.contextmanager
def at_trace_time() -> Iterator[None]:
    """A block whose operations on a program's numbers run immediately, while it is traced.

    The numbers are compiled in, so `jax.transfer_guard` should not count them as transfers. (In a
    `shard_map` that is not compiled, `jax.ensure_compile_time_eval` would still give tracers.)
    """
    with jax.core.eval_context(), jax.transfer_guard("allow"):
        yield


@dataclasses.dataclass(frozen=True)
class LiteralNumber:
    """A number that a jaxpr holds as a literal, hashable by dtype, bits and weak type.

    Attributes:
      value: the literal itself.
    """

    dtype: np.dtype
    data: bytes
    weak_type: bool
    value: Any = dataclasses.field(compare=False)

    def array(self) -> jax.Array:
        value = np.frombuffer(self.data, self.dtype).reshape(())
        weak = jnp.asarray(value.item()) if self.weak_type else None
        return jnp.asarray(value) if weak is None or weak.dtype != self.dtype else weak


def as_literal(x: Array) -> LiteralNumber | None:
    if is_implicit(x) or isinstance(x, jax.Array | jax.ShapeDtypeStruct) or np.ndim(x):
        return None  # NumPy arrays with axes are data: they may be large, and are not compared
    if compat.hi_type(x) is not None:
        return None
    dtype = np.dtype(getattr(x, "dtype", jnp.result_type(x)))
    # Bare Python numbers (JAX's own subclasses of them included) are weakly typed.
    bare = isinstance(x, int | float | complex) and not isinstance(x, np.generic)
    weak = bool(getattr(x, "weak_type", bare))
    return LiteralNumber(dtype, np.asarray(x, dtype).tobytes(), weak, x)


def are_literals(eqn: JaxprEqn, operands: Sequence[Array]) -> bool:
    """Whether an equation computes numbers only from literals, as `jnp.clip` casts its limits."""
    return (
        len(operands) > 0
        and all(isinstance(v.aval, jax.core.ShapedArray) and not v.aval.shape for v in eqn.outvars)
        and not any(isinstance(x, jax.Array) or np.ndim(x) for x in operands)
        and eqn.primitive in DIFFERENTIABLE
    )


def fold(eqn: JaxprEqn, operands: Sequence[Array]) -> list[Array]:
    """Runs an equation on literals, and returns the results as literals."""
    with at_trace_time():
        results = list(map(jnp.asarray, compat.bind(eqn.primitive, operands, eqn.params)))
        return [x.item() if x.weak_type else np.asarray(x) for x in results]


def with_literals(literals: Sequence[Array], operands: Sequence[Array]) -> list[Array]:
    """Makes arrays of a rule's operands; literals become concrete arrays, which a rule can read."""
    with at_trace_time():
        known = [x and x.array() for x in literals]
    mixed = [y if x is None else x for x, y in zip(known, operands, strict=True)]
    return [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in mixed]
