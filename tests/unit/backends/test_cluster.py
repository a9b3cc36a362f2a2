"""Machines of a run: variables of Slurm, ranks per machine, the interface of gloo, and the limit of open files."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from hf_fsdp_plugin.backends.ranks import cluster
from hf_fsdp_plugin.backends.ranks.cluster import (
    first_node,
    gloo_interface,
    gloo_variables,
    raise_file_limit,
    ranks_per_machine,
    slurm_variables,
)

SRUN = {
    "SLURM_JOB_ID": "41234", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "11", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_STEP_NODELIST": "gpu[012-013,20]",
}  # fmt: skip
FAR = {"MASTER_ADDR": "rank0.example", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[012-015,20],login", "gpu012"), ("a1", "a1"), ("a1,b[2-3]", "a1"), ("n[7]-ib", "n7-ib"), ("", "")],
)
def test_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_ranks_of_srun_get_variables_of_torchrun() -> None:
    assert slurm_variables(SRUN) == {
        "RANK": "9", "WORLD_SIZE": "11", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "gpu012",
        "MASTER_PORT": str(15000 + 41234 * 7 % 14000),
    }  # fmt: skip
    assert slurm_variables({**SRUN, **FAR})["MASTER_ADDR"] == FAR["MASTER_ADDR"]


def test_port_of_a_job_step_is_not_given_to_outgoing_connections() -> None:
    """Linux gives 32768 to 60999 to connections. Steps of a job, and jobs in succession, have different ports."""
    jobs = (*range(40_000, 40_100), 2**31)
    ports = {
        (job, step): int(slurm_variables({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})["MASTER_PORT"])
        for job in jobs
        for step in range(4)
    }
    assert all(15_000 <= port < 29_000 for port in ports.values())
    assert len(set(ports.values())) >= len(ports) - 4


def test_large_worlds_connect_when_needed() -> None:
    large = {"WORLD_SIZE": "128"}
    assert gloo_variables(large) == {"TORCH_GLOO_LAZY_INIT": "1"}
    assert gloo_variables({"WORLD_SIZE": "127"}) == gloo_variables({}) == {}
    assert gloo_variables({**large, "TORCH_GLOO_LAZY_INIT": "0"}) == {}


@pytest.mark.parametrize(
    "environ", [{**SRUN, "RANK": "0"}, {**SRUN, "SLURM_NTASKS": "1"}, {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "8"}, {}]
)
def test_other_processes_get_no_variables(environ: dict[str, str]) -> None:
    """Ranks of a launcher, an interactive shell, the batch script itself, and a process without Slurm."""
    assert slurm_variables(environ) == {}


@pytest.mark.parametrize(
    ("environ", "world_size", "num_devices", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 8, 2, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 8, 1, 2),
        (SRUN, 11, 8, 3),
        ({**SRUN, "SLURM_NODEID": "0"}, 11, 8, 4),
        (SRUN, 22, 1, 22),  # the ranks are not the tasks: one task starts several ranks
        ({}, 16, 8, 8),
        ({}, 12, 8, 12),
        ({}, 4, 0, 4),
        ({}, 4, 1, 4),
    ],
)
def test_ranks_per_machine(environ: dict[str, str], world_size: int, num_devices: int, expected: int) -> None:
    assert ranks_per_machine(environ, world_size, num_devices) == expected


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses of host names. The name of this machine is ``gpu01``."""
    found = {"gpu01": ["127.0.1.1"], "rank0.example": ["198.51.100.7"]}
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu01")
    monkeypatch.setattr(cluster, "_addresses", lambda host: found.get(host, []))
    return found


@pytest.fixture
def own_address() -> str:
    """An address of this machine that is not the loopback address."""
    for _, name in socket.if_nameindex():
        for octet in ("1.1.1.1", "10.0.0.1", "172.16.0.1", "192.168.0.1"):
            local = cluster._local_address(octet, 80)
            if local and not local.startswith("127.") and cluster._interface_of(local) == name:
                return local
    pytest.skip("this machine has no interface but loopback")


def test_interface_of_the_route_to_rank_0(addresses: dict[str, list[str]], own_address: str) -> None:
    addresses["rank0.example"] = [own_address]
    name, problem = gloo_interface(FAR)
    assert problem is None and name in {interface for _, interface in socket.if_nameindex()}
    assert name == cluster._interface_of(own_address) != "lo"


def test_loopback_has_its_interface() -> None:
    assert cluster._interface_of("127.0.0.1") == "lo"
    assert cluster._interface_of("203.0.113.5") == ""


@pytest.mark.parametrize("name", [["127.0.1.1"], []], ids=["loopback", "unresolved"])
def test_unusable_name_without_route_is_a_warning(
    addresses: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, name: list[str]
) -> None:
    addresses["gpu01"] = name
    monkeypatch.setattr(cluster, "_local_address", lambda target, port: "")
    interface, problem = gloo_interface(FAR)
    assert interface == "" and problem is not None and problem.code == "FSDP-W710"


@pytest.mark.parametrize(
    ("own", "environ"),
    [
        (["198.51.100.9"], FAR),
        (["127.0.1.1"], {**FAR, "GLOO_SOCKET_IFNAME": "ib0"}),
        (["127.0.1.1"], {**FAR, "MASTER_ADDR": "localhost"}),
        (["127.0.1.1"], {}),
    ],
    ids=["usable name", "set by the user", "one machine", "no launcher"],
)
def test_interface_is_left_to_gloo(addresses: dict[str, list[str]], own: list[str], environ: dict[str, str]) -> None:
    addresses.update({"gpu01": own, "localhost": ["127.0.0.1"]})
    assert gloo_interface(environ) == ("", None)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    found = {"limit": (1024, 524288)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: found["limit"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: found.update(limit=limit))
    yield found


@pytest.mark.parametrize(
    ("limit", "world_size", "after"),
    [
        ((1024, 524288), 1000, (3024, 524288)),
        ((1024, -1), 1000, (3024, -1)),
        ((65536, 65536), 1000, (65536, 65536)),
        ((-1, -1), 100_000, (-1, -1)),
        ((1024, 2048), 1000, (2048, 2048)),
    ],
)
def test_limit_of_open_files_is_raised(
    limits: dict[str, Any], limit: tuple[int, int], world_size: int, after: tuple[int, int]
) -> None:
    limits["limit"] = limit
    raise_file_limit(world_size)
    assert limits["limit"] == after
