"""The mutants that are made, and that a run tells those that a test notices from those that none does.

`python -m tests.mutation` is the long run.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.mutation import mutants, sessions
from tests.mutation.processes import Covered

ROOT = pathlib.Path(__file__).parents[2]


def changed(tmp_path, line):
    """The mutants of a line in a function."""
    (tmp_path / "module.py").write_text(f"def fun():\n  {line}\n")
    return [m.after for m in mutants.mutants(tmp_path, "module.py")[0]]


@pytest.mark.parametrize(
    "line, after",
    [
        ("x = a == b", ["x = None", "x = a != b"]),
        ("x: list[int] = a is not b", ["x: list[int] = None", "x: list[int] = a is b"]),
        (
            "return (a + 1) * b",
            ["return None", "return (a + 1) / b", "return (a - 1) * b", "return (a + 2) * b"],
        ),
        ("if not a: f(x, strict=True)", ["if (a): f(x, strict=True)", "if not a: pass"]),
        ("return a or b", ["return None", "return a and b"]),
        ("f(a, b=c)", ["pass", "f(a)"]),
        ('raise ValueError("no" + "thing")', ["pass"]),
        ('x = "two words"', []),
        ('x = "word"', ["x = 'XXword'"]),
        ("x = a | b", ["x = None", "x = (a)", "x = (b)"]),
        ("with c(): pass", ["with __import__('contextlib').nullcontext(): pass"]),
        ("x += [y for y in z if y]", ["x = [y for y in z if y]", "x += [y for y in z if True]"]),
        (
            "while any(x): break",
            ["while (not (any(x))): break", "while all(x): break", "while any(x): continue"],
        ),
    ],
)
def test_changes(tmp_path, line, after):
    assert changed(tmp_path, line) == after


def test_tests_that_run_the_line_come_first_by_what_they_take(tmp_path):
    (tmp_path / "own.py").write_text("def fun(a):\n  b = f(a)\n  return b\n")
    [deleted, *_] = mutants.mutants(tmp_path, "own.py")[0]
    tests = [
        Covered("", 0.0, {"own.py": [1]}),
        Covered("t/test_a.py::f[0]", 3.0, {"own.py": [2, 3]}),
        Covered("t/test_a.py::f[1]", 2.0, {"own.py": [2, 3]}),
        Covered("t/test_b.py::g", 4.0, {"own.py": [2]}),
        Covered("t/test_own.py::h", 5.0, {"own.py": [2]}),
        Covered("t/test_own.py::elsewhere", 1.0, {"own.py": [3]}),
        Covered("t/test_c.py::too_long", 90.0, {"own.py": [2]}),
    ]
    chosen = [t.name for t in sessions.chosen_tests(deleted, tests, budget=60)]
    assert chosen == [
        "t/test_own.py::h",
        "t/test_a.py::f[1]",
        "t/test_b.py::g",
        "t/test_a.py::f[0]",
    ]


@pytest.mark.slow
def test_a_run(tmp_path):
    file = "haiku_implicit/core/messages.py"
    results = tmp_path / "results.json"
    # Only its doctest.
    options = [f"--files={file}", f"--tests={file}", f"--results={results}", "--processes=1"]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.mutation", *options],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "PYTEST_ADDOPTS": "",
        },  # fmt: skip
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr  # not 0 where a test fails without a change
    deleted = [r for r in sessions.read(results) if r.key[2] == "deleted raise"]
    assert any("::" in (r.by or "") for r in deleted)
    assert "| messages.py |" in run.stdout
