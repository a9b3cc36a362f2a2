"""Cases that ranks run: what the forward receives of its caller's inputs in mixed precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

import hf_fsdp_plugin as hfp
from tests.gloo.cases_trainer import losses
from tests.support.tiny import parallel_config
from tests.support.training import adamw, fresh_accelerator

VOCABULARY, IGNORED = 16, -100


@dataclass
class Conditions:
    """A dataclass that pytree does not know."""

    time_steps: torch.Tensor
    hidden: torch.Tensor


class Recorder(nn.Module):
    """A model with one inner unit. Both record the dtypes of what they receive."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.outer = nn.Linear(4, 4)
        self.received: dict[str, Any] = {}

    def forward(
        self, hidden: torch.Tensor, count: torch.Tensor, *, conditions: Conditions, nested: list[Any]
    ) -> torch.Tensor:
        self.received = {
            "hidden": hidden, "count": count, "time_steps": conditions.time_steps, "in_dataclass": conditions.hidden,
            "weight": nested[0]["weight"], "in_list": nested[0]["hidden"], "ids": nested[1],
        }  # fmt: skip
        return self.outer(self.inner(hidden, conditions.time_steps, count=count)).sum() / count


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.received: dict[str, Any] = {}

    def forward(self, hidden: torch.Tensor, time_steps: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        self.received = {"hidden": hidden, "time_steps": time_steps, "count": count}
        return self.linear(hidden)


def received_by_units(version: int) -> dict[str, Any]:
    """Return what the root and an inner unit receive, as dtypes and values, and what the report says about it."""
    fsdp = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Inner"}
    accelerator = fresh_accelerator({**parallel_config("full_shard", version, 2, **fsdp), "mixed_precision": "bf16"})
    torch.manual_seed(0)
    model = Recorder()
    recorders = {"root": model, "inner": model.inner}
    model, _ = accelerator.prepare(model, adamw(model))
    ones = torch.ones(2, 4)
    loss = model(
        ones,
        torch.tensor(261.0),
        conditions=Conditions(time_steps=torch.tensor([999.0, 0.3]), hidden=ones),
        nested=[{"weight": torch.tensor([70000.0, 0.1]), "hidden": ones}, torch.tensor([1, 2])],
    )
    accelerator.backward(loss)
    received: dict[str, Any] = {
        unit: {name: (str(tensor.dtype), tensor.flatten().tolist()) for name, tensor in recorder.received.items()}
        for unit, recorder in recorders.items()
    }
    (row,) = [row for row in hfp.report(accelerator).settings if row.setting == "precision.param"]
    return {**received, "reason": row["reason"]}


class Tokens(torch.utils.data.Dataset):
    """Sequences, of which each has another number of labels."""

    def __init__(self, length: int, num_sequences: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self._ids = torch.randint(0, VOCABULARY, (num_sequences, length), generator=generator)
        self._num_labels = torch.randint(length // 2, length + 1, (num_sequences,), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self._ids[index].clone()
        labels[int(self._num_labels[index]) :] = IGNORED
        return {"input_ids": self._ids[index], "labels": labels}


class CountingModel(PreTrainedModel):
    """Predicts each token from itself, and records the number by which it divides the loss."""

    config_class = PretrainedConfig
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__(PretrainedConfig())
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.divisors: list[tuple[str, float]] = []
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any) -> Any:
        self.divisors.append((str(num_items_in_batch.dtype), float(num_items_in_batch)))
        logits = self.head(self.embedding(input_ids)).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return {"loss": loss / num_items_in_batch}


def divisors(output_dir: str, fsdp: dict[str, Any] | None, length: int = 300, **arguments: Any) -> dict[str, Any]:
    """Train, and return the divisors and losses.

    Args:
        fsdp: settings of FSDP; ``None`` trains with DistributedDataParallel.
    """
    torch.manual_seed(1)
    model = CountingModel()
    more = {} if fsdp is None else {"fsdp": "full_shard auto_wrap", "fsdp_config": fsdp}
    arguments_type, trainer_type = (
        (TrainingArguments, Trainer) if fsdp is None else (hfp.FsdpTrainingArguments, hfp.FsdpTrainer)
    )
    args = arguments_type(
        output_dir=output_dir, per_device_train_batch_size=2, logging_steps=1, report_to="none", disable_tqdm=True,
        use_cpu=True, save_strategy="no", learning_rate=1e-3, **more, **arguments,
    )  # fmt: skip
    trainer = trainer_type(model=model, args=args, train_dataset=Tokens(length, 64))
    trainer.train()
    return {"divisors": model.divisors, "losses": losses(trainer)}
