"""Edits of parameters one by one, as a model makes or reads them."""

import contextlib
import contextvars
from collections.abc import Iterator

# While an edit sees one parameter as its whole tree: the kinds of warnings that it has given already.
_said: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("said", default=None)


@contextlib.contextmanager
def editing_one_by_one(said: set[str]) -> Iterator[None]:
    """Lets edits run on trees of one parameter, out of a model.

    In such a tree, targets may match nothing, and no axis stacks layers, since Haiku stacks them later.

    Args:
      said: the kinds of warnings given for earlier parameters. Each kind is given once.
    """
    token = _said.set(said)
    try:
        yield
    finally:
        _said.reset(token)


def is_one_of_many() -> bool:
    """Whether an edit is running whose tree is one of the parameters of a model."""
    return _said.get() is not None


def is_news(kind: str) -> bool:
    """Whether to give a warning of this kind: for one of many parameters, only the first time."""
    said = _said.get()
    if said is None:
        return True
    new = kind not in said
    said.add(kind)
    return new
