"""What Bazel's `py_test` runs: pytest, on the test file that the target names in its arguments."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["--slow", *sys.argv[1:]]))
