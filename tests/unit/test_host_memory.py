"""The available memory of a machine, read from files as Linux, containers and batch systems have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_fsdp_plugin import host_memory

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_memory, "SYSTEM", tmp_path)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB))
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_group(folder: Path, limit: str, usage: int, cache: int, *, version: int = 2) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    write(folder, names[0], f"{limit}\n")
    write(folder, names[1], f"{usage}\n")
    write(folder, "memory.stat", f"anon 1\n{names[2]} {cache}\n")


def test_machine_without_groups_has_what_the_kernel_reports(system: Path):
    assert host_memory.available_memory() == 100 * GIB


@pytest.mark.parametrize("place", ["", "slurm", "slurm/job_7/step_0"])
def test_each_group_around_the_process_limits_it(system: Path, place: str):
    write(system, "proc/self/cgroup", "0::/slurm/job_7/step_0\n")
    for folder in ("", "slurm", "slurm/job_7", "slurm/job_7/step_0"):
        write_group(system / "sys/fs/cgroup" / folder, str(64 * GIB) if folder == place else "max", 50 * GIB, 10 * GIB)
    assert host_memory.available_memory() == 24 * GIB


@pytest.mark.parametrize("path", ["/docker/0123", "/"])
def test_group_of_version_1_limits_a_container(system: Path, path: str):
    write(system, "proc/self/cgroup", f"12:cpu,cpuacct:{path}\n9:memory:{path}\n0::{path}\n")
    write_group(system / "sys/fs/cgroup/memory", str(16 * GIB), 12 * GIB, GIB, version=1)
    assert host_memory.available_memory() == 5 * GIB


def test_exceeded_limit_leaves_nothing(system: Path):
    write(system, "proc/self/cgroup", "0::/\n")
    write_group(system / "sys/fs/cgroup", str(GIB), 2 * GIB, 0)
    assert host_memory.available_memory() == 0


def test_groups_without_limit_leave_what_the_kernel_reports(system: Path):
    write(system, "proc/self/cgroup", "9:memory:/\n0::/\n")
    write_group(system / "sys/fs/cgroup/memory", str((1 << 63) - 4096), GIB, 0, version=1)
    write_group(system / "sys/fs/cgroup", "max", GIB, 0)
    assert host_memory.available_memory() == 100 * GIB
