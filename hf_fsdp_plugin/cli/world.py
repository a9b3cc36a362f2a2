"""How many ranks, and on what: the config against the machine it runs on.

Torch takes seconds to import, so it is asked for its devices only where the machine shows a sign of an accelerator, and
then in a process of its own.
"""

from __future__ import annotations

import glob
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace

from hf_fsdp_plugin.devices import DEVICES, get_device
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.launch_rules import mesh_fits_world
from hf_fsdp_plugin.spec.model import FsdpSpec

NUM_CPU_RANKS = 2
"""Ranks of a run that names no number, where there is no accelerator: enough for sharding to be real."""

MIN_CPU_LIMIT = 64
CPU_RANKS_PER_CORE = 8
"""More ranks than that on one machine are a slip of the finger, and would take the machine down."""

_SIGNS = (
    "/dev/nvidia[0-9]*",
    "/dev/dxg",  # NVIDIA under WSL
    "/dev/kfd",  # AMD
    "/dev/dri/renderD*",  # Intel
    "/dev/davinci[0-9]*",  # Ascend
    "/dev/cambricon_dev[0-9]*",
    "/dev/accel/accel[0-9]*",
    "/dev/hl[0-9]*",  # Gaudi
    "/dev/neuron[0-9]*",
)
_ASK_TORCH = (
    "import torch;a=torch.accelerator.current_accelerator(check_available=True);"
    "print(a.type if a else 'cpu', torch.accelerator.device_count() if a else 0)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerators:
    """What torch can use on this machine: ``cuda`` 8, or ``cpu`` 0."""

    kind: str = "cpu"
    count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks of a run.

    Attributes:
        device: a key of ``devices.DEVICES``.
        num_local: ranks on this machine, the same number on every machine.
        gpu_ids: for ``CUDA_VISIBLE_DEVICES`` or its like; empty leaves it as it is.
        notices: what the user should know, one line each.
    """

    device: str
    num_machines: int
    machine_rank: int
    num_local: int
    gpu_ids: str = ""
    notices: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return self.num_machines * self.num_local

    @property
    def backend(self) -> str:
        """The name of the collective library, for the user's eyes."""
        return DEVICES[self.device].collectives


def find_accelerators() -> Accelerators:
    """Asks torch, unless no accelerator has a device file here. Apple's GPU takes one process and is not counted."""
    if not any(glob.glob(sign) for sign in _SIGNS):
        return Accelerators()
    answer = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    words = answer.stdout.split()
    if answer.returncode != 0 or len(words) < 2 or words[-2] in ("cpu", "mps"):
        return Accelerators()
    return Accelerators(kind=words[-2], count=int(words[-1]))


def resolve_world(spec: FsdpSpec, found: Accelerators) -> World:
    """The config's world on this machine.

    Raises:
        SpecError: more ranks than accelerators, a mesh of another size, a missing address.
    """
    launch = spec.launch
    use_cpu = launch.use_cpu or found.count == 0
    device = get_device("cpu" if use_cpu else found.kind)
    ids = "" if use_cpu else _gpu_ids(spec, found)
    num_devices = len(_words(ids)) if ids else found.count
    if launch.num_processes == "auto":
        num_local = _num_cpu_ranks(spec) if use_cpu else num_devices
    else:
        num_local, rest = divmod(launch.num_processes, launch.num_machines)
        assert not rest, "a rule of the spec holds that ranks divide over machines"
    if use_cpu:
        _check_cores(spec, num_local)
    else:
        _check_devices(spec, num_local, num_devices, ids)
    _check_machines(spec)
    _check_mesh(spec, num_local * launch.num_machines)
    notices = []
    if use_cpu and not launch.use_cpu:
        notices.append(f"no accelerator that torch can use on this machine: {num_local} CPU ranks with gloo instead")
    return World(
        device=device.type,
        num_machines=launch.num_machines,
        machine_rank=launch.machine_rank,
        num_local=num_local,
        gpu_ids=ids,
        notices=tuple(notices),
    )


def num_threads(num_local: int) -> int:
    """Threads of one CPU rank: the cores that this process may use, shared evenly."""
    return max(1, num_cores() // num_local)


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _words(ids: str) -> list[str]:
    return [word for word in ids.split(",") if word]


def _gpu_ids(spec: FsdpSpec, found: Accelerators) -> str:
    """``launch.gpu_ids`` without blanks; empty for all devices."""
    ids = spec.launch.gpu_ids.replace(" ", "")
    if ids.lower() in ("", "all"):
        return ""
    if len(_words(ids)) > found.count:
        message = f"{ids} names {len(_words(ids))} GPUs; this machine has {found.count}."
        raise _error(spec, "launch.gpu_ids", message, "Name fewer.")
    return ids


def _check_devices(spec: FsdpSpec, num_local: int, num_devices: int, ids: str) -> None:
    if num_local <= num_devices:
        return
    here = f"{num_devices} GPU{'s' if num_devices != 1 else ''}" + (f" ({ids} of gpu_ids)" if ids else "")
    raise _error(
        spec,
        "launch.num_processes",
        f"{num_local} ranks on this machine, which has {here}.",
        f"Pass --num_processes {num_devices * spec.launch.num_machines}, or --cpu for {num_local} CPU ranks.",
    )


def _check_cores(spec: FsdpSpec, num_local: int) -> None:
    num_machines, most = spec.launch.num_machines, max(MIN_CPU_LIMIT, CPU_RANKS_PER_CORE * num_cores())
    if num_local > most:
        raise _error(
            spec,
            "launch.num_processes",
            f"{num_local} CPU ranks on this machine, which has {num_cores()} cores.",
            f"Pass --num_processes {num_cores() * num_machines}, or at most {most * num_machines}.",
        )


def _num_cpu_ranks(spec: FsdpSpec) -> int:
    """As many as the mesh asks for, where it does."""
    asked = [size for size in (spec.mesh.shard, spec.mesh.replicate) if size != "auto"]
    return max(NUM_CPU_RANKS, math.prod(asked) // spec.launch.num_machines)


def _check_mesh(spec: FsdpSpec, size: int) -> None:
    """The spec's own rule, now that ``auto`` is a number: better here than in every rank."""
    if problems := list(mesh_fits_world(replace(spec, launch=replace(spec.launch, num_processes=size)))):
        raise SpecError(problems)


def _check_machines(spec: FsdpSpec) -> None:
    launch = spec.launch
    if launch.num_machines == 1:
        return
    if not launch.main_process_ip:
        raise _error(
            spec,
            "launch.main_process_ip",
            f"{launch.num_machines} machines, and no address of machine 0.",
            "Pass --main_process_ip ADDRESS, the same on every machine.",
        )
    if spec.asked("launch.main_process_port") and launch.main_process_port == 0:
        raise _error(
            spec,
            "launch.main_process_port",
            "0 (any free port) cannot be met by the other machines.",
            "Name a port that is free on machine 0, such as 29500.",
        )
    if launch.rdzv_backend not in ("static", "c10d"):
        raise _error(
            spec,
            "launch.rdzv_backend",
            f"{launch.rdzv_backend!r} is not available.",
            "Write static, or c10d where machines may come in any order.",
        )


def _error(spec: FsdpSpec, setting: str, message: str, fix: str) -> SpecError:
    origin = spec.origin(setting)
    return SpecError([Problem(severity="error", message=message, fix=fix, setting=setting, origin=origin)])
