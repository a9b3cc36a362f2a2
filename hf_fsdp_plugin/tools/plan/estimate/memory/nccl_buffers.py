"""Memory of NCCL's buffers: one set per communicator, channel and neighbour."""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.tools.plan.estimate.machines import Machine

_MIB: Final = 1 << 20
_CONNECTION: Final = 12 * _MIB
"""Bytes that NCCL allocates for one channel of a connection: buffers of 512 KiB (LL), 4.7 MiB (LL128) and 4 MiB (simple
protocol, ``NCCL_BUFFSIZE``) and two structures, in allocations of whole 2 MiB (``p2pSendSetup`` and ``p2pRecvSetup`` in
src/transport/p2p.cc, ``computeBuffSizes`` in src/init.cc; NVIDIA/nccl issue 1685 logs 10 and 2 MiB)."""
_CHANNELS: Final = {True: 24, False: 4}
"""Whether GPUs are linked by NVLink -> channels: 24 in logs of 8 A100 (NVIDIA/nccl-tests issue 100), fewer on other
machines (16 on 8 H800, NVIDIA/nccl issue 892); 4 without NVLink is an assumption."""
_PCIE_BANDWIDTH: Final = 64e9
"""Bytes/s of PCI Express 5.0 x16: faster links are NVLink."""


def communicator_sizes(plan: FsdpPlan) -> tuple[int, ...]:
    """Return the number of ranks of each NCCL communicator of a rank: the world, and the axes of a mesh with several.

    The ranks that have the same experts have one, too.
    """
    mesh = plan.mesh
    axes: tuple[int, ...] = (mesh.replicate, mesh.num_shards) if plan.has_replicas or mesh.has_model_axes else ()
    if mesh.has_model_axes:
        axes += (mesh.context, mesh.tensor, mesh.expert)
        axes += (mesh.num_expert_shards,) if mesh.expert > 1 else ()
    return tuple(size for size in (plan.world_size, *axes) if size > 1)


def num_channels(machine: Machine | None) -> int:
    """Return the channels of a communicator. For unknown GPUs, NVLink is assumed, as it needs more memory."""
    if machine is None or machine.capability is None:
        return _CHANNELS[True]
    return _CHANNELS[machine.intra.bandwidth > _PCIE_BANDWIDTH]


def nccl_bytes(plan: FsdpPlan, machine: Machine | None = None) -> int:
    """Return the bytes of the buffers of all communicators.

    Each channel has a ring, and for all-reduces a tree: with one neighbour if there are two ranks, else with one in
    half of the channels and two in the others. NVIDIA/nccl issue 964 measures 544 MB for 2 A100 and 688 MB for more;
    this function returns 576 and 720 MiB. NVLink SHARP, and buffers for the network, are not included.
    """
    neighbours = sum(2.0 if size == 2 else 2.5 for size in communicator_sizes(plan))
    return int(num_channels(machine) * neighbours * _CONNECTION)
