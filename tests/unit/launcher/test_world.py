"""The world that the launcher resolves, and the rendezvous without real machines."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from hf_fsdp_plugin import FsdpSpec, Origin, SpecError
from hf_fsdp_plugin.launcher.accelerators import Accelerators
from hf_fsdp_plugin.launcher.machines import meet_machines
from hf_fsdp_plugin.launcher.meeting import Joined, Meeting, differing_worlds
from hf_fsdp_plugin.launcher.rendezvous import meet_locally
from hf_fsdp_plugin.launcher.world import World, resolve_world
from hf_fsdp_plugin.spec.model import LaunchSection, MeshSection

GPUS = {count: Accelerators(kind="cuda", count=count) for count in (1, 2, 3, 4, 8)}
CPU = Accelerators()
TWO_MACHINES = {"num_machines": 2, "num_processes": 2, "main_process_ip": "127.0.0.1", "use_cpu": True}


def spec(**launch: object) -> FsdpSpec:
    return FsdpSpec(launch=replace(LaunchSection(), **launch))  # type: ignore[arg-type]


def world(num_local: int = 2) -> World:
    return World(device="cpu", num_machines=2, machine_rank=0, num_local=num_local)


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
def test_resolve_world_without_problems(launch: dict[str, Any], found: Accelerators, expected: tuple) -> None:
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
def test_resolve_world_reports_a_code(launch: dict[str, Any], found: Accelerators, code: str, part: str) -> None:
    origins = {f"launch.{name}": Origin(source="fsdp.yaml", line=1) for name in launch}
    asked = replace(spec(**launch), origins=origins)
    with pytest.raises(SpecError) as caught:
        resolve_world(asked, found)
    assert [(problem.code, problem.origin in origins.values()) for problem in caught.value.problems] == [(code, True)]
    assert part in str(caught.value)


def test_unsupported_accelerator_is_refused_unless_cpu_is_used() -> None:
    npus = Accelerators(kind="npu", count=8)
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


def test_used_port_is_replaced_with_a_warning() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        rendezvous, problems = meet_locally(replace(LaunchSection(), main_process_port=port))
    rendezvous.close()
    assert [problem.code for problem in problems] == ["FSDP-W711"]
    assert rendezvous.port != port
    rendezvous, problems = meet_locally(replace(LaunchSection(), main_process_port=0))
    rendezvous.close()
    assert (problems, rendezvous.first_rank) == ((), 0)


def test_port_of_another_launch_is_in_use_before_rank_0_listens() -> None:
    first, problems = meet_locally(replace(LaunchSection(), main_process_port=0))
    assert not problems
    second, problems = meet_locally(replace(LaunchSection(), main_process_port=first.port))
    assert [problem.code for problem in problems] == ["FSDP-W711"] and str(first.port) in problems[0].message
    assert second.port != first.port
    first.close()
    second.close()
    third, problems = meet_locally(replace(LaunchSection(), main_process_port=first.port))
    assert (third.port, problems) == (first.port, ())
    third.close()


def joined(ranks: int, max_restarts: int = 0) -> Joined:
    return Joined(ranks=ranks, device="cpu", max_restarts=max_restarts, launcher="", restarts={})


def test_different_worlds_are_an_error() -> None:
    assert differing_worlds([joined(2), joined(2)]) is None
    problem = differing_worlds([joined(1), joined(2)])
    assert problem is not None and problem.code == "FSDP-E708"
    assert problem.message.startswith("machine 1 starts 2 ranks on cpu, but machine 0 starts 1 rank")
    problem = differing_worlds([joined(2), joined(2, 3)])
    assert problem is not None and problem.message == "machine 1 has --max_restarts 3, but machine 0 0."


def test_rendezvous_failure_has_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route to host\nmore lines")

    monkeypatch.setattr(Meeting, "meet", fail)
    with pytest.raises(SpecError, match=r"did not meet at 127.0.0.1:29500: no route to host Check") as caught:
        meet_machines(spec(**TWO_MACHINES).launch, world())
    assert caught.value.problems[0].code == "FSDP-E707"
