"""Every Python file is in a target of `BUILD`, and every test file is one that Bazel runs.

`BUILD` is Starlark, which for what it uses here is Python: it is run with stand-ins for the rules.
"""

import fnmatch
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("haiku_implicit", "tests", "examples", "benchmarks")
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
)
SOURCES = [name for name in FILES if name.endswith(".py")]


def matches(name, pattern):
    """Whether Bazel's glob pattern names the file: `*` stays in one folder, `**` takes any."""
    *folders, last = pattern.split("/")
    parts = ["(?:[^/]+/)*" if f == "**" else _segment(f) + "/" for f in folders]
    parts.append(".*" if last == "**" else _segment(last))
    return re.fullmatch("".join(parts), name) is not None


def _segment(pattern):
    return fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z").replace(".*", "[^/]*")


def glob(include, exclude=(), allow_empty=False):
    found = [
        name
        for name in FILES
        if any(matches(name, p) for p in include) and not any(matches(name, p) for p in exclude)
    ]
    assert found or allow_empty, f"glob({include}) finds nothing, which Bazel takes for an error"
    return found


@pytest.fixture(scope="module")
def targets():
    """The targets of `BUILD`: a list of (rule, attributes)."""
    found = []

    def rule(kind):
        return lambda **attributes: found.append((kind, attributes))

    scope = {name: rule(name) for name in ("py_library", "py_binary", "py_test")}
    for ignored in ("load", "package", "licenses", "exports_files"):
        scope[ignored] = lambda *args, **kwargs: None
    exec(compile((ROOT / "BUILD").read_text(), "BUILD", "exec"), {**scope, "glob": glob})
    return found


@pytest.mark.parametrize(
    "name, pattern, expected",
    [
        ("tests/test_a.py", "tests/**/test_*.py", True),
        ("tests/arrays/test_a.py", "tests/**/test_*.py", True),
        ("tests/cases.py", "tests/**/test_*.py", False),
        ("examples/models/llama.py", "examples/*.py", False),
        ("examples/models/llama.py", "examples/**/*.py", True),
        ("tests/goldens/a.txt", "tests/**", True),
        ("examples/a_py", "examples/*.py", False),
    ],
)
def test_glob_patterns(name, pattern, expected):
    assert matches(name, pattern) == expected


def test_every_source_is_in_a_target(targets):
    named = {source for _, attributes in targets for source in attributes["srcs"]}
    assert not set(SOURCES) - named


def test_every_source_that_is_named_exists(targets):
    labels = {
        label
        for _, attributes in targets
        for label in (*attributes["srcs"], *attributes.get("data", ()))
    }
    assert not [label for label in labels if not (ROOT / label).is_file()]


def test_every_dependency_is_a_target(targets):
    names = {attributes["name"] for _, attributes in targets}
    wanted = {dep.lstrip(":") for _, attributes in targets for dep in attributes.get("deps", ())}
    assert not wanted - names


def test_names_are_unique(targets):
    names = [attributes["name"] for _, attributes in targets]
    assert len(set(names)) == len(names)


def test_every_test_file_is_run_by_one_target(targets):
    run = [attributes["args"] for kind, attributes in targets if kind == "py_test"]
    tests = [[n] for n in SOURCES if pathlib.PurePosixPath(n).name.startswith("test_")]
    assert sorted(run) == sorted(tests)
