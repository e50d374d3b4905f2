"""A bank of LoRA adapters for one base, from which each example of a batch selects one."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.lora import RestLoRA
from haiku_implicit.arrays.matrix_view import matrix_of
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.serialization import register_tree_type
from haiku_implicit.core.typing import Array, Params
from haiku_implicit.params.adapters import parts
from haiku_implicit.params.adapters.adding import add_lora
from haiku_implicit.params.adapters.parts import AdapterParts
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.matrix_axes import MatrixAxesOf
from haiku_implicit.quantized.numbers.options import is_positive_integer

# The factors and the scale of all slots, or of one, by the path of their weight.
_Slots = dict[str, tuple[jax.Array, jax.Array, jax.Array]]

R = TypeVar("R")


@register_tree_type
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterBank:
    """The parameters of one base, with slots for LoRA adapters up to a maximum rank.

    A pytree, to be passed to compiled functions. `put` and `remove` change its slots and keep all
    shapes, so that nothing is compiled again. (The first adapter that began as PiSSA, OLoRA or LoftQ is
    the exception: from then on `select` gives `RestLoRA` for its weights.) An empty slot gives the
    base.

    Attributes:
      params: the tree of parameters, whose targets have LoRA of rank `rank` with factors of zeros.
      slots: by `module/name`, `a` `[capacity, ..., n, rank]`, `b` `[capacity, ..., rank, m]` and the
        scale `[capacity]`.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> model = hki.transform_implicit(hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x))))
      >>> base = model.init(jax.random.key(0), jnp.ones(4))
      >>> bank = hki.AdapterBank.of(base, capacity=8, rank=2)
      >>> tuned = hki.add_lora(base, 1, rank=1, alpha=4.0)
      >>> bank = bank.put(5, hki.get_adapter(tuned))
      >>> run = jax.jit(hki.with_bank(model.apply))
      >>> run(bank, jnp.array([0, 5, 0]), jnp.ones((3, 4))).shape  # the second example has adapter 5
      (3, 3)
    """

    params: Params
    slots: _Slots

    @classmethod
    def of(
        cls,
        params: Params,
        *,
        capacity: int,
        rank: int,
        targets: Targets | None = None,
        exclude: Targets | None = None,
        matrix_axes: MatrixAxesOf | None = None,
    ) -> Self:
        """Makes an empty bank.

        Args:
          params: the base, without adapters.
          capacity: the number of slots.
          rank: the largest rank of an adapter.
          targets, exclude, matrix_axes: the weights that adapters may change, as for `add_lora`.

        Raises:
          ValueError: for a capacity below 1, and as `add_lora` does.
        """
        if not is_positive_integer(capacity):
            raise value_error(f"capacity: expected an integer, 1 or more, got {capacity!r}")
        options: dict[str, Any] = dict(targets=targets, exclude=exclude, matrix_axes=matrix_axes)
        zeros = jax.nn.initializers.zeros
        whole = add_lora(params, 0, rank=rank, alpha=float(rank), init=zeros, **options)
        targets_in = [p for p in trees.parameters_of(whole) if parts.has_adapter(p.value)]
        slots = {p.path: tuple(_slots_for(p.value, capacity)) for p in targets_in}
        return cls(whole, slots)  # type: ignore[arg-type]

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return next(iter(self.slots.values()))[0].shape[0]

    @property
    def rank(self) -> int:
        """The largest rank of an adapter."""
        return next(iter(self.slots.values()))[0].shape[-1]

    def put(self, slot: int, adapter: AdapterParts, *, check_base: bool = True) -> Self:
        """Returns the bank with an adapter in a slot, which loses its previous adapter.

        Args:
          slot: 0 to `capacity - 1`.
          adapter: LoRA whose rank is at most the rank of the bank, for some of its targets.
          check_base: as for `set_adapter`.

        Raises:
          ValueError: for a slot out of range, or an adapter that has a larger rank, is for a weight
            that is not a target of the bank, is of another type than LoRA, or is for another base.
        """
        slot = self._checked_slot(slot)
        refused = "a bank has room for LoRA alone, and this parameter was trained as a whole"
        parts.checked_parts("adapter", adapter, refused)
        unknown = sorted(set(adapter.weights) - set(self.slots))
        if unknown:
            raise value_error(
                f"{unknown[0]}: not a target of the bank; give its targets= when it is made"
            )
        if check_base:
            parts.check_bases(trees.values_of(self.params), adapter)
        slots = {}
        for path, old in self.slots.items():
            value = adapter.weights.get(path)
            new = (0, 0, 0) if value is None else _padded(path, value, old)
            slots[path] = tuple(_written(x, slot, y) for x, y in zip(old, new, strict=True))
        values = adapter.weights.items()
        rest = {path for path, value in values if isinstance(matrix_of(value), RestLoRA)}
        return dataclasses.replace(self, slots=slots, params=_of_rest(self.params, rest))

    def remove(self, slot: int) -> Self:
        """Returns the bank with a slot empty, so that its examples use the base."""
        return self.put(slot, AdapterParts({}))

    def select(self, slot: Any) -> Params:
        """The parameters with the adapter of a slot, which is an integer or traced.

        Raises:
          ValueError: for a slot out of range; if the slot is traced, the factors are NaN instead.
        """
        return self.with_factors(self.factors(slot))

    def factors(self, slot: Any) -> _Slots:
        """The factors and the scale of one slot, as `select` chooses them, for `with_factors`.

        A program of many steps, such as decoding, gathers them once:

            factors = jax.vmap(bank.factors)(slots)
            step = jax.vmap(lambda factors, x: apply(bank.with_factors(factors), x))
        """
        if not isinstance(slot, jax.core.Tracer):
            self._checked_slot(slot)
        place = self._place(slot)
        return jax.tree.map(
            lambda x: x.at[place].get(mode="fill", fill_value=jnp.nan), dict(self.slots)
        )

    def with_factors(self, factors: _Slots) -> Params:
        """The parameters with the factors of one adapter, as `factors` returns them."""

        def selected(parameter: trees.Parameter) -> Array:
            if parameter.path not in factors:
                return parameter.value
            if not is_implicit(parameter.value):
                raise type_error(
                    "params: the bank is an argument of a wrapped function (use_implicit_args or "
                    "hki.grad), in which its LoRA weights read as dense arrays. Differentiate with "
                    "jax.grad, with respect to bank.slots"
                )
            a, b, factor = factors[parameter.path]
            # LoRA's scale is never trained.
            return parameter.value._replace(a=a, b=b, factor=jax.lax.stop_gradient(factor))

        return trees.map_matrices(selected, self.params)

    def _place(self, slot: Any) -> jax.Array:
        """A slot as an index; a slot out of range becomes an index that gathers NaN."""
        slot = jnp.asarray(slot)
        if jnp.iinfo(slot.dtype).bits < 32:  # the capacity may be too large for this dtype
            slot = slot.astype(jnp.int32)
        # A negative index would count from the last slot.
        inside = (slot >= 0) & (slot < self.capacity)
        return jnp.where(inside, slot, self.capacity).astype(jnp.int32)

    def _checked_slot(self, slot: Any) -> int:
        try:
            number = None if isinstance(slot, bool | np.bool_) else operator.index(slot)
        except TypeError:  # another dtype, or an array with axes
            number = None
        if number is None:
            raise value_error(
                f"slot: expected an integer from 0 to {self.capacity - 1}, got {slot!r}"
            )
        if not 0 <= number < self.capacity:
            raise value_error(f"slot: expected 0 to {self.capacity - 1}, got {slot}")
        return number


def with_bank(apply: Callable[..., R]) -> Callable[..., R]:
    """Lets each example of a batch run with its own adapter.

    This is `jax.vmap` of `apply` over the examples, with one gather of factors for each target; the
    base is not copied.

    Args:
      apply: `apply(params, *args)` of a model on one example.

    Returns:
      `run(bank, slots, *args)`, with integer slots `[batch]` and a leading axis `batch` on all arrays
      in `args`. A slot out of range is an error; if slots are traced (within `jax.jit`), the outputs of
      its example are NaN.
    """

    @functools.wraps(apply)
    def run(bank: AdapterBank, slots: Any, *args: Any) -> R:
        slots = jnp.asarray(slots)
        if slots.ndim != 1 or not jnp.issubdtype(slots.dtype, jnp.integer):
            raise value_error(
                f"slots: expected integers [batch], got {slots.dtype.name}{list(slots.shape)}"
            )
        if not isinstance(slots, jax.core.Tracer):
            for slot in np.unique(np.asarray(slots)):
                bank._checked_slot(int(slot))
        return jax.vmap(lambda slot, *args: apply(bank.select(slot), *args))(slots, *args)

    return run


def _factors(value: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    lora = matrix_of(value)
    return lora.a, lora.b, lora.factor


def _slots_for(value: Array, capacity: int) -> Iterator[jax.Array]:
    """Zeros for the factors of a weight, in its dtype, in which products run, and for their scales."""
    *factors, scale = _factors(value)
    for x in factors:
        yield jnp.zeros((capacity, *x.shape), value.dtype)
    yield jnp.zeros((capacity, *scale.shape), scale.dtype)


@jax.jit
def _written(x: jax.Array, slot: Any, value: jax.Array) -> jax.Array:
    return x.at[slot].set(jnp.asarray(value, x.dtype))


def _of_rest(params: Params, paths: Collection[str]) -> Params:
    """Parameters with `RestLoRA` at some paths; writers of other programs' files need this type."""

    def typed(parameter: trees.Parameter) -> Array:
        lora = parameter.value
        if parameter.path not in paths or isinstance(lora, RestLoRA):
            return lora
        return RestLoRA(lora.w, lora.a, lora.b, factor=lora.factor)

    return trees.map_matrices(typed, params) if paths else params


def _padded(path: str, value: Array, old: Array) -> tuple[Any, Any, Any]:
    """The factors of an adapter, padded with zeros to the rank of the bank, and its scale."""
    lora = parts.lora_of(path, value, "a bank has room for LoRA alone")
    rank, own = old[0].shape[-1], lora.a.shape[-1]
    if own > rank:
        raise value_error(f"{path}: the adapter has rank {own}, the bank has room for {rank}")
    of_a, of_b = [(0, 0)] * lora.a.ndim, [(0, 0)] * lora.b.ndim
    of_a[-1] = of_b[-2] = (0, rank - own)
    a, b = np.pad(np.asarray(lora.a), of_a), np.pad(np.asarray(lora.b), of_b)
    if (a.shape, b.shape) != (old[0].shape[1:], old[1].shape[1:]):
        raise value_error(
            f"{path}: the adapter has factors {list(lora.a.shape)} and {list(lora.b.shape)}, those of "
            f"the bank are {list(old[0].shape[1:])} and {list(old[1].shape[1:])}"
        )
    scale = jnp.broadcast_to(jnp.asarray(lora.scale, jnp.float32), old[2].shape[1:])
    return a.astype(old[0].dtype), b.astype(old[1].dtype), scale
