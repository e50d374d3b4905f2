"""Converts text and tokens: prompts, chats, and the text of an answer token by token."""

from collections.abc import Sequence
from typing import Any

import tokenizers

INCOMPLETE = "\ufffd"  # a decoder writes it for an incomplete character


class AnswerText:
    """The text of an answer, a piece for each token, up to the first of some stop texts.

    A piece comes when it is certain: its characters are complete, and cannot begin a
    stop text any more.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token, and returns the text that has become certain."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self.stopped = True
            return self._up_to(text, min(found))
        certain = len(text.rstrip(INCOMPLETE))
        return self._up_to(text, certain - self._begun(text[:certain]))

    def end(self) -> str:
        """Returns the remaining text after the last token."""
        text = "" if self.stopped else self._tokenizer.decode(self._tokens)
        return self._up_to(text, len(text))

    def _up_to(self, text: str, end: int) -> str:
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _begun(self, text: str) -> int:
        """Returns how many of the last characters may begin a stop text."""
        lengths = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(lengths, default=0)


class ChatTemplate:
    """SmolLM's template: messages in `<|im_start|>role` and `<|im_end|>`, then the assistant's turn.

    Contents cannot end a message: special tokens in them are encoded as ordinary text.
    """

    START, END = "<|im_start|>", "<|im_end|>"
    SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        """
        Raises:
          ValueError: if the tokenizer does not have the template's special tokens.
        """
        start, end = tokenizer.token_to_id(self.START), tokenizer.token_to_id(self.END)
        if start is None or end is None:
            raise ValueError(f"the tokenizer has no {self.START} and {self.END}")
        self.start, self.end = start, end
        self._plain = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True

    def tokens(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Returns the prompt for messages, each with a `role` and a `content`."""
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.SYSTEM}, *messages]
        encode = lambda text: self._plain.encode(text).ids  # noqa: E731
        out = []
        for message in messages:
            out += [self.start, *encode(f"{message['role']}\n{message['content']}"), self.end]
            out += encode("\n")
        return [*out, self.start, *encode("assistant\n")]
