"""Trains a SentenceTransformer as its documentation does: a loss, an evaluator, a Trainer, then saves it."""

import argparse

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator, TripletEvaluator
from transformers import HfArgumentParser

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="models/minilm")
parser.add_argument("--loss", choices=["ranking", "cached", "cosine"], default="ranking")
script_args, rest = parser.parse_known_args()
(args,) = HfArgumentParser(SentenceTransformerTrainingArguments).parse_args_into_dataclasses(rest)

model = SentenceTransformer(script_args.model)
if script_args.loss == "cosine":
    dataset = load_dataset("data/scored")
    loss = losses.CosineSimilarityLoss(model)
    test = dataset["test"]
    evaluator = EmbeddingSimilarityEvaluator(test["sentence1"], test["sentence2"], test["score"], name="test")
else:
    dataset = load_dataset("data/pairs")
    if script_args.loss == "cached":
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2, gather_across_devices=True)
    else:
        loss = losses.MultipleNegativesRankingLoss(model, gather_across_devices=True)
    anchors, positives = dataset["test"]["anchor"], dataset["test"]["positive"]
    evaluator = TripletEvaluator(anchors, positives, positives[::-1], name="test")

trainer = SentenceTransformerTrainer(
    model=model,
    args=args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    loss=loss,
    evaluator=evaluator,
)
trainer.train()
print("after training:", evaluator(model))
model.save_pretrained(f"{args.output_dir}/final")
trainer.save_model(args.output_dir)
print("encoded:", model.encode(["a sentence"]).shape)
