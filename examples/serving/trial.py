"""Tries the server: sends the same requests one at a time and all at once, over loopback."""

import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
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
    """An unanswered request."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one request, with times (seconds since it was sent)."""

    text: str
    first: float
    whole: float
    tokens: int


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


async def measure(port: int, models: Sequence[str], requests: int, tokens: int) -> str:
    """Sends the requests, to the models in turn, one at a time and then all at once.

    Returns:
      A table.

    Raises:
      TrialError: if an answer is an error.
    """
    bodies = [
        dict(
            model=models[i % len(models)],
            prompt=BEGINNINGS[i // len(models) % len(BEGINNINGS)],
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
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
    same = sum(a.text == b.text for a, b in zip(alone, together, strict=True))
    lines += [
        "",
        f"requests        {requests}, for {len(models)} models",
        f"same answers    {same} of {requests}",
        f"compiled        {compiled} programs since the server was ready",
    ]
    return "\n".join(lines)


def clocks() -> np.ndarray:
    """Returns the time, and the processor time of all threads, the client's included (seconds)."""
    return np.array([time.perf_counter(), time.process_time()])


def row(name: str, answers: Sequence[Answer], seconds: float, of_processor: float) -> str:
    """Returns throughput, and medians and maxima of the latencies."""

    def cell(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} ({max(values):.2f})"

    tokens = sum(a.tokens for a in answers)
    first, whole = (cell([getattr(a, name) for a in answers]) for name in ("first", "whole"))
    speed = f"{tokens / seconds:>10.1f}{1e3 * of_processor / tokens:>22.2f}"
    return f"{name:16}{speed}{first:>18}{whole:>18}"


async def ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> Answer:
    """One streamed completion."""
    start, first, pieces, usage = time.perf_counter(), None, [], None
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
            pieces += [choice["text"] for choice in data["choices"]]
            usage = data.get("usage", usage)
    return Answer(
        "".join(pieces), first or 0.0, time.perf_counter() - start, usage["completion_tokens"]
    )
