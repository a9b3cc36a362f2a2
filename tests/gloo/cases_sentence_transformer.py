"""Cases that ranks run: a ``SentenceTransformerTrainer``, whose class writes checkpoints with its own methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

import hf_fsdp_plugin as hfp
from tests.support.ranks import on_accelerator, reset_accelerate

WORDS = (
    "a", "red", "blue", "green", "small", "large", "cat", "dog", "bird", "house", "runs", "sleeps", "sings", "near",
    "under", "the",
)  # fmt: skip


def make_base(folder: Path) -> None:
    """Write a small BERT with a tokenizer of a few words, on rank 0."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        vocabulary = folder / "vocab.txt"
        vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(WORDS) + 5, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=32, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder)
        BertTokenizerFast(vocab=str(vocabulary)).save_pretrained(folder)
    dist.barrier()


def make_model(base: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

    torch.manual_seed(1)
    transformer = Transformer(str(base), max_seq_length=16)
    return SentenceTransformer(modules=[transformer, Pooling(32), Dense(32, 16)], device="cpu")


class RecordSaves(TrainerCallback):
    """Gathers the weights at each save."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.weights[state.global_step] = gathered(self.trainer)


def gathered(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.accelerator.get_state_dict(trainer.model).items()}


def make_trainer(folder: Path, version: int, kind: str, **arguments: Any) -> tuple[Any, RecordSaves]:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    model = make_model(folder / "base")
    rows = [(f"the {WORDS[i % 8]} cat runs", f"a {WORDS[(i * 3) % 8]} dog sleeps", (i % 5) / 4) for i in range(32)]
    first, second, scores = zip(*rows, strict=True)
    data = Dataset.from_dict({"sentence1": list(first), "sentence2": list(second), "score": list(scores)})
    args = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "run"), use_cpu=True, per_device_train_batch_size=4, max_steps=4, learning_rate=1e-2,
        logging_steps=1, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, report_to="none",
        disable_tqdm=True, seed=3, lr_scheduler_type="constant", fsdp="full_shard auto_wrap",
        fsdp_config={
            "fsdp_version": version, "state_dict_type": kind, "transformer_layer_cls_to_wrap": ["BertLayer"],
        },
        **arguments,
    )  # fmt: skip
    record = RecordSaves()
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=data, eval_dataset=data, loss=CosineSimilarityLoss(model),
        callbacks=[record],
    )  # fmt: skip
    record.trainer = trainer
    return trainer, record


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(output: str, version: int, kind: str) -> dict[str, Any]:
    """Train, save, load the best model, and repeat the second half from a checkpoint."""
    folder = Path(output)
    reset_accelerate()
    make_base(folder / "base")
    hfp.install({"use_cpu": not on_accelerator(), "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": version}})
    trainer, record = make_trainer(folder, version, kind, load_best_model_at_end=True)
    trainer.train()
    best = gathered(trainer)
    trainer.save_model(str(folder / "final"))
    trainer.model.save_pretrained(str(folder / "direct"))
    dist.barrier()
    resumed, _ = make_trainer(folder, version, kind)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    return {
        "losses": (losses(trainer), losses(resumed)),
        "saved": record.weights,
        "best": best,
        "best_step": int(trainer.state.best_model_checkpoint.rpartition("-")[2]),
        "resumed": gathered(resumed),
    }
