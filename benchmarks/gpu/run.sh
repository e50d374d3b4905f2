#!/usr/bin/env bash
# Checks and measures everything that is for GPUs, in ten minutes: `bash benchmarks/gpu/run.sh OUTPUT [WHEELS]`.
# For a machine with an NVIDIA GPU and JAX for CUDA, which needs no network: WHEELS is a folder with
# the wheels that it lacks. On a machine with a network, for Python 3.12 (and tokamax, to compare with):
#   python3 -m pip download -d WHEELS --only-binary=:all: --python-version=3.12 \
#     --platform=manylinux_2_28_x86_64 -r benchmarks/gpu/wheels.txt [tokamax qwix]
# STAGES="kernel steps" runs only these, also on a CPU (`tune` is not among the usual ones); LIMIT=60 stops
# each after so many seconds. OUTPUT gets the logs and results. The exit status is 1 if a stage failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
output=${1:-gpu_results}
wheels=${2:-}
stages=${STAGES:-kernel products steps contract}
for name in $stages; do
  [[ " kernel tune products steps contract " == *" $name "* ]] || { echo "STAGES: no stage is called $name" >&2; exit 2; }
done
mkdir -p "$output"
failed=0
export OUTPUT=$output
if [ -n "$wheels" ]; then
  site=$(mktemp -d)
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl ||
    { echo "WHEELS: expected a folder of wheels for this Python, got $wheels" >&2; exit 1; }
  export PYTHONPATH=$site
fi
export PYTHONPATH=$PWD:${PYTHONPATH:-}
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu} PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
# Processes share the GPU, and each compiled program is compiled once.
export XLA_PYTHON_CLIENT_PREALLOCATE=false TF_CPP_MIN_LOG_LEVEL=2
export JAX_COMPILATION_CACHE_DIR=$output/.cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
processes=$(($(nproc) > 2 ? $(nproc) - 2 : 1))

# At most so many seconds for a stage, whose output is also in a log.
stage() {
  local name=$1 seconds=${LIMIT:-$2}
  shift 2
  printf '\n=== %s (%d s so far)\n' "$name" "$SECONDS"
  timeout -k 5 "$seconds" "$@" >"$output/$name.log" 2>&1
  local status=$?
  tail -n "${LINES_SHOWN:-25}" "$output/$name.log" | cut -c1-400
  printf '%s: exit status %d\n' "$name" "$status"
  [ "$status" = 0 ] || failed=1
}

kernel() { stage kernel 100 python3 -m pytest -q -p no:cacheprovider -n "$processes" --slow --tb=short tests/kernels/test_pallas_matmul.py; }

tune() {
  # shellcheck disable=SC2016
  stage tune 200 bash -c 'run() {
    for i in $(seq 0 $(($1 - 1))); do
      python3 -m benchmarks.gpu.tune --tune_output="$OUTPUT/tiles" --tune_part=$i --tune_parts="$@" &
    done
    wait
  }
  run "$0" --tune_compile --tune_seconds=90
  echo "compiled after $SECONDS s"
  run 3 --tune_seconds=90' "$processes"
  cat "$output"/tiles/*.jsonl >"$output/tiles.jsonl" && rm -r "$output/tiles"
}

products() { stage products 170 python3 -m benchmarks.gpu.products --gpu_output="$output/products.json" --gpu_compilers="$processes"; }

steps() { stage steps 180 python3 -m benchmarks.gpu.steps --steps_output="$output/steps.json"; }

contract() {
  JAX_DEFAULT_MATMUL_PRECISION=highest stage contract 150 \
    python3 -m pytest -q -p no:cacheprovider -n "$processes" --tb=short tests/test_contract.py
}

python3 - "${STAGES:-}" <<'PYTHON' || exit 1
import importlib, sys

lacking = []
for name in ("jax", "haiku", "optax", "chex", "plum", "absl", "pytest", "xdist", "hypothesis", "safetensors"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        lacking.append(str(error))
if lacking:
    sys.exit(f"{sys.executable}: {'; '.join(lacking)}. Put the wheels into a folder, and name it (WHEELS).")
import jax

print(jax.__version__, jax.devices())
if jax.default_backend() != "gpu" and not sys.argv[1]:
    sys.exit("JAX finds no GPU here, so nothing is measured (STAGES=kernel runs on a CPU, too).")
PYTHON
for name in $stages; do "$name"; done
rm -rf "$output/.cache"
printf '\n=== done (%d s)\n' "$SECONDS"
exit "$failed"
