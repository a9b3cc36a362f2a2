"""Cases that ranks run: a ``SentenceTransformerTrainer``, whose class writes checkpoints with its own methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
