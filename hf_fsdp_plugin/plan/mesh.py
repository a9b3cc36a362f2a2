"""Resolves the mesh of a spec: how many replicas, and how many ranks share one copy of the model."""

from __future__ import annotations

from hf_fsdp_plugin.plan.fsdp_plan import MeshPlan, ProblemCollector
from hf_fsdp_plugin.problems import Origin
from hf_fsdp_plugin.spec.rules import check_mesh_size, check_model_axes, divisor_remedy, with_known_shard
from hf_fsdp_plugin.strategies import STRATEGIES, strategy_of


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
    ranks = {"launch.num_processes": Origin(source="the world size")}
    given = spec.with_values({"launch.num_processes": world_size}, ranks)
    if wrong := list(check_mesh_size(given)):
        problems.problems += wrong
        return MeshPlan(replicate=1, shard=world_size), strategy.name
    if not strategy.is_sharded:
        if sizes.replicate not in ("auto", world_size):
            message = f"{strategy.name} on {world_size} ranks has {world_size} replicas, but the replicate size is "
            problems.add("FSDP-E128", "mesh.replicate", f"{message}{sizes.replicate}.", "Remove the replicate size.")
        return MeshPlan(replicate=world_size, shard=1), strategy.name
    others = {"context": sizes.context, "tensor": sizes.tensor, "expert": sizes.expert}
    num_data_ranks = world_size // sizes.ranks_per_sample
    shard = with_known_shard(given).mesh.shard
    if shard == "auto":  # a hybrid strategy: the ranks of one machine share a copy
        num_machines, asked = spec.launch.num_machines, spec.launch.num_processes
        num_processes = world_size if asked == "auto" else asked
        usual = num_processes // num_machines if num_processes % num_machines == 0 else world_size
        local = usual if local_world_size is None else local_world_size
        on_machine = max(1, min(local // sizes.ranks_per_sample, num_data_ranks))
        shard = on_machine
        if num_data_ranks % shard:
            message = f"the world size {world_size} is not divisible by the {shard} ranks of one machine."
            problems.add("FSDP-E129", "mesh.shard", message, divisor_remedy("mesh.shard", world_size))
            return MeshPlan(replicate=1, shard=world_size), strategy.name
    mesh = MeshPlan(replicate=num_data_ranks // shard, shard=shard, **others)
    problems.problems += check_model_axes(spec.with_values({"mesh.shard": shard}, {}))
    if mesh.num_shards == 1 and num_data_ranks > 1:
        unsharded = strategy_of(sharded=False, hybrid=False, reshard=False).name
        message = f"nothing is sharded: each of the {world_size} ranks has a copy of the model, because a shard group "
        message += f"has one rank. This is {unsharded}, not {strategy.name}."
        fix = "Set mesh.shard (parallelism_config_dp_shard_size) to the number of ranks that share one copy."
        problems.add("FSDP-W281", "sharding.strategy", message, fix)
        return mesh, unsharded
    hybrid, plain = strategy.counterpart(hybrid=True), strategy.counterpart(hybrid=False)
    if mesh.replicate > 1 and strategy is plain:
        message = f"a mesh with {mesh.replicate} replicas changes the strategy {strategy.name} to {hybrid.name}."
        problems.add("FSDP-N111", "sharding.strategy", message)
        strategy = hybrid
    return mesh, strategy.name
