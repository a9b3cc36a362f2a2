#!/usr/bin/env bash
# Installs TRL, PEFT, bitsandbytes, sentence-transformers and others, and runs scripts that these packages ship,
# unchanged, through the plugin on two CPU ranks. Each run is compared with an unsharded one. Writes
# docs/results/ecosystem.json and its table in docs/results.md. Behaviors of user scripts (scripts/ecosystem/behaviors)
# run in one start of the ranks per FSDP version.
#
#   bash scripts/ecosystem.sh                                 all cases, both FSDP versions (an hour or two on two cores)
#   bash scripts/ecosystem.sh --only sft dpo --version 2      cases whose name contains a word
#   bash scripts/ecosystem.sh --missing                       only what does not work yet in the result file
#   bash scripts/ecosystem.sh --transformers-examples DIR     also the scripts in transformers' examples/pytorch
#   bash scripts/ecosystem.sh --accelerate-examples DIR       also the scripts in accelerate's examples
#   bash scripts/ecosystem.sh --no-install ARGS…              use the environment as it is
#
# Environment variables: VENV, PYTHON, TORCH (see scripts/environment.sh). A package that is missing skips its cases.
set -euo pipefail
cd "$(dirname "$0")/.."

. scripts/environment.sh
case "${1:-}" in
  -h | --help)
    sed -n '2,14s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
  --no-install)
    shift
    python=$VENV/bin/python
    ;;
  *) make_environment test,ecosystem ;;
esac

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
status=0
"$python" -m scripts.run_ecosystem "$@" || status=$?
"$python" -m scripts.bench.tables.update_results
exit $status
