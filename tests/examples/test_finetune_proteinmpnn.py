"""`examples/finetune_proteinmpnn.py`, as a user runs it, on a stand-in."""

import pathlib
import re
import subprocess
import sys

import chex
import joblib
import numpy as np
import pytest

import haiku_implicit as hki
from tests.examples.proteins import pdb, weights

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPO = ROOT / "tests" / "examples" / "stand_ins" / "colabdesign"


@pytest.fixture
def program(tmp_path):
    """Runs the script with chains and weights."""
    rng = np.random.default_rng(1)
    (tmp_path / "pdbs").mkdir()
    for name in ("1aaa1", "1aaa2", "1bbb", "1ccc", "1ddd"):
        pdb(tmp_path / "pdbs" / f"{name}.pdb", rng)
    weights(tmp_path / "weights.pkl")

    def run(*flags):
        script = ROOT / "examples" / "finetune_proteinmpnn.py"
        own = [f"--repo={REPO}", f"--pdbs={tmp_path / 'pdbs'}", "--folds=2", "--orders=2"]
        weights = (
            []
            if any("--weights" in f for f in flags)
            else [f"--weights={tmp_path / 'weights.pkl'}"]
        )
        return subprocess.run(
            [sys.executable, script, *own, *weights, *flags],
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.slow
def test_the_whole_road(program, tmp_path):
    """Trained, saved, and in a new process loaded, merged and tested with the same result."""
    adapter = tmp_path / "adapter.safetensors"
    flags = ["--seeds=2", "--steps=20", "--test_every=10", "--batch_size=2", "--learning_rate=3e-3"]
    first = program(*flags, f"--save={adapter}")
    assert first.returncode == 0, first.stderr
    before = float(re.search(r"pretrained (\S+) nats", first.stdout)[1])
    rows = re.findall(r"^(\d+) .*  (\S+)  (\S+)  \d of 5$", first.stdout, re.M)
    assert [row[0] for row in rows] == ["0", "10", "20"]
    assert float(rows[0][1]) == pytest.approx(before, abs=2e-3)  # LoRA starts as the model
    assert float(rows[-1][1]) < before - 0.5
    second = program(f"--load={adapter}", f"--merged={tmp_path / 'merged.pkl'}")
    assert second.returncode == 0, second.stderr
    again, merged = map(float, re.search(r"NLL (\S+), merged (\S+)", second.stdout).groups())
    assert again == pytest.approx(
        float(re.search(r"held-out NLL (\S+)", first.stdout)[1]), abs=2e-5
    )
    assert merged == pytest.approx(again, abs=2e-4)
    # ColabDesign reads its weights by joblib.
    found, before = (joblib.load(tmp_path / f"{name}.pkl") for name in ("merged", "weights"))
    base = before.pop("model_state_dict")
    wanted = hki.merge_lora(hki.set_adapter(base, hki.load(adapter)))
    chex.assert_trees_all_close(found.pop("model_state_dict"), wanted, atol=1e-6)
    assert found == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--weights={tmp}/absent.pkl"], "error: --weights: .*absent.pkl"),
        (["--weights={tmp}/pdbs/1bbb.pdb"], "error: --weights: .*not a whole pickle"),
        (["--load={tmp}/absent"], "error: --load: .*absent"),
        (["--merged={tmp}/merged.pkl"], "error: --merged: needs --load"),
        (["--folds=9"], "has 5 files .*, expected at least --folds=9"),
    ],
)
def test_unusable_flags(flags, message, program, tmp_path):
    run = program(*(flag.format(tmp=tmp_path) for flag in flags))
    assert run.returncode == 1 and re.search(message, run.stderr), run.stderr
    assert "Traceback" not in run.stderr


# In a process of its own: flags of scripts have the same names.
PARTS = """
import sys

import jax

# Without tqdm, one line says how to install it.
sys.modules["tqdm"] = None
try:
    import finetune_proteinmpnn
    raise AssertionError("imported")
except SystemExit as error:
    assert "pip install '.[progress]'" in str(error), error
del sys.modules["tqdm"]

import finetune_proteinmpnn as script

# Chains of one entry stay together.
names = ["1aaa1", "1aaa2", "1aaa3", "1bbb", "1ccc", "2dddA", "2dddB"]
assert script.folds_of(names, 3).tolist() == [0, 0, 0, 2, 2, 1, 1]

# JAX has its older name only for a while.
assert not hasattr(jax, "tree_map")
with script.names_of_older_jax():
    assert jax.tree_map is jax.tree.map
assert not hasattr(jax, "tree_map")
"""


@pytest.mark.slow
def test_imports_folds_and_the_older_name():
    subprocess.run([sys.executable, "-c", PARTS], cwd=ROOT / "examples", check=True)
