"""New factors: the numbers that `jax.random` draws, with one program for all small shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.arrays import drawing

KEYS = {
    "usual": lambda: jax.random.key(3),
    "rbg": lambda: jax.random.key(3, impl="rbg"),
}


@pytest.mark.combinations
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(7, 3), (2, 40, 8), (70_001, 1), (0, 4)])
@pytest.mark.parametrize("kind", KEYS)
def test_the_numbers_are_jaxs(kind, shape, dtype):
    key = KEYS[kind]()
    want = jax.random.uniform(key, shape, dtype, -0.25, 0.25)
    for draw in (drawing.uniform, jax.jit(drawing.uniform, static_argnums=(1, 2, 3))):
        got = draw(key, shape, dtype, 0.25)
        assert isinstance(got, jax.Array) and got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    assert jnp.array_equal(drawing.zeros(shape, dtype), jnp.zeros(shape, dtype))


def test_new_shapes_compile_nothing():
    """After a first weight, LoRA on others of its dtype needs no further program."""
    names, on = [], [False]

    def listen(name, *_, **__):
        if on[0] and name == "/jax/core/compile/backend_compile_duration":
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    params = {f"m{n}": {"w": jnp.ones((n, m))} for n, m in ((11, 13), (17, 19), (23, 29))}
    hki.add_lora({"m11": params["m11"]}, 0, rank=3)
    on[0] = True
    new = hki.add_lora(params, 0, rank=3)
    on[0] = False
    assert not names
    names.clear()
    assert len({x["w"].a.shape for x in new.values()}) == 3
    on[0] = True
    jax.random.uniform(jax.random.key(0), (31, 3))  # the listener hears a program
    on[0] = False
    assert names
