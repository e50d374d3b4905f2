"""Quantized training of a model: rules put on a tree of parameters, and what is stored afterwards."""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_implicit.arrays.fake_quantized import FakeQuantized
from haiku_implicit.arrays.static_quantized import StaticQuantized
from haiku_implicit.arrays.trained import TrainedQuantized
from haiku_implicit.core.box import box
from haiku_implicit.numerics import formats
from haiku_implicit.numerics.operands import OperandSpec, quantize, stored_matrix
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.params import edits, selection
from haiku_implicit.params.quant_stats import fixed_stats, takes_stats
from haiku_implicit.products import by_rule, quant_rules
from haiku_implicit.products.activation_stats import QuantStats
from haiku_implicit.products.quant_rules import QtRule, QuantRule


def quantized_training(params: Any, rules: Sequence[Any], *, targets: Any = None) -> Any:
    """Puts rules on the weights of a model, for quantized products and gradients in training.

    The weights stay dense, one floating leaf each, and are what is trained; every product with one
    of them, under `transform_implicit`, quantizes it and the other operand, and in the backward pass
    the incoming gradient. No module is changed.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings.
      rules: `QtRule`s (or `QuantRule`s: these leave the backward pass dense), in the order of
        precedence. A warning names those that decide for no module. Static activation scales
        (`act_static_scale`) need the model wrapped in `with_quant_stats`.
      targets: which parameters, as for `add_lora`. None: floating-point parameters of two axes or more
        that are not called `b`, `bias`, `offset` or `scale`.

    Returns:
      The tree with `TrainedQuantized` in place of the weights that a rule quantizes, mappings as
      dicts.

    Raises:
      ValueError: for rules that quantize nothing, a rule with an option that training does not have.
      TypeError: for anything but rules.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QtRule
      >>> model = hki.transform_implicit(hk.transform(lambda x: hk.nets.MLP([8, 4])(x)))
      >>> params = model.init(jax.random.key(0), jnp.ones((2, 3)))
      >>> rule = QtRule(weight_qtype='int8', act_qtype='int8', bwd_qtype='int8')
      >>> params = hki.quantized_training(params, [rule])
      >>> grads = jax.grad(lambda p: model.apply(p, None, jnp.ones((2, 3))).sum())(params)
      >>> grads['mlp/~/linear_0']['w'].value.shape
      (3, 8)
    """
    found = _training_rules(rules)

    def make(path: str, value: Any, own: Any) -> Any:
        stats = QuantStats(name=path) if any(map(_is_static, own)) else None
        return TrainedQuantized(value, stats=stats, rules=own)

    return edits.replace_by_rules(params, found, targets, make)


def quantized_training_getter(rules: Sequence[Any], *, targets: Any = None) -> Callable[..., Any]:
    """A getter for quantized training, for `hk.custom_getter`: what is stored stays dense arrays.

    The random keys of stochastic rounding come from Haiku's own stream (`hk.next_rng_key`), a new one
    each time that a weight is read.

    Args:
      rules: as for `quantized_training`, but that nobody is warned of unused ones, and that there are
        no static activation scales.
      targets: as for `quantized_training`.

    Returns:
      A getter: the model sees `TrainedQuantized`.

    Raises:
      ValueError: as for `quantized_training`, and for static activation scales.
      TypeError: as for `quantized_training`.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QtRule
      >>> rule = QtRule(weight_qtype='int8', bwd_qtype='int8', bwd_stochastic_rounding='uniform')
      >>> def model(x):
      ...   with hk.custom_getter(hki.quantized_training_getter([rule])):
      ...     return hk.Linear(3)(x)
      >>> t = hki.transform_implicit(hk.transform(model))
      >>> params = t.init(jax.random.key(0), jnp.ones((1, 2)))
      >>> loss = lambda params, key: t.apply(params, key, jnp.ones((1, 2))).sum()
      >>> jax.grad(loss)(params, jax.random.key(1))['linear']['w'].shape
      (2, 3)
    """
    found = _training_rules(rules)
    for i, rule in enumerate(found):
        if rule.act_static_scale:
            raise ValueError(
                f"rules[{i}]: act_static_scale needs weights that carry statistics, which a getter "
                "does not see; use quantized_training on the parameters, and with_quant_stats"
            )
    chosen = selection.chooser(targets, selection.is_weight)

    def getter(next_getter: Any, value: Any, context: Any) -> Any:
        own = edits.rules_of(found, context.module_name)
        if (
            own
            and edits.is_dense_weight(value)
            and chosen(context.module_name, context.name, value)
        ):
            wrapped = TrainedQuantized(value, rules=own)
            key = hk.next_rng_key() if _needs_key(own) else None
            value = box(wrapped if key is None else _keyed(wrapped, key))
        return next_getter(value)

    return getter


def with_rounding_key(params: Any, key: Any) -> Any:
    """Gives weights the random keys that stochastic rounding of their gradients needs.

    To be called in each step, within the function that is differentiated, with a key of the step:

        def loss(params, key, batch):
          params = hki.with_rounding_key(params, key)
          ...

    Args:
      params: a tree with `TrainedQuantized` in it.
      key: a random key. Each weight has one of its own, by its path.

    Returns:
      The tree with keys on the weights whose rules round stochastically; the others as they are. A
      weight that one step uses several times has the same noise each time.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QtRule
      >>> rule = QtRule(weight_qtype='int8', bwd_qtype='int8', bwd_stochastic_rounding='uniform')
      >>> params = hki.quantized_training({'linear': {'w': jnp.ones((2, 3))}}, [rule])
      >>> hki.with_rounding_key(params, jax.random.key(0))['linear']['w'].key.shape
      ()
    """
    key = _typed(key)

    def keyed(module_name: str, name: str, value: Any) -> Any:
        if not isinstance(value, TrainedQuantized) or not _needs_key(value.rules):
            return value
        path = selection.path(module_name, name)
        return _keyed(value, jax.random.fold_in(key, zlib.crc32(path.encode())))

    return edits._map(keyed, params)


def quantization_aware(params: Any, rules: Sequence[Any], *, targets: Any = None) -> Any:
    """Makes weights stand for their rounded values, for quantization-aware training.

    The forward pass uses the values that `QuantizedMatrix` would hold, the gradient passes straight
    through to the weights before rounding. `convert_trained` then gives the stored matrices, with
    identical outputs.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings.
      rules: `QuantRule`s; of each `weight_qtype`, `weight_calibration_method` ('minmax' with a zero
        point) and `tile_size` along axis -2, which is contracted in `x @ w`.
      targets: as for `quantized_training`.

    Returns:
      The tree with `FakeQuantized` in place of the weights that a rule quantizes, mappings as dicts.

    Raises:
      ValueError: for rules that quantize nothing, or that are not of weights alone.
      TypeError: for anything but rules.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QuantRule
      >>> params = {'linear': {'w': jnp.array([[1.0], [0.6]])}}
      >>> aware = hki.quantization_aware(params, [QuantRule(weight_qtype='int2')])
      >>> print(hki.materialize(aware)['linear']['w'].ravel())
      [1. 1.]
    """
    for i, rule in enumerate(edits.checked_rules(rules)):
        if rule.act_qtype is not None:
            raise ValueError(
                f"rules[{i}]: expected act_qtype=None, because it is weights alone that are rounded "
                f"here, got {rule.act_qtype!r}; quantized_training has activations"
            )

    def make(path: str, value: Any, own: Any) -> Any:
        options = tuple(own[0].weight_options(value.shape[-2]).items())
        new = FakeQuantized(value, options)
        # Raises for a weight that the rule does not fit.
        jax.eval_shape(lambda w: QuantizedMatrix.quantize(w, **dict(options)), value)
        return new

    return edits.replace_by_rules(params, list(rules), targets, make)


def convert_trained(params: Any, state: Any = None) -> Any:
    """The stored matrices that trained weights stand for, for inference.

    Of a `FakeQuantized` weight it is the matrix of its rounded values. Of a `TrainedQuantized` one it
    is that of the codes that its rule quantizes it to, where it is used as `x @ w` (axis -2 is
    contracted; convolution kernels share scales over all axes but the last). With static activation
    scales, products are those of `with_quant_stats(t, update=False)`, and need no state any more; that
    holds for a `StaticQuantized` weight without ranges, too, which gets them.

    Args:
      params: a tree with such weights.
      state: Haiku's state with the statistics that static activation scales come from, as
        `with_quant_stats` returns it; None where there are none.

    Returns:
      The tree with `QuantizedMatrix` in their place, or `StaticQuantized` where activations have
      static scales.

    Raises:
      ValueError: for a weight whose rules leave products dense; for one with static activation scales
        and no statistics (under `jax.jit` for one without an entry: where nothing is counted, the
        range is NaN, and so are products).

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QtRule
      >>> params = {'linear': {'w': jnp.ones((4, 2))}}
      >>> params = hki.quantized_training(params, [QtRule(weight_qtype='int4')])
      >>> hki.convert_trained(params)['linear']['w'].format
      'int4'
    """

    def converted(module_name: str, name: str, value: Any) -> Any:
        if isinstance(value, FakeQuantized):
            return value.quantized()
        stacked, path = module_name.count("__layer_stack_"), selection.path(module_name, name)
        if isinstance(value, StaticQuantized) and takes_stats(value):
            return value._replace(stats=fixed_stats(path, value, stacked, state))
        if isinstance(value, TrainedQuantized):
            rule = _deciding_rule(value, stacked)
            stored = _stored(value, stacked, rule)
            if not rule.act_static_scale:
                return stored
            return StaticQuantized.of(stored, fixed_stats(path, value, stacked, state), value.rules)
        return value

    return edits._map(converted, params)


def dot_general_by_bits(
    fwd_bits: int | None,
    bwd_bits: int | None = None,
    mode: Literal["train", "serve", "convert"] = "train",
) -> Callable[..., Any]:
    """Products in integers of n bits forward and m bits backward, in one call.

    Args:
      fwd_bits: of weights and activations: 2, 3, 4, 6 or 8; None for dense products.
      bwd_bits: of gradients; None for a dense backward pass.
      mode: what is returned.

    Returns:
      'train': a function like `jax.lax.dot_general`, whose second operand is the weight. 'serve': the
      same for a stored weight, a `QuantizedMatrix`; its result is that of training. 'convert': a
      function of a weight `[..., n, m]` that returns the stored one.

    Raises:
      ValueError: for other numbers of bits, or another mode.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> x, w = jnp.array([[1.0, 2.0]]), jnp.array([[0.5], [-0.2]])
      >>> numbers = (((1,), (0,)), ((), ()))
      >>> stored = hki.dot_general_by_bits(8, mode='convert')(w)
      >>> served = hki.dot_general_by_bits(8, mode='serve')(x, stored, numbers)
      >>> bool(served[0, 0] == hki.dot_general_by_bits(8, 8)(x, w, numbers)[0, 0])
      True
    """
    if mode not in ("train", "serve", "convert"):
        raise ValueError(f"mode: expected 'train', 'serve' or 'convert', got {mode!r}")
    if fwd_bits is None:
        return (lambda w: w) if mode == "convert" else jax.lax.dot_general
    qtypes = [_integer_of("fwd_bits", fwd_bits), bwd_bits and _integer_of("bwd_bits", bwd_bits)]
    rule = QtRule(weight_qtype=qtypes[0], act_qtype=qtypes[0], bwd_qtype=qtypes[1])
    if mode == "convert":
        return lambda w: _stored(TrainedQuantized(jnp.asarray(w)), w.ndim - 2, rule)
    train = functools.partial(by_rule.dot_general, rule=rule)

    def serve(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        if not isinstance(rhs, QuantizedMatrix):
            raise TypeError(f"rhs: expected a QuantizedMatrix, got {rhs!r}; see mode='convert'")
        return train(lhs, rhs, *args, **kwargs)

    return serve if mode == "serve" else train


def _integer_of(name: str, bits: Any) -> str:
    known = [f.bits for f in formats.FORMATS.values() if f.name == f"int{f.bits}"]
    if bits not in known:
        raise ValueError(f"{name}: expected None or one of {sorted(known)}, got {bits!r}")
    return f"int{bits}"


# --- rules on weights ----------------------------------------------------------------------------


def _training_rules(rules: Any) -> list[QtRule]:
    """The rules for training; those that leave modules alone too."""
    return [quant_rules.as_training_rule(rule) for rule in edits.checked_rules(rules)]


def _is_static(rule: QuantRule) -> bool:
    return rule.act_static_scale and rule.weight_qtype is not None


def _needs_key(rules: Sequence[QuantRule]) -> bool:
    return any(
        isinstance(rule, QtRule) and rule.weight_qtype and rule.bwd_stochastic_rounding
        for rule in rules
    )


def _typed(key: Any) -> Any:
    """A key of JAX's newer kind: Haiku's are arrays of integers."""
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key if typed else jax.random.wrap_key_data(key)


def _keyed(value: TrainedQuantized, key: Any) -> TrainedQuantized:
    batch = value.shape[:-2]
    key = _typed(key)
    return value._replace(key=jax.random.split(key, batch) if batch else key)


# --- stored weights ------------------------------------------------------------------------------


def _deciding_rule(w: TrainedQuantized, stacked: int) -> QuantRule:
    """The rule for the products that a weight is stored for; `stacked` as for `_stored`."""
    # Of more axes, it is a kernel, or the weight of an einsum, or one for each group of rows.
    kernel = w.ndim - stacked > 2
    ops = ("conv_general_dilated", "dot_general", "ragged_dot") if kernel else ("dot_general",)
    rule = next(filter(None, map(w.rule_for, ops)), None)
    if rule is None:
        raise ValueError(
            "rules: they leave the products of this weight dense; it has no stored form"
        )
    return rule


def _stored(w: TrainedQuantized, stacked: int, rule: QuantRule) -> QuantizedMatrix:
    """The matrix of the codes that a weight is quantized to.

    Args:
      w: the weight.
      stacked: how many leading axes stack weights of their own.
      rule: the rule for its products.
    """
    qt = quant_rules.as_training_rule(rule)
    channels = (*range(stacked), *(() if qt.disable_channelwise_axes else (w.ndim - 1,)))
    tile = None if qt.tile_size is None else (w.ndim - 2, qt.tile_size)
    how = OperandSpec(qt.weight_qtype, qt.weight_calibration_method, channels, tile)
    return stored_matrix(quantize(w.value, how), qt.weight_qtype, w.dtype)
