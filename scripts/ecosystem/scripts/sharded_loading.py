"""Loads a model sharded with Transformers' DistributedConfig, and trains it with the Trainer."""

import argparse

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp_size", type=int, default=2)
script_args, rest = parser.parse_known_args()
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(rest)

sharded = (
    {"distributed_config": DistributedConfig(fsdp_size=script_args.fsdp_size)} if script_args.fsdp_size > 1 else {}
)
tokenizer = AutoTokenizer.from_pretrained("models/llama")
model = AutoModelForCausalLM.from_pretrained("models/llama", dtype="float32", **sharded)

dataset = load_dataset("data/lm")
dataset = dataset.map(
    lambda rows: tokenizer(rows["text"], truncation=True, max_length=32), batched=True, remove_columns=["text"]
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=dataset["train"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
