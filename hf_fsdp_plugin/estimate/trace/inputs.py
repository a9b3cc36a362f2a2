"""Inputs of a training step, by the kind of model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.estimate.workload import Workload


def make_inputs(model: nn.Module, workload: Workload) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a function that creates the inputs of a micro-batch: token ids and labels, without padding."""
    config: Any = getattr(model, "config", None)
    per_sample = type(model).__name__.endswith(("ForSequenceClassification", "ForMultipleChoice"))
    vocab_size = int(getattr(config, "vocab_size", 2))

    def make() -> dict[str, torch.Tensor]:
        ids = torch.randint(0, vocab_size, (workload.micro_batch, workload.seq_len))
        labels = torch.randint(0, 2, (workload.micro_batch,)) if per_sample else ids
        return {"input_ids": ids, "labels": labels}

    return make
