"""Many changed files for one loader: a clean error or a tree, in bounded time and memory."""

import gc
import multiprocessing
import os
import pathlib
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.fuzzing import loaders

# The memory that reading may take: this, and so many times the bytes of the files. Python has tables
# of a header as objects, of some ten times as many bytes.
CONSTANT, MULTIPLE = 8 << 20, 64
# The growth of the process meanwhile, at most: compiled programs and memory that allocators keep are part of it.
PROCESS_CONSTANT = 96 << 20
# Seconds of processor time that reading a few kilobytes may take, which other programs don't lengthen, and
# the seconds after which the process is ended. Only a hang takes so long; the longest time of a run is printed.
LIMIT, PATIENCE = 120, 300
# What the process may have in all, so that no file takes the memory of the machine.
ADDRESS_SPACE = 8 << 30
MOST_KEPT = 500


class Outcome(NamedTuple):
    """The outcome of a case.

    Attributes:
      what: 'loaded', or the type of the error.
      where: the line that raised it.
      wrong: what is wrong with this, None if nothing is.
      size: of the files, in bytes.
      memory: the most bytes that were allocated meanwhile by Python and NumPy.
      growth: by how much the process grew meanwhile at most, in bytes.
      seconds: that it took.
    """

    what: str
    where: str
    wrong: str | None
    size: int
    memory: int
    growth: int
    seconds: float


class Hang(BaseException):
    """Reading takes too long."""


def _interrupt(*_: Any) -> None:
    raise Hang


def run(loader: loaders.Loader, folder: str, thorough: bool = True) -> Outcome:
    """Reads the case in a folder."""
    size = sum(p.lstat().st_size for p in pathlib.Path(folder).iterdir())
    before = _start_of_memory()
    start = time.monotonic()
    error, said, tree = None, [], None
    signal.signal(signal.SIGPROF, _interrupt)
    try:
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            tree = loader.load(os.path.join(folder, loader.path))
    except (Exception, Hang) as e:
        error = e
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.monotonic() - start
    memory, growth = tracemalloc.get_traced_memory()[1], _most_memory() - before
    tracemalloc.stop()
    wrong = _wrong_error(error, folder) if error is not None else _wrong_tree(tree, thorough)
    if strange := [w for w in said if not _is_expected(w)]:
        wrong = wrong or f"a warning: {strange[0].category.__name__}: {strange[0].message}"
    if memory > CONSTANT + MULTIPLE * size:
        wrong = wrong or f"{memory:,} bytes of memory for {size:,} bytes of files"
    if growth > PROCESS_CONSTANT + MULTIPLE * size:
        wrong = wrong or f"the process grew by {growth:,} bytes for {size:,} bytes of files"
    what = "loaded" if error is None else type(error).__name__
    return Outcome(what, _line_of(error), wrong, size, memory, growth, seconds)


def _start_of_memory() -> int:
    tracemalloc.start()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    return _most_memory()


def _most_memory() -> int:
    """The largest resident set of this process."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _wrong_error(error: BaseException, folder: str) -> str | None:
    """What an error has that one for a person would not."""
    if isinstance(error, Hang):
        return f"it takes more than {LIMIT} s of processor time: {_line_of(error)}"
    module = type(error).__module__.partition(".")[0]
    subclass = type(error) is not ValueError and module != "haiku_implicit"
    if not isinstance(error, OSError) and (subclass or not isinstance(error, ValueError)):
        return f"{type(error).__name__}: {error}"
    text = str(error)
    if folder not in text:
        return f"it does not name the file: {text}"
    if "\n" in text or len(text) > 2000:
        return f"not a line: {text}"
    return None


def _is_expected(warning: warnings.WarningMessage) -> bool:
    """Whether a warning is this library's own, Python's about texts in old pickles, or JAX's of a cast.

    (That of complex factors to the dtype of a real weight: they are what the file says.)
    """
    own, text = issubclass(warning.category, UserWarning), str(warning.message)
    return own or "invalid escape sequence" in text or "Casting from complex to real" in text


def _wrong_tree(tree: Any, thorough: bool) -> str | None:
    try:
        loaders.check(tree, thorough)
    except Exception as e:
        return f"loaded, but {type(e).__name__}: {e} ({_line_of(e)})"
    return None


def _line_of(error: BaseException | None) -> str:
    """The last line of this library that an error came through."""
    while error is not None and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [f for f in frames if "/haiku_implicit/" in f.filename]
    name = own[-1].filename.rpartition("/haiku_implicit/")[2] if own else ""
    return f"{name}:{own[-1].lineno}" if own else ""


# --- many ----------------------------------------------------------------------------------------


def cases(name: str, seed: int) -> Iterator[tuple[loaders.Files, list[Any]]]:
    """Changed cases without an end. Those that end in a new way, put into the list, are changed further."""
    corpus = loaders.LOADERS[name].seeds()
    new: list[Any] = []
    index = 0
    yield corpus[0], new
    while True:
        draw = random.Random(f"{name} {seed} {index}")
        recent = corpus[-20:] if draw.random() < 0.3 else corpus
        files = draw.choice(recent)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            files = loaders.mutated(files, draw)
        yield files, new
        corpus += new
        if len(corpus) > MOST_KEPT:
            corpus.pop(draw.randrange(len(corpus) // 2, len(corpus)))
        new.clear()
        index += 1


def outcomes(name: str, seed: int, folder: str) -> Iterator[tuple[Outcome, loaders.Files]]:
    """What became of changed cases, without an end; each is in the folder meanwhile."""
    loader, seen = loaders.LOADERS[name], set()
    for i, (files, new) in enumerate(cases(name, seed)):
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        loaders.write(files, folder)
        found = run(loader, folder, thorough=i % 8 == 0)
        mark = found.what, found.where
        if mark not in seen:
            seen.add(mark)
            if i and not found.wrong and all(isinstance(data, bytes) for data in files.values()):
                new.append(files)
        yield found, files
        if i % 500 == 0:
            gc.collect()


def _work(name: str, seed: int, folder: str, pipe: Any) -> None:
    """In a process of its own: sends outcomes, some at a time."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    now = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESS_SPACE, hard))
    waiting: list[Any] = []
    sent = time.monotonic()
    try:
        for found, files in outcomes(name, seed, folder):
            waiting.append((found, files if found.wrong else None))
            if time.monotonic() - sent > 0.5:
                pipe.send(waiting)
                waiting, sent = [], time.monotonic()
    except Exception:  # a mistake in these programs
        pipe.send(traceback.format_exc())


def fuzzed(name: str, seed: int, seconds: float) -> Iterator[list[tuple[Outcome, Any]]]:
    """Outcomes of one loader for so long, with the files of those that are wrong.

    The loader runs in another process. If that dies or hangs, the case is one of the outcomes, and a
    new process goes on from another seed.
    """
    context = multiprocessing.get_context("spawn")
    end, attempt = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as parent:
            folder = os.path.join(parent, "case")
            receiver, sender = context.Pipe(duplex=False)
            args = name, seed + 1_000_000 * attempt, folder, sender
            process = context.Process(target=_work, args=args, daemon=True)
            process.start()
            sender.close()
            try:
                while time.monotonic() < end:
                    if not receiver.poll(PATIENCE):
                        raise EOFError
                    found = receiver.recv()
                    if isinstance(found, str):
                        raise RuntimeError(found)
                    yield found
            except EOFError:
                yield [(_crash(process), _files_in(folder))]
            finally:
                process.kill()
                process.join()
        attempt += 1


def _crash(process: Any) -> Outcome:
    process.join(10)
    what = "hang" if process.exitcode is None else f"crash ({process.exitcode})"
    return Outcome(what, "", f"the process ended: {what}", 0, 0, 0, 0.0)


def _files_in(folder: str) -> loaders.Files:
    paths = pathlib.Path(folder).iterdir() if os.path.isdir(folder) else ()
    return {p.name: p.read_bytes() for p in paths if p.is_file() and not p.is_symlink()}
