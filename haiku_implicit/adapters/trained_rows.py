"""`TrainedRows`: an embedding table with a few trained rows."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.axes import takes_whole_rows
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import FROZEN, aux_field
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.core.typing import Array, EqnParam, Primitive, Result


@dataclasses.dataclass
class TrainedRows(Adapter, method="trained_rows", linear_in=("w", "rows")):
    """The weight `w` with some rows replaced, for tokens that are new or get a new meaning.

    Only these rows are trained and stored. A look-up takes the trained row if there is one. A product
    computes with both, without an array of the size of `w`; so logits of a table that is tied to the
    embedding are right, too.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      rows: `[..., k, m]`, the trained rows, at first rows of `w`; for axis -1 they are columns,
        `[..., k, n]`.
      ids: `[..., k]` integers, all different: the indices of the replaced rows of `w`.
      axis: -2 for rows, -1 for columns (of a transpose).
    """

    keeps_base = False

    rows: Array
    ids: Array = dataclasses.field(metadata=FROZEN)
    axis: int = aux_field(default=-2)

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, ids: Sequence[int]) -> Self:
        """Makes an adapter for the rows with these indices."""
        index = np.asarray(ids)
        if index.ndim != 1 or not index.size or not np.issubdtype(index.dtype, np.integer):
            raise value_error(f"ids: expected a list of integers, got {ids!r}")
        if len(set(index.tolist())) < len(index):
            raise value_error(f"ids: expected each index once, got {ids!r}")
        if index.min() < 0 or index.max() >= w.shape[-2]:
            raise value_error(f"ids: expected indices of the {w.shape[-2]} rows, got {ids!r}")
        rows = use_implicit_args(lambda w: dense(w[..., index, :]))(w)
        return cls(w, rows, jnp.broadcast_to(jnp.asarray(index, jnp.int32), rows.shape[:-1]))

    def _part(self) -> jax.Array:
        """The trained part as rows `[..., k, m]`, or columns `[..., n, k]`."""
        rows = self.rows.astype(self.dtype)
        return rows if self.axis == -2 else jnp.swapaxes(rows, -1, -2)

    @property
    def field_axes(self) -> dict[str, str]:  # type: ignore[override]
        """The rows (columns) have the weight's axis along them."""
        return {"rows": ".m" if self.axis == -2 else ".n"}

    def equivalent(self) -> LoRA:
        """A `LoRA` with the difference as a correction of rank `k`, for operations without a rule."""
        chosen = jax.nn.one_hot(self.ids, self.shape[self.axis], dtype=self.dtype)  # [..., k, n]
        if self.axis == -2:
            difference = self._part() - chosen @ self.w
            return LoRA(self.w, jnp.swapaxes(chosen, -1, -2), difference)
        difference = self._part() - self.w @ jnp.swapaxes(chosen, -1, -2)
        return LoRA(self.w, difference, chosen)

    def materialize(self) -> jax.Array:
        def replaced(w: jax.Array, rows: jax.Array, ids: jax.Array) -> jax.Array:
            if w.ndim > 2:
                return jax.vmap(replaced)(w, rows, ids)
            rows = rows.astype(w.dtype)
            return w.at[ids].set(rows) if self.axis == -2 else w.at[:, ids].set(rows.T)

        return replaced(self.w, self.rows, self.ids)


@binary_handler("dot_general")
def dot_with_rows(call: BinaryCall, x: jax.Array, w: TrainedRows) -> Result:
    """Multiplies with the frozen rows and with the trained rows, and joins the results."""
    of_x, of_w = call.contracted
    if w.ndim != 2 or len(of_w) != 1 or call.params.get("out_sharding") is not None:
        return NotImplemented
    if of_w[0] == w.axis % 2:
        axis = of_x[0]
        frozen = jnp.ones(x.shape[axis], bool).at[w.ids].set(False)
        others = [i for i in range(x.ndim) if i != axis]
        rest = jnp.where(jnp.expand_dims(frozen, others), x, jnp.zeros((), x.dtype))
        out = call(rest, w.w)
        return out + call(jnp.take(x, w.ids, axis), w._part()).astype(out.dtype)
    out, part = call(x, w.w), call(x, w._part())
    part = part.astype(out.dtype)
    return out.at[w.ids].set(part) if call.w_first else out.at[..., w.ids].set(part)


@primitive_handler("gather")
def gather_rows(primitive: Primitive, w: TrainedRows, ids: jax.Array, **params: EqnParam) -> Result:
    """Gathers whole rows, as an embedding does, trained rows instead of the frozen rows."""
    if w.axis == -1 or not takes_whole_rows(w, ids, params):
        return NotImplemented
    out, index = primitive.bind(w.w, ids, **params), ids[..., 0]
    if params["mode"] == jax.lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, w.shape[0] - 1)
    trained_ids = jax.lax.broadcast_to_rank(w.ids.astype(index.dtype), index.ndim + 1)
    same = index[..., None] == trained_ids
    trained = w._part()[jnp.argmax(same, -1)]
    return jnp.where(same.any(-1, keepdims=True), trained.astype(out.dtype), out)


@primitive_handler("transpose")
def transpose_rows(primitive: Primitive, w: TrainedRows, *, permutation: tuple[int, ...]) -> Result:
    """Transposes the weight: trained rows become columns."""
    lead = range(w.ndim - 2)
    if tuple(permutation) != (*lead, w.ndim - 1, w.ndim - 2):
        return NotImplemented
    new = primitive.bind(w.w, permutation=permutation)
    return w._replace(w=new, axis=-3 - w.axis, shape=None, dtype=None)
