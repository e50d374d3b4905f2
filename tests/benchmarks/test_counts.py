"""The gate on counts: the costs of this commit are those of the baseline, and what it says otherwise."""

import json
import os
import pathlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

from benchmarks import counts

ROOT = pathlib.Path(counts.__file__).resolve().parent.parent
BASELINE = {"step": {"flops": 100, "traces": 1}, "MLP": {"flops": 7}}


@pytest.fixture
def versions():
    return counts.about_this_machine(*counts.DECIDING)["versions"]


def command(*args):
    """A run of the command in a process of its own, since it sets the number of devices."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.counts", *args],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "examples")])),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_nothing_costs_more_than_the_baseline():
    run = command()
    assert run.returncode == 0, f"{run.stdout}{run.stderr[-3000:]}"
    assert "No cost is above the baseline" in run.stdout
    if "Better than the baseline" in run.stdout:
        warnings.warn(run.stdout, stacklevel=1)  # shown, and no failure


@pytest.mark.slow
def test_a_higher_cost_fails_the_command(tmp_path):
    recorded = json.loads(counts.BASELINE.read_text())
    for program in recorded["counts"].values():
        program.update({k: v - 1 for k, v in program.items() if k in ("flops", "traces")})
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(recorded))
    run = command("--only=^MLP, dense$", f"--counts_file={path}")
    assert run.returncode == 1, run.stderr[-3000:]
    assert "MLP, dense" in run.stdout and counts.COMMAND in run.stdout


def test_equal_counts_pass(versions):
    text, failed = counts.report(dict(versions=versions, counts=BASELINE), BASELINE, {})
    assert not failed and text == "No cost is above the baseline, of 2 programs."


def test_a_higher_count_fails_with_a_table(versions):
    now = {"step": {"flops": 150, "traces": 1}, "MLP": {"flops": 7}}
    text, failed = counts.report(dict(versions=versions, counts=BASELINE), now, {})
    assert failed and counts.COMMAND in text
    (row,) = [line.split() for line in text.splitlines() if "step" in line]
    assert row == ["step", "flops", "100", "150", "+50.0%"]


def test_a_lower_count_is_told_and_passes(versions):
    now = {"step": {"flops": 50, "traces": 1}, "MLP": {"flops": 7}}
    text, failed = counts.report(dict(versions=versions, counts=BASELINE), now, {})
    assert not failed and "Better than the baseline" in text and "-50.0%" in text


@pytest.mark.parametrize(
    "now",
    [
        {"step": BASELINE["step"]},
        {**BASELINE, "new": {"flops": 1}},
        {**BASELINE, "MLP": {"flops": 7, "kernels": 0}},
    ],
    ids=["a program is gone", "a program is new", "a count is new"],
)
def test_what_is_not_in_both_fails(versions, now):
    text, failed = counts.report(dict(versions=versions, counts=BASELINE), now, {})
    assert failed and counts.COMMAND in text


def test_what_was_zero_may_not_grow(versions):
    recorded = dict(versions=versions, counts={"a": {"bytes_sent": 0}})
    assert counts.report(recorded, {"a": {"bytes_sent": 8}}, {})[1]


def test_on_other_versions_only_some_counts_are_compared(versions):
    recorded = dict(versions=dict(versions, jax="0.0.1"), counts=BASELINE)
    now = {"step": {"flops": 900, "traces": 1}, "MLP": {"flops": 900}}
    text, failed = counts.report(recorded, now, {})
    assert not failed and "jax 0.0.1" in text and jax.__version__ in text
    assert counts.report(recorded, {**now, "step": {"flops": 1, "traces": 2}}, {})[1]


def test_a_program_may_not_cost_more_than_its_twin(versions):
    recorded = dict(versions=dict(versions, jax="0.0.1"), counts=BASELINE)
    twins = {"step": "MLP"}
    text, failed = counts.report(recorded, BASELINE, twins)
    assert failed and "step (to MLP)" in text
    assert not counts.report(recorded, {**BASELINE, "step": {"flops": 7, "traces": 1}}, twins)[1]


def test_equations_of_loops_and_functions_count():
    def fun(x):
        return jax.lax.scan(lambda c, _: (jax.jit(lambda c: c * c + 1)(c), None), x, length=3)[0]

    # The scan, the jitted function in it, and its two.
    assert counts.equations(jax.make_jaxpr(fun)(1.0).jaxpr) == 4


@pytest.mark.slow
def test_what_is_traced_twice_is_counted():
    import haiku as hk

    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([2])(x)))
    x = jnp.ones((1, 3))
    params = model.init(jax.random.key(0), x)
    once = counts.in_calls(model.apply, (params, x))
    assert once == {"traces": 1, "compilations": 1}
    assert counts.in_calls(model.apply, (params, x), eager=True)["traces"] == 2


def test_the_baseline_is_complete():
    recorded = json.loads(counts.BASELINE.read_text())
    assert set(counts.DECIDING) <= set(recorded["versions"])
    from benchmarks import counted_programs

    assert list(recorded["counts"]) == list(counted_programs.all_programs())
    for own in recorded["counts"].values():
        assert own and all(isinstance(n, int) and n >= 0 for n in own.values())
