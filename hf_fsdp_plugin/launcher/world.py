"""Determines the number of ranks of a run and their device, from the config and the machine.

Importing torch takes seconds. To find accelerators it is imported only if the machine has a device file of one, in a
separate process that prints the accelerators.
"""

from __future__ import annotations

import glob
import importlib.metadata
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass

from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec, LaunchSection
from hf_fsdp_plugin.spec.rules import check_mesh_size
from hf_fsdp_plugin.text import plural

DEFAULT_PORT = 29500
NUM_CPU_RANKS = 2
"""Default number of ranks without an accelerator: the smallest number for which FSDP shards."""
MIN_CPU_LIMIT = 64
CPU_RANKS_PER_CORE = 8
"""Maximum number of CPU ranks. A larger number is most likely a typing error, and would exhaust the memory."""


_DEVICE_FILES = (
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
_PRINT_DEVICES = """
import json, torch
device = torch.accelerator.current_accelerator(check_available=True)
found = {"kind": device.type, "count": torch.accelerator.device_count()} if device else {"kind": "cpu", "count": 0}
try:
    properties = getattr(torch, found["kind"]).get_device_properties(0)
    found |= {"name": str(properties.name), "memory_bytes": int(properties.total_memory)}
except Exception:  # not every device type has these properties
    pass
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundDevices:
    """Type and number of accelerators that torch can use on this machine: ``cuda`` and 8, or ``cpu`` and 0.

    Attributes:
        name: name of the first device; empty if torch does not know it.
        memory_bytes: memory of the first device; 0 if torch does not know it.
    """

    kind: str = "cpu"
    count: int = 0
    name: str = ""
    memory_bytes: int = 0


def find_devices() -> FoundDevices:
    """Return the accelerators of this machine. Apple's GPU serves one process only and is not counted.

    Starts a process only if the machine has a device file, or a package with a device type that torch loads.
    """
    has_device_file = any(glob.glob(pattern) for pattern in _DEVICE_FILES)
    if not has_device_file and not importlib.metadata.entry_points(group="torch.backends"):
        return FoundDevices()
    done = subprocess.run([sys.executable, "-c", _PRINT_DEVICES], capture_output=True, text=True, check=False)
    found = FoundDevices()
    if done.returncode == 0 and done.stdout.strip():
        found = FoundDevices(**json.loads(done.stdout.splitlines()[-1]))
    return found if found.kind not in ("cpu", "mps") else FoundDevices()


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks of a run.

    Attributes:
        device: a key of ``devices.DEVICES``.
        num_local: ranks on each machine.
        gpu_ids: value for ``CUDA_VISIBLE_DEVICES`` or its equivalent; empty leaves the variable unchanged.
        problems: warnings.
    """

    device: str
    num_machines: int
    machine_rank: int
    num_local: int
    gpu_ids: str = ""
    problems: tuple[Problem, ...] = ()

    @property
    def size(self) -> int:
        return self.num_machines * self.num_local

    @property
    def backend(self) -> str:
        """Name of the library for collectives, for display."""
        return get_device(self.device).collectives


def resolve_world(spec: FsdpSpec, found: FoundDevices) -> World:
    """Decide the number of ranks and their device.

    Raises:
        SpecError: there are more ranks than accelerators, the mesh does not fit, or rendezvous settings are invalid.
    """
    launch = spec.launch
    use_cpu = launch.use_cpu or found.count == 0
    device = get_device("cpu" if use_cpu else found.kind)
    ids = [] if use_cpu else _gpu_ids(spec, found)
    num_devices = len(ids) or found.count
    if launch.num_processes == "auto":
        num_local = num_devices
        if use_cpu:  # the ranks of the mesh on one machine, if the config sets a mesh
            sizes = [size for size in spec.mesh.rank_axes().values() if size != "auto"]
            num_local = max(NUM_CPU_RANKS, math.prod(sizes) // launch.num_machines)
    else:
        num_local, rest = divmod(launch.num_processes, launch.num_machines)
        assert not rest, "a rule of the spec checks that num_processes is divisible by num_machines"
    if use_cpu:
        _check_cores(spec, num_local)
    else:
        _check_devices(spec, num_local, num_devices, ids)
    _check_machines(spec)
    known = spec.with_values({"launch.num_processes": launch.num_machines * num_local}, {})
    if problems := list(check_mesh_size(known)):
        raise SpecError(problems)
    if use_cpu and not launch.use_cpu:
        message = f"torch finds no accelerator on this machine. The run uses {plural(num_local, 'CPU rank')} with gloo."
        problems.append(Problem(code="FSDP-W712", message=message, fix="Pass --cpu if this is intended."))
    return World(
        device=device.type,
        num_machines=launch.num_machines,
        machine_rank=launch.machine_rank,
        num_local=num_local,
        gpu_ids=",".join(ids),
        problems=tuple(problems),
    )


def describe_world(world: World, launch: LaunchSection, *, machine: int | None = None, address: str = "") -> str:
    """Return one line: ``rendezvous: 1 machine, 2 ranks, 127.0.0.1:41234, static, gloo on cpu``.

    Args:
        machine: number of this machine, after the machines have met.
        address: where the ranks meet; empty if that is not known yet.
    """
    ranks = plural(world.size, "rank")
    if world.num_machines > 1:
        number = launch.machine_rank if machine is None else machine
        ranks += f", machine {number}"
        if machine is not None or launch.rdzv_backend == "static":
            first = number * world.num_local
            last = first + world.num_local - 1
            ranks += f" runs rank {first}" if first == last else f" runs ranks {first} to {last}"
    if not address:
        single = f"127.0.0.1:{launch.main_process_port or 'a free port'}"
        address = rendezvous_address(launch) if world.num_machines > 1 else single
    backend = launch.rdzv_backend if world.num_machines > 1 else "static"
    machines = plural(world.num_machines, "machine")
    return f"rendezvous: {machines}, {ranks}, {address}, {backend}, {world.backend} on {world.device}"


def rendezvous_address(launch: LaunchSection) -> str:
    """Return the address at which several machines meet: ``10.0.0.1:29500``."""
    return f"{launch.main_process_ip}:{launch.main_process_port or DEFAULT_PORT}"


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _gpu_ids(spec: FsdpSpec, found: FoundDevices) -> list[str]:
    """Return the devices in ``launch.gpu_ids``; an empty list means all devices."""
    ids = [word for word in spec.launch.gpu_ids.replace(" ", "").split(",") if word]
    if [word.lower() for word in ids] == ["all"]:
        return []
    if len(ids) > found.count:
        message = f"{','.join(ids)} lists {plural(len(ids), 'device')}, but this machine has {found.count}."
        raise _error(spec, "FSDP-E703", "launch.gpu_ids", message, "List only devices that exist.")
    return ids


def _check_devices(spec: FsdpSpec, num_local: int, num_devices: int, ids: list[str]) -> None:
    if num_local > num_devices:
        usable = plural(num_devices, "GPU") + (f" ({','.join(ids)} in gpu_ids)" if ids else "")
        message = f"{num_local} ranks were requested on this machine, which has {usable}."
        fix = f"Pass --num_processes {num_devices * spec.launch.num_machines}, or --cpu for CPU ranks."
        raise _error(spec, "FSDP-E701", "launch.num_processes", message, fix)


def _check_cores(spec: FsdpSpec, num_local: int) -> None:
    num_machines, limit = spec.launch.num_machines, max(MIN_CPU_LIMIT, CPU_RANKS_PER_CORE * num_cores())
    if num_local > limit:
        message = f"{num_local} CPU ranks were requested on this machine, which has {plural(num_cores(), 'core')}."
        fix = f"Pass --num_processes {num_cores() * num_machines}, or at most {limit * num_machines}."
        raise _error(spec, "FSDP-E702", "launch.num_processes", message, fix)


def _check_machines(spec: FsdpSpec) -> None:
    launch = spec.launch
    if launch.num_machines == 1:
        return
    if not launch.main_process_ip:
        message = f"num_machines is {launch.num_machines}, but main_process_ip is not set."
        fix = "Pass --main_process_ip with the address of machine 0, on every machine."
        raise _error(spec, "FSDP-E704", "launch.main_process_ip", message, fix)
    if spec.asked("launch.main_process_port") and launch.main_process_port == 0:
        message = "port 0 selects a free port on machine 0, which the other machines cannot know."
        fix = "Set a port that is free on machine 0, such as 29500."
        raise _error(spec, "FSDP-E705", "launch.main_process_port", message, fix)


def _error(spec: FsdpSpec, code: str, setting: str, message: str, fix: str) -> SpecError:
    return SpecError([Problem(code=code, message=message, fix=fix, setting=setting, origin=spec.origin(setting))])
