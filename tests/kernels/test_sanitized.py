"""The kernels under sanitizers: no read past an operand, no overflow, for each layout of codes and each target."""

import pathlib
import subprocess

import jax
import pytest

from haiku_implicit.quantized.cpu import build
from tests.native_targets import TARGETS, with_compiler

SANITIZE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.slow
@pytest.mark.all_slow
@with_compiler
@pytest.mark.parametrize("target", [*TARGETS, "this CPU"])
def test_all_formats(target, tmp_path):
    """`all_formats.cc` calls the kernels with operands in memory of exactly their size."""
    flags = TARGETS.get(target, (*build.FLAGS, "-O1"))
    compile_flags = [flag for flag in flags if flag not in ("-shared", "-fPIC")]
    sources = [pathlib.Path(__file__).with_name("all_formats.cc"), *build.SOURCES]
    program, include = tmp_path / "all_formats", f"-I{jax.ffi.include_dir()}"
    command = [*build._compiler(), *compile_flags, *SANITIZE, include, *map(str, sources)]
    subprocess.run([*command, "-pthread", "-o", program], check=True)
    run = subprocess.run([program], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stdout.endswith(" 0 wrong\n"), run.stdout + run.stderr
