"""`LoRA`: a weight plus a low-rank correction (Hu et al. 2021, arXiv:2106.09685)."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.lora_init import Initializer, LoRAInit, init_of
from haiku_implicit.core.batch_axes import cut_fields
from haiku_implicit.core.binary import BinaryCall, binary_handler, fits
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import FROZEN
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.core.messages import expecting, see, type_error, value_error
from haiku_implicit.core.sharding import padded_spec
from haiku_implicit.core.typing import (
    Array,
    DType,
    EqnParam,
    EqnParams,
    Precision,
    Primitive,
    Result,
)
from haiku_implicit.quantized.products.convolution import convolve
from haiku_implicit.quantized.products.ragged import row_numbers, small_ragged_dot

Factors = tuple[jax.Array, jax.Array, jax.Array]  # `x`, `a` and `b`


@dataclasses.dataclass(init=False)
class LoRA(Adapter, linear_in=("w", "a")):
    """The weight `w + (alpha / rank) * a @ b`, with trained `a` and `b` and frozen `w`.

    A product `x @ w` runs as `x @ w + (x @ a) @ b`, without an array of the size of `w`. A
    convolution, and a product that contracts neither or both of the last two axes, add the correction
    to `w` during the operation, which costs less there.

    Attributes:
      w: `[..., n, m]`, the frozen weight; itself implicit if it is quantized, for example.
      a: `[..., n, r]`, and
      b: `[..., r, m]`: the factors of the correction, of rank `r`; of any floating dtype, the
        correction is cast to the dtype of `w`.
      factor: the correction's scale `alpha / r`: `[...]`, float32, never trained; None for 1. The
        constructor takes `alpha`, a number or an array. Weights that differ in it have one structure,
        so exchanging one for another does not compile anything.

    Raises:
      ValueError: if the shapes do not fit together, or the number `alpha` is not finite.
      TypeError: if `w`, `a` or `b` is not of a floating dtype, or `alpha` is not a real number or an
        array of a floating dtype.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.zeros((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)), alpha=2.0)
      >>> print(hki.materialize(w))
      [[2. 2. 2.]
       [2. 2. 2.]]
    """

    peft_flag = ""
    field_axes = {"w": "nm", "a": "n.", "b": ".m"}
    separable = True

    a: jax.Array
    b: jax.Array
    factor: Array = dataclasses.field(default=None, metadata=FROZEN)

    def __init__(
        self,
        w: Array,
        a: Array,
        b: Array,
        alpha: Array = None,
        *,
        factor: Array = None,
        shape: Any = None,
        dtype: Any = None,
    ):
        self.w, self.a, self.b, self.factor = w, a, b, factor
        self.shape, self.dtype = shape, dtype
        self.__post_init__()
        if alpha is not None:
            factor = _as_alpha(alpha, np.shape(w)[:-2]) / self.rank
            # In a trace, a number stays a NumPy array, which is a constant of the program.
            traced = isinstance(a, jax.core.Tracer)
            self.factor = factor if traced else jnp.asarray(factor)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("w", "a", "b"):
            dtype = np.dtype(getattr(getattr(self, name), "dtype", object))
            sentence = (
                f"LoRA: {name} must be of a floating dtype, got {dtype.name}; integer codes go into a "
                "QuantizedMatrix, which can be the w of a LoRA"
            )
            with expecting(sentence, TypeError):
                chex.assert_type(np.zeros((), dtype).real, jnp.floating)  # complex is allowed
        self._check_shapes()

    def _check_shapes(self) -> None:
        w, a, b = np.shape(self.w), np.shape(self.a), np.shape(self.b)
        sentence = (
            "LoRA: expected w [..., n, m], a [..., n, r] and b [..., r, m] with equal leading axes and "
            f"a rank r of 1 or more, got w {list(w)}, a {list(a)}, b {list(b)}"
        )
        with expecting(sentence):
            chex.assert_shape([self.w, self.a], (..., None, None))
            chex.assert_scalar_positive(a[-1])  # the rank
            axes = chex.Dimensions(N=w[-2], M=w[-1], R=a[-1])
            chex.assert_shape(self.a, (*w[:-2], *axes["NR"]))
            chex.assert_shape(self.b, (*w[:-2], *axes["RM"]))

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        super().check_options(options)
        _own_alpha(options["rank"], options.get("alpha"), options.get("rank_stabilized", False))
        init_of(options.get("init"))

    @classmethod
    def options_for(cls, path: str, ndim: int, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `create`, with an `init` for this weight."""
        return {**options, "init": init_of(options.get("init")).of_weight(path)}

    @classmethod
    def create(
        cls,
        w: Array,
        key: jax.Array,
        *,
        rank: int,
        alpha: float | None = None,
        init: Initializer | LoRAInit | str | None = None,
        rank_stabilized: bool = False,
    ) -> "LoRA":
        """Makes a LoRA that stands for the same values.

        Args:
          rank: the rank of the correction, at most the smaller of `n` and `m`.
          alpha: the correction is scaled by `alpha / rank`; None for a scale of 1 (or of
            `8 / sqrt(rank)`).
          init: the initialization of the factors, as for `haiku_implicit.add_lora`.
          rank_stabilized: whether to scale the correction by `alpha / sqrt(rank)`.
        """
        own_alpha = _own_alpha(rank, alpha, rank_stabilized)
        check_room(w, rank)
        parts = init_of(init).parts(w, rank, own_alpha / rank, key)
        return (cls if parts.w is w else RestLoRA)(*parts, own_alpha)

    @classmethod
    def of_factors(cls, a: Array, b: Array, scale: Array, **others: Any) -> Self:
        """A correction without its base, from its factors and its scale `alpha / rank`."""
        factor = None if scale is None else jnp.asarray(scale, jnp.float32)
        return cls.without_base(a=a, b=b, factor=factor, **others)

    def completed(self) -> Self:
        """The weight with a `factor` of 1 if it has none, so that all weights have one structure."""
        return self.with_number("factor", 1.0, np.shape(self.a)[:-2])

    @property
    def rank(self) -> int:
        """The rank `r` of the correction."""
        return self.a.shape[-1]

    @property
    def alpha(self) -> Array:
        """The numerator of the correction's scale, `[...]`; None for a scale of 1."""
        return None if self.factor is None else self.factor * self.rank

    @property
    def scale(self) -> Array:
        """The scale `alpha / rank` of the correction, `[...]`; the number 1 without an `alpha`."""
        return 1.0 if self.factor is None else self.factor

    def delta(self) -> jax.Array:
        """The dense correction `scale * a @ b`."""
        return _scaled_a(self) @ self.widened(self.b)

    def materialize(self) -> jax.Array:
        return self.w + self.delta().astype(self.w.dtype)


@dataclasses.dataclass(init=False)
class RestLoRA(LoRA, method=""):
    """A `LoRA` whose correction began as a part of its weight, as in PiSSA: `w` is the rest.

    It computes as `LoRA` does. The type says that the correction without its base does not fit the
    original weight.
    """


_STABILIZED_ALPHA = 8.0  # PEFT's default, for any rank: the scale should not depend on the rank


def _own_alpha(rank: int, alpha: float | None, rank_stabilized: bool) -> float:
    """The `alpha` of the constructor, from options of `LoRA.create`; raises if one is out of range."""
    if alpha is None:
        alpha = _STABILIZED_ALPHA if rank_stabilized else rank
    real = isinstance(alpha, int | float | np.integer | np.floating)
    if not real or not math.isfinite(alpha):
        raise value_error(f"alpha: expected None or a finite number, got {alpha!r}")
    return alpha * math.sqrt(rank) if rank_stabilized else alpha


def check_room(w: Array, rank: int) -> None:
    """Raises unless a weight can take LoRA of a rank."""
    if isinstance(w, LoRA):
        raise ValueError(
            "this is LoRA already; merge_lora it first, or leave it out by exclude="
            f" {see('implicit-already')}"
        )
    if rank > (room := LoRA.room(w.shape)):
        axes = "hki.prepare(model, params, *args) finds which axes make one matrix. Or give"
        raise ValueError(
            f"LoRA of rank {rank} does not fit; the rank can be {room} at most. "
            f"{axes if len(w.shape) > 2 else 'Give'} a smaller rank=, or leave the parameter out by "
            "exclude="
            f" {see('a-rank-too-large')}"
        )


def _as_alpha(alpha: Array, batch: Sequence[int]) -> Array:
    """An `alpha` for each stacked matrix, from one number or an array of them."""
    if isinstance(alpha, numbers.Real):
        if not math.isfinite(alpha):
            raise value_error(f"LoRA: alpha must be finite, got {alpha!r}")
        return np.full(batch, alpha, np.float32)
    if not jnp.issubdtype(getattr(alpha, "dtype", object), jnp.floating):
        raise type_error(
            f"LoRA: alpha must be a real number, an array of them, or None, got {alpha!r}"
        )
    with expecting(
        f"LoRA: expected alpha {list(batch)}, as the leading axes of w are, got {list(np.shape(alpha))}"
    ):
        chex.assert_shape(alpha, tuple(batch))
    return alpha


def _of_parts(lora: LoRA, w: Array, a: Array, b: Array, factor: Array = None) -> LoRA:
    """Replaces the fields of a `LoRA` without validation, for rules.

    Args:
      factor: the new factor; None keeps the old one.
    """
    factor = lora.factor if factor is None else factor
    return lora._replace(w=w, a=a, b=b, factor=factor, shape=None, dtype=None)


def _times_scale(x: jax.Array, w: LoRA, places: Sequence[int]) -> jax.Array:
    """Multiplies `x` by the correction's scale; returns `x` itself, without an equation, for no factor.

    Args:
      x: an array with the leading axes of `w`.
      w: the weight.
      places: the positions of these axes in `x`.
    """
    if w.factor is None:
        return x
    if not w.scale.ndim:
        return x * w.scale.astype(x.dtype)
    others = [i for i in range(x.ndim) if i not in places]
    scale = jnp.transpose(w.scale, np.argsort(places).tolist()).astype(x.dtype)
    return x * jnp.expand_dims(scale, others)


def _scaled_a(w: LoRA) -> jax.Array:
    """The factor `a` times the scale, in the weight's dtype if that is wider."""
    return _times_scale(w.widened(w.a), w, range(w.a.ndim - 2))


# --- products ------------------------------------------------------------------------------------


@binary_handler("dot_general")
def dot_with_lora(call: BinaryCall, x: jax.Array, w: LoRA) -> Result:
    """Computes `x · (w + ab)` as `x · w + (x · a) · b`, and `(w + ab) · x` as `w · x + a · (b · x)`."""
    if not _goes_through_rank(w, call.contracted[1]):
        return _with_sum(call.primitive, call.ordered(x, w), call.params)
    found = _operands_and_options(x, w, call.params)
    if found is None:
        return NotImplemented
    if sorted(call.batch[1]) == list(range(w.ndim - 2)) and len(call.contracted[1]) == 1:
        low = _dot_through_rank(call, *found, w)
    elif call.params.get("out_sharding") is None:
        low = _einsum_delta(call, *found, w)
    else:
        return NotImplemented
    high = call(x, w.w)
    return high + low.astype(high.dtype)


def _goes_through_rank(w: LoRA, contracted: Sequence[int]) -> bool:
    """Whether a product can contract one of the two factors, and so is cheaper through the rank.

    It can't if only a leading axis is contracted, such as `n` of attention's weight `[n, h, c]`, whose
    matrices are `[h, c]`: `x · a` and then `· b` would be as large as the product with `w`.
    """
    return len({w.ndim - 2, w.ndim - 1} & set(contracted)) == 1


def _with_sum(primitive: Primitive, operands: Sequence[Array], params: EqnParams) -> jax.Array:
    """Runs a primitive on the dense sum `w + ab`, which a gradient computes again rather than keeps."""

    def run(operands: Sequence[Array]) -> jax.Array:
        summed = [
            dense(x.w) + x.delta().astype(x.dtype) if isinstance(x, LoRA) else x for x in operands
        ]
        return primitive.bind(*summed, **params)

    return jax.checkpoint(run)(operands)


def _operands_and_options(
    x: jax.Array, w: LoRA, params: EqnParams
) -> tuple[Factors, dict[str, Any]] | None:
    """The operands and options of the products with the factors; None if these can't run."""
    precision, preferred = params.get("precision"), params.get("preferred_element_type")
    algorithm = isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)
    common = _working_dtype(x, w)
    if algorithm and not x.dtype == w.dtype == common:
        return None  # an algorithm is for the dtypes it was chosen for
    if any(not jnp.issubdtype(d, np.inexact) for d in (w.dtype, preferred or w.dtype)):
        return None
    if preferred is not None:  # it must not be narrower than the operands
        preferred = jnp.promote_types(preferred, common)
    operands = x.astype(common), w.a.astype(common), w.b.astype(common)
    return operands, dict(precision=precision, preferred_element_type=preferred)


def _working_dtype(x: Array, w: LoRA) -> np.dtype:
    """The dtype of the dense product; the factors' dtype if an operand of it has 8 bits."""
    floats = [d for d in (x.dtype, w.dtype) if jnp.issubdtype(d, np.floating)]
    if any(d.itemsize == 1 for d in floats):
        return jnp.result_type(w.a.dtype, w.b.dtype)
    return jnp.result_type(x.dtype, w.dtype)


def _dot_through_rank(
    call: BinaryCall, operands: Factors, options: dict[str, Any], w: LoRA
) -> jax.Array:
    """The correction's product as two dots, for one contracted axis and all leading axes batch axes."""
    x, a, b = operands
    (x_contract, (axis,)), (x_batch, w_batch) = call.contracted, call.batch
    first, second = (a, b) if axis == w.ndim - 2 else (b, a)
    # In the first result the rank replaces the matrix's free axis, and in the second factor the
    # contracted axis. The batch axes come first in every result.
    inner = tuple(range(len(w_batch)))
    ndim = x.ndim - len(x_contract) + 1
    rank_axis = len(inner) if call.w_first else ndim - 1
    options_in, sharding = options, call.params.get("out_sharding")
    if sharding is not None:
        spec = list(padded_spec(sharding.spec, ndim))
        spec[rank_axis] = None
        options_in = options | dict(out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec)))
        options = options | dict(out_sharding=sharding)

    def dot(x: jax.Array, factor: jax.Array, contract: Any, batch: Any, options: Any) -> jax.Array:
        numbers = (call.ordered(*contract), call.ordered(*batch))
        return jax.lax.dot_general(*call.ordered(x, factor), numbers, **options)

    t = dot(x, first, (x_contract, (axis,)), (x_batch, w_batch), options_in)
    t = _times_scale(t, w, np.argsort(w_batch).tolist()).astype(x.dtype)
    return dot(t, second, ((rank_axis,), (axis,)), (inner, w_batch), options)


def _einsum_delta(
    call: BinaryCall, operands: Factors, options: dict[str, Any], w: LoRA
) -> jax.Array:
    """The correction's product in any other case: contracts `x`, `a` and `b` in the cheapest order."""
    x, a, b = operands
    *lead, n, m = w_axes = list(range(w.ndim))
    rank = w.ndim
    x_axes = [rank + 1 + i for i in range(x.ndim)]
    for of_x, of_w in (call.contracted, call.batch):
        for i, j in zip(of_x, of_w, strict=True):
            x_axes[i] = j
    batch = call.batch[1]
    free = [
        [i for i in axes if i not in (*call.contracted[1], *batch)] for axes in (x_axes, w_axes)
    ]
    of_first, of_second = call.ordered(*free)
    out = [*batch, *of_first, *of_second]
    factors = _times_scale(a, w, lead), [*lead, n, rank], b, [*lead, rank, m]
    return jnp.einsum(x, x_axes, *factors, out, **options)


@primitive_handler("ragged_dot_general")
def ragged_dot_with_lora(
    primitive: Primitive, x: jax.Array, w: LoRA, sizes: jax.Array, **params: EqnParam
) -> Result:
    """Multiplies rows with the matrices of their groups, as `x · w + (x · a) · b`."""
    numbers = row_numbers(x, w, **params)
    found = _operands_and_options(x, w, params)
    if numbers is None or found is None:
        return NotImplemented
    (wide, a, b), options = found
    a = _times_scale(a, w, range(w.ndim - 2))  # a scale for each matrix
    first, second = (a, b) if numbers.w_contracted == w.ndim - 2 else (b, a)
    t = small_ragged_dot(wide, first, sizes, numbers, **options).astype(wide.dtype)
    low = small_ragged_dot(t, second, sizes, numbers.of_result(), **options)
    high = default_handler(primitive, x, w.w, sizes, **params)
    return high + low.astype(high.dtype)


@primitive_handler("conv_general_dilated")
def conv_with_kernel(primitive: Primitive, x: jax.Array, w: LoRA, **params: EqnParam) -> jax.Array:
    """Convolves with the dense sum `w + ab`.

    A kernel is small compared with the images, and one convolution costs half of two.
    """
    out = convolve(x, w.w, params, _scaled_a(w), w.widened(w.b))
    return _with_sum(primitive, [x, w], params) if out is NotImplemented else out


# --- parts ---------------------------------------------------------------------------------------


@primitive_handler("gather")
def gather_rows(primitive: Primitive, w: LoRA, ids: jax.Array, **params: EqnParam) -> Result:
    """Gathers rows of an embedding table as `w[ids] + a[ids] @ b`, and whole columns likewise.

    Leading axes may be batch axes of the gather, or taken whole.
    """
    n, m = w.ndim - 2, w.ndim - 1
    d, sizes = params["dimension_numbers"], params["slice_sizes"]
    batched = tuple(d.operand_batching_dims)
    sliced = {*range(w.ndim)} - {*d.collapsed_slice_dims, *batched}
    # The only index of an axis that is taken whole is 0, in every `mode`.
    whole = [i for i in sliced if sizes[i] == w.shape[i]]
    axis = m if m in whole else n
    if axis not in whole or not set(range(n)) <= {*batched, *whole}:
        return NotImplemented
    high = primitive.bind(w.w, ids, **params)
    taken, other, rank_axis = (w.a, w.b, n) if axis == m else (w.b, w.a, m)
    own = params | dict(slice_sizes=(*sizes[:axis], w.rank, *sizes[axis + 1 :]))
    if params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP:
        # Only `high` is filled out of bounds. A factor filled with NaN would put NaN into the other
        # factor's gradient.
        own["fill_value"] = 0
    t = w.widened(primitive.bind(taken, ids, **own))

    # The positions of the operand's axes in `t`: sliced axes at the offsets, batch axes elsewhere.
    offsets = [int(i) for i in d.offset_dims]
    place = dict(zip(sorted(sliced), offsets, strict=True))
    index_axes = [i for i in range(t.ndim) if i not in offsets]
    for i, j in zip(batched, d.start_indices_batching_dims, strict=True):
        place[int(i)] = index_axes[j]
    lead = [place[i] for i in range(n)]
    numbers = (((place[axis],), (rank_axis,)), (lead, list(range(n))))
    low = jax.lax.dot_general(_times_scale(t, w, lead), w.widened(other), numbers)
    now = [*lead, *(i for i in range(t.ndim) if i not in (*lead, place[axis])), place[axis]]
    return high + jax.lax.transpose(low, np.argsort(now).tolist()).astype(high.dtype)


@primitive_handler(["slice", "dynamic_slice", "split"])
def cut_factors(primitive: Primitive, w: LoRA, *starts: jax.Array, **params: EqnParam) -> Result:
    """Slices or splits any axes: rows cut `a`, columns `b`, leading axes both."""
    return cut_fields(primitive, w, starts, params)


@primitive_handler("transpose")
def transpose_factors(
    primitive: Primitive, w: LoRA, *, permutation: tuple[int, ...], **params: EqnParam
) -> Result:
    """Transposes the matrix, `(w + ab)ᵀ = wᵀ + bᵀaᵀ`, and reorders leading axes."""
    core = w.ndim - 2, w.ndim - 1
    if tuple(sorted(permutation[-2:])) != core:
        return NotImplemented
    w_t, a_t, b_t = (primitive.bind(x, permutation=permutation, **params) for x in (w.w, w.a, w.b))
    factor = w.factor if w.factor is None else jnp.transpose(w.factor, permutation[:-2])
    return _of_parts(w, w_t, *((a_t, b_t) if permutation[-1] == core[1] else (b_t, a_t)), factor)


@primitive_handler("squeeze")
def squeeze_matrix(
    primitive: Primitive, w: LoRA, *, dimensions: tuple[int, ...], **params: EqnParam
) -> Result:
    """Makes a matrix of one row, column or element dense; `batch_axes` squeezes leading axes."""
    if max(dimensions, default=0) < w.ndim - 2:
        return NotImplemented
    high = primitive.bind(w.w, dimensions=dimensions, **params)
    return high + _summed_delta(w, dimensions, None).astype(high.dtype)


@primitive_handler("reduce_sum")
def sum_factors(
    primitive: Primitive, w: LoRA, *, axes: tuple[int, ...], **params: EqnParam
) -> Result:
    """Sums over any axes, as `sum(w) + sum(a) @ b` does over the rows."""
    if not jnp.issubdtype(w.dtype, np.inexact) or any(v is not None for v in params.values()):
        return NotImplemented
    high = primitive.bind(w.w, axes=axes, **params)
    # A sum is exact to rounding on every platform, but a product at default precision may not be.
    return high + _summed_delta(w, axes, jax.lax.Precision.HIGHEST).astype(high.dtype)


def _summed_delta(w: LoRA, axes: Sequence[int], precision: Precision) -> jax.Array:
    """The correction, summed over some of its axes."""
    *lead, n, m = range(w.ndim)
    rank = w.ndim
    out = [i for i in range(w.ndim) if i not in axes]
    factors = _scaled_a(w), [*lead, n, rank], w.widened(w.b), [*lead, rank, m]
    return jnp.einsum(*factors, out, precision=precision)


# --- elementwise ---------------------------------------------------------------------------------


@binary_handler(["add", "sub"])
def add_to_weight(call: BinaryCall, x: jax.Array, w: LoRA) -> Result:
    """Computes `(w + ab) ± x` as `(w ± x) + ab`, and `x - (w + ab)` as `(x - w) + (-a)b`.

    An operand that is constant along rows or columns is of rank one, see `deferred.shift`. So the sum
    is not computed again if `x` depends on trained values.
    """
    if not fits(x, w) or (x.ndim and x.shape[-2:] != w.shape[-2:]):
        return NotImplemented
    negative = call.primitive is jax.lax.sub_p and not call.w_first
    return _of_parts(w, call(x, w.w), -w.a if negative else w.a, w.b)


@primitive_handler(["mul", "div"])
def rescale(primitive: Primitive, w: LoRA, x: jax.Array, **params: EqnParam) -> Result:
    """Multiplies or divides by a number or one per row (applied to `a`), or one per column (to `b`)."""
    by_rows = x.ndim == 0 or x.shape[-1] == 1
    if not fits(x, w) or not (by_rows or x.shape[-2] == 1):
        return NotImplemented
    apply = jnp.multiply if primitive is jax.lax.mul_p else jnp.divide
    a, b = (apply(w.a, x), w.b) if by_rows else (w.a, apply(w.b, x))
    return _of_parts(w, primitive.bind(w.w, x, **params), a, b)


@primitive_handler("convert_element_type")
def cast_fields(primitive: Primitive, w: LoRA, *, new_dtype: DType, **params: EqnParam) -> Result:
    """Casts to another floating dtype; wider factors keep theirs, for the sake of their gradients.

    A product still runs in the dtype of the dense product (`_working_dtype`).
    """
    if not jnp.issubdtype(new_dtype, np.floating) or not jnp.issubdtype(w.dtype, np.floating):
        return NotImplemented
    cast = primitive.bind(w.w, new_dtype=new_dtype, **params)
    size = np.dtype(new_dtype).itemsize
    a, b = (x if x.dtype.itemsize > size else x.astype(new_dtype) for x in (w.a, w.b))
    return _of_parts(w, cast, a, b)
