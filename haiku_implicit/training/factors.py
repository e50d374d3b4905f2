"""Optimizers that tell the two factors of LoRA apart: LoRA+ and LoRA-FA."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from haiku_implicit.core.messages import value_error
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.typing import Array, Params, State, Tree
from haiku_implicit.training.gradients import Slot, align, is_empty, slots_of, treedef_of
from haiku_implicit.training.optimizers import freeze_subtrees

# By the name of a trained array as a parameter of its own, which `freeze` gives it, too.
_OF_PLUS = re.compile(r".*(lora|dora|locon|lowrankdiagonal)_b|.*_dora_magnitude")
_OF_LORA = re.compile(r"(.*_(?:rest)?)lora_(a|b|factor|w.*)")


def scale_by_lora_plus(ratio: float = 16.0) -> optax.GradientTransformation:
    """LoRA+: multiplies the updates of `b` in `w + scale * a @ b`, for a larger learning rate.

    After Hayou et al. 2024, arXiv:2402.12354. As in PEFT, it also multiplies the updates of arrays with
    one axis (biases, the lengths of DoRA). (PEFT trains factors of embeddings with a third rate.)

    Args:
      ratio: the learning rate of `b` by the learning rate of `a`, which the paper calls λ.

    Returns:
      An optax transformation for the end of a chain, after the learning rate. It takes whole
      parameters within `freeze_declared`, the trained half of `partition`, and the parameters of
      `freeze`. It knows the factors of LoRA, DoRA, LoCon, GraLoRA and `LowRankDiagonal`.

    Raises:
      ValueError: if the ratio is not positive; by `init`, if there is no such factor.

    Example:
      >>> import jax, jax.numpy as jnp, optax, haiku_implicit as hki
      >>> params = {'w': hki.LoRA(jnp.ones((9, 9)), jnp.ones((9, 1)), jnp.ones((1, 9)))}
      >>> plus = optax.chain(optax.adam(1e-3), hki.scale_by_lora_plus(16))
      >>> optimizer = hki.freeze_declared(plus)
      >>> grads = hki.grad(lambda p, x: jnp.sum(x @ p['w']))(params, jnp.ones((1, 9)))
      >>> updates, state = optimizer.update(grads, optimizer.init(params), params)
      >>> print(updates['w'].a[0].round(4), updates['w'].b[0, :1].round(4))
      [-0.001] [-0.016]
    """
    _check_positive("ratio", ratio)

    def init(params: Params) -> optax.EmptyState:
        if not any(_OF_PLUS.fullmatch(slot.keys[-1]) for slot in slots_of(params) if slot.keys):
            raise _no_factor("scale_by_lora_plus", "b")
        return optax.EmptyState()

    def update(updates: Tree, state: State, params: Params = None) -> tuple[Any, Any]:
        new = [_times(ratio, slot) for slot in slots_of(updates)]
        return treedef_of(updates).unflatten(new), state

    return optax.GradientTransformation(init, update)


def _check_positive(name: str, number: Any) -> None:
    if not (isinstance(number, numbers.Real) and 0 < float(number) < math.inf):
        raise value_error(f"{name}: expected a positive number, got {number!r}")


def _times(ratio: float, slot: Slot) -> Array:
    value = slot.value
    if is_empty(value) or not (np.ndim(value) == 1 or _OF_PLUS.fullmatch(slot.keys[-1])):
        return value
    return (value * ratio).astype(value.dtype)


def lora_fa(
    optimizer: optax.GradientTransformation,
    *,
    scale: float | None = None,
    trainable_dense: Targets = True,
) -> optax.GradientTransformationExtraArgs:
    """LoRA-FA: wraps an optimizer to train `b` of `w + scale * a @ b` with a fixed `a`.

    After Zhang et al. 2023, arXiv:2308.03303, and with the gradient of `b` as in PEFT: it is multiplied
    by `(aᵀ a + 1e-8)⁻¹ / scale²`, so that the correction moves as closely as it can along the gradient
    of the whole weight. There is no state for `a`. If the gradient and the update are in one `jit`, no
    gradient of `a` is computed, and no inputs are kept for it.

    Args:
      optimizer: any optax optimizer. It sees the gradient of `b` that is corrected. Wrappers that keep
        gradients belong inside, such as `optax.MultiSteps(...).gradient_transformation()`.
      scale: the scale of all corrections, `alpha / rank`, for parameters without it: the trained half
        of `partition`, and the parameters of `freeze`.
      trainable_dense: which dense arrays are trained, as in `partition`.

    Returns:
      An optimizer of all parameters, as `freeze_declared` makes it. Its `update` needs the parameters.

    Raises:
      ValueError: if the scale is not positive; by `init`, if there is no LoRA; by `update`, if it gets
        no parameters, or these have no scales and `scale` is None; and as `freeze_declared`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.ones((9, 9)), jnp.ones((9, 1)), jnp.ones((1, 9)), alpha=2.0)
      >>> params = {'w': w}
      >>> optimizer = hki.lora_fa(optax.sgd(1.0))
      >>> grads = hki.grad(lambda p, x: jnp.sum(x @ p['w']))(params, jnp.ones((1, 9)))
      >>> updates, state = optimizer.update(grads, optimizer.init(params), params)
      >>> updates['w'].a, float(grads['w'].b[0, 0]), round(float(updates['w'].b[0, 0]), 4)
      (Zeros(float32[9,1]), 18.0, -0.5)
    """
    if scale is not None:
        _check_positive("scale", scale)

    def labels(tree: Tree) -> Tree:
        fixed = [_field(slot) == "a" for slot in slots_of(tree)]
        return treedef_of(tree).unflatten(["freeze" if x else "train" for x in fixed])

    inner = freeze_subtrees(optimizer, labels, trainable_dense=trainable_dense)

    def init(params: Params) -> State:
        if not any(_field(slot) == "a" for slot in slots_of(params)):
            raise _no_factor("lora_fa", "a")
        return inner.init(params)

    def update(updates: Tree, state: State, params: Params = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise value_error("params: the update of lora_fa needs the parameters, which hold a")
        slots, treedef = slots_of(params), treedef_of(params)
        pairs = zip(slots, align(treedef, updates, "updates"), strict=True)
        around = _neighbors(slots)
        grads = [
            _corrected(grad, slot, around[_weight(slot)], scale) if _field(slot) == "b" else grad
            for slot, grad in pairs
        ]
        return inner.update(treedef.unflatten(grads), state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _field(slot: Slot) -> str:
    """The field of a LoRA that a slot is, also in the name of a parameter; empty for other slots."""
    found = _OF_LORA.fullmatch(slot.keys[-1]) if slot.keys else None
    return found[2] if found else ""


def _weight(slot: Slot) -> tuple[str, ...]:
    """The module and the name of the LoRA that a slot is in."""
    found = _OF_LORA.fullmatch(slot.keys[-1])
    return (*slot.keys[:-1], found[1] if found else "")


def _neighbors(slots: Sequence[Slot]) -> dict[tuple[str, ...], dict[str, Array]]:
    """The arrays of each LoRA, by their fields."""
    found: dict[tuple[str, ...], dict[str, Array]] = {}
    for slot in slots:
        if _field(slot) and not is_empty(slot.value):
            found.setdefault(_weight(slot), {})[_field(slot)] = slot.value
    return found


def _corrected(grad: Array, slot: Slot, fields: dict[str, Array], scale: float | None) -> Array:
    """The gradient of `b` with which the correction follows the gradient of the whole weight."""
    if is_empty(grad) or "a" not in fields:
        return grad
    own = fields.get("factor", scale)
    if own is None and not any(name.startswith("w") for name in fields):
        raise value_error(
            f"{slot.name}: the parameters do not hold the scale alpha / rank of this factor. Give "
            "lora_fa the number as scale=, or its update the whole parameters"
        )
    a = jnp.asarray(fields["a"], jnp.promote_types(fields["a"].dtype, jnp.float32))
    size = jnp.square(1 if own is None else jnp.asarray(own))[..., None, None]
    size = jnp.where(size == 0, 1, size)  # (The gradient is zero then.)
    new = _inverse_gram(a) @ grad.astype(a.dtype) / size
    return new.astype(grad.dtype)


def _inverse_gram(a: Array) -> Array:
    """The inverse of `aᵀ a + 1e-8`, as in PEFT, of conjugates if `a` is complex.

    It is made from the singular values of `a`. Their squares in `aᵀ a` would be lost for columns that
    are three digits smaller than others. Values that are zero but for rounding have the inverse zero.
    """
    _, s, vt = jnp.linalg.svd(jnp.linalg.qr(a, mode="r"), full_matrices=False)
    least = a.shape[-1] * jnp.finfo(s.dtype).eps * s[..., :1]
    inverse = jnp.where(s > least, 1 / (jnp.square(s) + 1e-8), 0)
    return (vt.mT * inverse[..., None, :]) @ vt.conj()


def _no_factor(name: str, field: str) -> ValueError:
    return value_error(
        f"params: {name} finds no factor {field} of a LoRA in them. Give it parameters after add_lora"
    )
