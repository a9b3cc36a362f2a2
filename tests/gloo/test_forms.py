"""Command lines of scripts, and settings that do not enable FSDP, on real ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.launching import LAUNCH, run, write
from tests.support.matrices import slow

# As in FastChat and Alpaca: a subclass of TrainingArguments and HfArgumentParser.
SCRIPT = """
    {first}
    from dataclasses import dataclass, field
    import torch
    import transformers

    @dataclass
    class ModelArguments:
        model_name_or_path: str = field(default="m")

    @dataclass
    class TrainingArguments(transformers.TrainingArguments):
        model_max_length: int = field(default=512)

    parser = transformers.HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    data = [dict(input_ids=torch.arange(8), labels=torch.arange(8)) for _ in range(8)]
    trainer = transformers.Trainer(model=model, args=training_args, train_dataset=data)
    trainer.train()
    wrapped = trainer.model_wrapped
    sharded = isinstance(wrapped, torch.distributed.fsdp.FSDPModule)
    print("FSDP", trainer.is_fsdp_enabled, "FSDPModule" if sharded else type(wrapped).__name__)
"""
ARGUMENTS = ["--output_dir", "out", "--max_steps", "2", "--save_strategy", "no", "--report_to", "none", "--use_cpu"]
COMMAND = ["train.py", *ARGUMENTS, "--fsdp", "full_shard auto_wrap"]
LAYER = ["--fsdp_config", '{"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}']
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
V4 = '{"min_num_params": 0, "xla": false, "xla_fsdp_v2": false, "xla_fsdp_grad_ckpt": false}'


@pytest.mark.parametrize("installs", [slow(False), slow(True)], ids=["hf-fsdp launch", "install"])
def test_command_with_fsdp_config_trains(tmp_path: Path, installs: bool) -> None:
    write(tmp_path, SCRIPT.format(first="import hf_fsdp_plugin; hf_fsdp_plugin.install()" if installs else ""))
    (tmp_path / "fsdp.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    done = run(tmp_path, [*(TORCHRUN if installs else LAUNCH), *COMMAND, *LAYER])
    assert done.returncode == 0, done.stderr
    assert "FSDP True FSDPModule" in done.stdout
    # The launcher's config selects another kind of parallelism, which the script overrides.
    assert ("[FSDP-W160]" in done.stderr) is not installs
    report = json.loads((tmp_path / "out" / "fsdp_report.json").read_text())
    settings = {row["setting"]: (row["observed"], row["status"]) for row in report["settings"]}
    assert settings["wrap.classes"] == (["LlamaDecoderLayer"], "applied")


@pytest.mark.parametrize(
    "off", [slow(["--fsdp=", f"--fsdp_config={V4}"]), slow([f"--fsdp_config={V4}"]), slow(["--fsdp="]), slow([])]
)
def test_settings_without_fsdp_train_without_fsdp(tmp_path: Path, off: list[str]) -> None:
    write(tmp_path, SCRIPT.format(first=""))
    (tmp_path / "fsdp.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    done = run(tmp_path, [*LAUNCH, "train.py", *ARGUMENTS, *off])
    assert done.returncode == 0, done.stderr
    assert "FSDP False DistributedDataParallel" in done.stdout
    assert "[FSDP-W124]" in done.stderr
    assert not (tmp_path / "out" / "fsdp_report.json").exists()
