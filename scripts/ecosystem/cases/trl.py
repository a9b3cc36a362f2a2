"""The scripts of TRL: ``python -m trl.scripts.NAME``."""

from __future__ import annotations

from typing import Any

from scripts.ecosystem.cases.arguments import BEST, BF16, EVALUATED, PEFT_FSDP1, SEQUENTIAL, TRAINER
from scripts.ecosystem.model import TWO_PROCESSES, Case

_RESUME = "--resume_from_checkpoint out/checkpoint-2"
_SHORT = f"--max_length 48 {SEQUENTIAL}"
_REWARD = "--reward_funcs suite_rewards.vowels --num_generations 2 --max_completion_length 8"
_TEACHER = "--teacher_model_name_or_path models/teacher --max_completion_length 8"
_QLORA = "--use_peft --load_in_4bit --dtype bfloat16 --bf16 true"
_CODE_OF_UINT8 = "FSDP-E220"


def _case(script: str, variant: str, arguments: str, *, data: str = "lm", **more: Any) -> Case:
    """Return a case in fp32 with the small Llama, unless the arguments say otherwise."""
    given = f"--dataset_name data/{data} {TRAINER} --save_strategy steps {arguments}"
    for option, value in (
        ("--model_name_or_path", "models/llama"),
        ("--dtype", "float32"),
        ("--bf16", "false"),
        ("--gradient_checkpointing", "false"),
    ):
        if option not in arguments.split():
            given += f" {option} {value}"
    default: dict[str, Any] = {"model": "causal_lm", "start": "llama"}
    if "--use_peft" in arguments:
        given += " --lora_r 4 --lora_dropout 0"
        default = {"model": "adapter", "needs": ("peft",)}
    if _RESUME in arguments:
        # One process runs all steps at once.
        whole = given.replace(_RESUME, "")
        first = whole.replace("--max_steps 4", "--max_steps 2").replace("--save_steps 4", "--save_steps 2")
        default |= {"before": first, "uninterrupted": whole}
    name = f"trl {script}, {variant}" if variant else f"trl {script}"
    return Case(name=name, package="trl", script=f"-m trl.scripts.{script}", arguments=given, **{**default, **more})


def _sft(variant: str, arguments: str = "", **more: Any) -> Case:
    return _case("sft", variant, f"{_SHORT} {arguments}", **more)


def _dpo(variant: str, arguments: str = "", **more: Any) -> Case:
    return _case("dpo", variant, f"{_SHORT} {arguments}", data="preference", **more)


def _sampled(script: str, variant: str, arguments: str, *, data: str = "prompts", **more: Any) -> Case:
    return _case(script, variant, arguments, data=data, compared=TWO_PROCESSES, **more)


CASES = [
    _sft(""),
    _case("sft", "shuffled, evaluated, best model", f"--max_length 48 {BEST}"),
    _sft("packing", "--packing true --eval_packing false"),
    _sft(
        "assistant tokens only",
        "--assistant_only_loss true --chat_template_path templates/training.jinja",
        data="chat",
    ),
    _sft("gradient accumulation", "--gradient_accumulation_steps 2 --max_grad_norm 0.1"),
    _sft("gradient checkpointing", "--gradient_checkpointing true"),
    _sft("activation checkpointing of FSDP", settings={"fsdp_activation_checkpointing": True}),
    _sft("bf16", "--bf16 true", **BF16),
    _sft("full state dict", settings={"fsdp_state_dict_type": "FULL_STATE_DICT"}),
    _sft(
        "not sharded after forward",
        settings_1={"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
        settings_2={"fsdp_reshard_after_forward": False},
    ),
    _sft("no RAM-efficient loading", settings={"fsdp_cpu_ram_efficient_loading": False}),
    _sft("resumed", _RESUME),
    _sft(
        "Adafactor",
        "--optim adafactor",
        refused={1: "FSDP-E320"},
        note="it needs whole matrices",
    ),
    _sft("schedule-free AdamW", "--optim schedule_free_adamw", needs=("schedulefree",)),
    _sft("8-bit AdamW", "--optim adamw_bnb_8bit", needs=("bitsandbytes",)),
    _sft("Qwen3", "--model_name_or_path models/qwen3", start="qwen3"),
    _sft("LoRA", "--use_peft"),
    _sft("LoRA, PEFT's FSDP configuration", "--use_peft", settings_1=PEFT_FSDP1),
    _sft("LoRA, best model", f"--use_peft {BEST}"),
    _sft("LoRA, resumed", f"--use_peft {_RESUME}"),
    _sft("DoRA", "--use_peft --use_dora"),
    _sft("LoRA, modules to save", "--use_peft --lora_modules_to_save lm_head"),
    _sft(
        "QLoRA, bf16 storage",
        f"{_QLORA} --bnb_4bit_quant_storage bfloat16",
        **{**BF16, "needs": ("peft", "bitsandbytes")},
    ),
    _sft(
        "QLoRA, uint8 storage",
        _QLORA,
        **{**BF16, "needs": ("peft", "bitsandbytes")},
        refused={1: _CODE_OF_UINT8, 2: _CODE_OF_UINT8},
        note="uint8 storage cannot be sharded",
    ),
    _dpo("", EVALUATED),
    _dpo("no RAM-efficient loading", settings={"fsdp_cpu_ram_efficient_loading": False}),
    _dpo("LoRA", "--use_peft"),
    _dpo("LoRA, PEFT's FSDP configuration", "--use_peft", settings_1=PEFT_FSDP1),
    _dpo("reference log probabilities first", "--precompute_ref_log_probs true"),
    _dpo("reference model synchronized", "--sync_ref_model true --ref_model_sync_steps 2"),
    _sampled("grpo", "no reference model", f"{_REWARD} --beta 0"),
    _sampled("grpo", "reference model", f"{_REWARD} --beta 0.1"),
    _sampled("grpo", "LoRA", f"{_REWARD} --beta 0.1 --use_peft"),
    _sampled(
        "grpo",
        "reward model",
        "--reward_model_name_or_path models/reward --num_generations 2 --max_completion_length 8 --beta 0.1",
    ),
    _sampled("rloo", "", f"{_REWARD} --beta 0.1"),
    _sampled("rloo", "LoRA", f"{_REWARD} --beta 0.1 --use_peft"),
    _sampled("kto", "", "--max_length 48", data="kto"),
    _sampled("kto", "LoRA", "--max_length 48 --use_peft", data="kto"),
    _case(
        "reward",
        "",
        f"{_SHORT} {EVALUATED} --model_name_or_path models/reward",
        data="reward",
        model="classification",
        start="reward",
        compared=TWO_PROCESSES,  # it logs the mean of each batch's largest reward
    ),
    _case(
        "reward",
        "LoRA",
        f"{_SHORT} --use_peft --lora_task_type SEQ_CLS --model_name_or_path models/reward",
        data="reward",
    ),
    _sampled("distillation", "", _TEACHER),
    _sampled("distillation", "LoRA", f"{_TEACHER} --use_peft"),
]
