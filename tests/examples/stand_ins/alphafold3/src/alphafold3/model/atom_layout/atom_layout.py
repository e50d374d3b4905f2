"""Atoms in one layout, by their places in another."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatherInfo:
    gather_idxs: jax.Array
    gather_mask: jax.Array
    input_shape: jax.Array


def convert(info, x, *, layout_axes):
    """Gathers along the layout's axes, which are next to each other and counted from the end."""
    first, last = (axis % x.ndim for axis in (layout_axes[0], layout_axes[-1]))
    flat = x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :])
    found = flat[(slice(None),) * first + (info.gather_idxs,)]
    mask = info.gather_mask.reshape(info.gather_mask.shape + (1,) * (x.ndim - last - 1))
    return found * mask.astype(x.dtype)
