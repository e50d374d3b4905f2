"""Nests types: LoRA, quantized weights and symbolic zeros, each in a field of another one.

Each nesting is put on all projections of an unmodified GPT-2, and compared with the model
on dense arrays.

    python examples/nested_types.py
    python examples/nested_types.py --repo=openai-community/gpt2
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
import hub
from dense_twin import difference, size_of
from errors import main_of
from models import gpt2
from printing import heading, table

_REPO = flags.DEFINE_string("repo", None, "A GPT-2 of the Hugging Face hub, by name.")
_FOLDER = flags.DEFINE_string("folder", None, "A folder in the hub's layout that holds a GPT-2.")
_LAYERS = flags.DEFINE_integer("layers", 1, "Layers of the GPT-2 with random weights.", 1)
_WIDTH = flags.DEFINE_integer("width", 128, "Its width, a multiple of 16.", 16)
_GROUP = flags.DEFINE_integer("group_size", 16, "How many weights share a scale.", 2)
_RANK = flags.DEFINE_integer("rank", 4, "Rank of LoRA.", 1)

Make = Callable[[jax.Array, jax.Array], Any]


def run() -> None:
    """Compares each nesting with its dense twin."""
    lora_of_zeros_in_a_product()
    in_a_model()


# --- a type that expects a scale and an offset --------------------------------------------------------


@dataclasses.dataclass
class Affine(hki.ImplicitArray):
    """The matrix `codes * scale + offset`.

    Attributes:
        codes: `[n, m]` int8.
        scale: The scale of each column, `[m]`.
        offset: The offset of each column, `[m]`.
    """

    codes: Any
    scale: Any
    offset: Any

    def materialize(self) -> jax.Array:
        return self.codes * self.scale + self.offset


@hki.primitive_handler("dot_general")
def multiply_codes(
    primitive: Any, x: jax.Array, w: Affine, *, dimension_numbers: Any, **params: Any
) -> Any:
    """Computes `x @ w`, with offsets added to the result; nothing here knows of symbolic ones."""
    if w.ndim != 2 or dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
        return NotImplemented
    codes = w.codes.astype(x.dtype)
    y = hki.default_handler(primitive, x, codes, dimension_numbers=dimension_numbers, **params)
    return y * w.scale + x.sum(-1, keepdims=True) * w.offset


# --- the nestings, each of a dense weight and a key ---------------------------------------------------


def lora_of_zeros(w: Any, key: jax.Array) -> hki.LoRA:
    n, m = w.shape
    zeros = (hki.Zeros(shape=shape) for shape in ((n, _RANK.value), (_RANK.value, m)))
    return hki.LoRA(w, *zeros)


def affine(w: jax.Array, key: jax.Array, symbolic: bool) -> Affine:
    """Returns codes around zero, with an offset of zeros, in memory or symbolic."""
    scale = abs(w).max(0) / 127
    offset = hki.Zeros(shape=scale.shape)
    codes = jnp.round(w / scale).astype(jnp.int8)
    return Affine(codes, scale, offset if symbolic else hki.materialize(offset))


def lora_on_int4(w: jax.Array, key: jax.Array) -> hki.LoRA:
    n, m = w.shape
    a, b = jax.random.normal(key, (2, max(n, m), _RANK.value))
    stored = hki.QuantizedMatrix.quantize(w, "int4", _GROUP.value)
    return hki.LoRA(stored, a[:n] / n**0.5, b[:m].T / 10)


def int8_lora_on_int4(w: jax.Array, key: jax.Array) -> hki.LoRA:
    lora = lora_on_int4(w, key)
    a, b = (hki.QuantizedMatrix.quantize(x, "int8") for x in (lora.a, lora.b))
    return hki.LoRA(lora.w, a, b)


def all_of_them(w: jax.Array, key: jax.Array) -> hki.LoRA:
    return lora_of_zeros(affine(w, key, symbolic=True), key)


NESTINGS: dict[str, Make] = {
    "dense": lambda w, key: w,
    "LoRA of symbolic zeros": lora_of_zeros,
    "codes, dense offset": functools.partial(affine, symbolic=False),
    "codes, symbolic offset": functools.partial(affine, symbolic=True),
    "LoRA on 4 bits": lora_on_int4,
    "LoRA in 8 bits on 4 bits": int8_lora_on_int4,
    "LoRA of zeros, on codes, symbolic offset": all_of_them,
}


# --- comparisons ----------------------------------------------------------------------------------


def lora_of_zeros_in_a_product() -> None:
    """Shows that a correction of symbolic zeros leaves nothing in the program."""

    @hki.use_implicit_args
    def total(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ w)

    w, x = jnp.ones((3, 5)), jnp.arange(3.0)
    lora = hki.LoRA(w, hki.Zeros(shape=(3, 6)), hki.Zeros(shape=(6, 5)))
    heading("LoRA of symbolic zeros")
    print(lora)
    with hki.materialization("error"):
        programs = [str(jax.make_jaxpr(total)(weight, x)) for weight in (w, lora)]
        print(f"Original: {total(w, x)}\nWith LoRA: {total(lora, x)}")
        assert total(w, x) == total(lora, x) == 15.0
    print("the same program" if programs[0] == programs[1] else "\n".join(programs))
    assert programs[0] == programs[1]


def in_a_model() -> None:
    """Tries all nestings in one model."""
    model, params, config = load()
    tokens = jnp.arange(2 * 16).reshape(2, 16) % config.vocab_size
    tokens = tokens[:, : config.max_positions]
    dense_bytes = size_of(params)
    rows = []
    for name, make in (bar := tqdm(NESTINGS.items(), "GPT-2", leave=False)):
        bar.set_postfix_str(name)
        rows.append([name, *compare(model, nested(params, make), tokens)])
    heading(f"in all projections of a GPT-2 ({dense_bytes:,} bytes)")
    table(
        "weights bytes operations outputs gradients materialized".split(),
        [[r[0], f"{r[1]:,}", r[2], *(f"{x:.0e}" for x in r[3:5]), r[5]] for r in rows],
    )
    print("(outputs, gradients: largest difference to the dense twin, relative to its largest)")
    check({row[0]: row[1:] for row in rows})


def check(found: dict[str, list[Any]]) -> None:
    """Checks that symbolic zeros cost nothing."""
    for name, (*_, outputs, gradients, materialized) in found.items():
        assert outputs < 1e-4 and gradients < 1e-3 and materialized == 0, name
    sizes = {name: row[:2] for name, row in found.items()}
    assert sizes["LoRA of symbolic zeros"] == sizes["dense"]
    assert sizes["LoRA of zeros, on codes, symbolic offset"] == sizes["codes, symbolic offset"]
    assert sizes["codes, symbolic offset"] < sizes["codes, dense offset"]
    assert sizes["LoRA in 8 bits on 4 bits"] < sizes["LoRA on 4 bits"]


def nested(params: Any, make: Make) -> Any:
    """Returns the parameters with a type for each projection."""
    keys = iter(jax.random.split(jax.random.key(2), len(params)))
    return {
        module: {
            name: make(value, next(keys)) if name == "w" else value for name, value in own.items()
        }
        for module, own in params.items()
    }


def compare(model: hk.Transformed, params: Any, tokens: jax.Array) -> list[Any]:
    """Returns bytes and operations, the largest errors, and the number of arrays that became dense."""
    trainable, frozen = hki.partition(params)

    def run(apply: Any) -> Any:
        def loss(trainable: Any) -> Any:
            logits = apply(hki.combine(trainable, frozen), tokens)
            return jnp.square(logits).mean(), logits

        (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable)
        return logits, grads

    apply = hki.transform_implicit(model).apply
    with hki.materialization("allow"), hki.materialization_report() as report:
        y, grads = run(apply)
    want, want_grads = run(lambda params, x: model.apply(hki.materialize(params), x))
    operations = jax.jit(apply).lower(params, tokens).as_text().count("stablehlo.")
    errors = [difference(y, want), difference(grads, want_grads)]
    return [size_of(params), operations, *errors, report.count]


def load() -> tuple[hk.Transformed, Any, gpt2.Gpt2Config]:
    """Returns the model that the flags name, or one with random weights."""
    if _REPO.value or _FOLDER.value:
        folder = _FOLDER.value or hub.fetch(_REPO.value)
        config, model, params = hub.load_as(gpt2.Gpt2Config, folder)
        return model, params, config
    width = _WIDTH.value
    config = gpt2.Gpt2Config(256, width, _LAYERS.value, 4, 4 * width, 64)
    model = hk.without_apply_rng(hk.transform(lambda tokens: gpt2.Gpt2(config)(tokens)))
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    # Initial norms make rows with sum zero, so an offset of a matrix would have zero gradient.
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return model, jax.tree.map(jnp.add, params, treedef.unflatten(noise)), config


if __name__ == "__main__":
    app.run(main_of(run))
