"""Each folder of the package imports only folders below it, and no import runs in a circle."""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys

import pytest

import haiku_implicit as hki

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
    """What a module says. The package itself says most of it in a stub, of which it makes its names."""
    path = FILES[module]
    stub = path.with_suffix(".pyi").read_text() if module == PACKAGE else ""
    return ast.parse(path.read_text() + stub)


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


IMPORTED = """
import importlib, sys
import jax, jax.numpy as jnp
import haiku_implicit as hki
from haiku_implicit.core import dispatch, serialization

def product(x):
    params = hki.add_lora({"w": hki.QuantizedMatrix.quantize(x, "int4")}, 0, rank=2)
    return hki.use_implicit_args(jnp.matmul)(x, params["w"])

def registered():
    rules = [rule for rules in dispatch.rules().values() for rule in rules]
    return rules, list(serialization._checkpoints), list(serialization._statics)

modules = list(sys.modules)
jax.eval_shape(product, jnp.ones((8, 8)))
assert "plum" not in sys.modules, "a first product waits for Plum's import, which takes as long"
first = registered()
assert serialization.node_named("haiku_implicit.Sensitivity")  # as `load` looks a type up
found = registered()[1]
for name in sys.argv[1:]:
    importlib.import_module(name)
assert (first[0], found, first[2]) == registered(), "registered later"
assert len(first[1]) + 2 == len(found), "registered when a file names its type"
print("\\n".join(modules))
"""


def test_importing_the_package_imports_types_and_rules_and_no_more():
    """A rule that nobody imports would leave its type to be materialized; files name types."""
    modules = [name for name in FILES if not name.endswith("gpu.kernels")]
    run = subprocess.run(
        [sys.executable, "-c", IMPORTED, *modules], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    imported = set(run.stdout.split())
    late = ("mox", "layers", "interchange", "command_line", "transforms", "testing", "params.haiku")
    found = [m for m in imported if m.startswith(tuple(f"{PACKAGE}.{room}" for room in late))]
    assert not found and not imported & {"plum", "beartype", "rich", "jax.experimental.pallas"}
    assert len(imported & set(FILES)) < 140


NAMES = """
import importlib, inspect, pickle, threading
import haiku_implicit as hki

assert set(hki.__all__) <= set(dir(hki)) and "files" in dir(hki)
start, found = threading.Barrier(4), []
def look():
    start.wait(timeout=60)
    found.append([getattr(hki, name) for name in hki.__all__])
threads = [threading.Thread(target=look) for _ in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
assert len(found) == 4 and all(x is y for other in found for x, y in zip(found[0], other))
assert found[0] == [vars(hki)[name] for name in hki.__all__]  # each is looked up once
assert pickle.loads(pickle.dumps(hki.add_lora)) is hki.add_lora
for name, module in hki._modules.items():
    home = importlib.import_module(module)
    assert found[0][hki.__all__.index(name)] is getattr(home, name), name
assert not hasattr(hki, "no_such_name") and not hasattr(hki, "__wrapped__")
assert dict(inspect.getmembers(hki))["mox"].make_mox
from haiku_implicit import *
assert sensitivity is hki.sensitivity and mox is hki.mox
"""


def test_names_are_there_at_their_first_use_in_any_thread():
    run = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr


def test_a_name_that_goes_is_an_alias_with_a_warning(monkeypatch):
    assert not hki._RENAMED.keys() & set(hki.__all__) and set(hki._RENAMED.values()) <= set(
        hki.__all__
    )
    monkeypatch.setattr(hki, "_RENAMED", {"lora": "add_lora"})
    expected = (
        r"haiku_implicit\.lora is now haiku_implicit\.add_lora; the next minor version drops it"
    )
    with pytest.warns(DeprecationWarning, match=expected) as warned:
        assert hki.lora is hki.add_lora
        from haiku_implicit import lora
    assert lora is hki.add_lora and {warning.filename for warning in warned} == {__file__}
    assert "lora" not in dir(hki)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        hki.no_such_name  # noqa: B018
