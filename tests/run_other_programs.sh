#!/usr/bin/env bash
# Lets other programs read what this library writes, each in an environment of its own:
#   bash tests/run_other_programs.sh llama_cpp   # compiles llama.cpp first, 10 minutes on two cores
#   bash tests/run_other_programs.sh peft        # downloads PyTorch first, 3 GB
# ENVIRONMENT=... names a folder for the environment, which is then kept and used again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

case ${1:-} in
  llama_cpp) needed=(llama-cpp-python==0.3.36) ;;
  peft) needed=(torch==2.13.0 peft==0.21.2) ;;
  *) echo "usage: bash $0 llama_cpp | peft" >&2; exit 2 ;;
esac

if [ -n "${ENVIRONMENT:-}" ]; then
  environment=$ENVIRONMENT
else
  environment=$(mktemp -d)
  trap 'rm -rf "$environment"' EXIT
fi
[ -x "$environment/bin/python" ] || "${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/pip" install -q "${needed[@]}" -e '.[examples]'
PYTHONPATH=.:examples "$environment/bin/python" "tests/other_programs/read_by_$1.py"
