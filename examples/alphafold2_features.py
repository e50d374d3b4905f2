"""Makes AlphaFold 2's training features of one chain: its sequence as MSA, and its structure.

These are the features that AlphaFold's own losses need, computed with AlphaFold's own functions. For a
training with alignments, use features of your own pipeline under the same names.
"""

import pathlib
from typing import Any, NamedTuple

import numpy as np

from errors import InputError

GAP = 21  # the kinds in an MSA are the amino acids, X, a gap, and masked
MASKED = 22
MASKED_SHARE = 0.15


class Chain(NamedTuple):
    """A chain: kinds of residues, and the positions `[residues, 37, 3]` and mask of their atoms."""

    aatype: np.ndarray
    positions: np.ndarray
    mask: np.ndarray


def read_chain(path: str, protein: Any, length: int) -> Chain:
    """Reads the first residues of a PDB file.

    Raises:
      InputError: if it can't be read, or has fewer residues.
    """
    try:
        found = protein.from_pdb_string(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--structure: {path} can't be read: {error}") from error
    if len(found.aatype) < length:
        raise InputError(
            f"--structure: {path} has {len(found.aatype)} residues, expected --crop={length}"
        )
    chain = Chain(found.aatype, found.atom_positions, found.atom_mask)
    return Chain(*(np.asarray(x[:length]) for x in chain))


def made_up_chain(length: int, atom_order: dict[str, int]) -> Chain:
    """Makes a helix of random residues, of which only the backbone and CB are there."""
    turn = np.arange(-1, length + 1)[:, None]
    angle = np.deg2rad(100) * turn
    ca = np.concatenate([2.3 * np.cos(angle), 2.3 * np.sin(angle), 1.5 * turn], axis=1)
    before, ca, after = ca[:-2], ca[1:-1], ca[2:]
    n, c = ca + 0.38 * (before - ca), ca + 0.4 * (after - ca)
    b = ca - n
    cb = ca - 0.583 * np.cross(b, c - ca) + 0.568 * b - 0.541 * (c - ca)
    o = c + [0, 0, 1.23]
    positions, mask = np.zeros((length, 37, 3), np.float32), np.zeros((length, 37), np.float32)
    for name, place in dict(N=n, CA=ca, C=c, O=o, CB=cb).items():
        positions[:, atom_order[name]], mask[:, atom_order[name]] = place, 1
    aatype = np.random.default_rng(0).integers(0, 20, length)
    mask[aatype == 7, atom_order["CB"]] = 0  # glycine
    return Chain(aatype, positions, mask)


def features_of(chain: Chain, rows: int, extra_rows: int, model: Any) -> dict[str, np.ndarray]:
    """Makes all features, with the axis of ensembles in front.

    Args:
      chain: the chain.
      rows: rows of the MSA: the chain's sequence, some residues of it masked.
      extra_rows: rows of the extra MSA.
      model: AlphaFold's modules by name.
    """
    found = sequence_features(chain.aatype, rows, extra_rows)
    found |= atom14_features(chain, model.constants)
    found |= frame_features(chain, model)
    floats = {k: np.asarray(x, np.float32) for k, x in found.items() if x.dtype.kind == "f"}
    integers = {k: np.asarray(x, np.int32) for k, x in found.items() if x.dtype.kind in "iu"}
    return {name: x[None] for name, x in (floats | integers).items()}


def sequence_features(aatype: np.ndarray, rows: int, extra_rows: int) -> dict[str, np.ndarray]:
    """Makes the features of the sequence, and of an MSA that repeats it."""
    length, rng = len(aatype), np.random.default_rng(0)
    true = np.tile(aatype, (rows, 1))
    masked = rng.random(true.shape) < MASKED_SHARE
    one_hot = np.eye(MASKED + 1)[np.where(masked, MASKED, true)]
    none = np.zeros((rows, length, 1))
    return dict(
        aatype=aatype,
        residue_index=np.arange(length),
        seq_length=np.array(length),
        seq_mask=np.ones(length),
        target_feat=np.concatenate([np.zeros((length, 1)), np.eye(GAP)[aatype]], axis=-1),
        msa_feat=np.concatenate([one_hot, none, none, np.eye(MASKED + 1)[true], none], axis=-1),
        msa_mask=np.ones((rows, length)),
        true_msa=true,
        bert_mask=masked.astype(float),
        extra_msa=np.tile(aatype, (extra_rows, 1)),
        extra_msa_mask=np.ones((extra_rows, length)),
        extra_has_deletion=np.zeros((extra_rows, length)),
        extra_deletion_value=np.zeros((extra_rows, length)),
        resolution=np.array(1.0),
    )


def atom14_features(chain: Chain, constants: Any) -> dict[str, np.ndarray]:
    """Makes the features of AlphaFold's dense form of atoms, 14 of each residue."""
    to37, there = np.zeros((21, 14), int), np.zeros((21, 14))
    to14, there37 = np.zeros((21, 37), int), np.zeros((21, 37))
    other, ambiguous = np.tile(np.arange(14), (21, 1)), np.zeros((21, 14))
    for kind, letter in enumerate(constants.restypes):
        residue = constants.restype_1to3[letter]
        names = constants.restype_name_to_atom14_names[residue]
        for place, name in enumerate(names):
            if name:
                atom = constants.atom_order[name]
                to37[kind, place], there[kind, place] = atom, 1
                to14[kind, atom], there37[kind, atom] = place, 1
        for a, b in constants.residue_atom_renaming_swaps.get(residue, {}).items():
            pair = [names.index(a), names.index(b)]
            other[kind, pair], ambiguous[kind, pair] = pair[::-1], 1
    kinds = chain.aatype
    exists = np.take_along_axis(chain.mask, to37[kinds], 1) * there[kinds]
    positions = np.take_along_axis(chain.positions, to37[kinds][..., None], 1) * exists[..., None]
    return dict(
        residx_atom14_to_atom37=to37[kinds],
        residx_atom37_to_atom14=to14[kinds],
        atom14_atom_exists=there[kinds],
        atom37_atom_exists=there37[kinds],
        atom14_gt_exists=exists,
        atom14_gt_positions=positions,
        atom14_alt_gt_exists=np.take_along_axis(exists, other[kinds], 1),
        atom14_alt_gt_positions=np.take_along_axis(positions, other[kinds][..., None], 1),
        atom14_atom_is_ambiguous=ambiguous[kinds],
    )


def frame_features(chain: Chain, model: Any) -> dict[str, np.ndarray]:
    """Makes the features of frames and angles, by AlphaFold's functions."""
    kinds, positions, mask = chain
    frames = model.all_atom.atom37_to_frames(kinds, positions, mask)
    backbone = np.asarray(frames["rigidgroups_gt_frames"])[:, 0]
    turned, moved = backbone[:, :9].reshape(-1, 3, 3), backbone[:, 9:]
    quaternion = model.quat_affine.rot_to_quat(turned, unstack_inputs=True)
    torsions = model.all_atom.atom37_to_torsion_angles(kinds[None], positions[None], mask[None])
    chi = torsions["torsion_angles_sin_cos"][0, :, 3:]
    beta, beta_mask = model.modules.pseudo_beta_fn(kinds, positions, mask)
    found = dict(
        frames,
        all_atom_positions=positions,
        all_atom_mask=mask,
        pseudo_beta=beta,
        pseudo_beta_mask=beta_mask,
        backbone_affine_tensor=np.concatenate([quaternion, moved], axis=-1),
        backbone_affine_mask=frames["rigidgroups_gt_exists"][:, 0],
        chi_angles=np.arctan2(chi[..., 0], chi[..., 1]),
        chi_mask=torsions["torsion_angles_mask"][0, :, 3:],
    )
    return {name: np.asarray(x) for name, x in found.items()}
