"""Trains a T5 with Seq2SeqTrainer, which generates during evaluation and prediction, and saves it."""

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

(args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()

tokenizer = AutoTokenizer.from_pretrained("models/t5")
model = AutoModelForSeq2SeqLM.from_pretrained("models/t5")
dataset = load_dataset("data/summaries")


def tokenize(rows):
    inputs = tokenizer(rows["document"], max_length=48, truncation=True)
    inputs["labels"] = tokenizer(text_target=rows["summary"], max_length=16, truncation=True)["input_ids"]
    return inputs


def compute_metrics(prediction):
    ids = np.asarray(prediction.predictions)
    return {"first_token": float(ids[:, 1].mean()), "length": ids.shape[1]}


dataset = dataset.map(tokenize, batched=True, remove_columns=["document", "summary"])
trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    processing_class=tokenizer,
    compute_metrics=compute_metrics,
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
metrics = trainer.evaluate(max_length=12, num_beams=2)
trainer.log_metrics("eval", metrics)
predicted = trainer.predict(dataset["test"], max_length=12)
print("predicted:", predicted.predictions.shape)
trainer.save_model()
trainer.save_state()
