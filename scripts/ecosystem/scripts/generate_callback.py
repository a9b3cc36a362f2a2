"""Trains a causal language model and generates a sample at each evaluation, in a callback."""

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained("models/llama")
model = AutoModelForCausalLM.from_pretrained("models/llama", dtype="float32")


class Sample(TrainerCallback):
    def on_evaluate(self, args, state, control, model=None, **kwargs):
        inputs = tokenizer("The statement", return_tensors="pt").to(model.device)
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        if state.is_world_process_zero:
            print("sample:", ids[0].tolist())


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
    callbacks=[Sample()],
)
trainer.train()
trainer.save_model()
