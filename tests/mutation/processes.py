"""Forks of this process that run tests on a copy of the repository: to see what they cover, and on mutants.

A fork has JAX, Haiku and pytest, whose imports take the time, but not yet this library. It imports it, and the
tests, from the copy, and so do the processes that tests start.
"""

import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

# Imported before the forks are made. None of them starts a backend of JAX.
WARM = ("jax", "jax.experimental.pallas", "haiku", "optax", "chex", "plum", "hypothesis")

# What no test reads.
LEFT_OUT = ("." + "*", "__pycache__", "bazel-*")


def warm() -> None:
    """Imports the large packages once for all forks."""
    for name in WARM:
        importlib.import_module(name)


def copied(root: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """A copy of the repository."""
    return shutil.copytree(root, to, ignore=shutil.ignore_patterns(*LEFT_OUT))


def forked(copy: pathlib.Path, run: Callable[[], Any], log: pathlib.Path) -> int:
    """Starts `run` in a fork that stands in the copy; returns the process's id.

    What it returns, as JSON, is in `log` with the suffix .json. What it prints is in `log`.
    """
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()  # a group of its own, with the processes that tests start
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        _stand_in(copy)
        result = run()
        log.with_suffix(".json").write_text(json.dumps(result))
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _stand_in(copy: pathlib.Path) -> None:
    """Makes this process one that was started in the copy."""
    here = pathlib.Path.cwd()
    ours = lambda p: p == "" or pathlib.Path(p).resolve() in (here, here / "examples")  # noqa: E731
    own = [str(copy), str(copy / "examples")]
    sys.path[:] = own + [p for p in sys.path if not ours(p)]
    for name in list(sys.modules):
        if name.partition(".")[0] in ("haiku_implicit", "tests", "examples", "benchmarks"):
            del sys.modules[name]
    # Of the library no compiled files are kept: one mutant's would be as old and as long as another's.
    os.environ |= {"PYTHONPATH": os.pathsep.join(own), "PYTHONDONTWRITEBYTECODE": "1"}
    os.chdir(copy)


class Ended(NamedTuple):
    """How a fork ended.

    Attributes:
      result: what `run` returned; None if it died, or took too long.
      seconds: how long it took.
      late: whether it was ended because of that.
    """

    result: Any
    seconds: float
    late: bool


class Running:
    """A fork that has been started."""

    def __init__(self, copy: pathlib.Path, run: Callable[[], Any], log: pathlib.Path, limit: float):
        log.with_suffix(".json").unlink(missing_ok=True)
        self.log, self.limit, self.start = log, limit, time.monotonic()
        self.pid = forked(copy, run, log)

    def ended(self) -> Ended | None:
        """How it ended, or None if it runs on."""
        seconds = time.monotonic() - self.start
        pid, _ = os.waitpid(self.pid, os.WNOHANG)
        late = not pid and seconds > self.limit
        if not pid and not late:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # with all that it has started
        if late:
            os.waitpid(self.pid, 0)
        found = self.log.with_suffix(".json")
        return Ended(json.loads(found.read_text()) if found.exists() else None, seconds, late)

    def wait(self) -> Ended:
        """Waits until it ends."""
        while (ended := self.ended()) is None:
            time.sleep(0.05)
        return ended


# --- what tests cover ----------------------------------------------------------------------------------------


class Covered(NamedTuple):
    """A test that passed.

    Attributes:
      name: pytest's.
      seconds: how long it took.
      lines: by file, the lines of the core that ran in it.
      starts: whether it starts processes, of which that is not known.
    """

    name: str
    seconds: float
    lines: dict[str, list[int]]
    starts: bool = False


def record(folder: str, tests: Sequence[str]) -> Any:
    """Runs tests; returns those that passed, what ran at import (as a test without a name), and what failed."""
    sys.dont_write_bytecode = False
    noting = _Noting(pathlib.Path.cwd() / folder)
    sys.meta_path.insert(0, noting)
    importlib.import_module(
        folder.partition("/")[0]
    )  # pytest would read a file of doctests without it
    recorder = _Recorder(noting)
    pytest.main([*tests, "-q", "-p", "no:cacheprovider"], plugins=[recorder])
    return {"passed": recorder.passed, "failed": recorder.failed}


class _Noting(importlib.abc.MetaPathFinder):
    """Imports the modules of a folder so that each statement notes its line when it runs.

    A trace function sees every call of JAX as well, and takes ten times as long.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.lines: dict[str, set[int]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not path or pathlib.Path(path[0]) != self.folder:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is not None and found.origin:
            lines = self.lines.setdefault(os.path.relpath(found.origin), set())
            found.loader = _NotingLoader(found.name, found.origin, lines)
        return found


class _NotingLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, lines: set[int]):
        super().__init__(name, path)
        self.lines = lines

    def source_to_code(self, data: Any, path: Any, **options: Any) -> Any:  # type: ignore[override]
        tree = ast.parse(data)
        for node in list(ast.walk(tree)):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list):
                    setattr(node, name, [new for old in block for new in _noted(old)])
        return compile(ast.fix_missing_locations(tree), path, "exec")

    def set_data(self, *args: Any, **kwargs: Any) -> None:
        """Keeps no compiled file."""

    def exec_module(self, module: Any) -> None:
        module.__dict__[_NOTE] = self.lines.add
        super().exec_module(module)


_NOTE = "__ran__"


def _noted(statement: ast.stmt) -> list[ast.stmt]:
    """A statement, after one that notes its line."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return [statement]  # a docstring has to be the first
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return [statement]  # and such imports the next
    note = ast.Call(ast.Name(_NOTE, ast.Load()), [ast.Constant(statement.lineno)], [])
    return [ast.copy_location(ast.Expr(note), statement), statement]


class _Recorder:
    """A plugin of pytest that keeps which lines ran in each test."""

    def __init__(self, noting: _Noting):
        self.noting = noting
        self.passed: list[Covered] = []
        self.failed: list[str] = []
        self.bad = False
        self.function: Any = None
        self.starts = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: Any) -> None:
        self.starts |= event == "subprocess.Popen"

    def _keep(self, name: str, seconds: float) -> None:
        lines = {file: sorted(found) for file, found in self.noting.lines.items() if found}
        if not self.bad:
            self.passed.append(Covered(name, seconds, lines, self.starts))
        else:
            self.failed.append(name)
        for found in self.noting.lines.values():
            found.clear()

    def pytest_runtestloop(self) -> None:
        self._keep("", 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        function = getattr(item, "originalname", None)
        if function != self.function:
            self.function = function
            forget()
        self.bad, self.starts, start = False, False, time.monotonic()
        result = yield
        self._keep(item.nodeid, time.monotonic() - start)
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.bad |= not report.passed


def forget() -> None:
    """Empties the caches of the library, so that a test runs what tests before it have run."""
    for name, module in list(sys.modules.items()):
        if name.startswith("haiku_implicit"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


# --- mutants -------------------------------------------------------------------------------------------------


def check(names: Sequence[str]) -> Any:
    """Runs tests in this order until one fails.

    Returns:
      The test, or the file that can't be imported, that failed; None if all passed.
    """
    sys.dont_write_bytecode = True
    ran = 0
    # Most mutants fail one of the first few, for which few files have to be read.
    for part in filter(None, (names[:FIRST], names[FIRST:])):
        plugin = _Chosen(part)
        files = list(dict.fromkeys(name.partition("::")[0] for name in part))
        code = pytest.main([*files, "-x", "-q", "-p", "no:cacheprovider"], plugins=[plugin])
        ran += plugin.ran
        if code != pytest.ExitCode.OK:
            return {"failed": plugin.failed or f"exit code {code!r}", "ran": ran}
    return {"failed": None, "ran": ran}


FIRST = 6


class _Chosen:
    """A plugin of pytest that runs these tests in this order."""

    def __init__(self, names: Sequence[str]):
        self.order = {name: i for i, name in enumerate(names)}
        self.failed = ""
        self.ran = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or f"import of {report.nodeid}"
