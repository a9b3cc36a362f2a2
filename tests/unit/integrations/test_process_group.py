"""What is set before a process group is started, and time-outs that a script gives after `install` has started one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.ranks import cluster
from hf_fsdp_plugin.integrations import install
from hf_fsdp_plugin.integrations.accelerate.accelerator import init_partial_state
from hf_fsdp_plugin.integrations.patching import changes
from hf_fsdp_plugin.integrations.session import attributes_in_block, session
from hf_fsdp_plugin.torch_private.functions import timeout_of

GIVEN = timedelta(seconds=77)


def give_timeout(**kwargs: Any) -> None:
    accelerate_state = SimpleNamespace(initialized=True, device=None)
    init_partial_state(lambda *_, **__: None, accelerate_state, **kwargs)


@pytest.mark.usefixtures("one_rank")
def test_later_timeout_is_applied_to_the_group_of_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session(), "early_group", dist.group.WORLD)
    before = timeout_of()
    give_timeout()
    assert timeout_of() == before != GIVEN
    give_timeout(timeout=GIVEN)  # InitProcessGroupKwargs, and TrainingArguments on an accelerator
    assert timeout_of() == GIVEN
    with attributes_in_block(session(), group_timeout=GIVEN * 2):  # TrainingArguments on CPU ranks
        give_timeout()
    assert timeout_of() == GIVEN * 2


@pytest.mark.usefixtures("one_rank")
def test_group_of_the_script_keeps_its_timeout() -> None:
    before = timeout_of()
    give_timeout(timeout=GIVEN)
    assert timeout_of() == before != GIVEN


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of one of two ranks, in which nothing is set about networks."""
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    yield dict(os.environ)
    changes().restore_variables()


def added(before: dict[str, str]) -> dict[str, str]:
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return {name: value for name, value in changed.items() if name.startswith(("NCCL", "GLOO"))}


def test_large_world_sets_gloo_before_the_process_group(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "gloo_interface", lambda environ: ("", None))
    monkeypatch.setattr(cluster, "raise_file_limit", lambda world_size: None)
    monkeypatch.setenv("WORLD_SIZE", "512")
    seen: list[str | None] = []
    init_partial_state(
        lambda *_, **__: seen.append(os.environ.get("TORCH_GLOO_LAZY_INIT")),
        SimpleNamespace(initialized=False, device=None),
        cpu=True,
    )
    assert seen == ["1"]


@pytest.mark.parametrize(("local_rank", "index", "expected"), [(3, 0, [0]), (3, 3, None), (0, 0, None)])
def test_barrier_uses_the_only_visible_device(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, index: int, expected: list[int] | None
) -> None:
    """Accelerate passes the local rank, which is an invalid ordinal for a rank that sees one device."""
    barriers: list[list[int]] = []
    monkeypatch.setattr(dist, "barrier", lambda device_ids: barriers.append(device_ids))
    stock = lambda: None  # noqa: E731
    accelerate_state = SimpleNamespace(
        initialized=True, device=torch.device("cuda", index), local_process_index=local_rank, wait_for_everyone=stock
    )
    init_partial_state(lambda *_, **__: None, accelerate_state)
    accelerate_state.wait_for_everyone()
    assert barriers == ([] if expected is None else [expected])


@pytest.mark.parametrize(("local_rank", "use_cpu", "selected"), [("3", False, [3]), ("3", True, []), (None, False, [])])
def test_install_selects_the_device_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, use_cpu: bool, selected: list[int]
) -> None:
    """Quantized models are placed on the current device, also before the first Accelerator."""
    found: list[int] = []
    looked: list[str | None] = []
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    monkeypatch.setenv("RANK", "3")
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)

    def accelerator_type() -> str:
        looked.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
        return "cuda"

    monkeypatch.setattr(install, "accelerator_type", accelerator_type)
    monkeypatch.setattr(install, "select_device", found.append)
    try:
        hfp.install({"distributed_type": "NO", "use_cpu": use_cpu})
    finally:
        hfp.uninstall()
    assert found == selected
    assert set(looked) <= {"1"}, "torch would initialize CUDA, and processes that are forked could not use it"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


def test_network_is_prepared_before_the_process_group(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(cluster, "gloo_interface", lambda environ: ("eth7", None))
    monkeypatch.setattr(cluster, "raise_file_limit", lambda world_size: seen.append({"world": str(world_size)}))
    accelerate_state = SimpleNamespace(initialized=False, device=None)
    init_partial_state(lambda *_, **__: seen.append(added(environment)), accelerate_state, cpu=True)
    assert seen == [{"world": "2"}, {"GLOO_SOCKET_IFNAME": "eth7"}]
