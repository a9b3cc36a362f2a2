"""Trains a PEFT model with the Trainer as PEFT's documentation does, and saves the adapter."""

import argparse

from datasets import load_dataset
from peft import AdaLoraConfig, IA3Config, LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

CONFIGS = {
    "lora": lambda: LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_dropout=0.0, target_modules="all-linear"),
    "dora": lambda: LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, use_dora=True, target_modules=["q_proj", "v_proj"]),
    "modules_to_save": lambda: LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    ),
    "ia3": lambda: IA3Config(
        task_type=TaskType.CAUSAL_LM, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "adalora": lambda: AdaLoraConfig(task_type=TaskType.CAUSAL_LM, target_modules=["q_proj"], total_step=8, tfinal=2),
    "prompt": lambda: PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4),
}
parser = argparse.ArgumentParser()
parser.add_argument("--method", choices=CONFIGS, default="lora")
parser.add_argument("--model", default="models/llama")
script_args, rest = parser.parse_known_args()
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(rest)

set_seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained(script_args.model)
model = AutoModelForCausalLM.from_pretrained(script_args.model, dtype="float32")
model = get_peft_model(model, CONFIGS[script_args.method]())
model.print_trainable_parameters()

dataset = load_dataset("data/lm")
dataset = dataset.map(
    lambda rows: tokenizer(rows["text"], truncation=True, max_length=32), batched=True, remove_columns=["text"]
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
model.save_pretrained(f"{args.output_dir}/final")
