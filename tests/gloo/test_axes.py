"""Meshes with context, tensor and expert axes on four ranks: equal to one process, saved, resumed and exported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp_plugin.plan.fsdp_plan import MeshPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.tools.plan.estimate.time import estimate_communication
from hf_fsdp_plugin.tools.plan.estimate.types import Collective, Workload
from tests.gloo import cases_axes as cases
from tests.gloo import cases_distributed_config as of_script
from tests.support.matrices import needs_transformers, slow
from tests.support.ranks import RankError, Ranks
from tests.support.tiny import LENGTH, tiny_llama, tiny_mixtral
from tests.support.training import assert_same_weights, differing, reference

pytestmark = needs_transformers("5.20")
RELATIVE = 1e-5
MODELS = {"llama": tiny_llama, "mixtral": lambda: tiny_mixtral(experts=4)}
LLAMA: list[cases.Sizes] = [
    {"cp": 2},
    {"cp": 2, "cp_comm_strategy": "alltoall"},
    {"tp": 2},
    {"cp": 2, "tp": 2},
]
MIXTRAL: list[cases.Sizes] = [{"ep": 4}, {"ep": 2, "tp": 2}, {"ep": 2}]
CHECKPOINTING = {"fsdp_activation_checkpointing": True}
MESHES = [("llama", sizes) for sizes in LLAMA] + [("mixtral", sizes) for sizes in MIXTRAL]
HYBRID: list[cases.Sizes] = [{"dp_replicate": 2, "dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}]
# Pairs of axes contain what each of them does.
BOTH: cases.Sizes = {"cp": 2, "tp": 2}
QUICK: list[cases.Sizes] = [BOTH, {"ep": 2, "tp": 2}]


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """Ranks of these tests alone: gloo has threads for each axis of each mesh, which take time while ranks wait."""
    world = Ranks(4)
    yield world
    world.stop()


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    world = Ranks(8)
    yield world
    world.stop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with the weights of small models."""
    found = {}
    for name, build in MODELS.items():
        found[name] = str(tmp_path_factory.mktemp(name))
        build().save_pretrained(found[name])  # type: ignore[operator]
    return found


@pytest.fixture(scope="module")
def expected(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Name of a model -> losses, norms and weights of one process."""
    return {
        name: of_script.one_process(folder, str(tmp_path_factory.mktemp("one"))) for name, folder in folders.items()
    }


def axes_of(report: dict[str, Any]) -> dict[str, int]:
    return {name: size for name, size in report["mesh"].items() if name not in ("replicate", "shard")}


@pytest.mark.parametrize(("name", "sizes"), [mesh if mesh[1] in QUICK else slow(*mesh) for mesh in MESHES], ids=str)
def test_trainer_equals_one_process(
    four_ranks: Ranks, tmp_path: Path, folders: dict[str, str], expected: dict[str, Any], name: str, sizes: cases.Sizes
) -> None:
    run = four_ranks.run(cases.train, folders[name], str(tmp_path), sizes)[0]
    assert run["losses"] == pytest.approx(expected[name]["losses"], rel=RELATIVE)
    assert run["norms"] == pytest.approx(expected[name]["norms"], rel=RELATIVE)
    assert_same_weights(run["weights"], expected[name]["weights"], 1e-4)
    assert all(torch.equal(run["exported"][key], weight) for key, weight in run["weights"].items())
    assert differing(run["report"]) == []
    full = {"cp": "context", "tp": "tensor", "ep": "expert"}
    assert axes_of(run["report"]) == {full[axis]: size for axis, size in sizes.items() if axis in full}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", HYBRID, ids=str)
def test_replicas_of_divided_models_equal_one_process(
    eight_ranks: Ranks, tmp_path: Path, folders: dict[str, str], expected: dict[str, Any], sizes: cases.Sizes
) -> None:
    run = eight_ranks.run(cases.train, folders["llama"], str(tmp_path), sizes)[0]
    assert run["losses"] == pytest.approx(expected["llama"]["losses"], rel=RELATIVE)
    assert run["norms"] == pytest.approx(expected["llama"]["norms"], rel=RELATIVE)
    assert all(torch.equal(run["exported"][key], weight) for key, weight in run["weights"].items())
    assert differing(run["report"]) == []
    assert run["report"]["mesh"] == {"replicate": 2, "shard": 2, "context" if "cp" in sizes else "tensor": 2}
    for second in (sizes, {}):
        again = eight_ranks.run(cases.train, folders["llama"], str(tmp_path), second, resume=True)[0]
        assert again["losses"] == pytest.approx(expected["llama"]["losses"], rel=1e-4)
        assert_same_weights(again["weights"], expected["llama"]["weights"], 1e-4)


@pytest.mark.parametrize(("name", "sizes"), [("llama", {"tp": 2}), slow("mixtral", {"ep": 4})], ids=str)
def test_checkpointed_layers_equal_one_process(
    four_ranks: Ranks, tmp_path: Path, folders: dict[str, str], expected: dict[str, Any], name: str, sizes: cases.Sizes
) -> None:
    settings = {**CHECKPOINTING, "fsdp_cpu_ram_efficient_loading": True}
    run = four_ranks.run(cases.train, folders[name], str(tmp_path), sizes, settings=settings)[0]
    assert run["losses"] == pytest.approx(expected[name]["losses"], rel=RELATIVE)
    assert all(torch.equal(run["exported"][key], weight) for key, weight in run["weights"].items())
    assert differing(run["report"]) == []
    observed = {row["setting"]: row["observed"] for row in run["report"]["settings"]}
    assert observed["activation.checkpointing"] == "full"


@pytest.mark.parametrize(
    ("name", "sizes", "settings"),
    [*((name, sizes, {}) if sizes == BOTH else slow(name, sizes, {}) for name, sizes in MESHES),
     slow("mixtral", {"tp": 2}, {}), slow("llama", {"cp": 2}, CHECKPOINTING), slow("llama", {"tp": 2}, CHECKPOINTING),
     ("mixtral", {"ep": 2}, CHECKPOINTING)],
    ids=str,
)  # fmt: skip
def test_estimated_collectives_are_those_of_ranks(
    four_ranks: Ranks, folders: dict[str, str], name: str, sizes: cases.Sizes, settings: dict[str, Any]
) -> None:
    with torch.device("meta"):
        model = MODELS[name]()  # type: ignore[operator]
    plan = resolve(load_spec(cases.config_of(sizes, **settings)), model, world_size=4)
    workload = Workload(micro_batch=2, seq_len=LENGTH)
    estimated = list(estimate_communication(plan, model, workload))
    for rank, calls in enumerate(four_ranks.run(cases.counted, folders[name], sizes, settings)):
        expected: Counter[tuple[str, tuple[int, ...], int, str]] = Counter()
        for call in estimated:
            expected[call.kind, ranks_of(plan.mesh, call, rank), call.bytes, call.phase] += call.calls
        assert calls == expected


def ranks_of(mesh: MeshPlan, call: Collective, rank: int) -> tuple[int, ...]:
    """The ranks that take part in a call, as the mesh arranges them."""
    # Ranks that have the same experts shard them, the others those that have the same part of a layer.
    of_shards = mesh.tensor if call.group_size == mesh.num_shards else mesh.expert
    inside = {"shard": of_shards, "context": mesh.tensor}.get(call.axis, 1)
    first = rank - rank // inside % call.group_size * inside
    return tuple(range(first, first + inside * call.group_size, inside))


@pytest.mark.parametrize("sizes", [{"cp": 2}, slow({"cp": 2, "cp_comm_strategy": "alltoall"})], ids=str)
def test_loop_equals_one_process(four_ranks: Ranks, sizes: cases.Sizes) -> None:
    alone = reference("llama", num_steps=3)
    run, *others = four_ranks.run(cases.train_in_loop, sizes)
    # Transformers takes the two parts of a sequence for packed ones, and would make a mask of all pairs of tokens.
    assert all(each["masks"] == [None] * 3 for each in (run, *others))
    assert run["losses"] == pytest.approx(alone["losses"], rel=RELATIVE)
    assert run["norms"] == pytest.approx(alone["norms"], rel=RELATIVE)
    assert_same_weights(run["weights"], alone["weights"], 1e-4)
    assert differing(run["report"]) == []


@pytest.mark.parametrize(
    ("axis", "name", "for_transformers_4"), [("cp", "context", False), ("tp", "tensor", False), ("tp", "tensor", True)]
)
def test_axes_of_parallelism_config_are_applied(
    four_ranks: Ranks,
    tmp_path: Path,
    folders: dict[str, str],
    expected: dict[str, Any],
    axis: str,
    name: str,
    for_transformers_4: bool,
) -> None:
    run = four_ranks.run(
        cases.train_with_object,
        folders["llama"],
        str(tmp_path),
        {axis: 2, "dp_shard": 2},
        for_transformers_4=for_transformers_4,
    )[0]
    assert run["losses"] == pytest.approx(expected["llama"]["losses"], rel=RELATIVE)
    assert run["norms"] == pytest.approx(expected["llama"]["norms"], rel=RELATIVE)
    assert axes_of(run["report"]) == {name: 2} and differing(run["report"]) == []


def test_axes_of_distributed_config_are_kept(
    four_ranks: Ranks, tmp_path: Path, folders: dict[str, str], expected: dict[str, Any]
) -> None:
    fields = {"tp_size": 2, "fsdp_size": 2}
    run = four_ranks.run(of_script.train, folders["llama"], str(tmp_path), fields, per_device_train_batch_size=4)[0]
    assert run["losses"] == pytest.approx(expected["llama"]["losses"], rel=RELATIVE)
    assert all(torch.equal(run["exported"][key], weight) for key, weight in run["weights"].items())
    assert axes_of(run["report"]) == {"tensor": 2} and differing(run["report"]) == []


@pytest.mark.parametrize(("name", "sizes"), [("llama", {"cp": 2}), slow("mixtral", {"ep": 2})], ids=str)
def test_adapters_equal_one_process(
    four_ranks: Ranks, tmp_path: Path, folders: dict[str, str], name: str, sizes: cases.Sizes
) -> None:
    alone = of_script.one_process(folders[name], str(tmp_path / "alone"), adapters=True)
    run = four_ranks.run(cases.train, folders[name], str(tmp_path), sizes, adapters=True)[0]
    assert run["losses"] == pytest.approx(alone["losses"], rel=RELATIVE)
    assert run["norms"] == pytest.approx(alone["norms"], rel=RELATIVE)
    assert differing(run["report"]) == []


def test_adapters_on_a_tensor_axis_are_refused(four_ranks: Ranks, tmp_path: Path, folders: dict[str, str]) -> None:
    with pytest.raises(RankError, match=r"lora_B.*FSDP-E634"):
        four_ranks.run(cases.train, folders["llama"], str(tmp_path), {"tp": 2}, adapters=True)


def test_length_that_is_not_divisible_is_refused(four_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"13 tokens is not divisible by 4 .*FSDP-E615"):
        four_ranks.run(cases.train_in_loop, {"cp": 2}, length=13)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("llama", {"tp": 2}, {"cp": 2}),
        slow("llama", BOTH, {}),
        slow("mixtral", {"ep": 4}, {"ep": 2, "tp": 2}),
        ("mixtral", {"ep": 2}, {}),
    ],
    ids=str,
)
def test_run_resumes_on_other_axes(
    four_ranks: Ranks,
    tmp_path: Path,
    folders: dict[str, str],
    expected: dict[str, Any],
    name: str,
    first: cases.Sizes,
    second: cases.Sizes,
) -> None:
    four_ranks.run(cases.train, folders[name], str(tmp_path), first)
    run = four_ranks.run(cases.train, folders[name], str(tmp_path), second, resume=True)[0]
    assert run["losses"] == pytest.approx(expected[name]["losses"], rel=1e-4)
    assert_same_weights(run["weights"], expected[name]["weights"], 1e-4)


@pytest.mark.parametrize(
    ("name", "sizes", "arguments", "codes"),
    [
        ("llama", {"tp": 2}, {"build": True}, ["FSDP-E209"]),
        ("llama", {"ep": 2}, {}, ["FSDP-E207"]),
        ("llama", {"tp": 4}, {}, ["FSDP-E208"]),  # two heads of keys and values
        ("llama", {"cp": 2}, {"attn_implementation": "eager"}, ["FSDP-E206"]),
    ],
    ids=str,
)
def test_mesh_that_the_model_does_not_fit_is_refused(
    four_ranks: Ranks, folders: dict[str, str], name: str, sizes: cases.Sizes, arguments: dict, codes: list[str]
) -> None:
    assert four_ranks.run(cases.refused, folders[name], sizes, **arguments) == [codes] * 4
