"""Fine-tune all-MiniLM-L6-v2, a BERT with 6 layers, with the Trainer: masked language modeling or classification.

An ordinary script. FSDP is enabled by the launcher's config file, or by --fsdp and --fsdp_config:

    accelerate launch --config_file configs/seed_hf_guide.yaml scripts/finetune_bert.py --max_steps 20
    python scripts/finetune_bert.py --max_steps 2 --use_cpu                      (one process, no FSDP)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from data import MINILM, PYTHON_DOCS, load_text, load_tokenizer, locate, pack
from datasets import Dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

DEFAULTS = {
    "output_dir": "./outputs/bert",
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    # BERT's loss is already a mean. With True the Trainer would sum it over the ranks.
    "average_tokens_across_devices": False,
}


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(default=MINILM, metadata={"help": f"A folder, a hub name, or {MINILM} from PyPI."})
    task: str = field(default="masked-lm", metadata={"choices": ["masked-lm", "classification"]})
    text: list[str] = field(default_factory=lambda: [PYTHON_DOCS], metadata={"help": f"Text files, or {PYTHON_DOCS}."})
    max_length: int = field(default=128, metadata={"help": "Tokens in a sequence."})


def paragraphs_by_kind(texts: Dataset, tokenizer: PreTrainedTokenizerBase, *, length: int) -> Dataset:
    """Label paragraphs: 1 for code or grammar (indented), 0 for prose."""
    paragraphs = [part for text in texts["text"] for part in text.split("\n\n") if len(part.strip()) > 40]
    rows = Dataset.from_dict({"text": paragraphs, "label": [int(part.startswith("   ")) for part in paragraphs]})
    # Remove the indentation, because it determines the label.
    return rows.map(
        lambda batch: tokenizer([" ".join(text.split()) for text in batch["text"]], truncation=True, max_length=length),
        batched=True,
        remove_columns=["text"],
        desc="tokenizing",
    )


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(**DEFAULTS)
    script_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    path = locate(script_args.model_name_or_path)
    tokenizer = load_tokenizer(path)
    texts = load_text(script_args.text)
    if script_args.task == "masked-lm":
        model = AutoModelForMaskedLM.from_pretrained(path, dtype=torch.float32)
        train_dataset = pack(texts, tokenizer, length=script_args.max_length)
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=True)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=2, dtype=torch.float32)
        train_dataset = paragraphs_by_kind(texts, tokenizer, length=script_args.max_length)
        collator = DataCollatorWithPadding(tokenizer)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        data_collator=collator,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()


if __name__ == "__main__":
    main()
