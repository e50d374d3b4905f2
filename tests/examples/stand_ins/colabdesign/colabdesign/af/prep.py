"""Reads a chain from a PDB file."""

import pathlib

import numpy as np

from colabdesign.af.alphafold.common import residue_constants as constants

LETTERS = dict(ALA="A", CYS="C", GLY="G", HIS="H", LYS="K")


def prep_pdb(pdb_filename, chain=None):
    rows = {}
    for line in pathlib.Path(pdb_filename).read_text().splitlines():
        if line.startswith("ATOM"):
            atom, number = line[12:16].strip(), int(line[22:26])
            place = [float(line[i : i + 8]) for i in (30, 38, 46)]
            rows.setdefault((number, line[17:20]), {})[atom] = place
    positions, mask = np.zeros((len(rows), 37, 3)), np.zeros((len(rows), 37))
    for row, atoms in enumerate(rows.values()):
        for atom, place in atoms.items():
            positions[row, constants.atom_order[atom]] = place
            mask[row, constants.atom_order[atom]] = 1
    kinds = np.array([constants.restypes.index(LETTERS[name]) for _, name in rows])
    batch = dict(aatype=kinds, all_atom_positions=positions, all_atom_mask=mask)
    numbers = np.array([number for number, _ in rows])
    return dict(batch=batch, residue_index=numbers, lengths=[len(rows)])
