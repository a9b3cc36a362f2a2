"""Spec + world size -> the sizes of the mesh's axes."""

from __future__ import annotations

from hf_fsdp_plugin.plan.complaints import Complaints
from hf_fsdp_plugin.plan.model import MeshPlan
from hf_fsdp_plugin.spec.model import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES


def resolve_mesh(
    spec: FsdpSpec, world_size: int, local_world_size: int | None, complaints: Complaints
) -> tuple[MeshPlan, str]:
    """The mesh, and the strategy that it makes of the one asked for.

    ``full_shard`` on a mesh with replicas is what everybody calls ``hybrid_shard``, so it is planned under that name.

    Args:
        world_size: number of ranks.
        local_world_size: ranks on one machine; ``None`` reads it off the launch settings.
        complaints: takes what is wrong. After an error the mesh returned is a stand-in (all ranks on one axis).
    """
    strategy = spec.sharding.strategy
    if world_size < 1:
        complaints.error(None, f"a world of {world_size} ranks was given.", "Give a world size of 1 or more.")
        return MeshPlan(replicate=1, shard=1), strategy
    row = STRATEGIES[strategy]
    hybrid, plain = row.counterpart(hybrid=True), row.counterpart(hybrid=False)
    if not row.is_sharded:
        return _replicas_only(spec, world_size, complaints), strategy
    shard, replicate = _given(spec.mesh.shard), _given(spec.mesh.replicate)
    if shard is None and replicate is None:
        shard = _ranks_of_a_machine(spec, world_size, local_world_size) if row.hybrid else world_size
    mesh = _complete(spec, world_size, shard, replicate, complaints)
    if mesh is None:
        return MeshPlan(replicate=1, shard=world_size), strategy
    if mesh.replicate > 1 and hybrid is not None and not row.hybrid:
        complaints.note(
            "sharding.strategy",
            f"{strategy} on a mesh of {mesh.replicate} replicas is {hybrid.name}, and planned as that.",
        )
        strategy = hybrid.name
    elif mesh.replicate == 1 and plain is not None and row.hybrid and world_size > 1:
        complaints.warning(
            "sharding.strategy",
            f"{strategy} with one replica of {world_size} shards does what {plain.name} does: all ranks are "
            "on one machine, and parameters are sharded over the ranks of a machine.",
            "Set mesh.shard (parallelism_config.dp_shard_size) below the world size for several replicas.",
        )
    return mesh, strategy


def _given(size: int | str) -> int | None:
    return size if isinstance(size, int) else None


def _replicas_only(spec: FsdpSpec, world_size: int, complaints: Complaints) -> MeshPlan:
    shard, replicate = _given(spec.mesh.shard), _given(spec.mesh.replicate)
    if shard is not None and shard != 1:
        complaints.error(
            "mesh.shard",
            f"no_shard keeps whole parameters on every rank, but mesh.shard is {shard}.",
            "Leave mesh.shard out, or take hybrid_shard.",
        )
    if replicate is not None and replicate != world_size:
        complaints.error(
            "mesh.replicate",
            f"mesh.replicate is {replicate}, but no_shard on {world_size} ranks has {world_size} replicas.",
            "Leave mesh.replicate out.",
        )
    return MeshPlan(replicate=world_size, shard=1)


def _ranks_of_a_machine(spec: FsdpSpec, world_size: int, local_world_size: int | None) -> int:
    machines = max(1, spec.launch.num_machines)
    if local_world_size is None:
        processes = _given(spec.launch.num_processes) or world_size
        local_world_size = processes // machines if processes % machines == 0 else world_size
    return max(1, min(local_world_size, world_size))


def _complete(
    spec: FsdpSpec, world_size: int, shard: int | None, replicate: int | None, complaints: Complaints
) -> MeshPlan | None:
    """The mesh with the missing axis worked out; ``None`` after a complaint."""
    if shard is not None and replicate is not None:
        if shard * replicate == world_size:
            return MeshPlan(replicate=replicate, shard=shard)
        complaints.error(
            "mesh.shard" if spec.asked("mesh.shard") else "mesh.replicate",
            f"a mesh of {replicate} × {shard} (replicate × shard) takes {replicate * shard} ranks, but the world has "
            f"{world_size}.",
            f"Start {replicate * shard} processes, or set sizes whose product is {world_size}.",
        )
        return None
    setting, size = ("mesh.shard", shard) if shard is not None else ("mesh.replicate", replicate)
    assert size is not None, "one axis is known here"
    if size < 1 or world_size % size:
        said = f"{setting} is {size}" if spec.asked(setting) else f"{size} ranks run on one machine"
        complaints.error(
            setting,
            f"{said}, which does not divide the world of {world_size} ranks.",
            f"Set {setting} to one of {', '.join(map(str, _divisors(world_size)))}, or change the number of processes.",
        )
        return None
    other = world_size // size
    return MeshPlan(replicate=other, shard=size) if setting == "mesh.shard" else MeshPlan(replicate=size, shard=other)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
