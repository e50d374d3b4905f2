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


class PairFormerIteration(hk.Module):
    def __init__(self, config, global_config, with_single=False, *, name):
        super().__init__(name=name)
        self.config = config

    def __call__(self, act, pair_mask, single_act, seq_mask):
        act += TriangleMultiplication(name="triangle_multiplication_outgoing")(act, pair_mask)
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
