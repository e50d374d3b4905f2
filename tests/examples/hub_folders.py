"""The tiny models in the hub's layout, and changed copies of them."""

import json
import pathlib

import numpy as np
import safetensors.numpy

ROOT = pathlib.Path(__file__).parents[1] / "data" / "hub"
NAMES = sorted(path.name for path in ROOT.iterdir())


def expected(folder):
    """The arguments of a folder's model, and what another implementation computes with them."""
    arrays = np.load(folder / "expected.npz")
    return [arrays[f"input_{i}"] for i in range(3) if f"input_{i}" in arrays], arrays["output"]


def tensors_of(name):
    return safetensors.numpy.load_file(ROOT / name / "model.safetensors")


def write(folder, name, tensors, **settings):
    """A folder with these tensors, and the settings of a model of `ROOT` with changes (None: none)."""
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    found = json.loads((ROOT / name / "config.json").read_text()) | settings
    found = {key: value for key, value in found.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(found))
    (folder / "expected.npz").write_bytes((ROOT / name / "expected.npz").read_bytes())
    return folder


def write_shards(folder, name):
    """The model in two files with an index."""
    write(folder, name, tensors := tensors_of(name))
    (folder / "model.safetensors").unlink()
    listed = {}
    for i, names in enumerate(np.array_split(sorted(tensors), 2)):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        safetensors.numpy.save_file({n: tensors[n] for n in names}, folder / file)
        listed |= {str(n): file for n in names}
    index = dict(metadata=dict(total_size=1), weight_map=listed)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
