#!/usr/bin/env bash
# All checks that a change must pass: format, lint, types, tests. CI runs this script only.
#
#   bash scripts/test.sh                  all checks
#   bash scripts/test.sh --unit           the tests for each edit: tests/unit, a minute on two cores
#   bash scripts/test.sh tests/unit -x    pytest alone, with these arguments
#   bash scripts/test.sh --accelerator    the quick tests of ranks, all of them on the simulated accelerator (45 minutes)
#   bash scripts/test.sh --slow           the combinations and long runs that the quick set omits (hours); --minutes 60:
#                                         as many files as begin within an hour, those that never ran first
#
# Creates .venv on the first run. Environment variables: VENV, PYTHON, TORCH (see scripts/environment.sh), WORKERS
# (number of tests that run at the same time, default 3; 0: one process).
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help)
    sed -n '2,12s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

. scripts/environment.sh
make_environment
install_programs

# Without bytecode files, each of the many processes would compile the package again: 1.5 seconds of CPU.
unset PYTHONDONTWRITEBYTECODE
# Three files at a time, on two cores: tests of ranks often wait, for imports of one rank or for a time limit. The files
# run in the order of their paths, so that the longest ones, in tests/gloo, do not begin last.
quick=("$python" -m pytest -q -m "not slow and not gpu" -n "${WORKERS:-3}" --dist loadfile --no-loadscope-reorder)
# Tests of bitsandbytes, sentence-transformers and torchao, which scripts/environment.sh installs beside the environment.
with_libraries="tests/gloo/test_fp8.py tests/gloo/test_losses.py tests/gloo/test_optimizer_names.py tests/gloo/test_optimizers.py tests/gloo/test_quantized.py
  tests/gloo/test_sentence_transformer.py tests/unit/backends/test_known_optimizers.py"
libraries=$("$python" -c 'import sys; print(sys.prefix)')/libraries${PYTHONPATH:+:$PYTHONPATH}
if [ "${1:-}" = --accelerator ]; then
  shared_ranks=$(grep -l "_ranks: Ranks" tests/gloo/test_*.py)
  result=passed
  RANKS_DEVICE=accelerator "${quick[@]}" $shared_ranks "${@:2}" || result=failed
  [ $# -gt 1 ] || "$python" -m scripts.last_runs --record accelerator "$result"
  [ "$result" = passed ]
  exit
fi
if [ "${1:-}" = --unit ]; then
  exec "$python" -m pytest -q -m "not slow and not gpu" -n "${WORKERS:-3}" --dist worksteal tests/unit "${@:2}"
fi
if [ "${1:-}" = --slow ]; then
  PYTHONPATH=$libraries exec "$python" -m scripts.slow_tests --workers "${WORKERS:-3}" "${@:2}"
fi
if [ $# -gt 0 ]; then
  PYTHONPATH=$libraries exec "$python" -m pytest -q "$@"
fi
"$python" -m ruff check --quiet .
"$python" -m ruff format --check --quiet .
"$python" -m mypy & # beside the tests, which often wait
types=$!
echo "tests on ranks of the simulated accelerator (docs/devices.md)"
RANKS_DEVICE=accelerator RANKS_CASES=few "${quick[@]}" tests/gloo/test_{precision,checkpoint_save,submodule_calls,several_models,inputs}.py
wait "$types"
echo "tests of bitsandbytes, sentence-transformers and torchao"
PYTHONPATH=$libraries "${quick[@]}" $with_libraries tests/unit/integrations/test_hooks.py
echo "all other quick tests"
exec "${quick[@]}" tests ${with_libraries//tests/--ignore=tests}
