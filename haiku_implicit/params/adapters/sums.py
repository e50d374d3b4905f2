"""Sums of several LoRA adapters as one adapter, exact or of a smaller rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from haiku_implicit.arrays.lora import LoRA, RestLoRA
from haiku_implicit.arrays.matrix_view import with_matrix
from haiku_implicit.core.keys import as_key
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Key
from haiku_implicit.params.adapters.parts import AdapterParts, checked_parts, lora_of
from haiku_implicit.params.trees.trees import Parameter

_Deltas = list[jax.Array]


def combine_adapters(
    adapters: Sequence[AdapterParts],
    weights: Sequence[float],
    method: str = "linear",
    *,
    rank: int | None = None,
    density: float | None = None,
    key: Key | None = None,
) -> AdapterParts:
    """Combines several LoRA adapters into one, by a weighted sum.

    The sum is over the corrections `a @ b`. The mean of the factors, as `jax.tree.map` would take it,
    is another matrix: it has the products of each `a` with every other `b` in it.

    Args:
      adapters: LoRA adapters for one base, each for some of its weights, of any rank.
      weights: a factor for each adapter.
      method: 'linear' keeps the sum exactly, with the sum of all ranks. 'ties' (Yadav et al. 2023,
        arXiv:2306.01708) keeps the largest entries of each correction, then those with the sign of
        their sum, and takes their weighted mean, as PEFT does. 'dare' (Yu et al. 2023,
        arXiv:2311.03099) keeps random entries, divides them by `density`, and adds them. 'dare_ties'
        keeps entries as 'dare', and adds them as 'ties'; 'magnitude_prune' keeps entries as 'ties', and
        adds them all.
      rank: the rank of the result, which is the nearest matrix of this rank, by its singular values.
        None: the exact rank for 'linear', the largest rank of the adapters, at any weight, for the
        others.
      density: the fraction of entries to keep, for all methods but 'linear'. Of a matrix with n
        entries, the int(density * n) largest ones are kept, as by PEFT.
      key: a random key, or an integer seed, for 'dare' and 'dare_ties'.

    Returns:
      The adapter; its scale is 1.

    Raises:
      ValueError: for an unknown method, different numbers of weights and adapters, adapters of other
        bases or types, dense parameters, or a missing option.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> base = {'linear': {'w': jnp.zeros((4, 3))}}
      >>> one, two = (hki.get_adapter(hki.add_lora(base, i, rank=1)) for i in range(2))
      >>> hki.combine_adapters([one, two], [0.5, 0.5]).weights['linear/w'].a.shape
      (4, 2)
    """
    refused = "it was trained as a whole, and only LoRA can be combined"
    adapters = [checked_parts(f"adapters[{i}]", x, refused) for i, x in enumerate(adapters)]
    merge = _merging(method, density, key)
    if not adapters:
        raise value_error("adapters: expected one or more, got none")
    if len(adapters) != len(weights):
        raise value_error(
            f"weights: expected one for each of the {len(adapters)} adapters, got {len(weights)}"
        )
    bases = _bases_of(adapters)
    found, pairs = {}, list(zip(adapters, weights, strict=True))
    loras = [
        {path: lora_of(path, x, "only LoRA can be combined") for path, x in adapter.weights.items()}
        for adapter in adapters
    ]
    largest = max((lora.rank for own in loras for lora in own.values()), default=0)
    for path in sorted({path for adapter in adapters for path in adapter.weights}):
        own = [(a.weights[path], by) for a, by in pairs if path in a.weights]
        parts = [(x[path], by) for x, by in zip(loras, weights, strict=True) if path in x]
        with jax.numpy_dtype_promotion("standard"):  # whatever the program chose
            if merge is None:
                new = _joined(parts)
                new = new if rank is None else _nearest(new.delta(), rank)
            else:
                deltas = [lora.delta() for lora, _ in parts]
                by = jnp.asarray([weight for _, weight in parts], jnp.result_type(*deltas))
                most = min(largest, *deltas[0].shape[-2:])
                new = _nearest(merge(path, deltas, by), rank or most)
        if any(isinstance(lora, RestLoRA) for lora, _ in parts):
            new = RestLoRA.of_factors(new.a, new.b, new.factor)
        found[path] = with_matrix(own[0][0], new)
    return AdapterParts(found, bases=bases)


# How each method drops entries of the corrections, and how it adds the rest.
_METHODS = {
    "ties": ("largest", "elected"),
    "dare": ("random", "all"),
    "dare_ties": ("random", "elected"),
    "magnitude_prune": ("largest", "all"),
}


def _merging(
    method: str, density: float | None, key: Key | None
) -> Callable[[str, _Deltas, jax.Array], jax.Array] | None:
    """A function of a path, corrections and weights that makes one; None for the plain sum."""
    if method == "linear" and density is None:
        return None
    if method == "linear":
        raise value_error("density: it is for the other methods; 'linear' keeps everything")
    if not isinstance(method, str) or method not in _METHODS:
        names = ", ".join(map(repr, ("linear", *_METHODS)))
        raise value_error(f"method: expected one of {names}, got {method!r}")
    if density is None or not 0 < density <= 1:
        raise value_error(f"density: expected a number above 0 and up to 1, got {density!r}")
    kept, added = _METHODS[method]
    if kept == "random" and key is None:
        raise value_error(f"key: {method!r} draws what it keeps; give a random key")
    drawn_with = None if kept == "largest" else as_key(key)

    def merge(path: str, deltas: _Deltas, weights: jax.Array) -> jax.Array:
        if drawn_with is None:
            rest = jnp.stack([_largest(x, density) for x in deltas])
        else:
            own = Parameter("", path, None).key_from(drawn_with)
            keys = jax.random.split(own, len(deltas))
            draws = [jax.random.bernoulli(k, density, deltas[0].shape) for k in keys]
            rest = jnp.stack([d * x for d, x in zip(draws, deltas, strict=True)]) / density
        weights = weights.reshape(-1, *(1 for _ in deltas[0].shape))
        return (weights * rest).sum(0) if added == "all" else _elected(rest, weights)

    return merge


def _elected(deltas: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted mean of the entries that have the sign of their sum, over the first axis."""
    sign = jnp.where(deltas.sum(0) >= 0, 1, -1)
    # (NaN does not agree with any sign, but has to reach the result.)
    agreeing = (jnp.sign(deltas) == sign[None]) | jnp.isnan(deltas)
    return jnp.where(agreeing, weights * deltas, 0).sum(0) / jnp.maximum(agreeing.sum(0), 1)


def _largest(x: jax.Array, density: float) -> jax.Array:
    """The entries of the largest magnitude in each matrix; the others become zeros."""
    flat = jnp.abs(x).reshape(*x.shape[:-2], -1)
    count = int(density * flat.shape[-1])
    if count == 0:
        return jnp.zeros_like(x)
    smallest = jax.lax.top_k(flat, count)[0][..., -1]
    # (Not `>=`: this keeps NaN, since a sum of adapters with NaN in one of them is not finite.)
    return jnp.where(jnp.abs(x) < smallest[..., None, None], 0, x)


def _bases_of(adapters: Sequence[AdapterParts]) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for adapter in adapters:
        for path, digest in adapter.bases:
            if found.setdefault(path, digest) != digest:
                raise value_error(f"{path}: the adapters were made for different bases")
    return tuple(sorted(found.items()))


def _joined(parts: Sequence[tuple[LoRA, float]]) -> LoRA:
    """The exact sum, with the factors side by side."""
    first = parts[0][0]
    scales = [jnp.asarray(weight * lora.scale, lora.a.dtype) for lora, weight in parts]
    own = zip(parts, scales, strict=True)
    a = jnp.concatenate([lora.a * jnp.expand_dims(s, (-2, -1)) for (lora, _), s in own], -1)
    b = jnp.concatenate([lora.b for lora, _ in parts], -2)
    return first._replace(a=a, b=b, factor=None).completed()


@functools.partial(jax.jit, static_argnums=1)
def _factors_of(delta: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    u, s, vh = jnp.linalg.svd(delta, full_matrices=False)
    root = jnp.sqrt(s[..., :rank])
    return u[..., :rank] * root[..., None, :], vh[..., :rank, :] * root[..., None]


def _nearest(delta: jax.Array, rank: int) -> LoRA:
    """LoRA of the nearest matrix of a rank (Eckart and Young)."""
    room = min(delta.shape[-2:])
    if not 1 <= rank <= room:
        raise value_error(f"rank: expected 1 to {room}, got {rank}")
    a, b = _factors_of(delta, rank)
    return LoRA.of_factors(a, b, None).completed()
