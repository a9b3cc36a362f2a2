"""The time of ``hf-fsdp check --run`` for tiny clones of several models, and of the first question of the wizard.

    python -m scripts.bench preflight_time    (five minutes on 2 cores; writes docs/results/preflight_time.json)

Wall time, and the CPU time of the command with its ranks. The models are configs of their real sizes in a temporary
folder; without a tokenizer, the data is made up.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import transformers as hf

from scripts.bench.common import ROOT, child_environment, cpu_seconds, make_parser
from scripts.bench.tables.update_results import write_result

MODELS: dict[str, tuple[str, type[hf.PreTrainedConfig], dict[str, Any]]] = {
    "Llama 8 B": (
        "LlamaForCausalLM", hf.LlamaConfig,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8},
    ),
    "Mixtral 47 B": ("MixtralForCausalLM", hf.MixtralConfig, {}),
    "BERT base": ("BertForSequenceClassification", hf.BertConfig, {}),
    "T5 3 B": (
        "T5ForConditionalGeneration", hf.T5Config,
        {"d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_layers": 24, "num_heads": 32, "decoder_start_token_id": 0},
    ),
    "GPT-2 XL": ("GPT2LMHeadModel", hf.GPT2Config, {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
}  # fmt: skip
CONFIG = ROOT / "configs" / "fsdp2_full_shard.yaml"
HF_FSDP = [sys.executable, "-m", "hf_fsdp_plugin.cli.main"]
FIRST_QUESTION = "Model"


def main() -> int:
    parser = make_parser(__doc__, "preflight_time")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for model, (cls, config, sizes) in MODELS.items():
            if args.only not in model:
                continue
            folder = Path(name) / model.replace(" ", "_")
            config(**sizes, architectures=[cls]).save_pretrained(folder)
            rows.append({"model": model, **timed([*HF_FSDP, "check", "--run", str(CONFIG), "--model", str(folder)])})
            print(rows[-1], flush=True)
    write_result("preflight_time", args.out, {"rows": rows, "first_question_seconds": first_question()})
    return 0


def environment() -> dict[str, str]:
    return {**child_environment(), "HF_HUB_OFFLINE": "1"}


def timed(command: list[str]) -> dict[str, Any]:
    """Run a command, and return its exit code, seconds and CPU seconds, with those of its children."""
    before, start = cpu_seconds(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    cpu = cpu_seconds(resource.RUSAGE_CHILDREN) - before
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return {
        "exit_code": done.returncode, "seconds": round(time.perf_counter() - start, 1), "cpu_seconds": round(cpu, 1)
    }  # fmt: skip


def first_question() -> float:
    """Return the seconds until the wizard, without a terminal, prints its first question."""
    start = time.perf_counter()
    command = [*HF_FSDP, "config", "-o", "-"]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as wizard:
        assert wizard.stdout is not None
        read = b""
        while FIRST_QUESTION.encode() not in read and (more := os.read(wizard.stdout.fileno(), 4096)):
            read += more
        seconds = time.perf_counter() - start
        wizard.kill()
    if FIRST_QUESTION.encode() not in read:
        raise SystemExit(f"hf-fsdp config does not ask for the {FIRST_QUESTION}: {read.decode()}")
    return round(seconds, 2)


if __name__ == "__main__":
    raise SystemExit(main())
