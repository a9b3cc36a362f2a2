"""The machines of a run: variables of Slurm, ranks per machine, the network interface of gloo, the limit of open files.

Everything is decided before the process group is started, from the environment and the operating system only.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from hf_fsdp_plugin.problems import Problem

_LOCAL_SIZES: Final = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE")
"""Variables with the number of ranks on this machine: of torchrun, Open MPI, Intel MPI and MPICH, and HPE's PALS."""
_LAZY_FROM: Final = 128
"""World size from which gloo connects two ranks only when they first communicate: the largest that was measured."""
_OTHER_FILES: Final = 1024
"""Files that a rank has open besides its connections: libraries, data files, pipes of data loaders."""
_CONNECTIONS_PER_RANK: Final = 2
"""Connections of gloo to each other rank: one in the group of the world, and one in all groups of a hybrid mesh."""


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a rank that ``srun`` has started without a launcher; empty for any other process.

    The address of rank 0 is the first node of the job step, unless the script has set ``MASTER_ADDR``. The port is
    derived from the numbers of job and step, so that all ranks choose the same one, and steps that run at the same time
    another one.
    """
    size = _integer(environ.get("SLURM_NTASKS"))
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_JOB_ID")
    if size is None or size < 2 or "RANK" in environ or any(name not in environ for name in names):
        return {}
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_node(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_port(environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"])),
    }
    local_size = _slurm_local_size(environ, size)
    return found if local_size is None else {**found, "LOCAL_WORLD_SIZE": str(local_size)}


def _port(job: str, step: str) -> int:
    """Return a port below those that Linux gives to outgoing connections (32768 and above) and torchrun's 29500."""
    return 15000 + ((_integer(job) or 0) * 7 + (_integer(step) or 0)) % 14000


def first_node(nodes: str) -> str:
    """Return the first host of a list of Slurm: ``gpu[012-015,20],login`` begins with ``gpu012``."""
    found = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


def ranks_per_machine(environ: Mapping[str, str], world_size: int, num_devices: int) -> int:
    """Return the number of ranks on this machine.

    Without a variable of a launcher, that is the number of accelerators if it divides the world; on CPU ranks, all
    ranks are taken to be on one machine.

    Args:
        num_devices: accelerators that this process sees. It is 1 if the launcher shows each rank its own only.
    """
    default = num_devices if num_devices > 1 and world_size % num_devices == 0 else world_size
    sizes = [*(_integer(environ.get(name)) for name in _LOCAL_SIZES), _slurm_local_size(environ, world_size)]
    return next((size for size in sizes if size is not None), default)


def _slurm_local_size(environ: Mapping[str, str], world_size: int) -> int | None:
    """Return the tasks of this job step on this node, if the ranks are its tasks: ``2(x3),1`` is 2, 2, 2 and 1."""
    if _integer(environ.get("SLURM_NTASKS")) != world_size:
        return None
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    counts = [int(size) for size, repeats in found for _ in range(int(repeats or 1))]
    node = _integer(environ.get("SLURM_NODEID"))
    return counts[node] if node is not None and node < len(counts) else None


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def gloo_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for gloo in a large world. torch reads them before the first process group.

    Otherwise each group connects every pair of ranks at its start, through the store of rank 0: each of N ranks reads N
    addresses of N pairs, so the bytes grow with the third power of N: 22.8 MB of 128 ranks, and 0.7 MB with this
    variable.
    """
    if (_integer(environ.get("WORLD_SIZE")) or 1) < _LAZY_FROM or "TORCH_GLOO_LAZY_INIT" in environ:
        return {}
    return {"TORCH_GLOO_LAZY_INIT": "1"}


def gloo_interface(environ: Mapping[str, str]) -> tuple[str, Problem | None]:
    """Return the value for ``GLOO_SOCKET_IFNAME``, or the warning that it is needed and cannot be found.

    gloo listens at the address of the machine's own name. On many machines ``/etc/hosts`` maps the name to 127.0.1.1,
    where ranks of other machines cannot connect. NCCL does not use the name. The interface is that of the route to
    rank 0.

    Returns:
        An empty text and ``None`` if the variable is set, if rank 0 is on this machine only, or if the name is usable.
    """
    master = environ.get("MASTER_ADDR", "")
    if not master or "GLOO_SOCKET_IFNAME" in environ or not sys.platform.startswith("linux"):
        return "", None
    host = socket.gethostname()
    own = _addresses(host)
    if own and not any(map(_is_loopback, own)):
        return "", None
    targets = _addresses(master)
    if not targets or (all(map(_is_loopback, targets)) and master != host):
        return "", None  # all ranks are on this machine, or the process group will report the address
    local = _local_address(targets[0], _integer(environ.get("MASTER_PORT")) or 1)
    if local and not _is_loopback(local) and (name := _interface_of(local)):
        return name, None
    found = f"resolves to {own[0]}" if own else "cannot be resolved"
    message = f"the name of this machine, {host}, {found}, so gloo would listen where other machines cannot connect, "
    message += f"and the route to MASTER_ADDR={master} names no other interface."
    fix = "Set GLOO_SOCKET_IFNAME to the interface that the machines share (see `ip -brief address`), or correct "
    return "", Problem(code="FSDP-W710", message=message, fix=f"{fix}/etc/hosts.")


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    return [str(address[0]).partition("%")[0] for *_, address in found]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _local_address(target: str, port: int) -> str:
    """Return this machine's address on the route to ``target``. Connecting a UDP socket sends nothing."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, port))
        return str(probe.getsockname()[0]).partition("%")[0]
    return ""


def _interface_of(address: str) -> str:
    """Return the interface that has an address; empty if there is none."""
    import psutil  # few machines need it

    interfaces = psutil.net_if_addrs().items()
    found = (name for name, owned in interfaces if any(each.address.partition("%")[0] == address for each in owned))
    return next(found, "")


def raise_file_limit(world_size: int) -> None:
    """Raise this process's soft limit of open files to what a rank needs, as far as the hard limit allows.

    A socket needs a file, and gloo has one to each other rank. The usual soft limit is 1024, the hard limit far higher.
    """
    with suppress(ImportError, OSError, ValueError):
        import resource  # does not exist on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = _OTHER_FILES + _CONNECTIONS_PER_RANK * world_size
        if resource.RLIM_INFINITY != soft < needed:
            reachable = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, reachable), hard))
