"""The instruction sets that the CPU kernels are tested for."""

import pathlib

from haiku_implicit.quantized.cpu import build

# Flags that choose other vectors than those of this CPU, which has the widest of them.
PORTABLE = (*(flag for flag in build.FLAGS if not flag.startswith("-march")), "-O1")
TARGETS = {"portable": PORTABLE}
CPU_INFO = pathlib.Path("/proc/cpuinfo")
if CPU_INFO.exists() and " avx2 " in CPU_INFO.read_text():
    TARGETS["avx2"] = (*PORTABLE, "-march=x86-64-v3")


def with_compiler(test):
    """A test of the compiled kernel, which needs a compiler (`test_no_compiler` is for systems without one)."""
    try:
        build._compiler()
    except build.BuildError:
        return None
    return test
