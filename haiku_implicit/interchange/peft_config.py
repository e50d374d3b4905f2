"""The keys of PEFT's `adapter_config.json`: read, refused, or unused as they do not affect outputs."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import JsonObject
from haiku_implicit.files.container import CheckpointError, brief, expect
from haiku_implicit.files.file_types import read_json

CONFIG = "adapter_config.json"
Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Key:
    """The treatment of a key.

    Attributes:
      use: 'read'; 'unused', if no value of it changes an output; 'refused' otherwise.
      neutral: the value with which a refused key does not change outputs; null, false and empty values
        count as false.
      instead: the way out, if a refused key has another value.
      tensors: a regular expression for a module's tensors that only training uses, if the key has a
        value.
    """

    use: str
    neutral: Any = False
    instead: str = ""
    tensors: str | None = None


_READ, _UNUSED = Key("read"), Key("unused")
_MERGE = (
    "Merge the adapter with PEFT (merge_and_unload), save the whole model, and read that by "
    "load_hugging_face"
)


def _refused(instead: str, neutral: Any = False) -> Key:
    return Key("refused", neutral, instead)


# All keys of `LoraConfig` in PEFT 0.21.2, and the keys of PEFT 0.0.1 to 0.2.0 that it no longer has.
KEYS: dict[str, Key] = {
    **dict.fromkeys(("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern"), _READ),
    **dict.fromkeys(("use_rslora", "use_dora", "init_lora_weights", "fan_in_fan_out"), _READ),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_to_transform"), _READ),
    **dict.fromkeys(("layers_pattern", "ensure_weight_tying"), _READ),
    **dict.fromkeys(("bias", "modules_to_save", "trainable_token_indices"), _READ),
    # Names and versions.
    **dict.fromkeys(("task_type", "auto_mapping", "peft_version"), _UNUSED),
    **dict.fromkeys(("base_model_name_or_path", "revision"), _UNUSED),
    # Training, and the memory that it takes.
    **dict.fromkeys(("inference_mode", "lora_dropout", "runtime_config", "merge_weights"), _UNUSED),
    "velora_config": Key("unused", tensors="lora_velora_embed"),
    "monteclora_config": Key("unused", tensors=r"lora_monteclora_sampler\..+"),
    # Initialization of the factors; `init_lora_weights` says which of these applies.
    **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config"), _UNUSED),
    # Options of a key that is refused.
    **dict.fromkeys(("qalora_group_size", "megatron_core"), _UNUSED),
    # More than two factors of a matrix.
    "lora_bias": _refused(f"The corrections have biases. {_MERGE}"),
    "kasa_config": _refused(f"PEFT changes the base, and the correction has a diagonal. {_MERGE}"),
    "use_bdlora": _refused(f"The factors are block-diagonal. {_MERGE}"),
    "target_parameters": _refused(f"The factors of stacked weights lie side by side. {_MERGE}"),
    "layer_replication": _refused(f"The model has other layers than its base. {_MERGE}"),
    "enable_lora": _refused(f"The outputs of a layer are adapted in part. {_MERGE}"),
    "use_qalora": _refused(
        "The correction is for means of neighboring inputs of a GPTQ layer, which only PEFT runs"
    ),
    "megatron_config": _refused(
        "The layers are Megatron's. Save the adapter from a model with PyTorch's layers"
    ),
    "arrow_config": _refused(
        "It chooses among adapters, token by token. Read each of these adapters by itself"
    ),
    "alora_invocation_tokens": _refused(
        "Tokens before these are not adapted (aLoRA), and no weight can do that. With null here the "
        "adapter acts on all tokens, which is another function"
    ),
}

_FLAGS = "use_rslora", "use_dora", "ensure_weight_tying", "fan_in_fan_out"
# Values of `init_lora_weights` with which PEFT does not change the base.
_PLAIN_INITS = "gaussian", "eva", "orthogonal", "mica"
# Values with which PEFT subtracts a part of the base that depends only on the base.
_FROM_BASE = "pissa", "olora"
CONVERT = (
    "convert the adapter to a plain LoRA by PEFT's save_pretrained(path_initial_model_for_weight_"
    "conversion=...); or, if the weights are those that its training left below the adapter, set this "
    "key to true"
)


def read_config(path: pathlib.Path) -> JsonObject:
    """Reads and checks the configuration of a LoRA or DoRA adapter.

    Raises:
      ValueError: for another kind of adapter, an unknown or refused key, or a value of another type
        than PEFT writes.
    """
    config = read_json(path)
    expect(isinstance(config, dict), str(path), "a mapping", config)
    kind = config.get("peft_type")
    expect(kind == "LORA", f"{path}: peft_type", "'LORA'", kind)
    for key, value in config.items():
        _check_key(path, key, value)
    for name in ("r", "lora_alpha"):
        number = config.get(name)
        expect(_is_number(number), f"{path}: {name}", "a number", number)
    for name in _FLAGS:
        flag = config.get(name)
        expect(isinstance(flag, bool | None), f"{path}: {name}", "true or false", flag)
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        expect(isinstance(patterns, dict), f"{path}: {name}", "a mapping", patterns)
        for pattern, number in patterns.items():
            expect(_is_number(number), f"{path}: {name}: {brief(pattern)}", "a number", number)
            _check_pattern(f"{path}: {name}", rf"(.*\.)?({pattern})$", pattern)
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        _check_names(f"{path}: {name}", config.get(name), name == "layers_pattern")
    _check_parts(path, config)
    layers = config.get("layers_to_transform")
    whole = all(
        type(x) is int or x is None for x in (layers if isinstance(layers, list) else [layers])
    )
    expect(whole, f"{path}: layers_to_transform", "whole numbers", layers)
    _check_init(path, config)
    return config


def init_from_base(config: Config) -> str | None:
    """Returns 'pissa' or 'olora' if PEFT subtracts initial factors from linear layers, else None."""
    init = config.get("init_lora_weights", True)
    name = init.lower() if isinstance(init, str) else None
    return name if name in _FROM_BASE else None


def training_tensors(config: Config) -> re.Pattern[str]:
    """A pattern for the names of tensors that do not affect outputs."""
    own = [key.tensors for name, key in KEYS.items() if key.tensors and config.get(name)]
    return re.compile(rf"base_model\.model\..+\.({'|'.join(own)})" if own else r"(?!)")


def rank_and_alpha(config: Config, module: str) -> tuple[float, float]:
    """The rank and alpha of a module, found as in PEFT's `get_pattern_key`."""

    def own(name: str, default: float) -> float:
        patterns = config.get(name) or {}
        found = (n for key, n in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        return next(found, patterns.get(module, default))

    return own("rank_pattern", config["r"]), own("alpha_pattern", config["lora_alpha"])


def trained_whole(config: Config, name: str) -> bool:
    """Whether PEFT trained a tensor of the model itself, by `bias` or `modules_to_save`."""
    module, _, part = name.rpartition(".")
    if part == "bias" and config.get("bias") in ("all", "lora_only"):
        return True
    steps = module.split(".")
    above = [".".join(steps[: i + 1]) for i in range(len(steps))]
    saved = config.get("modules_to_save") or ()
    return any(path.endswith(own) for path in above for own in saved)  # as PEFT does


def tokens_of(config: Config, module: str) -> list[int]:
    """The trained rows of an embedding; empty if PEFT trained none."""
    given = config.get("trainable_token_indices") or []
    if isinstance(given, list):
        return given
    return next((ids for name, ids in given.items() if _names([name], module)), [])


def left_out_by(config: Config, module: str) -> str | None:
    """The key by which PEFT does not adapt a module, even if it has tensors; None if PEFT adapts it.

    As in PEFT's `check_target_module_exists`. (Tied modules get adapters that no key names.)
    """
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if excluded and _names(excluded, module):
        return "exclude_modules"
    if targets is None or config.get("ensure_weight_tying"):
        return None
    if not (targets == "all-linear" or _names(targets, module)):
        return "target_modules"
    layers = config.get("layers_to_transform")
    if isinstance(targets, str) or module in targets or layers is None or layers == []:
        return None
    given = config.get("layers_pattern") or []
    given = [given] if isinstance(given, str) else given
    patterns = [_layer_of(pattern) for pattern in given] or [r".*?\.[^.]*\.(?P<layer>\d+)\."]
    tried = (re.match(pattern, module) for pattern in patterns)
    found = next((match for match in tried if match), None)
    wanted = [layers] if isinstance(layers, int) else layers
    return None if found and int(found["layer"]) in wanted else "layers_to_transform"


def _layer_of(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\."


def _names(names: str | list[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return module in names or any(module.endswith(f".{name}") for name in names)


def _is_number(x: Any) -> bool:
    """Whether a JSON value is a number in the range of float32: not a boolean, NaN or infinite."""
    return type(x) in (int, float) and abs(x) <= float(np.finfo(np.float32).max)


def _check_key(path: pathlib.Path, name: str, value: Any) -> None:
    key = KEYS.get(name)
    if key is None:
        raise value_error(
            f"{path}: {brief(name)}: this key is not one of PEFT 0.21.2 for LoRA, so that its effect "
            f"is not known; it has the value {brief(value)}. Take it out of the file if it has none "
            "on outputs"
        )
    if key.use == "refused" and value != key.neutral and (value or key.neutral):
        verb = "are" if isinstance(value, list) else "is"
        neutral = repr(key.neutral) if key.neutral else "null"
        raise value_error(
            f"{path}: {name}: {brief(value)} {verb} not read; {neutral} is. {key.instead}"
        )


def _check_parts(path: pathlib.Path, config: Config) -> None:
    """Checks the keys of tensors that PEFT trained beside the factors."""
    bias = config.get("bias") or "none"
    known = bias in ("none", "all", "lora_only")
    expect(known, f"{path}: bias", "'none', 'all' or 'lora_only'", bias)
    saved = config.get("modules_to_save") or []
    right = isinstance(saved, list) and all(isinstance(x, str) and x for x in saved)
    expect(right, f"{path}: modules_to_save", "a list of names", saved)
    given = config.get("trainable_token_indices") or []
    lists = list(given.values()) if isinstance(given, dict) else [given]
    right = all(isinstance(x, list) and all(type(i) is int and i >= 0 for i in x) for x in lists)
    right = right and all(len(set(x)) == len(x) for x in lists)
    expect(
        right, f"{path}: trainable_token_indices", "indices, each once, or lists by names", given
    )


def _check_init(path: pathlib.Path, config: Config) -> None:
    init = config.get("init_lora_weights", True)
    name = init.lower() if isinstance(init, str) else init
    if name in (True, False, None) or name in _PLAIN_INITS:
        return
    if name == "olora" and config.get("fan_in_fan_out"):
        why = "with fan_in_fan_out PEFT decomposes another matrix than it adapts"
    elif init == "pissa" or name == "olora":
        return
    elif re.fullmatch(r"pissa_niter_\d+", str(init)):
        why = "PEFT takes a part out of the base that it finds by random numbers"
    elif init in ("corda", "loftq", "lora_ga"):
        why = "the adapter is for a base that its initialization changed, and which the file lacks"
    else:
        raise value_error(f"{path}: init_lora_weights: {brief(init)} is not known")
    raise value_error(
        f"{path}: init_lora_weights: {brief(init)} is not read: {why}. Instead {CONVERT}"
    )


def _check_names(where: str, names: Any, of_layers: bool) -> None:
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    expect(is_list or isinstance(names, str | None), where, "a text or a list of texts", names)
    given = [names] if isinstance(names, str) else names or []
    if of_layers:
        given = [_layer_of(pattern) for pattern in given]
    elif not isinstance(names, str):
        return  # names, not patterns
    for pattern in given:
        _check_pattern(where, pattern, pattern)


def _check_pattern(where: str, pattern: str, given: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as e:
        raise CheckpointError(f"{where}: {brief(given)}: not a regular expression: {e}") from None
