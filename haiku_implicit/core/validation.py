"""Checks of constructors by chex's assertions, with error messages of this library."""

import contextlib
import re
from collections.abc import Iterator

_PREFIX = re.compile(r"\[Chex\] Assertion (\w+) failed:")


@contextlib.contextmanager
def expecting(sentence: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Turns a failed assertion of chex in a `with` block into an error of this library.

    Args:
      sentence: the expected value, the given value, and the way out. The message of chex follows in
        parentheses, on the same line.
      error: the type of the error.

    Example:
      >>> import chex, jax.numpy as jnp
      >>> with expecting("w: expected a matrix, got shape [3]"):
      ...   chex.assert_rank(jnp.ones(3), 2)
      Traceback (most recent call last):
      ...
      ValueError: w: expected a matrix, got shape [3] (chex.assert_rank: Error in rank ...
    """
    try:
        yield
    except AssertionError as failed:
        said = _PREFIX.sub(r"chex.\1:", " ".join(str(failed).split()))
        raise error(f"{sentence} ({said})") from None
