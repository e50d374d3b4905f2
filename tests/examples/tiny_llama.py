"""The tiny Llama of the golden, and GGUF files of it."""

import string

import gguf

from models import llama

TINY = llama.LlamaConfig(
    vocab_size=64,
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden_dim=64,
    rope_base=50.0,
    norm_eps=1e-3,
)
# Hugging Face's name within a layer -> GGUF's.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(golden):
    """The tiny model's weights under their GGUF names, in Hugging Face's order of rows."""
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    tensors = {}
    for key in golden.files:
        if key.startswith("tiny/"):
            name = key.removeprefix("tiny/").removesuffix(".weight")
            if name in outer:
                name = outer[name]
            else:
                _, _, layer, rest = name.split(".", 3)
                name = f"blk.{layer}.{LAYER_NAMES[rest]}"
            tensors[f"{name}.weight"] = golden[key]
    return tensors


def interleave(weight, heads):
    """Reorders the rows of a query or key weight as the conversion to GGUF does."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, tensors, *, types=None, **changes):
    """Writes a GGUF file of the tiny model.

    ``types`` gives tensors another type than F32, ``changes`` other metadata (``None``: none).
    """
    characters = string.ascii_letters + string.digits
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": TINY.num_layers,
        "llama.embedding_length": TINY.dim,
        "llama.feed_forward_length": TINY.hidden_dim,
        "llama.attention.head_count": TINY.num_heads,
        "llama.attention.head_count_kv": TINY.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": TINY.norm_eps,
        "llama.rope.freq_base": TINY.rope_base,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<|end|>", *characters, "th"],
        "tokenizer.ggml.token_type": [3] + [1] * (len(characters) + 1),
        "tokenizer.ggml.merges": ["t h"],
    } | changes
    writer = gguf.GGUFWriter(path, arch=metadata.pop("general.architecture"))
    add = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if value is not None:
            add[type(value)](key, value)
    for name, tensor in tensors.items():
        kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
