"""`VBLoRA`: LoRA whose factors are mixed from vectors that all weights share."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp

from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.array import ImplicitArray, IncompleteError
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.messages import see, value_error
from haiku_implicit.core.typing import Array, Params

# The module and name of the bank in a tree of parameters.
MODULE, NAME = "vblora_bank", "vectors"


@dataclasses.dataclass
class VectorBank(ImplicitArray):
    """The vectors that all `VBLoRA` weights of a tree share; a type, so that they count as trained.

    Attributes:
      vectors: `[h, length]`.
    """

    vectors: Array

    def materialize(self) -> jax.Array:
        return self.vectors


@dataclasses.dataclass
class VBLoRA(Adapter):
    """The weight `w + a @ b`, with `a` and `b` made of pieces that are mixed from a bank of vectors.

    Each piece is a mean of `top_k` vectors, weighted by the softmax of their logits (Li et al. 2024,
    arXiv:2405.15179). The bank is trained, too. The tree of parameters stores it once, and
    `with_vector_bank` puts it into the weights, so its gradient is the sum over all weights.

    Unlike other adapters, this one does not begin at `w`: a bank of zeros would not get a gradient.
    The first correction is as small as the square of the bank's numbers times the rank.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      of_a: `[..., n / length, r, h]`, the logits of `h` vectors for the pieces of the columns of `a`.
      of_b: `[..., r, m / length, h]`, the logits for the pieces of the rows of `b`.
      bank: `[..., h, length]`, the vectors; None while the weight is stored in a tree.
      top_k: the number of vectors per piece.
    """

    field_axes = {"of_a": "n..", "of_b": ".m."}

    of_a: Array
    of_b: Array
    bank: Array = dataclasses.field(default=None)
    top_k: int = aux_field(default=2)

    @classmethod
    def create(
        cls,
        w: Array,
        key: jax.Array,
        *,
        rank: int,
        num_vectors: int = 256,
        vector_length: int = 256,
        top_k: int = 2,
    ) -> Self:
        """Makes an adapter without its bank.

        Args:
          rank: the rank of the correction.
          num_vectors: the number of vectors in the bank.
          vector_length: the length of each vector; it divides both sides of the weight.
          top_k: the number of vectors per piece.
        """
        *lead, n, m = w.shape
        if vector_length < 1 or n % vector_length or m % vector_length:
            common = math.gcd(n, m)
            fitting = [str(size) for size in range(1, common + 1) if common % size == 0]
            raise value_error(
                f"vector_length: expected a divisor of both sides of the weight, {n} and {m}, got "
                f"{vector_length}; those are {', '.join(fitting)}. One length serves the whole tree: "
                "leave weights that it does not divide out by exclude="
            )
        if not 0 < top_k <= num_vectors:
            raise value_error(f"top_k: expected 1 to {num_vectors} (num_vectors), got {top_k}")
        keys = jax.random.split(key)
        shape_of_a = (*lead, n // vector_length, rank, num_vectors)
        shape_of_b = (*lead, rank, m // vector_length, num_vectors)
        of_a = 0.1 * jax.random.normal(keys[0], shape_of_a, w.dtype)
        of_b = 0.1 * jax.random.normal(keys[1], shape_of_b, w.dtype)
        return cls(w, of_a, of_b, None, top_k)

    @classmethod
    def with_shared(cls, params: Params, key: jax.Array, **options: Any) -> Params:
        """Adds a bank to a tree with weights of this type, unless the tree has one.

        Raises:
          ValueError: if the tree's bank has another size.
        """
        count, length = options.get("num_vectors", 256), options.get("vector_length", 256)
        if MODULE not in params:
            draw = jax.random.uniform
            vectors = draw(jax.random.fold_in(key, 1), (count, length), minval=-0.02, maxval=0.02)
            return {**params, MODULE: {NAME: VectorBank(vectors)}}
        has, wanted = params[MODULE][NAME].shape, (count, length)
        if has != wanted:
            raise value_error(
                f"num_vectors, vector_length: the tree has a bank of {has} already, got {wanted}"
            )
        return params

    def equivalent(self) -> LoRA:
        if self.bank is None:
            raise IncompleteError(
                "VBLoRA: the weight has no vector bank. Put it in with "
                "haiku_implicit.with_vector_bank(params), within the function that is differentiated"
                f" {see('ordinary-arrays-inside')}"
            )
        a = _mixed(self.widened(self.of_a), self.bank, self.top_k)  # [..., n / length, r, length]
        b = _mixed(self.widened(self.of_b), self.bank, self.top_k)  # [..., r, m / length, length]
        n, m = self.shape[-2:]
        a = jnp.swapaxes(a, -1, -2).reshape(*self.lead, n, -1).astype(self.dtype)
        return LoRA(self.w, a, b.reshape(*self.lead, -1, m).astype(self.dtype))


def _mixed(logits: jax.Array, bank: jax.Array, top_k: int) -> jax.Array:
    """Computes means of the vectors with the largest logits: `[..., h]` to `[..., length]`."""
    largest, index = jax.lax.top_k(logits, top_k)
    weights = jax.nn.softmax(largest, axis=-1)
    # (A product with all vectors, most of them times zero, because the bank may have batch axes.)
    of_all = jnp.einsum(
        "...k,...kh->...h", weights, jax.nn.one_hot(index, logits.shape[-1], dtype=weights.dtype)
    )
    return jnp.einsum("...ijh,...hv->...ijv", of_all, bank)
