#!/usr/bin/env bash
# Tests the package with several versions of torch, Transformers, Accelerate, PEFT and TRL (scripts/matrix.yaml): makes one
# virtual environment at a time, runs the tests of each subject and the quickstart, and deletes the environment. Writes
# docs/results/matrix.json after each combination, and its table in docs/compatibility.md.
#
#   bash scripts/matrix.sh                              everything (hours; the environment of a torch for GPUs takes 6 GB)
#   bash scripts/matrix.sh --only torch-2.15 oldest     these combinations
#   bash scripts/matrix.sh --subjects trainer PEFT      these subjects; "quickstart" is one, too
#   bash scripts/matrix.sh --missing                    only cells that are not green in the result file
#   bash scripts/matrix.sh --keep --folder DIR          keep the environments in DIR, and use those that are there
#   bash scripts/matrix.sh --list                       combinations and subjects
#
# Environment variables: WORKERS (processes of pytest, default 2), PYTHON (see scripts/environment.sh). Needs a python3
# with PyYAML, or the environment of scripts/test.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help)
    sed -n '2,14s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

. scripts/environment.sh
make_environment
exec "$python" -m scripts.run_matrix "$@"
