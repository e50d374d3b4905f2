"""Reads the bodies of requests, as OpenAI's clients send them, and refuses unsupported ones."""

import json
import math
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple


class BadRequest(Exception):
    """A body that cannot be answered; `param` is the wrong field."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class Question(NamedTuple):
    """The contents of a body.

    Attributes:
      model: the name of the base or of an adapter.
      prompt: a text, a list of tokens, or of messages (a chat).
      max_tokens: None for as many as fit, the default of chats.
      stop: texts that end the answer.
      include_usage: whether a stream ends with the token counts.
      return_token_ids: whether the answer's end has its tokens.
    """

    model: str
    prompt: Any
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool = False


class Field(NamedTuple):
    """A field of a body: its default, a description of its valid values, and a test for them."""

    default: Any
    expected: str
    fits: Callable[[Any], bool]


def is_number(x: Any) -> bool:
    return type(x) is int or (type(x) is float and math.isfinite(x))


def is_integer(x: Any) -> bool:
    return type(x) is int


def is_count(x: Any) -> bool:
    return is_integer(x) and 0 < x < 2**31


def is_text(x: Any) -> bool:
    return type(x) is str


def is_stop(x: Any) -> bool:
    texts = x if type(x) is list else [x]
    return len(texts) <= 4 and all(is_text(text) and 0 < len(text) <= 100 for text in texts)


def is_prompt(x: Any) -> bool:
    return is_text(x) or (type(x) is list and bool(x) and all(map(is_integer, x)))


def is_chat(x: Any) -> bool:
    return (
        type(x) is list
        and bool(x)
        and all(
            type(m) is dict
            and m.get("role") in ("system", "user", "assistant")
            and is_text(m.get("content"))
            for m in x
        )
    )


def is_stream_options(x: Any) -> bool:
    return (
        type(x) is dict and set(x) <= {"include_usage"} and all(type(y) is bool for y in x.values())
    )


COMMON = {
    "model": Field(None, "the name of a model", is_text),
    "max_tokens": Field(16, "a positive integer", is_count),
    "temperature": Field(1.0, "a number from 0 to 2", lambda x: is_number(x) and 0 <= x <= 2),
    "top_p": Field(1.0, "a number above 0, up to 1", lambda x: is_number(x) and 0 < x <= 1),
    "seed": Field(None, "an integer of 64 bits", lambda x: is_integer(x) and abs(x) < 2**64),
    "stop": Field([], "a text of 1 to 100 characters, or up to 4 of them", is_stop),
    "stream": Field(False, "true or false", lambda x: type(x) is bool),
    "stream_options": Field({}, 'an object like {"include_usage": true}', is_stream_options),
    "return_token_ids": Field(False, "true or false", lambda x: type(x) is bool),
    "user": Field("", "a text", is_text),
    # Fields that only support their defaults.
    "n": Field(1, "1, other values are not supported", lambda x: x == 1),
}
OF_COMPLETIONS = COMMON | {
    "prompt": Field(None, "a text, or a list of tokens; one prompt a request", is_prompt),
    "best_of": Field(1, "1, other values are not supported", lambda x: x == 1),
    "echo": Field(False, "false, true is not supported", lambda x: x is False),
}
OF_CHATS = COMMON | {
    "messages": Field(None, "a list of {role: system, user or assistant, content: text}", is_chat),
    "max_tokens": Field(None, "a positive integer", is_count),
    "max_completion_tokens": Field(None, "a positive integer", is_count),
}


def read(body: bytes, chat: bool) -> Question:
    """Reads a body.

    Raises:
      BadRequest: if it is not JSON, or has unknown, missing, or wrong fields.
    """
    data = parsed(body)
    fields, prompt = (OF_CHATS, "messages") if chat else (OF_COMPLETIONS, "prompt")
    data = {name: value for name, value in data.items() if value is not None}
    for name in data:
        if name not in fields:
            raise BadRequest(f"{shown(name)} is not supported; there are {', '.join(fields)}", name)
    for name in ("model", prompt):
        if name not in data:
            raise BadRequest(f"{name!r} is missing: expected {fields[name].expected}", name)
    for name, value in data.items():
        if not fields[name].fits(value):
            raise BadRequest(
                f"{name!r}: expected {fields[name].expected}, got {shown(value)}", name
            )

    def value_of(name: str) -> Any:
        return data.get(name, fields[name].default)

    stop, seed = value_of("stop"), value_of("seed")
    return Question(
        model=data["model"],
        prompt=data[prompt],
        max_tokens=data.get("max_completion_tokens", value_of("max_tokens")),
        temperature=float(value_of("temperature")),
        top_p=float(value_of("top_p")),
        seed=secrets.randbits(32) if seed is None else seed % 2**32,
        stop=tuple(stop if type(stop) is list else [stop]),
        stream=value_of("stream"),
        include_usage=value_of("stream_options").get("include_usage", False),
        return_token_ids=value_of("return_token_ids"),
    )


def parsed(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if type(data) is not dict:
        raise BadRequest(f"the body: expected a JSON object, got {shown(data)}")
    for name, value in data.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(error.object[error.start]):04X}"
            raise BadRequest(
                f"{shown(name)}: {half} is half of a surrogate pair, which is no character",
                name if name.isprintable() else None,
            ) from None
    return data


def shown(value: Any) -> str:
    """Returns a value for an error message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
