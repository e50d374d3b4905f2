"""Eight threads that trace, run and differentiate wrapped functions at once, each with settings of its own.

What each finds is what it finds alone. Haiku's own state is one for each thread.
"""

import concurrent.futures
import sys
import threading
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
THREADS = 8


def forward(x):
    x = jnp.tanh(hk.Linear(8)(x))
    w = hk.get_parameter("w", (8, 8), init=hk.initializers.RandomNormal())
    x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=2)
    return jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x)


def with_a_hook(hook):
    """The model with a getter or a creator."""
    around, make = {
        "lora getter": (hk.custom_getter, lambda: hki.lora_getter(rank=2)),
        "quantize creator": (hk.custom_creator, lambda: hki.quantize_creator(dtype="int8")),
        "rules": (
            hk.custom_getter,
            lambda: hki.quantized_training_getter([QtRule(weight_qtype="int8", act_qtype="int8")]),
        ),
    }[hook]

    def hooked(x):
        with around(make()):
            return forward(x)

    return hooked


# One model that all threads share, and with it what is kept for its eager calls.
SHARED = hki.transform_implicit(hk.without_apply_rng(hk.transform(forward)))
PARAMS = {
    "linear": {"w": X[:1].T * X[1:2] * 8, "b": X[0]},
    "~": {"w": np.roll(np.eye(8, dtype=np.float32), 1, 0) * 0.9 + 0.05},
}


def prepared(kind):
    params = jax.tree.map(jnp.asarray, PARAMS)
    if kind == "lora":
        return hki.add_lora(params, 0, rank=2)
    if kind == "rules":
        return hki.quantized_training(params, [QtRule(weight_qtype="int4", act_qtype="int8")])
    return hki.quantize_params(params, dtype=kind)


def of_shared_model(kind, rows):
    """Eager, jitted, differentiated, and mapped calls."""
    params, x = prepared(kind), X[:rows]
    found = [SHARED.apply(params, x), jax.jit(SHARED.apply)(params, x)]
    loss = lambda params: SHARED.apply(params, x).var()  # noqa: E731
    found.append(jax.jit(hki.value_and_grad(loss))(params))
    found.append(jax.vmap(SHARED.apply, (None, 0))(params, x[:, None]))
    return jax.tree.leaves(found)


def of_hook(hook):
    model = hki.transform_implicit(hk.transform(with_a_hook(hook)))
    params = model.init(jax.random.key(1), X)
    found = jax.jit(model.apply)(params, jax.random.key(2), X)
    return [*jax.tree.leaves(params), found, model.apply(params, jax.random.key(2), X)]


def of_policy(policy, count):
    """Makes arrays dense in a new place under a policy, and returns what the report says."""
    w = hki.LoRA(jnp.ones((3, 3)), jnp.ones((3, 1)), jnp.ones((1, 3)))
    sort = hki.use_implicit_args(lambda w: [jnp.sort(w + i).sum() for i in range(count)])
    with hki.materialization(policy), hki.materialization_report() as report:
        try:
            found = jax.jit(sort)(w)
        except hki.MaterializationError:
            found = [jnp.float32(-1)]
    return [*found, jnp.asarray(report.count), jnp.asarray(len(report))]


# What each thread does, and with what.
WORK = [
    (of_shared_model, "int8", 4),
    (of_shared_model, "lora", 4),
    (of_shared_model, "rules", 3),
    (of_hook, "lora getter"),
    (of_hook, "quantize creator"),
    (of_hook, "rules"),
    (of_policy, "allow", 3),
    (of_policy, "error", 5),
]


def at_once(work):
    """The results of functions that all threads begin at once, while threads change very often."""
    barrier = threading.Barrier(len(work))

    def run(job):
        barrier.wait()
        return job[0](*job[1:])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
            return list(pool.map(run, work))
    finally:
        sys.setswitchinterval(before)


def assert_equal(found, alone):
    for job, a, b in zip(WORK, found, alone, strict=True):
        assert len(a) == len(b) > 0, job
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=str(job))


@pytest.mark.slow
def test_eight_threads_find_what_one_finds():
    """All at once, when nothing is kept yet, and then one by one."""
    jax.clear_caches()
    first = at_once(WORK)
    alone = [job[0](*job[1:]) for job in WORK]
    assert_equal(first, alone)


def test_policies_and_reports_do_not_leak_between_threads():
    """Half of the threads allow what the other half refuses; each counts its own."""
    work = [(of_policy, ("allow", "error")[i % 2], 1 + i) for i in range(THREADS)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", hki.MaterializationWarning)
        for (_, policy, count), (*values, number, places) in zip(work, at_once(work), strict=True):
            assert (int(number), int(places)) == ((count, 1) if policy == "allow" else (1, 1))
            assert len(values) == (count if policy == "allow" else 1)


def test_a_thread_begins_with_the_default_and_leaves_others_as_they_are():
    w = hki.LoRA(jnp.ones((3, 3)), jnp.ones((3, 1)), jnp.ones((1, 3)))

    def sorted_anew():
        """A new function, which JAX has not traced."""
        jax.eval_shape(hki.use_implicit_args(lambda w: jnp.sort(w)), w)

    with hki.materialization("error"):
        with (
            concurrent.futures.ThreadPoolExecutor(1) as pool,
            pytest.warns(hki.MaterializationWarning),
        ):
            pool.submit(sorted_anew).result()
        with pytest.raises(hki.MaterializationError):
            sorted_anew()
