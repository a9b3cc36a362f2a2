"""SetFit: its Trainer trains the sentence-transformers model of a classifier, then the head."""

from __future__ import annotations

from typing import Any

import torch
from datasets import load_dataset
from setfit import SetFitModel, Trainer, TrainingArguments


def contrastive_training_with_a_head() -> Any:
    rows = load_dataset("json", data_files="data/classes/train.jsonl", split="train").select(range(16))
    rows = rows.rename_column("sentence1", "text").remove_columns("sentence2")
    model = SetFitModel.from_pretrained("models/minilm", device="cpu")
    args = TrainingArguments(
        output_dir="out", batch_size=4, num_epochs=1, max_steps=3, body_learning_rate=1e-4, logging_steps=1,
        logging_first_step=True, save_strategy="no", report_to="none",
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    with torch.no_grad():
        for name, parameter in model.model_body.named_parameters():
            if name.endswith("key.bias"):  # attention does not depend on it: Adam makes steps of its rounding errors
                parameter.zero_()
    model.save_pretrained("final")
    found = {
        f"{row['step']} loss": row["embedding_loss"]
        for row in trainer.st_trainer.state.log_history
        if "embedding_loss" in row
    }
    scores = model.predict_proba(["a statement", "an expression"])
    return found | {f"value {number}": float(score) for number, score in enumerate(torch.as_tensor(scores).flatten())}
