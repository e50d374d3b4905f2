"""No test depends on the clock: other programs may need the processors."""

import ast
import pathlib
import re

import hypothesis
import pytest

from tests.devices import HANG

TESTS = pathlib.Path(__file__).parent
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"}
MAY_WAIT = re.compile("|".join([*CLOCKS, "wait", "alarm", "ITIMER_REAL"]))
# Programs that run for a given time, print how long a case took, or look at the memory every so often: no
# result depends on that.
PROGRAMS = {
    "fuzzing/__main__.py",
    "fuzzing/fuzz.py",
    "interchange/peak_memory.py",
    "mutation/processes.py",
}


def clocks_in(text):
    """The lines that read a clock, or have a limit that is not one of a hang."""
    found = []
    if not MAY_WAIT.search(text):  # which takes a hundredth of what parsing does
        return found
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        limits = [x.value for x in node.keywords if (x.arg or "").startswith("timeout")]
        limits += node.args[:1] if name.endswith(".wait") else []
        short = [x for x in limits if isinstance(x, ast.Constant) and x.value and x.value < HANG]
        alarm = name == "signal.alarm" or "signal.ITIMER_REAL" in map(ast.unparse, node.args)
        if short or alarm or name.removeprefix("time.") in CLOCKS or name.startswith("timeit."):
            found.append(node.lineno)
    return found


def test_no_test_reads_a_clock():
    files = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    found = {name: clocks_in(path.read_text()) for name, path in files.items()}
    assert {name for name, lines in found.items() if lines} == PROGRAMS


def test_a_hang_is_told_by_processor_time():
    """Other programs don't lengthen it; a limit in seconds of the clock would count them."""
    assert "ITIMER_REAL" not in (TESTS / "fuzzing" / "fuzz.py").read_text()


@pytest.mark.parametrize(
    "line",
    [
        *(
            "start = time.monotonic()",
            "process.communicate(timeout=120)",
            "process.wait(60)",
            "time()",
        ),
        *("signal.alarm(3)", "signal.setitimer(signal.ITIMER_REAL, 9)"),
    ],
)
def test_clocks_are_found(line):
    assert clocks_in(f"x = 1\n{line}") == [2]
    assert clocks_in("time.sleep(draw)\nevent.wait()\nprocess.communicate(timeout=HANG)") == []


def test_hypothesis_has_no_deadline():
    settings = hypothesis.settings()
    assert settings.deadline is None
    assert hypothesis.HealthCheck.too_slow in settings.suppress_health_check
