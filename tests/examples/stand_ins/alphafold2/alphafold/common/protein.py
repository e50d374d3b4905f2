"""Reads a chain from a PDB file."""

import types

import numpy as np

from alphafold.common import residue_constants as constants


def from_pdb_string(text):
    rows = {}
    for line in text.splitlines():
        if line.startswith("ATOM"):
            place = [float(line[i : i + 8]) for i in (30, 38, 46)]
            rows.setdefault((int(line[22:26]), line[17:20]), {})[line[12:16].strip()] = place
    positions, mask = np.zeros((len(rows), 37, 3)), np.zeros((len(rows), 37))
    for row, atoms in enumerate(rows.values()):
        for atom, place in atoms.items():
            positions[row, constants.atom_order[atom]] = place
            mask[row, constants.atom_order[atom]] = 1
    names = list(constants.restype_1to3.values())
    kinds = np.array([names.index(name) for _, name in rows], int)
    return types.SimpleNamespace(aatype=kinds, atom_positions=positions, atom_mask=mask)
