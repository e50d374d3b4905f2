"""The kernels that a wheel brings: for which CPUs they are compiled ahead, and which suit this one.

`setup.py` reads this file before the package's dependencies are installed: it imports only the standard
library.
"""

import pathlib
import platform
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
_NAMES = ("quantized_matmul", "integer_matmul", "trellis", "trellis_matmul", "hadamard")
SOURCES = [HERE / f"{name}.cc" for name in _NAMES]
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-w")


class Target(NamedTuple):
    """A kind of CPU.

    Attributes:
      name: of the file.
      flags: of the compiler.
      features: those that the CPU must have, by their names in `/proc/cpuinfo`.
    """

    name: str
    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()

    @property
    def file(self) -> str:
        """The name of the library's file."""
        return f"kernels-{self.name}.so"


_V2 = frozenset("pni ssse3 sse4_1 sse4_2 popcnt cx16 lahf_lm".split())
_V3 = _V2 | frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())

# By machine, the fastest first.
TARGETS = {
    "x86_64": (
        Target("x86-64-v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
        Target("x86-64-v4", ("-march=x86-64-v4",), _V4),
        Target("x86-64-v3", ("-march=x86-64-v3",), _V3),
        Target("x86-64", ("-march=x86-64",)),
    ),
    "aarch64": (Target("aarch64", ("-march=armv8-a",)),),
}


def brought() -> pathlib.Path | None:
    """The file of the fastest kernels that the package has compiled for this CPU; None without one."""
    features = _features()
    for target in TARGETS.get(platform.machine(), ()):
        file = HERE / target.file
        if features is not None and target.features <= features and file.exists():
            return file
    return None


def _features() -> frozenset[str] | None:
    """What all cores of this CPU have; None if the system does not say."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    named = ("flags", "Features")  # on x86-64, and on aarch64
    of_cores = [set(line.partition(":")[2].split()) for line in lines if line.startswith(named)]
    return frozenset(set.intersection(*of_cores)) if of_cores else frozenset()
