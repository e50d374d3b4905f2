"""Adapters in files of PEFT (https://github.com/huggingface/peft): a configuration, and tensors."""

import collections
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.adapters.dora import DoRA
from haiku_implicit.arrays import axes as axes_of
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.matrix_view import MatrixView, view_of
from haiku_implicit.core.warn import warn_caller
from haiku_implicit.files.container import CheckpointError, brief
from haiku_implicit.files.kinds import kind_of, read_json
from haiku_implicit.files.loading import load
from haiku_implicit.files.replacing import check_folder, replaced
from haiku_implicit.files.saving import save
from haiku_implicit.interchange.names import Names, Place, place_of
from haiku_implicit.params.adapter_parts import (
    AdapterParts,
    checked_parts,
    with_base,
    without_base,
)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+)\."
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?"
)
_PARTS = {"lora_embedding_A": "lora_A", "lora_embedding_B": "lora_B"}
_LINEAR = "lora_A.weight", "lora_B.weight"
_EMBEDDING = "lora_embedding_A", "lora_embedding_B"

# From `module/name` of a parameter to the name of a module of the PyTorch model.
Modules = Mapping[str, str] | Callable[[str], str]


def load_peft(folder: str | os.PathLike[str], names: Names) -> AdapterParts:
    """Reads a LoRA or DoRA adapter that PEFT saved.

    Args:
      folder: with `adapter_config.json` and `adapter_model.safetensors`.
      names: the `module/name` of a Haiku model's parameter for the name of a module of the PyTorch
        model, such as `{'model.layers.0.self_attn.q_proj': 'llama/layer_0/attention/q_proj/w'}`; a
        mapping or a function. Weights are `[inputs, outputs]` in Haiku and `[outputs, inputs]` in
        PyTorch; that is seen to here. A `Place` with a shape is for weights `[inputs, heads, width]`,
        None leaves a module out.

    Returns:
      The adapter, for `set_adapter`. PEFT's files do not say what base it was trained on in numbers,
      so that this is not checked. On a parameter that the Haiku model uses twice (tied embeddings) it
      acts at both ends, where PEFT adapts the look-up or the product alone unless it was told
      `ensure_weight_tying`: a warning says so.

    Raises:
      ValueError: for another kind of adapter, a configuration without its `lora_alpha` or `r`, a module
        without a name, a tensor that is missing, not known, or of another rank.
      OSError: for a file that can't be read.
    """
    folder = pathlib.Path(folder)
    _check_folder(folder)
    config = _config_of(folder / CONFIG)
    file = str(folder / TENSORS)
    parts: dict[str, dict[str, Any]] = {}
    tree = load(file)
    # (Names without a slash: in a file that `save` wrote they are keys, in another one in a module ''.)
    tree = tree.get("", tree) if isinstance(tree, Mapping) else {"": tree}
    for key, tensor in tree.items() if isinstance(tree, Mapping) else ():
        found = _KEY.fullmatch(key) if isinstance(key, str) else None
        if found is None or not isinstance(tensor, jax.Array | np.ndarray):
            raise CheckpointError(f"{file}: {key}: not a tensor of LoRA or DoRA on a module")
        part = _PARTS.get(found["part"], found["part"])
        parts.setdefault(found["module"], {})[part] = tensor
        if found["part"] == "lora_embedding_A" and not config.get("ensure_weight_tying"):
            warn_caller(
                f"{file}: {found['module']}: PEFT adapts the look-up alone. Where the Haiku model also "
                "multiplies by this parameter (tied embeddings), the adapter changes both"
            )
    if not parts:
        raise ValueError(f"{file}: there is no adapter in it")
    weights: dict[str, Any] = {}
    for module, tensors in parts.items():
        place = place_of(names, module, file)
        if place is None:
            continue
        if place.path in weights:
            raise ValueError(f"names: two modules are {place.path!r}, the second one is {module!r}")
        weight = _weight_of(f"{file}: {module}", tensors, _scaling_of(config, module))
        weights[place.path] = _at_place(f"{file}: {module}", weight, place)
    return AdapterParts(weights)


def save_peft(
    folder: str | os.PathLike[str],
    adapter: AdapterParts,
    names: Modules,
    *,
    base_model: str | None = None,
) -> None:
    """Writes a LoRA or DoRA adapter as PEFT does.

    A parameter that is called `embeddings`, as that of `hk.Embed` is, is written as the weight of
    PyTorch's `Embedding`, any other one as that of its `Linear`. (Where the Haiku model also multiplies
    by it, PEFT adapts the look-up alone, unless its configuration says `ensure_weight_tying`.)

    Args:
      folder: is made if it is missing, in one that is there. Files in it are replaced.
      adapter: what `get_adapter` returned.
      names: the name of a module of the PyTorch model for each `module/name`.
      base_model: the name of the PyTorch model, for the configuration.

    Raises:
      ValueError: for an adapter of other types, on stacked weights, or with dense parameters; for a
        parameter without a name.
      OSError: for a file that can't be written.
    """
    checked_parts("adapter", adapter)
    if adapter.dense:
        raise ValueError(
            f"{next(iter(adapter.dense))}: trained as a whole, which is not written here. Give "
            "get_adapter(params) without trainable_dense=, or keep all with haiku_implicit.save"
        )
    tensors: dict[str, Any] = {}
    ranks, alphas = {}, {}
    for path, value in adapter.weights.items():
        module = _named(names, path, "adapter")
        if module in ranks:
            raise ValueError(f"names: two parameters are {module!r}, the second one is {path!r}")
        weight = value.matrix if isinstance(value, MatrixView) else value
        if not isinstance(weight, LoRA | DoRA) or np.ndim(weight.a) != 2:
            raise ValueError(
                f"{path}: PEFT's LoRA is for single matrices, got {type(weight).__name__}"
            )
        prefix = f"base_model.model.{module}"
        first, second = _EMBEDDING if path.endswith("/embeddings") else _LINEAR
        tensors[f"{prefix}.{first}"] = jnp.asarray(weight.a).T
        tensors[f"{prefix}.{second}"] = jnp.asarray(weight.b).T
        if isinstance(weight, DoRA):
            tensors[f"{prefix}.lora_magnitude_vector"] = weight.magnitude
        ranks[module] = int(weight.a.shape[-1])
        alphas[module] = ranks[module] if weight.alpha is None else float(weight.alpha)
    kinds = {isinstance(value, DoRA) for value in map(_matrix_of, adapter.weights.values())}
    if len(kinds) > 1:
        raise ValueError("adapter: PEFT has LoRA or DoRA in one file, got both")
    config = _config_for(ranks, alphas, kinds == {True}, base_model)
    folder = _made(folder)
    save(folder / TENSORS, tensors)
    with replaced(folder / CONFIG) as temporary:
        pathlib.Path(temporary).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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


def _config_of(path: pathlib.Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise ValueError(f"{path}: peft_type: expected 'LORA', got {brief(kind)}")
    for name in ("r", "lora_alpha"):
        if not _is_number(config.get(name)):
            raise ValueError(f"{path}: {name}: expected a number, got {brief(config.get(name))}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise ValueError(f"{path}: {name}: expected a mapping, got {brief(config[name])}")
        for pattern, number in (config.get(name) or {}).items():
            _check_pattern(f"{path}: {name}", pattern, number)
    if config.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias: {brief(config['bias'])} is not read; 'none' is")
    if config.get("modules_to_save"):
        raise ValueError(
            f"{path}: modules_to_save: {brief(config['modules_to_save'])} are not read"
        )
    return config


def _is_number(x: Any) -> bool:
    """Whether JSON is a number that float32 has: not a boolean, NaN or infinite."""
    return type(x) in (int, float) and abs(x) <= float(np.finfo(np.float32).max)


def _check_pattern(where: str, pattern: str, number: Any) -> None:
    if not _is_number(number):
        raise CheckpointError(f"{where}: {brief(pattern)}: expected a number, got {brief(number)}")
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as e:
        raise CheckpointError(f"{where}: {brief(pattern)}: not a regular expression: {e}") from None


def _scaling_of(config: Mapping[str, Any], module: str) -> Callable[[int], float]:
    """The `alpha` of `LoRA`, which is divided by the rank, for the rank of a module's tensors."""

    def own(name: str, default: float) -> float:
        patterns = (config.get(name) or {}).items()
        return next((n for key, n in patterns if re.match(rf"(.*\.)?({key})$", module)), default)

    rank, alpha = own("rank_pattern", config["r"]), own("alpha_pattern", config["lora_alpha"])

    def alpha_for(found: int) -> float:
        if found != rank:
            raise ValueError(f"rank {rank} by {CONFIG}, {found} by the tensors")
        return alpha * math.sqrt(rank) if config.get("use_rslora") else alpha

    return alpha_for


def _weight_of(where: str, tensors: Mapping[str, Any], alpha_for: Callable[[int], float]) -> Any:
    missing = {"lora_A", "lora_B"} - set(tensors)
    if missing:
        raise ValueError(f"{where}: {', '.join(sorted(missing))}: missing")
    a, b = tensors["lora_A"], tensors["lora_B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise ValueError(
            f"{where}: expected lora_A [rank, inputs] and lora_B [outputs, rank], got {list(a.shape)} "
            f"and {list(b.shape)}"
        )
    try:
        alpha = alpha_for(a.shape[0])
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from e
    magnitude = tensors.get("lora_magnitude_vector")
    if magnitude is None:
        return without_base(LoRA, a=a.T, b=b.T, factor=jnp.float32(alpha / a.shape[0]))
    if magnitude.size != b.shape[0]:
        raise ValueError(
            f"{where}: lora_magnitude_vector: expected {b.shape[0]} numbers, got {magnitude.size}"
        )
    return without_base(
        DoRA, a=a.T, b=b.T, alpha=jnp.float32(alpha), magnitude=magnitude.reshape(-1)
    )


def _named(names: Modules, module: str, where: str) -> str:
    try:
        found = names(module) if callable(names) else names[module]
    except KeyError:
        raise ValueError(f"{where}: {module}: names has no name for it") from None
    if not isinstance(found, str):
        raise ValueError(
            f"{where}: {module}: names gives {found!r} for it, expected the name of a module"
        )
    return found


def _at_place(where: str, weight: Any, place: Place) -> Any:
    """The weight `[inputs, outputs]` in the parameter's axes: of several it is a view of the matrix."""
    if place.axes not in (None, (1, 0)):
        raise ValueError(f"{where}: axes: expected (1, 0) of an adapter's Place, got {place.axes}")
    if place.shape is None:
        return weight
    sizes = weight.a.shape[-2], weight.b.shape[-1]
    axes = axes_of.reshaped(axes_of.whole(sizes), place.shape)
    if axes is None or axes_of.shape(axes) != tuple(place.shape):
        raise ValueError(
            f"{where}: shape: expected inputs and outputs of {list(sizes)}, each cut into axes, got "
            f"{list(place.shape)}"
        )
    base = jax.ShapeDtypeStruct(sizes, weight.a.dtype)
    return with_base(view_of(with_base(weight, base), axes), None)


# --- writing -------------------------------------------------------------------------------------


def _made(folder: str | os.PathLike[str]) -> pathlib.Path:
    path = pathlib.Path(folder)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path}: is a file; give the name of a folder")
    check_folder(os.fspath(path), os.path.dirname(os.path.realpath(path)))
    path.mkdir(exist_ok=True)
    return path


def _matrix_of(value: Any) -> Any:
    return value.matrix if isinstance(value, MatrixView) else value


def _config_for(
    ranks: Mapping[str, int], alphas: Mapping[str, float], dora: bool, base_model: str | None
) -> dict[str, Any]:
    rank, alpha = (collections.Counter(x.values()).most_common(1)[0][0] for x in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": dora,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(ranks),
        # (Without the mark of the beginning, PEFT takes the pattern of `head` for `block.head`, too.)
        "rank_pattern": {f"^{re.escape(m)}": n for m, n in ranks.items() if n != rank},
        "alpha_pattern": {f"^{re.escape(m)}": n for m, n in alphas.items() if n != alpha},
    }
