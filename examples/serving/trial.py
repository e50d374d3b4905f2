"""Tries the server: sends the same requests one at a time and all at once, over loopback."""

import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import jax
import numpy as np

import haiku_implicit as hki

BEGINNINGS = (
    "The sea is",
    "A king of",
    "My friend said that",
    "In winter the",
    "No one knows why",
    "She went to the",
)


class TrialError(Exception):
    """An unanswered request, or a wrong answer."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one request, with times (seconds since it was sent)."""

    tokens: list[int]
    first: float
    whole: float


def random_adapter(params: Any, seed: int, *, rank: int, targets: str) -> hki.AdapterParts:
    """Returns an adapter that changes the base's answers."""
    adapter = hki.get_adapter(
        hki.add_lora(params, seed, rank=rank, alpha=2.0 * rank, targets=targets)
    )
    rng = np.random.default_rng(seed)
    noise = lambda x: (0.02 * rng.standard_normal(x.shape)).astype(x.dtype)  # noqa: E731
    weights = {
        path: w._replace(b=jax.numpy.asarray(noise(w.b))) for path, w in adapter.weights.items()
    }
    return dataclasses.replace(adapter, weights=weights)


# Of a model, a prompt, the tokens after it, and two more tokens: how far apart the logits of these two
# are, and by how much rounding changes logits there.
Gap = Callable[[str, str, list[int], tuple[int, int]], tuple[float, float]]


def gap_without_server(
    checkpoint: Any, adapters: dict[str, hki.AdapterParts], model: Any, empty: Any, length: int
) -> Gap:
    """Returns a function that asks the model, which reads all tokens at once.

    It asks again with scales of norms that differ by up to a millionth, as sums do that are computed in
    another order: low-bit codes of a cache or of activations that change with it change more.

    Args:
      checkpoint: the model's parameters and tokenizer.
      adapters: by name.
      model, empty: the model with a cache, and its state before the first token.
      length: the cache's positions.
    """

    @jax.jit
    def logits_of(params: Any, tokens: jax.Array, count: int, factor: float) -> jax.Array:
        params = jax.tree.map(lambda x: x * factor if x.ndim == 1 else x, params)
        return model.apply(params, empty, None, tokens[None], count - 1)[0][0, 0]

    def gap(
        name: str, prompt: str, answer: list[int], pair: tuple[int, int]
    ) -> tuple[float, float]:
        params = hki.set_adapter(checkpoint.params, adapters[name])
        tokens = [*checkpoint.tokenizer.encode(prompt).ids, *answer]
        padded = np.zeros(length, np.int32)
        padded[: len(tokens)] = tokens
        one, *others = (
            np.asarray(logits_of(params, padded, len(tokens), np.float32(1 + n * 2.0**-21)))
            for n in (0, 1, 2, -1, -2)
        )
        return abs(one[pair[0]] - one[pair[1]]), np.abs(one - others).max()

    return gap


async def measure(port: int, models: Sequence[str], requests: int, tokens: int, gap: Gap) -> str:
    """Sends the requests, to the models in turn, one at a time and then all at once.

    Returns:
      A table.

    Raises:
      TrialError: if an answer is an error, or differs by more than rounding.
    """
    bodies = [
        dict(
            model=models[i % len(models)],
            prompt=BEGINNINGS[i // len(models) % len(BEGINNINGS)],
            max_tokens=tokens,
            temperature=0,
            stream=True,
            return_token_ids=True,
        )
        for i in range(requests)
    ]
    # One connection for each request; the client's default is 100.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as session:
        start = clocks()
        alone = [await ask(session, body) for body in bodies]
        between = clocks()
        together = await asyncio.gather(*(ask(session, body) for body in bodies))
        end = clocks()
        async with session.get("/metrics") as response:
            compiled = next(
                line.split()[1]
                for line in (await response.text()).splitlines()
                if line.startswith("serve_compilations_total ")
            )
    header = f"{'':16}{'tokens/s':>10}{'processor, ms/token':>22}"
    lines = [f"{header}{'first token, s':>18}{'whole answer, s':>18}"]
    lines += [
        row("one at a time", alone, *(between - start)),
        row("all at once", together, *(end - between)),
    ]
    lines += [
        "",
        f"requests        {requests}, for {len(models)} models",
        f"same answers    {compared(bodies, alone, together, gap)}",
        f"compiled        {compiled} programs since the server was ready",
    ]
    return "\n".join(lines)


def compared(
    bodies: Sequence[dict[str, Any]], alone: Sequence[Answer], together: Sequence[Answer], gap: Gap
) -> str:
    """Counts equal answers, and those that part where two tokens are almost equally likely.

    Raises:
      TrialError: if two answers part elsewhere.
    """
    near = []
    for body, a, b in zip(bodies, alone, together, strict=True):
        if a.tokens == b.tokens:
            continue
        both = [*zip(a.tokens, b.tokens, strict=True)]
        at = next(i for i, (one, other) in enumerate(both) if one != other)
        near.append(gap(body["model"], body["prompt"], a.tokens[:at], both[at]))
        if near[-1][0] > near[-1][1]:
            raise TrialError(
                f"{body['model']}, {body['prompt']!r}: token {at} is {both[at][0]} alone and "
                f"{both[at][1]} together; their logits are {near[-1][0]:.2g} apart, and rounding "
                f"changes logits by {near[-1][1]:.2g}"
            )
    same = f"{len(alone) - len(near)} of {len(alone)}"
    if not near:
        return same
    apart, changed = (f"{max(x):.2g}" for x in zip(*near, strict=True))
    return (
        f"{same}; {len(near)} part where two logits are up to {apart} apart, and rounding changes "
        f"logits by up to {changed}"
    )


def clocks() -> np.ndarray:
    """Returns the time, and the processor time of all threads, the client's included (seconds)."""
    return np.array([time.perf_counter(), time.process_time()])


def row(name: str, answers: Sequence[Answer], seconds: float, of_processor: float) -> str:
    """Returns throughput, and medians and maxima of the latencies."""

    def cell(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} ({max(values):.2f})"

    tokens = sum(len(a.tokens) for a in answers)
    first, whole = (cell([getattr(a, name) for a in answers]) for name in ("first", "whole"))
    speed = f"{tokens / seconds:>10.1f}{1e3 * of_processor / tokens:>22.2f}"
    return f"{name:16}{speed}{first:>18}{whole:>18}"


async def ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> Answer:
    """One streamed completion."""
    start, first, tokens = time.perf_counter(), None, []
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise TrialError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            text = line.decode().strip().removeprefix("data: ")
            if not text or text == "[DONE]":
                continue
            data = json.loads(text)
            if "error" in data:
                raise TrialError(data["error"]["message"])
            first = first or time.perf_counter() - start
            tokens = data["choices"][0].get("token_ids", tokens)
    return Answer(tokens, first or 0.0, time.perf_counter() - start)
