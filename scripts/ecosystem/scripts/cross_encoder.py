"""Trains a CrossEncoder as its documentation does, then saves it."""

from datasets import load_dataset
from sentence_transformers.cross_encoder import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
)
from sentence_transformers.cross_encoder.evaluation import CrossEncoderCorrelationEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import HfArgumentParser

(args,) = HfArgumentParser(CrossEncoderTrainingArguments).parse_args_into_dataclasses()

model = CrossEncoder("models/bert-ranker", num_labels=1)
dataset = load_dataset("data/scored").rename_column("score", "label")
test = dataset["test"]
pairs = list(zip(test["sentence1"], test["sentence2"], strict=True))
evaluator = CrossEncoderCorrelationEvaluator(pairs, test["label"], name="test")

trainer = CrossEncoderTrainer(
    model=model,
    args=args,
    train_dataset=dataset["train"],
    eval_dataset=test,
    loss=BinaryCrossEntropyLoss(model),
    evaluator=evaluator,
)
trainer.train()
evaluator(model)
model.save_pretrained(f"{args.output_dir}/final")
trainer.save_model(args.output_dir)
