"""Functions for the dtype of a layer's computation, and for docstrings made of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp

from haiku_implicit.core.array import dense_struct, is_implicit
from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.typing import Array, DType

F = TypeVar("F", bound=Callable[..., Any])


def canonicalize_dtype(*args: Any, dtype: DType | None = None, inexact: bool = True) -> Any:
    """Returns the dtype to cast arrays to: the given dtype, or the dtype that they promote to.

    Args:
      *args: arrays, implicit arrays, numbers or lists of numbers; a None is ignored. They are not moved
        to a device. (EasyDeL's code does that.)
      dtype: the dtype to return; None to infer it.
      inexact: whether the dtype has to be floating or complex. An inferred integer dtype becomes the
        floating dtype that it promotes to with float32.

    Returns:
      `dtype` unchanged, or the inferred dtype.

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
            raise value_error(
                "args: expected an array to infer the dtype from, or a dtype, got none"
            )
        dtype = jnp.result_type(*known)
        if inexact and not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise value_error(
            f"dtype: expected a floating or complex one, got {jnp.dtype(dtype)}; "
            "inexact=False allows any"
        )
    return dtype


def _typed(x: Array) -> Array:
    """Returns `x` in a form that `jnp.result_type` accepts."""
    if is_implicit(x):
        return dense_struct(x)
    return jnp.asarray(x) if isinstance(x, list | tuple) else x


def add_start_docstrings(*docstr: str) -> Callable[[F], F]:
    """Returns a decorator that puts text in front of a docstring.

    Args:
      *docstr: strings; they are joined without spaces or line breaks in between.

    Returns:
      A decorator of functions and classes. It changes `__doc__` and returns the decorated object.

    Raises:
      TypeError: for anything other than strings, when the decorator is made. (EasyDeL's code fails when
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
            raise type_error(f"docstr: expected strings, got {text!r}")

    def decorate(fun: F) -> F:
        fun.__doc__ = "".join(docstr) + (fun.__doc__ or "")
        return fun

    return decorate
