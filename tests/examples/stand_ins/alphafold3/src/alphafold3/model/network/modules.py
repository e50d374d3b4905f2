"""One layer of the Pairformer."""

import haiku as hk
import jax
import jax.numpy as jnp

from alphafold3.model.components import haiku_modules as hm
from alphafold3.model.network import diffusion_transformer


class TriangleMultiplication(hk.Module):
    """The weights of a projection and of its gate are used as one array."""

    def __call__(self, act, mask):
        act = hm.LayerNorm(name="left_norm_input")(act)
        sizes = (act.shape[-1] * 2,)
        weights = [hm.weights_of(act, sizes, name) for name in ("projection", "gate")]
        projection, gate = jnp.einsum("...c,gcd->g...d", act, jnp.stack(weights))
        left, right = jnp.split(projection * jax.nn.sigmoid(gate) * mask[..., None], 2, axis=-1)
        out = hm.LayerNorm(name="center_norm")(jnp.einsum("ikc,jkc->ijc", left, right))
        out = hm.Linear(act.shape[-1], name="output_projection")(out)
        return out * jax.nn.sigmoid(hm.Linear(act.shape[-1], name="gating_linear")(act))


class GridSelfAttention(hk.Module):
    """Attention along the rows of pairs; the weights of queries and keys have their inputs last."""

    def __call__(self, act, mask, num_head):
        act = hm.LayerNorm(name="act_norm")(act)
        bias = hm.Linear(num_head, name="pair_bias_projection")(act)
        shape = num_head, act.shape[-1] // num_head
        q, k = (hm.Linear(shape, transpose_weights=True, name=f"{n}_projection")(act) for n in "qk")
        v = hm.Linear(shape, name="v_projection")(act)
        logits = jnp.einsum("iqhc,ikhc->ihqk", q * shape[1] ** -0.5, k)
        logits += jnp.transpose(bias, (2, 0, 1))[None] + 1e9 * (mask - 1)[:, None, None]
        out = jnp.einsum("ihqk,ikhc->iqhc", jax.nn.softmax(logits), v).reshape(act.shape)
        gate = hm.Linear(act.shape[-1], transpose_weights=True, name="gating_query")(act)
        return hm.Linear(act.shape[-1], name="output_projection")(out * jax.nn.sigmoid(gate))


class PairFormerIteration(hk.Module):
    def __init__(self, config, global_config, with_single=False, *, name):
        super().__init__(name=name)
        self.config = config

    def __call__(self, act, pair_mask, single_act, seq_mask):
        act += TriangleMultiplication(name="triangle_multiplication_outgoing")(act, pair_mask)
        act += GridSelfAttention(name="pair_attention1")(act, pair_mask, self.config.num_head)
        h = hm.LayerNorm(name="pair_transition_norm")(act)
        act += hm.Linear(act.shape[-1], name="pair_transition")(jax.nn.relu(h))
        norm = hm.LayerNorm(name="single_pair_logits_norm")(act)
        logits = hm.Linear(self.config.num_head, name="single_pair_logits_projection")(norm)
        single_act += diffusion_transformer.self_attention(
            single_act,
            seq_mask,
            jnp.transpose(logits, (2, 0, 1)),
            self.config.num_head,
            single_act,
            "single_attention_",
        )
        return act, single_act
