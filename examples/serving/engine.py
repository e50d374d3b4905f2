"""Continuous batching: requests take slots as they arrive, and leave them when they finish.

One thread runs the model. In each turn it reads pieces of the prompts of new requests, and decodes one
or more tokens for all whose prompt is read. The thread calls a request's function with each token.
"""

import collections
import dataclasses
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

import haiku_implicit as hki
from serving.programs import NOT_FINITE, Programs, Sampling


class Refused(Exception):
    """A request or an adapter that the engine refuses; the message has the reason and the way out."""


class TooLong(Refused):
    """More tokens than fit."""


class QueueFull(Refused):
    """The queue of requests is full."""


class UnknownModel(Refused):
    """A name that is neither the base's nor an adapter's."""


class Taken(Refused):
    """An adapter's name is taken, the adapter is in use, or the bank is full."""


class Stopping(Refused):
    """The engine stops, or has failed."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """The end of an answer.

    Attributes:
      reason: `"stop"` for a token that ends the answer, `"length"` for `max_tokens`, `"cancelled"`, or
        `"error"`.
      message: the error's text.
    """

    reason: str
    message: str = ""


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, with the settings of its answer.

    Attributes:
      prompt: its tokens.
      send: called by the engine's thread with each token of the answer, and finally with a `Finished`;
        it must return at once.
      model: the name of an adapter, or of the base.
      max_tokens: the largest number of tokens in the answer.
      stop: tokens that end the answer, and are not part of it.
      how: temperature, top_p and seed.
    """

    prompt: list[int]
    send: Callable[[int | Finished], None]
    model: str
    max_tokens: int = 16
    stop: frozenset[int] = frozenset()
    how: Sampling = Sampling()
    # The engine's fields: the slot in the bank, the prompt's tokens that are read and the state after
    # them, the answer so far, and the times of events.
    adapter: int = 0
    read: int = 0
    state: Any = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    cancelled: bool = False
    finished: Finished | None = None
    submitted: float = 0.0


@dataclasses.dataclass
class Counters:
    """Counts of events since the start; seconds are sums over requests."""

    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    first_token_seconds: float = 0.0
    first_tokens: int = 0
    request_seconds: float = 0.0
    finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)


class Engine:
    """Runs requests for a base and its adapters.

    Example:
      engine = Engine(programs, bank, base="base", queue=64)
      engine.start()
      engine.submit(Request([1, 2, 3], print, "base"))
      engine.stop()
    """

    def __init__(
        self, programs: Programs, bank: hki.AdapterBank, *, base: str, queue: int, budget: int = 64
    ):
        """
        Args:
          programs: the compiled programs.
          bank: an empty bank around the base; its slot 0 stays empty and serves the base.
          base: the name of the base.
          queue: the number of requests that may wait for a slot.
          budget: about how many tokens of prompts, including padding, a turn reads while others
            wait for their next token.
        """
        self.programs, self.base, self.max_queue = programs, base, queue
        self.counters = Counters()
        self._bank, self._leaves, self._budget = bank, programs.leaves_of(bank), budget
        self._adapters = {base: 0}
        self._lock = threading.Condition()  # guards all fields that follow, and `_adapters`
        self._changing_bank = threading.Lock()
        self._queue: collections.deque[Request] = collections.deque()
        self._running: dict[int, Request] = {}  # by slot, also while their prompts are read
        self._reading: collections.deque[int] = collections.deque()  # the slots of the latter
        self._free = list(range(programs.sizes.slots))  # a heap
        self._stopping = False
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- what other threads call ---

    @property
    def models(self) -> list[str]:
        """Returns the names of the base and the adapters."""
        with self._lock:
            return list(self._adapters)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def accepts(self) -> bool:
        """Whether the engine takes requests."""
        return not self._stopping and self.failed is None

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Puts a request into the queue.

        Raises:
          Refused: a subclass of it, if the request cannot be served.
        """
        self._check_sizes(request)
        request.state = self.programs.empty
        with self._lock:
            if not self.accepts:
                raise Stopping(self.failed or "the server is stopping; ask another one")
            if request.model not in self._adapters:
                raise UnknownModel(
                    f"the model {request.model[:100]!r} does not exist; there are "
                    f"{', '.join(self._adapters)}"
                )
            if len(self._queue) >= self.max_queue:
                raise QueueFull(f"{self.max_queue} requests wait already; try again later")
            request.adapter = self._adapters[request.model]
            request.submitted = time.monotonic()
            self._queue.append(request)
            self._lock.notify_all()

    def _check_sizes(self, request: Request) -> None:
        sizes, count = self.programs.sizes, len(request.prompt)
        if not 1 <= count < sizes.length:
            raise TooLong(f"the prompt has {count} tokens, expected 1 to {sizes.length - 1}")
        if not 1 <= request.max_tokens <= sizes.length - count:
            raise TooLong(
                f"max_tokens is {request.max_tokens}, expected 1 to {sizes.length - count}: prompt "
                f"({count} tokens) and answer have {sizes.length} together"
            )

    def cancel(self, request: Request) -> None:
        """Ends a request, which frees its slot; a finished one stays unchanged."""
        with self._lock:
            request.cancelled = True
            if request in self._queue:
                self._queue.remove(request)
                self._finish(request, Finished("cancelled"))
            self._lock.notify_all()

    def put_adapter(self, name: str, adapter: hki.AdapterParts) -> None:
        """Adds an adapter while requests run; nothing is compiled.

        Raises:
          Taken: if the name exists, or the bank is full.
          ValueError: if the adapter does not fit the bank or was made for another base.
        """
        with self._changing_bank:  # requests use the old bank until the new one is complete
            with self._lock:
                slot = self._slot_for(name)
            bank = self._bank.put(slot, adapter)
            leaves = jax.block_until_ready(self.programs.leaves_of(bank))
            with self._lock:
                self._bank, self._leaves = bank, leaves
                self._adapters[name] = slot

    def _slot_for(self, name: str) -> int:
        if name in self._adapters:
            raise Taken(f"the model {name!r} exists; delete it first, or choose another name")
        free = sorted(set(range(self._bank.capacity)) - set(self._adapters.values()))
        if not free:
            raise Taken(
                f"the bank has room for {self._bank.capacity - 1} adapters, and is full; delete one"
            )
        return free[0]

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter, which makes room for another one.

        Raises:
          UnknownModel: if there is none of this name.
          Taken: if requests use it, and for the base.
        """
        with self._changing_bank, self._lock:
            if name not in self._adapters:
                raise UnknownModel(f"the adapter {name!r} does not exist")
            if name == self.base:
                raise Taken(f"{name!r} is the base, which stays")
            if any(r.model == name for r in (*self._queue, *self._running.values())):
                raise Taken(f"requests use the adapter {name!r}; delete it when they are done")
            del self._adapters[name]  # the next adapter overwrites the slot

    def stop(self, timeout: float | None = None) -> bool:
        """Takes no more requests, and finishes the accepted ones; returns whether it did so in time."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if not self._thread.is_alive():
            return True
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return True
        with self._lock:
            for request in (*self._queue, *self._running.values()):
                request.cancelled = True
        self._thread.join()
        return False

    def warm_up(self, shown: Callable[[list[Any]], Any] = iter) -> None:
        """Compiles everything, before `start`.

        Args:
          shown: returns its argument, and may show progress, as `tqdm` does.
        """
        programs, sizes = self.programs, self.programs.sizes
        works: list[Callable[[], Any]] = [self._put_and_forget]

        def read(rows: int, size: int) -> None:
            how, empty = sampling_of([None] * rows), [programs.empty] * rows
            programs.read(self._leaves, [0] * rows, empty, [[0]] * rows, size, how)

        def decode(width: int, length: int) -> None:
            programs.decode(self._leaves, [0] * width, sampling_of([None] * width), 1, length)
            for adapter in (0, 1):
                programs.join(self._leaves, adapter, programs.empty, 0, length)

        def make_rooms() -> None:
            for length in sizes.lengths:
                for width in (*sizes.widths, *sizes.widths[::-1]):
                    programs.make_room(width, length)
            for width in sizes.widths:
                for length in (*sizes.lengths, *sizes.lengths[::-1]):
                    programs.make_room(width, length)

        works += [lambda n=size: read(1, n) for size in sizes.pieces]
        works.append(lambda: read(sizes.readers, sizes.pieces[0]))
        for width, length in itertools.product(sizes.widths, sizes.lengths):
            works.append(lambda room=(width, length): decode(*room))
        works.append(make_rooms)
        for work in shown(works):
            work()

    def _put_and_forget(self) -> None:
        """Puts zeros into the last slot, which holds zeros: compiles the program for a new adapter."""
        zeros = jax.tree.map(np.zeros_like, hki.get_adapter(self._bank.params))
        self._bank.put(self._bank.capacity - 1, zeros)

    # --- what the thread does ---

    def _run(self) -> None:
        try:
            while self._has_work():
                self.turn()
        except BaseException as error:  # after any error, nobody may wait forever
            logging.exception("the engine has failed")
            with self._lock:
                self.failed = f"the engine has failed: {error!r}"
                requests = [*self._queue, *self._running.values()]
                self._queue.clear(), self._running.clear(), self._reading.clear()
                for request in requests:
                    self._finish(request, Finished("error", self.failed))

    def turn(self) -> None:
        """Reads pieces of prompts, and decodes for all requests whose prompt is read."""
        self._drop_cancelled()
        left = self._budget
        while left > 0 and (slots := self._next_to_read()):
            left -= self._read(slots)
        if len(self._running) > len(self._reading):
            self._decode()

    def _has_work(self) -> bool:
        """Waits for requests; returns False when the engine stops and has none."""
        with self._lock:
            while not self._queue and not self._running and not self._stopping:
                self._lock.wait()
            return bool(self._queue or self._running)

    def _drop_cancelled(self) -> None:
        with self._lock:
            for request in [r for r in self._queue if r.cancelled]:
                self._queue.remove(request)
                self._finish(request, Finished("cancelled"))
            for slot in [slot for slot, r in self._running.items() if r.cancelled]:
                self._leave(slot, Finished("cancelled"))

    def _next_to_read(self) -> list[int]:
        """Gives free slots to waiting requests; returns the slots whose prompts a call reads next.

        It is one, or several, of which a call reads a short piece each: for one of these it takes less
        than half as long as a call for that prompt alone.
        """
        sizes = self.programs.sizes
        with self._lock:
            while self._queue and self._free:
                slot = heapq.heappop(self._free)
                self._running[slot] = self._queue.popleft()
                self._reading.append(slot)
            slots = [*itertools.islice(self._reading, sizes.readers)]
            left = [len(r.prompt) - r.read for r in map(self._running.get, slots)]
            together = sum(min(sizes.pieces[0], n) for n in left)
            alone = min([sizes.pieces[-1], *left[:1]])
            return slots if 2 * together > sizes.readers * alone else slots[:1]

    def _read(self, slots: list[int]) -> int:
        """Reads the next pieces of prompts; returns their length, including padding."""
        with self._lock:
            requests, leaves = [self._running[slot] for slot in slots], self._leaves
        sizes, one = self.programs.sizes, requests[0]
        size = sizes.pieces[0] if len(slots) > 1 else sizes.piece(one.read, len(one.prompt))
        pieces = [r.prompt[r.read : r.read + size] for r in requests]
        tokens, states = self.programs.read(
            leaves,
            [r.adapter for r in requests],
            [r.state for r in requests],
            pieces,
            size,
            sampling_of(requests),
        )
        for slot, request, piece, state in zip(slots, requests, pieces, states, strict=True):
            request.read, request.state = request.read + len(piece), state
            if request.read == len(request.prompt):
                self.programs.join(leaves, request.adapter, state, slot, request.read)
                request.state = None
        with self._lock:
            for slot, request, piece, token in zip(slots, requests, pieces, tokens, strict=True):
                self.counters.prompt_tokens += len(piece)
                self._reading.remove(slot)
                if request.state is None:
                    self.counters.first_tokens += 1
                    self.counters.first_token_seconds += time.monotonic() - request.submitted
                    self._take(slot, token)
                else:  # the others first: nobody waits for a long prompt
                    self._reading.append(slot)
        return size * len(slots)

    def _decode(self) -> None:
        """Decodes one or more tokens for all requests whose prompt is read."""
        with self._lock:
            running = {slot: r for slot, r in self._running.items() if r.tokens}
            leaves, steps = self._leaves, self._steps(list(running.values()))
        rows = [running.get(slot) for slot in range(max(running) + 1)]
        used = max(len(r.prompt) + len(r.tokens) - 1 for r in running.values())
        decoded = self.programs.decode(
            leaves,
            [r.tokens[-1] if r else 0 for r in rows],
            sampling_of(rows),
            steps,
            min(used + steps, self.programs.sizes.length),
        )
        with self._lock:
            self.counters.steps += steps
            for tokens in decoded:
                for slot, request in running.items():
                    if request.finished is None:
                        self._take(slot, tokens[slot])

    def _steps(self, running: list[Request]) -> int:
        """Returns how many tokens the next call decodes: one while prompts are read."""
        left = [r.max_tokens - len(r.tokens) for r in running]
        most = min(left) if self._queue else max(left)
        return 1 if self._reading else max(1, min(self.programs.sizes.burst // len(running), most))

    def _take(self, slot: int, token: int) -> None:
        """Handles a token of the request in a slot, which may be its last one."""
        request = self._running[slot]
        if token == NOT_FINITE:
            message = f"the numbers of {request.model!r} are not finite for this prompt"
            self._leave(slot, Finished("error", message))
        elif token in request.stop:
            self._leave(slot, Finished("stop"))
        else:
            request.tokens.append(token)
            self.counters.tokens += 1
            self._send(request, token)
            if len(request.tokens) == request.max_tokens:
                self._leave(slot, Finished("length"))

    def _leave(self, slot: int, finished: Finished) -> None:
        request = self._running.pop(slot)
        if slot in self._reading:
            self._reading.remove(slot)
        heapq.heappush(self._free, slot)
        self._finish(request, finished)

    def _finish(self, request: Request, finished: Finished) -> None:
        request.finished, request.state = finished, None
        self.counters.finished[finished.reason] += 1
        self.counters.request_seconds += time.monotonic() - request.submitted
        self._send(request, finished)

    def _send(self, request: Request, event: int | Finished) -> None:
        try:
            request.send(event)
        except Exception:  # of one request: the others go on
            logging.exception("a request's function has failed; the request is cancelled")
            request.cancelled = True


def sampling_of(requests: Sequence[Request | None]) -> Sampling:
    """Returns how to choose the next token of each, as lists."""
    each = (r.how._replace(index=len(r.tokens)) if r else Sampling() for r in requests)
    return Sampling(*zip(*each, strict=True))
