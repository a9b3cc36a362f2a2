"""Arguments and settings that several cases share."""

from __future__ import annotations

from typing import Any

STEPS = (
    "--max_steps 4 --logging_steps 1 --save_steps 4 --learning_rate 1e-3 --lr_scheduler_type constant --seed 1"
    " --per_device_train_batch_size {batch} --per_device_eval_batch_size 2 --report_to none --disable_tqdm true"
)
TRAINER = f"--output_dir out {STEPS}"
SEQUENTIAL = "--train_sampling_strategy sequential"
EVALUATED = "--eval_strategy steps --eval_steps 2"
BEST = f"{EVALUATED} --save_steps 2 --load_best_model_at_end true --metric_for_best_model eval_loss"

BF16: dict[str, Any] = {"tolerance": 2e-2, "weights": 0.5, "alone": "--use_cpu true"}
"""Tolerances of a case in bf16. Without the plugin, bf16 needs `--use_cpu` on a machine without a GPU."""

PEFT_FSDP1 = {
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": False,
}
"""The configuration that PEFT documents for FSDP."""
