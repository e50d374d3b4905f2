"""Parameters in bfloat16, by a getter."""

import contextlib

import haiku as hk
import jax.numpy as jnp


@contextlib.contextmanager
def bfloat16_context():
    def getter(next_getter, value, context):
        half = context.original_dtype == jnp.bfloat16
        return next_getter(value.astype(jnp.bfloat16) if half else value)

    with hk.custom_getter(getter):
        yield
