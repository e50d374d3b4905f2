"""A small diffusion U-Net in plain Haiku, after https://arxiv.org/abs/2006.11239."""

import dataclasses
import math

import haiku as hk
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class UnetConfig:
    """The sizes of a U-Net.

    Attributes:
        channels: Channels of an image.
        widths: Channels at each resolution, from the image's own to the lowest. Each resolution is
            half of the one before, so the height and width of images must be multiples of
            ``2 ** (len(widths) - 1)``.
        num_groups: Groups of channels in group normalization; all ``widths`` are multiples of it.
        num_heads: Attention heads at the lowest resolution.
        time_dim: Width of the embedding of the time step, an even number.
    """

    channels: int = 3
    widths: tuple[int, ...] = (32, 64, 128)
    num_groups: int = 8
    num_heads: int = 4
    time_dim: int = 128

    def __post_init__(self):
        if any(width % self.num_groups for width in self.widths):
            raise ValueError(
                f"widths {self.widths} are not all multiples of num_groups {self.num_groups}"
            )
        if self.widths[-1] % self.num_heads:
            raise ValueError(
                f"width {self.widths[-1]} is not a multiple of num_heads {self.num_heads}"
            )


def sinusoids(steps: jax.Array, size: int) -> jax.Array:
    """Returns sines and cosines of time steps ``[batch]``, frequencies 1 to 1e-4: ``[batch, size]``."""
    frequencies = jnp.exp(jnp.linspace(0.0, -math.log(10_000.0), size // 2))
    angles = steps[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def normed(config: UnetConfig, x: jax.Array, name: str) -> jax.Array:
    return hk.GroupNorm(config.num_groups, name=name)(x)


class Residual(hk.Module):
    """Two convolutions with the time step between them, added to their input."""

    def __init__(self, config: UnetConfig, width: int, name: str):
        super().__init__(name=name)
        self.config, self.width = config, width

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """Maps ``[batch, height, width, channels]`` and ``[batch, time_dim]`` to ``self.width``."""
        hidden = jax.nn.silu(normed(self.config, x, "norm_1"))
        hidden = hk.Conv2D(self.width, 3, name="conv_1")(hidden)
        hidden += hk.Linear(self.width, name="time")(jax.nn.silu(time))[:, None, None]
        hidden = jax.nn.silu(normed(self.config, hidden, "norm_2"))
        hidden = hk.Conv2D(self.width, 3, name="conv_2")(hidden)
        if x.shape[-1] != self.width:
            x = hk.Conv2D(self.width, 1, name="skip")(x)
        return x + hidden


class Attention(hk.Module):
    """Attention from all pixels to all pixels, added to its input."""

    def __init__(self, config: UnetConfig, name: str = "attention"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, height, width, channels]`` to ``[batch, height, width, channels]``."""
        batch, *_, dim = x.shape
        shape = batch, -1, self.config.num_heads, dim // self.config.num_heads
        y = normed(self.config, x, "norm")
        query, key, value = (
            hk.Linear(dim, name=name)(y).reshape(shape) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * shape[-1] ** -0.5
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)
        return x + hk.Linear(dim, name="output")(mixed.reshape(x.shape))


class Unet(hk.Module):
    """A U-Net: maps noisy images and their time steps to the noise."""

    def __init__(self, config: UnetConfig, name: str = "unet"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, images: jax.Array, steps: jax.Array) -> jax.Array:
        """Predicts the noise.

        Args:
            images: ``[batch, height, width, channels]`` float32.
            steps: The time step of each image's noise, ``[batch]``.

        Returns:
            The noise, with the shape of ``images``.
        """
        config, last = self.config, len(self.config.widths) - 1
        if images.shape[1] % 2**last or images.shape[2] % 2**last:
            raise ValueError(f"images of shape {images.shape}, expected multiples of {2**last}")
        time = hk.Linear(config.time_dim, name="time_1")(sinusoids(steps, config.time_dim))
        time = hk.Linear(config.time_dim, name="time_2")(jax.nn.silu(time))

        x = hk.Conv2D(config.widths[0], 3, name="first")(images)
        skips = []
        for i, width in enumerate(config.widths):
            x = Residual(config, width, name=f"down_{i}")(x, time)
            skips.append(x)
            if i < last:
                x = hk.Conv2D(width, 3, stride=2, name=f"shrink_{i}")(x)
        x = Attention(config)(x)
        for i, width in reversed(list(enumerate(config.widths))):
            x = jnp.concatenate([x, skips[i]], axis=-1)
            x = Residual(config, width, name=f"up_{i}")(x, time)
            if i > 0:
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
                x = hk.Conv2D(config.widths[i - 1], 3, name=f"grow_{i}")(x)
        x = jax.nn.silu(normed(config, x, "final_norm"))
        return hk.Conv2D(config.channels, 3, name="last")(x)
