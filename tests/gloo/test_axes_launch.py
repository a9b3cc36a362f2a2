"""Configs with axes as public repositories have them, and scripts of the form of Accelerate's examples, unchanged."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.gloo.test_enable import Enabled
from tests.support.launching import Done, launch_script
from tests.support.matrices import slow
from tests.support.tiny import tiny_llama

# What `accelerate config` writes. TRL's context_parallel_2gpu.yaml and Accelerate's tp_hsdp.yaml have these keys.
CONFIG = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: {efficient}
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: {state_dict}
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: {ranks}
parallelism_config:
  parallelism_config_cp_size: {cp}
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: {shard}
  parallelism_config_tp_size: {tp}
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""
SCRIPT = """
    import torch
    from accelerate.utils import ParallelismConfig
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            tokens = (torch.arange(17) * (index + 1)) % 64
            return {
                "input_ids": tokens[:-1], "labels": tokens[1:], "shift_labels": tokens[1:],
                "position_ids": torch.arange(16),
            }

    parallelism = ParallelismConfig()  # from variables
    layout = {}
    if parallelism.tp_enabled:
        layout = {"tp_plan": "auto", "device_mesh": parallelism.build_device_mesh("cpu")}
    model = AutoModelForCausalLM.from_pretrained("model", use_cache=False, **layout)
    arguments = TrainingArguments(
        "out", parallelism_config=parallelism, max_steps=2, per_device_train_batch_size=1, save_steps=2, bf16=True,
        remove_unused_columns=False, report_to="none", disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Samples())
    trainer.train()
    trainer.save_model()
"""


@pytest.mark.parametrize(
    ("mesh", "axes", "efficient", "state_dict"),
    [
        ({"cp": 2, "shard": 1, "tp": 1}, {"context": 2}, "true", "FULL_STATE_DICT"),
        slow({"cp": 1, "shard": 2, "tp": 2}, {"tensor": 2}, "false", "SHARDED_STATE_DICT"),
    ],
    ids=str,
)
def test_public_config_runs_unchanged(
    tmp_path: Path, mesh: dict[str, int], axes: dict[str, int], efficient: str, state_dict: str
) -> None:
    write_inputs(tmp_path, mesh, efficient, state_dict)
    assert_trained(tmp_path, launch_script(tmp_path, SCRIPT), mesh, axes)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate launch", "torchrun"])
@pytest.mark.parametrize(
    ("mesh", "axes"),
    [({"cp": 2, "shard": 1, "tp": 1}, {"context": 2}), ({"cp": 1, "shard": 2, "tp": 2}, {"tensor": 2})],
    ids=str,
)
def test_stock_launchers_run_axes_of_a_config(
    tmp_path: Path, launcher: str, mesh: dict[str, int], axes: dict[str, int]
) -> None:
    enabled = Enabled(tmp_path)
    text = write_inputs(tmp_path, mesh, "true", "FULL_STATE_DICT")
    if launcher == "torchrun":
        install = "import hf_fsdp_plugin; hf_fsdp_plugin.install('fsdp.yaml')\n"
        done = enabled.torchrun(install + textwrap.dedent(SCRIPT), ranks=num_ranks(mesh))
    else:
        done = enabled.accelerate(SCRIPT, config=text)
    assert_trained(tmp_path, done, mesh, axes)


def num_ranks(mesh: dict[str, int]) -> int:
    return mesh["cp"] * mesh["shard"] * mesh["tp"]


def write_inputs(folder: Path, mesh: dict[str, int], efficient: str, state_dict: str) -> str:
    """Write a model and the config, and return the text of the config."""
    tiny_llama().save_pretrained(folder / "model")
    text = CONFIG.format(**mesh, ranks=num_ranks(mesh), efficient=efficient, state_dict=state_dict)
    (folder / "fsdp.yaml").write_text(text)
    return text


def assert_trained(tmp_path: Path, done: Done, mesh: dict[str, int], axes: dict[str, int]) -> None:
    """The run has the axes, differs in no setting, and has saved another model than the one that it loaded."""
    from transformers import AutoModelForCausalLM

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "fsdp_report.json").read_text())
    assert report["mesh"] == {"replicate": 1, "shard": mesh["shard"], **axes}
    assert not [row["setting"] for row in report["settings"] if row["status"] == "differs"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not loaded.model.norm.weight.equal(before.model.norm.weight)
