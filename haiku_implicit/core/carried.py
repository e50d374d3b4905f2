"""`Carried`: a Python value that a traced function returns with its arrays."""

from typing import Any

import jax


class Carried:
    """A pytree without leaves that holds a Python value; its static data is the object itself."""

    def __init__(self, value: Any):
        self.value = value

    # JAX's caches keep structures. Equal tuples of events (mostly empty ones) share one entry there.
    # Anything other than a tuple (of events) is compared by identity.
    def __eq__(self, other: object) -> bool:
        if self is other or not (isinstance(other, Carried) and type(self.value) is tuple):
            return self is other
        return type(other.value) is tuple and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value) if type(self.value) is tuple else object.__hash__(self)


jax.tree_util.register_pytree_node(Carried, lambda x: ((), x), lambda x, _: x)
