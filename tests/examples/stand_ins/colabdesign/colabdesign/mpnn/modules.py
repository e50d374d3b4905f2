"""A message-passing model that gives the logits of a chain's residues, in a given order."""

import haiku as hk
import jax
import jax.numpy as jnp


class Keys:
    """A random key that may be used once, split by JAX's older name of a function."""

    def __init__(self, key):
        self.key = key

    def split(self):
        return jax.tree_map(Keys, tuple(jax.random.split(self.key)))


class Dropout(hk.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate, self.keys = rate, Keys(hk.next_rng_key())

    def __call__(self, x):
        self.keys, used = self.keys.split()
        return hk.dropout(used.key, self.rate, x)


class Layer(hk.Module):
    """Messages from the nearest residues, with layers that are made outside of the call."""

    def __init__(self, width, dropout, name):
        super().__init__()
        self.first = hk.Linear(width, name=f"{name}_W1")
        self.second = hk.Linear(width, name=f"{name}_W2")
        self.norm = hk.LayerNorm(-1, True, True, name=f"{name}_norm1")
        self.dropout = Dropout(dropout)

    def __call__(self, nodes, edges, near, mask):
        own = jnp.broadcast_to(nodes[:, None], (*edges.shape[:2], nodes.shape[-1]))
        message = jnp.concatenate([own, nodes[near], edges], -1)
        message = self.second(jax.nn.gelu(self.first(message))) * mask[..., None]
        return self.norm(nodes + self.dropout(message.sum(1) / 30))


class Letters(hk.Module):
    def __call__(self, one_hot, width):
        shape = [one_hot.shape[-1], width]
        return jnp.tensordot(one_hot, hk.get_parameter("W_s", shape, init=jnp.ones), 1)


class ProteinMPNN(hk.Module):
    def __init__(self, num_letters, hidden_dim, k_neighbors, augment_eps, dropout, **sizes):
        super().__init__()
        width = self.width = hidden_dim
        self.neighbors, self.noise = k_neighbors, augment_eps
        self.edge_embedding = hk.Linear(width, with_bias=False, name="edge_embedding")
        self.letters = Letters()
        self.encoder, self.decoder = (
            [Layer(width, dropout, f"{name}{i}") for i in range(sizes[f"num_{kind}_layers"])]
            for name, kind in (("enc", "encoder"), ("dec", "decoder"))
        )
        self.out = hk.Linear(num_letters, name="W_out")

    def score(self, inputs):
        """Logits in ProteinMPNN's alphabet, each from the letters that come before in the order."""
        places, mask = inputs["X"][:, 1], inputs["mask"]
        places = places + self.noise * jax.random.normal(hk.next_rng_key(), places.shape)
        squares = jnp.square(places[:, None] - places[None]).sum(-1)
        count = min(self.neighbors, len(mask))
        near = jax.lax.top_k(-squares - 1e6 * (1 - mask), count)[1]
        squares = jnp.take_along_axis(squares, near, 1)
        offsets = inputs["residue_idx"][:, None] - inputs["residue_idx"][near]
        edges = [jnp.exp(-squares[..., None] / 4.0 ** jnp.arange(8)), jnp.sin(offsets)[..., None]]
        edges = self.edge_embedding(jnp.concatenate(edges, -1))
        nodes, seen = jnp.zeros((len(mask), self.width)), mask[near]
        for layer in self.encoder:
            nodes = layer(nodes, edges, near, seen)
        ranks = inputs["decoding_order"].argsort()
        seen = seen * (ranks[near] < ranks[:, None])
        edges = edges + self.letters(inputs["S"], self.width)[near]
        for layer in self.decoder:
            nodes = layer(nodes, edges, near, seen)
        return {"logits": self.out(nodes), "S": inputs["S"]}
