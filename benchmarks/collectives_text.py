"""Reads collectives and native kernel calls from the text of a compiled program."""

import re

import numpy as np

from haiku_implicit.quantized.cpu import build

_OPERATIONS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_ITEMSIZES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1}


def calls(text: str) -> int:
    """Counts the calls of native kernels in a compiled program."""
    return sum("custom-call" in line and build.PREFIX in line for line in text.splitlines())


def sent(text: str) -> int:
    """Returns the bytes of the results of collectives in a compiled program."""
    results = re.findall(rf"= (.*?) (?:{_OPERATIONS})(?:-start)?\(", text)
    arrays = [found for result in results for found in re.findall(r"(\w+)\[([\d,]*)\]", result)]
    return sum(
        _ITEMSIZES[dtype] * int(np.prod([int(n) for n in sizes.split(",") if n], dtype=int))
        for dtype, sizes in arrays
    )
