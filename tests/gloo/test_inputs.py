"""Numbers that a forward receives keep their dtype in mixed precision, on real ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.sharding.forwards import cast_activations
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.trainer_runs import losses
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


VERSIONS = pytest.mark.parametrize("version", [1, 2])

BF16, FP32 = "torch.bfloat16", "torch.float32"


def received_by_units(version: int) -> dict[str, Any]:
    """Return what the root and an inner unit receive, as dtypes and values."""
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
    return received


@VERSIONS
def test_only_activations_are_cast(two_ranks: Ranks, version: int) -> None:
    for received in two_ranks.run(received_by_units, version):
        root, inner = received["root"], received["inner"]
        dtypes = {name: dtype for name, (dtype, _) in root.items()}
        activations = dict.fromkeys(("hidden", "in_dataclass", "in_list"), BF16)
        assert dtypes == {**activations, "count": FP32, "time_steps": FP32, "weight": FP32, "ids": "torch.int64"}
        assert root["count"][1] == inner["count"][1] == [261.0]
        assert root["time_steps"][1] == inner["time_steps"][1] == pytest.approx([999.0, 0.3], rel=1e-7)
        assert root["weight"][1] == pytest.approx([70000.0, 0.1], rel=1e-7)
        assert inner["hidden"][0] == BF16


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


@VERSIONS
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_steps": 20},
        {"max_steps": 10, "gradient_accumulation_steps": 2},
        {"max_steps": 5, "average_tokens_across_devices": False},
    ],
    ids=["20 steps", "accumulation", "own tokens"],
)
def test_divisors_of_the_loss_equal_those_of_ddp(
    two_ranks: Ranks, tmp_path: Path, version: int, arguments: dict[str, Any]
) -> None:
    ours = two_ranks.run(divisors, str(tmp_path), {"fsdp_version": version}, bf16=True, **arguments)
    ddp = two_ranks.run(divisors, str(tmp_path), None, **arguments)
    for one, other in zip(ours, ddp, strict=True):
        assert [number for _, number in one["divisors"]] == [number for _, number in other["divisors"]]
        assert {dtype for dtype, _ in one["divisors"]} == {dtype for dtype, _ in other["divisors"]}
        assert one["losses"] == pytest.approx(other["losses"], rel=5e-3)  # bf16
    numbers = {number for _, number in ours[0]["divisors"]}
    assert len(numbers) > 3 and any(number % 4 for number in numbers)  # not exact in bf16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_more_labels_than_fp16_can_count(dtype: torch.dtype) -> None:
    """CPU ranks have no fp16 training."""
    hidden, count = torch.ones(2, 3), torch.tensor(70_001.0)
    args, kwargs = cast_activations(((hidden,), {"num_items_in_batch": count, "more": [{"count": count}]}), dtype)
    assert args[0].dtype == dtype
    assert kwargs["num_items_in_batch"] is count and kwargs["more"][0]["count"] is count
