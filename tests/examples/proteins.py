"""Invented chains and weights for ColabDesign's ProteinMPNN, in the forms of its files."""

import joblib
import numpy as np

WIDTH = 128


def pdb(path, rng):
    """Writes a helix in which the residue at each place follows from its number."""
    names, atoms = ["ALA", "CYS", "GLY", "HIS", "LYS"], ("N", "CA", "C", "O")
    lines = []
    for number in range(1, int(rng.integers(9, 12))):
        for i, atom in enumerate(atoms):
            turn = number + i / 4 + 0.02 * rng.standard_normal()
            place = 2.3 * np.cos(1.7 * turn), 2.3 * np.sin(1.7 * turn), 1.5 * turn
            numbers = "".join(f"{x:8.3f}" for x in place)
            name = names[number % len(names)]
            lines.append(f"ATOM  {len(lines) + 1:5}  {atom:3} {name} A{number:4}    {numbers}")
    path.write_text("\n".join(lines))


def weights(path):
    """Writes the pickle of a model, as ColabDesign's are written."""
    rng = np.random.default_rng(0)
    made = {}

    def linear(name, n, m, bias=True):
        own = {"w": rng.standard_normal((n, m)).astype(np.float32) * n**-0.5}
        made[f"protein_mpnn/~/{name}"] = own | ({"b": np.zeros(m, np.float32)} if bias else {})

    linear("edge_embedding", 9, WIDTH, bias=False)
    linear("W_out", WIDTH, 21)
    made["protein_mpnn/~/letters"] = {"W_s": rng.standard_normal((21, WIDTH)).astype(np.float32)}
    for i in range(6):
        name, module = f"{'enc' if i < 3 else 'dec'}{i % 3}", f"layer{f'_{i}' if i else ''}"
        linear(f"{module}/~/{name}_W1", 3 * WIDTH, WIDTH)
        linear(f"{module}/~/{name}_W2", WIDTH, WIDTH)
        norm = {"scale": np.ones(WIDTH, np.float32), "offset": np.zeros(WIDTH, np.float32)}
        made[f"protein_mpnn/~/{module}/~/{name}_norm1"] = norm
    joblib.dump({"num_edges": 6, "noise_level": 0.2, "model_state_dict": made}, path)
