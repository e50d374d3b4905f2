"""Fine-tuning AlphaGenome by its own training step, on a stand-in with the same features."""

import pathlib
import re
import subprocess
import sys
import types

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import dense_twin
import haiku_implicit as hki
import presets

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests" / "examples" / "stand_ins" / "alphagenome"
SCRIPT = ROOT / "examples" / "finetune_alphagenome.py"
BFLOAT16 = "params=float32,compute=bfloat16,output=bfloat16"
FLOAT32 = "params=float32,compute=float32,output=float32"
PRESET = presets.read("alphagenome")


@pytest.fixture(scope="module")
def modules():
    """The stand-in's modules: the training step, the model and the batches."""
    names = ("finetuning.finetune", "model.model", "model.schemas")
    return dense_twin.modules_of(str(STAND_IN), [f"alphagenome_research.{x}" for x in names])


@pytest.fixture(scope="module")
def batch(modules):
    rng = np.random.default_rng(0)
    return modules[2].DataBatch(
        dna_sequence=np.eye(4, dtype=np.float32)[rng.integers(0, 4, (1, 256))],
        organism_index=np.zeros(1, np.int32),
        splice_sites=np.eye(5, dtype=bool)[rng.integers(0, 5, (1, 256))],
    )


def made(modules, batch, policy=BFLOAT16, frozen=False):
    """The model with its loss, parameters, and state, for CPUs."""
    metadata = {"human": types.SimpleNamespace(splice_sites=range(5))}

    @hk.transform_with_state
    def forward(batch):
        with hk.mixed_precision.push_policy(modules[1].AlphaGenome, jmp.get_policy(policy)):
            return modules[1].AlphaGenome(metadata).loss(batch)

    if frozen:
        forward = modules[0].get_forward_fn(metadata, policy)
    params, state = dense_twin.random_params(forward, batch)
    return dense_twin.with_products_for_cpus(forward, params, state, [batch]), params, state


def adapted(params, quantized=None):
    if quantized:
        params = hki.quantize_params(params, dtype=quantized, targets=PRESET.quantized)
    for method, targets in PRESET.adapters.items():
        params = hki.add_adapter(params, 0, method, rank=4, targets=targets)
    return params


@pytest.mark.slow
def test_the_preset_has_all_matrices_and_convolutions(modules, batch):
    _, params, _ = made(modules, batch)
    new = adapted(params, "int8")
    for module, name, value in hk.data_structures.traverse(new):
        path, ndim = f"{module}/{name}", np.ndim(params[module][name])
        kind = type(value).__name__
        if "/head/" in path or name != "w":
            assert "ArrayImpl" in kind, path
        else:
            assert kind == {2: "LoRA", 3: "LoCon"}[ndim], path


@pytest.mark.slow
def test_the_start_has_the_pretrained_models_bits(modules, batch):
    forward, params, state = made(modules, batch)
    model, trained = hki.freeze(forward, adapted(params), trainable_dense=PRESET.trained_whole)
    assert any("w_lora_a" in x for x in trained.values()) and any(
        "w" in x for x in trained.values()
    )
    with hki.materialization("allow"), hki.materialization_report() as report:
        got = jax.jit(model.apply)(trained, state, None, batch)
    want = jax.jit(forward.apply)(params, state, None, batch)
    assert jax.tree.leaves(want)[0].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert {event.type_name for event, _ in report} == {"LoCon"}
    # The comparison can fail:
    moved = jax.tree.map(lambda x: x + 0.1, trained)
    with hki.materialization("allow"):
        other = jax.jit(model.apply)(moved, state, None, batch)
    assert not np.array_equal(other[0][2]["embeddings_1bp"], want[0][2]["embeddings_1bp"])


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_a_step_is_the_dense_twins(modules, batch, quantized):
    """The official step with plain gradient descent, against one that merges within the loss."""
    forward, params, state = made(modules, batch, FLOAT32)
    params = adapted(params, quantized)
    model, trained = hki.freeze(forward, params, trainable_dense=PRESET.trained_whole)
    trained = jax.tree.map(lambda x: x + 0.01, trained)  # `b` starts at zero
    steps = [
        modules[0].get_train_step(apply, optax.sgd(1.0))
        for apply in (
            model.apply,
            lambda p, *args: forward.apply(hki.materialize(model.params(p)), *args),
        )
    ]
    with hki.materialization("allow"):
        got, want = (step(trained, state, optax.sgd(1.0).init(trained), batch)[0] for step in steps)
    got, want = (jax.tree.map(lambda x, y: x - y, x, trained) for x in (got, want))
    assert dense_twin.difference(got, want) < 2e-3
    assert min(float(jnp.abs(x).max()) for x in jax.tree.leaves(want)) > 0


@pytest.mark.slow
def test_the_forward_for_heads_gives_adapters_no_gradient(modules, batch):
    """Why the script has its own: `get_forward_fn` stops gradients at the trunk."""
    for frozen in (True, False):
        forward, params, state = made(modules, batch, frozen=frozen)
        model, trained = hki.freeze(forward, adapted(params))

        def loss(p, model=model, state=state):
            return model.apply(p, state, None, batch)[0][0]

        with hki.materialization("allow"):
            grads = jax.jit(jax.grad(loss))(trained)
        assert frozen != any(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(grads))


@pytest.mark.slow
def test_a_preset_that_is_not_there():
    with pytest.raises(ValueError, match="name: expected one of .*alphagenome.*, got 'none'"):
        presets.read("none")


def script(folder, *flags, ok=True):
    """Runs the script in a new process; returns what it printed."""
    always = [f"--repo={STAND_IN}", f"--folder={folder / 'tuned'}", "--rank=4", "--group_size=32"]
    run = subprocess.run(
        [sys.executable, SCRIPT, *always, *flags], capture_output=True, text=True, check=False
    )
    assert (run.returncode == 0) == ok, run.stderr
    return run.stdout if ok else run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--checkpoint_blocks"]])
def test_memory_by_method(flags):
    """Adapters have no moments for the trunk, and 8 bits take a quarter of the weights."""
    own = [f"--repo={STAND_IN}", "--rank=4", "--methods=full,lora,int8", *flags, "--run"]
    run = subprocess.run(
        [sys.executable, SCRIPT.with_name("alphagenome_memory.py"), *own],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = {x.split()[0]: x.split()[1:] for x in run.stdout.splitlines() if " 2,048 " in x}
    full, lora, int8 = ([float(x) for x in rows[name][1:6]] for name in ("full", "lora", "int8"))
    assert full[1] > 1.9 * full[0] and lora[1] < 0.3 * full[1]
    assert int8[0] < 0.7 * lora[0]
    assert all(abs(sum(row[:4]) - row[4]) < 0.003 and row[3] > 0 for row in (full, lora, int8))
    assert all(row[-1] == "s" for row in rows.values())


def printed_by(benchmark, *flags):
    """The lines that a benchmark prints."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.splitlines()


@pytest.mark.slow
def test_the_program_is_as_by_hand():
    """LoRA of this library takes the memory of LoRA that is written into the model."""
    own = [f"--repo={STAND_IN}", "--rank=4", "--rounds=1"]
    printed = printed_by("alphagenome_by_hand", *own)
    ratios = {x.split("by hand")[0].strip(): float(x.split()[-1]) for x in printed}
    assert set(ratios) == {"traced", "lowered", "compiled", "MB of temporaries"}
    assert 0.9 < ratios["MB of temporaries"] < 1.1 and ratios["compiled"] < 2


@pytest.mark.slow
def test_weights_of_all_shapes_share_a_program():
    """Quantizing in groups compiles one program for weights of all shapes."""
    own = [f"--repo={STAND_IN}", "--rank=4", "--group_size=32", "--ways=preset,int8,nf4"]
    printed = printed_by("alphagenome_made", *own)
    rows = {x.split()[0]: x.split() for x in printed[1:]}
    assert rows["nf4"][-1] == "1" and int(rows["preset"][-1]) < 8
    assert int(rows["int8"][1]) == int(rows["nf4"][1]) > 8


def last_loss(text):
    return re.findall(r"step \d+: loss (\S+)", text)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "nf4", "heads", "full"])
def test_the_whole_road(modules, batch, tmp_path, method):
    """Trains, goes on in a new process, merges, and is read by Haiku without this library."""
    own, parts = [f"--method={method}", f"--policy={FLOAT32}"], tmp_path / "parts"
    whole = script(tmp_path / "whole", *own, "--steps=4")
    script(parts, *own, "--steps=2")
    out = script(parts, *own, "--steps=4", "--resume", f"--export={parts / 'plain'}")
    assert last_loss(out) == last_loss(whole)
    (folder,) = (parts / "tuned").glob("step_*")
    has_adapter = method in ("lora", "nf4")
    names = {path.stem for path in folder.iterdir()}
    assert names == {"dense", "training", *(["adapter"] if has_adapter else [])}
    tuned, merged = re.search(r"loss (\S+) as trained, (\S+) merged", out).groups()
    assert abs(float(tuned) - float(merged)) <= 1e-3 * float(tuned)

    plain, state = dense_twin.read_weights(str(parts / "plain"))
    is_implicit = lambda x: isinstance(x, hki.ImplicitArray)  # noqa: E731
    assert not any(map(is_implicit, jax.tree.leaves(plain, is_leaf=is_implicit)))
    forward, base, _ = made(modules, batch, FLOAT32)
    if method == "nf4":
        options = dict(dtype="nf4", group_size=32, targets=PRESET.quantized)
        base = hki.quantize_params(base, **options)
    params = hk.data_structures.merge(base, hki.load(folder / "dense.safetensors"))
    if has_adapter:
        params = hki.set_adapter(params, hki.load(folder / "adapter.safetensors"))
    with hki.materialization("allow"):
        got = hki.transform_implicit(forward).apply(params, state, None, batch)[0][0]
    want = forward.apply(plain, state, None, batch)[0][0]
    np.testing.assert_allclose(got, want, rtol=1e-3)


@pytest.mark.slow
def test_weights_of_a_checkpoint(tmp_path, monkeypatch):
    """A second fine-tuning begins with the trunk that the first one exported, and a new head."""
    monkeypatch.chdir(tmp_path)
    script(tmp_path / "one", "--steps=2", "--learning_rate=0.1", "--export=plain")
    out = script(tmp_path / "two", "--steps=0", "--weights=plain", "--seed=1")
    assert "at the start 4 of 4 outputs have the pretrained model's bits" in out
    other = script(tmp_path / "three", "--steps=0", "--seed=1")
    loss = re.compile(r"loss (\S+), now").search
    assert loss(out)[1] != loss(other)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length=2049"], "--length=2049: expected a multiple of 2048 bases"),
        (["--head=atac"], "--head=atac needs a multiple of 131072 bases"),
        (["--head=none", "--length=131072"], "--head=none: AlphaGenome's metadata have no such"),
        (["--rank=400"], "--rank=400: "),
        (["--resume"], "--resume: nothing is saved in --folder="),
        (["--weights=/no/such"], "--weights: "),
    ],
)
def test_what_a_user_gets_wrong(tmp_path, flags, message):
    assert message in script(tmp_path, *flags, ok=False)
