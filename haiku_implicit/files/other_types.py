"""The types of Haiku and optax that files may hold: they register themselves."""

import sys
from typing import Any

import haiku as hk
import optax
import optax.contrib

from haiku_implicit.core.serialization import register_tree_type


def _named_tuples() -> dict[str, Any]:
    """All named tuples in optax by name, also private ones such as the states of `rmsprop`.

    Files name a type `optax.Name`, without its module, since it may move.
    """
    own = [name for name in sys.modules if name.partition(".")[0] == "optax"]
    found: dict[str, Any] = {}
    for name in sorted(own, key=lambda name: (name not in ("optax", "optax.contrib"), name)):
        for kind in list(vars(sys.modules[name]).values()):
            named = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
            if named and kind.__module__.partition(".")[0] == "optax":
                found.setdefault(kind.__qualname__, kind)
    return found


for _name, _kind in _named_tuples().items():
    register_tree_type(_kind, name=f"{optax.__name__}.{_name}")
register_tree_type(hk.LSTMState, name="haiku.LSTMState")
