#!/usr/bin/env bash
# Runs all tests in a fresh environment at the oldest versions that are supported (tests/oldest.txt).
# Usage: bash tests/run_oldest.sh [arguments of pytest]; PYTHON=... names a Python 3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

python=${PYTHON:-python3.11}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || version=none
if [ "$version" != 3.11 ]; then
  echo "$python is no Python 3.11, the oldest that is supported: set PYTHON=..." >&2
  exit 2
fi

environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"$python" -m venv "$environment"
"$environment/bin/pip" install -q -c tests/oldest.txt -e '.[test]'
"$environment/bin/pip" list | grep -iE '^(jax|jaxlib|dm-haiku|optax|chex|plum-dispatch|numpy) '
# rlax and distrax of that age import a tensorflow-probability that does not import with JAX 0.7.0.
skipped='tests/test_readme.py::test_programs_run_from_top_to_bottom[neighbors.md]'
"$environment/bin/python" -m pytest -n 2 --slow --deselect "$skipped" "$@"
