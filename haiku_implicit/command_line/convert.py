"""`haiku-implicit convert`: converts other libraries' files to this library's files, and back."""

import functools
import os
from typing import Any

from absl import flags

from haiku_implicit.command_line import program
from haiku_implicit.core.messages import value_error
from haiku_implicit.files.file_types import kind_of
from haiku_implicit.files.loading import load, open_checkpoint
from haiku_implicit.files.saving import save
from haiku_implicit.interchange.gguf_reading import load_gguf
from haiku_implicit.interchange.gguf_writing import save_gguf
from haiku_implicit.interchange.hugging_face import load_hugging_face
from haiku_implicit.interchange.names import read_names
from haiku_implicit.interchange.peft import load_peft, save_peft
from haiku_implicit.params.adapters.parts import AdapterParts
from haiku_implicit.params.summary import summary
from haiku_implicit.params.trees.trees import parameters_of

_AS_STORED = "stored"


@program.command(
    "SOURCE TARGET",
    program.text("names", "A JSON file {pattern of a tensor's name: its 'module/name'}."),
    functools.partial(
        flags.DEFINE_enum,
        "dtype",
        "float32",
        ["float32", "bfloat16", "float16", _AS_STORED],
        "Of the parameters' values; 'stored' keeps that of the file.",
    ),
    program.text("dequantize", "Quantized weights that become dense, by module/name."),
    program.text("like", "A checkpoint that has the parameters that there have to be."),
    program.text("base_model", "For a folder of PEFT: the name of the PyTorch model."),
    program.text(
        "metadata_from",
        "For a TARGET that ends in .gguf: a GGUF file of the same model, whose metadata (sizes, "
        "tokenizer) and names of tensors it gets.",
    ),
    program.text(
        "kind",
        "For a TARGET that ends in .gguf: how weights are stored: Q4_0, F16, ...; several, Q4_K,Q8_0, "
        "of which the first is taken that fits; or as JSON, for each pattern of a tensor's name. By "
        "default as they are.",
    ),
    *program.WRITING,
)
def convert(values: flags.FlagValues, source: str, target: str) -> program.Said:
    """Reads GGUF, Hugging Face and PEFT; writes GGUF, and adapters for PEFT."""
    if not values.names:
        raise program.UsageError("--names=FILE.json is missing: it says where each tensor goes")
    if target.endswith(".gguf"):
        return _to_gguf(values, source, target)
    _check_unused(values, "a TARGET that ends in .gguf", "metadata_from", "kind")
    kind = _kind_of(source)
    program.check_target(values, target, "folder" if kind == "adapter" else "safetensors")
    names = read_names(values.names)
    if kind in ("peft", "adapter"):
        _check_unused(values, "models, and this is an adapter", "dequantize", "like", "key")
        count = _convert_adapter(values, kind, source, target, names)
        line = f"{target}: weights with an adapter: {count}"
        return program.Said({"target": target, "from": kind, "adapted": count}, line)
    _check_unused(values, "files of this library", "key")
    load_from = load_gguf if kind == "gguf" else load_hugging_face
    dtype = None if values.dtype == _AS_STORED else values.dtype
    like = open_checkpoint(values.like).structs if values.like else None
    tree = load_from(source, names, dtype=dtype, like=like, dequantize=values.dequantize)
    save(target, tree)
    total, count = summary(tree).total, sum(map(len, tree.values()))
    sizes = {"parameters": count, "nbytes": total.nbytes, "bits": total.bits}
    return program.Said(
        {"target": target, "from": kind, **sizes},
        f"{target}: {count} parameters, {total.nbytes:,} bytes, {total.bits:.2f} bits a number",
    )


def _to_gguf(values: flags.FlagValues, source: str, target: str) -> program.Said:
    """Converts a file of this library, or another that `load` reads, to a GGUF file."""
    _check_unused(values, "what is read", "dequantize", "like", "base_model")
    if not values.metadata_from:
        raise program.UsageError(
            "--metadata_from=FILE.gguf is missing: a GGUF file of the same model, for its metadata and "
            "the names of its tensors. haiku_implicit.save_gguf takes other metadata"
        )
    program.check_target(values, target, "gguf")
    params, names = program.read(values, source), read_names(values.names)
    kind: Any = values.kind.split(",") if values.kind else None
    if values.kind and values.kind.lstrip().startswith("{"):
        kind = program.json_in(values, "kind")
    save_gguf(target, params, names, kind=kind, metadata_from=values.metadata_from)
    nbytes = os.path.getsize(target)
    count = len(parameters_of(params))
    return program.Said(
        {"target": target, "from": "saved", "parameters": count, "nbytes": nbytes},
        f"{target}: {count} parameters, {nbytes:,} bytes",
    )


def _kind_of(source: str) -> str:
    """The kind of a file or folder."""
    kind = kind_of(source)
    known = {"gguf": "gguf", "peft": "peft", "saved": "adapter"}
    known |= dict.fromkeys(("hub", "safetensors", "folder"), "hugging_face")
    if kind.name not in known:
        raise value_error(
            f"{source}: expected a GGUF file, one of safetensors, a folder of the Hugging Face hub or "
            f"one of PEFT; this is {kind.what}. {kind.way_out}"
        )
    return known[kind.name]


def _check_unused(values: flags.FlagValues, use: str, *names: str) -> None:
    for name in names:
        if values[name].value is not None:
            raise program.UsageError(f"--{name} is for {use}")


def _convert_adapter(
    values: flags.FlagValues, kind: str, source: str, target: str, names: Any
) -> int:
    """Converts between PEFT's folder and this library's file; returns the number of adapted weights."""
    if kind == "peft":
        adapter = load_peft(source, names)
        save(target, adapter)
    else:
        adapter = load(source)
        if not isinstance(adapter, AdapterParts):
            raise value_error(
                f"{source}: this library's file already, and not an adapter apart from its base, which "
                "would become a folder of PEFT. For a GGUF file, TARGET ends in .gguf"
            )
        save_peft(target, adapter, names, base_model=values.base_model)
    return len(adapter.weights)
