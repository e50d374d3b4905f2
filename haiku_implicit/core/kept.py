"""What is computed once for a jaxpr, and kept for as long as there is that jaxpr."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from jax.extend.core import Jaxpr

T = TypeVar("T")

# JAX drops a jaxpr with the function that it was traced from, or in `jax.clear_caches()`, and what is
# kept here goes with it. So nothing in here may hold its own jaxpr.
_kept: weakref.WeakKeyDictionary[Jaxpr, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
# Beyond so many jaxprs, or entries of one, all begins anew.
_MOST = 4096


def kept(jaxpr: Jaxpr, key: Hashable, make: Callable[[], T]) -> T:
    """What `make` returned when it was first asked for.

    Args:
      jaxpr: what it is computed of. The result may not hold it.
      key: what it is, and what else it depends on. It may not hold the jaxpr either.
      make: computes it.
    """
    own = _kept.get(jaxpr)
    if own is None or len(own) > _MOST:
        if len(_kept) > _MOST:
            _kept.clear()
        own = _kept[jaxpr] = {}
    if key in own:
        return own[key]
    found = own[key] = make()  # two threads may both do this, and each has a result that is right
    return found
