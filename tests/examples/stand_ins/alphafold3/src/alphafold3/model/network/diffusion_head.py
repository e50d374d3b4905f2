"""Denoises positions of atoms: from atoms to tokens, over tokens, and back to atoms."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp

from alphafold3.model import model_config
from alphafold3.model.atom_layout import atom_layout
from alphafold3.model.components import haiku_modules as hm
from alphafold3.model.components import utils
from alphafold3.model.network import diffusion_transformer

SIGMA_DATA = 16.0


def gated(x, name):
    """A block of a gated unit, whose two weights are one array."""
    hidden = 2 * x.shape[-1]
    h = hk.LayerNorm(-1, True, True, name=f"{name}ffw_layer_norm")(x)
    weights = hm.weights_of(h, (2 * hidden,), f"{name}ffw_transition1")
    gate, h = jnp.split(h @ weights, 2, axis=-1)
    return x + hm.Linear(x.shape[-1], name=f"{name}ffw_transition2")(jax.nn.swish(gate) * h)


def atom_attention(queries, keys, mask, pair_logits, num_head, name):
    """Attention of a subset's atoms to those around, with a bias of pairs."""
    shape = num_head, queries.shape[-1] // num_head
    q = hm.Linear(shape, use_bias=True, name=f"{name}q_projection")(queries)
    k, v = (hm.Linear(shape, name=f"{name}{n}_projection")(keys) for n in "kv")
    logits = jnp.einsum("sqhc,skhc->shqk", q * shape[1] ** -0.5, k) + pair_logits
    weights = jax.nn.softmax(logits + 1e9 * (mask.astype(logits.dtype) - 1)[:, None, None])
    out = jnp.einsum("shqk,skhc->sqhc", weights, v).reshape(queries.shape)
    gate = hm.Linear(queries.shape[-1], name=f"{name}gating_query")(queries)
    return hm.Linear(queries.shape[-1], name=f"{name}transition2")(out * jax.nn.sigmoid(gate))


class AtomTransformer(hk.Module):
    def __call__(self, queries, layout, pair, num_head=2, blocks=2):
        mask = layout.queries_to_keys.gather_mask
        norm = hm.LayerNorm(create_offset=False, name="pair_input_layer_norm")(pair)
        logits = hm.Linear((blocks, num_head), name="pair_logits_projection")(norm)

        def block(queries, logits):
            keys = atom_layout.convert(layout.queries_to_keys, queries, layout_axes=(-3, -2))
            queries += atom_attention(queries, keys, mask, logits, num_head, self.name)
            return gated(queries, self.name), None

        stack = hk.layer_stack(blocks, with_per_layer_inputs=True)
        return stack(block)(queries, jnp.transpose(logits, (3, 0, 4, 1, 2)))[0]


class DiffusionHead(hk.Module):
    @dataclasses.dataclass
    class Config:
        per_atom_channels: int = 32
        per_token_channels: int = 64
        transformer: model_config.Stack = dataclasses.field(default_factory=model_config.Stack)

    def __init__(self, config, global_config, name="diffusion_head"):
        super().__init__(name=name)
        self.config, self.global_config = config, global_config

    def __call__(self, positions_noisy, noise_level, batch, embeddings, use_conditioning):
        total = jnp.sqrt(noise_level**2 + SIGMA_DATA**2)
        mask = batch.predicted_structure_info.atom_mask[..., None]
        with utils.bfloat16_context():
            pair, single = self.conditioning(batch, embeddings, noise_level)
            queries, atom_pair = self.atoms(positions_noisy * mask / total, batch, pair)
            queries = AtomTransformer(name="diffusion_atom_transformer_encoder")(
                queries, batch.atom_cross_att, atom_pair
            )
            update = self.over_tokens(queries, atom_pair, batch, single, pair)
        skip = positions_noisy * (SIGMA_DATA / total) ** 2
        return (skip + update * noise_level * SIGMA_DATA / total) * mask

    @hk.transparent
    def conditioning(self, batch, embeddings, noise_level):
        index = batch.token_features.residue_index
        near = jax.nn.one_hot(jnp.clip(index[:, None] - index[None] + 4, 0, 8), 9)
        pair = jnp.concatenate([embeddings["pair"], near], -1)
        pair = hm.Linear(32, name="pair_cond_initial_projection")(
            hm.LayerNorm(create_offset=False, name="pair_cond_initial_norm")(pair)
        )
        single = jnp.concatenate([embeddings["single"], embeddings["target_feat"]], -1)
        single = hm.Linear(64, name="single_cond_initial_projection")(
            hm.LayerNorm(create_offset=False, name="single_cond_initial_norm")(single)
        )
        noise = jnp.cos(jnp.log(noise_level) * jnp.linspace(0.1, 1, 32))
        single += hm.Linear(64, name="noise_embedding_initial_projection")(noise)
        return gated(pair, "pair_transition_0"), gated(single, "single_transition_0")

    @hk.transparent
    def atoms(self, positions, batch, pair):
        """Features of the atoms, and of pairs of them."""
        layout, reference, width = (
            batch.atom_cross_att,
            batch.ref_structure,
            self.config.per_atom_channels,
        )
        features = hm.Linear(width, name="diffusion_embed_ref_pos")(reference.positions)
        features += hm.Linear(width, name="diffusion_embed_ref_element")(
            jax.nn.one_hot(reference.element, 128)
        )
        features += hm.Linear(width, name="diffusion_atom_positions_to_features")(positions)
        queries = atom_layout.convert(layout.token_atoms_to_queries, features, layout_axes=(-3, -2))
        pair = hm.Linear(16, name="diffusion_embed_trunk_pair_cond")(pair)
        own, other = layout.tokens_to_queries.gather_idxs, layout.tokens_to_keys.gather_idxs
        return queries, pair[own[:, :, None], other[:, None]]

    @hk.transparent
    def over_tokens(self, queries, atom_pair, batch, single, pair):
        layout, config = batch.atom_cross_att, self.config
        found = hm.Linear(
            config.per_token_channels, name="diffusion_project_atom_features_for_aggr"
        )(queries)
        act = atom_layout.convert(layout.queries_to_token_atoms, found, layout_axes=(-3, -2))
        act = jax.nn.relu(act).mean(1).astype(jnp.float32)
        transformer = diffusion_transformer.Transformer(config.transformer, self.global_config)
        act = transformer(act, batch.token_features.mask, single, pair)
        act = hm.Linear(
            config.per_atom_channels, name="diffusion_project_token_features_for_broadcast"
        )(act)
        queries += atom_layout.convert(layout.tokens_to_queries, act, layout_axes=(-2,))
        queries = AtomTransformer(name="diffusion_atom_transformer_decoder")(
            queries, layout, atom_pair
        )
        moved = hm.Linear(3, name="diffusion_atom_features_to_position_update")(queries)
        return atom_layout.convert(layout.queries_to_token_atoms, moved, layout_axes=(-3, -2))
