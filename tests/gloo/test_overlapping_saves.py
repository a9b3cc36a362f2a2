"""Asynchronous saves copy the shards beside the next forward and backward. The next optimizer step waits for them."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.checkpoint.writing import async_copies
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.tools.verify.verification import verify
from hf_fsdp_plugin.torch_private.modules import local_tensor
from tests.support.ranks import Ranks
from tests.support.tiny import global_batch, my_part, parallel_config, tiny_llama


class ExchangingAdamW(torch.optim.AdamW):
    """Has other weights for training than for evaluation, like the optimizers of schedule-free."""

    def train(self) -> None:
        change_weights(self.param_groups[0]["params"], 1.0)

    def eval(self) -> None:
        change_weights(self.param_groups[0]["params"], -1.0)


def count_call(module: Any, args: Any) -> None:
    module.calls.add_(1)


def change_weights(parameters: Any, by: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            local_tensor(parameter).add_(by)


class Training:
    """A loop that saves asynchronously, with a model that counts its calls in a buffer."""

    def __init__(self, version: int, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.accelerator = hfp.accelerator(
            hfp.load_spec(parallel_config("full_shard", version, dist.get_world_size(), async_save=True))
        )
        raw = tiny_llama()
        raw.register_buffer("calls", torch.zeros(3))
        raw.register_forward_pre_hook(count_call)
        self.model, self.optimizer = self.accelerator.prepare(raw, optimizer(raw.parameters(), lr=1e-2))
        self.step(0)

    def backward(self, number: int) -> None:
        batch = my_part(global_batch(number), dist.get_rank(), dist.get_world_size())
        self.accelerator.backward(self.model(**{key: value.to(self.device) for key, value in batch.items()}).loss)

    def step(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.accelerator.get_state_dict(self.model).items()}

    def loaded(self, folder: str) -> dict[str, torch.Tensor]:
        self.accelerator.load_state(folder)
        return self.state()


@contextmanager
def late_copies() -> Iterator[None]:
    """Begin to copy so late that the training has gone on."""
    take = async_copies.copy_parts

    def later(*args: Any) -> None:
        time.sleep(1.0)
        take(*args)

    with mock.patch.object(async_copies, "copy_parts", later):
        yield


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def save_beside_steps(folder: str, version: int) -> dict[str, Any]:
    """Save, and make two steps at once. The first one waits for the copies, the buffer has been copied before."""
    training = Training(version)
    before = training.state()
    with late_copies():
        training.accelerator.save_state(folder)
        save = manager().save_in_flight
        training.backward(1)
        is_copied = save is None or save.copies._started.is_set()
        training.step(2)
    after = training.state()
    manager().wait()
    first = training.loaded(folder)
    return {
        "was_copied": is_copied,
        "changed": dist.get_rank() > 0 or not same(after, before),
        "is_saved": same(first, before),
    }


def save_and_change_weights(folder: str, version: int) -> dict[str, Any]:
    """Save, and change weights at once, twice."""
    training = Training(version)
    with redirect_stderr(io.StringIO()) as printed, late_copies():
        training.accelerator.save_state(f"{folder}-1")
        change_weights(training.model.parameters(), 1.0)
        training.step(1)
        manager().wait()
        before = training.state()
        training.accelerator.save_state(f"{folder}-2")
        change_weights(training.model.parameters(), -1.0)
        training.step(2)
        manager().wait()
    return {"printed": printed.getvalue(), "is_saved": same(training.loaded(f"{folder}-2"), before)}


def save_with_exchanged_weights(folder: str, version: int) -> dict[str, Any]:
    """Save the weights for evaluation. Before the next forward, the weights for training are put in place."""
    training = Training(version, ExchangingAdamW)
    training.optimizer.eval()
    before = training.state()
    with redirect_stderr(io.StringIO()) as printed, late_copies():
        training.accelerator.save_state(folder)
        training.optimizer.train()
        training.step(1)
        manager().wait()
    return {"printed": printed.getvalue(), "is_saved": same(training.loaded(folder), before)}


@pytest.mark.parametrize("version", [1, 2])
class TestOnRanks:
    def test_training_goes_on_beside_the_copies(self, two_ranks: Ranks, tmp_path: Path, version: int) -> None:
        check_steps(two_ranks, tmp_path, version)

    def test_changed_weights_are_found(self, two_ranks: Ranks, tmp_path: Path, version: int) -> None:
        check_changed_weights(two_ranks, tmp_path, version)

    def test_optimizers_that_exchange_weights(self, two_ranks: Ranks, tmp_path: Path, version: int) -> None:
        check_exchanged_weights(two_ranks, tmp_path, version)


@pytest.mark.parametrize("version", [1, 2])
class TestOnDevices:
    """The same on devices with streams, which report a race if a step, or a change of weights, does not wait."""

    def test_training_goes_on_beside_the_copies(
        self, two_accelerator_ranks: Ranks, tmp_path: Path, version: int
    ) -> None:
        check_steps(two_accelerator_ranks, tmp_path, version)

    def test_optimizers_that_exchange_weights(self, two_accelerator_ranks: Ranks, tmp_path: Path, version: int) -> None:
        check_exchanged_weights(two_accelerator_ranks, tmp_path, version)


def is_undamaged(folder: Path) -> bool:
    return verify(folder, config_check=False).ok  # the model of config.json does not have the buffer


def check_steps(ranks: Ranks, folder: Path, version: int) -> None:
    for run in ranks.run(save_beside_steps, str(folder / "state"), version):
        assert run == {"was_copied": False, "changed": True, "is_saved": True}
    assert is_undamaged(folder / "state")


def check_changed_weights(ranks: Ranks, folder: Path, version: int) -> None:
    runs = ranks.run(save_and_change_weights, str(folder / "state"), version)
    assert [path.name for path in folder.iterdir()] == ["state-2"] and is_undamaged(folder / "state-2")
    assert all(run["is_saved"] for run in runs)
    assert runs[0]["printed"].count("FSDP-W435") == 1 and "state-1: the script has changed" in runs[0]["printed"]


def check_exchanged_weights(ranks: Ranks, folder: Path, version: int) -> None:
    runs = ranks.run(save_with_exchanged_weights, str(folder / "state"), version)
    assert all(run["is_saved"] and "FSDP-W435" not in run["printed"] for run in runs)
    assert is_undamaged(folder / "state")
