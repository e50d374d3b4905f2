"""A server without a model: nothing is compiled for it."""

import tokenizers

from serving.programs import Sizes
from serving.text import ChatTemplate


class Counting:
    """In place of compiled programs: the tokens after a prompt go on from its last one."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes

    def leaves_of(self, bank):
        return []

    def prefill(self, bank, adapter, slot, prompt, how):
        return prompt[-1] + 1

    def decode(self, bank, adapters, tokens, how):
        return [token + 1 for token in tokens]


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
