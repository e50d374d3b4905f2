"""How XLA compiles in tests. Nothing here imports JAX, which reads flags once."""

import importlib.metadata


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
