"""Resolves the mesh (the size of each axis) and the strategy from the spec and the world size."""

from __future__ import annotations

from hf_fsdp_plugin.plan.fsdp_plan import MeshPlan, ProblemCollector
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES, Strategy, strategy_of


def resolve_mesh(world_size: int, local_world_size: int | None, problems: ProblemCollector) -> tuple[MeshPlan, str]:
    """Return the mesh and the name of the strategy, which is a hybrid strategy for a mesh with replicas.

    Args:
        world_size: number of ranks.
        local_world_size: number of ranks on one machine. ``None``: computed from the launch settings.
        problems: the collector to which problems are added. After an error, the returned mesh is a placeholder.
    """
    spec = problems.spec
    strategy, sizes = STRATEGIES[spec.sharding.strategy], spec.mesh
    if world_size < 1:
        problems.add("FSDP-E201", None, f"the world size is {world_size}.", "Set a world size of 1 or more.")
        return MeshPlan(replicate=1, shard=1), strategy.name
    if not strategy.is_sharded:
        if sizes.shard not in ("auto", 1):
            message = f"{strategy.name} does not shard the model, but the shard size is {sizes.shard}."
            problems.add("FSDP-E130", "mesh.shard", message, "Remove the shard size, or use full_shard.")
        if sizes.replicate not in ("auto", world_size):
            message = f"{strategy.name} on {world_size} ranks has {world_size} replicas, but the replicate size is "
            problems.add("FSDP-E128", "mesh.replicate", f"{message}{sizes.replicate}.", "Remove the replicate size.")
        return MeshPlan(replicate=world_size, shard=1), strategy.name
    shard, replicate = (None if size == "auto" else size for size in (sizes.shard, sizes.replicate))
    if shard is None and replicate is None:
        shard = _ranks_per_machine(spec, world_size, local_world_size) if strategy.hybrid else world_size
    mesh = _complete_mesh(world_size, shard, replicate, problems)
    if mesh is None:
        return MeshPlan(replicate=1, shard=world_size), strategy.name
    if mesh.shard == 1 and world_size > 1:
        return mesh, _unsharded_strategy(strategy, world_size, problems).name
    hybrid, plain = strategy.counterpart(hybrid=True), strategy.counterpart(hybrid=False)
    if mesh.replicate > 1 and strategy is plain:
        message = f"a mesh with {mesh.replicate} replicas changes the strategy {strategy.name} to {hybrid.name}."
        problems.add("FSDP-N111", "sharding.strategy", message)
        strategy = hybrid
    elif mesh.replicate == 1 and strategy is hybrid and world_size > 1:
        why = "By default, parameters are sharded over the ranks of one machine, and all ranks are on one machine."
        if spec.asked("mesh.shard") or spec.asked("mesh.replicate"):
            why = f"The sizes of the mesh leave no second replica on {world_size} ranks."
        message = f"{strategy.name} with one replica of {world_size} shards is the same as {plain.name}. {why}"
        fix = "Set mesh.shard (parallelism_config_dp_shard_size) below the world size to get several replicas."
        problems.add("FSDP-W205", "sharding.strategy", message, fix)
    return mesh, strategy.name


def _unsharded_strategy(strategy: Strategy, world_size: int, problems: ProblemCollector) -> Strategy:
    """Report that a strategy that shards got a mesh with one rank per shard group. Return the strategy that results."""
    spec = problems.spec
    unsharded = strategy_of(sharded=False, hybrid=False, reshard=False)
    if spec.asked("mesh.shard") and spec.asked("sharding.strategy"):
        message = f"{strategy.name} with a shard size of 1 does not shard the model."
        problems.add("FSDP-E130", "mesh.shard", message, f"Use {unsharded.name}, or a larger shard size.")
        return strategy
    message = (
        f"nothing is sharded: each of the {world_size} ranks has a copy of the model, because a shard group has one "
        f"rank. This is {unsharded.name}, not {strategy.name}."
    )
    fix = "Set mesh.shard (parallelism_config_dp_shard_size) to the number of ranks that share one copy."
    problems.add("FSDP-W281", "sharding.strategy", message, fix)
    return unsharded


def _ranks_per_machine(spec: FsdpSpec, world_size: int, local_world_size: int | None) -> int:
    num_machines = max(1, spec.launch.num_machines)
    if local_world_size is None:
        given = spec.launch.num_processes
        num_processes = world_size if given == "auto" else given
        local_world_size = num_processes // num_machines if num_processes % num_machines == 0 else world_size
    return max(1, min(local_world_size, world_size))


def _complete_mesh(
    world_size: int, shard: int | None, replicate: int | None, problems: ProblemCollector
) -> MeshPlan | None:
    """Return the mesh after computing its missing size; ``None`` if the sizes do not fit the world size."""
    spec = problems.spec
    if shard is not None and replicate is not None:
        num_ranks = shard * replicate
        if num_ranks == world_size:
            return MeshPlan(replicate=replicate, shard=shard)
        message = f"the mesh size {replicate} × {shard} (replicate × shard) is not the world size {world_size}."
        fix = f"Start {num_ranks} processes, or choose sizes whose product is {world_size}."
        problems.add("FSDP-E128", "mesh.shard" if spec.asked("mesh.shard") else "mesh.replicate", message, fix)
        return None
    setting, size = ("mesh.shard", shard) if shard is not None else ("mesh.replicate", replicate)
    assert size is not None, "the caller sets at least one size"
    if size < 1 or world_size % size:
        divisor = f"{setting}={size}" if spec.asked(setting) else f"the {size} ranks of one machine"
        divisors = [str(number) for number in range(1, world_size + 1) if world_size % number == 0]
        message = f"the world size {world_size} is not divisible by {divisor}."
        fix = f"Set {setting} to one of {', '.join(divisors)}, or change the number of processes."
        problems.add("FSDP-E129", setting, message, fix)
        return None
    other = world_size // size
    return MeshPlan(replicate=other, shard=size) if setting == "mesh.shard" else MeshPlan(replicate=size, shard=other)
