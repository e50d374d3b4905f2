"""No test depends on the clock: other programs may need the processors."""

import ast
import pathlib

import hypothesis
import pytest

from tests.devices import HANG

TESTS = pathlib.Path(__file__).parent
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"}


def clocks_in(text):
    """The lines that read a clock, or have a limit that is not one of a hang."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        limits = [x.value for x in node.keywords if (x.arg or "").startswith("timeout")]
        limits += node.args[:1] if name.endswith(".wait") else []
        short = [x for x in limits if isinstance(x, ast.Constant) and x.value and x.value < HANG]
        if short or name.removeprefix("time.") in CLOCKS or name.startswith("timeit."):
            found.append(node.lineno)
    return found


def test_no_test_reads_a_clock():
    files = [*TESTS.rglob("test_*.py"), TESTS / "conftest.py", TESTS / "devices.py"]
    found = {str(path.relative_to(TESTS)): clocks_in(path.read_text()) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    ["start = time.monotonic()", "process.communicate(timeout=120)", "process.wait(60)", "time()"],
)
def test_clocks_are_found(line):
    assert clocks_in(f"x = 1\n{line}") == [2]
    assert clocks_in("time.sleep(draw)\nevent.wait()\nprocess.communicate(timeout=HANG)") == []


def test_hypothesis_has_no_deadline():
    settings = hypothesis.settings()
    assert settings.deadline is None
    assert hypothesis.HealthCheck.too_slow in settings.suppress_health_check
