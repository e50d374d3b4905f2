"""Functions on a tree of existing parameters: implicit arrays put in, and LoRA merged again."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.arrays.static_quantized import StaticQuantized
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.params import progress, selection
from haiku_implicit.params.selection import Initializer, Targets
from haiku_implicit.products import quant_rules
from haiku_implicit.products.activation_stats import QuantStats


def add_lora(
    params: Any,
    key: Any,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Targets | None = None,
    init: Initializer | None = None,
) -> Any:
    """Puts LoRA on weights of a tree of parameters, quantized ones included.

    The factors `b` are zeros, so that the tree stands for the same numbers as before. Each `a` is
    drawn with a key of its own, from `key` and the parameter's path: what is drawn for one does not
    depend on which others are chosen.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings.
      key: a JAX random key, or an integer seed.
      rank: the rank of the correction, at most the smaller of a weight's last two axes.
      alpha: the correction is scaled by `alpha / rank`; None for a scale of 1.
      targets: which parameters. None: all floating-point parameters of two axes or more, dense or
        quantized, that are not called `b`, `bias`, `offset` or `scale` (or `gating_b`, `query_bias`
        and so on) and that have room for the rank (axes along which `hk.experimental.layer_stack`
        stacks do not count). A text or compiled pattern: those whose whole `module/name` matches the
        regular expression. A predicate: those for which `targets(module_name, name, value)` is true.
      init: draws `a`, as `init(key, shape, dtype)`; None: uniform in ±1/sqrt(n).

    Returns:
      The tree with `LoRA` in place of the targets, mappings as dicts.

    Raises:
      ValueError: for targets that match nothing (it lists near misses), a parameter that LoRA of this
        rank does not fit, a rank that is no positive integer.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'w': jnp.ones((4, 3)), 'b': jnp.zeros(3)}}
      >>> hki.add_lora(params, jax.random.key(0), rank=2, alpha=4.0)['linear']['w']
      LoRA(float32[4,3], w=float32[4,3], a=float32[4,2], b=float32[2,3], alpha=4.0)
      >>> hki.add_lora(params, 0, rank=2, targets='linear/v')
      Traceback (most recent call last):
      ...
      ValueError: targets: 'linear/v' matches none of the 2 parameters (the whole of 'module/name'
      has to match). Nearest: linear/w, linear/b
    """
    selection.check_rank(rank)
    selection.check_alpha(alpha)
    key = jax.random.key(key) if isinstance(key, int) else key

    def make(path: str, value: Any) -> Any:
        if isinstance(value, LoRA):
            raise ValueError(
                f"{path}: this is {selection.describe(value)} already; merge_lora it first, or leave "
                "it out by targets="
            )
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        return selection.make_lora(path, value, own, rank, alpha, init)

    default = selection.takes_lora(rank), f"a weight with room for LoRA of rank {rank}"
    return _replace(params, targets, default, make)


def quantize_params(
    params: Any,
    *,
    dtype: str = "int8",
    group_size: int | tuple[int, int] | str | None = None,
    targets: Targets | None = None,
    axis: int = -2,
    zero_point: bool = False,
    calibration: str | None = None,
    scale_dtype: Any = None,
    activation: str | None = None,
    rules: Sequence[quant_rules.QuantRule] | None = None,
) -> Any:
    """Quantizes weights of a tree of parameters; of a LoRA weight its `w`.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings.
      dtype: the number format, see `QuantizedMatrix.quantize`, and for the others but `targets`.
      group_size: how many consecutive elements along `axis` share a scale; None for all of them.
      targets: which parameters, as for `add_lora`. None: weights, as there, of those that are not
        quantized yet, that `group_size` divides and whose `axis` is longer than one.
      axis: the axis that scales are shared along, -2 (the contracted axis of a weight `[n, m]` in
        `x @ w`) or -1.
      zero_point: whether codes are relative to a zero point (asymmetric quantization).
      calibration: how scales are found.
      scale_dtype: how they are stored.
      activation: the format that activations are quantized to in products; None: they are not.
      rules: a list of `quantization.QuantRule` in place of the other options (but `targets`, `axis` and
        `scale_dtype`): the first one that matches a module decides how its dense weights are
        quantized, one without `weight_qtype` leaves them alone. Rules that decide for no module are
        warned of. One with `act_static_scale` gives `StaticQuantized` weights, of which a calibration
        run (`with_quant_stats`) and `convert_trained` find the ranges.

    Returns:
      The tree with `QuantizedMatrix` in place of the targets, mappings as dicts.

    Raises:
      ValueError: for targets that match nothing (it lists near misses), a parameter that cannot be
        quantized so, an unknown format.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'w': jnp.ones((64, 32)), 'b': jnp.zeros(32)}}
      >>> w = hki.quantize_params(params, dtype='int4')['linear']['w']
      >>> w.shape, w.nbytes < params['linear']['w'].nbytes / 6
      ((64, 32), True)
      >>> from haiku_implicit.quantization import QuantRule
      >>> params['head'] = params['linear']
      >>> rules = [QuantRule(module_path='head'), QuantRule(weight_qtype='nf4', tile_size=32)]
      >>> new = hki.quantize_params(params, rules=rules)
      >>> new['linear']['w'].format, type(new['head']['w']) is type(params['head']['w'])
      ('nf4', True)
    """
    selection.check_axis(axis)
    if rules is not None:
        return _quantize_by_rules(params, rules, targets, axis, scale_dtype)
    selection.check_group_size(group_size)
    options = dict(dtype=dtype, group_size=group_size, axis=axis, zero_point=zero_point,
                   calibration=calibration, scale_dtype=scale_dtype, activation=activation)  # fmt: skip

    def make(path: str, value: Any) -> Any:
        return selection.make_quantized(path, value, options)

    divided = "" if group_size is None else f" whose axis {axis} is divided by {group_size}"
    default = selection.takes_quantization(options), f"a dense weight{divided}"
    return _replace(params, targets, default, make)


def quantize_activations(
    params: Any, dtype: str | None = "int8", *, targets: Targets | None = None
) -> Any:
    """Makes products with quantized weights round the activations that they meet, too.

    Weights stay as they are: those that were read from a file of codes, say. Activations
    get scales that their largest magnitudes fit; a product of integers takes a fraction of the time
    of one with floating-point activations, and rounds more.

    Args:
      params: parameters with `QuantizedMatrix` in them, in any nesting of mappings.
      dtype: the format of activations, such as 'int8' (a scale for each row) or 'int8,groups' (a scale
        for each part of a row that meets a group of the weight); None: they are not rounded.
      targets: which weights, as for `add_lora`. None: all that are quantized, under LoRA as well.

    Returns:
      The tree with this `activation` in the targets, mappings as dicts.

    Raises:
      ValueError: for targets that match nothing (it lists near misses), a weight that is not
        quantized, a format that activations can't have.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.QuantizedMatrix.quantize(jax.random.normal(jax.random.key(0), (64, 3)), 'int4')
      >>> params = hki.quantize_activations({'linear': {'w': w}})
      >>> params['linear']['w'].activation
      'int8'
    """

    def make(path: str, value: Any) -> Any:
        for kind, part in _HOLDERS.items():
            if isinstance(value, kind):
                return value._replace(**{part: make(path, getattr(value, part))})
        if not isinstance(value, QuantizedMatrix):
            raise ValueError(
                f"{path}: expected a QuantizedMatrix, got {selection.describe(value)}; "
                "quantize_params makes one of a dense weight"
            )
        return value.with_activation(dtype)

    def stored(module_name: str, name: str, value: Any) -> bool:
        for kind, part in _HOLDERS.items():
            if isinstance(value, kind):
                return stored(module_name, name, getattr(value, part))
        return isinstance(value, QuantizedMatrix)

    return _replace(params, targets, (stored, "a quantized weight"), make)


# Types of weights that hold a quantized one, and where.
_HOLDERS: dict[Any, str] = {LoRA: "w", ScaledMatrix: "matrix"}


_OF_ACTIVATIONS = ("act_qtype", "act_calibration_method", "act_static_scale", "act_batch_axes")


def _quantize_by_rules(
    params: Any, rules: Any, targets: Targets | None, axis: int, scale_dtype: Any
) -> Any:
    rules = checked_rules(rules)
    for i, rule in enumerate(rules):
        if not rule.act_static_scale and rule.act_calibration_method != "absmax":
            raise ValueError(
                f"rules[{i}]: expected activations that are quantized by their largest magnitudes, got "
                f"act_calibration_method={rule.act_calibration_method!r}; others are for static scales "
                "(act_static_scale=True), and for quantized_training"
            )

    def make(path: str, value: Any, own: Any) -> Any:
        rule = next(rule for rule in own if rule.weight_qtype is not None)
        options = rule.weight_options(value.shape[axis])
        options |= dict(axis=axis, scale_dtype=scale_dtype)
        if not rule.act_static_scale:
            return QuantizedMatrix.quantize(value, **options, activation=rule.act_qtype)
        # Of the rule, products take what it says of activations: a range for the whole of the axis.
        act = {name: getattr(rule, name) for name in _OF_ACTIVATIONS}
        own_rule = quant_rules.QtRule(weight_qtype="int8", **act)
        stored = QuantizedMatrix.quantize(value, **options)
        return StaticQuantized.of(stored, QuantStats(name=path), (own_rule,))

    return replace_by_rules(params, rules, targets, make)


def zero_params(params: Any, *, targets: Targets) -> Any:
    """Replaces parameters of a tree by symbolic zeros, which hold no memory and cost no work.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings.
      targets: which parameters, as for `add_lora`; there is no default.

    Returns:
      The tree with `Zeros` in place of the targets, mappings as dicts.

    Raises:
      ValueError: for targets that match nothing (it lists near misses).

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> hki.zero_params({'linear': {'b': jnp.ones(3)}}, targets='.*/b')
      {'linear': {'b': Zeros(float32[3])}}
    """
    return _replace(params, targets, None, lambda path, value: selection.make_zeros(value))


def merge_lora(params: Any, *, requantize: bool = False) -> Any:
    """Replaces every LoRA weight of a tree by the dense weight that it stands for.

    Args:
      params: parameters with LoRA in them, in any nesting of mappings.
      requantize: what becomes of LoRA on a quantized weight. False: a dense weight, exact but of
        the dense size. True: the sum quantized again in the format of its base, small but rounded
        anew: a correction finer than the format's step is lost.

    Returns:
      The tree without LoRA, mappings as dicts; what has none comes back as it is.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.zeros((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)))
      >>> print(hki.merge_lora({'linear': {'w': w}})['linear']['w'])
      [[1. 1. 1.]
       [1. 1. 1.]]
    """

    def merged(module_name: str, name: str, value: Any) -> Any:
        if not isinstance(value, LoRA):
            return value
        dense, base = materialize_array(value), value.w
        while isinstance(base, LoRA):
            base = base.w
        if requantize and isinstance(getattr(base, "matrix", base), QuantizedMatrix):
            return _like(base, base.requantize(dense))
        return dense

    return _map(merged, params)


def _replace(
    params: Any,
    targets: Targets | None,
    default: tuple[selection.Predicate, str] | None,
    make: Callable[[str, Any], Any],
) -> Any:
    """A tree with `make(path, value)` in place of each target, of which there has to be one.

    `default` is the predicate for no targets, and what it looks for.
    """
    predicate, looked_for = default or (None, "")
    chosen = selection.chooser(targets, predicate and selection.in_tree(predicate))
    names: list[str] = []
    count = 0

    def replaced(module_name: str, name: str, value: Any) -> Any:
        nonlocal count
        path = selection.path(module_name, name)
        names.append(path)
        if not chosen(module_name, name, value):
            return value
        count += 1
        return make(path, value)

    new = map_in_steps(replaced, params)
    if not count:
        raise selection.no_match(targets, names, looked_for)
    return new


def checked_rules(rules: Any) -> list[quant_rules.QuantRule]:
    """A list of rules; one alone is such a list."""
    rules = [rules] if isinstance(rules, quant_rules.QuantRule) else list(rules)
    for i, rule in enumerate(rules):
        if not isinstance(rule, quant_rules.QuantRule):
            raise TypeError(f"rules[{i}]: expected a QtRule or a QuantRule, got {rule!r}")
    return rules


def rules_of(rules: Sequence[Any], module_name: str) -> tuple[Any, ...]:
    """The rules that decide for a module; none if they all leave it alone."""
    own = quant_rules.rules_for_module(rules, module_name)
    return own if any(rule.weight_qtype is not None for rule in own) else ()


def is_dense_weight(value: Any) -> bool:
    """Whether a parameter is a dense floating array of at least two axes."""
    return (
        not is_implicit(value)
        and jnp.issubdtype(value.dtype, np.floating)
        and len(value.shape) >= 2
    )


def replace_by_rules(
    params: Any, rules: Sequence[Any], targets: Any, make: Callable[[str, Any, Any], Any]
) -> Any:
    """A tree with `make(path, value, rules)` for the weights that rules quantize."""
    chosen = selection.chooser(targets, selection.in_tree(selection.is_weight))
    modules: list[str] = []
    count = 0

    def wrapped(module_name: str, name: str, value: Any) -> Any:
        nonlocal count
        if not is_dense_weight(value) or not chosen(module_name, name, value):
            return value
        modules.append(module_name)
        own = rules_of(rules, module_name)
        if not own:
            return value
        count += 1
        path = selection.path(module_name, name)
        try:
            return make(path, value, own)
        except (TypeError, ValueError) as e:
            raise type(e)(f"{path} ({selection.describe(value)}): {e}") from e

    new = map_in_steps(wrapped, params)
    if not count:
        patterns = ", ".join(repr(rule.module_path) for rule in rules)
        raise ValueError(
            f"rules: those for {patterns or 'nothing'} quantize none of the {len(modules)} dense "
            f"weights; their modules are: {', '.join(sorted(set(modules)))}"
        )
    quant_rules.warn_of_unused(rules, modules, stacklevel=3)
    return new


def map_in_steps(fun: Callable[[str, str, Any], Any], tree: Any) -> Any:
    """As `_map`, under a progress bar."""
    names: list[str] = []
    _map(lambda module_name, name, value: names.append(name), tree)
    with progress.bar("parameters", len(names)) as run:

        def step(module_name: str, name: str, value: Any) -> Any:
            return run(selection.path(module_name, name), fun, module_name, name, value)

        return _map(step, tree)


def _map(fun: Callable[[str, str, Any], Any], tree: Any, path: tuple[str, ...] = ()) -> Any:
    """A nesting of mappings with `fun(module_name, name, value)` for each array in it.

    Haiku makes nothing but mappings; what other libraries put into them are lists and tuples.
    """
    if isinstance(tree, Mapping):
        return {k: _map(fun, v, (*path, str(k))) for k, v in tree.items()}
    if not path:
        raise TypeError(
            "params: expected a mapping of parameters as Haiku's init returns it, got "
            f"{type(tree).__name__}"
        )
    if isinstance(tree, list | tuple):
        items = [_map(fun, v, (*path, str(i))) for i, v in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if not (hasattr(tree, "shape") and hasattr(tree, "dtype")):
        return tree
    return fun("/".join(path[:-1]), path[-1], tree)


def _like(old: Any, new: Any) -> Any:
    """`new` with the tree structure of `old`, for optimizer states and compiled functions."""
    leaves = jax.tree_util.tree_leaves(new)
    same = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(old), leaves)
    return same if same.dtype == new.dtype else new
