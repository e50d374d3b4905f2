"""Static activation scales: statistics in Haiku's state, collected while a model runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeGuard, overload

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.containers import opened
from haiku_implicit.core.messages import see, type_error, value_error
from haiku_implicit.core.transform import is_value, split
from haiku_implicit.core.typing import Array, Params, State, Tree
from haiku_implicit.params.haiku.transformed import (
    AnyTransformed,
    check_transformed,
    marked_implicit,
)
from haiku_implicit.quantized.products.activation_stats import QuantStats, Shapes
from haiku_implicit.quantized.types.static_quantized import StaticQuantized
from haiku_implicit.quantized.types.trained_quantized import TrainedQuantized
from haiku_implicit.training.gradients import is_inexact

# The entry of Haiku's state that holds the statistics, with the name that Qwix gives it.
COLLECTION = "quant_stats"

Apply = Callable[..., Any]
Mode = Literal["update", "read", "fixed"]
# The statistics in the state: for each path of a weight, 'count' and the sums.
Stored = dict[str, dict[str, Any]]


@overload
def with_quant_stats(
    t: hk.Transformed | hk.TransformedWithState, *, update: bool = True, decay: float = 1.0
) -> hk.TransformedWithState: ...


@overload
def with_quant_stats(
    t: hk.MultiTransformed | hk.MultiTransformedWithState,
    *,
    update: bool = True,
    decay: float = 1.0,
) -> hk.MultiTransformedWithState: ...


def with_quant_stats(
    t: AnyTransformed, *, update: bool = True, decay: float = 1.0
) -> hk.TransformedWithState | hk.MultiTransformedWithState:
    """Keeps statistics of activations in Haiku's state, and takes static activation scales from them.

    A weight has such scales if `quantized_training` or `quantize_params` has given it a rule with
    `act_static_scale`. The state holds its statistics under 'quant_stats' and the weight's path,
    `module/name`: a dict of `count` and `sum_of_absmax` (or `sum_of_min` and `sum_of_max`), float32,
    with the axes of stacked layers first. The scale follows from the average, `sum / count`. With
    `decay=1` that is Qwix's moving average.

    With `update`, a product with such a weight adds the limits of its activation's range, averaged over
    `act_batch_axes`. It does so each time that it runs: in each step of a scan, at each use of a shared
    weight. Its own scale counts them at once; other products count them from the next call on. An
    activation with NaN or infinities, or without elements, does not count. As long as nothing is
    counted, a product uses the range of its own activation. Without `update` the state does not change.

    One forward pass gives the output, its gradients and the statistics. Call it under `jax.jit`: an
    eager call traces the model each time.

    Sharp edges:
      - The statistics leave the model along the gradient of its outputs (state included). A product is
        not counted if everything that depends on it passes through `stop_gradient`, `argmax` or a cast
        to integers. `convert_trained` names such weights.
      - A rule with stochastic rounding needs its key (`with_rounding_key`) while statistics are
        updated, even without a gradient.
      - With `update`, only reverse-mode differentiation with respect to arguments is possible, not with
        respect to arrays that the model closes over. A product within a `while_loop` raises JAX's error
        that the loop does not have such a derivative.
      - `use_implicit_args`, `hki.grad` and `hki.value_and_grad` turn weights into ordinary arrays,
        which cannot carry statistics. Use `jax.grad` with respect to the first half that `partition`
        returns, and `combine` both halves in the loss.

    Args:
      t: the result of `transform_implicit`. Apply `hk.without_apply_rng` before that.
      update: whether a call adds to the statistics.
      decay: a factor in (0, 1] for the sums and counts so far, in each call: 0.99 makes a moving
        average of about the last 100 calls.

    Returns:
      An `hk.TransformedWithState` (or `hk.MultiTransformedWithState`): `apply(params, state, ...)`
      returns the output and the state. A `state` without statistics is a valid start;
      `init_quant_stats` returns a state with all entries.

    Raises:
      TypeError: for anything but a transformed function.
      ValueError: for a decay out of its range. In a call, for a model with a state of that name;
        without `update`, for a weight without statistics.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QtRule
      >>> t = hki.transform_implicit(hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x))))
      >>> params = t.init(jax.random.key(0), jnp.ones((2, 4)))
      >>> rule = QtRule(weight_qtype='int8', act_qtype='int8', act_static_scale=True)
      >>> params = hki.quantized_training(params, [rule])
      >>> model, state = hki.with_quant_stats(t), {}
      >>> for batch in jnp.ones((2, 4)), jnp.full((2, 4), 3.0):
      ...   out, state = jax.jit(model.apply)(params, state, batch)
      >>> stats = state['quant_stats']['linear/w']
      >>> float(stats['sum_of_absmax'][0, 0]), float(stats['count'])
      (4.0, 2.0)
      >>> hki.convert_trained(params, state)['linear']['w'].stats.sums['absmax'].tolist()
      [[2.0]]
    """
    check_transformed("t", t)
    if not 0 < decay <= 1:
        raise value_error(f"decay: expected a number in (0, 1], got {decay!r}")
    several = isinstance(t, hk.MultiTransformed | hk.MultiTransformedWithState)
    kind: Any = hk.MultiTransformedWithState if several else hk.TransformedWithState
    has_state = isinstance(t, kind)

    def init(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out = t.init(*args, **kwargs)
        return out if has_state else (out, {})

    def wrap(apply: Apply) -> Apply:
        apply = apply if has_state else _with_state(apply)
        return _updating(apply, decay) if update else _reading(apply)

    return marked_implicit(kind(init=init, apply=jax.tree.map(wrap, t.apply)))


def init_quant_stats(
    t: AnyTransformed, params: Params, state: hk.State, *args: Any, **kwargs: Any
) -> hk.MutableState:
    """The state with empty statistics, for loops that need its final structure from the start.

    Args:
      t: the result of `transform_implicit`, with one `apply`.
      params: parameters, see `with_quant_stats`.
      state: the state of the model; {} for a model without state.
      *args: the other arguments of `apply`. The model is traced with them and does not run.
      **kwargs: its keyword arguments.

    Returns:
      The state, with zeros under 'quant_stats' for weights without statistics.

    Raises:
      ValueError: if the activations that one weight meets have limits of different shapes.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QtRule
      >>> t = hki.transform_implicit(hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x))))
      >>> params = t.init(jax.random.key(0), jnp.ones((2, 4)))
      >>> rule = QtRule(weight_qtype='int8', act_qtype='int8', act_static_scale=True)
      >>> params = hki.quantized_training(params, [rule])
      >>> hki.init_quant_stats(t, params, {}, jnp.ones((2, 4)))
      {'quant_stats': {'linear/w': {'count': Array(0., dtype=float32), \
'sum_of_absmax': Array([[0.]], dtype=float32)}}}
    """
    has_state = isinstance(t, hk.TransformedWithState | hk.MultiTransformedWithState)
    apply = t.apply if has_state else _with_state(t.apply)
    inner, stored = _parted(state)
    return _joined(inner, _completed(apply, stored, params, inner, *args, **kwargs))


def _with_state(apply: Apply) -> Apply:
    """Gives the `apply` of a model without state the signature of a model with state."""
    return lambda params, state, /, *args, **kwargs: (apply(params, *args, **kwargs), state)


def _parted(state: State) -> tuple[dict[str, Any], Stored]:
    """Splits a state into the model's own state and the statistics."""
    if not isinstance(state, Mapping):
        raise type_error(
            "state: expected a mapping, as Haiku's init returns it ({} for a model without state), got "
            f"{type(state).__name__}"
        )
    inner = dict(state)
    return inner, dict(opened(inner.pop(COLLECTION, {}), as_dicts=True))


def _joined(inner: State, stored: Stored) -> dict[str, Any]:
    if COLLECTION in inner:
        raise value_error(
            f"state: the model has an entry {COLLECTION!r} of its own, where statistics are to be; "
            "give the module another name"
        )
    return {**inner, COLLECTION: stored} if stored else dict(inner)


# --- calls ---------------------------------------------------------------------------------------


def _reading(apply: Apply) -> Apply:
    """Wraps a model to take scales from the statistics in its state, which do not change."""

    def wrapped(params: Params, state: State, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        inner, stored = _parted(state)
        out, inner = apply(_with_stats(params, stored, "read"), inner, *args, **kwargs)
        return out, _joined(inner, stored)

    return wrapped


def _updating(apply: Apply, decay: float) -> Apply:
    """Wraps a model to add the statistics of its products to its state."""

    def with_stats(own: Stored, params: Params, /, *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        return apply(_with_stats(params, own, "update"), *rest, **kwargs)

    def wrapped(params: Params, state: State, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        inner, stored = _parted(state)
        stored = _completed(apply, stored, params, inner, *args, **kwargs)
        known = stored.keys() & _names(params)
        own = {name: jax.tree.map(lambda x: decay * x, stored[name]) for name in known}
        (out, inner), added = _with_gradient(with_stats, own, (params, inner, *args), kwargs)
        return out, _joined(inner, {**stored, **jax.tree.map(jnp.add, own, added)})

    return wrapped


def _completed(
    apply: Apply, stored: Stored, params: Params, inner: State, /, *args: Any, **kwargs: Any
) -> Stored:
    """The statistics, with zeros for weights that do not have any yet. The model is only traced."""
    if not _names(params) - stored.keys():
        return stored
    shapes, batch = Shapes(), {w.stats.name: w.shape[:-2] for w in _static_weights(params)}
    static, values = split(((params, inner, *args), kwargs))

    def noting(values: list[Array]) -> list[Array]:
        (params, *rest), kwargs = static.merge(values)
        out = apply(_with_stats(params, {}, "update", shapes), *rest, **kwargs)
        return [x for x in jax.tree.leaves(out) if is_value(x)]

    jax.eval_shape(noting, values)
    found: Stored = {}
    for name, limits in shapes.found.items():
        sums = {f"sum_of_{limit}": (*batch[name], *shape) for limit, shape in limits.items()}
        own = {"count": batch[name], **sums}
        found[name] = {key: jnp.zeros(shape, jnp.float32) for key, shape in own.items()}
    return {**found, **stored}  # statistics that are stored already stay


# --- weights with statistics ---------------------------------------------------------------------


def _static_weights(params: Params) -> list[TrainedQuantized | StaticQuantized]:
    return [x for x in jax.tree.leaves(opened(params), is_leaf=takes_stats) if takes_stats(x)]


def takes_stats(x: Array) -> TypeGuard[TrainedQuantized | StaticQuantized]:
    """Whether a value is a weight that takes statistics in a call."""
    static = isinstance(x, TrainedQuantized | StaticQuantized) and x.stats is not None
    return static and x.stats.sums is None


def _names(params: Params) -> set[str]:
    return {w.stats.name for w in _static_weights(params)}


def _with_stats(params: Params, stored: Stored, mode: Mode, shapes: Shapes | None = None) -> Params:
    """The parameters, with the stored statistics on their weights."""

    def filled(x: Array) -> Array:
        if not takes_stats(x):
            return x
        name = x.stats.name
        if shapes is not None or name not in stored:
            return x._replace(stats=QuantStats(name=name, mode=mode, shapes=shapes))
        return x._replace(stats=read_stats(name, stored[name], x.shape[:-2], mode))

    return jax.tree.map(filled, opened(params), is_leaf=takes_stats)


def read_stats(name: str, stored: Any, batch: tuple[int, ...], mode: Mode) -> QuantStats:
    """The stored statistics of a weight with these batch axes.

    Raises:
      ValueError: if the entries are not statistics of such a weight.
    """
    entries = dict(stored) if isinstance(stored, Mapping) else {}
    count = entries.pop("count", None)
    sums = {key.removeprefix("sum_of_"): x for key, x in entries.items()}
    fits = {*sums} in ({"absmax"}, {"min", "max"}) and np.shape(count) == batch
    if not fits or count is None or any(np.shape(x)[: len(batch)] != batch for x in sums.values()):
        raise value_error(
            f"quant_stats of {name!r}: expected 'count' {list(batch)} and 'sum_of_absmax' (or "
            f"'sum_of_min' and 'sum_of_max') with these axes first, got "
            f"{jax.tree.map(np.shape, stored)}; leave them out, so that they start anew"
        )
    return QuantStats(sums, count, name, mode)


def fixed_stats(
    path: str, w: TrainedQuantized | StaticQuantized, stacked: int, state: State
) -> QuantStats:
    """The final range of a weight's activations: the averages of its statistics.

    Args:
      path: the path of the parameter, for errors.
      w: the weight.
      stacked: how many of its batch axes stack weights of different layers. Along the others (the
        positions of a kernel) the first entry counts for all. Entries that counted nothing become NaN.
      state: Haiku's state with statistics, or None.

    Raises:
      ValueError: if the statistics are missing, or empty (not detected under `jax.jit`).
    """
    name = path if w.stats is None else w.stats.name
    stored = {} if state is None else _parted(state)[1]
    if name not in stored:
        raise ValueError(
            f"state: expected the statistics of {name!r}, which has a static activation scale, under "
            f"{COLLECTION!r}; there are those of: {', '.join(sorted(stored)) or 'nothing'}. Run the "
            "model wrapped in with_quant_stats on some batches, and give the state that it returns; if "
            "that was done, no product has this parameter: give its module a rule without "
            f"act_static_scale, or leave it out by exclude= {see('nothing-counted')}"
        )
    stats = read_stats(name, stored[name], w.shape[:-2], "fixed")
    if not isinstance(stats.count, jax.core.Tracer) and not _is_counted(stats.count, stacked):
        raise ValueError(
            f"state: nothing is counted in the statistics of {name!r}: no product with it has run, or "
            "what depends on it leaves the model without a gradient (stop_gradient, argmax, integers). "
            "Return something that depends on it, or give its module a rule without act_static_scale"
            f" {see('nothing-counted')}"
        )
    return dataclasses.replace(stats, sums=jax.tree.map(lambda x: _per(x, stats.count), stats.sums))


def _is_counted(count: Array, stacked: int) -> bool:
    """Whether each layer has counted something, in at least one of a kernel's matrices."""
    layers = np.asarray(count).reshape(*np.shape(count)[:stacked], -1)
    return bool((layers > 0).any(-1).all())


def _per(sums: Array, count: Array) -> jax.Array:
    """The average; NaN if nothing is counted."""
    count = jnp.asarray(count)
    return sums / count.reshape(*count.shape, *(1,) * (np.ndim(sums) - count.ndim))


# --- statistics as a gradient ---------------------------------------------------------------------


def _with_gradient(
    fun: Callable[..., Any], stats: Stored, args: Any, kwargs: Any
) -> tuple[Any, Stored]:
    """`fun(stats, *args, **kwargs)`, and its gradient with respect to `stats` for zero cotangents.

    If the call is differentiated from outside, both gradients share one linearization. So custom
    derivative rules within `fun` run once, and are not differentiated themselves.
    """
    static, values = split((args, kwargs))
    out_def: Any = None
    static_out: Any = None

    def on_values(stats: Stored, values: list[Array]) -> list[jax.Array]:
        nonlocal out_def, static_out
        args, kwargs = static.merge(values)
        leaves, out_def = jax.tree.flatten(fun(stats, *args, **kwargs))
        static_out, out = split(leaves)
        return list(map(jnp.asarray, out))

    @jax.custom_vjp
    def both(stats: Stored, values: list[Array]) -> Any:
        out, pull = jax.vjp(lambda stats: on_values(stats, values), stats)
        return out, pull([_zeros(x) for x in out])[0]

    def linearized(stats: Stored, values: list[Array]) -> tuple[Any, Any]:
        out, pull = jax.vjp(on_values, stats, values)
        return (out, pull([_zeros(x) for x in out])[0]), pull

    def backward(pull: Any, gradients: Tree) -> Any:
        return None, pull(gradients[0])[1]

    both.defvjp(linearized, backward)
    out, added = both(stats, values)
    return out_def.unflatten(static_out.merge(out)), added


def _zeros(x: jax.Array) -> Any:
    """A cotangent of zeros for a value."""
    return jnp.zeros_like(x) if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0)
