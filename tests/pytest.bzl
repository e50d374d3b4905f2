"""Test files as targets."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_files(deps, data = []):
    """One test for each file test_*.py of the folder: tests/arrays/test_lora.py is //tests/arrays:test_lora.

    Args:
      deps: what the files of the folder import, all together.
      data: the files that they read.
    """
    for test in native.glob(["test_*.py"]):
        py_test(
            name = test[:-len(".py")],
            srcs = [
                test,
                "//tests:bazel_main.py",
            ],
            args = [native.package_name() + "/" + test],
            data = data + ["//:setup.cfg"],
            main = "//tests:bazel_main.py",
            deps = deps,
        )
