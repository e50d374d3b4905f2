"""The states of optax and Haiku that files hold without being told."""

import haiku as hk
import optax
import optax.contrib

from haiku_implicit.core.serialization import register_tree_type


def _register() -> None:
    """All public named tuples of optax, and Haiku's `LSTMState`, under their public names."""
    for module in (optax, optax.contrib):
        for name, kind in list(vars(module).items()):
            public = isinstance(kind, type) and not name.startswith("_")
            if public and issubclass(kind, tuple) and hasattr(kind, "_fields"):
                register_tree_type(kind, name=f"{module.__name__}.{name}")
    register_tree_type(hk.LSTMState, name="haiku.LSTMState")


_register()
