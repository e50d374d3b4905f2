"""Types for editors: what a type checker knows of a user's program. `.ci/run` asks pyright as well."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import typed_program

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = pathlib.Path(typed_program.__file__)


@pytest.mark.slow
def test_the_program_runs():
    typed_program.main()


@pytest.mark.slow
def test_mypy_knows_the_types(tmp_path):
    """There is no error, and no type is `Any`."""
    command = (sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(PROGRAM))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    options = ("--python-version=3.11", "--config-file=", f"--cache-dir={tmp_path}")
    run = subprocess.run(
        [*command, *options], env=os.environ | {"MYPYPATH": path}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert "error" not in run.stdout and run.returncode == 0, run.stdout + run.stderr
    types = re.findall(r'Revealed type is "(.*)"', run.stdout)
    assert len(types) == PROGRAM.read_text().count("    reveal_type(")
    assert not [found for found in types if re.search(r"\bAny\b|\?", found)], types
