"""How XLA compiles in tests. Nothing here imports JAX, which reads flags once."""

import importlib.metadata
import os
import tempfile


def quick_to_compile():
    """Flags that tell XLA not to spend time on optimizing for the CPU: half of the tests' time.

    The passes over HLO, which tests read and count, are the same. `XLA_FLAGS=` in the environment
    runs the tests with XLA's own settings.
    """
    flags = [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    release = importlib.metadata.version("jaxlib").split(".")
    if (int(release[0]), int(release[1])) < (0, 11):  # XLA aborts at a flag that it does not know
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


def share_programs():
    """Has all processes of a run keep compiled programs in one folder, which JAX reads them from.

    Tests compile a program anew if another process, or this one before it emptied JAX's caches, has
    compiled it, and so does each new function of the same program. `JAX_COMPILATION_CACHE_DIR` in the
    environment names another folder, which stays.

    Returns:
      The folder, which is deleted with the object; None for a folder that is given.
    """
    os.environ |= {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    folder = tempfile.TemporaryDirectory(prefix="programs-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
    return folder
