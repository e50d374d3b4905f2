"""Rotary positions, and key and value heads that several query heads share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from haiku_implicit.core.messages import value_error
from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.core.typing import Array
from haiku_implicit.quantized.numbers.formats import repeated


@use_implicit_args
def rotate_half(x: Array) -> jax.Array:
    """Returns the halves `(x1, x2)` of the last axis as `(-x2, x1)`.

    (EasyDeL calls this a rotation of a complex array. For the complex numbers `x1 + i x2` it is the
    product with i. EasyDeL's code cuts an axis of odd length into unequal halves, here an error.)

    Args:
      x: `[..., d]`, `d` even, of any dtype; may be implicit, also in a call from outside of a model.

    Returns:
      An array `[..., d]` of the same dtype.

    Raises:
      ValueError: for an odd length, or an array without axes.

    Example:
      >>> import jax.numpy as jnp
      >>> from haiku_implicit import layers
      >>> print(layers.rotate_half(jnp.arange(4)))
      [-2 -3  0  1]
    """
    if not jnp.ndim(x) or x.shape[-1] % 2:
        raise value_error(f"x: expected a last axis of even length, got shape {list(jnp.shape(x))}")
    half = x.shape[-1] // 2
    return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)


@use_implicit_args
def apply_rotary_pos_emb(tensor: Array, sin_: Array, cos_: Array) -> jax.Array:
    """Applies rotary embeddings: rotates pairs of elements by angles that depend on the position.

    Element `i` makes a pair with element `i + d / 2` (arXiv:2104.09864 pairs neighbors). The rotated
    values of a quantized tensor are not codes with its scales: the result is dense, and is reported as
    materialized. Rotate keys before they are written into a quantized cache.

    Args:
      tensor: queries or keys, `[batch, heads, time, d]`, `d` even; may be implicit.
      sin_: the sines, `[1, 1, length, d]` (or with `batch` or `heads` for the ones), with a `length` of
        at least `time`; the first positions are used.
      cos_: the cosines, likewise.

    Returns:
      An array `[batch, heads, time, d]` of the dtype that the three promote to.

    Raises:
      ValueError: for a tensor or tables with other than four axes, an odd `d`, and tables that are
        shorter than the tensor. (EasyDeL's code fails in a broadcast for short tables.)

    Example:
      >>> import jax.numpy as jnp
      >>> from haiku_implicit import layers
      >>> angles = jnp.pi / 2 * jnp.arange(3.0)[None, None, :, None] * jnp.ones(2)
      >>> turned = layers.apply_rotary_pos_emb(
      ...     jnp.array([1.0, 0.0]) + jnp.zeros((1, 1, 3, 2)), jnp.sin(angles), jnp.cos(angles))
      >>> turned[0, 0].round().tolist()
      [[1.0, 0.0], [-0.0, 1.0], [-1.0, -0.0]]
    """
    _check_four_axes("tensor", tensor, "[batch, heads, time, d]")
    time = tensor.shape[2]
    for name, table in (("sin_", sin_), ("cos_", cos_)):
        _check_four_axes(name, table, "[1, 1, length, d]")
        if table.shape[2] < time:
            raise value_error(
                f"{name}: expected at least the {time} positions of the tensor, got shape "
                f"{list(table.shape)}; compute the table for the longest sequence"
            )
    return tensor * cos_[:, :, :time] + rotate_half(tensor) * sin_[:, :, :time]


@use_implicit_args
def repeat_kv_bnsh(x: Array, n_rep: int) -> jax.Array:
    """Repeats each key or value head for the query heads that share it, heads before time.

    A `QuantizedCache` is not copied: the result is the cache and a number (`Repeated`), and a product
    with it reads each head once. Other implicit arrays stay implicit if they have rules for it.

    Args:
      x: keys or values, `[batch, heads, time, d]`, of any dtype; may be implicit.
      n_rep: how often each head is repeated, at least 1.

    Returns:
      `[batch, heads * n_rep, time, d]`: head `i` is head `i // n_rep` of `x`.

    Raises:
      ValueError: for other than four axes, and for `n_rep` below 1.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> keys = hki.QuantizedCache.quantize(jnp.ones((1, 2, 16, 64)), 'int8', axis=-1)
      >>> repeated = hki.layers.repeat_kv_bnsh(keys, 4)
      >>> repeated.shape, repeated.nbytes == keys.nbytes
      ((1, 8, 16, 64), True)
    """
    return _repeated(x, n_rep, 1, "[batch, heads, time, d]")


@use_implicit_args
def repeat_kv_bsnh(x: Array, n_rep: int) -> jax.Array:
    """Repeats each key or value head for the query heads that share it, time before heads.

    (EasyDeL's code swaps time and heads: it returns `[batch, heads, time, d]` for `n_rep` of 1, and
    otherwise fails, because it transposes five axes by four.)

    Args:
      x: keys or values, `[batch, time, heads, d]`, of any dtype; may be implicit, as for
        `repeat_kv_bnsh`.
      n_rep: how often each head is repeated, at least 1.

    Returns:
      `[batch, time, heads * n_rep, d]`: head `i` is head `i // n_rep` of `x`.

    Raises:
      ValueError: for other than four axes, and for `n_rep` below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from haiku_implicit import layers
      >>> print(layers.repeat_kv_bsnh(jnp.arange(2).reshape(1, 1, 2, 1), 3)[0, 0, :, 0])
      [0 0 0 1 1 1]
    """
    return _repeated(x, n_rep, 2, "[batch, time, heads, d]")


def _repeated(x: Array, n_rep: int, axis: int, axes: str) -> jax.Array:
    """Repeats each entry along an axis `n_rep` times."""
    _check_four_axes("x", x, axes)
    if n_rep < 1:
        raise value_error(f"n_rep: expected at least 1, got {n_rep}")
    return x if n_rep == 1 else repeated(x, n_rep, axis)


def _check_four_axes(name: str, x: Array, axes: str) -> None:
    if jnp.ndim(x) != 4:
        raise value_error(f"{name}: expected four axes {axes}, got shape {list(jnp.shape(x))}")
