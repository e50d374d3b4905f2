"""Generates greedy text from SmolLM2 on 4-bit weights, with a quantized key-value cache.

The model is plain Haiku that keeps its cache in Haiku's state (`models/llama.py`). The weights keep
the GGUF file's format; `hk.custom_creator` makes the cache quantized.

    python examples/generate_smollm.py --prompt='The capital of France is' --cache=int8
"""

import sys
import time

import jax
from absl import app, flags

import decoding
import haiku_implicit as hki
import smollm

_GGUF = flags.DEFINE_string("gguf", None, "GGUF file of a Llama; by default SmolLM2 from PyPI.")
_PROMPT = flags.DEFINE_string("prompt", "The capital of France is", "What the text continues.")
_TOKENS = flags.DEFINE_integer("tokens", 64, "How many tokens to generate.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("cache_length", 256, "Positions in the cache.", lower_bound=2)
_CACHE = flags.DEFINE_enum("cache", "int8", ["int8", "int4", "f32"], "The format of the cache.")
_ACTIVATIONS = flags.DEFINE_enum(
    "activations",
    "f32",
    ["f32", "int8"],
    "What activations are rounded to in products with weights.",
)
_DENSE = flags.DEFINE_bool("dense", False, "Whether the weights are dequantized at the start.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        run()
    except smollm.InputError as error:
        sys.exit(f"error: {error}")


def run() -> None:
    """Loads the model, reads the prompt, and continues it."""
    checkpoint = smollm.read_gguf(_GGUF.value or smollm.fetch(smollm.MODEL))
    params = hki.materialize(checkpoint.params) if _DENSE.value else checkpoint.params
    if _ACTIVATIONS.value != "f32" and not _DENSE.value:
        params = hki.quantize_activations(params, _ACTIVATIONS.value)
    prompt = checkpoint.tokenizer.encode(_PROMPT.value).ids
    if not prompt or len(prompt) + _TOKENS.value > _LENGTH.value:
        raise smollm.InputError(
            f"--prompt of {len(prompt)} tokens and --tokens={_TOKENS.value}: expected 1 to "
            f"--cache_length={_LENGTH.value} together"
        )
    model = decoding.make_model(checkpoint.config, _LENGTH.value, _CACHE.value)
    decoder, state = decoding.make_decoder(model), decoding.empty_cache(model)
    decoder.generate(params, state, prompt, _TOKENS.value)  # compiles
    start = time.perf_counter()
    tokens = decoder.generate(params, state, prompt, _TOKENS.value)
    seconds = time.perf_counter() - start
    print(_PROMPT.value + checkpoint.tokenizer.decode(tokens))
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    print(f"\nweights        {hki.summary(params).total.nbytes / 1e6:.1f} MB")
    print(f"cache          {held / 1e6:.2f} MB ({_CACHE.value}, {_LENGTH.value} positions)")
    print(f"speed          {len(tokens) / seconds:.1f} tokens per second, the prompt included")


if __name__ == "__main__":
    app.run(main)
