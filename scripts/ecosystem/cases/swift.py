"""ms-swift's command for fine-tuning, which is a Trainer of its own with its own checkpoint files.

ms-swift 4.6 names older TRL and PEFT as requirements than this package supports, so it is installed with
``pip install --no-deps`` beside them.
"""

from __future__ import annotations

from scripts.ecosystem.model import Case

_ARGUMENTS = (
    "--model models/qwen3 --model_type qwen3 --template qwen3 --dataset data/chat/train.jsonl --use_hf true"
    " --tuner_type full --torch_dtype float32 --fp16 false --bf16 false --attn_impl eager --max_length 96"
    " --split_dataset_ratio 0 --dataset_shuffle false --train_dataloader_shuffle false --gradient_checkpointing false"
    " --max_steps 4 --save_steps 2 --logging_steps 1 --learning_rate 1e-3 --per_device_train_batch_size {batch}"
    " --use_cpu true --report_to none --output_dir out --add_version false"
)

CASES = [
    Case(
        name="ms-swift sft",
        package="swift",
        script="-m swift.cli.sft",
        arguments=_ARGUMENTS,
        model="causal_lm",
        start="qwen3",
        saved="out/checkpoint-4",
        note="ms-swift 4.6.0 with transformers 5.19.0, which is the newest that it accepts.",
    )
]
