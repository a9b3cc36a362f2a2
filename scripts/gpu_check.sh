#!/usr/bin/env bash
# Tests the plugin on the GPUs of this machine: every strategy under both FSDP versions in fp32, bf16 and fp16, offload,
# ignored modules, the gradient scaler, pinned asynchronous saves, gathering, clipping, reports, process groups, compile,
# generate, activation offload, loading, the launcher with its restarts and its diagnosis of hangs, the benchmark and the
# profiler. One rank on one GPU; with two or more GPUs also two ranks on two GPUs. Prints a table and writes docs/results/gpu_check.json.
#
#   bash scripts/gpu_check.sh                   all cases
#   bash scripts/gpu_check.sh --only 'scaler'   cases whose name matches a regular expression (--list prints the names)
#   bash scripts/gpu_check.sh --cpu             the same checks on CPU ranks, to test this program
#
# Uses the Python of .venv if its torch is a CUDA build, otherwise python3 on PATH. Environment variable: PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help)
    sed -n '2,11s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

sees_cuda() { "$1" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; }

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
candidates=("${PYTHON:-}" .venv/bin/python python3)
for python in "${candidates[@]}"; do
  if [ -n "$python" ] && command -v "$python" >/dev/null && sees_cuda "$python"; then
    exec "$python" scripts/bench/gpu_check.py "$@"
  fi
done
case " $* " in
  *" --cpu "* | *" --list "*)
    for python in "${candidates[@]}"; do
      if [ -n "$python" ] && command -v "$python" >/dev/null && "$python" -c 'import torch' 2>/dev/null; then
        exec "$python" scripts/bench/gpu_check.py "$@"
      fi
    done
    ;;
esac
echo "gpu_check: torch finds no CUDA device. Nothing was checked. --cpu runs the checks on CPU ranks." >&2
exit 1
