"""The library of native kernels: compiled from C++ at first use, cached, and registered with JAX.

This file knows nothing of products; `native` calls what it registers. Without a C++ compiler, or with
`HAIKU_IMPLICIT_NATIVE=0` in the environment, `available()` is False, and XLA's own operations serve.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from multiprocessing.pool import ThreadPool

import jax
import jaxlib.version
from absl import logging

SOURCES = [
    pathlib.Path(__file__).with_name(f"{name}.cc")
    for name in ("quantized_matmul", "integer_matmul")
]

# What the library defines; each is a target of `jax.ffi.ffi_call`, after this prefix.
HANDLERS = ("QuantizedMatmul", "IntegerMatmul")
PREFIX = "haiku_implicit_"

# The CPU is the one that compiles: the library is not shared with others, see `_key`.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-w")

_TIMEOUT = 300  # seconds


class BuildError(Exception):
    """The kernels could not be built, and why."""


def available() -> bool:
    """Whether the kernels can be called. The first call compiles them."""
    return os.environ.get("HAIKU_IMPLICIT_NATIVE", "1") != "0" and _registered()


@functools.cache
def _registered() -> bool:
    try:
        register(PREFIX, FLAGS)
    except (BuildError, OSError) as error:
        logging.warning(
            "haiku_implicit: products with quantized weights go without the native kernel, which "
            "is slower: %s", error,
        )  # fmt: skip
        return False
    return True


def register(prefix: str, flags: tuple[str, ...]) -> None:
    """Makes the kernel's handlers targets of `jax.ffi.ffi_call` on the CPU.

    Args:
      prefix: what the targets' names begin with.
      flags: of the compiler.

    Raises:
      BuildError: without a compiler, or where it fails.
      OSError: where the library cannot be written or loaded.
    """
    with tempfile.TemporaryDirectory() as temporary:
        loaded = ctypes.CDLL(str(library(flags, pathlib.Path(temporary))))
    for name in HANDLERS:
        capsule = jax.ffi.pycapsule(getattr(loaded, name))
        jax.ffi.register_ffi_target(prefix + name, capsule, platform="cpu")


def library(flags: tuple[str, ...], temporary: pathlib.Path) -> pathlib.Path:
    """The path of the compiled library: in the user's cache, or, if that can't be used, elsewhere.

    Args:
      flags: of the compiler.
      temporary: an existing folder, which is used if the cache can't be.
    """
    compiler = _compiler()
    name = f"quantized_matmul-{_key(compiler, flags)}.so"
    try:
        folder = _private(_cache())
        if (folder / name).exists():
            return folder / name
        # A name of its own while it is written: other processes may do the same.
        handle, unfinished = tempfile.mkstemp(dir=folder, suffix=".tmp")
        os.close(handle)
    except OSError:
        folder, unfinished = temporary, str(temporary / "unfinished.tmp")
    try:
        _compile(compiler, flags, unfinished)
        os.replace(unfinished, folder / name)
    finally:
        pathlib.Path(unfinished).unlink(missing_ok=True)
    return folder / name


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler ({' '.join(given) or 'c++, g++, clang++'}); set CXX to one")


def _compile(compiler: list[str], flags: tuple[str, ...], output: str) -> None:
    """The library of all sources, which are compiled at the same time."""
    include = f"-I{jax.ffi.include_dir()}"
    with tempfile.TemporaryDirectory() as folder, ThreadPool(len(SOURCES)) as pool:
        objects = [os.path.join(folder, f"{source.stem}.o") for source in SOURCES]
        pool.starmap(
            lambda source, name: _run([*compiler, *flags, include, "-c", str(source), "-o", name]),
            zip(SOURCES, objects, strict=True),
        )
        _run([*compiler, *flags, *objects, "-o", output])


def _run(command: list[str]) -> None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if "error" in line] or ["it failed"]
        raise BuildError(f"{command[0]}: {lines[0]}")


def _key(compiler: list[str], flags: tuple[str, ...]) -> str:
    """What the compiled library depends on, as a name."""
    sources = [path.read_text() for path in sorted(SOURCES[0].parent.glob("*.[ch]*"))]
    parts = [*sources, jaxlib.version.__version__, *compiler, *flags, _cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cpu() -> str:
    """The CPU's model and what it can do."""
    try:
        first = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        first = [platform.processor()]
    named = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(x for x in first if x.startswith(named))])


def _cache() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "haiku_implicit" / "kernels"


def _private(folder: pathlib.Path) -> pathlib.Path:
    """The folder, made if it does not exist, if only this user can write to it.

    Raises:
      OSError: where others can, too: what lies there will be run.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder}: expected a folder of this user alone (mode 0700)")
    return folder
