"""From the first parameters to a served model, through processes that end and begin (`tests/roads.py`)."""

import functools
import json
import subprocess
import sys

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from tests import roads
from tests.devices import HANG, run_on_devices
from tests.random_arrays import normal

WALK = "import sys; from tests.roads import walk; walk(*sys.argv[1:3], sys.argv[3:])"
# The roads that documents show.
DOCUMENTED = ("LoRA on int4 documented dict", "LoRA on int4 frozen dict")


def walked(chosen, folder, devices):
    """Walks roads to their end. Returns how far the outputs of Haiku alone are from those of the tuned model."""
    for part in roads.PARTS:
        printed = run_on_devices(WALK, devices, part, str(folder), *chosen)
        rows = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
        assert [name for name, _ in rows] == list(chosen), printed
        failed = [f"{name}, {part} part: {error[-2000:]}" for name, error in rows if error]
        assert not failed, "\n\n".join(failed)
    paths = [roads.path_of(folder, roads.NAMED[name], "plain") for name in chosen]
    command = [sys.executable, "-W", "ignore", "-m", "tests.plain_model", *paths]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG)
    assert run.returncode == 0, run.stderr
    return dict(zip(chosen, map(float, run.stdout.split()), strict=True))


def check(chosen, folder, devices):
    for name, distance in walked(chosen, folder, devices).items():
        # Products of the merged model do not round activations to 8 bits.
        limit = 0.05 if roads.KINDS[roads.NAMED[name].kind].rounds else 1e-5
        assert distance <= limit, name


@pytest.mark.slow
def test_the_road_of_a_user(tmp_path):
    check(DOCUMENTED, tmp_path, 1)


# Each kind with each loop, in one of the containers; with `--long`, in both.
@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
def test_every_road(half, devices, tmp_path):
    names = [name for i, name in enumerate(sorted(roads.NAMED)) if i % 2 == half]
    check(names, tmp_path, devices)


def test_a_road_that_differs_is_seen(tmp_path):
    """The comparison itself: one bit, one dtype, one key of a tree."""
    tree = {"w": np.ones(3, np.float32)}
    roads.same_bits(tree, {"w": np.ones(3, np.float32)})
    one_bit = {"w": np.nextafter(tree["w"], 2)}
    for other in (one_bit, {"w": np.ones(3)}, {"v": np.ones(3, np.float32)}):
        with pytest.raises(AssertionError):
            roads.same_bits(tree, other)


# --- a loop in 16 bits -----------------------------------------------------------------------------


def seen(x, is_training):
    x = hk.Conv2D(4, 3, with_bias=False, name="conv")(x)
    x = hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training)
    return hk.Linear(3, name="head")(jax.nn.relu(x).mean((1, 2)))


@pytest.mark.slow
def test_float16_with_loss_scaling():
    """A step that overflows changes nothing; the next one is the dense twin's, with averages in float32."""
    x, labels = normal((8, 6, 6, 2)), jnp.arange(8) % 3
    plain = hk.transform_with_state(seen)
    wide, state = plain.init(jax.random.key(0), x, True)
    half = hk.data_structures.map(lambda m, n, w: w if m == "norm" else w.astype(jnp.float16), wide)
    whole = hki.add_adapter(half, 1, "locon", rank=2, targets="conv/w")
    whole = hki.add_lora(whole, 2, rank=2, targets="head/w")
    model, trained = hki.freeze(plain, whole, trainable_dense="norm/.*")
    trained = jax.tree.map(lambda w: w + 0.1, trained)

    def loss_of(apply, trained, x, scale):
        logits, new = apply(trained, state, None, x, True)
        logits = logits.astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return scale.scale(loss), new

    def step(trained, state, scale):
        loss = functools.partial(loss_of, model.apply)
        grads, new = jax.grad(loss, has_aux=True)(trained, x.astype(jnp.float16), scale)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, _ = optax.sgd(1.0).update(grads, optax.sgd(1.0).init(trained), trained)
        new = optax.apply_updates(trained, updates), new
        return *jmp.select_tree(finite, new, (trained, state)), scale.adjust(finite), finite

    hk.mixed_precision.set_policy(hk.BatchNorm, jmp.Policy(jnp.float32, jnp.float32, jnp.float16))
    try:
        scale, step = jmp.DynamicLossScale(jnp.float32(2.0**24), factor=2**12), jax.jit(step)
        with hki.materialization("error"):
            *same, scale, first = step(trained, state, scale)
            new, averages, _, second = step(*same, scale)
    finally:
        hk.mixed_precision.clear_policy(hk.BatchNorm)
    assert (bool(first), bool(second)) == (False, True)
    roads.same_bits(same, [trained, state])

    def twin(trained, *args):
        dense = hki.materialize(model.params(trained))
        return plain.apply(jax.tree.map(lambda w: w.astype(jnp.float32), dense), *args)

    loss = functools.partial(loss_of, twin)
    grads, of_twin = jax.grad(loss, has_aux=True)(trained, x, jmp.NoOpLossScale())
    for got, want in ((new, jax.tree.map(jnp.subtract, trained, grads)), (averages, of_twin)):
        assert {v.dtype.name for v in jax.tree.leaves(got)} <= {"float32", "int32"}
        # (float16 rounds by 5e-4.)
        chex.assert_trees_all_close(got, want, rtol=5e-3, atol=2e-3)
