"""`haiku-implicit convert`: files of other libraries to those of this one, and adapters back."""

import json
import os
from typing import Any

from absl import flags

from haiku_implicit.command_line.command import (
    Command,
    UsageError,
    check_target,
    overwrite,
    switch,
    text,
)
from haiku_implicit.files.container import is_container
from haiku_implicit.files.loading import load, open_checkpoint
from haiku_implicit.files.saving import number_in, save
from haiku_implicit.interchange.gguf_reading import is_gguf, load_gguf
from haiku_implicit.interchange.hugging_face import load_hugging_face
from haiku_implicit.interchange.names import read_names
from haiku_implicit.interchange.peft import CONFIG, load_peft, save_peft
from haiku_implicit.params.adapter_parts import AdapterParts
from haiku_implicit.params.summary import summary

_AS_STORED = "stored"


def _define(values: flags.FlagValues) -> None:
    text(values, "names", None, "A JSON file {pattern of a tensor's name: its 'module/name'}.")
    flags.DEFINE_enum(
        "dtype",
        "float32",
        ["float32", "bfloat16", "float16", _AS_STORED],
        "Of the parameters' values; 'stored' keeps that of the file.",
        flag_values=values,
    )
    text(values, "dequantize", None, "Quantized weights that become dense, by module/name.")
    text(values, "like", None, "A checkpoint that has the parameters that there have to be.")
    text(values, "base_model", None, "For a folder of PEFT: the name of the PyTorch model.")
    switch(values, "json", "Says what was written as JSON.")
    overwrite(values)


def _run(values: flags.FlagValues, source: str, target: str) -> None:
    if not values.names:
        raise UsageError("--names=FILE.json is missing: it says where each tensor goes")
    check_target(values, target)
    names = read_names(values.names)
    kind = _kind_of(source)
    said: dict[str, Any] = {"target": target, "from": kind}
    if kind in ("peft", "adapter"):
        _check_unused(values, "dequantize", "like")
        count = _convert_adapter(values, kind, source, target, names)
        said |= {"adapted": count}
        line = f"{target}: weights with an adapter: {count}"
    else:
        read = load_gguf if kind == "gguf" else load_hugging_face
        dtype = None if values.dtype == _AS_STORED else values.dtype
        like = open_checkpoint(values.like).structs if values.like else None
        tree = read(source, names, dtype=dtype, like=like, dequantize=values.dequantize)
        save(target, tree)
        total, count = summary(tree).total, sum(map(len, tree.values()))
        said |= {"parameters": count, "nbytes": total.nbytes, "bits": total.bits}
        line = (
            f"{target}: {count} parameters, {total.nbytes:,} bytes, {total.bits:.2f} bits a number"
        )
    print(json.dumps(said) if values.json else line)


def _kind_of(source: str) -> str:
    """What a file or folder is."""
    if os.path.isdir(source):
        return "peft" if os.path.exists(os.path.join(source, CONFIG)) else "hugging_face"
    if is_gguf(source):
        return "gguf"
    if not is_container(source):
        raise ValueError(
            f"{source}: expected a GGUF file, one of safetensors, a folder of the Hugging Face hub or "
            "one of PEFT"
        )
    return "hugging_face" if number_in(source) is None else "adapter"


def _check_unused(values: flags.FlagValues, *names: str) -> None:
    for name in names:
        if values[name].value is not None:
            raise UsageError(f"--{name} is for models, and this is an adapter")


def _convert_adapter(
    values: flags.FlagValues, kind: str, source: str, target: str, names: Any
) -> int:
    """Between a folder of PEFT and a file of this library; returns how many parameters it adapts."""
    if kind == "peft":
        adapter = load_peft(source, names)
        save(target, adapter)
    else:
        adapter = load(source)
        if not isinstance(adapter, AdapterParts):
            raise ValueError(
                f"{source}: this library's file already, and not an adapter apart from its base, which "
                "would become a folder of PEFT"
            )
        save_peft(target, adapter, names, base_model=values.base_model)
    return len(adapter.weights)


COMMAND = Command(
    "convert",
    "Reads GGUF, Hugging Face and PEFT; writes adapters for PEFT.",
    ("SOURCE", "TARGET"),
    _define,
    _run,
)
