"""`hf-fsdp launch` with a config of DeepSpeed: a script of the Trainer trains with FSDP2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.launching import run, write

ZERO_3 = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
SCRIPT = """
    import torch
    from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=64,
    )
    torch.manual_seed(0)
    row = torch.randint(0, 64, (8,))
    data = [{"input_ids": row, "labels": row}] * 8
    trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data)
    trainer.train()
"""


def test_config_of_deepspeed_trains_with_fsdp2(tmp_path: Path) -> None:
    write(tmp_path, SCRIPT)
    (tmp_path / "ds_zero3.json").write_text(json.dumps(ZERO_3, indent=1))
    program = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "launch", "--config_file", "ds_zero3.json"]
    arguments = ["--output_dir", "out", "--max_steps", "2", "--bf16", "true", "--report_to", "none"]
    flags = ["--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "1", "--use_cpu", "true"]
    done = run(tmp_path, [*program, "--cpu", "--num_processes", "2", "train.py", *arguments, *flags])
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "out/fsdp_report.json").read_text())
    assert (report["backend"], report["mesh"]["shard"]) == ("fsdp2", 2)
    settings = {row["setting"]: row for row in report["settings"]}
    strategy = settings["sharding.strategy"]
    assert (strategy["observed"], strategy["status"], strategy["origin"]["line"]) == ("full_shard", "applied", 6)
    assert strategy["origin"]["key"] == "zero_optimization.stage"
    assert (settings["precision.param"]["observed"], settings["checkpoint.state_dict"]["asked"]) == ("bf16", "full")
    assert [unit["class"] for unit in report["units"]].count("LlamaDecoderLayer") == 2
    assert (tmp_path / "out/checkpoint-2/model.safetensors").exists()
