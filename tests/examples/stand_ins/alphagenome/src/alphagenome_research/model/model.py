"""A small model with the habits of AlphaGenome's."""

import haiku as hk
import jax
import jax.numpy as jnp

HEADS, WIDTH = 4, 32


class RMSBatchNorm(hk.Module):
    """With a variance that is state."""

    def __call__(self, x):
        shape = (1,) * (x.ndim - 1) + x.shape[-1:]
        variance = hk.get_state("var_ema", shape, jnp.float32, init=jnp.ones)
        scale = hk.get_parameter("scale", shape, x.dtype, init=jnp.ones)
        offset = hk.get_parameter("offset", shape, x.dtype, init=jnp.zeros)
        return x * scale * jax.lax.rsqrt(variance + 1e-5) + offset


class StandardizedConv1D(hk.Module):
    """The weight is standardized each time."""

    def __init__(self, num_channels, width, name=None):
        super().__init__(name=name)
        self.shape = width, num_channels

    def __call__(self, x):
        width, channels = self.shape
        w = hk.get_parameter("w", (width, x.shape[-1], channels), x.dtype, init=jnp.zeros)
        w -= jnp.mean(w, axis=(0, 1), keepdims=True)
        variance = jnp.var(w, axis=(0, 1), keepdims=True)
        scale = hk.get_parameter("scale", [1, 1, channels], w.dtype, init=jnp.ones)
        w *= scale * jax.lax.rsqrt(jnp.maximum(width * x.shape[-1] * variance, 1e-4))
        out = jax.lax.conv_general_dilated(
            x,
            w,
            [1],
            "SAME",
            dimension_numbers=jax.lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1)),
        )
        return out + hk.get_parameter("bias", (channels,), x.dtype, init=jnp.zeros)


def conv_block(x, channels):
    return StandardizedConv1D(channels, 5)(jax.nn.gelu(RMSBatchNorm()(x)))


class SequenceEncoder(hk.Module):
    def __call__(self, dna):
        x = hk.Conv1D(WIDTH, 15)(dna)
        skips = {"bin_size_1": x}
        for size in (16, 128):
            x = hk.MaxPool((16 if size == 16 else 8, 1), (16 if size == 16 else 8, 1), "SAME")(x)
            x = jnp.pad(x, [(0, 0), (0, 0), (0, WIDTH)]) + conv_block(x, x.shape[-1] + WIDTH)
            skips[f"bin_size_{size}"] = x
        return x, skips


class MHABlock(hk.Module):
    def __call__(self, x):
        h = RMSBatchNorm()(x)
        batch, length, width = h.shape
        own = width // HEADS
        q = hk.Linear(width, False, name="q_layer")(h).reshape(batch, length, HEADS, own)
        k, v = (
            hk.Linear(own, False, name=f"{n}_layer")(h).reshape(batch, length, 1, own) for n in "kv"
        )
        precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
        options = dict(precision=precision, preferred_element_type=jnp.float32)
        logits = jnp.einsum("bshc,bS1c->bhsS", q, k, **options) / own**0.5
        weights = jax.nn.softmax(jnp.tanh(logits / 5) * 5)
        y = jnp.einsum("bhsS,bS1c->bshc", weights, v, precision=precision).astype(q.dtype)
        return hk.Linear(width, name="linear_embedding")(y.reshape(x.shape))


class TransformerTower(hk.Module):
    def __call__(self, x):
        for _ in range(2):
            x += MHABlock()(x)
            x += hk.nets.MLP([2 * x.shape[-1], x.shape[-1]])(RMSBatchNorm()(x))
        return x, None


class SequenceDecoder(hk.Module):
    def __call__(self, x, skips):
        for size, times in ((16, 8), (1, 16)):
            skip = skips[f"bin_size_{size}"]
            out = conv_block(x, skip.shape[-1]) + x[..., : skip.shape[-1]]
            out = jnp.repeat(out, times, axis=1) * hk.get_parameter(
                "residual_scale", (), init=jnp.ones
            )
            x = out + hk.Linear(skip.shape[-1])(skip)
        return x


class MultiOrganismLinear(hk.Module):
    """A matrix for each organism."""

    def __init__(self, size, organisms):
        super().__init__(name="multi_organism_linear")
        self.size, self.organisms = size, organisms

    def __call__(self, x, organism):
        shape = self.organisms, x.shape[-1], self.size
        init = hk.initializers.TruncatedNormal(x.shape[-1] ** -0.5)
        w = hk.get_parameter("w", shape, init=init).astype(x.dtype)[organism]
        b = hk.get_parameter("b", shape[::2], init=jnp.zeros).astype(x.dtype)[organism]
        return jnp.einsum("bsi,bij->bsj", x, w, preferred_element_type=jnp.float32) + b[:, None]


class AlphaGenome(hk.Module):
    """A trunk, and a head for each kind of track."""

    def __init__(self, output_metadata, *, freeze_trunk_embeddings=False):
        super().__init__(name="alphagenome")
        (self.metadata,) = output_metadata.values()
        self.frozen = freeze_trunk_embeddings

    def __call__(self, dna_sequence, organism_index):
        x, skips = SequenceEncoder()(dna_sequence)
        x += hk.Embed(2, x.shape[-1])(organism_index)[:, None]
        x, _ = TransformerTower()(x)
        embeddings = SequenceDecoder()(x, skips)
        if self.frozen:
            embeddings = jax.lax.stop_gradient(embeddings)
        found = {"embeddings_1bp": embeddings}
        with hk.name_scope("head"):
            for name, tracks in vars(self.metadata).items():
                if tracks is not None:
                    with hk.name_scope(name):
                        found[name] = MultiOrganismLinear(len(tracks), 2)(
                            embeddings, organism_index
                        )
        return found

    def loss(self, batch):
        found, losses = self(batch.dna_sequence, batch.organism_index), {}
        if (targets := batch.splice_sites) is not None:
            logits = jax.nn.log_softmax(found["splice_sites"].astype(jnp.float32))
            losses["splice_sites_loss"] = -jnp.mean(jnp.sum(targets * logits, -1))
        if batch.atac is not None:
            error = jax.nn.softplus(found["atac"]) - batch.atac
            losses["atac_loss"] = jnp.mean(error**2 * batch.atac_mask)
        return sum(losses.values()), losses, found
