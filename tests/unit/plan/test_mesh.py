"""Mesh sizes of every strategy, checked against the world size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import MeshPlan, ProblemCollector
from hf_fsdp_plugin.plan.mesh import resolve_mesh
from hf_fsdp_plugin.plan.resolve import check_divided_layers
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec, LaunchSection, MeshSection, ShardingSection
from hf_fsdp_plugin.spec.load import load_spec


def mesh_of(
    strategy: str, world_size: int, *, local: int | None = None, launch: LaunchSection | None = None, **sizes: int
) -> tuple[tuple[int, int], str, list[Problem]]:
    section = ShardingSection(strategy=strategy)
    spec = FsdpSpec(sharding=section, mesh=MeshSection(**sizes), launch=launch or LaunchSection())
    collector = ProblemCollector(spec)
    mesh, planned = resolve_mesh(world_size, local, collector)
    return (mesh.replicate, mesh.shard), planned, collector.problems


def codes_of(strategy: str, world_size: int, **sizes: int) -> list[tuple[str, str | None]]:
    return [(problem.code, problem.setting) for problem in mesh_of(strategy, world_size, **sizes)[2]]


@pytest.mark.parametrize(
    ("strategy", "mesh"), [("full_shard", (1, 8)), ("shard_grad_op", (1, 8)), ("no_shard", (8, 1))]
)
def test_plain_strategies_use_one_axis(strategy: str, mesh: tuple[int, int]) -> None:
    assert mesh_of(strategy, 8) == (mesh, strategy, [])


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
def test_hybrid_shards_over_the_ranks_of_a_machine(strategy: str) -> None:
    assert mesh_of(strategy, 16, local=8) == ((2, 8), strategy, [])
    machines = LaunchSection(num_processes=16, num_machines=2)
    assert mesh_of(strategy, 16, launch=machines) == ((2, 8), strategy, [])


def test_hybrid_with_one_replica_is_kept() -> None:
    assert mesh_of("hybrid_shard", 8) == ((1, 8), "hybrid_shard", [])


def test_hybrid_on_one_machine_uses_the_given_sizes() -> None:
    assert mesh_of("hybrid_shard", 4, shard=2) == ((2, 2), "hybrid_shard", [])
    assert mesh_of("hybrid_shard", 4, replicate=2) == ((2, 2), "hybrid_shard", [])
    assert mesh_of("hybrid_shard", 8, replicate=4, shard=2) == ((4, 2), "hybrid_shard", [])


@pytest.mark.parametrize(("plain", "hybrid"), [("full_shard", "hybrid_shard"), ("shard_grad_op", "hybrid_shard_zero2")])
def test_plain_strategy_with_replicas_is_planned_as_hybrid(plain: str, hybrid: str) -> None:
    mesh, strategy, problems = mesh_of(plain, 8, replicate=2, shard=4)
    assert (mesh, strategy) == ((2, 4), hybrid)
    assert [problem.code for problem in problems] == ["FSDP-N111"]


def test_product_of_mesh_sizes_must_be_the_world_size() -> None:
    *_, problems = mesh_of("hybrid_shard", 3, replicate=2, shard=2)
    assert [problem.code for problem in problems] == ["FSDP-E128"]
    assert "2 × 2 (replicate × shard)" in problems[0].message
    assert "4 processes" in problems[0].fix


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"replicate": 2}, {"shard": 6}, {"shard": 0}])
def test_mesh_size_must_divide_the_world_size(sizes: dict[str, int]) -> None:
    *_, problems = mesh_of("hybrid_shard", 3, **sizes)
    assert [(p.code, p.setting) for p in problems] == [("FSDP-E129", f"mesh.{next(iter(sizes))}")]
    assert "one of 1, 3" in problems[0].fix


def test_no_shard_refuses_sizes_of_other_strategies() -> None:
    assert codes_of("no_shard", 4, shard=2) == [("FSDP-E130", "mesh.shard")]
    assert codes_of("no_shard", 4, replicate=2) == [("FSDP-E128", "mesh.replicate")]
    assert codes_of("no_shard", 4, shard=1, replicate=4) == []


def test_world_size_below_1_is_refused() -> None:
    assert codes_of("full_shard", 0) == [("FSDP-E201", None)]
    assert codes_of("full_shard", 1) == []


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "hybrid_shard_zero2"])
def test_shard_groups_of_one_rank_are_reported(strategy: str) -> None:
    machines = LaunchSection(num_processes=2, num_machines=2)
    mesh, planned, problems = mesh_of(strategy, 2, launch=machines, shard=1)
    assert (mesh, planned, [problem.code for problem in problems]) == ((2, 1), "no_shard", ["FSDP-W281"])
    assert mesh_of(strategy, 1, shard=1)[2] == []
    if strategy != "full_shard":
        assert [problem.code for problem in mesh_of(strategy, 2, launch=machines)[2]] == ["FSDP-W281"]


def test_strategy_that_shards_refuses_a_shard_size_of_1() -> None:
    config = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_size": 1}
    spec = load_spec({"distributed_type": "FSDP", "fsdp_config": config}, environ={})
    for world_size, codes in ((4, ["FSDP-E130"]), (1, [])):
        collector = ProblemCollector(spec)
        resolve_mesh(world_size, None, collector)
        assert [problem.code for problem in collector.problems] == codes


@pytest.mark.parametrize(
    ("world_size", "sizes", "expected"),
    [
        (8, {"context": 2}, (1, 4, 8, 4)),
        (8, {"context": 2, "replicate": 2}, (2, 2, 4, 4)),
        (8, {"tensor": 2}, (1, 4, 4, 4)),
        (8, {"context": 2, "tensor": 2}, (1, 2, 4, 2)),
        (8, {"expert": 8}, (1, 8, 8, 8)),
        (4, {"context": 4}, (1, 1, 4, 1)),
    ],
    ids=str,
)
def test_shard_size_is_what_the_other_axes_leave(
    world_size: int, sizes: dict[str, int], expected: tuple[int, int, int, int]
) -> None:
    """Replicas, shard size, shards of a parameter, and ranks with other samples."""
    spec = FsdpSpec(sharding=ShardingSection(strategy="full_shard"), mesh=MeshSection(**sizes))
    collector = ProblemCollector(spec)
    mesh, _ = resolve_mesh(world_size, None, collector)
    assert (mesh.replicate, mesh.shard, mesh.num_shards, mesh.num_data_ranks) == expected
    assert [problem for problem in collector.problems if problem.severity == "error"] == []


def test_expert_size_must_divide_the_ranks_of_a_replica() -> None:
    assert ("FSDP-E138", "mesh.expert") in codes_of("full_shard", 8, expert=8, replicate=2)
    assert ("FSDP-E138", "mesh.expert") not in codes_of("full_shard", 8, expert=4, replicate=2)
    assert codes_of("full_shard", 6, context=2, tensor=2) == [("FSDP-E129", "mesh.shard")]


@pytest.mark.parametrize(("mesh", "code"), [({"tensor": 2}, "FSDP-E207"), ({"expert": 2}, "FSDP-E207"), ({}, None)])
def test_axis_without_a_plan_of_the_model_is_refused(mesh: dict[str, int], code: str | None) -> None:
    collector = ProblemCollector(FsdpSpec())
    check_divided_layers(MeshPlan(replicate=1, shard=2, **mesh), nn.Linear(2, 2), collector)
    assert code in [None, *(problem.code for problem in collector.problems)]
    assert bool(collector.problems) is bool(mesh)


@pytest.mark.parametrize(
    ("sizes", "setting"), [({"tensor": 4}, "mesh.tensor"), ({"tensor": 2}, None), ({"expert": 3}, "mesh.expert")]
)
def test_axis_that_does_not_divide_the_model_is_refused(sizes: dict[str, int], setting: str | None) -> None:
    """The model has eight heads, two of keys and values, and eight experts."""
    model = nn.Linear(2, 2)
    model.tp_plan = model.ep_plan = {"layers.*": "colwise"}  # type: ignore[assignment]
    model.config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, num_local_experts=8)  # type: ignore
    collector = ProblemCollector(FsdpSpec())
    check_divided_layers(MeshPlan(replicate=1, shard=2, **sizes), model, collector)
    assert [(each.code, each.setting) for each in collector.problems] == ([("FSDP-E208", setting)] if setting else [])
