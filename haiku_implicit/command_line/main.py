"""The commands of `haiku-implicit`.

haiku-implicit inspect model.safetensors --depth=2
haiku-implicit quantize model.safetensors small.safetensors --dtype=int4 --group_size=32
haiku-implicit add-lora small.safetensors tuned.safetensors --rank=8
haiku-implicit merge tuned.safetensors merged.safetensors
haiku-implicit diff model.safetensors merged.safetensors --plot=error.png
haiku-implicit convert model.gguf model.safetensors --names=names.json
"""

import functools
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
from absl import flags

from haiku_implicit.arrays.adapter import method_names
from haiku_implicit.command_line import program
from haiku_implicit.command_line.convert import convert
from haiku_implicit.core.array import is_implicit, known_struct
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array, Params, Tree
from haiku_implicit.files.loading import load
from haiku_implicit.files.saving import save
from haiku_implicit.params.adapters.adding import add_adapter, options_of
from haiku_implicit.params.adapters.merging import merge_adapters
from haiku_implicit.params.adapters.parts import AdapterParts, get_adapter, has_adapter, set_adapter
from haiku_implicit.params.edits import quantize_params
from haiku_implicit.params.haiku.frozen import freeze
from haiku_implicit.params.plots import check_picture, plot_error, plot_memory
from haiku_implicit.params.summary import compare_params, summary
from haiku_implicit.params.trees.trees import parameters_of

_SHOWING = (
    program.KEY,
    program.switch("json", "As JSON."),
    program.text("plot", "Also draws it into this file (.png, .svg)."),
)
_CHOOSING = (
    program.text(
        "targets",
        "A regular expression that the whole of module/name matches; by default all weights.",
    ),
    program.text("exclude", "The same, for those that are left out."),
    program.text(
        "matrix_axes",
        "As JSON, which axes of a weight [inputs, heads, width] are the rows and the columns of a "
        "matrix, from the end, for a pattern of names: '{\".*/query/w\": [[-3], [-2, -1]]}'.",
        "{}",
    ),
    *program.WRITING,
)


def _write(source: Any, target: str, tree: Tree) -> program.Said:
    """Writes a checkpoint; returns its sizes."""
    save(target, tree)
    before, after = summary(source).total, summary(tree).total
    sizes = {"nbytes": after.nbytes, "nbytes_before": before.nbytes, "bits": after.bits}
    return program.Said(
        {"target": target, **sizes},
        f"{target}: {after.nbytes:,} bytes ({before.nbytes:,} before), {after.bits:.2f} bits a number",
    )


# --- inspect ---------------------------------------------------------------------------------------


@program.command(
    "PATH",
    program.number("depth", "A row for each module, by so many parts of its name."),
    *_SHOWING,
)
def inspect(values: flags.FlagValues, path: str) -> None:
    """What is in a checkpoint: types, bytes, bits."""
    if values.plot:
        check_picture(values.plot)
    tree = program.part_of(load(path), values, path)
    if isinstance(tree, AdapterParts):
        tree = {**tree.dense, **tree.weights}
    elif not isinstance(tree, Mapping):
        tree = {"": tree}
    found = summary(_with_parts_apart(tree), depth=values.depth)
    program.say(program.as_json(found.to_json()) if values.json else str(found))
    if values.plot:
        plot_memory(found, values.plot)


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
    found = program.json_in(values, name)
    if not isinstance(found, dict):
        raise program.UsageError(f"--{name}: expected a JSON object, got {values[name].value!r}")
    return found


def _axes(values: flags.FlagValues) -> dict[str, Any] | None:
    """The value of --matrix_axes; None if it is not given."""
    return _object(values, "matrix_axes") if values["matrix_axes"].present else None


# --- quantize, add-lora, merge ---------------------------------------------------------------------


@program.command(
    "SOURCE TARGET",
    program.text("dtype", "The format: int8, int4, nf4, fp8, mxfp4, ...", "int8"),
    program.number("group_size", "How many numbers share a scale; by default a whole column."),
    program.text("calibration", "How scales are found: absmax, mse, ..."),
    program.switch("zero_point", "Codes relative to a zero point."),
    program.text("activation", "The format that activations are rounded to; by default none."),
    *_CHOOSING,
)
def quantize(values: flags.FlagValues, source: str, target: str) -> program.Said:
    """Quantizes weights."""
    program.check_target(values, target)
    params = program.read(values, source)
    names = ("dtype", "group_size", "calibration", "zero_point", "activation", "targets", "exclude")
    options: dict[str, Any] = {name: values[name].value for name in names}
    new = quantize_params(params, matrix_axes=_axes(values), **options)
    return _write(params, target, new)


@program.command(
    "SOURCE TARGET",
    program.text("method", ", ".join(method_names()), "lora"),
    program.number("rank", "Of the adapter; 8 by default, for methods that have one."),
    functools.partial(
        flags.DEFINE_float, "alpha", None, "Its scale is alpha / rank; by default 1."
    ),
    program.text("options", "Other options of the method, as JSON: '{\"block_size\": 4}'.", "{}"),
    program.number("seed", "For what is drawn.", 0, least=0),
    *_CHOOSING,
)
def add_lora(values: flags.FlagValues, source: str, target: str) -> program.Said:
    """Puts adapters on weights."""
    program.check_target(values, target)
    params = program.read(values, source)
    options = _object(values, "options")
    known = options_of(values.method) or {}
    rank = 8 if values.rank is None and "rank" in known else values.rank
    options |= {k: v for k, v in dict(rank=rank, alpha=values.alpha).items() if v is not None}
    choice: dict[str, Any] = dict(targets=values.targets, exclude=values.exclude)
    choice["matrix_axes"] = _axes(values)
    new = add_adapter(params, values.seed, values.method, **choice, **options)
    return _write(params, target, new)


@program.command(
    "SOURCE TARGET",
    program.text("adapter", "A file of an adapter apart from its base, which SOURCE is then."),
    program.text(
        "trained",
        "A file of the arrays that hki.freeze returned, or of a run with them as 'trained' and their "
        "model's 'digests'; SOURCE has the parameters that hki.freeze got.",
    ),
    program.switch("requantize", "Weights that were quantized are quantized again."),
    program.switch("any_base", "Take an adapter that was made for another base."),
    *program.WRITING,
)
def merge(values: flags.FlagValues, source: str, target: str) -> program.Said:
    """Merges adapters into weights."""
    program.check_target(values, target)
    params = program.read(values, source)
    if values.adapter:
        adapter = load(values.adapter)
        if not isinstance(adapter, AdapterParts):
            try:
                adapter = get_adapter(adapter)
            except (ValueError, TypeError) as e:
                raise value_error(f"{values.adapter}: there is no adapter in it ({e})") from e
        try:
            params = set_adapter(params, adapter, check_base=not values.any_base)
        except ValueError as e:  # it names the argument of the function
            raise value_error(str(e).replace("check_base=False", "--any_base")) from e
    if not any(has_adapter(parameter.value) for parameter in parameters_of(params)):
        raise value_error(
            f"{source}: there are no adapters in it; --adapter=FILE takes one from a file, and "
            "--trained=FILE the arrays that hki.freeze returned"
        )
    if values.trained:
        params = _with_trained(params, values.trained)
    merged = merge_adapters(params, requantize=values.requantize)
    said = _write(params, target, merged)
    if not values.requantize:
        return said
    found = compare_params(params, merged)
    return program.Said({**said.fields, "changed": found.to_json()}, f"{said.line}\n{found}")


def _with_trained(params: Params, path: str) -> Params:
    """Parameters with the arrays in a file that `freeze` trained."""
    run = load(path)
    if not isinstance(run, Mapping):
        raise value_error(
            f"{path}: expected the arrays that hki.freeze returned, or a run that has them as "
            f"'trained', got {type(run).__name__}. --adapter=FILE takes an adapter"
        )
    trained = run.get("trained", run)
    try:
        model, _ = freeze(
            hk.Transformed(init=lambda *_: params, apply=lambda *_: None),
            params,
            trainable_dense=lambda module, name, _: name in trained.get(module, ()),
        )
        if "digests" in run:
            model.check_digests(run["digests"])
        return model.params(trained)
    except (ValueError, TypeError, AttributeError) as e:
        raise value_error(f"{path}: {e}") from e


# --- diff ------------------------------------------------------------------------------------------


@program.command("FIRST SECOND", *_SHOWING)
def diff(values: flags.FlagValues, first: str, second: str) -> None:
    """How far two checkpoints are apart."""
    if values.plot:
        check_picture(values.plot)
    found = compare_params(program.read(values, first), program.read(values, second))
    program.say(program.as_json(found.to_json()) if values.json else str(found))
    if values.plot:
        plot_error(found, values.plot)


COMMANDS = (inspect, quantize, add_lora, merge, diff, convert)

main = program.main_of(COMMANDS, "Checkpoints of Haiku models with implicit arrays.")
