"""Counts the programs that JAX compiles."""

from typing import Any, Self

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts the programs that are compiled or read from JAX's persistent cache within the context.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> with Compilations() as compilations:
      ...   _ = jax.jit(lambda x: 3 * x + 1)(2.0)
      >>> compilations.count > 0
      True
    """

    def __init__(self) -> None:
        self.count = 0
        self._counts = False
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def __enter__(self) -> Self:
        self._counts = True
        return self

    def __exit__(self, *_: Any) -> None:
        self._counts = False  # JAX cannot remove a single listener

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        self.count += self._counts and event == EVENT
