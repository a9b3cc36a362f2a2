"""The world of a plan that ``Accelerator.prepare`` and ``hfp.from_pretrained`` make."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.integrations.accelerate.prepare import make_plan
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSection, FsdpSpec, ShardingSection


def test_hybrid_shard_group_is_the_machine_under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    spec = replace(FsdpSpec(fsdp=FsdpSection(version=2)), sharding=ShardingSection(strategy="hybrid_shard"))
    accelerator = SimpleNamespace(num_processes=8, device=torch.device("cpu"), verify_device_map=lambda model: False)
    plan = make_plan(accelerator, spec, nn.Linear(4, 4))
    assert (plan.mesh.replicate, plan.mesh.shard) == (4, 2)
