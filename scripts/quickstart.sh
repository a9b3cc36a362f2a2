#!/usr/bin/env bash
# Fine-tunes, saves and resumes a sharded model on 2 CPU ranks, starting from a fresh checkout.
#
#   bash scripts/quickstart.sh            creates .venv, installs, trains (minutes; changes nothing outside this folder)
#   bash scripts/quickstart.sh --help
#
# It fine-tunes SmolLM2-135M on the Python language reference with configs/seed_book_chapter.yaml, checks that the loss
# fell, resumes from a sharded checkpoint, generates a sentence, and prints the report of the run. A second run starts
# over in outputs/quickstart. Environment variables: VENV, PYTHON, TORCH (see scripts/environment.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  "") ;;
  -h | --help)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
  *)
    echo "quickstart.sh: unknown argument '$1'. Try --help." >&2
    exit 2
    ;;
esac

config=configs/seed_book_chapter.yaml
out=outputs/quickstart
steps=20
more=24 # the second run resumes from the checkpoint of the first and ends at this step

echo "[1/5] installing"
. scripts/environment.sh
make_environment
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# The config sets 4 processes, one per GPU, and no FSDP version. The flags set 2 CPU ranks and version 2. All other
# settings are from the config: full shard, LlamaDecoderLayer, bf16, backward prefetch, sharded checkpoints, RAM-efficient
# loading.
# On CPUs without AVX-512, torch multiplies matrices in bf16 up to 100 times slower than in fp32, so they use fp32.
precision=bf16 bf16=True
case $("$python" -c "import torch; print(torch.backends.cpu.get_cpu_capability())") in
  AVX2 | DEFAULT)
    precision=no bf16=False
    echo "this CPU has no AVX-512, and would compute slowly in bf16: the run computes in fp32"
    ;;
esac
train() {
  "$VENV/bin/hf-fsdp" launch --config_file "$config" --fsdp_version 2 --num_processes 2 --mixed_precision "$precision" \
    --cpu scripts/train_causal_lm.py --use_cpu --bf16 "$bf16" --output_dir "$out" --max_length 128 \
    --per_device_train_batch_size 2 --learning_rate 1e-4 --lr_scheduler_type constant --eval_strategy steps \
    --eval_steps 10 --save_strategy steps --save_steps "$steps" "$@"
}

echo "[2/5] checking $config"
"$VENV/bin/hf-fsdp" check "$config" --set fsdp.version=2

echo "[3/5] fine-tuning SmolLM2-135M on 2 ranks, $steps steps"
rm -rf "$out"
SECONDS=0
train --max_steps "$steps" --eval_on_start
"$python" - "$out/checkpoint-$steps/trainer_state.json" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    history = json.load(file)["log_history"]
eval_losses = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
(first, before), (last, after) = min(eval_losses.items()), max(eval_losses.items())
if not after < before - 0.05:
    sys.exit(f"the loss did not fall: {before:.3f} at step {first}, {after:.3f} at step {last}")
print(f"the evaluation loss fell: {before:.3f} at step {first}, {after:.3f} at step {last}")
PYTHON

echo "[4/5] resuming from $out/checkpoint-$steps up to step $more, then generating a sentence"
ls "$out/checkpoint-$steps"
train --max_steps "$more" --resume_from_checkpoint "$out/checkpoint-$steps" \
  --generate "The try statement specifies exception handlers"

echo "[5/5] report of the run: $out/fsdp_report.json"
"$python" - "$out/fsdp_report.json" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    report = json.load(file)
statuses = [setting["status"] for setting in report["settings"]]
differing = [setting for setting in report["settings"] if setting["status"] == "differs"]
print(f"{report['backend']} on {report['world_size']} ranks, mesh {report['mesh']}, {len(report['units'])} units")
print(f"settings: {statuses.count('applied')} applied, {len(differing)} differ")
if differing:
    sys.exit("\n".join(f"  {entry['setting']}: requested {entry['asked']}, observed {entry['observed']}" for entry in differing))
PYTHON
echo "done in $SECONDS s after installation. The model is in $out."
