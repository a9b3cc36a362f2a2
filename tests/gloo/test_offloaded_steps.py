"""Optimizer state in host memory: exact losses, the memory of two windows, no waits, and saves of the host's copy."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.optimization import Adafactor

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.optimizers import offloaded_steps
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import state_bytes, step_bytes, step_windows
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import unit_bytes
from hf_fsdp_plugin.torch_private.modules import local_tensor
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS, parallel_config, tiny_llama
from tests.support.training import OptimizerOf, adamw, fresh_accelerator, loss_of, sgd, train

BYTES = 16 << 10
"""Bytes of a window in these tests, so that small models have several."""


@contextmanager
def small_windows(num_bytes: int = BYTES) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloaded_steps, "WINDOW", num_bytes)
        yield


def config_of(version: int, *, offload: bool = True, strategy: str = "full_shard", **other: Any) -> dict[str, Any]:
    size = dist.get_world_size()
    return parallel_config(strategy, version, size, **{"use_cpu": False, "fsdp_offload_optimizer": offload, **other})


def two_groups(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW with a group of matrices and one of vectors."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, **options)


def fused_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return Adafactor(model.parameters(), lr=1e-3, relative_step=False, beta1=0.9)


def both(version: int, optimizer_of: OptimizerOf, **options: Any) -> tuple[Any, Any, Any]:
    """Losses, norms and weights with state in host memory and on the device, and the row of the first report."""
    accumulation, found = options.pop("accumulation", 1), []
    with small_windows():
        for offload in (True, False):
            config = config_of(version, offload=offload, **options)
            found.append(train("llama", config, optimizer_of, num_steps=4, accumulation=accumulation))
    row = next(row for row in found[0]["report"]["settings"] if row["setting"] == "offload.optimizer")
    return *({key: each[key] for key in ("losses", "norms", "weights")} for each in found), row


CASES: dict[str, tuple[OptimizerOf, dict[str, Any]]] = {
    "groups": (two_groups, {"mixed_precision": "bf16"}),
    "foreach": (partial(two_groups, foreach=True, amsgrad=True), {"accumulation": 2}),
    "fused": (partial(two_groups, fused=True), {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
    "sgd": (sgd, {}),
    "fused sgd": (fused_sgd, {}),  # a step on plain tensors
    "flat parameters": (adamw, {"fsdp_use_orig_params": False}),
    "adafactor": (adafactor, {}),
    "fp16": (partial(two_groups, fused=True), {"mixed_precision": "fp16"}),
}


@pytest.mark.parametrize("version, case", [
    (1, "flat parameters"), (2, "foreach"), *(slow(version, case) for version, case in [
        (1, "groups"), (1, "foreach"), (1, "fused"), (1, "sgd"), (2, "groups"), (2, "fused"), (2, "sgd"),
        (2, "adafactor"), (2, "fused sgd"), (2, "fp16"), (1, "fp16"),
    ]),
])  # fmt: skip
def test_offload_does_not_change_training(two_accelerator_ranks: Ranks, version: int, case: str) -> None:
    optimizer_of, options = CASES[case]
    for offloaded, plain, row in two_accelerator_ranks.run(both, version, optimizer_of, **options):
        assert offloaded["losses"] == plain["losses"] and offloaded["norms"] == plain["norms"]
        assert all(torch.equal(value, plain["weights"][key]) for key, value in offloaded["weights"].items())
        assert (row["observed"], row["status"]) == (True, "applied")


@pytest.mark.slow
def test_replicas_offload_their_state(four_accelerator_ranks: Ranks) -> None:
    for offloaded, plain, _ in four_accelerator_ranks.run(both, 2, adamw, strategy="hybrid_shard"):
        assert offloaded["losses"] == plain["losses"]


def on_cpu_ranks() -> Any:
    """The row of the report."""
    report = train("llama", config_of(2, use_cpu=True), num_steps=1)["report"]
    return next(row for row in report["settings"] if row["setting"] == "offload.optimizer")


@pytest.mark.cpu_ranks("on devices the state is moved")
def test_cpu_ranks_have_state_in_host_memory(two_ranks: Ranks) -> None:
    for row in two_ranks.run(on_cpu_ranks):
        assert (row["observed"], row["status"]) == (True, "applied") and "CPU ranks" in row["reason"]


def memory_of_steps(version: int, *, offload: bool, hidden: int = 128) -> dict[str, Any]:
    """Bytes on the device between steps and the most that a step adds, their predictions, and the waits of a step."""
    import torch_npu

    config = config_of(version, offload=offload, **({"fsdp_use_orig_params": False} if version == 1 else {}))
    accelerator = fresh_accelerator(config)
    memory = torch.get_device_module(accelerator.device.type)
    gc.collect()
    before = memory.memory_allocated()
    model: Any = tiny_llama(layers=3, hidden_size=hidden, intermediate_size=3 * hidden)
    plan = hfp.resolve(hfp.load_spec(config), model, world_size=dist.get_world_size(), device_type="npu")
    shards = [shard for unit in unit_bytes(plan, model) for shard in unit.shards]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    with small_windows(hidden * hidden * 4):
        for _ in range(3):
            accelerator.backward(loss_of(model, "llama", 0))
            at_step = memory.memory_allocated()
            memory.reset_peak_memory_stats()
            with torch_npu.HostWaits() as waits:
                optimizer.step()
            peak = memory.max_memory_allocated()
            optimizer.zero_grad()
        windows = step_windows(plan, shards)
        predicted = max(step_bytes(Workload(micro_batch=1, seq_len=8, update_loop="for_loop"), plan, windows))
    return {
        "kept": memory.memory_allocated() - before, "step": peak - at_step, "predicted": predicted,
        "state": state_bytes("adamw", shards), "num_windows": len(windows), "waits": waits.counts(),
    }  # fmt: skip


@pytest.mark.parametrize("version", [2, slow(1)])
def test_device_has_state_of_two_windows_in_a_step(two_accelerator_ranks: Ranks, version: int) -> None:
    offloaded, plain = (
        max(two_accelerator_ranks.run(memory_of_steps, version, offload=offload), key=lambda found: found["step"])
        for offload in (True, False)
    )
    assert offloaded["num_windows"] > 3 and offloaded["waits"] == {}
    assert plain["kept"] - offloaded["kept"] == pytest.approx(plain["state"], rel=0.02)
    assert offloaded["step"] == pytest.approx(offloaded["predicted"], rel=0.02)
    assert offloaded["step"] < plain["step"] + 0.8 * plain["state"]


def save_and_resume(version: int, folder: str, *, save: bool, offload: bool, asynchronous: bool = False) -> Any:
    """Losses of the steps after a save or a resume, the devices of the state, and the waits of the save or resume."""
    import torch_npu

    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = config_of(version, offload=offload, fsdp_async_save=asynchronous)
    with small_windows():
        accelerator = fresh_accelerator(config)
        model = MODELS["llama"]()
        model, optimizer = accelerator.prepare(model, adamw(model))
        losses = []
        for step in range(0 if save else 2, 5):
            if step == 2:
                with torch_npu.HostWaits() as waits:
                    (accelerator.save_state if save else accelerator.load_state)(folder)
                states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
                devices = {local_tensor(value).device.type for value in states}
            part = loss_of(model, "llama", step, rank, world_size)
            accelerator.backward(part)
            optimizer.step()
            optimizer.zero_grad()
            part = part.detach()
            dist.all_reduce(part)
            losses.append(part.item() / world_size)
        accelerator.wait_for_everyone()
    return losses[2 if save else 0 :], devices, waits.counts()


@pytest.mark.parametrize("version, asynchronous", [(1, False), (2, True)])
def test_offloaded_state_is_saved_and_resumed(
    two_accelerator_ranks: Ranks, tmp_path: Path, version: int, asynchronous: bool
) -> None:
    folder = str(tmp_path / "checkpoint")
    run = partial(two_accelerator_ranks.run, save_and_resume)
    expected, devices, waits = run(version, folder, save=True, offload=True, asynchronous=asynchronous)[0]
    assert devices == {"cpu"}
    assert not asynchronous or sum(waits.values()) <= 2, waits
    for offload in (True, False):  # and in the other version
        losses, devices, _ = run(version if offload else 3 - version, folder, save=False, offload=offload)[0]
        assert losses == pytest.approx(expected, rel=1e-6)
        assert devices == {"cpu" if offload else "npu"}


@pytest.mark.slow
def test_state_is_resumed_on_another_number_of_ranks(
    two_accelerator_ranks: Ranks, four_accelerator_ranks: Ranks, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    expected, _, _ = two_accelerator_ranks.run(save_and_resume, 2, folder, save=True, offload=False)[0]
    losses, devices, _ = four_accelerator_ranks.run(save_and_resume, 2, folder, save=False, offload=True)[0]
    assert losses == pytest.approx(expected, rel=1e-5) and devices == {"cpu"}
