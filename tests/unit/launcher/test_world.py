"""The world that the launcher resolves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_fsdp_plugin import FsdpSpec, Origin, SpecError
from hf_fsdp_plugin.launcher.world import FoundDevices, resolve_world
from hf_fsdp_plugin.spec.fsdp_spec import LaunchSection, MeshSection

GPUS = {count: FoundDevices(kind="cuda", count=count) for count in (1, 2, 3, 4, 8)}
CPU = FoundDevices()
TWO_MACHINES = {"num_machines": 2, "num_processes": 2, "main_process_ip": "127.0.0.1", "use_cpu": True}


def spec(**launch: object) -> FsdpSpec:
    return FsdpSpec(launch=replace(LaunchSection(), **launch))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("launch", "found", "expected"),
    [
        ({"num_processes": 2}, GPUS[2], ("cuda", 2, 2, "")),
        ({"num_processes": 4, "use_cpu": True}, GPUS[2], ("cpu", 4, 4, "")),
        ({"gpu_ids": "3, 5"}, GPUS[8], ("cuda", 2, 2, "3,5")),
        ({"gpu_ids": "all"}, GPUS[8], ("cuda", 8, 8, "")),
        ({}, GPUS[8], ("cuda", 8, 8, "")),
        ({"use_cpu": True}, CPU, ("cpu", 2, 2, "")),
        ({**TWO_MACHINES, "num_processes": 8, "use_cpu": False}, GPUS[4], ("cuda", 4, 8, "")),
    ],
)
def test_resolve_world_without_problems(launch: dict[str, Any], found: FoundDevices, expected: tuple) -> None:
    resolved = resolve_world(spec(**launch), found)
    assert (resolved.device, resolved.num_local, resolved.size, resolved.gpu_ids) == expected
    assert resolved.problems == ()


@pytest.mark.parametrize(
    ("launch", "found", "code", "part"),
    [
        ({"num_processes": 4}, GPUS[2], "FSDP-E701", "which has 2 GPUs. Pass --num_processes 2, or --cpu"),
        ({"num_processes": 2, "gpu_ids": "3"}, GPUS[8], "FSDP-E701", "which has 1 GPU (3 in gpu_ids)"),
        ({"num_processes": 100_000}, CPU, "FSDP-E702", "100000 CPU ranks"),
        ({"gpu_ids": "0,1"}, GPUS[1], "FSDP-E703", "0,1 lists 2 devices"),
        ({**TWO_MACHINES, "main_process_ip": ""}, CPU, "FSDP-E704", "--main_process_ip"),
        ({**TWO_MACHINES, "main_process_port": 0}, CPU, "FSDP-E705", "29500"),
    ],
)
def test_resolve_world_reports_a_code(launch: dict[str, Any], found: FoundDevices, code: str, part: str) -> None:
    origins = {f"launch.{name}": Origin(source="fsdp.yaml", line=1) for name in launch}
    asked = replace(spec(**launch), origins=origins)
    with pytest.raises(SpecError) as caught:
        resolve_world(asked, found)
    assert [(problem.code, problem.origin in origins.values()) for problem in caught.value.problems] == [(code, True)]
    assert part in str(caught.value)


def test_unsupported_accelerator_is_refused_unless_cpu_is_used() -> None:
    npus = FoundDevices(kind="npu", count=8)
    assert resolve_world(spec(use_cpu=True), npus).device == "cpu"
    with pytest.raises(SpecError) as caught:
        resolve_world(spec(), npus)
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E301"]


def test_missing_accelerator_is_a_warning() -> None:
    resolved = resolve_world(spec(), CPU)
    assert (resolved.device, resolved.size) == ("cpu", 2)
    assert [problem.code for problem in resolved.problems] == ["FSDP-W712"]


def test_mesh_is_checked_against_the_world() -> None:
    asked = replace(spec(), mesh=MeshSection(shard=2, replicate=2))
    assert resolve_world(asked, CPU).size == 4
    with pytest.raises(SpecError) as caught:
        resolve_world(asked, GPUS[3])
    assert caught.value.problems[0].setting in ("mesh.shard", "mesh.replicate")
