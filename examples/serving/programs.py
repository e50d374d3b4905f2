"""The server's compiled programs: reading a prompt, and one more token for each running request.

The cache has a row for each slot, a whole Haiku state for a batch of one, so that each request has its
own position. The model knows nothing of this: both programs run it by `jax.vmap`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import haiku_implicit as hki

NOT_FINITE = -1  # instead of a token, if the logits are not finite


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The shapes of all programs: nothing else is ever compiled.

    Attributes:
      length: positions in each slot's cache, for its prompt and its answer.
      prompts: lengths that prompts are padded to; the largest one is the limit.
      widths: how many slots, from the first one on, a decoding step computes; the last one is the
        number of slots.
    """

    length: int
    prompts: tuple[int, ...]
    widths: tuple[int, ...]

    def __post_init__(self):
        for name in ("prompts", "widths"):
            values = getattr(self, name)
            if not values or values[0] < 1 or list(values) != sorted(set(values)):
                raise ValueError(f"{name}: expected increasing positive numbers, got {values}")
        if self.prompts[-1] >= self.length:
            raise ValueError(
                f"prompts: expected less than length={self.length}, got {self.prompts}"
            )

    @property
    def slots(self) -> int:
        """The number of requests that are decoded together."""
        return self.widths[-1]

    def padded(self, count: int) -> int:
        """Returns the length that a prompt of `count` tokens is padded to."""
        return next(size for size in self.prompts if size >= count)


class Sampling(NamedTuple):
    """How to choose tokens: numbers for one request, arrays `[width]` for a step.

    Attributes:
      temperature: 0 for the most likely token.
      top_p: tokens are drawn from the most likely ones that have this probability together.
      seed: uint32. Seed and token index decide the draw, independently of other requests.
      index: the number of tokens of the answer so far.
    """

    temperature: Any = 0.0
    top_p: Any = 1.0
    seed: Any = 0
    index: Any = 0

    def as_arrays(self) -> "Sampling":
        dtypes = (np.float32, np.float32, np.uint32, np.int32)
        return Sampling(*(np.asarray(x, dtype) for x, dtype in zip(self, dtypes, strict=True)))


class Programs:
    """The two programs for a model and a bank, and their cache.

    A bank is passed as its leaves (`leaves_of`): JAX passes a list of arrays on faster than a tree of
    Python objects.
    """

    def __init__(self, model: Any, empty: Any, sizes: Sizes):
        """
        Args:
          model: `apply(params, state, None, tokens [1, time])` gives logits and the next state.
          empty: the state before the first token, of `sizes.length` positions.
          sizes: the shapes of the programs.
        """
        self.sizes = sizes
        self._model, self._empty = model, empty
        self._bank: Any = None
        self._prefill = jax.jit(self._prefill_of, donate_argnums=1)
        self._decode = jax.jit(self._decode_of, donate_argnums=1, static_argnames="width")
        leaves, self._cache_structure = jax.tree.flatten(self._empty)
        self.cache = [jnp.zeros((sizes.slots, *x.shape), x.dtype) for x in leaves]

    def leaves_of(self, bank: hki.AdapterBank) -> list[jax.Array]:
        """Returns the arrays of a bank; all banks of one `Programs` have one structure."""
        leaves, structure = jax.tree.flatten(bank)
        if self._bank is not None and self._bank != structure:
            raise ValueError("bank: another structure than that of the bank before")
        self._bank = structure
        return leaves

    def prefill(
        self, bank: list[jax.Array], adapter: int, slot: int, prompt: list[int], how: Sampling
    ) -> int:
        """Reads a prompt into a slot, overwriting its contents, and returns the first token.

        Args:
          bank: its leaves.
          adapter: the prompt's slot in the bank.
          slot: the slot in the cache.
          prompt: 1 to `sizes.prompts[-1]` tokens.
          how: the sampling settings, as numbers.
        """
        padded = np.zeros(self.sizes.padded(len(prompt)), np.int32)
        padded[: len(prompt)] = prompt
        where = np.asarray([adapter, slot, len(prompt)], np.int32)
        token, self.cache = self._prefill(bank, self.cache, where, padded, how.as_arrays())
        return int(token)

    def decode(
        self, bank: list[jax.Array], adapters: list[int], tokens: list[int], how: Sampling
    ) -> list[int]:
        """Returns a token for each of the first slots; the lists' length is one of `sizes.widths`."""
        adapters, tokens = np.asarray(adapters, np.int32), np.asarray(tokens, np.int32)
        out, self.cache = self._decode(
            bank, self.cache, adapters, tokens, how.as_arrays(), width=len(tokens)
        )
        return np.asarray(out).tolist()

    def _prefill_of(self, bank, cache, where, prompt, how):
        adapter, slot, length = where
        params = jax.tree.unflatten(self._bank, bank).select(adapter)
        # A row of zeros, not the row of the slot: another request may have left NaN there, and a
        # weight of zero times NaN is NaN.
        logits, row = self._model.apply(params, self._empty, None, prompt[None])
        # The padding's keys come after the position: masked, and later overwritten.
        row = jax.tree.leaves(at_position(row, length))
        cache = [
            jax.lax.dynamic_update_index_in_dim(x, new, slot, 0)
            for x, new in zip(cache, row, strict=True)
        ]
        return choose(logits[0, length - 1], how), cache

    def _decode_of(self, bank, cache, adapters, tokens, how, width):
        bank = jax.tree.unflatten(self._bank, bank)
        front = jax.tree.unflatten(self._cache_structure, [x[:width] for x in cache])
        run = hki.with_bank(lambda params, *args: self._model.apply(params, args[0], None, args[1]))
        logits, front = run(bank, adapters, front, tokens[:, None, None])
        cache = [
            jax.lax.dynamic_update_slice_in_dim(x, new, 0, 0)
            for x, new in zip(cache, jax.tree.leaves(front), strict=True)
        ]
        # A loop, which evaluates only one branch of conditions, unlike `jax.vmap`.
        return jax.lax.map(lambda args: choose(*args), (logits[:, 0, -1], how)), cache


def at_position(state: Any, position: jax.Array) -> Any:
    """Returns the state of a Llama with a cache, at another position."""
    return {
        module: {name: position if name == "position" else x for name, x in values.items()}
        for module, values in state.items()
    }


def choose(logits: jax.Array, how: Sampling) -> jax.Array:
    """Returns the next token after logits `[vocabulary]`; `NOT_FINITE` if they are not finite."""
    highest = logits.max()
    # (On a CPU, XLA's maximum over many numbers drops NaN.)
    finite = jnp.isfinite(highest) & ~jnp.isnan(logits).any()

    def drawn() -> jax.Array:
        # Smaller temperatures are zero for XLA, and 0 / 0 is NaN.
        least = jnp.finfo(jnp.float32).tiny
        scaled = (logits - highest) / jnp.maximum(how.temperature, least)
        scaled = jax.lax.cond(how.top_p < 1, lambda: nucleus(scaled, how.top_p), lambda: scaled)
        key = jax.random.fold_in(jax.random.key(how.seed), how.index)
        return jax.random.categorical(key, scaled).astype(jnp.int32)

    most_likely = lambda: logits.argmax().astype(jnp.int32)  # noqa: E731
    token = jax.lax.cond(how.temperature > 0, drawn, most_likely)
    return jnp.where(finite, token, NOT_FINITE)


def nucleus(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns the logits of the fewest tokens with probability `top_p`, and -inf for the others.

    At least one token remains, however small `top_p` is.
    """
    ordered = jnp.sort(logits, descending=True)
    probabilities = jax.nn.softmax(ordered)
    before = jnp.cumsum(probabilities) - probabilities
    least = jnp.min(jnp.where(before < top_p, ordered, ordered[0]))
    return jnp.where(logits >= least, logits, -jnp.inf)
