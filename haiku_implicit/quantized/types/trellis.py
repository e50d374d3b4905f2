"""`TrellisMatrix`: numbers of 2, 3 or 4 bits, each a function of the 12 bits from its first on.

Tseng et al. 2024 (QTIP), arXiv:2406.11235. The bits of a sequence are a circle: the windows of the last
numbers end in the bits of the first. So each number is decoded alone, and neighbors share bits: the
best sequence of codes, found by Viterbi's algorithm, has less error than codes for single numbers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.batch_axes import cut_fields, leaves_whole
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field, frozen_field
from haiku_implicit.core.messages import expecting, type_error, value_error
from haiku_implicit.core.sharding import left_to_partitioner, result_sharding
from haiku_implicit.core.typing import Array, Aval, DType, EqnParam, Primitive, Result
from haiku_implicit.quantized.cpu import native
from haiku_implicit.quantized.numbers import formats, gptq, scales
from haiku_implicit.quantized.numbers.options import (
    OperandConfig,
    checked_activation,
    parse_activation,
)
from haiku_implicit.quantized.products.kernel_primitive import kernel_primitive
from haiku_implicit.quantized.products.stored import in_codes, quantized_dot
from haiku_implicit.quantized.types.matrix_indexing import as_index

WINDOW = 12  # bits that a number depends on
LONGEST = 256  # numbers in a sequence
LANE = 16  # numbers next to each other in a sequence: as many words of 16 bits as a number has bits
MULTIPLE = 2 * LANE  # a sequence has two lanes or more
_OVERLAP = 64  # numbers on each side of the ends, to find how they meet

# The bits of a number, by the name of the format.
BITS = {"trellis2": 2, "trellis3": 3, "trellis4": 4}


class Code(NamedTuple):
    """How windows become numbers, found by a search for the least error.

    Attributes:
      factor: of the window; the product's low 16 bits are two bytes, whose sum makes the number.
      mixed: whether each byte is first averaged with the window's own: more bits need longer tails.
      bias: subtracted from the sums.
      rms: the root mean square of normally distributed numbers that have the least error, relatively.
    """

    factor: int
    mixed: bool
    bias: int
    rms: float


# By the bits of a number.
CODES = {
    2: Code(45713, False, 255, 1.52),
    3: Code(24263, True, 195, 0.88),
    4: Code(32477, True, 195, 0.83),
}


@dataclasses.dataclass
class TrellisMatrix(ImplicitArray, core_ndim=2):
    """A matrix of normally distributed numbers, as trellis codes of 2, 3 or 4 bits.

    After QTIP, Tseng et al. 2024, arXiv:2406.11235. The matrix has no scales: `ScaledMatrix` multiplies
    its columns, and `Rotated` makes the numbers of any weight normally distributed.
    `quantize_params(params, dtype="trellis3")` makes the three together. Each number is a sum of the
    two bytes of a product of the 12 bits from its own first bit on, so that it shares bits with the
    next ones of its sequence. The bits of a sequence are a circle. A sequence has 256 numbers, or fewer
    if that makes all sequences of a row equally long. It consists of lanes of 16 numbers, each in
    `bits` words of 16 bits. Numbers at the same place in all lanes of a row are neighbors in the
    matrix, so that a vector of words is decoded at once.

    Attributes:
      words: `[..., rows, bits * lanes]`, uint16: the first words of all lanes of a row, then the second
        words, and so on; the lowest bits come first. A row of `k` numbers, a multiple of 32, has
        `k / 16` lanes.
      length: how many numbers of each row belong to the matrix.
      bits: of a number: 2, 3 or 4.
      axis: the axis of the matrix along which the sequences run: -1 for `[..., rows, length]`, -2 for
        `[..., length, rows]`.
      activation: the format that products round activations to, as for a `QuantizedMatrix` of one group
        in each row; None: no rounding.

    Raises:
      ValueError: if the words do not fit.
      TypeError: for words of another dtype, such as the uint32 of versions before 2026-11-27.

    Example:
      >>> import jax, haiku_implicit as hki
      >>> w = jax.random.normal(jax.random.key(0), (16, 512))
      >>> q = hki.TrellisMatrix.encode(w, bits=3)
      >>> q.shape, q.nbytes * 8 / q.size
      ((16, 512), 3.0)
      >>> round(float(((hki.materialize(q) - w) ** 2).mean()), 2)
      0.02
    """

    words: Array = frozen_field()
    length: int = aux_field()
    bits: int = aux_field()
    axis: int = aux_field(default=-1)
    activation: str | None = aux_field(default=None, metadata={"later": True})

    default_dtype = jnp.float32

    # For products, as a `QuantizedMatrix` has them: one group, without a scale, in each row.
    offset = rounded_to = None
    num_groups = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in BITS.values() or self.axis not in (-2, -1):
            raise value_error(
                f"TrellisMatrix: expected 2, 3 or 4 bits and the axis -2 or -1, got {self.bits!r} and "
                f"{self.axis!r}"
            )
        self._check_words()

    def _check_words(self) -> None:
        found = self.words.dtype
        if found == jnp.uint32:
            raise type_error(
                "TrellisMatrix: expected words in uint16, got uint32, of an earlier code: encode the "
                "weight again"
            )
        if found != jnp.uint16:
            raise formats.cast_error(f"trellis{self.bits}", jnp.uint16, found)
        count, steps = sequences(self.length)
        words = count * steps * self.bits // 16
        sentence = f"TrellisMatrix: expected words [..., rows, {words}], got {np.shape(self.words)}"
        with expecting(sentence):
            chex.assert_shape(self.words, (..., None, words))

    @classmethod
    def encode(cls, w: Array, bits: int, moments: Array = None, dtype: DType | None = None) -> Self:
        """Finds the codes of least squared error, also under `jit`, `vmap` and `eval_shape`.

        Args:
          w: `[..., n, m]`, floating, finite; best with columns of mean square one.
          bits: of a number: 2, 3 or 4.
          moments: `[..., n, n]`: xᵀx of the inputs x of products `x @ w`. Then rows are encoded one
            after another, the largest inputs first, and the next ones make up for the errors (LDLQ).
          dtype: of the matrix; None: the dtype of `w`.

        Returns:
          The matrix, with sequences along the last axis.

        Raises:
          ValueError: for a weight that is not finite or has less than two axes.
        """
        w = jnp.asarray(w)
        if w.ndim < 2 or scales.known_nonfinite(w):
            found = f"the shape {list(w.shape)}" if w.ndim < 2 else "infinities or NaNs"
            raise value_error(f"w: expected a matrix [..., n, m] of finite numbers, got {found}")
        count, steps = sequences(w.shape[-1])
        numbers = jnp.pad(w.astype(jnp.float32), _last(w.ndim, count * steps - w.shape[-1]))
        words = _words(numbers, moments, bits, steps)
        return cls(words, w.shape[-1], bits, dtype=np.dtype(dtype or w.dtype))

    def requantize(self, w: Array) -> Self:
        """Encodes another weight of the same shape, with as many bits, and without inputs.

        Args:
          w: a dense weight of this shape.
        """
        if np.shape(w) != self.shape:
            raise value_error(f"w: expected shape {list(self.shape)}, got {list(np.shape(w))}")
        new = self.encode(
            w if self.axis == -1 else jnp.matrix_transpose(w), self.bits, dtype=self.dtype
        )
        return new._replace(axis=self.axis, activation=self.activation, shape=None)

    def with_activation(self, activation: str | None) -> Self:
        """Returns this matrix with another format for the activations of its products, or None.

        Args:
          activation: as for `QuantizedMatrix.quantize`.

        Raises:
          ValueError: for a format that activations can't have, or groups that do not divide the inputs.
        """
        text, inputs = checked_activation(activation), self.shape[-2]
        tile = parse_activation(text).tile or 1
        if inputs % tile:
            raise value_error(
                f"activation: {text!r} has groups of {tile} inputs, which do not divide {inputs}; use "
                "another format, such as 'int8', or leave the weight out by exclude="
            )
        return self._replace(activation=text)

    @property
    def activation_config(self) -> OperandConfig:
        """How products quantize activations."""
        return parse_activation(self.activation, self.length)

    def new_scales(self, w: Array, scale: Array, axis: int) -> Array:
        """Returns scales for another weight: one that is within 15 % of the best one stays as it is.

        With the same scales, numbers that are codes already change little, and mostly not at all.
        """
        if axis != self.axis:
            return scale
        best = best_scales(w, self.bits, self.axis)
        near = jnp.abs(best - scale) <= 0.15 * best
        return jnp.where(near, scale, best).astype(scale.dtype)

    @property
    def field_axes(self) -> dict[str, str]:  # type: ignore[override]
        """Words have the axis of the rows; sequences are not cut."""
        return {"words": "n." if self.axis == -1 else "m."}

    @property
    def codes(self) -> Array:
        """The words."""
        return self.words

    @property
    def format(self) -> str:
        """The name of the codes: 'trellis2', 'trellis3' or 'trellis4'."""
        return f"trellis{self.bits}"

    @property
    def steps(self) -> int:
        """The length of each sequence."""
        return sequences(self.length)[1]

    def compute_shape(self) -> tuple[int, ...]:
        self._check_words()  # a file or a pickle, which call no constructor, may be of an earlier code
        rows, core = np.shape(self.words)[:-1], self.length
        return (*rows, core) if self.axis == -1 else (*rows[:-1], core, rows[-1])

    def materialize(self) -> jax.Array:
        numbers = _decoded(self.words, self.bits, self.length).astype(self.dtype)
        return numbers if self.axis == -1 else jnp.swapaxes(numbers, -1, -2)


def best_scales(w: Array, bits: int, axis: int = -1) -> jax.Array:
    """Returns the scales, along an axis, that give normally distributed numbers the least error.

    Args:
      w: `[..., n, m]`, floating.
      bits: of a number.
      axis: the axis that each number of the scales is an index of, -1 or -2.
    """
    other = -3 - axis
    wide = w.astype(jnp.promote_types(w.dtype, jnp.float32))
    largest = jnp.abs(wide).max(other, keepdims=True)
    largest = jnp.where(largest == 0, 1, largest)  # (the squares may overflow)
    rms = jnp.sqrt(((wide / largest) ** 2).mean(other)) * jnp.squeeze(largest, other)
    return rms / CODES[bits].rms


def sequences(numbers: int) -> tuple[int, int]:
    """Returns how many sequences a row of numbers is cut into, and their length.

    The end of the last one may be no part of the row: less than 32 numbers for each sequence.
    """
    count = max(1, -(-numbers // LONGEST))
    return count, max(1, -(-numbers // (count * MULTIPLE))) * MULTIPLE


def _last(ndim: int, more: int) -> list[tuple[int, int]]:
    """The widths that pad the end of the last axis."""
    return [(0, 0)] * (ndim - 1) + [(0, more)]


# --- decoding ------------------------------------------------------------------------------------


def values(windows: jax.Array, bits: int) -> jax.Array:
    """Returns the numbers of windows (uint16), in float32: sums of the two bytes of a product.

    It is an integer of at most 8 bits and a sign, over 64, so that bfloat16 and float16 hold it, too.
    """
    code = CODES[bits]
    product = windows * np.uint16(code.factor)
    pair = [product & np.uint16(255), product >> np.uint16(8)]
    if code.mixed:
        own = [windows & np.uint16(255), windows >> np.uint16(8)]
        pair = [x + y + np.uint16(1) >> np.uint16(1) for x, y in zip(pair, own, strict=True)]
    return ((pair[0] + pair[1]).astype(jnp.int32) - code.bias).astype(jnp.float32) / 64


def windows(words: jax.Array, bits: int, length: int) -> jax.Array:
    """Returns the windows of all numbers.

    Args:
      words: `[..., bits * lanes]`, uint16.
      bits: of each number.
      length: of each sequence.

    Returns:
      `[..., lanes * 16]`, uint16.
    """
    lead, lanes = words.shape[:-1], words.shape[-1] // bits
    planes = [words[..., i * lanes : (i + 1) * lanes] for i in range(bits)]
    circles = planes[0].reshape(*lead, -1, length // LANE)
    planes.append(jnp.roll(circles, -1, axis=-1).reshape(*lead, lanes))
    steps = [divmod(i * bits, 16) for i in range(LANE)]
    of_steps = [_window(planes[i], planes[i + 1], np.uint16(shift)) for i, shift in steps]
    return jnp.concatenate(of_steps, axis=-1)


def windows_at(
    ids: jax.Array,
    bits: int,
    length: int,
    lanes: int,
    take: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Returns the windows of some numbers of each row.

    Args:
      ids: the position of each number.
      bits, length: as for `windows`.
      lanes: how many a row has.
      take: returns the words of all rows, `[ids..., rows]`, at positions of each row.
    """
    step, lane = ids // lanes, ids % lanes
    plane, shift, circle = step * bits // 16, step * bits % 16, length // LANE
    beside = lane // circle * circle + (lane + 1) % circle
    following = jnp.where(plane + 1 < bits, (plane + 1) * lanes + lane, beside)
    word, following = take(plane * lanes + lane), take(following)
    return _window(word, following, shift.astype(jnp.uint16)[..., None])


def _window(word: jax.Array, following: jax.Array, shift: Any) -> jax.Array:
    """Returns the window from a bit of a word on."""
    one = np.uint16(1)
    # (NumPy 1 makes `15 - shift` an int64.)
    rest = np.uint16(15) - shift
    return (word >> shift | following << one << rest) & np.uint16(2**WINDOW - 1)


def decode(words: jax.Array, *, bits: int, steps: int) -> jax.Array:
    """Returns the numbers of words, float32; `steps` is the length of each sequence."""
    return values(windows(words, bits, steps), bits)


@functools.partial(jax.jit, static_argnames=("bits", "length"))
def _decoded(words: jax.Array, bits: int, length: int) -> jax.Array:
    """Returns the numbers `[..., length]` of rows of words, float32."""
    numbers: jax.Array = decode_p.bind(words, bits=bits, steps=sequences(length)[1])
    return numbers[..., :length]


# `decode` as a primitive, with a native kernel on CPUs.
decode_p = kernel_primitive(
    "trellis_decode", decode, native.trellis_decode, params=["bits", "steps"]
)


def _abstract(words: Aval, *, bits: int, **_: Any) -> Any:
    shape = (*words.shape[:-1], words.shape[-1] * 16 // bits)
    return words.update(shape=shape, dtype=np.dtype(np.float32), weak_type=False)


def _jvp(primals: Sequence[Array], _: Any, **params: EqnParam) -> tuple[Array, Array]:
    out = decode_p.bind(*primals, **params)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


decode_p.def_abstract_eval(_abstract)
ad.primitive_jvps[decode_p] = _jvp


# --- encoding ------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("bits", "steps"))
def _words(w: jax.Array, moments: Array, bits: int, steps: int) -> jax.Array:
    """Returns the words of rows `[..., rows, k]`, in sequences of a number of steps."""
    lead, own = w.shape[:-2], w.shape[-2:]
    w = w.reshape(-1, *own)
    order, factor = None, jnp.zeros((len(w), 0, 0), jnp.float32)
    if moments is not None:
        moments = jnp.asarray(moments).reshape(-1, own[0], own[0])
        _, order, factor = gptq.inputs_of(moments, jnp.float32, 0)
        w = jnp.take_along_axis(w, order[..., None], axis=-2)
    # From the order of the matrix, steps of lanes, to the order of sequences.
    w = w.reshape(*w.shape[:2], LANE, -1).swapaxes(-1, -2).reshape(w.shape)
    native_way = native.trellis_encoder(bits, steps)
    slow = functools.partial(encode, bits=bits, steps=steps)
    if native_way is None:
        words = slow(w, factor)
    else:
        words = jax.lax.platform_dependent(w, factor, cpu=native_way, default=slow)
    words = words.reshape(*words.shape[:2], -1, bits).swapaxes(-1, -2)
    words = words.reshape(*words.shape[:2], -1)
    if order is not None:
        words = jnp.take_along_axis(words, jnp.argsort(order)[..., None], axis=-2)
    return words.reshape(*lead, own[0], -1)


def encode(w: jax.Array, factor: jax.Array, bits: int, steps: int) -> jax.Array:
    """Returns the words of matrices, row after row; each may leave its error to the next ones (LDLQ).

    Args:
      w: `[batch, rows, k]`, float32.
      factor: `[batch, rows, rows]`, the upper Cholesky factors of the inverse moments of the rows'
        inputs, as GPTQ has them; `[batch, 0, 0]`: each row is encoded alone.
      bits: of each number.
      steps: the length of each sequence.

    Returns:
      `[batch, rows, k * bits / 16]`, uint16, in the order of the sequences.
    """
    run = jax.vmap(functools.partial(_states, bits=bits))

    def step(left: jax.Array, x: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
        i, row = x
        states = run(left[i].reshape(-1, steps)).reshape(-1)
        if len(row):
            left = left - row[:, None] * ((left[i] - values(states, bits)) / row[i])[None]
        return left, states

    def of_matrix(operands: tuple[jax.Array, jax.Array]) -> jax.Array:
        w, factor = operands
        rows = factor if factor.size else jnp.zeros((len(w), 0), w.dtype)
        return jax.lax.scan(step, w, (jnp.arange(len(w)), rows))[1]

    return pack(jax.lax.map(of_matrix, (w, factor)) & (2**bits - 1), bits)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs codes `[..., k]`, uint16, into words `[..., k * bits / 16]`, the lowest bits first."""
    each = codes[..., None] >> np.arange(bits, dtype=np.uint16) & 1
    each = each.reshape(*codes.shape[:-1], -1, 16)
    return (each << np.arange(16, dtype=np.uint16)).sum(-1, dtype=jnp.uint16)


def _states(w: jax.Array, bits: int) -> jax.Array:
    """Returns the windows of least squared error of a sequence `[length]`."""
    shared = 2 ** (WINDOW - bits)  # the windows, less the bits that are new in each
    near = min(_OVERLAP, len(w) // 2)
    around = jnp.concatenate([w[len(w) - near :], w[:near]])
    costs, branches = _backward(around, jnp.zeros(shared, w.dtype), bits)
    meeting, _ = _forward(branches[:near], jnp.argmin(costs).astype(jnp.uint16), bits)
    last = jnp.where(jnp.arange(shared) == meeting, 0, jnp.inf).astype(w.dtype)
    return _forward(_backward(w, last, bits)[1], meeting, bits)[1]


def _backward(w: jax.Array, last: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Returns the least costs, by the bits of the window before, and the new bits of each number."""
    of_windows = values(jnp.arange(2**WINDOW, dtype=jnp.uint16), bits)

    def step(after: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        costs = (of_windows - number) ** 2 + jnp.repeat(after, 2**bits)
        costs = costs.reshape(2**bits, -1)
        return costs.min(0), jnp.argmin(costs, 0).astype(jnp.uint16)

    return jax.lax.scan(step, last, w, reverse=True)


def _forward(branches: jax.Array, first: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Follows the best branches; returns the shared bits after them, and the windows."""

    def step(shared: jax.Array, branch: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = shared | branch[shared] << (WINDOW - bits)
        return state >> bits, state

    return jax.lax.scan(step, first, branches)


# --- products ------------------------------------------------------------------------------------


@binary_handler("dot_general")
def dot_with_trellis(call: BinaryCall, x: jax.Array, w: TrellisMatrix) -> jax.Array:
    """Multiplies with codes that are decoded on the way; leaves explicit axes of a mesh to XLA."""
    sharding = result_sharding(call.primitive, call.ordered(x, w), call.params)
    if call.params.get("out_sharding") is not None:  # derivatives have one that splits nothing
        call = dataclasses.replace(call, params=call.params | dict(out_sharding=None))
    run = functools.partial(quantized_dot, call)
    return run(x, w) if sharding is None else left_to_partitioner(run, sharding)(x, w)


@binary_handler(["conv_general_dilated", "ragged_dot_general"])
def multiply_decoded(call: BinaryCall, x: jax.Array, w: TrellisMatrix) -> Result:
    """Rounds activations, and convolves with the decoded kernel, which is small beside the images."""
    if call.others and (call.w_first or w.activation is None):  # a ragged product
        return NotImplemented
    if w.activation is not None:
        return in_codes(call, x, w, *call.others)
    return jax.checkpoint(lambda x, w: call(x, dense(w)))(x, w)


# --- axes ----------------------------------------------------------------------------------------


@primitive_handler("transpose")
def transpose_trellis(
    primitive: Primitive, w: TrellisMatrix, *, permutation: tuple[int, ...], **params: EqnParam
) -> Result:
    """Swaps the two axes of the matrix in name only, and reorders batch axes."""
    core = (w.ndim - 2, w.ndim - 1)
    if tuple(sorted(permutation[-2:])) != core:
        return NotImplemented
    words = primitive.bind(w.words, permutation=(*permutation[:-2], *core), **params)
    axis = w.axis if permutation[-1] == core[1] else -3 - w.axis
    return w._replace(words=words, axis=axis, shape=None)


@primitive_handler("convert_element_type")
def cast_trellis(
    primitive: Primitive, w: TrellisMatrix, *, new_dtype: DType, **params: EqnParam
) -> Result:
    """Casts to a dtype that holds all numbers, without a change."""
    exact = jnp.issubdtype(new_dtype, np.floating) and jnp.finfo(new_dtype).nmant >= 7
    return w._replace(dtype=np.dtype(new_dtype)) if exact else NotImplemented


# --- parts ---------------------------------------------------------------------------------------


@primitive_handler(["slice", "dynamic_slice", "split"])
def cut_rows(
    primitive: Primitive, w: TrellisMatrix, *starts: jax.Array, **params: EqnParam
) -> Result:
    """Slices or splits any axes but the sequences'."""
    whole = leaves_whole(w, w.ndim + w.axis, params)
    return cut_fields(primitive, w, starts, params) if whole else NotImplemented


@primitive_handler("gather")
def gather_from_trellis(
    primitive: Primitive, w: TrellisMatrix, ids: jax.Array, **params: EqnParam
) -> Result:
    """Gathers rows or columns of one matrix, as an embedding does: decodes only these."""
    d, sizes = params["dimension_numbers"], params["slice_sizes"]
    if w.ndim != 2 or len(d.start_index_map) != 1 or d.collapsed_slice_dims != d.start_index_map:
        return NotImplemented
    (axis,), filling = d.start_index_map, params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    if sizes[axis] != 1 or sizes[1 - axis] != w.shape[1 - axis]:
        return NotImplemented
    index = jnp.clip(as_index(ids[..., 0]), 0, w.shape[axis] - 1)
    if axis == w.ndim + w.axis:
        take = functools.partial(jnp.take, w.words.T, axis=0, mode="clip")
        lanes = w.words.shape[-1] // w.bits
        numbers = values(windows_at(index, w.bits, w.steps, lanes, take), w.bits)
    else:
        numbers = _decoded(jnp.take(w.words, index, axis=0, mode="clip"), w.bits, w.length)
    numbers = numbers.astype(w.dtype)
    if filling:
        fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
        inside = (ids >= 0) & (ids < w.shape[axis])
        numbers = jnp.where(inside, numbers, jnp.asarray(fill, w.dtype))
    return jnp.moveaxis(numbers, -1, d.offset_dims[0])
