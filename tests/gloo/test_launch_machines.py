"""Several machines, simulated by several launchers on one machine; and stock launchers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.launching import Done, finish, free_port, launch_script, run, start, write
from tests.support.matrices import slow

SUM = r"""
    import os, sys
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    # print() writes several times, but the ranks of a stock launcher share the pipe.
    os.write(1, f"sum {total.item()} world {dist.get_world_size()} machine {os.environ['GROUP_RANK']}\n".encode())
    if sys.argv[1:] == [os.environ["RANK"]]:
        raise RuntimeError("boom")
    dist.barrier()
    dist.destroy_process_group()
"""
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def two_machines(folder: Path, *words: str, last: tuple[str, ...] = (), backend: str = "static") -> tuple[Done, Done]:
    """Machine 0 and machine 1; `last` are flags of machine 1 alone."""
    flags = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    flags += ["--rdzv_backend", backend, "--cpu"]
    first = start(folder, *flags, "--machine_rank", "0", "--num_processes", "4", *words)
    second = start(folder, *flags, "--machine_rank", "1", *(last or ("--num_processes", "4")), *words)
    return finish(first), finish(second)


@pytest.mark.parametrize("backend", ["static", slow("c10d")])
def test_two_machines_form_one_world(tmp_path: Path, backend: str) -> None:
    write(tmp_path, SUM)
    machines = two_machines(tmp_path, "train.py", backend=backend)
    assert [done.returncode for done in machines] == [0, 0], machines[0].stderr + machines[1].stderr
    printed = sorted(done.stdout for done in machines)
    assert printed == ["sum 6.0 world 4 machine 0\n", "sum 6.0 world 4 machine 1\n"]
    for done in machines:
        assert "rendezvous: 2 machines, 4 ranks, machine " in done.stderr
        assert f"{backend}, gloo on cpu" in done.stderr


@pytest.mark.parametrize("failing", [slow("0"), slow("3")])
def test_failure_on_one_machine_stops_the_other(tmp_path: Path, failing: str) -> None:
    write(tmp_path, SUM)
    machines = two_machines(tmp_path, "train.py", failing)
    assert [done.returncode for done in machines] == [1, 1]
    failed, other = machines if failing == "0" else reversed(machines)
    assert f"rank {failing} failed" in failed.stderr and "RuntimeError: boom" in failed.stderr
    assert "rank " in other.stderr and "failed" in other.stderr
    assert "Traceback" not in failed.stderr + other.stderr


@pytest.mark.slow
def test_remote_failure_stops_ranks_without_collectives(tmp_path: Path) -> None:
    write(tmp_path, "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(9)\ntime.sleep(3600)")
    first, second = two_machines(tmp_path, "train.py")
    assert (first.returncode, second.returncode) == (1, 9)
    assert "because another failed: machine 1: rank 3: exit code 9" in first.stderr


LEAVES = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group([0, 3])
    if rank in (1, 2):
        __import__("time").sleep(120)
    if rank == 3:
        os.abort()
    dist.all_reduce(torch.ones(1), group=group)
"""


@pytest.mark.slow
def test_each_launcher_names_the_places_of_its_ranks(tmp_path: Path) -> None:
    write(tmp_path, LEAVES)
    first, second = two_machines(tmp_path, "train.py")
    assert all(done.returncode not in (0, 2) for done in (first, second))
    assert "FSDP-E743" in second.stderr and "rank 2 was at train.py:6" in second.stderr
    assert "rank 3 was at train.py:8 `os.abort()`" in second.stderr
    assert "because another failed: machine 1: rank 3: killed by SIGABRT" in first.stderr
    assert "rank 0 was in all_reduce at train.py:9" in first.stderr and "rank 1 was at train.py:6" in first.stderr


def test_machines_with_different_worlds_start_no_rank(tmp_path: Path) -> None:
    write(tmp_path, "open('started', 'w').write('x')")
    machines = two_machines(tmp_path, "train.py", last=("--num_processes", "2"))
    assert [done.returncode for done in machines] == [1, 1]
    assert "[FSDP-E708]" in machines[0].stderr
    assert not (tmp_path / "started").exists()


def test_missing_machine_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    flags = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    flags += ["--main_process_port", str(free_port()), "--rdzv_conf", "timeout=3"]
    done = launch_script(tmp_path, "", *flags)
    assert done.returncode == 1
    assert "did not meet at 127.0.0.1:" in done.stderr and "[FSDP-E707]" in done.stderr
    assert "Traceback" not in done.stderr


IGNORED_KEYS = """\
distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_backward_prefetch_policy: BACKWARD_POST
  fsdp_cpu_ram_efficient_loading: true
"""
PRINT_SETTING = r"""
    import os
    from accelerate import PartialState
    from hf_fsdp_plugin.integrations.session import session
    spec = session().ambient
    place = spec.origin("prefetch.backward").source_line
    os.write(1, f"seen {spec.prefetch.backward} {place} {PartialState().num_processes}\n".encode())
"""


@pytest.mark.slow
def test_ram_efficient_loading_on_cpu_ranks(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(IGNORED_KEYS)
    done = launch_script(tmp_path, PRINT_SETTING, "--cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "seen post fsdp.yaml:5 2\n"


@pytest.mark.slow
def test_config_problem_under_torchrun_is_shown_once(tmp_path: Path) -> None:
    write(tmp_path, "")
    (tmp_path / "fsdp.yaml").write_text("fsdp_config:\n  fsdp_offload_param: true\n")
    done = run(tmp_path, [*TORCHRUN, "-m", "hf_fsdp_plugin", "--config_file", "fsdp.yaml", "train.py"])
    assert done.returncode == 1
    assert done.stderr.count("Did you mean fsdp_offload_params?") == 2, "by rank 0, and in torchrun's root cause"


def test_module_outside_a_launcher_prints_the_usage(tmp_path: Path) -> None:
    write(tmp_path, "")
    done = run(tmp_path, [sys.executable, "-m", "hf_fsdp_plugin", "train.py"])
    assert done.returncode == 2
    assert "hf-fsdp launch --config_file CONFIG" in done.stderr


def test_plain_process_of_accelerate_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "")
    done = run(tmp_path, [*ACCELERATE, "--cpu", "-m", "hf_fsdp_plugin", "train.py"])
    assert "accelerate launch has started a plain process instead of ranks" in done.stderr
