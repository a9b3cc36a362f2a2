"""Starts ranks on this machine and calibrates it with all of them at work."""

from __future__ import annotations

import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.estimate.calibration import Measuring, calibrate
from hf_fsdp_plugin.estimate.machine_file import read_machine, write_machine
from hf_fsdp_plugin.estimate.machines import Machine


def calibrate_ranks(num_ranks: int, device_type: str, path: Path) -> Machine:
    """Measure the present machine with this number of ranks, write the result to ``path``, and return it.

    CPU ranks have one thread each, as the launcher sets. Takes one to two minutes.
    """
    with tempfile.TemporaryDirectory(prefix="hf_fsdp_calibrate_") as folder:
        arguments = (num_ranks, device_type, folder)
        multiprocessing.spawn(_rank, args=arguments, nprocs=num_ranks)
        machine = read_machine(Path(folder) / "machine.json")
    write_machine(machine, path)
    return machine


def _rank(rank: int, num_ranks: int, device_type: str, folder: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames collectives; 2.11 has only the old names
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type != "cpu" else torch.device("cpu")
    if device_type != "cpu":
        get_device(device_type).set_current(rank)
    dist.init_process_group(
        get_device(device_type).process_group_backend, init_method=f"file://{folder}/rendezvous", rank=rank,
        world_size=num_ranks, timeout=timedelta(minutes=5),
    )  # fmt: skip
    machine = calibrate(Measuring(device=device))
    if rank == 0:
        write_machine(machine, Path(folder) / "machine.json")
    dist.barrier()
    dist.destroy_process_group()
