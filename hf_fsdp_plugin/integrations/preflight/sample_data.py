"""Made samples for the task of a model: random tokens, images or sounds, and labels that its loss accepts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

NUM_TOKENS: Final = 16
"""Tokens per sample of a preflight."""
_NUM_SOUND_SAMPLES: Final = 4000
_CLASS_TASKS: Final = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def config_parts(config: Any) -> Iterator[Any]:
    """Yield a config and its sub-configs."""
    from transformers import PreTrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from config_parts(value)


class MadeData(Dataset[dict[str, torch.Tensor]]):
    """Samples for a model. Sample number ``index`` is the same in every process.

    A model that reads text with images gets text only.

    Args:
        length: number of samples. They are made when they are read.
        num_tokens: tokens of a sample; a model with fewer positions gets fewer.

    Raises:
        ValueError: there is no made data for the model's inputs.
    """

    def __init__(self, model: nn.Module, length: int, *, num_tokens: int = NUM_TOKENS) -> None:
        self._config: Any = model.config
        self._parts = [vars(part) for part in config_parts(model.config)]
        self._name = type(model).__name__
        self._inputs = set(inspect.signature(model.forward).parameters)
        self._main = str(getattr(model, "main_input_name", "input_ids"))
        self._length, self._num_tokens = length, num_tokens
        _ = self[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        return self._input(generator) | self._labels(generator)

    def _input(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        if "input_ids" in self._inputs:
            tokens = self._tokens(generator)
            if self._name.endswith("ForMultipleChoice"):
                tokens = torch.stack([tokens, self._tokens(generator)])
            sample = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            if "return_loss" in self._inputs and "pixel_values" in self._inputs:  # contrasts images with texts
                sample["pixel_values"] = self._image(generator)
            return {name: value for name, value in sample.items() if name in self._inputs}
        if self._main == "pixel_values":
            return {"pixel_values": self._image(generator)}
        if self._main == "input_features" and hasattr(self._config, "num_mel_bins"):
            frames = 2 * getattr(self._config, "max_source_positions", 64)
            return {"input_features": torch.randn(self._config.num_mel_bins, frames, generator=generator)}
        if self._main == "input_values" and getattr(self._config, "inputs_to_logits_ratio", 1) > 1:
            return {"input_values": torch.randn(_NUM_SOUND_SAMPLES, generator=generator)}
        raise ValueError(f"{self._name} has the input {self._main!r}, for which there is no made data.")

    def _values(self, *names: str) -> list[Any]:
        """Return the values of attributes in the config and its sub-configs, without zeros and ``None``."""
        return [value for part in self._parts for name in names if (value := part.get(name))]

    def _tokens(self, generator: torch.Generator) -> torch.Tensor:
        """Return tokens without padding, image and other special tokens."""
        positions = [number for number in self._values("max_position_embeddings", "n_positions") if number > 0]
        special: set[int] = set()
        for part in self._parts:
            for name, value in part.items():
                if name.endswith(("token_id", "token_index")) and value is not None:
                    special |= set(value) if isinstance(value, list) else {value}
        plain = torch.tensor([token for token in range(min(self._values("vocab_size"))) if token not in special])
        return plain[torch.randint(len(plain), (min([self._num_tokens, *positions]),), generator=generator)]

    def _image(self, generator: torch.Generator) -> torch.Tensor:
        sizes, channels = self._values("image_size"), self._values("num_channels")
        if not sizes:
            raise ValueError(f"{self._name} has images of any size, for which there is no made data.")
        height, width = (sizes[0], sizes[0]) if isinstance(sizes[0], int) else sizes[0][:2]
        return torch.randn(channels[0] if channels else 3, height, width, generator=generator)

    def _labels(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        def number(limit: int, *shape: int) -> torch.Tensor:
            return torch.randint(limit, shape, generator=generator)

        if "start_positions" in self._inputs:
            return {name: number(self._num_tokens) for name in ("start_positions", "end_positions")}
        if "labels" not in self._inputs:
            return {}
        num_labels = int(getattr(self._config, "num_labels", 2))
        if self._name.endswith(_CLASS_TASKS):
            problem = getattr(self._config, "problem_type", None)
            if problem == "multi_label_classification":
                return {"labels": number(2, num_labels).float()}
            is_regression = problem == "regression" or num_labels == 1
            return {"labels": torch.randn((), generator=generator) if is_regression else number(num_labels)}
        if self._name.endswith(("ForMultipleChoice", "ForNextSentencePrediction")):
            return {"labels": number(2)}
        if self._name.endswith("ForTokenClassification"):
            return {"labels": number(num_labels, self._num_tokens)}
        if self._name.endswith("ForCTC"):
            return {"labels": 1 + number(int(self._config.vocab_size) - 1, 4)}
        labels = {"labels": self._tokens(generator)}
        if self._name.endswith("ForPreTraining") and "next_sentence_label" in self._inputs:
            labels["next_sentence_label"] = number(2)
        return labels


def collate(samples: list[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Return a batch. Contrastive models return a loss only if asked to."""
    batch: dict[str, Any] = default_collate(samples)
    if "pixel_values" in batch and "input_ids" in batch and "labels" not in batch:
        batch["return_loss"] = True
    return batch
