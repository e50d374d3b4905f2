"""The library of native kernels: from the wheel, or compiled at first use; registered with JAX.

This file knows nothing of products; `native` calls the registered handlers. Without kernels in the
wheel and without a C++ compiler, or with `HAIKU_IMPLICIT_NATIVE=0` in the environment, `available()` is
False, and XLA's own operations compute products.
"""

import contextlib
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
import threading
import time
from multiprocessing.pool import ThreadPool

import jax
import jaxlib.version
from absl import logging

from haiku_implicit.core.messages import see
from haiku_implicit.quantized.cpu import targets

SOURCES = targets.SOURCES

# The functions of the library; each is a target of `jax.ffi.ffi_call`, after this prefix.
HANDLERS = (
    "QuantizedMatmul", "IntegerMatmul", "TrellisEncode", "TrellisMatmul", "TrellisDecode", "Hadamard",
)  # fmt: skip
PREFIX = "haiku_implicit_"

# `native` is the CPU that compiles: other CPUs do not use the library, see `_key`. Another target, as
# `x86-64-v3` for AVX2, serves to measure and to test.
_TARGET = os.environ.get("HAIKU_IMPLICIT_NATIVE_TARGET", "")
FLAGS = (*targets.FLAGS, f"-march={_TARGET or 'native'}")

_TIMEOUT = 600  # seconds

_NAME = "quantized_matmul"
_MOST_KEPT = 8  # libraries in the cache, for several environments, or machines that share it


class BuildError(Exception):
    """The kernels could not be built; the message says why."""


# Threads that call `available` at once would each compile the kernels.
_registering = threading.Lock()


def _renew_lock() -> None:
    """In a forked process no thread will release the lock of a thread that compiles in its parent."""
    global _registering
    _registering = threading.Lock()


if hasattr(os, "register_at_fork"):  # (not on Windows)
    os.register_at_fork(after_in_child=_renew_lock)


def available() -> bool:
    """Whether the kernels can be called. The first call loads them, or compiles them."""
    if os.environ.get("HAIKU_IMPLICIT_NATIVE", "1") == "0":
        return False
    with _registering:
        return _registered()


@functools.cache
def _registered() -> bool:
    try:
        register(PREFIX, FLAGS)
    except (BuildError, OSError) as error:
        logging.warning(
            "haiku_implicit: products with quantized weights go without the native kernel, which "
            "is slower: %s %s", error, see("no-compiler"),
        )  # fmt: skip
        return False
    return True


# For each prefix of registered handlers, see `largest_tiled`.
_LARGEST_TILED: dict[str, int] = {}


def largest_tiled() -> int:
    """The largest code of which this CPU multiplies many rows, in small groups, fastest as integers."""
    return _LARGEST_TILED[PREFIX]


def register(prefix: str, flags: tuple[str, ...]) -> None:
    """Makes the kernels' handlers targets of `jax.ffi.ffi_call` on the CPU.

    Args:
      prefix: the prefix of the targets' names.
      flags: the flags for the compiler.

    Raises:
      BuildError, OSError: as `library` does.
    """
    brought = targets.brought() if flags == FLAGS and not _TARGET else None
    if brought is not None:
        try:
            return _register(prefix, _load(brought))
        except Exception as error:  # of another C library, or of a later version of XLA's interface
            logging.info("haiku_implicit: compiles the native kernel, since %s", error)
    _register(prefix, library(flags))


def _register(prefix: str, loaded: ctypes.CDLL) -> None:
    loaded.LargestTiled.restype = ctypes.c_int64
    _LARGEST_TILED[prefix] = loaded.LargestTiled()
    for name in HANDLERS:
        capsule = jax.ffi.pycapsule(getattr(loaded, name))
        jax.ffi.register_ffi_target(prefix + name, capsule, platform="cpu")


def library(flags: tuple[str, ...]) -> ctypes.CDLL:
    """Loads the library from the user's cache; or compiles it, and caches it if possible.

    Args:
      flags: the flags for the compiler.

    Raises:
      BuildError: without a compiler, or if it fails.
      OSError: if the library cannot be written or loaded.
    """
    compiler = _compiler()
    name = f"{_NAME}-{_key(compiler, flags)}"
    folder = _cache()
    kept = None if folder is None else _kept(folder, name)
    if kept is not None:
        return kept
    with tempfile.TemporaryDirectory() as temporary:
        path, start = pathlib.Path(temporary) / "library.so", time.monotonic()
        _compile(compiler, flags, str(path))
        loaded = _load(path)
        seconds = time.monotonic() - start
        logging.info("haiku_implicit: compiled the native kernel in %.1f seconds", seconds)
        if folder is not None:
            _keep(path.read_bytes(), folder, name)
    return loaded


def _load(path: pathlib.Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name in HANDLERS:
        if not hasattr(loaded, name):
            raise BuildError(f"{path}: it does not define {name}")
    return loaded


# --- the compiler --------------------------------------------------------------------------------


def _compiler() -> list[str]:
    text = os.environ.get("CXX", "")
    try:
        given = shlex.split(text)
    except ValueError as error:
        raise BuildError(f"CXX: expected a command, got {text!r} ({error})") from error
    for command in [given] if given else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler ({' '.join(given) or 'c++, g++, clang++'}); set CXX to one")


def _compile(compiler: list[str], flags: tuple[str, ...], output: str) -> None:
    """Compiles all sources at the same time, and links the library."""
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
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if "error" in line] or ["it failed"]
        raise BuildError(f"{command[0]}: {lines[0]}")


def _key(compiler: list[str], flags: tuple[str, ...]) -> str:
    """Returns a digest of all that the compiled library depends on."""
    sources = [path.read_text() for path in sorted(SOURCES[0].parent.glob("*.[ch]*"))]
    parts = [*sources, jaxlib.version.__version__, *compiler, *flags, _cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cpu() -> str:
    """Returns the CPU's model and its features."""
    try:
        first = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        first = [platform.processor()]
    named = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(x for x in first if x.startswith(named))])


# --- the cache -----------------------------------------------------------------------------------
# The name of a file ends with a digest of its content, because loading an incomplete library can kill
# the process.


def _cache() -> pathlib.Path | None:
    """Returns the folder of compiled libraries, or None if it cannot be used."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        return _private(pathlib.Path(base) / "haiku_implicit" / "kernels")
    except (OSError, RuntimeError) as error:  # RuntimeError: without a home directory
        _warn_of_cache(error)
        return None


def _warn_of_cache(error: Exception) -> None:
    logging.warning(
        "haiku_implicit: each process compiles the native kernel, because its cache can't be used: %s",
        error,
    )


def _private(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder, created if it does not exist; only this user may have access.

    Raises:
      OSError: if others have access: the process runs code from this folder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder}: expected a folder of this user alone (mode 0700), got mode "
            f"{stat.filemode(found.st_mode)} and owner {found.st_uid}"
        )
    return folder


def _kept(folder: pathlib.Path, name: str) -> ctypes.CDLL | None:
    """Loads the library of this name from the cache; removes damaged files."""
    for path in folder.glob(f"{name}-*.so"):
        with contextlib.suppress(OSError, BuildError):
            if path.is_file() and path.name == _file_name(name, path.read_bytes()):
                loaded = _load(path)
                with contextlib.suppress(OSError):
                    os.utime(path)  # the last use
                return loaded
        _remove(path)
    return None


def _keep(content: bytes, folder: pathlib.Path, name: str) -> None:
    """Puts a library into the cache; removes those that have not been used for longest."""
    try:
        # Written under a temporary name: other processes may do the same.
        handle, unfinished = tempfile.mkstemp(dir=folder, prefix=f"{_NAME}-", suffix=".tmp")
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(unfinished, folder / _file_name(name, content))
        finally:
            pathlib.Path(unfinished).unlink(missing_ok=True)
    except OSError as error:
        _warn_of_cache(error)
    with contextlib.suppress(OSError):  # if another process removes the same file
        by_last_use = sorted(folder.glob(f"{_NAME}-*"), key=lambda path: path.lstat().st_mtime)
        for path in by_last_use[:-_MOST_KEPT]:
            _remove(path)


def _file_name(name: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def _remove(path: pathlib.Path) -> None:
    """Removes a file, link or folder; processes that have loaded it keep it in memory."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
