"""Checks of constructors by chex's assertions, within the library's own sentences."""

import contextlib
import re
from collections.abc import Iterator

_PREFIX = re.compile(r"\[Chex\] Assertion (\w+) failed:")


@contextlib.contextmanager
def expecting(sentence: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Raises what chex asserts within it as an error of the library.

    Args:
      sentence: what was expected, what was given, and the way out. What chex says follows it in
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
