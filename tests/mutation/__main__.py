"""Changes the core in small ways, and prints the changes that no test notices.

python -m tests.mutation --count=250 --seed=0
python -m tests.mutation --count=100 --files=haiku_implicit/core/dispatch.py
python -m tests.mutation --again=mutants.json   # those that survived in an earlier run; counts both runs

First the quick tests run once, to see which of them run which lines; `--coverage` keeps that for later runs. Then
each mutant drawn is given to the tests that run its line, those of them that take the least time first.
"""

import os
import pathlib
import sys

from absl import app, flags

from tests.mutation import sessions

_COUNT = flags.DEFINE_integer("count", 250, "How many mutants.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Draws the mutants.")
_FILES = flags.DEFINE_list("files", [], "Only mutants of these files; by default all of the core.")
_AGAIN = flags.DEFINE_string("again", None, "Results of an earlier run: only what survived it.")
_RESULTS = flags.DEFINE_string("results", "mutants.json", "Where results are written to.")
_GO_ON = flags.DEFINE_bool("go_on", False, "Goes on with the run that these results are of.")
_COVERAGE = flags.DEFINE_string("coverage", None, "Keeps there which lines each test runs.")
_TESTS = flags.DEFINE_list("tests", sessions.TESTS, "What to give to pytest.")
_BUDGET = flags.DEFINE_float("budget", 60, "Seconds of tests for each mutant.")
_PROCESSES = flags.DEFINE_integer("processes", os.cpu_count(), "Processes.", lower_bound=1)
_SHOW = flags.DEFINE_bool("show", False, "Only print the mutants that would be run.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    root = pathlib.Path(__file__).resolve().parents[2]
    if pathlib.Path.cwd() != root:
        raise app.UsageError(f"start it in {root}")
    found, texts = sessions.mutants_of(root, _FILES.value)
    print(f"{len(found)} mutants; {texts} texts are left as they are")
    if _AGAIN.value:
        earlier = sessions.read(_AGAIN.value)
        keys = {r.key for r in earlier if not r.killed}
        drawn = [m for m in found if m.key in keys]
        for key in sorted(keys - {m.key for m in drawn}):
            print("no longer there:", *key, sep="\n  ")
    else:
        drawn = sessions.draw(found, _COUNT.value, _SEED.value)
    if _SHOW.value:
        print(*drawn, sep="\n")
        return
    results = sessions.read(_RESULTS.value) if _GO_ON.value else []
    if _AGAIN.value:  # what is dead stays dead
        results += [r for r in earlier if r.killed and r not in results]
    done = {r.key for r in results}
    left = {m.key: m for m in drawn if m.key not in done}
    with sessions.Session(root, _PROCESSES.value) as session:
        tests = session.coverage(_TESTS.value, _COVERAGE.value)
        for result in session.run(list(left.values()), tests, _BUDGET.value):
            results.append(result)
            sessions.write(_RESULTS.value, results)
            if not result.killed:
                print(f"survived {result.ran} tests: {left[result.key]}\n", flush=True)
        wrong = session.fail_anyway([r for r in results if r.key in left])
    print(sessions.table(results))
    if wrong:
        print(
            "These tests fail without any change, after those that killed others:",
            *wrong,
            sep="\n  ",
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    app.run(main)
