#!/usr/bin/env bash
# Tests the plugin on the GPUs of this machine, those checks first that tell most. Prints a line for each, and merges the
# results into docs/results/gpu_check.json (--out FILE for another). A call runs what has no result of this code yet:
#
#   bash scripts/gpu_check.sh --minutes 8       in parts: four calls cover one H100; each continues the last one
#   bash scripts/gpu_check.sh                   all of it
#   bash scripts/gpu_check.sh --only 'scaler'   cases whose name matches a regular expression (--list prints the names)
#   bash scripts/gpu_check.sh --missing         keep results of older code: only cases without any result
#   bash scripts/gpu_check.sh --cpu             the same checks on CPU ranks, to test this program
#   bash scripts/gpu_check.sh --one-of-each     one case of each check, under one version of FSDP
#
# One GPU runs one rank, and two ranks on the same GPU over gloo as an experiment. It cannot show NCCL, overlap, hybrid
# sharding and the diagnosis of hangs, which run from two GPUs on. docs/gpu-review.md lists the checks.
# Uses the Python of .venv if its torch sees a device, otherwise python3 on PATH. Environment variable: PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help)
    sed -n '2,14s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
usable=""
for python in "${PYTHON:-}" .venv/bin/python python3; do
  [ -n "$python" ] && command -v "$python" > /dev/null || continue
  if "$python" -c 'import torch; raise SystemExit(not torch.accelerator.is_available())' 2> /dev/null; then
    exec "$python" -m scripts.bench gpu_check "$@"
  fi
  if [ -z "$usable" ] && "$python" -c 'import accelerate, torch, transformers' 2> /dev/null; then
    usable=$python
  fi
done
if [ -z "$usable" ]; then
  echo "gpu_check: no Python with torch, transformers and accelerate was found. Set PYTHON to one." >&2
  exit 1
fi
exec "$usable" -m scripts.bench gpu_check "$@" # --cpu and --list need no device; else it prints why there is none
