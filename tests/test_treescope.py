"""What treescope shows of implicit arrays."""

import jax
import jax.numpy as jnp
import pytest
import treescope

import haiku_implicit as hki

W = jnp.ones((64, 32))
QUANTIZED = hki.QuantizedMatrix.quantize(W, "int4", group_size=32)
LORA = hki.add_lora({"m": {"w": W}}, jax.random.key(0), rank=2)["m"]["w"]

SHOWN = {
    "lora": (LORA, "LoRA(", "# float32[64,32], 8,192 bytes as a dense array, 8,964 held"),
    "int4": (QUANTIZED, "format='int4'", "8,192 bytes as a dense array, 1,280 held"),
    "zeros": (
        hki.Zeros(shape=(2, 3), dtype=jnp.bfloat16),
        "shape=(2, 3)",
        "# bfloat16[2,3], 12 bytes",
    ),
    "shapes": (jax.eval_shape(lambda: LORA), "LoRA(", "# float32[64,32], 8,192 bytes"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_shape_format_and_bytes(name):
    value, start, about = SHOWN[name]
    text = treescope.render_to_text({"a": {"w": value}})
    html = treescope.render_to_html({"a": {"w": value}}, compressed=False)
    assert start in text and about in text
    assert all(part in html for part in about.split(", "))


def test_a_part_without_arrays_is_shown():
    trainable, frozen = hki.partition({"m": {"w": LORA}})
    for part in (trainable, frozen):
        assert "LoRA(" in treescope.render_to_text(part)
