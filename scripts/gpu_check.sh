#!/usr/bin/env bash
# Runs every strategy under both FSDP versions, in fp32, bf16 and fp16, with and without offload, on one GPU (world
# size 1, NCCL), then 2 ranks that share the GPU, and writes docs/results/gpu_check.json.
#
#   bash scripts/gpu_check.sh
#
# Uses the Python of .venv if its torch is a CUDA build, otherwise python3 on PATH. Environment variable: PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  "") ;;
  -h | --help)
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
  *)
    echo "gpu_check.sh: unknown argument '$1'. Try --help." >&2
    exit 2
    ;;
esac

sees_cuda() { "$1" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; }

for python in "${PYTHON:-}" .venv/bin/python python3; do
  if [ -n "$python" ] && command -v "$python" >/dev/null && sees_cuda "$python"; then
    exec "$python" scripts/bench/gpu_check.py
  fi
done
echo "gpu_check: torch finds no CUDA device. Nothing was checked." >&2
exit 1
