"""Frames and angles of residues."""

import jax.numpy as jnp


def atom37_to_frames(aatype, all_atom_positions, all_atom_mask):
    n, ca, c = (all_atom_positions[:, i] for i in (0, 1, 2))
    x, y = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (c - ca, n - ca))
    z = jnp.cross(x, y)
    frame = jnp.concatenate([jnp.stack([x, jnp.cross(z, x), z], -1).reshape(-1, 9), ca], -1)
    frames = jnp.broadcast_to(frame[:, None], (len(aatype), 8, 12))
    exists = jnp.broadcast_to(all_atom_mask[:, 1:2], (len(aatype), 8))
    return dict(
        rigidgroups_gt_frames=frames,
        rigidgroups_gt_exists=exists,
        rigidgroups_group_exists=exists,
        rigidgroups_alt_gt_frames=frames,
    )


def atom37_to_torsion_angles(aatype, all_atom_pos, all_atom_mask):
    shape = (*aatype.shape, 7)
    angles = jnp.broadcast_to(jnp.array([0.0, 1.0]), (*shape, 2))
    return dict(torsion_angles_sin_cos=angles, torsion_angles_mask=jnp.zeros(shape))
