"""The dtype that a layer computes in, and docstrings put together from parts."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp

from haiku_implicit.core.array import dense_struct, is_implicit

F = TypeVar("F", bound=Callable[..., Any])


def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """The dtype that arrays should be cast to: the given one, or what they promote to.

    Args:
      *args: arrays, implicit arrays, numbers or lists of numbers; a None is ignored. They are not moved
        to a device. (EasyDeL's own code does that.)
      dtype: what to return; None to infer it.
      inexact: whether it has to be floating or complex. An inferred integer dtype becomes the floating
        one that it promotes to with float32.

    Returns:
      `dtype` as it was given, or the inferred one.

    Raises:
      ValueError: if `dtype` has to be inexact and is not, or there is nothing to infer it from.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> hki.layers.canonicalize_dtype(jnp.ones(2, jnp.bfloat16), None, 1.0)
      dtype(bfloat16)
      >>> hki.layers.canonicalize_dtype(jnp.arange(3))
      dtype('float32')
    """
    if dtype is None:
        known = [_typed(x) for x in args if x is not None]
        if not known:
            raise ValueError(
                "args: expected an array to infer the dtype from, or a dtype, got none"
            )
        dtype = jnp.result_type(*known)
        if inexact and not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"dtype: expected a floating or complex one, got {jnp.dtype(dtype)}; "
            "inexact=False allows any"
        )
    return dtype


def _typed(x: Any) -> Any:
    """What `jnp.result_type` knows the dtype of."""
    if is_implicit(x):
        return dense_struct(x)
    return jnp.asarray(x) if isinstance(x, list | tuple) else x


def add_start_docstrings(*docstr: str) -> Callable[[F], F]:
    """A decorator that puts text in front of a docstring.

    Args:
      *docstr: strings; they are joined as they are, without spaces or line breaks in between.

    Returns:
      A decorator of functions and classes. It changes `__doc__` and returns what it decorates.

    Raises:
      TypeError: for anything but strings, where the decorator is made. (EasyDeL's own code fails where
        it is applied.)

    Example:
      >>> from haiku_implicit import layers
      >>> @layers.add_start_docstrings('Attention. ', 'Causal. ')
      ... def attend():
      ...   '''Over a cache.'''
      >>> attend.__doc__
      'Attention. Causal. Over a cache.'
    """
    for text in docstr:
        if not isinstance(text, str):
            raise TypeError(f"docstr: expected strings, got {text!r}")

    def decorate(fun: F) -> F:
        fun.__doc__ = "".join(docstr) + (fun.__doc__ or "")
        return fun

    return decorate
