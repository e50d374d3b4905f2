"""Makes llama_golden.npz: what another implementation computes for tests/examples/test_llama.py.

The other implementation is Hugging Face's ``LlamaForCausalLM`` (PyTorch, float32, CPU), for a tiny
random model and for the real SmolLM2-135M-Instruct, whose GGUF file transformers dequantizes and
reorders by its own code. The token ids come from a plain byte-pair encoder in this file, with the
regular expressions that llama.cpp uses for the "smollm" pre-tokenizer.

To make it anew::

    pip install torch transformers accelerate gguf regex
    python tests/data/make_llama_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

``smollm.fetch(smollm.MODEL)`` in examples/ returns the path of that file.
"""

import argparse
import hashlib
import json
import pathlib

import gguf
import numpy as np
import regex
import torch
import transformers

TARGET = pathlib.Path(__file__).with_name("llama_golden.npz")
PROMPT = "<|im_start|>user\nName 3 plays by Shakespeare.<|im_end|>\n<|im_start|>assistant\n"
TEXTS = [
    PROMPT,
    "The capital of France is",
    "It's 12345 o'clock, they'll say; we've 3.14 left",
    "  two  spaces\n\n\tand a tab \r\n end ",
    "naïve façade — “quotes” … 東京 🙂 e\u0301 ½ Ⅻ ٣",
    "x=1;y[2]+=foo_bar(x**2)//7 # 100%",
    "nested <|im_end|><|im_end|> and <|im_nothing|>",
    "",
]


def tiny_model() -> dict[str, np.ndarray]:
    """A random model with grouped heads; its weights (HF names and layout), tokens and logits."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # Large enough that attention is far from uniform and every part shows in the logits.
        for name, weight in model.named_parameters():
            weight.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
        tokens = torch.randint(64, (2, 12))
        logits = model(tokens).logits
    arrays = {f"tiny/{name}": weight.detach().numpy() for name, weight in model.named_parameters()}
    return arrays | {"tiny_tokens": tokens.numpy().astype(np.int32), "tiny_logits": logits.numpy()}


def real_model(path: pathlib.Path, tokens: list[int]) -> dict[str, np.ndarray]:
    """Logits of the real model: 64 columns of each row, and its maximum and log-sum-exp."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor([tokens])).logits[0]
    columns = np.random.default_rng(0).choice(logits.shape[-1], 64, replace=False)
    return {
        "smollm_tokens": np.array([tokens], np.int32),
        "smollm_columns": columns.astype(np.int32),
        "smollm_logits": logits.numpy()[:, columns],
        "smollm_argmax": logits.argmax(-1).numpy().astype(np.int32),
        "smollm_logsumexp": logits.logsumexp(-1).numpy(),
    }


def reference_tokenizer(path: pathlib.Path):
    """Returns a function from text to token ids that merges one pair at a time, by rank."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    special_pattern = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
    digit_pattern = regex.compile(r"(\p{N})")
    word_pattern = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    # GPT-2's printable stand-ins for bytes.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}

    def encode_word(word: str) -> list[int]:
        parts = [letters[byte] for byte in word.encode()]
        while True:
            pairs = [p for p in zip(parts, parts[1:], strict=False) if p in ranks]
            if not pairs:
                return [ids[part] for part in parts]
            best, merged, i = min(pairs, key=ranks.__getitem__), [], 0
            while i < len(parts):
                width = 2 if tuple(parts[i : i + 2]) == best else 1
                merged.append("".join(parts[i : i + width]))
                i += width
            parts = merged

    def encode(text: str) -> list[int]:
        result = []
        for piece in special_pattern.split(text):
            if piece in special:
                result.append(ids[piece])
                continue
            for run in digit_pattern.split(piece):
                for word in word_pattern.findall(run):
                    result += encode_word(word)
        return result

    return encode


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=pathlib.Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    path = parser.parse_args().gguf
    encode = reference_tokenizer(path)
    encoded = [[text, encode(text)] for text in TEXTS]
    made_by = {
        "script": "tests/data/make_llama_golden.py",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    arrays = tiny_model() | real_model(path, encode(PROMPT))
    np.savez_compressed(TARGET, made_by=json.dumps(made_by), encoded=json.dumps(encoded), **arrays)


if __name__ == "__main__":
    main()
