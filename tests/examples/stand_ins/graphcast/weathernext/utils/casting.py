"""A predictor that computes in bfloat16, with parameters in float32."""

import contextlib

import haiku as hk
import jax
import jax.numpy as jnp


def _create(create, shape, dtype, init, context):
    return create(shape, jnp.float32 if dtype == jnp.bfloat16 else dtype, init)


def _get(get, value, context):
    if context.original_dtype == jnp.bfloat16:
        assert value.dtype == jnp.float32
        value = value.astype(jnp.bfloat16)
    return get(value)


class Bfloat16Cast:
    def __init__(self, predictor, enabled=True):
        self.predictor, self.enabled = predictor, enabled

    def loss_and_predictions(self, *datasets):
        dtype = jnp.bfloat16 if self.enabled else jnp.float32
        datasets = jax.tree.map(lambda x: x.astype(dtype), datasets)
        with contextlib.ExitStack() as stack:
            if self.enabled:
                stack.enter_context(hk.custom_creator(_create, state=True))
                stack.enter_context(hk.custom_getter(_get, state=True))
            found = self.predictor.loss_and_predictions(*datasets)
        return jax.tree.map(lambda x: x.astype(jnp.float32), found)
