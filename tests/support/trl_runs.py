"""Cases that ranks run: TRL's Trainers with a reference model. A process without ranks runs them for reference too."""

from __future__ import annotations

from typing import Any

from tests.support.tiny import tiny_llama


def write_model(folder: str, model: Any = None) -> None:
    """Write a model, by default a llama, and a tokenizer of the words ``w0`` to ``w92``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(93))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    model = model or tiny_llama(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    model.save_pretrained(folder)
