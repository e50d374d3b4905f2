"""Kernels that are compiled ahead: which a machine takes, and a wheel of them without a compiler."""

import os
import pathlib
import platform
import shutil
import subprocess
import sys
import zipfile

import jax
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


def test_aarch64_takes_its_own(monkeypatch, tmp_path):
    info = "processor\t: 0\nFeatures\t: fp asimd evtstrm\n\nprocessor\t: 1\nFeatures\t: fp asimd\n"
    monkeypatch.setattr(targets.pathlib.Path, "read_text", lambda path: info)
    assert targets._features() == {"fp", "asimd"}
    monkeypatch.setattr(targets, "HERE", tmp_path)
    monkeypatch.setattr(targets.platform, "machine", lambda: "aarch64")
    (tmp_path / "kernels-aarch64.so").touch()
    assert targets.brought() == tmp_path / "kernels-aarch64.so"


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


def wheel_of(folder, flags="-O0", **environment):
    """Builds a wheel from a copy of the sources, with few optimizations."""
    folder.mkdir()
    source = folder / "source"
    shutil.copytree(ROOT / "haiku_implicit", source / "haiku_implicit",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps")
    run(*pip, "-w", str(folder), str(source), folder=folder, CXXFLAGS=flags, **environment)
    [wheel] = folder.glob("*.whl")
    return wheel


def has_kernels():
    """Whether a wheel that is made here has kernels: for Linux on x86-64 and aarch64, by a compiler."""
    known = platform.system() == "Linux" and platform.machine() in targets.TARGETS
    return known and shutil.which("c++") is not None


@pytest.mark.slow
def test_a_wheel_needs_no_compiler(tmp_path):
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


CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.slow
def test_a_wheel_for_another_machine(tmp_path):
    """Debian's compiler makes one for aarch64; its kernels multiply right in an emulator.

    The compiler is of the package `g++-aarch64-linux-gnu`, the emulator of `qemu-user`. Without the
    former no wheel is made, and without the latter its kernels are only linked with a program.
    """
    with pytest.raises(AssertionError, match="no compiler /nonexistent"):
        wheel_of(tmp_path / "none", HAIKU_IMPLICIT_MACHINE="aarch64", CXX="/nonexistent")
    if shutil.which(CROSS) is None:
        with pytest.raises(AssertionError, match=f"no compiler {CROSS}"):
            wheel_of(tmp_path / "made", HAIKU_IMPLICIT_MACHINE="aarch64")
        return
    wheel = wheel_of(tmp_path / "made", "-O1", HAIKU_IMPLICIT_MACHINE="aarch64", CXX=CROSS)
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl") and wheel.stat().st_size < 3e6
    [target] = targets.TARGETS["aarch64"]
    with zipfile.ZipFile(wheel) as files:
        [kernels] = [name for name in files.namelist() if name.endswith(".so")]
        assert pathlib.Path(kernels).name == target.file
        library = files.extract(kernels, tmp_path)
    program, source = tmp_path / "all_formats", pathlib.Path(__file__).with_name("all_formats.cc")
    command = (CROSS, "-std=c++17", "-O1", "-w", f"-I{jax.ffi.include_dir()}", str(source), library)
    run(*command, "-pthread", "-o", str(program), folder=tmp_path)
    if shutil.which(EMULATOR) is None:
        return
    system = (
        "-L",
        "/usr/aarch64-linux-gnu",
        "-E",
        f"LD_LIBRARY_PATH={pathlib.Path(library).parent}",
    )
    done = run(EMULATOR, *system, str(program), folder=tmp_path)
    assert done.stdout.endswith(" 0 wrong\n")


@pytest.mark.slow
def test_a_wheel_for_all_machines(tmp_path):
    """Asked for `any`, it has no kernels, with a compiler too; an unknown machine is an error."""
    wheel = wheel_of(tmp_path / "any", HAIKU_IMPLICIT_MACHINE="any")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist())
    with pytest.raises(AssertionError, match="there are no kernels for sparc"):
        wheel_of(tmp_path / "sparc", HAIKU_IMPLICIT_MACHINE="sparc")
