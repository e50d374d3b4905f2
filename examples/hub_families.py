"""The models that `hub.load` reads: the meaning of their settings, and the names of their tensors."""

import dataclasses
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np

from errors import InputError
from models import bert, gpt2, llama, t5, vit

# The contents of a PyTorch module: name -> (parameter, the tensor's axis for each of its axes).
LINEAR = {"weight": ("w", (1, 0)), "bias": ("b", (0,))}
CONV1D = {"weight": ("w", (0, 1)), "bias": ("b", (0,))}  # GPT-2's name of a linear layer
CONVOLUTION = {"weight": ("w", (2, 3, 1, 0)), "bias": ("b", (0,))}  # from OIHW to HWIO
NORM = {"weight": ("scale", (0,)), "bias": ("offset", (0,))}
EMBEDDING = {"weight": ("embeddings", (0, 1))}
BIAS = {"bias": ("b", (0,))}
CLS = {"cls_token": ("cls", (0, 1, 2))}
POSITIONS = {"position_embeddings": ("positions", (0, 1, 2))}

# The name of a module in the file, its name in the Haiku model, and its contents. `{i}` is each layer.
Row = tuple[str, str, Mapping[str, tuple[str, tuple[int, ...]]]]


class Settings(dict):
    """The settings in `config.json`; a missing key is an `InputError`."""

    def __missing__(self, key):
        raise InputError(f"{key!r} is missing")

    def expect(self, expected: Mapping[str, Any]) -> None:
        """Refuses values other than the expected ones; a missing key has the expected value."""
        for key, value in expected.items():
            if self.get(key, value) != value:
                raise InputError(f"{key!r} is {self[key]!r}, expected {value!r}")

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a positive whole number; null and a missing key give the default, if there is one."""
        found = self.get(key) if default else self[key]
        found = default if found is None else found
        if type(found) is not int or found < 1:
            raise InputError(f"{key!r} is {found!r}, expected a positive whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive number; a missing key gives the default, if there is one."""
        found = self.get(key, default) if default else self[key]
        if type(found) not in (int, float) or not found > 0:
            raise InputError(f"{key!r} is {found!r}, expected a positive number")
        return found


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        config: Maps the settings and the names of the tensors to the model's config.
        model: Maps the config to the module, within `hk.transform`.
        inputs: Maps the config to arguments of the model.
        architectures: The classes of `transformers` that the module computes.
        expected: Settings with only one supported value.
        prefix: An optional prefix of the names of tensors.
        rows: The table of names.
        copies: Tensors that may be in the file a second time, and the originals of these copies.
        unused: A regular expression for tensors that are buffers, or parts that are not computed.
    """

    config: Callable[[Settings, Set[str]], Any]
    model: Callable[[Any], Callable[..., Any]]
    inputs: Callable[[Any], tuple[np.ndarray, ...]]
    architectures: tuple[str, ...]
    expected: Mapping[str, Any]
    prefix: str
    rows: tuple[Row, ...]
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: str = r"(?!)"  # matches nothing


TOKENS, MASK = np.zeros((1, 1), np.int32), np.ones((1, 1), bool)


def gpt2_config(settings: Settings, names: Set[str]) -> gpt2.Gpt2Config:
    return gpt2.Gpt2Config(
        vocab_size=settings.size("vocab_size"),
        dim=settings.size("n_embd"),
        num_layers=settings.size("n_layer"),
        num_heads=settings.size("n_head"),
        hidden_dim=settings.size("n_inner", 4 * settings.size("n_embd")),
        max_positions=settings.size("n_positions"),
        norm_eps=settings.number("layer_norm_epsilon"),
        tied=settings.get("tie_word_embeddings", True),
    )


GPT2 = Family(
    config=gpt2_config,
    model=gpt2.Gpt2,
    inputs=lambda config: (TOKENS,),
    architectures=("GPT2LMHeadModel",),
    expected={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    prefix="transformer.",
    rows=(
        ("wte", "gpt2/words", EMBEDDING),
        ("wpe", "gpt2/positions", EMBEDDING),
        ("h.{i}.ln_1", "gpt2/layer_{i}/attention_norm", NORM),
        ("h.{i}.attn.c_attn", "gpt2/layer_{i}/attention/qkv", CONV1D),
        ("h.{i}.attn.c_proj", "gpt2/layer_{i}/attention/output", CONV1D),
        ("h.{i}.ln_2", "gpt2/layer_{i}/mlp_norm", NORM),
        ("h.{i}.mlp.c_fc", "gpt2/layer_{i}/up", CONV1D),
        ("h.{i}.mlp.c_proj", "gpt2/layer_{i}/down", CONV1D),
        ("ln_f", "gpt2/final_norm", NORM),
        ("lm_head", "gpt2/lm_head", LINEAR),
    ),
    copies={"lm_head.weight": "wte.weight"},
    unused=r"h\.\d+\.attn\.(masked_)?bias",
)


def t5_config(settings: Settings, names: Set[str]) -> t5.T5Config:
    kind = settings.get("feed_forward_proj", "relu")
    if kind not in ("relu", "gated-gelu"):
        raise InputError(f"'feed_forward_proj' is {kind!r}, expected 'relu' or 'gated-gelu'")
    # `transformers` 5 declares every T5 tied; an untied one holds a head.
    tied = settings.get("tie_word_embeddings", True)
    scaled = settings.get("scale_decoder_outputs", tied)
    return t5.T5Config(
        vocab_size=settings.size("vocab_size"),
        dim=settings.size("d_model"),
        num_layers=settings.size("num_layers"),
        num_decoder_layers=settings.size("num_decoder_layers", settings.size("num_layers")),
        num_heads=settings.size("num_heads"),
        head_dim=settings.size("d_kv"),
        hidden_dim=settings.size("d_ff"),
        num_buckets=settings.size("relative_attention_num_buckets"),
        max_distance=settings.size("relative_attention_max_distance", 128),
        norm_eps=settings.number("layer_norm_epsilon"),
        gated=kind == "gated-gelu",
        scaled=scaled,
        tied=tied and (scaled or "lm_head.weight" not in names),
    )


def t5_attention(theirs: str, ours: str) -> tuple[Row, ...]:
    return tuple((f"{theirs}.{name}", f"{ours}/{name}", LINEAR) for name in "qkvo")


def t5_stack(side: str, last: int) -> tuple[Row, ...]:
    """Returns the encoder's or decoder's rows; ``last`` is the index of a block's feed-forward part."""
    theirs, ours = side + ".block.{i}.layer", f"t5/{side}" + "/layer_{i}"
    dense = f"{theirs}.{last}.DenseReluDense"
    first = f"{side}.block.0.layer.0.SelfAttention"
    return (
        (f"{first}.relative_attention_bias", f"t5/{side}/relative_bias/buckets", EMBEDDING),
        (f"{theirs}.0.layer_norm", f"{ours}/attention_norm", NORM),
        *t5_attention(f"{theirs}.0.SelfAttention", f"{ours}/attention"),
        (f"{theirs}.{last}.layer_norm", f"{ours}/mlp_norm", NORM),
        *(
            (f"{dense}.{name}", f"{ours}/mlp/{name}", LINEAR)
            for name in ("wi", "wi_0", "wi_1", "wo")
        ),
        (f"{side}.final_layer_norm", f"t5/{side}/final_norm", NORM),
    )


T5 = Family(
    config=t5_config,
    model=t5.T5,
    inputs=lambda config: (TOKENS, MASK, TOKENS),
    architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    expected={},
    prefix="",
    rows=(
        ("shared", "t5/embed", EMBEDDING),
        *t5_stack("encoder", 1),
        *t5_stack("decoder", 2),
        ("decoder.block.{i}.layer.1.layer_norm", "t5/decoder/layer_{i}/cross_attention_norm", NORM),
        *t5_attention(
            "decoder.block.{i}.layer.1.EncDecAttention", "t5/decoder/layer_{i}/cross_attention"
        ),
        ("lm_head", "t5/lm_head", LINEAR),
    ),
    copies={
        "lm_head.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    },
    # In old files; `transformers` does not use it either.
    unused=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)


def bert_config(settings: Settings, names: Set[str]) -> bert.BertConfig:
    return bert.BertConfig(
        vocab_size=settings.size("vocab_size"),
        dim=settings.size("hidden_size"),
        num_layers=settings.size("num_hidden_layers"),
        num_heads=settings.size("num_attention_heads"),
        hidden_dim=settings.size("intermediate_size"),
        max_positions=settings.size("max_position_embeddings"),
        norm_eps=settings.number("layer_norm_eps"),
        masked_lm=(settings.get("architectures") or ["BertModel"]) != ["BertModel"],
    )


BERT = Family(
    config=bert_config,
    model=bert.Bert,
    inputs=lambda config: (TOKENS, MASK),
    architectures=("BertModel", "BertForMaskedLM", "BertForPreTraining"),
    expected={
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    prefix="bert.",
    rows=(
        ("embeddings.word_embeddings", "bert/words", EMBEDDING),
        ("embeddings.position_embeddings", "bert/positions", EMBEDDING),
        ("embeddings.token_type_embeddings", "bert/segments", EMBEDDING),
        ("embeddings.LayerNorm", "bert/embedding_norm", NORM),
        ("encoder.layer.{i}.attention.self.query", "bert/layer_{i}/attention/query", LINEAR),
        ("encoder.layer.{i}.attention.self.key", "bert/layer_{i}/attention/key", LINEAR),
        ("encoder.layer.{i}.attention.self.value", "bert/layer_{i}/attention/value", LINEAR),
        ("encoder.layer.{i}.attention.output.dense", "bert/layer_{i}/attention/output", LINEAR),
        ("encoder.layer.{i}.attention.output.LayerNorm", "bert/layer_{i}/attention_norm", NORM),
        ("encoder.layer.{i}.intermediate.dense", "bert/layer_{i}/up", LINEAR),
        ("encoder.layer.{i}.output.dense", "bert/layer_{i}/down", LINEAR),
        ("encoder.layer.{i}.output.LayerNorm", "bert/layer_{i}/norm", NORM),
        ("cls.predictions.transform.dense", "bert/head", LINEAR),
        ("cls.predictions.transform.LayerNorm", "bert/head_norm", NORM),
        ("cls.predictions", "bert/head_bias", BIAS),
    ),
    copies={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    unused=r"embeddings\.position_ids|pooler\..*|cls\.seq_relationship\..*",
)


def llama_config(settings: Settings, names: Set[str]) -> llama.LlamaConfig:
    rope = Settings()
    for key in ("rope_scaling", "rope_parameters"):
        rope |= settings.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise InputError(
                f"{key!r} is of type {kind!r}, expected 'default', which scales nothing"
            )
    rope.expect({"partial_rotary_factor": 1.0})
    dim, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    config = llama.LlamaConfig(
        vocab_size=settings.size("vocab_size"),
        dim=dim,
        num_layers=settings.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=settings.size("num_key_value_heads", heads),
        hidden_dim=settings.size("intermediate_size"),
        rope_base=Settings(settings | rope).number("rope_theta", 10_000.0),
        norm_eps=settings.number("rms_norm_eps"),
        tied=settings.get("tie_word_embeddings", False),
    )
    if settings.get("head_dim") is not None:
        settings.expect({"head_dim": config.head_dim})
    return config


LLAMA = Family(
    config=llama_config,
    model=llama.Llama,
    inputs=lambda config: (TOKENS,),
    architectures=("LlamaForCausalLM",),
    expected={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    prefix="model.",
    rows=(
        ("embed_tokens", "llama/embed", EMBEDDING),
        ("layers.{i}.input_layernorm", "llama/layer_{i}/attention_norm", NORM),
        ("layers.{i}.self_attn.q_proj", "llama/layer_{i}/attention/q_proj", LINEAR),
        ("layers.{i}.self_attn.k_proj", "llama/layer_{i}/attention/k_proj", LINEAR),
        ("layers.{i}.self_attn.v_proj", "llama/layer_{i}/attention/v_proj", LINEAR),
        ("layers.{i}.self_attn.o_proj", "llama/layer_{i}/attention/o_proj", LINEAR),
        ("layers.{i}.post_attention_layernorm", "llama/layer_{i}/mlp_norm", NORM),
        ("layers.{i}.mlp.gate_proj", "llama/layer_{i}/mlp/gate_proj", LINEAR),
        ("layers.{i}.mlp.up_proj", "llama/layer_{i}/mlp/up_proj", LINEAR),
        ("layers.{i}.mlp.down_proj", "llama/layer_{i}/mlp/down_proj", LINEAR),
        ("norm", "llama/final_norm", NORM),
        ("lm_head", "llama/lm_head", LINEAR),
    ),
    copies={"lm_head.weight": "embed_tokens.weight"},
    unused=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)


def vit_config(settings: Settings, names: Set[str]) -> vit.VitConfig:
    classifies = settings.get("architectures") == ["ViTForImageClassification"]
    # `transformers` does not write its default, two classes.
    labels = settings.get("id2label") or (None, None)
    return vit.VitConfig(
        image_size=settings.size("image_size"),
        patch_size=settings.size("patch_size"),
        channels=settings.size("num_channels"),
        dim=settings.size("hidden_size"),
        num_layers=settings.size("num_hidden_layers"),
        num_heads=settings.size("num_attention_heads"),
        hidden_dim=settings.size("intermediate_size"),
        norm_eps=settings.number("layer_norm_eps"),
        qkv_bias=settings.get("qkv_bias", True),
        num_classes=len(labels) if classifies else 0,
        pooled=not classifies and "pooler.dense.weight" in names,
    )


VIT_SELF = "encoder.layer.{i}.attention.attention"
VIT = Family(
    config=vit_config,
    model=vit.Vit,
    inputs=lambda config: (
        np.zeros((1, config.image_size, config.image_size, config.channels), np.float32),
    ),
    architectures=("ViTForImageClassification", "ViTModel"),
    expected={"hidden_act": "gelu", "pooler_act": "tanh"},
    prefix="vit.",
    rows=(
        ("embeddings", "vit", CLS | POSITIONS),
        ("embeddings.patch_embeddings.projection", "vit/patches", CONVOLUTION),
        ("encoder.layer.{i}.layernorm_before", "vit/layer_{i}/attention_norm", NORM),
        (f"{VIT_SELF}.query", "vit/layer_{i}/attention/query", LINEAR),
        (f"{VIT_SELF}.key", "vit/layer_{i}/attention/key", LINEAR),
        (f"{VIT_SELF}.value", "vit/layer_{i}/attention/value", LINEAR),
        ("encoder.layer.{i}.attention.output.dense", "vit/layer_{i}/attention/output", LINEAR),
        ("encoder.layer.{i}.layernorm_after", "vit/layer_{i}/mlp_norm", NORM),
        ("encoder.layer.{i}.intermediate.dense", "vit/layer_{i}/up", LINEAR),
        ("encoder.layer.{i}.output.dense", "vit/layer_{i}/down", LINEAR),
        ("layernorm", "vit/final_norm", NORM),
        ("pooler.dense", "vit/pooler", LINEAR),
        ("classifier", "vit/classifier", LINEAR),
    ),
)

# Keyed by the `model_type` of `config.json`.
FAMILIES = {"bert": BERT, "gpt2": GPT2, "llama": LLAMA, "t5": T5, "vit": VIT}
