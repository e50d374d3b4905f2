"""Kernels that are compiled ahead: which a machine takes, and a wheel of them without a compiler."""

import os
import pathlib
import platform
import shutil
import subprocess
import sys

import pytest

from haiku_implicit.quantized.cpu import targets

ROOT = pathlib.Path(__file__).resolve().parents[2]
V2 = "pni ssse3 sse4_1 sse4_2 popcnt cx16 lahf_lm"
V3 = f"{V2} avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ("sse4_2", "x86-64"),
        (V3.replace(" fma", ""), "x86-64"),
        (V3, "x86-64-v3"),
        (f"{V3} avx512f", "x86-64-v3"),
        (V4, "x86-64-v4"),
        (f"{V4} avx512_vnni", "x86-64-v4-vnni"),
    ],
)
def test_the_fastest_that_the_cpu_can_run(features, name, monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "HERE", tmp_path)
    monkeypatch.setattr(targets.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(targets, "_features", lambda: frozenset(features.split()))
    assert targets.brought() is None
    for target in targets.TARGETS["x86_64"]:
        (tmp_path / target.file).touch()
    assert targets.brought() == tmp_path / f"kernels-{name}.so"
    (tmp_path / f"kernels-{name}.so").unlink()
    slower = targets.brought()
    assert (slower is None) == (name == "x86-64") and slower != tmp_path / f"kernels-{name}.so"


def test_a_checkout_has_none():
    assert targets.brought() is None


USE = """
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np
import haiku_implicit as hki
from haiku_implicit.quantized.cpu import build, targets

assert pathlib.Path(hki.__file__).is_relative_to(sys.argv[1])
w = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
q, x = hki.QuantizedMatrix.quantize(jnp.asarray(w), "int4", group_size=32), jnp.eye(64)[:3]
product = jax.jit(hki.use_implicit_args(lambda x, q: x @ q))
assert build.PREFIX in product.lower(x, q).as_text()
np.testing.assert_allclose(product(x, q), hki.materialize(q)[:3], rtol=1e-6)
print(targets.brought().name)
"""


def run(*command, folder, **environment):
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", **environment}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def wheel_of(folder):
    """Builds a wheel from a copy of the sources, with the fewest optimizations."""
    source = folder / "source"
    shutil.copytree(ROOT / "haiku_implicit", source / "haiku_implicit",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps")
    run(*pip, "-w", str(folder), str(source), folder=folder, CXXFLAGS="-O0")
    [wheel] = folder.glob("*.whl")
    return wheel


def has_kernels():
    """Whether a wheel that is made here has kernels: for Linux on x86-64 and aarch64, by a compiler."""
    known = platform.system() == "Linux" and platform.machine() in targets.TARGETS
    return known and shutil.which("c++") is not None


@pytest.mark.slow
def test_a_wheel_needs_no_compiler(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    wheel = wheel_of(tmp_path / "one")
    if not has_kernels():
        assert wheel.name.endswith("-py3-none-any.whl")
        return
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert wheel.stat().st_size < 3e6
    assert wheel.read_bytes() == wheel_of(tmp_path / "two").read_bytes()  # (reproducible)

    site, cache = tmp_path / "site", tmp_path / "cache"
    install = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site))
    run(*install, str(wheel), folder=tmp_path)
    used = run(
        *(sys.executable, "-c", USE, str(site)),
        folder=tmp_path,
        PYTHONPATH=str(site),
        PATH="/nonexistent",
        CXX="",
        XDG_CACHE_HOME=str(cache),
        HAIKU_IMPLICIT_NATIVE_TARGET="",
    )
    assert used.stdout.strip() in {t.file for t in targets.TARGETS[platform.machine()]}
    assert used.stderr == "" and not cache.exists()
