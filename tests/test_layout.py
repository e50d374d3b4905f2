"""Each folder of the package imports only folders below it, and no import runs in a circle."""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys

import pytest

PACKAGE = "haiku_implicit"
ROOT = pathlib.Path(__file__).resolve().parents[1]

# From the bottom up: the way of the data, backwards. Rooms of one line do not see each other.
FLOORS = [
    ["core"],
    ["quantized.numbers"],
    ["quantized"],
    ["quantized.cpu", "quantized.gpu"],
    ["quantized.products"],
    ["quantized.types"],
    ["arrays"],
    ["adapters"],
    ["training", "transforms", "files"],
    ["params.trees"],
    ["params.adapters", "params.haiku"],
    ["params.quantizing"],
    ["params"],
    ["mox.program"],
    ["mox.show", "mox.edits"],
    ["mox.format"],
    ["interchange", "layers", "mox"],
    ["quantization", "testing", "command_line"],
    [""],  # what `import haiku_implicit` gives
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def module_of(path):
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


@functools.cache
def tree_of(module):
    return ast.parse(FILES[module].read_text())


def room_of(module):
    """The folder of a module, within the package; that of a file at the top is the file."""
    own = module.removeprefix(PACKAGE).lstrip(".")
    if FILES[module].name == "__init__.py":
        return own
    folder, _, file = own.rpartition(".")
    return folder or file


def imports_of(module):
    """The modules of the package that one imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in whole}
    return {name for name in found if name.partition(".")[0] == PACKAGE}


def test_every_folder_has_a_floor_and_says_what_it_is_for():
    rooms = {room_of(name) for name in FILES}
    assert rooms == set(FLOOR)
    for name, path in FILES.items():
        assert ast.get_docstring(tree_of(name)), path


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down(module):
    own = room_of(module)
    for other in imports_of(module):
        room = room_of(other)
        allowed = room == own or FLOOR[room] < FLOOR[own]
        assert allowed, (
            f"{module} ({own or 'the top'}) imports {other} ({room}), which is not below it"
        )


def test_no_import_runs_in_a_circle():
    arrows = {name: imports_of(name) - {name} for name in FILES}
    order = list(graphlib.TopologicalSorter(arrows).static_order())  # raises for a circle
    assert set(order) >= set(FILES)


@pytest.mark.parametrize("module", FILES)
def test_imports_are_the_same_for_type_checkers_and_at_run_time(module):
    """An import that only a type checker sees, or that waits in a function, would hide a circle."""
    for node in ast.walk(tree_of(module)):
        assert not (isinstance(node, ast.Name) and node.id == "TYPE_CHECKING"), module
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = ast.Module(node.body, [])
            for part in ast.walk(inner):
                if isinstance(part, ast.ImportFrom) and part.module:
                    assert part.module.partition(".")[0] != PACKAGE, f"{module}: {node.name}"


def test_importing_the_package_imports_every_rule():
    """A module whose rules nobody imports would leave its type to be materialized."""
    listed = "import sys, haiku_implicit; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    program = {name for name in FILES if name.startswith(f"{PACKAGE}.command_line")}
    late = {f"{PACKAGE}.quantized.gpu.kernels", *program} - set(run.stdout.split())
    assert set(FILES) - set(run.stdout.split()) <= late
