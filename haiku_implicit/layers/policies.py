"""Checkpoint policies by name, and quantized products by their number of bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax

from haiku_implicit.core.compat import ragged_dot_general_p
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array, EqnParam, Primitive
from haiku_implicit.params.quantizing.training import dot_general_by_bits
from haiku_implicit.quantized.products.matmul import quantized_matmul_p

# Products that never make a dense weight from its factors.
_PRODUCTS = (jax.lax.conv_general_dilated_p, ragged_dot_general_p, quantized_matmul_p)


def _no_dequantized_saveable(primitive: Primitive, *operands: Array, **params: EqnParam) -> bool:
    """Saves the results of products, but of dense products only if not larger than the operands."""
    if primitive is not jax.lax.dot_general_p:
        return primitive in _PRODUCTS
    out = jax.eval_shape(functools.partial(primitive.bind, **params), *operands)
    return math.prod(out.shape) <= sum(math.prod(x.shape) for x in operands)


_POLICIES = vars(jax.checkpoint_policies) | {"no_dequantized_saveable": _no_dequantized_saveable}


def get_gradient_checkpoint_policy(name: str) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint(policy=)`: which values are kept for the gradient.

    Args:
      name: a policy of `jax.checkpoint_policies`: 'everything_saveable', 'nothing_saveable',
        'dots_saveable' (also 'checkpoint_dots'), 'dots_with_no_batch_dims_saveable' (also
        'checkpoint_dots_with_no_batch_dims'). Or a function there that makes a policy from names
        ('save_anything_except_these_names', 'save_any_names_but_these', 'save_only_these_names') or
        from two policies ('save_from_both_policies'). Or this library's 'no_dequantized_saveable', see
        below.

    'no_dequantized_saveable' keeps the results of products with quantized weights, of convolutions and
    ragged products, and of dense products that are not larger than their operands together; nothing
    else. So no dequantized weight is kept, since it is not the result of a product. When a LoRA becomes
    dense, the product of its factors is such a result, but it is larger than the factors (for ranks
    below half of the smaller axis). JAX's policies that keep dots recompute products with quantized
    weights.

    Returns:
      The policy, or the function that makes it.

    Raises:
      ValueError: for an unknown name. (EasyDeL's code raises a bare KeyError.)

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> policy = hki.layers.get_gradient_checkpoint_policy('no_dequantized_saveable')
      >>> w = hki.QuantizedMatrix.quantize(jnp.eye(64), 'int8')
      >>> layer = lambda x, w: jnp.sin(jnp.sin(x @ w) @ w)
      >>> run = jax.checkpoint(hki.use_implicit_args(layer), policy=policy)
      >>> _, pullback = jax.vjp(lambda x: run(x, w), jnp.ones((2, 64)))
      >>> any(y.shape == w.shape and y.dtype == w.dtype for y in jax.tree.leaves(pullback))
      False
    """
    if name not in _POLICIES:
        raise value_error(f"name: expected one of {', '.join(_POLICIES)}, got {name!r}")
    return _POLICIES[name]


def get_dot_general_by_bits(
    bits: int | None = None, mode: Literal["train", "serve", "convert"] = "train"
) -> dict[str, Any]:
    """Returns keyword arguments of a layer for products in integers of n bits, forward and backward.

    Args:
      bits: 2, 3, 4, 5, 6 or 8; None for dense products.
      mode: 'train', 'serve' or 'convert', as for `haiku_implicit.dot_general_by_bits`, which returns
        the function itself.

    Returns:
      `{'dot_general_cls': make}`; `make()` returns `dot_general_by_bits(bits, bits, mode)`, a function
      like `jax.lax.dot_general` ('convert': a function of a weight). Without bits, an empty dict.

    Raises:
      ValueError: for an unknown number of bits or mode, immediately.

    Example:
      >>> import jax.numpy as jnp
      >>> from haiku_implicit import layers
      >>> layers.get_dot_general_by_bits()
      {}
      >>> dot = layers.get_dot_general_by_bits(8)['dot_general_cls']()
      >>> numbers = (((0,), (0,)), ((), ()))
      >>> print(dot(jnp.array([1.0, 0.5]), jnp.array([[1.0], [-1.0]]), numbers).round(1))
      [0.5]
    """
    make = functools.partial(dot_general_by_bits, bits, bits, mode)
    make()  # raises for unknown arguments
    return {} if bits is None else {"dot_general_cls": make}
