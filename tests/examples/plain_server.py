"""A server without a model: nothing is compiled for it."""

import tokenizers

from serving.programs import Sizes
from serving.text import ChatTemplate


class Counting:
    """In place of compiled programs: the tokens after a prompt go on from its last one.

    Attributes:
      calls: the pieces of each reading (its tokens, if it is one), and the shape (steps, rows) of each decoding.
    """

    empty = ()

    def __init__(self, sizes: Sizes):
        self.sizes, self.calls = sizes, []

    def leaves_of(self, bank):
        return []

    def read(self, bank, adapters, states, pieces, size, how):
        assert size in self.sizes.pieces[: 1 if len(pieces) > 1 else None]
        assert len(adapters) == len(states) == len(pieces) <= self.sizes.readers
        assert all(0 < len(piece) <= size for piece in pieces)
        self.calls += [pieces[0] if len(pieces) == 1 else pieces]
        states = [(*state, *piece) for state, piece in zip(states, pieces, strict=True)]
        return [piece[-1] + 1 for piece in pieces], states

    def join(self, bank, adapter, state, slot, count):
        assert 0 <= slot < self.sizes.slots and count == len(state)

    def decode(self, bank, tokens, how, steps, count):
        assert 1 <= steps <= self.sizes.burst and steps < count <= self.sizes.length
        self.calls.append((steps, len(tokens)))
        return [[token + i for token in tokens] for i in range(1, steps + 1)]


def byte_tokenizer():
    """A token for each byte, and those of chats."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([ChatTemplate.START, ChatTemplate.END])
    return made
