"""The commands of `haiku-implicit`.

haiku-implicit inspect model.safetensors --depth=2
haiku-implicit quantize model.safetensors small.safetensors --dtype=int4 --group_size=32
haiku-implicit add-lora small.safetensors tuned.safetensors --rank=8
haiku-implicit merge tuned.safetensors merged.safetensors
haiku-implicit diff model.safetensors merged.safetensors --plot=error.png
haiku-implicit convert model.gguf model.safetensors --names=names.json
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
from absl import flags

from haiku_implicit.arrays.adapter import method_names
from haiku_implicit.command_line import convert
from haiku_implicit.command_line.command import (
    Command,
    Said,
    UsageError,
    as_json,
    check_target,
    main_of,
    number,
    overwrite,
    say,
    switch,
    text,
)
from haiku_implicit.command_line.reading import define_key, part_of, read
from haiku_implicit.core.array import is_implicit, known_struct
from haiku_implicit.core.typing import Array, Tree
from haiku_implicit.files.loading import load
from haiku_implicit.files.saving import save
from haiku_implicit.params.adapters.adding import add_adapter, options_of
from haiku_implicit.params.adapters.merging import merge_adapters
from haiku_implicit.params.adapters.parts import AdapterParts, get_adapter, has_adapter, set_adapter
from haiku_implicit.params.plots import check_picture, plot_error, plot_memory
from haiku_implicit.params.quantizing.edits import quantize_params
from haiku_implicit.params.summary import compare_params, summary
from haiku_implicit.params.trees.trees import parameters_of

_TARGETS = "A regular expression that the whole of module/name matches; by default all weights."
_EXCLUDE = "The same, for those that are left out."


def _write(source: Any, target: str, tree: Tree) -> Said:
    """Writes a checkpoint; returns its sizes."""
    save(target, tree)
    before, after = summary(source).total, summary(tree).total
    return Said(
        {
            "target": target,
            "nbytes": after.nbytes,
            "nbytes_before": before.nbytes,
            "bits": after.bits,
        },
        f"{target}: {after.nbytes:,} bytes ({before.nbytes:,} before), {after.bits:.2f} bits a number",
    )


def _define_write(values: flags.FlagValues) -> None:
    switch(values, "json", "Says what was written as JSON.")
    overwrite(values)
    define_key(values)


def _define_targets(values: flags.FlagValues) -> None:
    text(values, "targets", None, _TARGETS)
    text(values, "exclude", None, _EXCLUDE)
    text(
        values,
        "matrix_axes",
        "{}",
        "As JSON, which axes of a weight [inputs, heads, width] are the rows and the columns of a "
        "matrix, from the end, for a pattern of names: '{\".*/query/w\": [[-3], [-2, -1]]}'.",
    )
    _define_write(values)


# --- inspect ---------------------------------------------------------------------------------------


def _define_inspect(values: flags.FlagValues) -> None:
    number(values, "depth", None, "A row for each module, by so many parts of its name.")
    define_key(values)
    switch(values, "json", "As JSON.")
    text(values, "plot", None, "Also draws it into this file (.png, .svg).")


def _inspect(values: flags.FlagValues, path: str) -> None:
    if values.plot:
        check_picture(values.plot)
    tree = part_of(load(path), values, path)
    if isinstance(tree, AdapterParts):
        tree = dict(tree.dense.items()) | _factors(tree)
    elif not isinstance(tree, Mapping):
        tree = {"": tree}
    found = summary(_with_parts_apart(tree), depth=values.depth)
    say(as_json(found.to_json()) if values.json else str(found))
    if values.plot:
        plot_memory(found, values.plot)


def _factors(adapter: AdapterParts) -> dict[str, Any]:
    """The arrays of an adapter: without its base it does not have a shape."""
    return dict(_with_parts_apart(adapter.weights))


def _with_parts_apart(tree: Tree) -> Tree:
    """Replaces incomplete implicit arrays, such as factors without a weight, by mappings of parts."""

    def apart(x: Any) -> Array:
        if not is_implicit(x) or known_struct(x) is not None:
            return x
        leaves = jax.tree_util.tree_flatten_with_path(x)[0]
        return {jax.tree_util.keystr(keys).lstrip("."): leaf for keys, leaf in leaves}

    if isinstance(tree, Mapping):  # in their own order
        return {name: _with_parts_apart(x) for name, x in tree.items()}
    return jax.tree.map(apart, tree, is_leaf=is_implicit)


def _object(values: flags.FlagValues, name: str) -> dict[str, Any]:
    """The value of a flag that is a JSON object."""
    try:
        found = json.loads(str(values[name].value))
    except ValueError as e:
        raise UsageError(f"--{name}: not JSON: {e}") from e
    if not isinstance(found, dict):
        raise UsageError(f"--{name}: expected a JSON object, got {values[name].value!r}")
    return found


# --- quantize, add-lora, merge ---------------------------------------------------------------------


def _define_quantize(values: flags.FlagValues) -> None:
    text(values, "dtype", "int8", "The format: int8, int4, nf4, fp8, mxfp4, ...")
    number(values, "group_size", None, "How many numbers share a scale; by default a whole column.")
    text(values, "calibration", None, "How scales are found: absmax, mse, ...")
    switch(values, "zero_point", "Codes relative to a zero point.")
    text(values, "activation", None, "The format that activations are rounded to; by default none.")
    _define_targets(values)


def _quantize(values: flags.FlagValues, source: str, target: str) -> Said:
    check_target(values, target)
    params = read(values, source)
    names = ("dtype", "group_size", "calibration", "zero_point", "activation", "targets", "exclude")
    options: dict[str, Any] = {name: values[name].value for name in names}
    new = quantize_params(params, matrix_axes=_object(values, "matrix_axes"), **options)
    return _write(params, target, new)


def _define_add_lora(values: flags.FlagValues) -> None:
    text(values, "method", "lora", ", ".join(method_names()))
    number(values, "rank", None, "Of the adapter; 8 by default, for methods that have one.")
    flags.DEFINE_float(
        "alpha", None, "Its scale is alpha / rank; by default 1.", flag_values=values
    )
    text(values, "options", "{}", "Other options of the method, as JSON: '{\"block_size\": 4}'.")
    number(values, "seed", 0, "For what is drawn.", least=0)
    _define_targets(values)


def _add_lora(values: flags.FlagValues, source: str, target: str) -> Said:
    check_target(values, target)
    params = read(values, source)
    options = _object(values, "options")
    known = options_of(values.method) or {}
    rank = 8 if values.rank is None and "rank" in known else values.rank
    options |= {k: v for k, v in dict(rank=rank, alpha=values.alpha).items() if v is not None}
    choice: dict[str, Any] = dict(targets=values.targets, exclude=values.exclude)
    choice["matrix_axes"] = _object(values, "matrix_axes")
    new = add_adapter(params, values.seed, values.method, **choice, **options)
    return _write(params, target, new)


def _define_merge(values: flags.FlagValues) -> None:
    text(values, "adapter", None, "A file of an adapter apart from its base, which SOURCE is then.")
    switch(values, "requantize", "Weights that were quantized are quantized again.")
    switch(values, "any_base", "Take an adapter that was made for another base.")
    _define_write(values)


def _merge(values: flags.FlagValues, source: str, target: str) -> Said:
    check_target(values, target)
    params = read(values, source)
    if values.adapter:
        adapter = load(values.adapter)
        if not isinstance(adapter, AdapterParts):
            try:
                adapter = get_adapter(adapter)
            except (ValueError, TypeError) as e:
                raise ValueError(f"{values.adapter}: there is no adapter in it ({e})") from e
        try:
            params = set_adapter(params, adapter, check_base=not values.any_base)
        except ValueError as e:  # it names the argument of the function
            raise ValueError(str(e).replace("check_base=False", "--any_base")) from e
    if not any(has_adapter(parameter.value) for parameter in parameters_of(params)):
        raise ValueError(
            f"{source}: there are no adapters in it; --adapter=FILE takes one from a file"
        )
    merged = merge_adapters(params, requantize=values.requantize)
    said = _write(params, target, merged)
    if not values.requantize:
        return said
    found = compare_params(params, merged)
    return Said({**said.fields, "changed": found.to_json()}, f"{said.line}\n{found}")


# --- diff ------------------------------------------------------------------------------------------


def _define_diff(values: flags.FlagValues) -> None:
    define_key(values)
    switch(values, "json", "As JSON.")
    text(values, "plot", None, "Also draws it into this file (.png, .svg).")


def _diff(values: flags.FlagValues, first: str, second: str) -> None:
    if values.plot:
        check_picture(values.plot)
    found = compare_params(read(values, first), read(values, second))
    say(as_json(found.to_json()) if values.json else str(found))
    if values.plot:
        plot_error(found, values.plot)


COMMANDS = (
    Command(
        "inspect",
        "What is in a checkpoint: types, bytes, bits.",
        ("PATH",),
        _define_inspect,
        _inspect,
    ),
    Command("quantize", "Quantizes weights.", ("SOURCE", "TARGET"), _define_quantize, _quantize),
    Command(
        "add-lora", "Puts adapters on weights.", ("SOURCE", "TARGET"), _define_add_lora, _add_lora
    ),
    Command("merge", "Merges adapters into weights.", ("SOURCE", "TARGET"), _define_merge, _merge),
    Command("diff", "How far two checkpoints are apart.", ("FIRST", "SECOND"), _define_diff, _diff),
    convert.COMMAND,
)

main = main_of(COMMANDS, "Checkpoints of Haiku models with implicit arrays.")
