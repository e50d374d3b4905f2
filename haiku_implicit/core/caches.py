"""Values beside traces: `kept` caches one for a jaxpr, `Carried` returns one from a traced function."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
from jax.extend.core import Jaxpr

T = TypeVar("T")

# JAX drops a jaxpr with the function that it was traced from, or in `jax.clear_caches()`, and the
# values here are dropped with it. So no value may hold its own jaxpr.
_kept: weakref.WeakKeyDictionary[Jaxpr, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
# Beyond this number of jaxprs, or of entries of one jaxpr, the cache is cleared.
_MOST = 4096


def kept(jaxpr: Jaxpr, key: Hashable, make: Callable[[], T]) -> T:
    """Returns the result of the first call of `make` for this jaxpr and key.

    Args:
      jaxpr: the jaxpr that the result is computed from. The result must not hold it.
      key: the name of the result, and its other dependencies. It must not hold the jaxpr either.
      make: computes the result.
    """
    own = _kept.get(jaxpr)
    if own is None or len(own) > _MOST:
        if len(_kept) > _MOST:
            _kept.clear()
        own = _kept[jaxpr] = {}
    if key in own:
        return own[key]
    found = own[key] = make()  # two threads may both do this; both results are right
    return found


class Carried:
    """A pytree without leaves that holds a Python value; its static data is the object itself."""

    def __init__(self, value: Any):
        self.value = value
        # JAX's caches keep structures. Equal tuples of events (mostly empty ones) share one entry
        # there. Anything other than a tuple (of events) is compared by identity.
        self._key = value if type(value) is tuple else id(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Carried) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


jax.tree_util.register_pytree_node(Carried, lambda x: ((), x), lambda x, _: x)
