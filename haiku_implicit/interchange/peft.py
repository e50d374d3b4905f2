"""Reads and writes adapters as PEFT (https://github.com/huggingface/peft) does: config and tensors."""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.adapters.trained_rows import TrainedRows
from haiku_implicit.arrays import axes as axes_of
from haiku_implicit.arrays import lora_init
from haiku_implicit.arrays.adapter import Adapter, kinds
from haiku_implicit.arrays.lora import LoRA, RestLoRA
from haiku_implicit.arrays.matrix_view import matrix_of, view_of
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.messages import see, value_error, warn_caller
from haiku_implicit.core.typing import Array, JsonObject, Params
from haiku_implicit.files.container import CheckpointError, brief
from haiku_implicit.files.file_types import kind_of
from haiku_implicit.files.loading import load
from haiku_implicit.files.replacing import check_folder, write_text
from haiku_implicit.files.saving import save
from haiku_implicit.interchange import peft_config
from haiku_implicit.interchange.names import Names, Place, place_of
from haiku_implicit.interchange.peft_config import CONFIG, Config
from haiku_implicit.params.adapters.parts import (
    AdapterParts,
    base_of,
    checked_parts,
    digest,
    with_base,
)
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.selection import describe, editing

TENSORS = "adapter_model.safetensors"
_LINEAR = "lora_A", "lora_B"
_EMBEDDING = "lora_embedding_A", "lora_embedding_B"
_MODEL = "base_model.model."
_ROWS = "token_adapter.trainable_tokens_delta"
# Biases of a saved module, which `bias="all"` finds again in the module and in the original beside it.
_AGAIN = re.compile(r"(.+)\.(?:original_module|modules_to_save)((?:\.[^.]+)?)((?:\.[^.]+)*\.bias)")
_LOOK_UP = (
    "PEFT adapts the look-up alone, unless its configuration says ensure_weight_tying. If the Haiku "
    "model also multiplies by this parameter (tied embeddings), here the adapter changes both"
)

# Maps the `module/name` of a parameter to the name of a module in the PyTorch model.
Modules = Mapping[str, str] | Callable[[str], str]


def load_peft(folder: str | os.PathLike[str], names: Names, *, base: Params = None) -> AdapterParts:
    """Reads a LoRA or DoRA adapter that PEFT saved, and the parameters that were trained with it.

    Args:
      folder: the folder with `adapter_config.json` and `adapter_model.safetensors`.
      names: a mapping or a function from the name of a module in the PyTorch model to the `module/name`
        of the Haiku model's parameter, such as
        `{'model.layers.0.self_attn.q_proj': 'llama/layer_0/attention/q_proj/w'}`. `load_peft`
        transposes weights from PyTorch's `[outputs, inputs]` to Haiku's `[inputs, outputs]`. A `Place`
        with a shape is for weights `[inputs, heads, width]`, None leaves a module out. Of a module that
        was trained as a whole (`modules_to_save`) the weight has the name of the module; a bias, and
        any other tensor, has its own: `{'head': 'head/w', 'head.bias': 'head/b'}`.
      base: dense parameters of the model, for an adapter whose `init_lora_weights` is 'pissa' or
        'olora'. PEFT subtracts the initial factors from the base each time it loads such an adapter.
        `load_peft` computes them from `base` and includes them in the adapter, which then has twice the
        rank and is for the unchanged `base`. Other adapters do not need it.

    Returns:
      The adapter, for `set_adapter`. Biases and whole modules are its `dense` parameters, and trained
      rows of an embedding (`trainable_token_indices`) are `TrainedRows`. PEFT's files do not identify
      the values of their base, so `set_adapter` does not check it (except against `base`, if that was
      needed). If the Haiku model uses a parameter twice (tied embeddings), the adapter acts on both
      uses, but PEFT adapts only the look-up or the product, unless `ensure_weight_tying` is set: a
      warning says so.

    Raises:
      ValueError: for another kind of adapter; a key of the configuration that is unknown, or that
        changes outputs in an unsupported way (docs/interchange.md has all keys); a configuration
        without `lora_alpha` or `r`; a module without a name; a tensor that is missing, unknown, or of
        another rank.
      OSError: for a file that can't be read.
    """
    folder = pathlib.Path(folder)
    _check_folder(folder)
    config = peft_config.read_config(folder / CONFIG)
    init, file = peft_config.init_from_base(config), str(folder / TENSORS)
    kind = next((kind for flag, kind in _kinds().items() if config.get(flag)), LoRA)
    parameters = None if base is None else {p.path: p.value for p in trees.parameters_of(base)}
    bases = {}
    found = _tensors_of(file, config)
    weights, dense = _trained_rows(file, config, found, names), _dense(file, found, names)
    for module, tensors in found.factors.items():
        where, place = f"{file}: {module}", place_of(names, module, file)
        if place is None:
            continue
        _check_one(place, module, {**weights, **dense})
        a, b = _factors_of(where, tensors, kind)
        decomposed = init is not None and _LINEAR[0] in tensors
        scale = _scale_of(where, config, module, (a, b), decomposed)
        if init is not None and decomposed:
            w = _dense_base(where, init, parameters, place.path)
            with editing(place.path, w):
                a, b = _without(a, b, *_start_of(init, w, place.shape, (a, b), scale))
            bases[place.path] = digest(w)
        weight = _weight_of(where, tensors, kind, a, b, scale)
        weights[place.path] = _at_place(where, weight, place)
    return AdapterParts(weights, dense, tuple(bases.items()))


def save_peft(
    folder: str | os.PathLike[str],
    adapter: AdapterParts,
    names: Modules,
    *,
    base_model: str | None = None,
    initial: AdapterParts | None = None,
) -> None:
    """Writes a LoRA or DoRA adapter as PEFT does, and the parameters that were trained beside it.

    A parameter named `embeddings`, as in `hk.Embed`, is written as the weight of PyTorch's `Embedding`,
    and any other one as the weight of its `Linear`. (If the Haiku model also multiplies by embeddings,
    PEFT still adapts only the look-up, unless its configuration says `ensure_weight_tying`.)
    `TrainedRows` of an embedding become `trainable_token_indices`. Dense weights become
    `modules_to_save`: PEFT then wants all tensors of their modules. Other biases become `bias: 'all'`.

    Args:
      folder: the folder to write. It is made if it is missing; its parent has to exist. Files in it
        are replaced.
      adapter: the result of `get_adapter`.
      names: the name of a module in the PyTorch model for each `module/name`. Of a dense parameter
        that is not the weight of its module, the name of the tensor: `{'head/w': 'head', 'head/b':
        'head.bias'}`.
      base_model: the name of the PyTorch model, for the configuration.
      initial: the result of `get_adapter(params)` before training, for LoRA whose `init` changed the
        weights below it ('pissa', 'olora', `LoftQ`). It is subtracted from the adapter, which then has
        twice the rank and is for the weights before `add_lora`. (It does not contain the error of
        quantizing them.)

    Raises:
      ValueError: for an adapter of other types, on stacked weights, or without LoRA or DoRA; for a
        dense parameter that is a kernel of more than two axes, or whose module's name is the end of
        another one's; for trained rows whose module's name is the end of another one's with trained
        rows; for a parameter without a name; if `initial` is missing, or is not the adapter's
        beginning.
      OSError: for a file that can't be written.
    """
    checked_parts("adapter", adapter)
    tensors: dict[str, Array] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    for path, value in adapter.weights.items():
        module = _named(names, path, "adapter")
        if module in {*ranks, *tokens}:
            raise value_error(f"names: two parameters are {module!r}, the second one is {path!r}")
        weight = matrix_of(value)
        if isinstance(weight, TrainedRows):
            tokens[module] = _ids_of(path, weight)
            tensors[f"{module}.{_ROWS}"] = jnp.asarray(weight.rows)
            continue
        _check_writable(path, weight)
        if isinstance(weight, RestLoRA):
            weight = _for_the_weight_as_it_was(path, weight, adapter, initial)
        own = _tensors_for(path, weight)
        tensors |= {f"{module}.{name}": x for name, x in own.items()}
        ranks[module] = int(weight.a.shape[-1])
        alphas[module] = ranks[module] if weight.alpha is None else float(weight.alpha)
    whole = _whole_tensors(adapter, names)
    config = _config_for(ranks, alphas, _flags_of(adapter), base_model)
    config |= {
        "trainable_token_indices": _checked_tokens(tokens) or None,
        **_keys_of_whole(whole, {*ranks, *tokens}),
    }
    for name, x in whole.items():
        module = name.removesuffix(".bias")
        tensors[f"{module}.base_layer.bias" if module in ranks else name] = x
    _write(folder, tensors, config)


# --- reading -------------------------------------------------------------------------------------


def _check_folder(folder: pathlib.Path) -> None:
    kind = kind_of(folder)
    if folder.name in (CONFIG, TENSORS):
        raise CheckpointError(f"{folder}: a file in a folder of PEFT. Give the folder")
    if kind.name != "peft":
        raise CheckpointError(
            f"{folder}: not a folder of PEFT, with {CONFIG} and {TENSORS}, but {kind.what}. "
            f"{kind.way_out}"
        )
    if not (folder / TENSORS).exists():
        pickled = any(folder.glob("*.bin"))
        hint = ". Pickled weights (.bin) are not read; save it as safetensors" if pickled else ""
        raise CheckpointError(f"{folder}: {TENSORS} is not there{hint}")


class _Tensors(NamedTuple):
    """The tensors of a file.

    Attributes:
      factors: those of an adapter, by module and by their names in it.
      rows: the trained rows of embeddings, by module.
      whole: tensors of the model itself, by their names in the model.
    """

    factors: dict[str, dict[str, Array]]
    rows: dict[str, Array]
    whole: dict[str, Array]


def _tensors_of(file: str, config: Config) -> _Tensors:
    """Sorts the tensors of a file."""
    tensors = _Tensors({}, {}, {})
    parts = tensors.factors
    tree, unused = load(file), peft_config.training_tensors(config)
    extra = [name for kind in _kinds().values() for name in kind.peft_tensors.values()]
    names = re.compile(
        r"base_model\.model\.(?P<module>.+)\."
        rf"(?P<part>{'|'.join([*_LINEAR, *_EMBEDDING, *extra])})(\.weight)?"
    )
    # (Names without a slash are keys in a file that `save` wrote, but in a module '' in other files.)
    tree = tree.get("", tree) if isinstance(tree, Mapping) else {"": tree}
    for key, tensor in tree.items() if isinstance(tree, Mapping) else ():
        plain = _plain_names(str(key), config)
        if unused.fullmatch(str(key)) or any(name in tree for name in plain):
            continue
        found = names.fullmatch(str(key))
        if found is None and not plain and _beside(tensors, str(key), tensor, config):
            continue
        if found is None and plain:
            raise CheckpointError(
                f"{file}: {plain[-1]}: missing; PEFT does not read its copy {key}"
            )
        if found is None or not isinstance(tensor, jax.Array | np.ndarray):
            raise CheckpointError(f"{file}: {key}: not a tensor of LoRA or DoRA on a module")
        module, part = found["module"], found["part"]
        if (by := peft_config.left_out_by(config, module)) is not None:
            raise value_error(
                f"{file}: {key}: PEFT does not read it: {CONFIG} leaves {module} out by {by}, "
                f"{brief(config[by])}. Mend that key, or take the tensor out of the file"
            )
        if part in parts.setdefault(module, {}):
            raise value_error(f"{file}: {key}: the module has two tensors {part}")
        parts[module][part] = tensor
        if part == _EMBEDDING[0] and not config.get("ensure_weight_tying"):
            warn_caller(f"{file}: {module}: {_LOOK_UP}")
    if not any(tensors):
        raise value_error(f"{file}: there is no adapter in it")
    return tensors


def _plain_names(key: str, config: Config) -> tuple[str, ...]:
    """The names of the tensor that PEFT reads, if a key is a saved module's bias once more."""
    if not (found := _AGAIN.fullmatch(key)) or config.get("bias") != "all":
        return ()
    # (The name of PEFT's adapter is part of the key if the bias is in a module of the module.)
    module, first, rest = found.groups()
    saved = peft_config.trained_whole(config, f"{module.removeprefix(_MODEL)}.weight")
    return (f"{module}{first}{rest}", f"{module}{rest}") if saved else ()


def _beside(tensors: _Tensors, key: str, tensor: Any, config: Config) -> bool:
    """Takes a tensor that was trained with the factors; returns whether it is one."""
    name = key.removeprefix(_MODEL)
    if name == key or not isinstance(tensor, jax.Array | np.ndarray):
        return False
    module = name.removesuffix(f".{_ROWS}")
    if module != name and peft_config.tokens_of(config, module):
        tensors.rows[module] = tensor
        return True
    name = name.replace(".base_layer.bias", ".bias")
    if not peft_config.trained_whole(config, name):
        return False
    tensors.whole[name] = tensor
    return True


def _check_one(place: Place, module: str, taken: Mapping[str, Any]) -> None:
    if place.path in taken:
        raise value_error(f"names: two modules are {place.path!r}, the second one is {module!r}")


def _trained_rows(file: str, config: Config, found: _Tensors, names: Names) -> dict[str, Array]:
    """The embeddings whose rows PEFT trained; they replace the embeddings of the base."""
    new: dict[str, Array] = {}
    for module, rows in found.rows.items():
        place, ids = place_of(names, module, file), peft_config.tokens_of(config, module)
        if place is None:
            continue
        _check_one(place, module, new)
        if rows.ndim != 2 or len(rows) != len(ids):
            raise value_error(
                f"{file}: {module}: trainable_token_indices has {len(ids)} indices, and the rows are "
                f"{list(rows.shape)}"
            )
        new[place.path] = TrainedRows(None, jnp.asarray(rows), jnp.asarray(ids, jnp.int32))
    return new


def _dense(file: str, found: _Tensors, names: Names) -> dict[str, Array]:
    """The biases and the tensors of whole modules that PEFT trained, as they are in the Haiku model."""
    new: dict[str, Array] = {}
    for name, x in found.whole.items():
        place = place_of(names, name.removesuffix(".weight"), file)
        if place is None:
            continue
        _check_one(place, name, new)
        if place.path.endswith("/embeddings"):
            warn_caller(f"{file}: {name}: {_LOOK_UP}")
        with editing(f"{file}: {name}", x):
            moved = jnp.transpose(x, place.axes_for(x.ndim))
            new[place.path] = moved if place.shape is None else moved.reshape(place.shape)
    return new


def _kinds() -> dict[str, type[Adapter]]:
    """The types of adapters in PEFT's files of LoRA, by the key of the configuration that is true."""
    return {k.peft_flag: k for k in reversed(kinds()) if k.peft_flag is not None}


def _factors_of(where: str, tensors: Mapping[str, Array], kind: type[Adapter]) -> tuple[Any, Any]:
    """The factors `a` and `b` of an adapter on a linear layer or an embedding."""
    factors = _EMBEDDING if set(_EMBEDDING) & set(tensors) else _LINEAR
    wanted = {*factors, *kind.peft_tensors.values()}
    missing, other = sorted(wanted - set(tensors)), sorted(set(tensors) - wanted)
    if missing:
        raise value_error(f"{where}: {', '.join(missing)}: missing")
    if other:
        for flag, of in _kinds().items():
            if other == sorted(of.peft_tensors.values()):
                raise value_error(
                    f"{where}: {', '.join(other)}: there is one, but {CONFIG} has no {flag}"
                )
        raise value_error(f"{where}: expected {' and '.join(factors)}, got {', '.join(other)} too")
    a, b = (tensors[name] for name in factors)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise value_error(
            f"{where}: expected lora_A [rank, inputs] and lora_B [outputs, rank], got {list(a.shape)} "
            f"and {list(b.shape)}"
        )
    return a.T, b.T


def _scale_of(where: str, config: Config, module: str, factors: Any, decomposed: bool) -> float:
    """The scale of a module, from the rank in the configuration.

    The rank of decomposed factors is at most the number of the weight's rows or columns.
    """
    (n, rank), m = factors[0].shape, factors[1].shape[1]
    wanted, alpha = peft_config.rank_and_alpha(config, module)
    if rank != (min(wanted, n, m) if decomposed else wanted):
        raise value_error(f"{where}: rank {wanted} by {CONFIG}, {rank} by the tensors")
    return alpha / (math.sqrt(wanted) if config.get("use_rslora") else wanted)


def _weight_of(
    where: str, tensors: Mapping[str, Array], kind: Any, a: Array, b: Array, scale: float
) -> Array:
    others = {field: tensors[name] for field, name in kind.peft_tensors.items()}
    for field, x in others.items():
        if x.size != b.shape[1]:
            name = kind.peft_tensors[field]
            raise value_error(f"{where}: {name}: expected {b.shape[1]} numbers, got {x.size}")
    return kind.of_factors(a, b, scale, **{field: x.reshape(-1) for field, x in others.items()})


def _dense_base(where: str, init: str, base: Mapping[str, Any] | None, path: str) -> Array:
    """The weight that PEFT changes when it loads an adapter with this initialization."""
    if base is None:
        raise value_error(
            f"{where}: init_lora_weights: {init!r}: PEFT takes a part out of the base when it loads "
            f"this. Give load_peft the dense parameters as base=. Or {peft_config.CONVERT}"
        )
    if path not in base:
        raise value_error(f"{where}: base: {path} is not there")
    w = base_of(base[path])
    if is_implicit(w):
        raise value_error(
            f"{where}: base: {init!r} decomposes a dense weight, and {path} is {describe(w)}"
        )
    return w


def _start_of(
    init: str, w: Array, shape: Sequence[int] | None, factors: Any, scale: float
) -> tuple[Any, Any]:
    """The initial factors that PEFT computes from a weight, in float32."""
    a, b = factors
    sizes = a.shape[0], b.shape[1]
    if tuple(w.shape) != tuple(shape or sizes):
        raise value_error(f"base: expected the shape {list(shape or sizes)} for this adapter")
    matrix = jnp.asarray(w, jnp.float32).reshape(sizes)
    parts = lora_init.BY_NAME[init].parts(matrix, a.shape[1], scale, jax.random.key(0))
    return parts.a, parts.b


def _without(a: Array, b: Array, start_a: Any, start_b: Any) -> tuple[Any, Any]:
    """The factors of `a @ b - start_a @ start_b`, as when PEFT converts such adapters to plain ones."""
    return jnp.concatenate([a, start_a], -1), jnp.concatenate([b, -start_b], -2)


def _named(names: Modules, module: str, where: str) -> str:
    try:
        found = names(module) if callable(names) else names[module]
    except KeyError:
        raise value_error(f"{where}: {module}: names has no name for it") from None
    if not isinstance(found, str):
        raise value_error(
            f"{where}: {module}: names gives {found!r} for it, expected the name of a module"
        )
    return found


def _at_place(where: str, weight: Array, place: Place) -> Array:
    """The weight `[inputs, outputs]`, as a view with the axes of its place, if that has a shape."""
    if place.axes not in (None, (1, 0)):
        raise value_error(f"{where}: axes: expected (1, 0) of an adapter's Place, got {place.axes}")
    if place.shape is None:
        return weight
    sizes = weight.a.shape[-2], weight.b.shape[-1]
    axes = axes_of.reshaped(axes_of.whole(sizes), place.shape)
    if axes is None or axes_of.shape(axes) != tuple(place.shape):
        raise value_error(
            f"{where}: shape: expected inputs and outputs of {list(sizes)}, each cut into axes, got "
            f"{list(place.shape)}"
        )
    base = jax.ShapeDtypeStruct(sizes, weight.a.dtype)
    return with_base(view_of(with_base(weight, base), axes), None)


# --- writing -------------------------------------------------------------------------------------


def _write(
    folder: str | os.PathLike[str], tensors: Mapping[str, Array], config: JsonObject
) -> None:
    path = pathlib.Path(folder)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path}: is a file; give the name of a folder {see('files')}")
    check_folder(os.fspath(path), os.path.dirname(os.path.realpath(path)))
    path.mkdir(exist_ok=True)
    save(path / TENSORS, {f"{_MODEL}{name}": x for name, x in tensors.items()})
    write_text(path / CONFIG, json.dumps(config, indent=2) + "\n")


def _check_writable(path: str, weight: Array) -> None:
    """Raises unless PEFT's files can hold an adapter."""
    if weight.peft_flag is None:
        raise value_error(f"{path}: expected LoRA or DoRA, got {type(weight).__name__}")
    if np.ndim(weight.a) != 2:
        raise value_error(
            f"{path}: expected the LoRA of one matrix, got factors {np.shape(weight.a)} and "
            f"{np.shape(weight.b)}, as kernels of convolutions and stacked layers have them. Leave "
            "it out when the adapter is made (exclude=)"
        )


def _flags_of(adapter: AdapterParts) -> set[str]:
    """The key of the configuration for the adapters' type; there has to be one type."""
    matrices = [matrix_of(value) for value in adapter.weights.values()]
    found = {x.peft_flag for x in matrices if not isinstance(x, TrainedRows)}
    if len(found) > 1:
        raise value_error("adapter: PEFT has LoRA or DoRA in one file, got both")
    if not found:
        raise value_error(
            "adapter: expected LoRA or DoRA on one weight at least, as PEFT has other parts only "
            "beside them. Keep this one by haiku_implicit.save"
        )
    return found


def _ids_of(path: str, weight: TrainedRows) -> list[int]:
    """The indices of the trained rows of an embedding."""
    whole = path.endswith("/embeddings") and weight.axis == -2 and np.ndim(weight.rows) == 2
    if not whole or weight.w is not None:
        raise value_error(
            f"{path}: expected trained rows of one embedding (a parameter named embeddings) without "
            "another adapter below them, got others. Leave them out when the adapter is made (exclude=)"
        )
    return [int(i) for i in weight.ids]


def _checked_tokens(tokens: dict[str, list[int]]) -> dict[str, list[int]]:
    """The indices of trained rows, by modules that PEFT can tell apart by the ends of their names."""
    for module, other in itertools.permutations(sorted(tokens), 2):
        if other.endswith(module):
            raise value_error(
                f"names: {module}: has trained rows, by which PEFT means {other} too, as its name ends "
                "in it. Leave one out when the adapter is made (exclude=), or use haiku_implicit.save"
            )
    return tokens


def _whole_tensors(adapter: AdapterParts, names: Modules) -> dict[str, Array]:
    """The dense parameters of an adapter, by the names of their tensors in the PyTorch model."""
    found: dict[str, Array] = {}
    for path, x in adapter.dense.items():
        name = _named(names, path, "adapter")
        name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        if name in found:
            raise value_error(f"names: two parameters are {name!r}, the second one is {path!r}")
        if is_implicit(x) or np.ndim(x) > 2:
            raise value_error(
                f"{path}: trained as a whole, which is written of dense vectors and matrices, got "
                f"{describe(x)}. Give get_adapter a trainable_dense= that leaves it out, or keep all "
                "with haiku_implicit.save"
            )
        if path.endswith("/embeddings"):
            warn_caller(f"{path}: {_LOOK_UP}")
        found[name] = jnp.transpose(x, Place(path).axes_for(np.ndim(x)))
    return found


def _keys_of_whole(whole: Mapping[str, Array], adapted: set[str]) -> JsonObject:
    """The keys of the configuration for tensors of whole modules, and for other biases."""
    owners = {name.rpartition(".")[0] for name in whole}
    modules = {name.removesuffix(".weight") for name in whole if name.endswith(".weight")}
    for module in sorted(modules):
        for other in sorted((owners | adapted) - modules):
            if other.endswith(module):
                raise value_error(
                    f"names: {module}: trained as a whole, by which PEFT means {other} too, as its "
                    "name ends in it. Train that as a whole as well, or use haiku_implicit.save"
                )
        if module in adapted:
            raise value_error(
                f"names: {module}: has an adapter, and a weight that is trained as a whole"
            )
    return {
        "bias": "all" if owners - modules else "none",
        "modules_to_save": sorted(modules) or None,
    }


def _tensors_for(path: str, weight: Array) -> dict[str, Any]:
    """The tensors of a weight, by their names in its module."""
    (first, second), ending = _LINEAR, ".weight"
    if path.endswith("/embeddings"):
        warn_caller(f"{path}: {_LOOK_UP}")
        (first, second), ending = _EMBEDDING, ""
    factors = {first + ending: jnp.asarray(weight.a).T, second + ending: jnp.asarray(weight.b).T}
    others = {name: getattr(weight, field) for field, name in weight.peft_tensors.items()}
    return factors | others


def _for_the_weight_as_it_was(
    path: str, lora: RestLoRA, adapter: AdapterParts, initial: AdapterParts | None
) -> LoRA:
    """The plain LoRA for the original weight, before its initial factors were subtracted."""
    if initial is None:
        raise value_error(
            f"{path}: its init ('pissa', 'olora' or LoftQ) changed the weight below the adapter, so "
            "that on the weight that others have it would be wrong. Give save_peft initial= the "
            "adapter as get_adapter returns it right after add_lora, or keep it by haiku_implicit.save"
        )
    start = matrix_of(checked_parts("initial", initial).weights.get(path))
    known = [dict(parts.bases).get(path) for parts in (adapter, initial)]
    if not isinstance(start, RestLoRA) or start.a.shape[:-1] != lora.a.shape[:-1]:
        raise value_error(
            f"initial: {path}: expected the LoRA that the adapter began with, got {start}"
        )
    if None not in known and known[0] != known[1]:
        raise value_error(f"initial: {path}: the adapter began on another base")
    a, b = _without(lora.a, lora.b, start.a * (start.scale / lora.scale), start.b)
    return LoRA.of_factors(a, b, lora.factor)


def _config_for(
    ranks: Mapping[str, int], alphas: Mapping[str, float], flags: set[str], base_model: str | None
) -> JsonObject:
    rank, alpha = (collections.Counter(x.values()).most_common(1)[0][0] for x in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        **{flag: flag in flags for flag in _kinds() if flag},
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(ranks),
        # (Without `^`, PEFT also uses the pattern of `head` for `block.head`.)
        "rank_pattern": {f"^{re.escape(m)}": n for m, n in ranks.items() if n != rank},
        "alpha_pattern": {f"^{re.escape(m)}": n for m, n in alphas.items() if n != alpha},
    }
