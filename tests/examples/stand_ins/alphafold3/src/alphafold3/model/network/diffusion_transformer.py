"""Blocks that are conditioned, in stacks of stacks of layers."""

import haiku as hk
import jax
import jax.numpy as jnp

from alphafold3.model import model_config
from alphafold3.model.components import haiku_modules as hm


def conditioned_norm(x, condition, name):
    x = hk.LayerNorm(-1, False, False, name=f"{name}layer_norm")(x)
    condition = hm.LayerNorm(create_offset=False, name=f"{name}cond_layer_norm")(condition)
    scale = hm.Linear(x.shape[-1], use_bias=True, name=f"{name}cond_scale")(condition)
    return jax.nn.sigmoid(scale) * x + hm.Linear(x.shape[-1], name=f"{name}cond_bias")(condition)


def transition(x, factor, condition, name):
    """A gated unit, whose weight is one that is seen as `[inputs, 2, outputs]`."""
    hidden = factor * x.shape[-1]
    h = conditioned_norm(x, condition, f"{name}ffw_")
    weights = hm.weights_of(h, (2 * hidden,), f"{name}ffw_transition1")
    weights = jnp.reshape(weights, (len(weights), 2, hidden))
    gate, h = jnp.moveaxis(jnp.einsum("...c,cgh->...gh", h, weights), -2, 0)
    h = hm.Linear(x.shape[-1], name=f"{name}ffw_transition2")(jax.nn.swish(gate) * h)
    return (
        jax.nn.sigmoid(hm.Linear(x.shape[-1], use_bias=True, name=f"{name}ffw_cond")(condition)) * h
    )


def self_attention(x, mask, pair_logits, num_head, condition, name):
    x = conditioned_norm(x, condition, name)
    shape = num_head, x.shape[-1] // num_head
    q = hm.Linear(shape, use_bias=True, name=f"{name}q_projection")(x)
    k, v = (hm.Linear(shape, name=f"{name}{n}_projection")(x) for n in "kv")
    logits = jnp.einsum("qhc,khc->hqk", q * shape[1] ** -0.5, k).astype(jnp.float32)
    logits += 1e9 * (mask - 1)[None, None] + pair_logits
    out = jnp.einsum("hqk,khc->qhc", jax.nn.softmax(logits).astype(x.dtype), v)
    out = out.reshape(x.shape) * jax.nn.sigmoid(
        hm.Linear(x.shape[-1], name=f"{name}gating_query")(x)
    )
    return hm.Linear(x.shape[-1], name=f"{name}transition2")(out)


class Transformer(hk.Module):
    Config = model_config.Stack

    def __init__(self, config, global_config, name="transformer"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, act, mask, single_cond, pair_cond):
        config = self.config

        def block(act, logits):
            act += self_attention(act, mask, logits, config.num_head, single_cond, self.name)
            act += transition(act, config.num_intermediate_factor, single_cond, self.name)
            return act, None

        pair = hm.LayerNorm(create_offset=False, name="pair_input_layer_norm")(pair_cond)
        size = config.super_block_size

        def super_block(act):
            logits = hm.Linear((size, config.num_head), name="pair_logits_projection")(pair)
            stack = hk.layer_stack(size, with_per_layer_inputs=True)
            return stack(block)(act, jnp.transpose(logits, (2, 3, 0, 1)))[0]

        return hk.layer_stack(config.num_blocks // size)(super_block)(act)
