"""Compiles the kernels for CPUs into the wheel; setup.cfg has all the rest."""

import concurrent.futures
import importlib.util
import os
import pathlib
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile

import setuptools
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (pyproject.toml names this file as the build's backend)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CPU = "haiku_implicit/quantized/cpu"
ABOUT = runpy.run_path(f"{CPU}/targets.py")
# The machine that the wheel is for, as `aarch64`; `any` makes a wheel without kernels.
ASKED = os.environ.get("HAIKU_IMPLICIT_MACHINE", "")
MACHINE = ASKED or platform.machine()
TARGETS = ABOUT["TARGETS"].get(MACHINE, ()) if platform.system() == "Linux" else ()
CROSS = f"{MACHINE}-linux-gnu-g++"  # Debian's name
COMPILER = shlex.split(os.environ.get("CXX", "c++" if platform.machine() == MACHINE else CROSS))
MORE_FLAGS = shlex.split(os.environ.get("CXXFLAGS", ""))
# Machines with an older C++ library can load the kernels, and each build gives the same bytes.
LINKED = (
    *("-static-libstdc++", "-ffunction-sections", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL"),
    *("-Wl,--build-id=none", "-s"),
)


def get_requires_for_build_wheel(config_settings=None):
    """Requires the headers in jaxlib, of the oldest version: later ones load what has used them."""
    found = build_meta.get_requires_for_build_wheel(config_settings)
    if not TARGETS or shutil.which(COMPILER[0]) is None:
        return found
    newest = (
        ",<0.8" if sys.version_info < (3, 15) else ""
    )  # 0.7 is not for later versions of Python
    return [*found, f"jaxlib>=0.7{newest}"]


def compile_kernels(folder):
    """Compiles the sources for each target into a folder.

    Raises:
      OSError, CalledProcessError: without a compiler or headers, or if the compiler fails.
    """
    if shutil.which(COMPILER[0]) is None:
        raise OSError(f"there is no compiler {COMPILER[0]}")
    jaxlib = importlib.util.find_spec("jaxlib")
    if jaxlib is None:
        raise OSError("jaxlib, which has the headers, is not installed")
    include = pathlib.Path(jaxlib.origin).parent / "include"

    def compile_for(target):
        flags = [*ABOUT["FLAGS"], *target.flags, f"-I{include}", *LINKED, *MORE_FLAGS]
        sources = [f"{CPU}/{path.name}" for path in ABOUT["SOURCES"]]
        subprocess.run([*COMPILER, *flags, *sources, "-o", folder / target.file], check=True)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_for, TARGETS))


class BuildWithKernels(build_py):
    """Adds the kernels, unless the package is installed to be edited."""

    def run(self):
        super().run()
        if ASKED not in ("", "any") and not TARGETS:
            raise ValueError(f"HAIKU_IMPLICIT_MACHINE: there are no kernels for {ASKED}")
        folder = pathlib.Path(self.build_lib) / CPU
        for old in folder.glob("kernels-*.so"):  # of an earlier build in this folder
            old.unlink()
        if TARGETS and not self.editable_mode:
            with tempfile.TemporaryDirectory() as made:
                try:
                    compile_kernels(pathlib.Path(made))
                except (OSError, subprocess.CalledProcessError) as error:
                    if ASKED:
                        raise
                    self.warn(f"no kernels in this wheel, they are compiled at first use: {error}")
                    return
                for path in pathlib.Path(made).iterdir():
                    self.copy_file(str(path), str(folder / path.name))


class Wheel(bdist_wheel):
    """A wheel for all versions of Python, and for one kind of machine if it has kernels."""

    def run(self):
        self.run_command("build_py")
        folder = pathlib.Path(self.get_finalized_command("build_py").build_lib) / CPU
        kernels = any(folder.glob("kernels-*.so"))
        self.root_is_pure = not kernels
        self.distribution.has_ext_modules = lambda: kernels  # (decides where files are installed)
        super().run()

    def get_tag(self):
        return ("py3", "none", "any" if self.root_is_pure else f"linux_{MACHINE}")


if __name__ == "__main__":
    setuptools.setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": Wheel})
