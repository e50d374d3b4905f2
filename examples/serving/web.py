"""The server's HTTP side: OpenAI's completions and chats, adapters, health and metrics.

The event loop never waits for the model: the engine's thread passes tokens on by
`call_soon_threadsafe`, and other slow work runs in a thread.
"""

import asyncio
import contextlib
import json
import pathlib
import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import jax
import numpy as np
import tokenizers
from absl import logging
from aiohttp import web

import haiku_implicit as hki
from serving import engine as engines
from serving import questions
from serving.bodies import TooLarge, pieces_of
from serving.compilations import Compilations
from serving.engine import Engine, Finished, Request
from serving.programs import Sampling
from serving.text import AnswerText, ChatTemplate

MOST_JSON = 1 << 20  # bytes of a body
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The engine's refusals as status and code, for HTTP and OpenAI's clients.
REFUSALS = {
    engines.TooLong: (400, "context_length_exceeded"),
    engines.UnknownModel: (404, "model_not_found"),
    engines.Taken: (409, "conflict"),
    engines.QueueFull: (429, "queue_full"),
    engines.Stopping: (503, "stopping"),
}


class Server:
    """The handlers, around an engine and a tokenizer."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: tokenizers.Tokenizer,
        stop: frozenset[int],
        most_upload: int,
    ):
        """
        Args:
          engine: a running engine.
          tokenizer: the model's tokenizer.
          stop: tokens that end each answer.
          most_upload: the largest file of an adapter, in bytes.
        """
        self.engine, self.tokenizer = engine, tokenizer
        self.stop, self.most_upload = stop, most_upload
        try:
            self.chat: ChatTemplate | None = ChatTemplate(tokenizer)
        except ValueError:
            self.chat = None
        self.compilations = Compilations().__enter__()
        self.statuses: dict[int, int] = {}
        self.started = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.errors])
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chats)
        app.router.add_get("/v1/models", self.models)
        app.router.add_put("/v1/adapters/{name}", self.upload)
        app.router.add_delete("/v1/adapters/{name}", self.delete)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        return app

    @web.middleware
    async def errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turns what handlers raise into OpenAI's errors, and counts the statuses."""
        try:
            response = await handler(request)
        except questions.BadRequest as e:
            response = error(400, None, str(e), e.param)
        except engines.Refused as e:
            response = error(*REFUSALS[type(e)], str(e))
        except TooLarge as e:
            response = error(413, "too_large", str(e))
        except web.HTTPException as e:
            response = error(e.status, None, f"{request.method} {request.path}: {e.reason}")
        except Exception:
            logging.exception("%s %s", request.method, request.path)
            response = error(500, None, "the server failed; its log says why")
        self.statuses[response.status] = self.statuses.get(response.status, 0) + 1
        return response

    # --- completions ---

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, chat=False)

    async def chats(self, request: web.Request) -> web.StreamResponse:
        if self.chat is None:
            raise questions.BadRequest("this model's tokenizer has no template for chats")
        return await self.answer(request, chat=True)

    async def answer(self, http: web.Request, chat: bool) -> web.StreamResponse:
        question = questions.read(b"".join([x async for x in pieces_of(http, MOST_JSON)]), chat)
        prompt = await asyncio.to_thread(self.tokens_of, question.prompt, chat)
        room = self.engine.programs.sizes.length - len(prompt)
        loop, events = asyncio.get_running_loop(), asyncio.Queue()

        def send(event: int | Finished) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        request = Request(
            prompt=prompt,
            send=send,
            model=question.model,
            max_tokens=room if question.max_tokens is None else question.max_tokens,
            stop=self.stop,
            how=Sampling(question.temperature, question.top_p, question.seed),
        )
        self.engine.submit(request)
        reply = Reply(question, request, chat)
        try:
            pieces = self.pieces(request, events, question.stop, reply)
            if question.stream:
                return await self.stream(http, pieces, reply)
            text = "".join([piece async for piece in pieces])
            if reply.error:
                return error(*reply.error)
            return web.json_response(reply.whole(text))
        finally:  # also if the client has gone: the handler is cancelled then
            self.engine.cancel(request)

    def tokens_of(self, prompt: Any, chat: bool) -> list[int]:
        if chat:
            return self.chat.tokens(prompt)
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt).ids
        size = self.tokenizer.get_vocab_size()
        for token in prompt:
            if not 0 <= token < size:
                message = (
                    f"'prompt': expected tokens from 0 to {size - 1}, got {questions.shown(token)}"
                )
                raise questions.BadRequest(message, "prompt")
        return prompt

    async def pieces(
        self, request: Request, events: asyncio.Queue, stop: tuple[str, ...], reply: "Reply"
    ) -> AsyncIterator[str]:
        """The texts of an answer as they come; in the end `reply` knows why it ended."""
        answer = AnswerText(self.tokenizer, stop)
        while True:
            event = await events.get()
            if isinstance(event, Finished):
                reply.reason = event.reason
                if event.reason == "error":
                    reply.error = 500, "failed", event.message
                if event.reason == "cancelled":  # by the engine
                    reply.error = 503, "stopping", "the server stopped before the answer was whole"
                yield answer.end()
                return
            reply.tokens += 1
            yield answer.push(event)
            if answer.stopped:
                reply.reason = "stop"
                self.engine.cancel(request)
                return

    async def stream(
        self, http: web.Request, pieces: AsyncIterator[str], reply: "Reply"
    ) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        response.headers["Cache-Control"] = "no-cache"
        await response.prepare(http)

        async def write(data: Any) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            await response.write(f"data: {text}\n\n".encode())

        with contextlib.suppress(ConnectionResetError):  # nobody is left to answer
            async for piece in pieces:
                if piece:
                    await write(reply.chunk(piece))
            if reply.error:
                await write(error_body(*reply.error))
            else:
                await write(reply.chunk("", reply.reason))
                if reply.question.include_usage:
                    await write(reply.chunk_of_usage())
            await write("[DONE]")
            await response.write_eof()
        return response

    # --- models and adapters ---

    async def models(self, _: web.Request) -> web.Response:
        about = dict(object="model", created=self.started, owned_by="haiku_implicit")
        base, *adapters = self.engine.models
        data = [{"id": base, **about}, *({"id": x, **about, "parent": base} for x in adapters)]
        return web.json_response({"object": "list", "data": data})

    async def upload(self, http: web.Request) -> web.Response:
        """Adds an adapter: the body is a file that `hki.save` wrote."""
        name = http.match_info["name"]
        if not NAME.fullmatch(name):
            raise questions.BadRequest(
                f"the name {name!r}: expected up to 64 letters, digits, dots, dashes and underscores"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "adapter.safetensors"
            with path.open("wb") as file:
                async for piece in pieces_of(http, self.most_upload):
                    file.write(piece)
            try:
                await asyncio.to_thread(lambda: self.engine.put_adapter(name, read_adapter(path)))
            except (ValueError, TypeError) as e:
                message = str(e).replace(f"{path}: ", "")
                raise questions.BadRequest(f"the adapter {name!r}: {message}") from e
        return web.json_response({"id": name, "object": "model"})

    async def delete(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        await asyncio.to_thread(self.engine.remove_adapter, name)
        return web.json_response({"id": name, "object": "model", "deleted": True})

    # --- for those who operate it ---

    async def health(self, _: web.Request) -> web.Response:
        if self.engine.failed:
            return error(500, "failed", self.engine.failed)
        if not self.engine.accepts:
            return error(503, "stopping", "the server is stopping")
        return web.json_response({"status": "ok"})

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus' text format."""
        counters, sizes = self.engine.counters, self.engine.programs.sizes
        finished = dict(counters.finished)
        values: dict[str, tuple[str, dict[str, Any]]] = {
            "responses_total": (
                "counter",
                {f'{{status="{k}"}}': v for k, v in self.statuses.items()},
            ),
            "requests_total": ("counter", {f'{{reason="{k}"}}': v for k, v in finished.items()}),
            "prompt_tokens_total": ("counter", {"": counters.prompt_tokens}),
            "tokens_total": ("counter", {"": counters.tokens}),
            "steps_total": ("counter", {"": counters.steps}),
            "compilations_total": ("counter", {"": self.compilations.count}),
            "request_seconds": (
                "summary",
                {"_sum": counters.request_seconds, "_count": sum(finished.values())},
            ),
            "first_token_seconds": (
                "summary",
                {"_sum": counters.first_token_seconds, "_count": counters.first_tokens},
            ),
            "queue": ("gauge", {"": self.engine.waiting}),
            "slots_in_use": ("gauge", {"": self.engine.running}),
            "slots": ("gauge", {"": sizes.slots}),
            "adapters": ("gauge", {"": len(self.engine.models) - 1}),
        }
        lines = []
        for name, (kind, numbers) in values.items():
            lines.append(f"# TYPE serve_{name} {kind}")
            lines += [f"serve_{name}{label} {number}" for label, number in numbers.items()]
        return web.Response(text="\n".join([*lines, ""]))


class Reply:
    """An answer in OpenAI's form, whole or in chunks."""

    def __init__(self, question: questions.Question, request: Request, chat: bool):
        self.question, self.request, self._chat = question, request, chat
        self.tokens, self.reason = 0, ""
        self.error: tuple[int, str, str] | None = None  # status, code and message
        kind = "chat.completion" if chat else "text_completion"
        prefix = "chatcmpl" if chat else "cmpl"
        self._about = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if chat and question.stream else kind,
            "created": int(time.time()),
            "model": question.model,
        }

    @property
    def usage(self) -> dict[str, int]:
        prompt = len(self.request.prompt)
        counts = dict(prompt_tokens=prompt, completion_tokens=self.tokens)
        return counts | dict(total_tokens=prompt + self.tokens)

    def whole(self, text: str) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {**self._about, "choices": [self._choice(said, self.reason)], "usage": self.usage}

    def chunk(self, text: str, reason: str | None = None) -> dict[str, Any]:
        said = {"delta": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {**self._about, "choices": [self._choice(said, reason)]}

    def chunk_of_usage(self) -> dict[str, Any]:
        return {**self._about, "choices": [], "usage": self.usage}

    def _choice(self, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        if reason and self.question.return_token_ids:
            said = said | {"token_ids": self.request.tokens[: self.tokens]}
        return {"index": 0, **said, "finish_reason": reason, "logprobs": None}


def read_adapter(path: pathlib.Path) -> hki.AdapterParts:
    """Reads an adapter from an uploaded file.

    Raises:
      ValueError: if the file is damaged or holds something else.
    """
    adapter = hki.load(path, numpy=True)  # JAX would compile a copy for each shape
    if not isinstance(adapter, hki.AdapterParts):
        raise ValueError(
            f"the file holds a {type(adapter).__name__}, expected what hki.save wrote of "
            "hki.get_adapter(params)"
        )
    if not adapter.weights:
        raise ValueError("it has no weights with LoRA, and would be the base alone")
    if not adapter.bases:
        raise ValueError(
            "it does not say for which base it was made; take it out with hki.get_adapter of the base "
            "with the adapter"
        )
    for leaf in jax.tree.leaves(adapter):
        if not np.isfinite(np.asarray(leaf)).all():
            raise ValueError("it has numbers that are not finite")
    return adapter


def error(status: int, code: str | None, message: str, param: str | None = None) -> web.Response:
    """Returns an error in the form of OpenAI's API."""
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    body = error_body(status, code, message, param)
    return web.json_response(body, status=status, headers=headers)


def error_body(
    status: int, code: str | None, message: str, param: str | None = None
) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@contextlib.asynccontextmanager
async def listening(server: Server, host: str, port: int, grace: float) -> AsyncIterator[int]:
    """Listens, and in the end finishes the requests that it has; new ones are answered with 503 then.

    Args:
      server: with an engine that runs.
      host: the address to listen at.
      port: 0 for any free one.
      grace: how many seconds the last requests have.

    Yields:
      The port.
    """
    runner = web.AppRunner(
        server.app(),
        handler_cancellation=True,
        shutdown_timeout=5.0,
        access_log=None,
        auto_decompress=False,  # by `pieces_of`
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield runner.addresses[0][1]
    finally:
        if not await asyncio.to_thread(server.engine.stop, grace):
            logging.warning("requests that took longer than %g s were cut off", grace)
        await runner.cleanup()
