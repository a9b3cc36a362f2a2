"""Meshes with context, tensor and expert axes on four ranks: equal to one process, saved, resumed and exported."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.plan.fsdp_plan import MeshPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.tools.plan.estimate.time import estimate_communication
from hf_fsdp_plugin.tools.plan.estimate.types import Collective, Workload
from tests.gloo.collective_counter import CollectiveCounter
from tests.support import axes_runs, distributed_config_runs
from tests.support.axes_runs import Sizes, config_of, num_batches, train_in_loop
from tests.support.distributed_config_runs import PLAIN, norms, one_process
from tests.support.matrices import needs_transformers, slow
from tests.support.ranks import RankError, Ranks, own_device
from tests.support.tiny import GLOBAL_BATCH, LENGTH, global_batch, my_part, tiny_llama, tiny_mixtral
from tests.support.trainer_runs import losses, make_trainer
from tests.support.training import MAX_NORM, assert_same_weights, differing, reference

pytestmark = needs_transformers("5.20")

RELATIVE = 1e-5

MODELS = {"llama": tiny_llama, "mixtral": lambda: tiny_mixtral(experts=4)}

LLAMA: list[Sizes] = [
    {"cp": 2},
    {"cp": 2, "cp_comm_strategy": "alltoall"},
    {"tp": 2},
    {"cp": 2, "tp": 2},
]

MIXTRAL: list[Sizes] = [{"ep": 4}, {"ep": 2, "tp": 2}, {"ep": 2}]

CHECKPOINTING = {"fsdp_activation_checkpointing": True}

MESHES = [("llama", sizes) for sizes in LLAMA] + [("mixtral", sizes) for sizes in MIXTRAL]

HYBRID: list[Sizes] = [
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
]

# Pairs of axes contain what each of them does.
BOTH: Sizes = {"cp": 2, "tp": 2}

QUICK: list[Sizes] = [BOTH, {"ep": 2, "tp": 2}]


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
    return {name: one_process(folder, str(tmp_path_factory.mktemp("one"))) for name, folder in folders.items()}


def axes_of(report: dict[str, Any]) -> dict[str, int]:
    return {name: size for name, size in report["mesh"].items() if name not in ("replicate", "shard")}


@pytest.mark.parametrize(("name", "sizes"), [mesh if mesh[1] in QUICK else slow(*mesh) for mesh in MESHES], ids=str)
def test_trainer_equals_one_process(
    four_ranks: Ranks, tmp_path: Path, folders: dict[str, str], expected: dict[str, Any], name: str, sizes: Sizes
) -> None:
    run = four_ranks.run(axes_runs.train, folders[name], str(tmp_path), sizes)[0]
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
    eight_ranks: Ranks, tmp_path: Path, folders: dict[str, str], expected: dict[str, Any], sizes: Sizes
) -> None:
    run = eight_ranks.run(axes_runs.train, folders["llama"], str(tmp_path), sizes)[0]
    assert run["losses"] == pytest.approx(expected["llama"]["losses"], rel=RELATIVE)
    assert run["norms"] == pytest.approx(expected["llama"]["norms"], rel=RELATIVE)
    assert all(torch.equal(run["exported"][key], weight) for key, weight in run["weights"].items())
    assert differing(run["report"]) == []
    assert run["report"]["mesh"] == {"replicate": 2, "shard": 2, "context" if "cp" in sizes else "tensor": 2}
    for second in (sizes, {}):
        again = eight_ranks.run(axes_runs.train, folders["llama"], str(tmp_path), second, resume=True)[0]
        assert again["losses"] == pytest.approx(expected["llama"]["losses"], rel=1e-4)
        assert_same_weights(again["weights"], expected["llama"]["weights"], 1e-4)


@pytest.mark.parametrize(("name", "sizes"), [("llama", {"tp": 2}), slow("mixtral", {"ep": 4})], ids=str)
def test_checkpointed_layers_equal_one_process(
    four_ranks: Ranks, tmp_path: Path, folders: dict[str, str], expected: dict[str, Any], name: str, sizes: Sizes
) -> None:
    settings = {**CHECKPOINTING, "fsdp_cpu_ram_efficient_loading": True}
    run = four_ranks.run(axes_runs.train, folders[name], str(tmp_path), sizes, settings=settings)[0]
    assert run["losses"] == pytest.approx(expected[name]["losses"], rel=RELATIVE)
    assert all(torch.equal(run["exported"][key], weight) for key, weight in run["weights"].items())
    assert differing(run["report"]) == []
    observed = {row["setting"]: row["observed"] for row in run["report"]["settings"]}
    assert observed["activation.checkpointing"] == "full"


def balanced(output: Any, experts: int) -> Any:
    """The output of a router that selects all experts equally often."""
    *others, index = output
    return (*others, torch.arange(index.numel(), device=index.device).view(index.shape).remainder(experts))


def counted(
    folder: str, sizes: Sizes, settings: dict[str, Any], experts: int = 4
) -> Counter[tuple[str, tuple[int, ...], int, str]]:
    """The collectives of the second step of a training with the batches of the Trainer."""
    from transformers import AutoModelForCausalLM

    hfp.install(config_of(sizes, **settings))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in model.named_modules():
        if sizes.get("ep", 1) > 1 and name.endswith("mlp.gate"):
            module.register_forward_hook(lambda router, args, output: balanced(output, experts))
    assert session().ambient is not None
    accelerator = hfp.accelerator(session().ambient)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    counter, cp = CollectiveCounter(), sizes.get("cp", 1)
    for step in range(2):
        tokens = my_part(global_batch(step), 0, GLOBAL_BATCH // 2)["input_ids"].to(accelerator.device)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        if cp > 1:
            positions = torch.arange(LENGTH, device=tokens.device).expand(len(tokens), -1).contiguous()
            batch |= {"shift_labels": tokens.roll(-1, 1), "position_ids": positions}
        parts = list(batch.values()) if cp > 1 else []
        divided = {"buffers": parts, "buffer_seq_dims": [1] * len(parts), "no_restore_buffers": set(parts)}
        with counter if step == 1 else nullcontext(), accelerator.maybe_context_parallel(**divided):
            with counter.during("forward"):
                loss = model(**batch).loss
            with counter.during("backward"):
                accelerator.backward(loss)
            with counter.during("clipping"):
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            with counter.during("update"):
                optimizer.step()
                optimizer.zero_grad()
    return counter.calls


@pytest.mark.parametrize(
    ("name", "sizes", "settings"),
    [*((name, sizes, {}) if sizes == BOTH else slow(name, sizes, {}) for name, sizes in MESHES),
     slow("mixtral", {"tp": 2}, {}), slow("llama", {"cp": 2}, CHECKPOINTING), slow("llama", {"tp": 2}, CHECKPOINTING),
     ("mixtral", {"ep": 2}, CHECKPOINTING)],
    ids=str,
)  # fmt: skip
def test_estimated_collectives_are_those_of_ranks(
    four_ranks: Ranks, folders: dict[str, str], name: str, sizes: Sizes, settings: dict[str, Any]
) -> None:
    with torch.device("meta"):
        model = MODELS[name]()  # type: ignore[operator]
    plan = resolve(load_spec(config_of(sizes, **settings)), model, world_size=4)
    workload = Workload(micro_batch=2, seq_len=LENGTH)
    estimated = list(estimate_communication(plan, model, workload))
    for rank, calls in enumerate(four_ranks.run(counted, folders[name], sizes, settings)):
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
def test_loop_equals_one_process(four_ranks: Ranks, sizes: Sizes) -> None:
    alone = reference("llama", num_steps=3)
    run, *others = four_ranks.run(train_in_loop, sizes)
    # Transformers takes the two parts of a sequence for packed ones, and would make a mask of all pairs of tokens.
    assert all(each["masks"] == [None] * 3 for each in (run, *others))
    assert run["losses"] == pytest.approx(alone["losses"], rel=RELATIVE)
    assert run["norms"] == pytest.approx(alone["norms"], rel=RELATIVE)
    assert_same_weights(run["weights"], alone["weights"], 1e-4)
    assert differing(run["report"]) == []


def train_with_object(
    folder: str, output_dir: str, sizes: Sizes, *, for_transformers_4: bool = False
) -> dict[str, Any]:
    """Train with ``TrainingArguments(parallelism_config=ParallelismConfig(…))``, whose sizes a script sets.

    With a tensor axis, the script loads the model with a ``DistributedConfig``, or with ``tp_plan`` and ``device_mesh``
    as for Transformers 4, which the examples of Accelerate do.
    """
    from accelerate import ParallelismConfig
    from transformers import AutoModelForCausalLM

    mesh = ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()})
    layout: dict[str, Any] = {}
    if for_transformers_4:
        hfp.install()
        layout = {"tp_plan": "auto", "device_mesh": mesh.build_device_mesh(own_device().type)}
    elif "tp" in sizes:
        layout["distributed_config"] = {"tp_size": sizes["tp"], "fsdp_size": sizes["dp_shard"]}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **layout)
    arguments = {**PLAIN, "per_device_train_batch_size": GLOBAL_BATCH // num_batches(sizes)}
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
    trainer = make_trainer(output_dir, model, parallelism_config=mesh, **fsdp, **arguments)
    trainer.train()
    report = json.loads((Path(output_dir) / "fsdp_report.json").read_text())
    return {"losses": losses(trainer), "norms": norms(trainer), "report": report}


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
        train_with_object,
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
    run = four_ranks.run(
        distributed_config_runs.train, folders["llama"], str(tmp_path), fields, per_device_train_batch_size=4
    )[0]
    assert run["losses"] == pytest.approx(expected["llama"]["losses"], rel=RELATIVE)
    assert all(torch.equal(run["exported"][key], weight) for key, weight in run["weights"].items())
    assert axes_of(run["report"]) == {"tensor": 2} and differing(run["report"]) == []


@pytest.mark.parametrize(("name", "sizes"), [("llama", {"cp": 2}), slow("mixtral", {"ep": 2})], ids=str)
def test_adapters_equal_one_process(
    four_ranks: Ranks, tmp_path: Path, folders: dict[str, str], name: str, sizes: Sizes
) -> None:
    alone = one_process(folders[name], str(tmp_path / "alone"), adapters=True)
    run = four_ranks.run(axes_runs.train, folders[name], str(tmp_path), sizes, adapters=True)[0]
    assert run["losses"] == pytest.approx(alone["losses"], rel=RELATIVE)
    assert run["norms"] == pytest.approx(alone["norms"], rel=RELATIVE)
    assert differing(run["report"]) == []


def test_adapters_on_a_tensor_axis_are_refused(four_ranks: Ranks, tmp_path: Path, folders: dict[str, str]) -> None:
    with pytest.raises(RankError, match=r"lora_B.*FSDP-E634"):
        four_ranks.run(axes_runs.train, folders["llama"], str(tmp_path), {"tp": 2}, adapters=True)


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
    first: Sizes,
    second: Sizes,
) -> None:
    four_ranks.run(axes_runs.train, folders[name], str(tmp_path), first)
    run = four_ranks.run(axes_runs.train, folders[name], str(tmp_path), second, resume=True)[0]
    assert run["losses"] == pytest.approx(expected[name]["losses"], rel=1e-4)
    assert_same_weights(run["weights"], expected[name]["weights"], 1e-4)


def refused(folder: str, sizes: Sizes, *, build: bool = False, **arguments: Any) -> list[str]:
    """The codes with which loading and preparing a model are refused."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        hfp.install(config_of(sizes))
        if build:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
        assert session().ambient is not None
        hfp.accelerator(session().ambient).prepare(model)
    except SpecError as error:
        return [problem.code for problem in error.problems if problem.severity == "error"]
    return []


@pytest.mark.parametrize(
    ("name", "sizes", "arguments", "codes"),
    [
        ("llama", {"tp": 2}, {"build": True}, ["FSDP-E209"]),
        ("llama", {"cp": 2}, {"attn_implementation": "eager"}, ["FSDP-E206"]),
    ],
    ids=str,
)
def test_mesh_that_the_model_does_not_fit_is_refused(
    four_ranks: Ranks, folders: dict[str, str], name: str, sizes: Sizes, arguments: dict, codes: list[str]
) -> None:
    assert four_ranks.run(refused, folders[name], sizes, **arguments) == [codes] * 4
