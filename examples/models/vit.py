"""A vision transformer in plain Haiku, after https://arxiv.org/abs/2010.11929."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class VitConfig:
    """The sizes of a ViT; the defaults are ViT-B/16's.

    Attributes:
        image_size: Height and width of an image.
        patch_size: Height and width of a patch; ``image_size`` is a multiple of it.
        channels: Channels of an image.
        dim: Width of the residual stream.
        num_layers: Number of blocks, each an attention and a feed-forward network.
        num_heads: Number of attention heads; ``dim`` is a multiple of it.
        hidden_dim: Width of the feed-forward network.
        norm_eps: Added to the variance in layer normalization.
        qkv_bias: Whether the projections to queries, keys and values have a bias.
        num_classes: Number of the classifier's outputs; 0 for no classifier.
        pooled: Without a classifier, whether to return the pooler's output: a dense layer and a
            tanh on the first token.
    """

    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    dim: int = 768
    num_layers: int = 12
    num_heads: int = 12
    hidden_dim: int = 3072
    norm_eps: float = 1e-12
    qkv_bias: bool = True
    num_classes: int = 0
    pooled: bool = False

    def __post_init__(self):
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")


def layer_norm(config: VitConfig, name: str) -> hk.LayerNorm:
    return hk.LayerNorm(-1, True, True, eps=config.norm_eps, name=name)


class Attention(hk.Module):
    """Attention from all patches to all patches."""

    def __init__(self, config: VitConfig, name: str = "attention"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``."""
        batch, time, dim = x.shape
        shape = batch, time, self.config.num_heads, dim // self.config.num_heads
        query, key, value = (
            hk.Linear(dim, with_bias=self.config.qkv_bias, name=name)(x).reshape(shape)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * shape[-1] ** -0.5
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)
        return hk.Linear(dim, name="output")(mixed.reshape(x.shape))


class Layer(hk.Module):
    """Attention and feed-forward network, each after a norm and added to the residual stream."""

    def __init__(self, config: VitConfig, name: str = "layer"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``."""
        x = x + Attention(self.config)(layer_norm(self.config, "attention_norm")(x))
        hidden = layer_norm(self.config, "mlp_norm")(x)
        hidden = hk.Linear(self.config.hidden_dim, name="up")(hidden)
        return x + hk.Linear(x.shape[-1], name="down")(jax.nn.gelu(hidden, approximate=False))


class Vit(hk.Module):
    """A vision transformer: maps images to classes, to a vector of the image, or to patch vectors."""

    def __init__(self, config: VitConfig, name: str = "vit"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, images: jax.Array) -> jax.Array:
        """Classifies or encodes images.

        Args:
            images: ``[batch, image_size, image_size, channels]`` float32.

        Returns:
            Logits ``[batch, num_classes]``; without a classifier the pooler's ``[batch, dim]``;
            without a pooler ``[batch, 1 + patches, dim]``, the first of them the class token's.
        """
        config = self.config
        want = (config.image_size, config.image_size, config.channels)
        if images.shape[1:] != want:
            raise ValueError(f"images of shape {images.shape[1:]}, expected {want}")
        x = hk.Conv2D(
            config.dim, config.patch_size, config.patch_size, padding="VALID", name="patches"
        )(images)
        x = x.reshape(x.shape[0], -1, config.dim)
        init = hk.initializers.TruncatedNormal(0.02)
        cls = hk.get_parameter("cls", [1, 1, config.dim], init=init)
        positions = hk.get_parameter("positions", [1, 1 + x.shape[1], config.dim], init=init)
        x = jnp.concatenate([jnp.broadcast_to(cls, (len(x), 1, config.dim)), x], 1) + positions
        for i in range(config.num_layers):
            x = Layer(config, name=f"layer_{i}")(x)
        x = layer_norm(config, "final_norm")(x)
        if config.num_classes:
            return hk.Linear(config.num_classes, name="classifier")(x[:, 0])
        return jnp.tanh(hk.Linear(config.dim, name="pooler")(x[:, 0])) if config.pooled else x
