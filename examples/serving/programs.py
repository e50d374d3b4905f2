"""The server's compiled programs: reading pieces of prompts, and decoding for all running requests.

Each running request has a row: the factors of its adapter, and its state, which is a whole Haiku state
for a batch of one with its own position. The model knows nothing of this: `jax.vmap` runs it.
"""

import dataclasses
import itertools
from collections.abc import Callable
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
      lengths: positions in the cache of each row, of which a call that decodes takes the fewest that it
        needs; the last one is the most for a prompt and its answer.
      pieces: lengths of the pieces in which prompts are read; the last piece of a prompt is padded.
      widths: numbers of rows that a call decodes; the last one is the number of slots.
      burst: how many tokens a call decodes, for all requests together, if they are fewer than that.
      readers: how many prompts a call may read, a piece of the first length of each.
    """

    lengths: tuple[int, ...]
    pieces: tuple[int, ...]
    widths: tuple[int, ...]
    burst: int = 8
    readers: int = 8

    def __post_init__(self):
        for name in ("lengths", "pieces", "widths"):
            values = getattr(self, name)
            if not values or values[0] < 1 or list(values) != sorted(set(values)):
                raise ValueError(f"{name}: expected increasing positive numbers, got {values}")
        if any(size % self.pieces[0] for size in (*self.pieces, self.length)):
            # Otherwise the padding of a last piece may not fit the cache.
            raise ValueError(
                f"pieces: expected that the first one divides the others and length={self.length}, got "
                f"{self.pieces}"
            )

    @property
    def length(self) -> int:
        """The positions that a request has, for its prompt and its answer."""
        return self.lengths[-1]

    @property
    def slots(self) -> int:
        """The number of requests that are decoded together."""
        return self.widths[-1]

    def piece(self, start: int, end: int) -> int:
        """Returns the length of the next piece of a prompt, from token `start` of its `end` tokens."""
        fitting = [size for size in self.pieces if start + size <= self.length]
        return next((size for size in fitting if size >= end - start), fitting[-1])


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

    def padded(self, rows: int) -> "Sampling":
        """Returns arrays, from lists, with rows of zeros after them."""
        return Sampling(*([*x, *[0] * rows] for x in self)).as_arrays()

    def as_arrays(self) -> "Sampling":
        dtypes = (np.float32, np.float32, np.uint32, np.int32)
        return Sampling(*(np.asarray(x, dtype) for x, dtype in zip(self, dtypes, strict=True)))


class Leaves(NamedTuple):
    """The arrays of a bank: JAX passes them on faster than a tree of Python objects.

    Each program gets only what it needs, because each array takes some microseconds of a call.

    Attributes:
      number: another one for each bank.
    """

    params: list[jax.Array]
    slots: list[jax.Array]
    number: int


class Programs:
    """The programs for a model and a bank, and the rows of the running requests."""

    def __init__(self, model: Callable[[int], Any], empty: Callable[[Any], Any], sizes: Sizes):
        """
        Args:
          model: makes a model with a cache of so many positions: `apply(params, state, None,
            tokens [1, time], only)` gives the logits after the token with the index `only`, and the
            next state.
          empty: makes the state of a model before the first token.
          sizes: the shapes of the programs.
        """
        self.sizes = sizes
        self._models = {length: model(length) for length in sizes.lengths}
        states = {length: empty(model) for length, model in self._models.items()}
        self.empty, self._state = jax.tree.flatten(states[sizes.length])
        self._shapes = {n: [x.shape for x in jax.tree.leaves(state)] for n, state in states.items()}
        self._bank: Any = None
        self._factors: list[jax.Array] = []  # of each row, and the states
        self._states: list[jax.Array] = []
        self._room = sizes.widths[0], sizes.lengths[0]
        self._read = jax.jit(self._read_of)
        self._numbers = itertools.count()
        self._chosen: dict[int, tuple[int, int]] = {}  # a row's factors: of which bank and adapter
        self._choose = jax.jit(self._choose_of, donate_argnums=1)
        self._join = jax.jit(self._join_of, donate_argnums=0)
        self._decode = jax.jit(self._decode_of, static_argnames="length", donate_argnums=2)
        self._resize = jax.jit(resized, static_argnames="shape")

    def leaves_of(self, bank: hki.AdapterBank) -> Leaves:
        """Returns the arrays of a bank; all banks of one `Programs` have one structure."""
        structure = jax.tree.structure(bank.params), jax.tree.structure(bank.slots)
        if self._bank is None:
            width, length = self._room
            one = jax.tree.leaves(jax.eval_shape(bank.factors, 0))
            self._factors = [jnp.zeros((width, *x.shape), x.dtype) for x in one]
            shapes = zip(self._shapes[length], self.empty, strict=True)
            self._states = [jnp.zeros((width, *shape), x.dtype) for shape, x in shapes]
        elif self._bank != structure:
            raise ValueError("bank: another structure than that of the bank before")
        self._bank = structure
        leaves = map(jax.tree.leaves, (bank.params, bank.slots))
        return Leaves(*leaves, number=next(self._numbers))

    def read(
        self,
        bank: Leaves,
        adapters: list[int],
        states: list[list[jax.Array]],
        pieces: list[list[int]],
        size: int,
        how: Sampling,
    ) -> tuple[list[int], list[list[jax.Array]]]:
        """Reads a piece of each prompt, and returns the tokens after them and the next states.

        Args:
          bank: the leaves of a bank.
          adapters: the prompts' slots in the bank.
          states: the requests' states, `empty` before the first piece.
          pieces: the tokens of one prompt, or of up to `sizes.readers`.
          size: the length that they are padded to: one of `sizes.pieces`, the first one for many.
          how: the sampling settings, lists as long.
        """
        padding = (1 if len(pieces) == 1 else self.sizes.readers) - len(pieces)
        tokens = np.zeros((len(pieces) + padding, size), np.int32)
        for row, piece in zip(tokens, pieces, strict=False):
            row[: len(piece)] = piece
        counts = [*map(len, pieces), *[1] * padding]
        where = np.asarray([[*adapters, *[0] * padding], counts], np.int32)
        states = [*states, *[self.empty] * padding]
        out, states = self._read(bank[:2], states, where, tokens, how.padded(padding))
        return np.asarray(out)[: len(pieces)].tolist(), states[: len(pieces)]

    def join(
        self, bank: Leaves, adapter: int, state: list[jax.Array], slot: int, count: int
    ) -> None:
        """Writes a request's state and its adapter's factors into a row, whatever it held before.

        Args:
          bank, adapter, state: as for `read`.
          slot: the row.
          count: how many positions of the state are in use.
        """
        width, length = self._room
        self.make_room(max(width, slot + 1), max(length, count))
        if self._chosen.get(slot) != (bank.number, adapter):
            where = np.asarray([adapter, slot], np.int32)
            self._factors = self._choose(bank.slots, self._factors, where)
            self._chosen[slot] = bank.number, adapter
        self._states = self._join(self._states, state, np.int32(slot))

    def decode(
        self, bank: Leaves, tokens: list[int], how: Sampling, steps: int, count: int
    ) -> list[list[int]]:
        """Returns the next tokens of the first rows, a list for each step.

        Args:
          bank: the leaves of a bank.
          tokens: the last token of each row; as many as the rows that are decoded.
          how: the sampling settings, lists as long.
          steps: 1 to `sizes.burst`.
          count: the most positions of a row that are in use after these steps.
        """
        self.make_room(len(tokens), count)
        width, length = self._room
        padding = width - len(tokens)
        last = np.asarray([*tokens, *[0] * padding], np.int32)
        out, self._states = self._decode(
            bank.params,
            self._factors,
            self._states,
            last,
            how.padded(padding),
            np.int32(steps),
            length=length,
        )
        return np.asarray(out)[:steps].tolist()

    def make_room(self, rows: int, positions: int) -> None:
        """Makes the rows and their positions the fewest for which there are programs.

        It goes from one size to the next, so that there are few programs for this, too.
        """
        sizes = self.sizes.widths, self.sizes.lengths
        for axis, least in enumerate((rows, positions)):
            wanted = next(i for i, size in enumerate(sizes[axis]) if size >= least)
            while (now := sizes[axis].index(self._room[axis])) != wanted:
                room = [*self._room]
                room[axis] = sizes[axis][now + (1 if wanted > now else -1)]
                self._room = width, length = tuple(room)
                self._chosen = {row: x for row, x in self._chosen.items() if row < width}
                self._factors = [self._fit(x, (width, *x.shape[1:])) for x in self._factors]
                shapes = zip(self._states, self._shapes[length], strict=True)
                self._states = [self._fit(x, (width, *shape)) for x, shape in shapes]

    def _fit(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return x if x.shape == shape else self._resize(x, shape=shape)

    def _read_of(self, leaves, states, where, tokens, how):
        bank = hki.AdapterBank(*map(jax.tree.unflatten, self._bank, leaves))

        def one(adapter, count, state, tokens):
            state = jax.tree.unflatten(self._state, state)
            logits, after = self._models[self.sizes.length].apply(
                bank.select(adapter), state, None, tokens[None], count - 1
            )
            # The padding's keys come after the position: masked, and later overwritten.
            return logits[0, 0], jax.tree.leaves(at_position(after, state, count))

        stacked = [jnp.stack(x) for x in zip(*states, strict=True)]
        logits, after = jax.vmap(one)(*where, stacked, tokens)
        return choose_each(logits, how), [[x[i] for x in after] for i in range(len(states))]

    def _choose_of(self, slots, factors, where):
        adapter, slot = where
        bank = hki.AdapterBank({}, jax.tree.unflatten(self._bank[1], slots))
        return self._join_of(factors, jax.tree.leaves(bank.factors(adapter)), slot)

    def _join_of(self, rows, row, slot):
        return [
            jax.lax.dynamic_update_index_in_dim(x, first_of(new, x.shape[1:]), slot, 0)
            for x, new in zip(rows, row, strict=True)
        ]

    def _decode_of(self, params, factors, states, tokens, how, steps, length):
        bank = hki.AdapterBank(jax.tree.unflatten(self._bank[0], params), {})
        factors = jax.tree.unflatten(self._bank[1], factors)

        def one(factors, state, token):
            logits, state = self._models[length].apply(
                bank.with_factors(factors), state, None, token[None, None]
            )
            return logits[0, 0], state

        def step(i, carry):
            state, tokens, out = carry
            logits, state = jax.vmap(one)(factors, state, tokens)
            tokens = choose_each(logits, how._replace(index=how.index + i))
            return state, tokens, out.at[i].set(tokens)

        state = jax.tree.unflatten(self._state, states)
        out = jnp.zeros((self.sizes.burst, len(tokens)), jnp.int32)
        state, _, out = jax.lax.fori_loop(0, steps, step, (state, tokens, out))
        return out, jax.tree.leaves(state)


def resized(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the first elements along each axis, with zeros after them if there are fewer."""
    x = first_of(x, shape)
    return jnp.pad(x, [(0, n - have) for n, have in zip(shape, x.shape, strict=True)])


def first_of(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x[tuple(map(slice, shape))]


def at_position(state: Any, before: Any, count: jax.Array) -> Any:
    """Returns the state of a Llama with a cache, at `count` positions after an earlier state."""
    return {
        module: {
            name: before[module][name] + count if name == "position" else x
            for name, x in values.items()
        }
        for module, values in state.items()
    }


def choose_each(logits: jax.Array, how: Sampling) -> jax.Array:
    """Returns the next token of each row."""
    # A loop, which evaluates only one branch of conditions, unlike `jax.vmap`.
    return jax.lax.map(lambda args: choose(*args), (logits, how))


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

    def most_likely() -> jax.Array:  # on a CPU, seven times as fast as XLA's argmax
        places = jnp.arange(logits.size, dtype=jnp.int32)
        return jnp.where(logits == highest, places, logits.size).min()

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
