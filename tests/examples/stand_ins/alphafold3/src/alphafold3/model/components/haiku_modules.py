"""Linear layers of any number of axes by `einsum`, and norms whose parameters are vectors."""

import contextlib
import string

import haiku as hk
import jax.numpy as jnp


def weights_of(x, sizes, name=None):
    """A weight `[inputs, *sizes]`, outside of any module of its own."""
    init = hk.initializers.TruncatedNormal(x.shape[-1] ** -0.5)
    with hk.name_scope(name) if name else contextlib.nullcontext():
        return hk.get_parameter("weights", (x.shape[-1], *sizes), x.dtype, init)


class Linear(hk.Module):
    def __init__(self, sizes, *, use_bias=False, transpose_weights=False, name):
        super().__init__(name=name)
        self.sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        self.use_bias, self.transpose_weights = use_bias, transpose_weights

    def __call__(self, x):
        letters = string.ascii_lowercase[1 : len(self.sizes) + 1]
        if self.transpose_weights:
            init = hk.initializers.TruncatedNormal(x.shape[-1] ** -0.5)
            weights = hk.get_parameter("weights", (*self.sizes, x.shape[-1]), x.dtype, init)
            out = jnp.einsum(f"...a, {letters}a->...{letters}", x, weights)
        else:
            out = jnp.einsum(f"...a, a{letters}->...{letters}", x, weights_of(x, self.sizes))
        if self.use_bias:
            out += hk.get_parameter("bias", self.sizes, x.dtype, hk.initializers.Constant(0.5))
        return out


class LayerNorm(hk.LayerNorm):
    def __init__(self, *, create_offset=True, name):
        super().__init__(axis=-1, create_scale=False, create_offset=False, name=name)
        self.own_offset = create_offset

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        scale = hk.get_parameter("scale", x.shape[-1:], wide.dtype, jnp.ones)
        offset = None
        if self.own_offset:
            offset = hk.get_parameter("offset", x.shape[-1:], wide.dtype, jnp.zeros)
        shape = (1,) * (x.ndim - 1) + x.shape[-1:]
        offset = None if offset is None else offset.reshape(shape)
        return super().__call__(wide, scale=scale.reshape(shape), offset=offset).astype(x.dtype)
