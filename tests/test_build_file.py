"""The `BUILD` files: every source is in a target, every test is run, and dependencies are the imports.

`BUILD` is Starlark, which for what it uses here is Python: each is run with stand-ins for the rules.
"""

import ast
import collections
import fnmatch
import functools
import pathlib
import re
import types
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("haiku_implicit", "tests", "examples", "benchmarks", "docs")
PATHS = [ROOT.glob("*"), *((ROOT / folder).rglob("*") for folder in FOLDERS)]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for paths in PATHS
    for path in paths
    if path.is_file() and "__pycache__" not in path.parts
)
SOURCES = [name for name in FILES if name.endswith(".py")]
RULES = ("py_library", "py_binary", "py_test", "filegroup", "alias")


def folder_of(name):
    return name.rpartition("/")[0]


PACKAGES = [folder_of(name) for name in FILES if name.rpartition("/")[2] == "BUILD"]


class Target(NamedTuple):
    """One target of a package, its labels written out: `//tests:cases.py` and `//tests:tests`."""

    kind: str
    package: str
    name: str
    srcs: frozenset
    deps: frozenset
    data: frozenset
    main: str | None
    args: tuple
    public: bool

    @property
    def label(self):
        return f"//{self.package}:{self.name}"


def package_of(name):
    """The package a file belongs to: the nearest folder above it that has a `BUILD`."""
    folder = folder_of(name)
    while folder not in PACKAGES:
        folder = folder_of(folder)
    return folder


def label_of(name):
    """The label of a file."""
    package = package_of(name)
    return f"//{package}:{name.removeprefix(package).lstrip('/')}"


def absolute(label, package):
    """A label as it is written in a package, in full."""
    if not label.startswith("//"):
        return f"//{package}:{label.removeprefix(':')}"
    return label if ":" in label else f"{label}:{label.rpartition('/')[2]}"


def matches(name, pattern):
    """Whether Bazel's glob pattern names the file: `*` stays in one folder, `**` takes any."""
    *folders, last = pattern.split("/")
    parts = ["(?:[^/]+/)*" if f == "**" else _segment(f) + "/" for f in folders]
    parts.append(".*" if last == "**" else _segment(last))
    return re.fullmatch("".join(parts), name) is not None


def _segment(pattern):
    return fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z").replace(".*", "[^/]*")


def glob_in(package):
    """Bazel's `glob`: relative to the package, and not into folders that are packages themselves."""
    own = [label_of(name).partition(":")[2] for name in FILES if package_of(name) == package]

    def glob(include, exclude=(), allow_empty=False):
        found = [
            name
            for name in own
            if any(matches(name, p) for p in include) and not any(matches(name, p) for p in exclude)
        ]
        assert found or allow_empty, f"//{package}: glob({include}) finds nothing"
        return found

    return glob


@functools.cache
def evaluate(package):
    """What a `BUILD` defines: its targets, and the labels of the files that others may name."""
    targets, exported, defaults = [], set(), {}

    def rule(kind):
        def add(*, name, srcs=(), deps=(), data=(), main=None, args=(), **attributes):
            assert set(attributes) <= {"actual", "imports", "visibility"}, (package, attributes)
            sets = [frozenset(absolute(label, package) for label in x) for x in (srcs, deps, data)]
            visible = attributes.get("visibility", defaults.get("default_visibility", ()))
            main = main and absolute(main, package)
            targets.append(Target(kind, package, name, *sets, main, tuple(args), bool(visible)))

        return add

    glob = glob_in(package)
    scope = {kind: rule(kind) for kind in RULES} | dict(
        glob=glob,
        package=defaults.update,
        licenses=lambda kinds: None,
        exports_files=lambda names: exported.update(absolute(name, package) for name in names),
        native=types.SimpleNamespace(glob=glob, package_name=lambda: package),
    )

    def load(file, *names):
        if not file.startswith("@"):  # what the others define is in the scope already
            run(file.removeprefix("//").replace(":", "/"))
        assert set(names) <= set(scope), f"{file} does not define {names}"

    def run(file):
        exec(compile((ROOT / file).read_text(), file, "exec"), scope)

    scope["load"] = load
    run(f"{package}/BUILD".lstrip("/"))
    return targets, exported


TARGETS = {target.label: target for package in PACKAGES for target in evaluate(package)[0]}
LIBRARIES = [target for target in TARGETS.values() if target.kind == "py_library"]
TESTS = [target for target in TARGETS.values() if target.kind == "py_test"]
OWNERS = {source: target.label for target in LIBRARIES for source in target.srcs}


@pytest.mark.parametrize(
    "name, pattern, expected",
    [
        ("test_a.py", "**/test_*.py", True),
        ("arrays/test_a.py", "**/test_*.py", True),
        ("cases.py", "**/test_*.py", False),
        ("models/llama.py", "*.py", False),
        ("models/llama.py", "**/*.py", True),
        ("goldens/a.txt", "**", True),
        ("a_py", "*.py", False),
    ],
)
def test_glob_patterns(name, pattern, expected):
    assert matches(name, pattern) == expected


def test_globs_stop_at_packages():
    found = glob_in("haiku_implicit/quantized")(["**/*.py"])
    assert "matrix.py" in found and "cpu/native.py" not in found


def test_every_folder_with_sources_has_a_build_file():
    # A stand-in has the folders of the package that it replaces, and is one library.
    sources = [name for name in SOURCES if "/stand_ins/" not in name]
    assert {folder_of(name) for name in sources} <= set(PACKAGES)


def test_names_are_unique():
    labels = [target.label for package in PACKAGES for target in evaluate(package)[0]]
    assert [label for label, n in collections.Counter(labels).items() if n > 1] == []


def test_every_source_is_in_one_library_or_one_test():
    sources = [s for target in LIBRARIES + TESTS for s in target.srcs]
    found = collections.Counter(s for s in sources if s != "//tests:bazel_main.py")
    found["//tests:bazel_main.py"] = sources.count("//tests:bazel_main.py") - len(TESTS)
    assert found == {label_of(name): 1 for name in SOURCES}


@pytest.mark.parametrize("label", TARGETS)
def test_what_a_target_names_exists_and_may_be_named(label):
    target = TARGETS[label]
    files = {label_of(name) for name in FILES}
    assert target.deps <= set(TARGETS)
    for other in target.srcs | target.data | target.deps:
        package = other.removeprefix("//").partition(":")[0]
        assert other in TARGETS or other in files, other
        if package != target.package and other in TARGETS:
            assert TARGETS[other].public, f"{other} is not visible to {label}"
        elif package != target.package:
            assert other in evaluate(package)[1], f"{other} is not exported to {label}"


def test_every_test_file_is_run_by_one_target():
    tests = [name for name in SOURCES if name.rpartition("/")[2].startswith("test_")]
    assert sorted(target.args for target in TESTS) == [(name,) for name in tests]
    for target in TESTS:
        assert target.main in target.srcs and label_of(target.args[0]) in target.srcs


def test_every_program_of_the_examples_is_a_binary():
    programs = {
        label_of(name)
        for name in SOURCES
        if folder_of(name) == "examples" and "__main__" in (ROOT / name).read_text()
    }
    binaries = [target for target in TARGETS.values() if target.kind == "py_binary"]
    assert {source for target in binaries for source in target.srcs} == programs


def test_pre_commit_and_the_whole_run_use_one_buildifier():
    files = (".pre-commit-config.yaml", ".ci/run")
    named = {re.search(r"@bazel/buildifier@[\d.]+", (ROOT / file).read_text())[0] for file in files}
    assert len(named) == 1


@functools.cache
def source_of(module):
    """The file of a module that is ours; the scripts of `examples/` import each other by bare names."""
    for folder in ("", "examples/"):
        path = folder + module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if name in FILES:
                return name
    return None


def imports_of(name):
    """The files of ours that a source imports, anywhere in it, or that its stub names.

    pytest loads `conftest.py` for a test.
    """
    modules = set()
    texts = [(ROOT / file).read_text() for file in (name, f"{name}i") if file in FILES]
    for node in ast.walk(ast.parse("\n".join(texts))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {full if source_of(full) else node.module for full in whole}
    found = {source_of(module) for module in modules} - {None}
    return found | {"tests/conftest.py"} if "/test_" in name else found


@pytest.mark.parametrize("kind", ["py_library", "py_test"])
@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_are_what_the_files_import(package, kind):
    """The tests of a folder have theirs in common: what all of them import together."""
    targets = [t for t in TARGETS.values() if (t.package, t.kind) == (package, kind)]
    names = {name for name in SOURCES for target in targets if label_of(name) in target.srcs}
    imported = {OWNERS[label_of(other)] for name in names for other in imports_of(name)}
    wanted = imported - {target.label for target in targets}
    declared = frozenset().union(*(target.deps for target in targets))
    assert declared == wanted, f"{package}/BUILD, {kind}: deps should be {sorted(wanted)}"
