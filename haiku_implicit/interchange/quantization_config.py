"""The keys of the `quantization_config` of a GPTQ or AWQ checkpoint, and their treatment.

The keys come from transformers, AutoGPTQ, GPTQModel, AutoAWQ and AutoRound. Each is read, does not
affect values, or may have only the values listed here. Any other key is an error: it might change the
meaning of codes. A key with null counts as missing.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from haiku_implicit.core.typing import Json
from haiku_implicit.files.container import CheckpointError, brief, expect

# Alternative names of one key. If a file has several of them, their values have to agree.
FORMAT = ("format", "checkpoint_format", "version")
BITS = ("bits", "w_bit", "wbits")
GROUP_SIZE = ("group_size", "q_group_size")
METHOD = ("quant_method", "method")
_SAME = (FORMAT, BITS, GROUP_SIZE, METHOD, ("sym", "zero_point"))
_READ = {
    *(key for keys in _SAME for key in keys),
    *("dynamic", "pack_dtype", "desc_act", "backend"),
}

# The supported values of keys whose other values give codes another meaning.
_ONLY: dict[str, tuple[Any, ...]] = {
    "is_marlin_format": (False,),
    "rotation": (),  # the model has to transform its activations
    "adapter": ({},),  # additional weights
    "hyb_act": (False,),
    "packing_format": ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_gptq", "auto_awq"),
    "data_type": ("int",),
    "super_bits": (),
    "super_group_size": (),
    "extra_config": ({},),  # AutoRound's settings of single layers
    "act_bits": (16, 32),
    "mock_quantization": (False,),
}

# Keys about how codes were found, how programs compute with them, and which modules lack them.
_FREE = {
    *("dataset", "tokenizer", "damp_percent", "damp_auto_increment", "static_groups"),
    *("true_sequential", "mse", "act_group_aware", "gptaq", "gptaq_alpha", "foem", "v2"),
    *("v2_alpha", "hessian", "fallback", "failsafe", "fail_safe", "smoother", "smooth"),
    *("preprocessors", "meta", "lm_head", "batch_size", "model_seqlen", "pad_token_id"),
    *("block_name_to_quantize", "module_name_preceding_first_block"),
    *("modules_in_block_to_quantize", "modules_to_not_convert", "inside_layer_modules"),
    *("cache_block_outputs", "max_input_length", "use_cuda_fp16", "use_exllama", "disable_exllama"),
    *("exllama_config", "model_name_or_path", "model_file_base_name", "quantizer", "device"),
    *("parallel_packing", "pack_impl", "offload_to_disk", "offload_to_disk_path", "gc_mode"),
    *("wait_for_submodule_finalizers", "moe", "auto_forward_data_parallel", "vram_strategy"),
    *("dense_vram_strategy", "moe_vram_strategy", "dense_vram_strategy_devices"),
    *("moe_vram_strategy_devices", "calibration_data_device", "compute_device_filter"),
    *("buffered_fwd", "do_fuse", "fuse_max_seq_len"),
    *("modules_to_fuse", "scale_search_chunked_activations"),
    # AutoRound's
    *("amp", "autoround_version", "enable_minmax_tuning", "enable_norm_bias_tuning", "iters", "lr"),
    *("enable_quanted_input", "gradient_accumulate_steps", "low_gpu_mem_usage", "minmax_lr"),
    *("nsamples", "not_use_best_mse", "provider", "quant_block_list", "to_quant_block_names"),
    *("sampler", "scale_dtype", "seqlen", "supported_types", "dynamic_max_gap", "lr_scheduler"),
    *("train_bs", "seed", "act_data_type", "act_dynamic", "act_group_size", "act_sym"),
}


class Settings(NamedTuple):
    """The storage settings of a GPTQ or AWQ weight.

    Attributes:
      bits: the bits of a code.
      group_size: the number of inputs that share a scale; None for all.
      format: the name of the layout.
      symmetric: whether all zero points are the middle code; None if the file does not say.
      ordered: whether the file says that groups are not runs of inputs (`desc_act`).
      word: the bits of an integer that holds codes.
    """

    bits: int
    group_size: int | None
    format: str
    symmetric: bool | None
    ordered: bool
    word: int


def check_keys(where: str, own: Mapping[str, Any], known: set[str]) -> None:
    """Raises for a key of a configuration that is not known, unless it is None."""
    for key, value in own.items():
        if key not in known and value is not None:
            raise CheckpointError(
                f"{where}: {key}: {brief(value)}: not a key that is known, so that it may change "
                "what the weights are. If it does not, remove it there"
            )


class Config:
    """A `quantization_config` with only known keys.

    Args:
      where: the file of the configuration, for errors.
      config: its JSON.

    Raises:
      CheckpointError: for an unsupported key or value, or two that contradict each other.
    """

    def __init__(self, where: str, config: Mapping[str, Json]):
        self.where = where
        self._config = {key: value for key, value in config.items() if value is not None}
        for key, value in self._config.items():
            if key in _ONLY:
                allowed = " or ".join(map(repr, _ONLY[key])) or "null"
                self._expect(value in _ONLY[key], key, allowed)
        check_keys(where, self._config, _READ | _FREE | set(_ONLY))
        for keys in _SAME[:-1]:
            self.get(keys)

    def _expect(self, right: bool, key: str, expected: str) -> None:
        """Raises unless the value of a key is right."""
        expect(right, f"{self.where}: {key}", expected, self._config.get(key))

    def get(self, keys: Sequence[str]) -> tuple[str, Any]:
        """Looks up a key by its alternative names; returns one of the names, and the value.

        Raises:
          CheckpointError: if the values of two names differ.
        """
        given = [key for key in keys if key in self._config]
        values = [self._config[key] for key in given]
        values = [x.lower() if isinstance(x, str) else x for x in values]
        for key, value in zip(given, values, strict=True):
            if value != values[0]:
                raise CheckpointError(
                    f"{self.where}: {given[0]} is {brief(values[0])} and {key} is {brief(value)}, "
                    "which contradict each other. Correct it there"
                )
        return (given[0], values[0]) if given else (keys[0], None)

    def settings(
        self, bits: Sequence[int], formats: Sequence[str], words: Sequence[int]
    ) -> Settings:
        """The storage settings of weights.

        Args:
          bits: the supported bits of a code.
          formats: the supported layouts, the default one first.
          words: the supported bits of an integer that holds codes.

        Raises:
          CheckpointError: for an unsupported value.
        """
        key, number = self.get(BITS)
        known = type(number) is int and number in bits
        self._expect(known, key, f"one of {', '.join(map(str, bits))}")
        key, size = self.get(GROUP_SIZE)
        known = type(size) is int and (size > 0 or size == -1)
        self._expect(known, key, "a positive integer or -1")
        key, form = self.get(FORMAT)
        self._expect(form is None or form in formats, key, " or ".join(map(repr, formats)))
        known = self._config.get("backend") != "llm-awq"
        self._expect(known, "backend", "a program with the layouts of AutoAWQ")
        name = self._config.get("pack_dtype", "int32")
        word = next((n for n in words if f"int{n}" == name), 0)
        known = word == 32 or (word > 0 and number != 3)
        self._expect(known, "pack_dtype", " or ".join(f"int{n}" for n in words))
        size = None if size == -1 else size
        ordered = bool(self._config.get("desc_act"))
        return Settings(number, size, form or formats[0], self._symmetric(), ordered, word)

    def _symmetric(self) -> bool | None:
        symmetric, zero_point = (self._config.get(key) for key in ("sym", "zero_point"))
        for key, value in (("sym", symmetric), ("zero_point", zero_point)):
            self._expect(isinstance(value, bool | None), key, "true or false")
        if symmetric is None:
            return None if zero_point is None else not zero_point
        if symmetric is zero_point:
            raise CheckpointError(
                f"{self.where}: sym is {symmetric} and zero_point is {zero_point}, which contradict "
                "each other. Correct it there"
            )
        return bool(symmetric)

    def of_module(self, module: str) -> "Config":
        """The configuration of one module, by `dynamic`: GPTQModel's settings for patterns of names.

        The first pattern that matches counts. If it begins with "-:", the module is not quantized.

        Raises:
          CheckpointError: if `dynamic` is invalid, or says that the module is not quantized.
        """
        patterns = self._config.get("dynamic", {})
        right = isinstance(patterns, dict) and all(isinstance(x, dict) for x in patterns.values())
        self._expect(right, "dynamic", "an object {pattern: settings}")
        for pattern, changes in patterns.items():
            try:
                found = re.match(re.sub(r"^[+-]:", "", pattern), module)
            except re.error as e:
                raise CheckpointError(f"{self.where}: dynamic: {pattern!r}: {e}") from None
            if found is None:
                continue
            if pattern.startswith("-:"):
                raise CheckpointError(
                    f"{self.where}: dynamic: by {pattern!r} {module} is not quantized, and it has a "
                    "qweight. Correct it there"
                )
            return self._with(changes)
        return self

    def _with(self, changes: Mapping[str, Any]) -> "Config":
        gone = {key for keys in _SAME if set(keys) & set(changes) for key in keys}
        kept = {key: value for key, value in self._config.items() if key not in gone | {"dynamic"}}
        return Config(f"{self.where}: dynamic", {**kept, **changes})
