"""`LoRA`: a weight plus a low-rank correction (Hu et al. 2021, arXiv:2106.09685)."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from haiku_implicit.core.array import FROZEN, ImplicitArray, aux_field, is_implicit
from haiku_implicit.core.dense import dense
from haiku_implicit.core.dispatch import primitive_handler


@dataclasses.dataclass
class LoRA(ImplicitArray, core_ndim=2):
    """The weight `w + (alpha / rank) * a @ b`, of which `a` and `b` are trained and `w` is frozen.

    A product `x @ w` runs as `x @ w + (x @ a) @ b`, so that nothing of the size of `w` is made. (It
    is in a convolution, and in a product that contracts neither or both of the two last axes: there
    the sum is made for the time of the operation, which costs less.)

    Attributes:
      w: `[..., n, m]`, the frozen weight; itself implicit where it is quantized, say.
      a: `[..., n, r]`, and
      b: `[..., r, m]`: the factors of the correction, of rank `r`; of any floating dtype, the
        correction is cast to that of `w`.
      alpha: the numerator of the correction's scale `alpha / r`; None for a scale of 1.

    Raises:
      ValueError: where the shapes do not fit together, or `alpha` is not finite.
      TypeError: where `w`, `a` or `b` is not of a floating dtype, or `alpha` is not a number.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.zeros((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)), alpha=2.0)
      >>> print(hki.materialize(w))
      [[2. 2. 2.]
       [2. 2. 2.]]
    """

    w: Any = dataclasses.field(metadata=FROZEN)
    a: Any
    b: Any
    alpha: float | None = aux_field(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        w, a, b = np.shape(self.w), np.shape(self.a), np.shape(self.b)
        if len(w) < 2 or w[:-1] != a[:-1] or w[:-2] + a[-1:] + w[-1:] != b or not a[-1]:
            raise ValueError(
                "LoRA: expected w [..., n, m], a [..., n, r] and b [..., r, m] with equal leading "
                f"axes and a rank r of 1 or more, got w {list(w)}, a {list(a)}, b {list(b)}"
            )
        for name in ("w", "a", "b"):
            dtype = np.dtype(getattr(getattr(self, name), "dtype", object))
            if not jnp.issubdtype(dtype, np.inexact):
                raise TypeError(
                    f"LoRA: {name} must be of a floating dtype, got {dtype.name}; integer codes go "
                    "into a QuantizedMatrix, which can be the w of a LoRA"
                )
        alpha: Any = self.alpha
        if alpha is not None and not isinstance(alpha, numbers.Real):
            raise TypeError(f"LoRA: alpha must be a Python number or None, got {alpha!r}")
        if alpha is not None and not math.isfinite(alpha):
            raise ValueError(f"LoRA: alpha must be finite, got {alpha!r}")

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.w))

    def compute_dtype(self) -> Any:
        return self.w.dtype

    @property
    def rank(self) -> int:
        """The rank `r` of the correction."""
        return self.a.shape[-1]

    @property
    def scale(self) -> float:
        """The factor `alpha / rank` of the correction."""
        # A Python float, whatever number `alpha` is, because NumPy's would widen a bfloat16.
        return 1.0 if self.alpha is None else float(self.alpha) / self.rank

    def delta(self) -> jax.Array:
        """The dense correction `scale * a @ b`."""
        return _scaled(self.a, self) @ self.b

    def materialize(self) -> jax.Array:
        return self.w + self.delta().astype(self.w.dtype)

    def partition_spec(self, spec: Any, mesh: Any) -> Any:
        """`w` as the dense array, `a` by its rows and `b` by its columns; the rank is not split."""
        parts = list(spec) + [None] * (self.ndim - len(spec))
        *lead, n, m = parts
        specs = dict(w=spec, a=PartitionSpec(*lead, n, None), b=PartitionSpec(*lead, None, m))
        for name in specs:
            part = getattr(self, name)
            specs[name] = (
                part.partition_spec(specs[name], mesh) if is_implicit(part) else specs[name]
            )
        return NotImplemented if NotImplemented in specs.values() else self._replace(**specs)


def _like(lora: LoRA, w: Any, a: Any, b: Any) -> LoRA:
    """Other fields under the same scale; in a rule, where there is nothing to validate."""
    return lora._replace(w=w, a=a, b=b, shape=None, dtype=None)


def _scaled(x: jax.Array, w: LoRA) -> jax.Array:
    """`x` times the correction's scale; the same `x`, and no equation, where that is 1."""
    return x if w.scale == 1.0 else x * w.scale


# --- products ------------------------------------------------------------------------------------


@primitive_handler("dot_general")
def dot_with_lora(
    primitive: Any, x: jax.Array, w: LoRA, *, dimension_numbers: Any, **params: Any
) -> Any:
    """`x · (w + ab)` as `x · w + (x · a) · b`."""
    contract, batch = dimension_numbers
    if not _goes_through_rank(w, contract[1]):
        return _with_sum(primitive, [x, w], dimension_numbers=dimension_numbers, **params)
    low = _dot_delta(x, w, contract, batch, False, params)
    if low is NotImplemented:
        return NotImplemented
    high = primitive.bind(x, w.w, dimension_numbers=dimension_numbers, **params)
    return high + low.astype(high.dtype)


@primitive_handler("dot_general")
def dot_of_lora(
    primitive: Any, w: LoRA, x: jax.Array, *, dimension_numbers: Any, **params: Any
) -> Any:
    """`(w + ab) · x` as `w · x + a · (b · x)`."""
    contract, batch = [(right, left) for left, right in dimension_numbers]
    if not _goes_through_rank(w, contract[1]):
        return _with_sum(primitive, [w, x], dimension_numbers=dimension_numbers, **params)
    low = _dot_delta(x, w, contract, batch, True, params)
    if low is NotImplemented:
        return NotImplemented
    high = primitive.bind(w.w, x, dimension_numbers=dimension_numbers, **params)
    return high + low.astype(high.dtype)


def _goes_through_rank(w: LoRA, contracted: Sequence[int]) -> bool:
    """Whether a product can contract one of the two factors, and so is cheaper by way of the rank.

    It can't where the matrix is `[h, c]` in a weight `[a, h, c]` of attention heads, of which `a` is
    contracted: `x · a` and then `· b` would be products as large as those with `w`.
    """
    return len({w.ndim - 2, w.ndim - 1} & set(contracted)) == 1


def _with_sum(primitive: Any, operands: Sequence[Any], **params: Any) -> jax.Array:
    """A primitive on `w + ab`, for which a `w` that is itself implicit is made dense.

    Both are made again for a gradient, rather than kept.
    """

    def run(operands: Sequence[Any]) -> jax.Array:
        summed = [
            dense(x.w) + x.delta().astype(x.dtype) if isinstance(x, LoRA) else x for x in operands
        ]
        return primitive.bind(*summed, **params)

    return jax.checkpoint(run)(operands)


def _dot_delta(x: Any, w: LoRA, contract: Any, batch: Any, w_first: bool, params: Any) -> Any:
    """The product of `x` and the correction, in `dot_general`'s order of axes.

    Args:
      x, w: the operands.
      contract, batch: the contracted and the batch axes, each as (those of `x`, those of `w`).
      w_first: whether `w` is the left operand.
      params: the other parameters of the `dot_general`.
    """
    precision, preferred = params.get("precision"), params.get("preferred_element_type")
    algorithm = isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)
    common = _working_dtype(x, w)
    if algorithm and not x.dtype == w.dtype == common:
        return NotImplemented  # an algorithm is for the dtypes it was chosen for
    if any(not jnp.issubdtype(d, np.inexact) for d in (w.dtype, preferred or w.dtype)):
        return NotImplemented
    operands = tuple(y.astype(common) for y in (x, w.a, w.b))
    if preferred is not None:  # which must not be narrower than the operands
        preferred = jnp.promote_types(preferred, common)
    options = dict(precision=precision, preferred_element_type=preferred)
    sharding = params.get("out_sharding")
    if sorted(batch[1]) == list(range(w.ndim - 2)) and len(contract[1]) == 1:
        return _dot_through_rank(operands, w, contract, batch, w_first, options, sharding)
    if sharding is not None:
        return NotImplemented
    return _einsum_delta(operands, w, contract, batch, w_first, options)


def _working_dtype(x: Any, w: LoRA) -> Any:
    """The dtype of the dense product; that of the factors, where 8 bits are too few for them."""
    floats = [d for d in (x.dtype, w.dtype) if jnp.issubdtype(d, np.floating)]
    if any(d.itemsize == 1 for d in floats):
        return jnp.result_type(w.a.dtype, w.b.dtype)
    return jnp.result_type(x.dtype, w.dtype)


def _dot_through_rank(
    operands: Any, w: LoRA, contract: Any, batch: Any, w_first: bool, options: Any, sharding: Any
) -> jax.Array:
    """Two dots, for one contracted axis of the matrix and every leading axis a batch axis."""
    x, a, b = operands
    (x_contract, (axis,)), (x_batch, w_batch) = contract, batch
    first, second = (a, b) if axis == w.ndim - 2 else (b, a)
    # The rank takes the place of the matrix's free axis in between, and of the contracted one in
    # the second factor. The batch axes come first in every result.
    inner = tuple(range(len(w_batch)))
    options_in = options if sharding is None else {**options, "out_sharding": None}
    if sharding is not None:
        ndim = x.ndim - len(x_contract) + 1
        spec = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
        spec[len(inner) if w_first else -1] = None
        options_in["out_sharding"] = NamedSharding(sharding.mesh, PartitionSpec(*spec))
        options = {**options, "out_sharding": sharding}
    if w_first:
        t = jax.lax.dot_general(first, x, (((axis,), x_contract), (w_batch, x_batch)), **options_in)
        t = _scaled(t, w).astype(x.dtype)
        numbers = (((axis,), (len(inner),)), (w_batch, inner))
        return jax.lax.dot_general(second, t, numbers, **options)
    t = jax.lax.dot_general(x, first, ((x_contract, (axis,)), (x_batch, w_batch)), **options_in)
    t = _scaled(t, w).astype(x.dtype)
    numbers = (((t.ndim - 1,), (axis,)), (inner, w_batch))
    return jax.lax.dot_general(t, second, numbers, **options)


def _einsum_delta(
    operands: Any, w: LoRA, contract: Any, batch: Any, w_first: bool, options: Any
) -> jax.Array:
    """Any other product: one contraction of `x`, `a` and `b`, in the cheapest order."""
    x, a, b = operands
    w_axes, rank = list(range(w.ndim)), w.ndim
    x_axes = [rank + 1 + i for i in range(x.ndim)]
    for of_x, of_w in (contract, batch):
        for i, j in zip(of_x, of_w, strict=True):
            x_axes[i] = w_axes[j]
    shared = [*contract[1], *batch[1]]
    free = [[i for i in axes if i not in shared] for axes in (x_axes, w_axes)]
    out = [*batch[1], *(free[1] + free[0] if w_first else free[0] + free[1])]
    *lead, n, m = w_axes
    a_axes, b_axes = [*lead, n, rank], [*lead, rank, m]
    return jnp.einsum(x, x_axes, _scaled(a, w), a_axes, b, b_axes, out, **options)


@primitive_handler("conv_general_dilated")
def conv_with_kernel(primitive: Any, x: jax.Array, w: LoRA, **params: Any) -> jax.Array:
    """A convolution with the kernel summed up.

    A kernel is small beside the images, and one convolution with `w + ab` costs half of two.
    """
    return _with_sum(primitive, [x, w], **params)


# --- parts ---------------------------------------------------------------------------------------


@primitive_handler("gather")
def gather_rows(
    primitive: Any,
    w: LoRA,
    ids: jax.Array,
    *,
    dimension_numbers: Any,
    slice_sizes: Sequence[int],
    fill_value: Any,
    mode: Any,
    **params: Any,
) -> Any:
    """Rows `w[ids]` as `w[ids] + a[ids] @ b`, and whole columns likewise; embedding tables.

    Leading axes may be batch axes of the gather, or taken whole.
    """
    n, m = w.ndim - 2, w.ndim - 1
    batched = tuple(dimension_numbers.operand_batching_dims)
    sliced = {*range(w.ndim)} - {*dimension_numbers.collapsed_slice_dims, *batched}
    # An axis that is taken whole has no index but 0, by every `mode`'s rule of what is in bounds.
    whole = [i for i in sliced if slice_sizes[i] == w.shape[i]]
    axis = m if m in whole else n
    if axis not in whole or not set(range(n)) <= {*batched, *whole}:
        return NotImplemented
    common = dict(dimension_numbers=dimension_numbers, mode=mode, **params)
    high = primitive.bind(w.w, ids, slice_sizes=slice_sizes, fill_value=fill_value, **common)
    # What is out of bounds is filled in `high` alone. A factor filled with NaN would put NaN into
    # the other factor's gradient.
    fill = 0 if mode == jax.lax.GatherScatterMode.FILL_OR_DROP else fill_value
    taken, other, rank_axis = (w.a, w.b, n) if axis == m else (w.b, w.a, m)
    sizes = _without(slice_sizes, axis, w.rank)
    t = primitive.bind(taken, ids, slice_sizes=sizes, fill_value=fill, **common)

    # Where the axes of the operand are in `t`: what is sliced at the offsets, the batch elsewhere.
    offsets = [int(i) for i in dimension_numbers.offset_dims]
    place = dict(zip(sorted(sliced), offsets, strict=True))
    index_axes = [i for i in range(t.ndim) if i not in offsets]
    for i, j in zip(batched, dimension_numbers.start_indices_batching_dims, strict=True):
        place[int(i)] = index_axes[j]
    lead = [place[i] for i in range(n)]
    numbers = (((place[axis],), (rank_axis,)), (lead, list(range(n))))
    low = jax.lax.dot_general(_scaled(t, w), other, numbers)
    now = [*lead, *(i for i in range(t.ndim) if i not in (*lead, place[axis])), place[axis]]
    return high + jax.lax.transpose(low, np.argsort(now).tolist()).astype(high.dtype)


def _without(values: Any, axis: int, instead: Any) -> tuple[Any, ...]:
    """A parameter that has a value for each axis, for a factor: the rank has its own at `axis`."""
    new = list(values)
    new[axis] = instead
    return tuple(new)


@primitive_handler("slice")
def slice_factors(
    primitive: Any,
    w: LoRA,
    *,
    start_indices: Any,
    limit_indices: Any,
    strides: Any,
    **params: Any,
) -> LoRA:
    """A slice of any axes: rows slice `a`, columns `b`, leading axes both."""

    def part(x: Any, rank_axis: int) -> Any:
        return primitive.bind(
            x,
            start_indices=_without(start_indices, rank_axis, 0),
            limit_indices=_without(limit_indices, rank_axis, w.rank),
            strides=None if strides is None else _without(strides, rank_axis, 1),
            **params,
        )

    own = dict(start_indices=start_indices, limit_indices=limit_indices, strides=strides)
    return _like(w, primitive.bind(w.w, **own, **params), part(w.a, -1), part(w.b, -2))


@primitive_handler("dynamic_slice")
def dynamic_slice_factors(
    primitive: Any, w: LoRA, *starts: jax.Array, slice_sizes: Any, **params: Any
) -> LoRA:
    """The same with starts known at run time."""
    zero = jnp.zeros_like(starts[-1])

    def part(x: Any, rank_axis: int) -> Any:
        sizes = _without(slice_sizes, rank_axis, w.rank)
        return primitive.bind(x, *_without(starts, rank_axis, zero), slice_sizes=sizes, **params)

    sliced = primitive.bind(w.w, *starts, slice_sizes=slice_sizes, **params)
    return _like(w, sliced, part(w.a, -1), part(w.b, -2))


@primitive_handler("split")
def split_factors(primitive: Any, w: LoRA, *, sizes: Any, axis: int, **params: Any) -> list[LoRA]:
    """Rows split `a`, columns `b`, leading axes both."""

    def parts(x: Any, rank_axis: int) -> list[Any]:
        if axis == rank_axis:
            return [x] * len(sizes)
        return list(primitive.bind(x, sizes=sizes, axis=axis, **params))

    fields = parts(w.w, -1), parts(w.a, w.ndim - 1), parts(w.b, w.ndim - 2)
    return [_like(w, *part) for part in zip(*fields, strict=True)]


@primitive_handler("transpose")
def transpose_factors(primitive: Any, w: LoRA, *, permutation: Any, **params: Any) -> Any:
    """`(w + ab)ᵀ` is `wᵀ + bᵀaᵀ`; leading axes in any order."""
    core = w.ndim - 2, w.ndim - 1
    if tuple(sorted(permutation[-2:])) != core:
        return NotImplemented
    w_t, a_t, b_t = (primitive.bind(x, permutation=permutation, **params) for x in (w.w, w.a, w.b))
    return _like(w, w_t, *((a_t, b_t) if permutation[-1] == core[1] else (b_t, a_t)))


@primitive_handler("squeeze")
def squeeze_matrix(primitive: Any, w: LoRA, *, dimensions: Any, **params: Any) -> Any:
    """One row, column or element of the matrix is dense; `batch_axes` does the leading axes."""
    if max(dimensions, default=0) < w.ndim - 2:
        return NotImplemented
    high = primitive.bind(w.w, dimensions=dimensions, **params)
    return high + _summed_delta(w, dimensions, None).astype(high.dtype)


@primitive_handler("reduce_sum")
def sum_factors(primitive: Any, w: LoRA, *, axes: Any, **params: Any) -> Any:
    """`sum(w) + sum(a) @ b`, and the like for any axes."""
    if not jnp.issubdtype(w.dtype, np.inexact) or any(v is not None for v in params.values()):
        return NotImplemented
    high = primitive.bind(w.w, axes=axes, **params)
    # A sum is exact to rounding on every platform, while a product, unasked, may be not.
    return high + _summed_delta(w, axes, jax.lax.Precision.HIGHEST).astype(high.dtype)


def _summed_delta(w: LoRA, axes: Sequence[int], precision: Any) -> jax.Array:
    """The correction, summed over some of its axes."""
    *lead, n, m = range(w.ndim)
    rank = w.ndim
    out = [i for i in range(w.ndim) if i not in axes]
    a_axes, b_axes = [*lead, n, rank], [*lead, rank, m]
    return jnp.einsum(_scaled(w.a, w), a_axes, w.b, b_axes, out, precision=precision)


# --- elementwise ---------------------------------------------------------------------------------


@primitive_handler(["add", "sub"])
def add_to_weight(primitive: Any, w: LoRA, x: jax.Array, **params: Any) -> Any:
    """`(w ± x) + ab`."""
    if not _fits(x, w):
        return NotImplemented
    return _like(w, primitive.bind(w.w, x, **params), w.a, w.b)


@primitive_handler("sub")
def subtract_from(primitive: Any, x: jax.Array, w: LoRA, **params: Any) -> Any:
    """`x - (w + ab)` is `(x - w) + (-a)b`."""
    if not _fits(x, w):
        return NotImplemented
    return _like(w, primitive.bind(x, w.w, **params), -w.a, w.b)


@primitive_handler("neg")
def negate(primitive: Any, w: LoRA, **params: Any) -> LoRA:
    """`-(w + ab)` is `-w + (-a)b`."""
    return _like(w, primitive.bind(w.w, **params), -w.a, w.b)


@primitive_handler(["mul", "div"])
def rescale(primitive: Any, w: LoRA, x: jax.Array, **params: Any) -> Any:
    """Times, or by, a number, a factor for each row (`a` takes it), or for each column (`b`)."""
    by_rows = x.ndim == 0 or x.shape[-1] == 1
    if not _fits(x, w) or not (by_rows or x.shape[-2] == 1):
        return NotImplemented
    apply = jnp.multiply if primitive is jax.lax.mul_p else jnp.divide
    a, b = (apply(w.a, x), w.b) if by_rows else (w.a, apply(w.b, x))
    return _like(w, primitive.bind(w.w, x, **params), a, b)


def _fits(x: jax.Array, w: LoRA) -> bool:
    """Whether an operand of an elementwise primitive leaves the shape of `w` as it is."""
    if x.ndim != w.ndim:
        return x.ndim == 0
    return all(i in (1, j) for i, j in zip(x.shape, w.shape, strict=True))


@primitive_handler("convert_element_type")
def cast_fields(primitive: Any, w: LoRA, *, new_dtype: Any, **params: Any) -> Any:
    """From one floating dtype to another; wider factors stay so, for the sake of their gradients.

    A product runs in the dtype of the dense one all the same (`_working_dtype`).
    """
    if not jnp.issubdtype(new_dtype, np.floating) or not jnp.issubdtype(w.dtype, np.floating):
        return NotImplemented
    cast = primitive.bind(w.w, new_dtype=new_dtype, **params)
    a, b = (x.astype(_wider(x.dtype, new_dtype)) for x in (w.a, w.b))
    return _like(w, cast, a, b)


def _wider(old: Any, new: Any) -> Any:
    """The wider of two dtypes, the new one of two that are equally wide."""
    return old if np.dtype(old).itemsize > np.dtype(new).itemsize else new


@primitive_handler("sharding_constraint")
def constrain_sharding(primitive: Any, w: LoRA, *, sharding: Any, **params: Any) -> Any:
    """Rows as the dense array's constrain `a`, columns `b`, leading axes both."""
    if not isinstance(sharding, NamedSharding):
        return NotImplemented
    spec = (*sharding.spec, *(None,) * (w.ndim - len(sharding.spec)))
    a, b = (
        jax.lax.with_sharding_constraint(
            x, NamedSharding(sharding.mesh, PartitionSpec(*_without(spec, axis, None)))
        )
        for x, axis in ((w.a, -1), (w.b, -2))
    )
    return _like(w, primitive.bind(w.w, sharding=sharding, **params), a, b)
