"""A run of mutants: which are drawn, which tests each is given to, and what came of it."""

import collections
import json
import math
import pathlib
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from tests.mutation import mutants, processes

CORE = "haiku_implicit/core"

# Those that concern the core, with its doctests. Others run the core as well, but each mutant would wait for them.
TESTS = [
    CORE,
    *(
        f"tests/{name}.py"
        for name in (
            "adapters/test_adapters "
            "arrays/test_any_type arrays/test_batch_axes arrays/test_constant arrays/test_lora "
            "files/test_checkpoints files/test_round_trips "
            "test_array test_box test_chex test_debug_flags test_dispatch test_eager test_explicit_mesh "
            "test_export test_flat_containers test_haiku_creators test_haiku_params test_haiku_transform "
            "test_higher_order test_materialization test_matrix_axes test_placed_leaves test_placement "
            "test_progress test_shard_map_results test_targets test_tracing_cost test_transfers "
            "test_treescope test_use_implicit_args test_contract transforms/test_auto_axes "
            "transforms/test_auto_jit"
        ).split()
    ),
]


class Result(NamedTuple):
    """What came of a mutant.

    Attributes:
      key: `Mutant.key`.
      line: where it is.
      by: what failed; None if nothing did.
      ran: how many tests ran.
      seconds: how long it took.
    """

    key: tuple[str, ...]
    line: int
    by: str | None
    ran: int
    seconds: float

    @property
    def killed(self) -> bool:
        return self.by is not None


def mutants_of(root: pathlib.Path, files: Sequence[str]) -> tuple[list[mutants.Mutant], int]:
    """The mutants of files, by default of the core, and how many texts are not changed."""
    paths = files or sorted(str(p.relative_to(root)) for p in (root / CORE).glob("*.py"))
    found = list(mutants.all_mutants(root, list(paths)))
    return [m for own, _ in found for m in own], sum(texts for _, texts in found)


def draw(found: Sequence[mutants.Mutant], count: int, seed: int) -> list[mutants.Mutant]:
    """As many of them, at random, in their order."""
    number = min(count, len(found))
    chosen = sorted(random.Random(seed).sample(range(len(found)), number))
    return [found[i] for i in chosen]


def chosen_tests(
    mutant: mutants.Mutant, tests: Sequence[processes.Covered], budget: float
) -> list[processes.Covered]:
    """The tests that run what is changed: the quickest of each function first, as far as time allows."""
    imports, *ran = tests
    # The lines that run in other processes are not known: those tests come last.
    level = {t.name: 2 for t in ran if t.starts}
    for span in (mutant.lines, mutant.statement):
        lines = set(range(span[0], span[1] + 1))
        runs_any = lambda t, lines=lines: not lines.isdisjoint(t.lines.get(mutant.file, ()))  # noqa: E731
        if runs_any(
            imports
        ):  # what is made there may matter to any test, most to those of this file
            level |= {t.name: 1 if mutant.file in t.lines else 2 for t in ran}
        level |= {t.name: 0 for t in ran if runs_any(t)}
        if min(level.values(), default=2) < 2:
            break
    module = pathlib.Path(mutant.file).stem
    functions: dict[str, int] = collections.Counter()
    ranked = []
    for test in sorted(ran, key=lambda t: t.seconds):
        if test.name in level:
            name = test.name.partition("[")[0]
            elsewhere = f"test_{module}.py" not in name
            ranked.append((level[test.name], functions[name], elsewhere, test.seconds, test))
            functions[name] += 1
    chosen, spent, files = [], 0.0, set()
    for *_, test in sorted(ranked):
        file = test.name.partition("::")[0]
        seconds = test.seconds + (file not in files) * TO_COLLECT
        if spent + seconds <= budget or not chosen:
            chosen.append(test)
            files.add(file)
            spent += seconds
    return chosen


# Seconds that pytest takes for a file, before its tests.
TO_COLLECT = 1.0


class Session:
    """Copies of the repository, in which mutants are run."""

    def __init__(self, root: pathlib.Path, count: int):
        self.root, self.count = root, count

    def __enter__(self) -> "Session":
        processes.warm()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="mutants"))
        self.copies = [processes.copied(self.root, self.folder / str(i)) for i in range(self.count)]
        return self

    def __exit__(self, *_: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _log(self, copy: pathlib.Path) -> pathlib.Path:
        return self.folder / f"log{copy.name}"

    def coverage(self, tests: Sequence[str], kept: str | None = None) -> list[processes.Covered]:
        """Which lines each test runs, after what runs at import. All tests have to pass.

        Args:
          tests: what to give to pytest.
          kept: a file that has the answer of an earlier run, or is to have it.
        """
        copy = self.copies[0]
        if kept and pathlib.Path(kept).exists():
            found = json.loads(pathlib.Path(kept).read_text())
        else:
            run = lambda: processes.record(CORE, tests)  # noqa: E731
            ended = processes.Running(copy, run, self._log(copy), limit=7200).wait()
            found = ended.result
            if not found or found["failed"] or len(found["passed"]) < 2:
                said = self._log(copy).read_text()[-5000:]
                raise RuntimeError(f"tests fail without any change:\n{said}")
            if kept:
                pathlib.Path(kept).write_text(json.dumps(found))
        for other in self.copies:
            shutil.rmtree(other / CORE / "__pycache__", ignore_errors=True)
        return [processes.Covered(*row) for row in found["passed"]]

    def run(
        self, drawn: Sequence[mutants.Mutant], tests: Sequence[processes.Covered], budget: float
    ) -> Iterator[Result]:
        """Runs mutants, as many at a time as there are copies; gives what came of each when it is known."""
        waiting = list(drawn)[::-1]
        running: dict[pathlib.Path, tuple[mutants.Mutant, processes.Running]] = {}
        with tqdm(total=len(drawn), disable=None) as bar:
            while waiting or running:
                for copy in self.copies:
                    if copy not in running and waiting:
                        mutant = waiting.pop()
                        chosen = chosen_tests(mutant, tests, budget)
                        if chosen:
                            running[copy] = mutant, self._start(copy, mutant, chosen)
                        else:
                            yield Result(mutant.key, mutant.lines[0], None, 0, 0.0)
                            bar.update()
                for copy, (mutant, fork) in list(running.items()):
                    if (ended := fork.ended()) is not None:
                        del running[copy]
                        (copy / mutant.file).write_bytes((self.root / mutant.file).read_bytes())
                        yield _result(mutant, ended)
                        bar.update()
                time.sleep(0.02)

    def _start(
        self, copy: pathlib.Path, mutant: mutants.Mutant, chosen: Sequence[processes.Covered]
    ) -> processes.Running:
        (copy / mutant.file).write_text(mutant.text)
        names = [t.name for t in chosen]
        # Much more than they take: other programs may be running.
        limit = 120 + 6 * sum(t.seconds for t in chosen)
        return processes.Running(copy, lambda: processes.check(names), self._log(copy), limit)

    def fail_anyway(self, results: Sequence[Result]) -> list[str]:
        """Those of the tests that killed mutants that fail without a change as well."""
        names = sorted({r.by for r in results if r.by and "::" in r.by})
        copy, failed = self.copies[0], []
        while names:
            run = lambda left=tuple(names): processes.check(left)  # noqa: E731
            ended = processes.Running(copy, run, self._log(copy), limit=3600).wait()
            by = ended.result["failed"] if ended.result else "the process died"
            if by is None:
                break
            failed.append(by)
            if by not in names:
                break
            names.remove(by)
        return failed


def _result(mutant: mutants.Mutant, ended: processes.Ended) -> Result:
    by, ran = "too long" if ended.late else "the process died", 0
    if ended.result is not None:
        by, ran = ended.result["failed"], ended.result["ran"]
    return Result(mutant.key, mutant.lines[0], by, ran, round(ended.seconds, 1))


# --- reports -------------------------------------------------------------------------------------------------


def interval(killed: int, count: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for a share."""
    z = 1.96
    share, about = killed / count, z * z / count
    middle = (share + about / 2) / (1 + about)
    half = z / (1 + about) * math.sqrt(share * (1 - share) / count + about / (4 * count))
    return middle - half, middle + half


def table(results: Sequence[Result]) -> str:
    """The counts by file, in Markdown."""
    by_file: dict[str, list[Result]] = collections.defaultdict(list)
    for result in results:
        by_file[pathlib.Path(result.key[0]).name].append(result)
    rows = ["| file | mutants | killed | share | 95 % interval |", "|---|---|---|---|---|"]
    for name, own in [*sorted(by_file.items()), ("all", list(results))]:
        count, killed = len(own), sum(r.killed for r in own)
        low, high = interval(killed, count)
        rows.append(
            f"| {name} | {count} | {killed} | {killed / count:.0%} | {low:.0%} to {high:.0%} |"
        )
    at_import = sum(r.killed and "::" not in r.by for r in results)
    uncovered = sum(not r.ran and not r.killed for r in results)
    rows.append("")
    rows.append(
        f"{at_import} of the killed died before a test ran, or took too long; {uncovered} of those that "
        "survived are run by no test."
    )
    return "\n".join(rows)


def read(path: str | None) -> list[Result]:
    """The results that a run has written; none if there is no file."""
    if path is None or not pathlib.Path(path).exists():
        return []
    rows = json.loads(pathlib.Path(path).read_text())
    return [Result(tuple(key), *rest) for key, *rest in rows]


def write(path: str, results: Sequence[Result]) -> None:
    """Writes results, to be read by another run."""
    pathlib.Path(path).write_text(json.dumps(results, indent=1))
