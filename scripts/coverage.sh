#!/usr/bin/env bash
# Runs tests with coverage in all processes, ranks too, and lists the functions of the package that nothing executes.
#
#   bash scripts/coverage.sh                     the quick tests; writes docs/results/uncovered.json (an hour or more)
#   bash scripts/coverage.sh --slow              the slow tests too (hours)
#   bash scripts/coverage.sh tests/unit -x       pytest with these arguments; only prints the list
#
# Installs coverage into the environment of the tests. Data and configuration are in outputs/coverage. Environment
# variables: VENV, PYTHON, TORCH (see scripts/environment.sh), WORKERS (as for scripts/test.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help)
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

. scripts/environment.sh
make_environment
"$python" -m pip install -qq --disable-pip-version-check --root-user-action=ignore "coverage>=7.10"
folder=$PWD/outputs/coverage
rm -rf "$folder"
mkdir -p "$folder"
# patch: a process that Python starts measures itself, and one that ends by os._exit writes what it has measured.
cat > "$folder/configuration" <<CONFIGURATION
[run]
source = $PWD/hf_fsdp_plugin
data_file = $folder/data
parallel = true
patch = subprocess, _exit
disable_warnings = no-data-collected, module-not-measured, module-not-imported
CONFIGURATION

libraries=$("$python" -c 'import sys; print(sys.prefix)')/libraries${PYTHONPATH:+:$PYTHONPATH}
result=passed
# It counts the modules that a process imports, and coverage imports some of them.
not_here=tests/unit/cli/test_check.py::test_check_starts_without_the_modules_of_ranks
measure() {
  PYTHONPATH=$libraries "$python" -m coverage run --rcfile="$folder/configuration" -m pytest -q --deselect "$not_here" \
    "$@" || result=failed
}
parallel=(-n "${WORKERS:-3}" --dist loadfile --no-loadscope-reorder)
write=()
case "${1:-}" in
  "" | --slow)
    measure "${parallel[@]}" -m "not slow and not gpu" tests
    [ "${1:-}" != --slow ] || measure "${parallel[@]}" -m slow tests
    write=(--write)
    ;;
  *) measure "$@" ;;
esac
"$python" -m coverage combine -q --rcfile="$folder/configuration"
"$python" -m coverage json -q --rcfile="$folder/configuration" -o "$folder/coverage.json"
"$python" -m scripts.uncovered "$folder/coverage.json" "${write[@]}"
[ ${#write[@]} -eq 0 ] || "$python" -m scripts.last_runs --record coverage "$result"
[ "$result" = passed ]
