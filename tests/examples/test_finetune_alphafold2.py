"""`examples/finetune_alphafold2.py`, as a user runs it, on a stand-in."""

import json
import pathlib
import re
import subprocess
import sys
import types

import haiku as hk
import jax
import numpy as np
import pytest

import alphafold2_features
import haiku_implicit as hki
from errors import InputError

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPO = ROOT / "tests" / "examples" / "stand_ins" / "alphafold2"
SMALL = ["--blocks=2", "--crop=9", "--rows=3", "--extra_rows=4", "--rank=2"]


def program(*flags):
    script = ROOT / "examples" / "finetune_alphafold2.py"
    return subprocess.run(
        [sys.executable, script, f"--repo={REPO}", *SMALL, *flags],
        capture_output=True,
        text=True,
        check=False,
    )


def last_losses(run):
    assert run.returncode == 0, run.stderr
    found = re.search(r"loss (\S+), merged and without this library (\S+)", run.stdout)
    return [float(x) for x in found.groups()]


@pytest.mark.slow
def test_the_whole_road(tmp_path):
    """Trained, saved, and in a new process loaded, merged, and written as AlphaFold's file."""
    adapter, merged = tmp_path / "adapter.safetensors", tmp_path / "merged.npz"
    first = program("--steps=8", "--learning_rate=1e-2", f"--save={adapter}")
    ours, plain = last_losses(first)
    assert ours == pytest.approx(plain, rel=1e-4)
    losses = [float(x) for x in re.findall(r"step \d+  loss (\S+)", first.stdout)]
    assert len(losses) == 8 and ours < losses[0] - 0.1
    assert "became dense: 0 arrays" in first.stdout
    assert "gradients" in first.stdout
    second = program("--steps=0", "--nocheck", f"--load={adapter}", f"--merged={merged}")
    assert last_losses(second) == pytest.approx([ours, plain], rel=1e-5)
    third = program("--steps=0", "--nocheck", f"--weights={merged}")
    assert last_losses(third)[1] == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--weights={tmp}/absent.npz"], "error: --weights: .*absent.npz"),
        (["--weights={tmp}/params.npz"], r"alphafold/\S+//\w+ is missing in .* --blocks"),
        (["--structure={tmp}/absent.pdb"], "error: --structure: .*absent.pdb"),
        (["--structure={tmp}/short.pdb"], "has 1 residues, expected --crop=9"),
        (["--load={tmp}/params.npz"], "error: --load: "),
    ],
)
def test_unusable_flags(flags, message, tmp_path):
    np.savez(tmp_path / "params.npz", **{"alphafold//w": np.ones(2)})
    (tmp_path / "short.pdb").write_text("ATOM      1  CA  ALA A   1       1.000   2.000   3.000")
    run = program("--nocheck", *(flag.format(tmp=tmp_path) for flag in flags))
    assert run.returncode == 1 and re.search(message, run.stderr), run.stderr
    assert "Traceback" not in run.stderr


@pytest.fixture
def constants(monkeypatch):
    monkeypatch.syspath_prepend(REPO)
    from alphafold.common import residue_constants

    yield residue_constants
    for name in [name for name in sys.modules if name.partition(".")[0] == "alphafold"]:
        del sys.modules[name]


def test_the_other_names_of_atoms(constants):
    """Aspartate's oxygens may be called by each other's names."""
    kinds = np.array([constants.restypes.index(letter) for letter in "DA"])
    positions, mask = np.zeros((2, 37, 3), np.float32), np.ones((2, 37), np.float32)
    positions[:, :, 0] = np.arange(37)
    chain = alphafold2_features.Chain(kinds, positions, mask)
    found = alphafold2_features.atom14_features(chain, constants)
    assert found["atom14_gt_positions"][0, :7, 0].tolist() == [0, 1, 2, 4, 3, 16, 17]
    assert found["atom14_alt_gt_positions"][0, :7, 0].tolist() == [0, 1, 2, 4, 3, 17, 16]
    assert found["atom14_atom_is_ambiguous"].sum(-1).tolist() == [2, 0]
    assert found["atom14_gt_exists"].sum(-1).tolist() == [7, 5]
    back = np.take_along_axis(found["residx_atom14_to_atom37"], np.arange(5)[None], 1)
    assert found["residx_atom37_to_atom14"][0][back[0]].tolist() == list(range(5))


def test_the_made_up_chain(constants):
    chain = alphafold2_features.made_up_chain(20, constants.atom_order)
    n, ca, c = (chain.positions[:, i] for i in range(3))
    for a, b in ((n, ca), (ca, c), (c[:-1], n[1:])):
        assert (np.abs(np.linalg.norm(a - b, axis=-1) - 1.4) < 0.6).all()
    features = alphafold2_features.sequence_features(chain.aatype, 4, 5)
    assert features["msa_feat"].shape == (4, 20, 49) and features["target_feat"].shape == (20, 22)
    masked = features["msa_feat"][..., 22] == 1
    assert (masked == features["bert_mask"]).all() and 0 < masked.mean() < 0.5


def test_a_chain_that_is_too_short(tmp_path, constants):
    from alphafold.common import protein

    (tmp_path / "a.pdb").write_text("REMARK")
    with pytest.raises(InputError, match="has 0 residues, expected --crop=8"):
        alphafold2_features.read_chain(str(tmp_path / "a.pdb"), protein, 8)


@pytest.mark.slow
def test_the_preset_has_the_axes_that_the_model_contracts(constants):
    from alphafold.model import all_atom, config, modules, quat_affine

    settings = config.model_config("model_3").model
    evoformer = settings.embeddings_and_evoformer
    evoformer.evoformer_num_block = 1
    for part in evoformer.evoformer.values():
        part.fuse_projection_weights = False
    settings.global_config.bfloat16 = False
    package = types.SimpleNamespace(
        modules=modules, all_atom=all_atom, quat_affine=quat_affine, constants=constants
    )
    chain = alphafold2_features.made_up_chain(8, constants.atom_order)
    batch = alphafold2_features.features_of(chain, 2, 3, package)
    previous = dict(
        prev_msa_first_row=np.zeros((8, 32), np.float32),
        prev_pair=np.zeros((8, 8, 16), np.float32),
        prev_pos=np.zeros((8, 37, 3), np.float32),
    )

    def forward(batch):
        with hk.name_scope("alphafold"):
            model = modules.AlphaFoldIteration(settings, settings.global_config)
        return model(batch, previous, is_training=True, compute_loss=True)[1]

    model, key = hk.transform(forward), jax.random.key(0)
    shapes = jax.eval_shape(model.init, key, batch)
    axes = hki.infer_matrix_axes(model.apply, shapes, key, batch)
    preset = json.loads((ROOT / "examples" / "presets" / "alphafold2.json").read_text())
    seen = set()
    for path, found in axes.items():
        matching = [x for name, x in preset["matrix_axes"].items() if re.fullmatch(name, path)]
        wanted = matching[0] if matching else [[-2], [-1]]
        assert len(matching) < 2 and [list(found.inputs), list(found.outputs)] == wanted, path
        seen.add(str(wanted))
        adapter = re.fullmatch(preset["adapters"]["lora"], path)
        assert bool(adapter) == ("_head/" not in path), path
    assert len(seen) == 3  # the fourth is of a layer that the stand-in lacks
