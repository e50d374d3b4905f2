"""The roads of a user from the first parameters to a served model, each cut in two by a new process.

A road makes parameters, trains two steps, saves everything and ends. A new process loads that and trains
two more steps. Then the adapter goes into a file of its own and onto a fresh base, and the merged model
goes to a program that knows Haiku alone.
"""

import dataclasses
import itertools
import json
import os
import traceback
import typing

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule
from tests.plain_model import forward, inputs

MATRICES = "(first|second)/w"
STEPS = 2


class Road(typing.NamedTuple):
    """One way through the library.

    Attributes:
      kind: a row of `KINDS`.
      loop: a row of `LOOPS`.
      container: 'dict', or 'FlatMap', which Haiku has for immutable parameters.
    """

    kind: str
    loop: str
    container: str

    @property
    def name(self):
        return " ".join(self)


# --- the parameters --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the weights become before they are trained.

    Attributes:
      base: a function of the dense parameters; what an adapter is put on.
      adapt: a function of the base; None if the base itself is trained.
      stats: whether the products keep activation statistics in Haiku's state.
      rounds: whether its products round activations, which those of the merged model do not.
    """

    base: typing.Callable = lambda params: params
    adapt: typing.Callable | None = lambda params: hki.add_lora(params, 3, rank=2, targets=MATRICES)
    stats: bool = False
    rounds: bool = False


def quantized(**options):
    return lambda params: hki.quantize_params(params, targets=MATRICES, **options)


def adapted(method, **options):
    return lambda params: hki.add_adapter(params, 3, method, targets=MATRICES, **options)


RULE = dict(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")


def trained_rule(**options):
    return lambda params: hki.quantized_training(
        params, [QtRule(**RULE, **options)], targets=MATRICES
    )


def static(params):
    """Weights with static scales, found by two batches."""
    params, state = trained_rule(act_static_scale=True)(params), init()[1]
    apply = hki.with_quant_stats(MODEL).apply
    for number in range(2):
        # Larger ones than those of training, so that no product clips what training makes of them.
        _, state = apply(params, state, jax.random.key(number), 2 * inputs(number)[0], False)
    return hki.convert_trained(params, state)


# Twice the mean of the largest inputs, so that no product of the trained model clips others.
STATIC = dict(act_static_scale=True, act_calibration_method="absmax,2")

KINDS = {
    "LoRA": Kind(),
    "DoRA": Kind(adapt=adapted("dora", rank=2)),
    "VeRA": Kind(adapt=adapted("vera", rank=2)),
    "VB-LoRA": Kind(adapt=adapted("vblora", rank=2, vector_length=8)),
    "LoRA on int8": Kind(quantized(dtype="int8")),
    "LoRA on int4": Kind(quantized(dtype="int4", group_size=8)),
    "LoRA on nf4": Kind(quantized(dtype="nf4", group_size=8)),
    "DoRA on int4": Kind(quantized(dtype="int4", group_size=8), adapted("dora", rank=2)),
    "LoRA on static scales": Kind(static, rounds=True),
    "quantized training": Kind(trained_rule(), None, rounds=True),
    "static training": Kind(trained_rule(**STATIC), None, stats=True, rounds=True),
    "bank": Kind(quantized(dtype="int8"), None),
}

MODEL = hki.transform_implicit(hk.transform_with_state(forward))


def init():
    made = jax.jit(hk.transform_with_state(forward).init, static_argnums=2)
    return made(jax.random.key(0), inputs(0)[0], True)


def base_of(road):
    return KINDS[road.kind].base(init()[0])


def parameters_of(road):
    base, kind = base_of(road), KINDS[road.kind]
    if road.kind == "bank":
        bank = hki.AdapterBank.of(base, capacity=3, rank=2, targets=MATRICES)
        return bank.put(1, hki.get_adapter(hki.add_lora(base, 3, rank=2, targets=MATRICES)))
    params = base if kind.adapt is None else kind.adapt(base)
    return hk.data_structures.to_immutable_dict(params) if road.container == "FlatMap" else params


# --- the loops -------------------------------------------------------------------------------------


class Run(typing.NamedTuple):
    """What a training goes on from."""

    step: int
    key: jax.Array
    trained: typing.Any
    frozen: typing.Any
    optimizer: typing.Any
    state: typing.Any


hki.register_tree_type(Run, name="tests.roads.Run")


def loss_of(road, params, state, key, x, y):
    wrap = hki.with_quant_stats if KINDS[road.kind].stats else lambda model: model
    if isinstance(params, hki.AdapterBank):
        of_one = lambda p, x: MODEL.apply(p, state, key, x[None], False)[0][0]  # noqa: E731
        out = hki.with_bank(of_one)(params, jnp.full(len(x), 1), x)
    else:
        params = hki.with_vector_bank(params) if "vblora_bank" in params else params
        out, state = wrap(MODEL).apply(params, state, key, x, True)
    return ((out - y) ** 2).mean(), state


def chain(road):
    """AdamW as people use it: clipped, with a schedule, without decay of vectors."""
    decayed = lambda tree: jax.tree.map(lambda x: jnp.ndim(x) > 1, tree)  # noqa: E731
    # Masks of optax fail on Haiku's FlatMap, whatever its leaves are.
    mask = decayed if road.container == "dict" else None
    rate = optax.cosine_decay_schedule(3e-3, 100)
    adamw = optax.adamw(rate, weight_decay=0.01, mask=mask)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def documented(road):
    """`hki.value_and_grad`, `hki.freeze_declared` and `hki.apply_updates` on whole parameters."""
    optimizer = hki.freeze_declared(chain(road))

    def start(params):
        return params, None, optimizer.init(params)

    def step(run, *batch):
        loss = lambda p: loss_of(road, p, run.state, *batch)  # noqa: E731
        (_, state), grads = hki.value_and_grad(loss, has_aux=True)(run.trained)
        updates, optimizer_state = optimizer.update(grads, run.optimizer, run.trained)
        trained = hki.apply_updates(run.trained, updates)
        return run._replace(trained=trained, optimizer=optimizer_state, state=state)

    return start, lambda run: step


def plain(road):
    """`jax.value_and_grad` and optax alone, on the half that `hki.partition` says is trained."""
    optimizer = chain(road)

    def start(params):
        if isinstance(params, hki.AdapterBank):  # its trained part is another tree
            trained, frozen = params.slots, dataclasses.replace(params, slots={})
        else:
            trained, frozen = hki.partition(params)
        return trained, frozen, optimizer.init(trained)

    def step(run, *batch):
        def loss(trained):
            return loss_of(road, joined(road, trained, run.frozen), run.state, *batch)

        (_, state), grads = jax.value_and_grad(loss, has_aux=True)(run.trained)
        updates, optimizer_state = optimizer.update(grads, run.optimizer, run.trained)
        trained = optax.apply_updates(run.trained, updates)
        return run._replace(trained=trained, optimizer=optimizer_state, state=state)

    return start, lambda run: step


def frozen(road):
    """A loop without this library, on a model from `hki.freeze`, which each process makes anew."""
    optimizer = chain(road)

    def start(params):
        _, trained = hki.freeze(MODEL, params, trainable_dense=True)
        return trained, params, optimizer.init(trained)

    def step_of(run):
        model, _ = hki.freeze(MODEL, run.frozen, trainable_dense=True)

        def step(run, *batch):
            def loss(trained):
                return loss_of(road, model.params(trained), run.state, *batch)

            (_, state), grads = jax.value_and_grad(loss, has_aux=True)(run.trained)
            updates, optimizer_state = optimizer.update(grads, run.optimizer, run.trained)
            trained = optax.apply_updates(run.trained, updates)
            return run._replace(trained=trained, optimizer=optimizer_state, state=state)

        return step

    return start, step_of


LOOPS = {"documented": documented, "plain": plain, "frozen": frozen}


def joined(road, trained, frozen):
    """The whole parameters of a run."""
    if frozen is None:
        return trained
    if road.loop == "frozen":
        return hki.freeze(MODEL, frozen, trainable_dense=True)[0].params(trained)
    if isinstance(frozen, hki.AdapterBank):
        return dataclasses.replace(frozen, slots=trained)
    return hki.combine(trained, frozen)


# `hki.value_and_grad` says that these need `jax.value_and_grad`; a bank is no tree of parameters.
LEFT_OUT = {
    "documented": {"bank", "VB-LoRA", "static training"},
    "plain": set(),
    "frozen": {"bank"},
}

ROADS = [
    Road(*names)
    for names in itertools.product(KINDS, LOOPS, ("dict", "FlatMap"))
    if names[0] not in LEFT_OUT[names[1]]
]
NAMED = {road.name: road for road in ROADS}


# --- one device or several -------------------------------------------------------------------------

RULES = [(".*first/w", P(None, "d")), (".*second/w", P("d")), (".*", P())]


def mesh():
    return jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))


def places_of(tree):
    """Where a tree lies; None on one device."""
    return None if jax.device_count() == 1 else hki.shardings(tree, RULES, mesh())


def placed(tree):
    places = places_of(tree)
    return tree if places is None else jax.device_put(tree, places)


def batch(number):
    arrays = inputs(number)
    several = jax.device_count() > 1
    return jax.device_put(arrays, NamedSharding(mesh(), P("d"))) if several else arrays


def in_places(step, run):
    """A step whose results are split as the run is: `out_shardings` of JAX can't be a FlatMap of Haiku."""
    places = [x.sharding if isinstance(x, jax.Array) else None for x in jax.tree.leaves(run)]

    def placed_step(*args):
        leaves, treedef = jax.tree.flatten(step(*args))
        pairs = zip(leaves, places, strict=True)
        keep = jax.lax.with_sharding_constraint
        return treedef.unflatten(x if place is None else keep(x, place) for x, place in pairs)

    return placed_step


def trained_on(road, run, steps):
    _, step_of = LOOPS[road.loop](road)
    step = step_of(run)
    step = jax.jit(step if jax.device_count() == 1 else in_places(step, run))
    for _ in range(steps):
        key, own = jax.random.split(run.key)
        new = step(run._replace(step=0), own, *batch(run.step))
        run = new._replace(step=run.step + 1, key=key)
    return run


# --- the parts of a road ---------------------------------------------------------------------------


def path_of(folder, road, what):
    return os.path.join(folder, f"{road.name}.{what}.safetensors".replace(" ", "_"))


def same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (keys, a), b in pairs:
        if jnp.issubdtype(jnp.result_type(a), jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        a, b = map(np.asarray, (a, b))
        assert a.dtype == b.dtype, keys
        np.testing.assert_array_equal(a, b, err_msg=str(keys))


def first(folder, road):
    """Trains two steps and saves; then two more, which the second part is compared with."""
    start, _ = LOOPS[road.loop](road)
    trained, frozen, optimizer = start(placed(parameters_of(road)))
    run = Run(0, jax.random.key(7), trained, frozen, optimizer, init()[1])
    if KINDS[road.kind].stats:
        arguments = run.state, run.key, inputs(0)[0], True
        run = run._replace(
            state=hki.init_quant_stats(MODEL, joined(road, trained, frozen), *arguments)
        )
    run = trained_on(road, placed(run)._replace(step=0), STEPS)
    hki.save(path_of(folder, road, "run"), run)
    hki.save(path_of(folder, road, "expected"), trained_on(road, run, STEPS))


def second(folder, road):
    """Goes on where the first part was, and takes the model apart for those that serve it."""
    path = path_of(folder, road, "run")
    with hki.open_checkpoint(path) as checkpoint:
        run = hki.load(path, shardings=places_of(checkpoint.structs))
    run = trained_on(road, run, STEPS)
    same_bits(run, hki.load(path_of(folder, road, "expected")))

    params, kind = joined(road, run.trained, run.frozen), KINDS[road.kind]
    if isinstance(params, hki.AdapterBank):
        params = params.select(1)
    if kind.adapt or road.kind == "bank":
        params = moved(folder, road, params)
        merged = hki.merge_adapters(params)
    else:
        merged = hki.convert_trained(params, run.state if kind.stats else None)
    served = hki.with_quant_stats(MODEL, update=False) if kind.stats else MODEL
    x = inputs(100)[0]
    out, _ = served.apply(with_bank(params), run.state, None, x, False)
    model_state = {k: v for k, v in run.state.items() if k != "quant_stats"}
    hki.save(
        path_of(folder, road, "plain"),
        {"params": hki.materialize(merged), "state": model_state, "out": out},
    )


def with_bank(params):
    return hki.with_vector_bank(params) if "vblora_bank" in params else params


def moved(folder, road, params):
    """The parameters, their adapter through a file of its own onto a fresh base."""
    path = path_of(folder, road, "adapter")
    dense = road.kind != "bank"  # whose base stays as it is
    hki.save(path, hki.get_adapter(params, trainable_dense=dense or None))
    fresh = hki.set_adapter(base_of(road), hki.load(path), check_base=jax.device_count() == 1)
    same_bits(*(with_dicts(tree) for tree in (fresh, params)))
    return fresh


def with_dicts(tree):
    return hk.data_structures.to_haiku_dict(tree)


PARTS = {"first": first, "second": second}


def walk(part, folder, names):
    """Walks a part of each road. Prints a line of JSON for each: its name, and the error if there was one."""
    for name in names:
        try:
            with hki.materialization("error"):
                PARTS[part](folder, NAMED[name])
            error = ""
        except Exception:
            error = traceback.format_exc().split("\n----------")[0]
        print(json.dumps([name, error]), flush=True)
