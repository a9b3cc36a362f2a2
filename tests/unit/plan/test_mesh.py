"""Mesh sizes of every strategy, checked against the world size."""

from __future__ import annotations

import pytest

from hf_fsdp_plugin.plan.complaints import Complaints
from hf_fsdp_plugin.plan.mesh import resolve_mesh
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.model import FsdpSpec, LaunchSection, MeshSection, ShardingSection


def mesh_of(
    strategy: str, world_size: int, *, local: int | None = None, launch: LaunchSection | None = None, **sizes: int
) -> tuple[tuple[int, int], str, tuple[Problem, ...]]:
    spec = FsdpSpec(
        sharding=ShardingSection(strategy=strategy),  # type: ignore[arg-type]
        mesh=MeshSection(**sizes),
        launch=launch or LaunchSection(),
    )
    complaints = Complaints(spec)
    mesh, planned = resolve_mesh(spec, world_size, local, complaints)
    return (mesh.replicate, mesh.shard), planned, complaints.problems


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_plain_strategies_shard_over_all_ranks(strategy: str) -> None:
    assert mesh_of(strategy, 8) == ((1, 8), strategy, ())


def test_no_shard_replicates_over_all_ranks() -> None:
    assert mesh_of("no_shard", 8) == ((8, 1), "no_shard", ())


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
def test_hybrid_shards_over_the_ranks_of_a_machine(strategy: str) -> None:
    assert mesh_of(strategy, 16, local=8) == ((2, 8), strategy, ())
    machines = LaunchSection(num_processes=16, num_machines=2)
    assert mesh_of(strategy, 16, launch=machines) == ((2, 8), strategy, ())


def test_hybrid_on_one_machine_is_full_shard_and_says_so() -> None:
    mesh, strategy, problems = mesh_of("hybrid_shard", 8)
    assert (mesh, strategy) == ((1, 8), "hybrid_shard")
    assert [problem.severity for problem in problems] == ["warning"]
    assert "does what full_shard does" in problems[0].message


def test_hybrid_on_one_machine_takes_the_sizes_given() -> None:
    assert mesh_of("hybrid_shard", 4, shard=2) == ((2, 2), "hybrid_shard", ())
    assert mesh_of("hybrid_shard", 4, replicate=2) == ((2, 2), "hybrid_shard", ())
    assert mesh_of("hybrid_shard", 8, replicate=4, shard=2) == ((4, 2), "hybrid_shard", ())


@pytest.mark.parametrize(("plain", "hybrid"), [("full_shard", "hybrid_shard"), ("shard_grad_op", "hybrid_shard_zero2")])
def test_a_plain_strategy_with_replicas_is_planned_as_the_hybrid_one(plain: str, hybrid: str) -> None:
    mesh, strategy, problems = mesh_of(plain, 8, replicate=2, shard=4)
    assert (mesh, strategy) == ((2, 4), hybrid)
    assert [problem.severity for problem in problems] == ["note"]


def test_a_mesh_whose_product_is_not_the_world_is_an_error() -> None:
    *_, problems = mesh_of("hybrid_shard", 3, replicate=2, shard=2)
    assert [problem.severity for problem in problems] == ["error"]
    assert "a mesh of 2 × 2 (replicate × shard) takes 4 ranks, but the world has 3" in str(problems[0])
    assert "Start 4 processes" in problems[0].fix


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"replicate": 2}, {"shard": 6}, {"shard": 0}])
def test_a_size_that_does_not_divide_the_world_is_an_error(sizes: dict[str, int]) -> None:
    *_, problems = mesh_of("hybrid_shard", 3, **sizes)
    assert "does not divide the world of 3 ranks" in problems[0].message
    assert "one of 1, 3" in problems[0].fix


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"replicate": 2}])
def test_no_shard_with_sizes_of_another_strategy_is_an_error(sizes: dict[str, int]) -> None:
    *_, problems = mesh_of("no_shard", 4, **sizes)
    assert [problem.severity for problem in problems] == ["error"]
    assert mesh_of("no_shard", 4, shard=1, replicate=4)[2] == ()


def test_a_world_without_ranks_is_an_error() -> None:
    assert "a world of 0 ranks" in mesh_of("full_shard", 0)[2][0].message
