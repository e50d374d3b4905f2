"""Quaternions of rotations, those of small angles."""

import jax.numpy as jnp


def rot_to_quat(rot, unstack_inputs=False):
    assert unstack_inputs
    xyz = jnp.stack([rot[:, i, j] - rot[:, j, i] for i, j in ((2, 1), (0, 2), (1, 0))], -1) / 4
    return jnp.concatenate([jnp.ones((len(rot), 1)), xyz], -1)
