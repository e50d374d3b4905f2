"""The public names, for `__init__.py` and for type checkers. The names follow the order of use."""

from haiku_implicit import adapters, layers, mox, quantization, testing
from haiku_implicit.arrays.concatenated import Concatenated
from haiku_implicit.arrays.constant import SymbolicConstant
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.lora_init import EVA, CorDA, LoftQ, LoRAGA
from haiku_implicit.arrays.matrix_view import MatrixView
from haiku_implicit.arrays.repeated import Repeated
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.arrays.zeros import Zeros
from haiku_implicit.core.array import ArrayValue, ImplicitArray
from haiku_implicit.core.binary import binary_handler
from haiku_implicit.core.box import box
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field, frozen_field
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.core.materialization import (
    MaterializationError,
    MaterializationWarning,
    materialization,
    materialization_report,
)
from haiku_implicit.core.serialization import register_tree_type
from haiku_implicit.core.transform import (
    materialize,
    tree_flatten_with_implicit,
    tree_leaves_with_implicit,
    tree_map_with_implicit,
    tree_structure_with_implicit,
    use_implicit_args,
)
from haiku_implicit.files.checkpoint import Checkpoint
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.loading import load, open_checkpoint
from haiku_implicit.files.saving import save
from haiku_implicit.interchange.ggml import from_ggml, to_ggml
from haiku_implicit.interchange.gguf_reading import load_gguf, open_gguf
from haiku_implicit.interchange.gguf_writing import save_gguf
from haiku_implicit.interchange.hugging_face import load_hugging_face
from haiku_implicit.interchange.names import Place, names_by_pattern, read_names
from haiku_implicit.interchange.peft import load_peft, save_peft
from haiku_implicit.interchange.qwix import from_qwix, to_qwix
from haiku_implicit.params.adapters.adding import add_adapter, add_lora
from haiku_implicit.params.adapters.bank import AdapterBank, with_bank
from haiku_implicit.params.adapters.dropout import with_dropout
from haiku_implicit.params.adapters.merging import merge_adapters, merge_lora, unmerge_adapters
from haiku_implicit.params.adapters.parts import AdapterParts, get_adapter, set_adapter
from haiku_implicit.params.adapters.sums import combine_adapters
from haiku_implicit.params.adapters.vector_bank import with_vector_bank
from haiku_implicit.params.creators import (
    cache_creator,
    lora_creator,
    lora_getter,
    quantize_creator,
    quantize_getter,
    zeros_creator,
    zeros_getter,
)
from haiku_implicit.params.edits import quantize_activations, quantize_params, zero_params
from haiku_implicit.params.folding import fold_parameters
from haiku_implicit.params.haiku.frozen import freeze
from haiku_implicit.params.haiku.hooks import creator, getter
from haiku_implicit.params.haiku.transformed import transform_implicit
from haiku_implicit.params.placement import place, shardings
from haiku_implicit.params.plots import plot_error, plot_memory
from haiku_implicit.params.quantizing.calibrated import (
    input_maxima,
    input_moments,
    quantize_with_inputs,
)
from haiku_implicit.params.quantizing.stats import init_quant_stats, with_quant_stats
from haiku_implicit.params.quantizing.training import (
    convert_trained,
    dot_general_by_bits,
    quantization_aware,
    quantized_training,
    quantized_training_getter,
    with_rounding_key,
)
from haiku_implicit.params.sensitivity import Allocation, Sensitivity, sensitivity
from haiku_implicit.params.summary import Summary, compare_params, summary
from haiku_implicit.params.trees.infer_axes import infer_matrix_axes, prepare
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.types.fake_quantized import FakeQuantized, fake_quantize
from haiku_implicit.quantized.types.quantized_blocks import QuantizedBlocks
from haiku_implicit.quantized.types.quantized_cache import QuantizedCache
from haiku_implicit.quantized.types.static_quantized import StaticQuantized
from haiku_implicit.quantized.types.trained_quantized import TrainedQuantized
from haiku_implicit.quantized.types.trellis import TrellisMatrix
from haiku_implicit.training.factors import lora_fa, scale_by_lora_plus
from haiku_implicit.training.gradients import (
    BIASES,
    LAYER_NORMS,
    combine,
    grad,
    partition,
    value_and_grad,
)
from haiku_implicit.training.optimizers import (
    apply_updates,
    freeze_declared,
    freeze_keys,
    freeze_subtrees,
)
from haiku_implicit.training.quantized_state import quantized_state
from haiku_implicit.transforms.auto_axes import auto_in_axes
from haiku_implicit.transforms.auto_jit import auto_jit

__version__: str

__all__ = [
    # wrap a model or a function
    "transform_implicit",
    "use_implicit_args",
    # implicit parameters: edits of a tree, Haiku creators, Haiku getters
    "add_lora",
    "add_adapter",
    "quantize_activations",
    "quantize_params",
    "zero_params",
    "merge_adapters",
    "merge_lora",
    "unmerge_adapters",
    "prepare",
    "infer_matrix_axes",
    "summary",
    "Summary",
    "compare_params",
    "sensitivity",
    "Sensitivity",
    "Allocation",
    "plot_memory",
    "plot_error",
    "from_ggml",
    "to_ggml",
    "input_moments",
    "input_maxima",
    "quantize_with_inputs",
    "fold_parameters",
    "creator",
    "getter",
    "lora_creator",
    "quantize_creator",
    "cache_creator",
    "zeros_creator",
    "lora_getter",
    "quantize_getter",
    "zeros_getter",
    # the types
    "LoRA",
    "QuantizedMatrix",
    "ScaledMatrix",
    "MatrixView",
    "Concatenated",
    "QuantizedBlocks",
    "QuantizedCache",
    "Repeated",
    "TrainedQuantized",
    "TrellisMatrix",
    "StaticQuantized",
    "FakeQuantized",
    "SymbolicConstant",
    "Zeros",
    # quantized training, and quantization-aware training (the rules are in `quantization`)
    "quantization",
    "quantized_training",
    "quantized_training_getter",
    "with_rounding_key",
    "with_quant_stats",
    "init_quant_stats",
    "quantization_aware",
    "fake_quantize",
    "convert_trained",
    "dot_general_by_bits",
    # training
    "partition",
    "BIASES",
    "LAYER_NORMS",
    "combine",
    "value_and_grad",
    "grad",
    "freeze",
    "freeze_declared",
    "freeze_keys",
    "freeze_subtrees",
    "scale_by_lora_plus",
    "lora_fa",
    "apply_updates",
    "quantized_state",
    # many devices
    "shardings",
    "place",
    # files
    "save",
    "load",
    "open_checkpoint",
    "Checkpoint",
    "CheckpointError",
    "register_tree_type",
    "load_gguf",
    "open_gguf",
    "load_hugging_face",
    "Place",
    "names_by_pattern",
    "read_names",
    "load_peft",
    "save_peft",
    "from_qwix",
    "to_qwix",
    "save_gguf",
    # LoRA's relatives
    "adapters",
    "CorDA",
    "EVA",
    "LoftQ",
    "LoRAGA",
    "with_dropout",
    "with_vector_bank",
    "get_adapter",
    "set_adapter",
    "AdapterParts",
    "combine_adapters",
    "AdapterBank",
    "with_bank",
    # models as trees of their modules' calls
    "mox",
    # heads, rotary positions, meshes and policies, under EasyDeL's names
    "layers",
    # JAX's transformations with fewer arguments
    "auto_in_axes",
    "auto_jit",
    # materialization, its policy and its report
    "materialize",
    "materialization",
    "materialization_report",
    "MaterializationError",
    "MaterializationWarning",
    # your own types and rules
    "ImplicitArray",
    "ArrayValue",
    "aux_field",
    "frozen_field",
    "box",
    "primitive_handler",
    "testing",
    "binary_handler",
    "default_handler",
    # trees in which an implicit array is one leaf
    "tree_flatten_with_implicit",
    "tree_leaves_with_implicit",
    "tree_map_with_implicit",
    "tree_structure_with_implicit",
]
