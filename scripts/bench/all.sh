#!/usr/bin/env bash
# Runs every benchmark of scripts/bench one after the other, and writes the tables of docs/results.md. A benchmark that
# fails or exceeds its time limit does not end the others. Prints a summary with exit codes and durations.
#
#   bash scripts/bench/all.sh                    all, with the sizes of docs/results (hours)
#   bash scripts/bench/all.sh --quick            small sizes, results in a temporary folder; docs/results stays as it is
#   bash scripts/bench/all.sh --only load        one benchmark (repeatable)
#   bash scripts/bench/all.sh --list             names, time limits in minutes, and commands
#
# A benchmark is a program that writes docs/results/NAME.json: scripts/bench/NAME.py with make_parser(__doc__, "NAME"), or
# one of OTHERS. PEERS names the checkouts of scripts/run_peers.py ("accelerate=DIR …"); without them it only writes its
# table. The exit code is 1 if any has failed, and 130 after Ctrl-C.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root" || exit 2
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false

DEFAULT_MINUTES=45
QUICK_MINUTES=10
# name -> minutes, where the default does not suffice
declare -A MINUTES=([survival]=120 [memory_error]=90 [ecosystem]=240 [throughput]=90 [checkpoint_save]=60 [large_world]=60 [hangs_healthy]=90 [matrix]=240 [peers]=480)
# name -> arguments of --quick; a program with a flag --quick needs no row
declare -A QUICK=(
  [checkpoint_save]="--rounds 1 --full-rounds 1 --layers 2 --hidden 128 --vocabulary 1000"
  [closed_against_trace]="--settings 2"
  [command_start]="--rounds 3"
  [computed_weights]="--rounds 1"
  [enabled_start]="--pairs 60"
  [gloo_connections]="--worlds 16"
  [hang_overhead]="--pairs 2 --layers 2 --hidden 64 --length 32"
  [hangs]="--kinds sleep skip --versions 2 --ways loop"
  [hangs_healthy]="--healthy 0.2 --versions 2"
  [large_world]="--worlds 2 --fsdp1-worlds --layers 2"
  [layer_classes]="--only bert"
  [load]="--rounds 1 --worlds 2"
  [many_ranks]="--worlds 4"
  [memory_error]="--only family=llama,version=1,strategy=full_shard"
  [merge]="--pairs 1"
  [planner_time]=""
  [preflight_time]="--only BERT"
  [published_runs]=""
  [readers]="--rounds 1"
  [reserved_memory]="--points 1"
  [resume]="--rounds 1"
  [resume_parity]=""
  [start]="--rounds 1"
  [step_overhead]="--pairs 2 --layers 2 --hidden 64 --length 32"
  [step_time]="--ranks 2 --rounds 1 --only bert"
  [renamed_names]="--only FSDPParam.sharded_param"
  [restarts]="--kills 1 --versions 2"
  [suggestions]="--cases data --rounds 1"
  [two_hosts]="--only bytes --versions 2"
  [survival]="--trials 4 --no-disk-full"
  [verified_reads]="--pairs 1 --layers 2 --hidden 128"
  [generated_values]="--cases 2000"
)
# name -> command of a benchmark that is not scripts/bench/NAME.py
declare -A OTHERS=(
  [generated_values]="$python scripts/generated_values.py --cases 1000000 --seed 1"
  [hangs_healthy]="$python -m scripts.bench hangs --healthy 30"
  [ecosystem]="bash scripts/ecosystem.sh"
  [matrix]="bash scripts/matrix.sh"
  [peers]="$python scripts/run_peers.py ${PEERS:-}"
)
# name -> program of --quick that is not scripts/bench/NAME.py
declare -A PROGRAMS=([generated_values]=scripts/generated_values.py [hangs_healthy]=scripts/bench/measure/hangs.py)

quick=0 list=0 only=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=1 ;;
    --list) list=1 ;;
    --only) [ $# -gt 1 ] || { echo "all.sh: --only needs a name." >&2; exit 2; }; only+=("$2"); shift ;;
    --only=*) only+=("${1#--only=}") ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "all.sh: unknown argument $1. --help lists the arguments." >&2; exit 2 ;;
  esac
  shift
done

names=()
for file in scripts/bench/*.py; do
  name=$(basename "$file" .py)
  grep -q "make_parser(__doc__, \"$name\")" "$file" && names+=("$name")
done
names+=(generated_values hangs_healthy ecosystem matrix peers)
command -v nvidia-smi > /dev/null && { OTHERS[gpu_check]="bash scripts/gpu_check.sh --again"; names+=(gpu_check); }
for name in "${only[@]}"; do
  [[ " ${names[*]} " == *" $name "* ]] || { echo "all.sh: there is no benchmark $name. --list prints the names." >&2; exit 2; }
done
[ ${#only[@]} -gt 0 ] && names=("${only[@]}")

out=$(mktemp -d -t hf_fsdp_bench.XXXXXX)
command_of() {
  local name=$1 file=scripts/bench/$1.py
  if [ $quick = 0 ]; then
    echo "${OTHERS[$name]:-$python $file}"
  elif [ -n "${QUICK[$name]+x}" ]; then
    echo "$python ${PROGRAMS[$name]:-$file} ${QUICK[$name]} --out $out/$name.json"
  elif [ -f "$file" ] && grep -q '"--quick"' "$file"; then
    echo "$python $file --quick --out $out/$name.json"
  fi
}
minutes_of() { [ $quick = 1 ] && echo $QUICK_MINUTES || echo "${MINUTES[$1]:-$DEFAULT_MINUTES}"; }

if [ $list = 1 ]; then
  for name in "${names[@]}"; do printf '%-20s %4s  %s\n' "$name" "$(minutes_of "$name")" "$(command_of "$name")"; done
  rm -rf "$out"
  exit 0
fi

summary=() failed=0 stopped=0 child=
stop() { stopped=1; [ -n "$child" ] && kill -TERM "$child" 2> /dev/null; }
trap stop INT TERM
for name in "${names[@]}"; do
  words=$(command_of "$name")
  if [ -z "$words" ]; then
    summary+=("$(printf '%-20s %-12s' "$name" "no quick sizes")")
    continue
  fi
  log=$out/$name.log
  echo "[$(date +%T)] $name: $words" >&2
  began=$SECONDS
  # shellcheck disable=SC2086
  timeout --kill-after=30 "$(minutes_of "$name")m" $words > "$log" 2>&1 &
  child=$!
  wait "$child"; code=$?
  while kill -0 "$child" 2> /dev/null; do wait "$child"; code=$?; done
  child=
  [ $stopped = 1 ] && code=130
  case $code in 0) what=passed ;; 124 | 137) what="time limit" ;; 130) what=stopped ;; *) what=failed ;; esac
  [ $code = 0 ] || { failed=1; echo "  $what (exit code $code), last lines of $log:" >&2; tail -5 "$log" | sed 's/^/  | /' >&2; }
  summary+=("$(printf '%-20s %-12s exit code %3d %6d s' "$name" "$what" "$code" $((SECONDS - began)))")
  [ $stopped = 1 ] && break
done
trap - INT TERM

[ $quick = 1 ] || [ $stopped = 1 ] || "$python" scripts/bench/tables/update_results.py || failed=1
printf '\n%s\n' "summary:"
printf '  %s\n' "${summary[@]}"
echo "logs: $out"
[ $stopped = 1 ] && exit 130
exit $failed
