"""Quantized training of a model: weights with quantization rules, and their codes after training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_implicit.arrays.uses import Use
from haiku_implicit.core.keys import as_key_source
from haiku_implicit.core.messages import type_error, value_error, warn_caller
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.typing import Array, Key, Params, SameTree, State
from haiku_implicit.params.haiku.hooks import Getter, checked, getter
from haiku_implicit.params.quantizing.stats import fixed_stats, takes_stats
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.infer_axes import axes_of_use, uses_of
from haiku_implicit.params.trees.matrix_axes import MatrixAxesOf, open_matrix
from haiku_implicit.params.trees.selection import editing
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.numbers.ranges import ScaledAxes
from haiku_implicit.quantized.operands import quantize, stored_matrix
from haiku_implicit.quantized.products import by_rule
from haiku_implicit.quantized.products.activation_stats import QuantStats
from haiku_implicit.quantized.products.rules import QtRule, QuantRule
from haiku_implicit.quantized.types.converted import ConvertedMatrix
from haiku_implicit.quantized.types.fake_quantized import FakeQuantized
from haiku_implicit.quantized.types.static_quantized import StaticQuantized
from haiku_implicit.quantized.types.trained_quantized import TrainedQuantized


def quantized_training(
    params: SameTree,
    rules: Sequence[QuantRule],
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    missing_ok: bool = False,
    matrix_axes: MatrixAxesOf | None = None,
) -> SameTree:
    """Puts rules on the weights of a model, for quantized products and gradients in training.

    The weights stay dense and are trained, as one floating leaf each. Under `transform_implicit`,
    every product with such a weight quantizes both operands, and its backward pass quantizes the
    incoming gradient. No module changes.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings.
      rules: `QtRule`s, or `QuantRule`s, which leave the backward pass dense; the first rule that
        matches decides. A warning names the rules that decide for no module. Static activation scales
        (`act_static_scale`) need the model wrapped in `with_quant_stats`.
      targets: the weights that get rules, as for `add_lora`. None: floating-point parameters of two
        axes or more that are not called `b`, `bias`, `offset` or `scale`, and do not have the name of
        a table of positions.
      exclude, missing_ok, matrix_axes: as for `add_lora`. Training takes the scales from the axes
        that each product contracts, but `convert_trained` has to know these axes: give `matrix_axes`
        for weights that are not used as `x @ w`.

    Returns:
      The tree with `TrainedQuantized` for each weight that a rule quantizes, and mappings as dicts.

    Raises:
      ValueError: for rules that quantize nothing, or a rule with an option that training does not
        have.
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

    def make(parameter: trees.Parameter, own: tuple[QuantRule, ...]) -> TrainedQuantized:
        static = any(rule.act_static_scale and rule.weight_qtype is not None for rule in own)
        stats = QuantStats(name=parameter.path) if static else None
        return TrainedQuantized(parameter.value, stats=stats, rules=own)

    choice = trees.Choice(targets, exclude, missing_ok, matrix_axes)
    return trees.replace_targets(params, choice, trees.by_rules(found, make, trees.rules_of))


def quantized_training_getter(
    rules: Sequence[QuantRule], *, targets: Targets | None = None
) -> Getter:
    """A getter for quantized training, for `hk.custom_getter`: stored parameters stay dense arrays.

    The random keys of stochastic rounding come from `hk.next_rng_key`, a new key each time that the
    model reads a weight.

    Args:
      rules: as for `quantized_training`, without static activation scales. Unused rules give no
        warning.
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
            raise value_error(
                f"rules[{i}]: act_static_scale needs weights that carry statistics, which a getter "
                "does not see; use quantized_training on the parameters, and with_quant_stats"
            )

    def edit(params: Params) -> Params:
        trained = quantized_training(params, found, targets=targets)
        return with_rounding_key(trained, hk.next_rng_key)

    return getter(checked(edit))


def with_rounding_key(params: SameTree, key: Key | Callable[[], jax.Array]) -> SameTree:
    """Gives weights the random keys that stochastic rounding of their gradients needs.

    Call it in each step, within the function that `jax.grad` differentiates, with a key of the step:

        def loss(params, key, batch):
          params = hki.with_rounding_key(params, key)
          ...

    (Do not call it within `hki.value_and_grad` or `hki.use_implicit_args`: they call a function with
    ordinary arrays for the weights, and these do not get keys. If some arrays are frozen,
    differentiate with respect to the first half that `partition` returns.)

    Args:
      params: a tree with `TrainedQuantized` in it.
      key: a random key, or an integer seed. Each weight gets its own key, from this key and its path.

    Returns:
      The tree with keys on the weights whose rules round stochastically. If a step uses a weight
      several times, the noise is the same each time.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QtRule
      >>> rule = QtRule(weight_qtype='int8', bwd_qtype='int8', bwd_stochastic_rounding='uniform')
      >>> params = hki.quantized_training({'linear': {'w': jnp.ones((2, 3))}}, [rule])
      >>> hki.with_rounding_key(params, jax.random.key(0))['linear']['w'].key.shape
      ()
    """
    key = as_key_source(key)

    def keyed(parameter: trees.Parameter) -> Array:
        value = parameter.value
        if not isinstance(value, TrainedQuantized) or not _needs_key(value):
            return value
        own, batch = parameter.key_from(key), value.shape[:-2]
        return value._replace(key=jax.random.split(own, batch) if batch else own)

    return trees.map_matrices(keyed, params)


def quantization_aware(
    params: SameTree,
    rules: Sequence[QuantRule],
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    missing_ok: bool = False,
    matrix_axes: MatrixAxesOf | None = None,
) -> SameTree:
    """Makes weights stand for their rounded values, for quantization-aware training.

    The forward pass uses the values that `QuantizedMatrix` would hold. The gradient passes straight
    through to the weights before rounding. After training, `convert_trained` returns the stored
    matrices, which give identical outputs.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings.
      rules: `QuantRule`s, with `weight_qtype`, `weight_calibration_method` ('minmax' with a zero
        point) and `tile_size` along axis -2, which is contracted in `x @ w`.
      targets, exclude, missing_ok, matrix_axes: as for `quantized_training`.

    Returns:
      The tree with `FakeQuantized` for each weight that a rule quantizes, and mappings as dicts.

    Raises:
      ValueError: for rules that quantize nothing, that quantize activations, or that rotate.
      TypeError: for anything but rules.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QuantRule
      >>> params = {'linear': {'w': jnp.array([[1.0], [0.6]])}}
      >>> aware = hki.quantization_aware(params, [QuantRule(weight_qtype='int2')])
      >>> print(hki.materialize(aware)['linear']['w'].ravel())
      [1. 1.]
    """
    rules = trees.checked_rules(rules)
    for i, rule in enumerate(rules):
        if rule.act_qtype is not None:
            raise value_error(
                f"rules[{i}]: expected act_qtype=None, because only weights are rounded here, got "
                f"{rule.act_qtype!r}; quantized_training has activations"
            )
        if rule.rotate:
            raise value_error(
                f"rules[{i}]: expected rotate=False: training does not rotate weights"
            )

    def make(parameter: trees.Parameter, rule: QuantRule) -> FakeQuantized:
        options = rule.weight_options(parameter.value.shape[-2])
        del options["activation"]
        weight = FakeQuantized(parameter.value, tuple(options.items()))
        # Raises here, and not in training, for a weight that the rule does not fit.
        jax.eval_shape(FakeQuantized.quantized, weight)
        return weight

    choice = trees.Choice(targets, exclude, missing_ok, matrix_axes)
    return trees.replace_targets(params, choice, trees.by_rules(rules, make))


def convert_trained(
    params: SameTree,
    state: State = None,
    *,
    apply: Callable[..., Any] | None = None,
    args: Sequence[Array] = (),
) -> SameTree:
    """Replaces trained weights by quantized ones (codes and scales), for inference.

    A `FakeQuantized` weight becomes the matrix of its rounded values. A `TrainedQuantized` weight
    becomes the matrix of the codes that its rule quantizes it to in its product, so that inference
    gives the outputs of training. With `apply`, an abstract run of the model finds the product.
    Without `apply`, the product is taken to be `x @ w` (which contracts axis -2, or the inputs of the
    `matrix_axes` used in training), or a convolution whose kernel has the outputs last; other
    kernels, such as the kernel of `hk.Conv2DTranspose`, need `apply`. A warning names each weight with
    a use for which training has other codes, such as the second of `x @ w` and `x @ w.T`, or the
    look-up of a table that is also in a product.

    With static activation scales, products are the same as under `with_quant_stats(t, update=False)`
    and no longer need the state. A `StaticQuantized` weight without ranges gets them, too.

    Args:
      params: a tree with such weights.
      state: for static activation scales, Haiku's state with statistics, as `with_quant_stats`
        returns it.
      apply: the model, called as `apply(params, *args)`; None: see above.
      args: its further arguments, or `jax.ShapeDtypeStruct`s of them.

    Returns:
      The tree with `QuantizedMatrix` for these weights, or `StaticQuantized` if activations have
      static scales. Its `activation` is the activation format of the rule. Weights whose rules leave
      products dense are dense.

    Raises:
      ValueError: for a weight whose rules differ by operation, or a weight with static activation
        scales and without statistics. (Under `jax.jit`, empty statistics cannot be detected: the
        range becomes NaN, and so do products.)

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QtRule
      >>> params = {'linear': {'w': jnp.ones((4, 2))}}
      >>> params = hki.quantized_training(params, [QtRule(weight_qtype='int4')])
      >>> hki.convert_trained(params)['linear']['w'].format
      'int4'
    """

    uses = {} if apply is None else uses_of(apply, params, args, {})
    _warn_of_tiles(params)

    def converted(parameter: trees.Parameter) -> Array:
        value, stacked = parameter.value, parameter.stacked
        if isinstance(value, FakeQuantized):
            return value.quantized()
        if isinstance(value, StaticQuantized) and takes_stats(value):
            return value._replace(stats=fixed_stats(parameter.path, value, stacked, state))
        if not isinstance(value, TrainedQuantized):
            return value
        with editing(parameter.path, value):
            own = () if parameter.is_matrix else uses.get(parameter.path, ())
            if own:
                rule = value.rule_for(own[0].op_name)
                stored = value.value if rule is None else _stored_for(own[0], parameter, rule)
            else:
                rule = trees.rule_of(value.rules, parameter)
                stored = value.value
                if rule is not None:
                    stored = _stored(value.value, stacked, rule, parameter.path)
        if rule is None or not rule.act_static_scale:
            return stored
        stats = fixed_stats(parameter.path, value, stacked, state)
        return StaticQuantized.of(stored, stats, rule.act_batch_axes)

    return trees.map_matrices(converted, params)


def dot_general_by_bits(
    fwd_bits: int | None,
    bwd_bits: int | None = None,
    mode: Literal["train", "serve", "convert"] = "train",
) -> Callable[..., Any]:
    """Returns a product in integers of n bits forward and m bits backward.

    Args:
      fwd_bits: the bits of weights and activations: 2, 3, 4, 5, 6 or 8; None for dense products.
      bwd_bits: the bits of gradients; None for a dense backward pass.
      mode: 'train', 'serve' or 'convert', see below.

    Returns:
      'train': a function like `jax.lax.dot_general`, whose second operand is the weight. 'serve': a
      function like it for a stored weight, a `QuantizedMatrix`, with the same results. 'convert': a
      function that takes a weight `[..., n, m]` and returns the stored weight.

    Raises:
      ValueError: for an unknown number of bits or mode.

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
        raise value_error(f"mode: expected 'train', 'serve' or 'convert', got {mode!r}")
    if fwd_bits is None:
        return (lambda w: w) if mode == "convert" else jax.lax.dot_general
    qtypes = [_integer_of("fwd_bits", fwd_bits), bwd_bits and _integer_of("bwd_bits", bwd_bits)]
    rule = QtRule(weight_qtype=qtypes[0], act_qtype=qtypes[0], bwd_qtype=qtypes[1])
    if mode == "convert":
        return lambda w: _stored(jnp.asarray(w), w.ndim - 2, rule)
    train = functools.partial(by_rule.dot_general, rule=rule)

    def serve(lhs: Array, rhs: Array, *args: Any, **kwargs: Any) -> jax.Array:
        if not isinstance(rhs, QuantizedMatrix):
            raise type_error(f"rhs: expected a QuantizedMatrix, got {rhs!r}; see mode='convert'")
        return train(lhs, rhs, *args, **kwargs)

    return serve if mode == "serve" else train


def _integer_of(name: str, bits: Any) -> str:
    known = [f.bits for f in formats.FORMATS.values() if f.name == f"int{f.bits}"]
    if bits not in known:
        raise value_error(f"{name}: expected None or one of {sorted(known)}, got {bits!r}")
    return f"int{bits}"


# --- rules on weights ----------------------------------------------------------------------------


def _training_rules(rules: Any) -> list[QuantRule]:
    """The rules, including those that leave modules dense; raises for formats that only storage has."""
    rules = trees.checked_rules(rules)
    for rule in rules:
        rule.config(lhs_is_weight=False, rhs_is_weight=True)
    # All of one class, so that trees of the same rules have one structure.
    return [rule if isinstance(rule, QtRule) else QtRule(**vars(rule)) for rule in rules]


def _needs_key(weight: TrainedQuantized) -> bool:
    """Whether a rule rounds gradients stochastically."""
    return any(
        isinstance(rule, QtRule) and rule.weight_qtype and rule.bwd_stochastic_rounding
        for rule in weight.rules
    )


# --- stored weights ------------------------------------------------------------------------------


def _stored(w: jax.Array, stacked: int, rule: QuantRule, path: str = "") -> ConvertedMatrix:
    """The matrix of the codes that a rule quantizes a weight to, for `x @ w` or a convolution.

    Args:
      w: the dense weight, `[..., n, m]`.
      stacked: the number of leading axes that stack the weights of different layers.
      rule: the rule for its products.
      path: the path of the weight.
    """
    if w.ndim - stacked == 3:
        stacked = _stacked_of_three(rule, stacked)
    shared = rule.operand(is_weight=True).disable_channelwise_axes
    own = (*range(stacked), *(() if shared else (w.ndim - 1,)))
    return _with_scales(w, own, -2, rule, path)


def _with_scales(
    w: jax.Array, own: Sequence[int], axis: int, rule: QuantRule, path: str
) -> ConvertedMatrix:
    """The matrix of the codes that a rule quantizes a weight to, with scales along given axes.

    Args:
      w: the weight.
      own: the axes along which each index has its own scale.
      axis: the last or second last axis, -1 or -2, along which scales are shared, or differ by tile.
      rule, path: as for `_stored`.
    """
    config = rule.operand(is_weight=True)
    shared = tuple(i - w.ndim for i in range(w.ndim - 2) if i not in own)
    if axis == -1:
        w, last = jnp.swapaxes(w, -1, -2), {w.ndim - 1: w.ndim - 2, w.ndim - 2: w.ndim - 1}
        own = [last.get(i, i) for i in own]
    codes = quantize(w, config, ScaledAxes(tuple(own), w.ndim - 2))
    stored = stored_matrix(codes, config.qtype, w.dtype)._replace(axis=axis)
    stored = stored.with_activation(rule.activation)
    channelwise = not config.disable_channelwise_axes
    return ConvertedMatrix.of(stored, path=path, shared=shared, channelwise=channelwise)


def _stored_for(use: Use, parameter: trees.Parameter, rule: QuantRule) -> Any:
    """The codes of a weight in one of its products: a matrix, or a view of a matrix."""
    w, path = parameter.value.value, parameter.path
    tile = rule.operand(is_weight=True).tile
    all_share = rule.operand(is_weight=True).disable_channelwise_axes
    sharing = use.axes if all_share else use.shared
    if tile and not use.tiled <= sharing:  # a part of the axis that is cut into tiles
        return _stored(w, parameter.stacked, rule, path)
    last = [i for i in (-2, -1) if i in (use.tiled if tile else sharing)]
    # On an axis of length one, a shared scale and an own scale are the same.
    last = last or [i for i in (-2, -1) if w.shape[i] == 1 and not tile]
    if last and (all_share or not {-2, -1} <= sharing):
        own = [i for i in range(w.ndim) if i - w.ndim not in sharing]
        return _with_scales(w, own, last[0], rule, path)
    axes = axes_of_use(use, w.shape)
    if axes is None or (tile and len(use.contracted) > 1):
        return _stored(w, parameter.stacked, rule, path)
    opened = open_matrix(path, w, {path: axes})
    return opened.closed(_stored(opened.matrix, opened.matrix.ndim - 2, rule, path))


def _warn_of_tiles(params: Params) -> None:
    """Warns of weights with several row axes: training tiles only the last one."""
    for parameter in trees.parameters_of(params):
        matrix, axes = open_matrix(parameter.path, parameter.value)
        if axes is None or not isinstance(matrix, TrainedQuantized):
            continue
        of_rows = [group for group in axes if any(axis == 0 for _, _, axis in group)]
        if len(of_rows) > 1 and any(rule.operand(is_weight=True).tile for rule in matrix.rules):
            warn_caller(
                f"{parameter.path}: the outputs differ from those of quantized training: tiles of "
                f"{len(of_rows)} contracted axes are tiles of the last one there, and share their "
                "scales along the others"
            )


def _stacked_of_three(rule: QuantRule, stacked: int) -> int:
    """How many leading axes of a three-axis weight stack matrices, after the axes of stacked layers.

    Raises:
      ValueError: if the rule leaves the operation open. (Training sees it in each product.)
    """
    of_matrices = rule.is_for("dot_general")
    if of_matrices and (rule.is_for("conv_general_dilated") or rule.is_for("ragged_dot")):
        raise value_error(
            "a weight of three axes may be a stack of matrices with scales of their own, or the kernel "
            "of a convolution (or of ragged_dot): give convert_trained apply= and args= that use it "
            "in a product; or give quantized_training its matrix_axes=, as infer_matrix_axes finds "
            "them, or a rule for its module with op_names='dot_general', 'conv_general_dilated' or "
            "'ragged_dot'"
        )
    return stacked + of_matrices
