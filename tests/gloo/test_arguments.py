"""Arguments that a script passes in Python: the mesh of a ``ParallelismConfig``, time-outs, ``TrainingArguments``."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from tests.support.launching import launch, write
from tests.support.matrices import slow
from tests.support.ranks import Ranks, reset_accelerate
from tests.support.tiny import MODELS
from tests.support.trainer_runs import Batches, make_trainer
from tests.support.training import (
    adamw,
    assert_same_training,
    assert_same_weights,
    differing,
    loss_of,
    reference,
    train_prepared,
)

NUM_STEPS = 4


SIZES = {"dp_replicate_size": 2, "dp_shard_size": 2}

VERSIONS = pytest.mark.parametrize("version", [1, 2])


def config_of(version: int, **settings: Any) -> dict[str, Any]:
    section = {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **settings}
    return {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": section}


def rows_of(report: dict[str, Any]) -> dict[str, Any]:
    return {row["setting"]: row for row in report["settings"]}


def assert_two_by_two(report: dict[str, Any], source: str) -> None:
    rows = rows_of(report)
    assert (rows["mesh.replicate"]["observed"], rows["mesh.shard"]["observed"]) == (2, 2)
    assert rows["mesh.shard"]["origin"]["source"] == source
    assert rows["sharding.strategy"]["observed"] == "hybrid_shard"
    assert differing(report) == []


def mesh_of(**sizes: int) -> Any:
    from accelerate import ParallelismConfig

    return ParallelismConfig(**sizes)


def train_on_mesh(config: dict[str, Any], sizes: dict[str, int], entry: str) -> dict[str, Any]:
    """Train with ``install()`` and the sizes of a mesh from a script, and return what Accelerate has of the mesh, too.

    Args:
        entry: ``object``, ``object and plugin``, or ``variables``.
    """
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    reset_accelerate()
    variables = {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}
    if entry == "variables":
        os.environ.update({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **variables})
    hfp.install(config)
    given: dict[str, Any] = {} if entry == "variables" else {"parallelism_config": mesh_of(**sizes)}
    if entry == "object and plugin":
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=config["fsdp_config"]["fsdp_version"])
    accelerator = Accelerator(**given)
    again = Accelerator()
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, adamw(model))
    run = train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), batch_size=1))
    mesh = accelerator.torch_device_mesh
    for name in ("ACCELERATE_USE_PARALLELISM_CONFIG", *variables):
        os.environ.pop(name, None)
    return {
        **run,
        "mesh": None if mesh is None else (mesh["dp_replicate"].size(), mesh["dp_shard"].size()),
        "of second": (again.state.fsdp_plugin.spec.mesh.replicate, again.state.fsdp_plugin.spec.mesh.shard),
        "batches": [batch.item() for batch in loader],
    }


@VERSIONS
@pytest.mark.parametrize("entry", ["object", slow("object and plugin"), "variables"])
def test_mesh_of_parallelism_config_is_applied(four_ranks: Ranks, version: int, entry: str) -> None:
    runs = four_ranks.run(train_on_mesh, config_of(version), SIZES, entry)
    assert_two_by_two(runs[0]["report"], "environment" if entry == "variables" else "ParallelismConfig")
    assert_same_training(runs[0], reference("llama", num_steps=NUM_STEPS))
    # Scripts can read Accelerate's own mesh, where Accelerate has one.
    assert runs[0]["mesh"] == ((2, 2) if version == 2 else None)
    assert entry == "variables" or runs[0]["of second"] == (2, 2)
    assert sorted(batch for run in runs for batch in run["batches"]) == list(range(8))


def train_on_mesh_of_arguments(output_dir: str, sizes: dict[str, int], version: int) -> dict[str, Any]:
    trainer = make_trainer(
        output_dir, max_steps=2, fsdp=True, fsdp_config={"version": version}, parallelism_config=mesh_of(**sizes)
    )
    trainer.train()
    return hfp.report(trainer).to_json()


@VERSIONS
def test_mesh_of_training_arguments_is_applied(four_ranks: Ranks, tmp_path: Path, version: int) -> None:
    assert_two_by_two(four_ranks.run(train_on_mesh_of_arguments, str(tmp_path), SIZES, version)[0], "ParallelismConfig")


def code_of_refusal(config: dict[str, Any], sizes: dict[str, int]) -> str:
    """Return the code with which an Accelerator with this mesh is refused, in the constructor or by ``prepare``."""
    from accelerate import Accelerator

    reset_accelerate()
    hfp.install(config)
    try:
        Accelerator(parallelism_config=mesh_of(**sizes)).prepare(MODELS["llama"]())
    except SpecError as error:
        return next(problem.code for problem in error.problems if problem.severity == "error")
    return ""


@VERSIONS
@pytest.mark.parametrize(
    ("sizes", "code"),
    [
        ({"sp_size": 2}, "FSDP-E122"),
        ({"dp_replicate_size": 2}, "FSDP-E128"),  # 2 × 1 of four ranks
        ({"dp_shard_size": 2}, "FSDP-E128"),
        ({}, ""),
    ],
    ids=str,
)
def test_mesh_that_cannot_be_made_is_refused(four_ranks: Ranks, version: int, sizes: dict[str, int], code: str) -> None:
    assert set(four_ranks.run(code_of_refusal, config_of(version), sizes)) == {code}


def report_of_arguments(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Return the report of a Trainer, and the backend with which its units are compiled."""
    trainer = make_trainer(output_dir, max_steps=1, fsdp=True, **arguments)
    trainer.train()
    dist.barrier()
    return {**hfp.report(trainer).to_json(), "dynamo": trainer.accelerator.state.dynamo_plugin.backend.value}


@pytest.mark.parametrize(
    ("arguments", "setting", "observed"),
    [
        ({"gradient_checkpointing": True}, "activation.checkpointing", "full"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            "activation.checkpointing",
            "full",
        ),
        ({"bf16": True}, "precision.param", "bf16"),
        ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, "wrap.policy", "transformer"),
    ],
    ids=str,
)
def test_training_argument_is_applied(
    two_ranks: Ranks, tmp_path: Path, arguments: dict[str, Any], setting: str, observed: str
) -> None:
    report = two_ranks.run(report_of_arguments, str(tmp_path), **arguments)[0]
    row = rows_of(report)[setting]
    assert (row["observed"], row["status"]) == (observed, "applied")
    assert differing(report) == []
    assert report["dynamo"] == arguments.get("torch_compile_backend", "no").upper()


def report_of_other_arguments(folder: str, how: str, config: dict[str, Any]) -> dict[str, Any]:
    """The report of a Trainer whose arguments were created before ``install``, or are a copy of what was created."""
    if how != "older":
        hfp.install()
    arguments = TrainingArguments(
        folder, fsdp=True, fsdp_config=config, use_cpu=True, max_steps=1, report_to="none", save_strategy="no"
    )
    if how == "older":
        hfp.install()
    else:
        arguments = copy.deepcopy(arguments) if how == "copied" else pickle.loads(pickle.dumps(arguments))
    trainer = Trainer(MODELS["llama"](), arguments, train_dataset=Batches(1))
    trainer.train()
    dist.barrier()
    return hfp.report(trainer).to_json()


@VERSIONS
@pytest.mark.parametrize("how", ["older", "copied", slow("unpickled")])
def test_arguments_that_install_has_not_seen_are_read(two_ranks: Ranks, tmp_path: Path, how: str, version: int) -> None:
    config = {"version": version, "straggler_percent": 35, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    report = two_ranks.run(report_of_other_arguments, str(tmp_path), how, config)[0]
    rows = rows_of(report)
    assert (rows["metrics.straggler_percent"]["asked"], rows["fsdp.version"]["observed"]) == (35, version)
    assert rows["wrap.classes"]["origin"]["source"] == "TrainingArguments"
    assert differing(report) == []


@pytest.mark.parametrize("how", ["older", slow("copied")])
def test_unknown_key_of_such_arguments_is_refused(two_ranks: Ranks, tmp_path: Path, how: str) -> None:
    with pytest.raises(AssertionError, match=r"unknown key 'stragler_percent'.*FSDP-E020"):
        two_ranks.run(report_of_other_arguments, str(tmp_path), how, {"stragler_percent": 35})


def _accelerator(config: dict[str, Any], **arguments: Any) -> Any:
    from accelerate import Accelerator

    reset_accelerate()
    hfp.install(config)
    return Accelerator(**arguments)


def _accumulate(accelerator: Any) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Train with six batches. Returns the numbers of steps of optimizer and scheduler, and the weights."""
    model = MODELS["llama"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    num_steps = 0
    for number in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, "llama", number, accelerator.process_index, accelerator.num_processes))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            num_steps += accelerator.sync_gradients
    num_scheduled = round(math.log(scheduler.get_last_lr()[0] / 0.1, 0.9))
    return {"optimizer": num_steps, "scheduler": num_scheduled}, accelerator.get_state_dict(model)


def _loader() -> Any:
    return torch.utils.data.DataLoader(torch.arange(10), batch_size=4)


def _batches(accelerator: Any) -> list[list[int]]:
    """Prepare a model and a loader of ten samples. Returns the batches of this rank."""
    _, loader = accelerator.prepare(MODELS["llama"](), _loader())
    return [batch.tolist() for batch in loader]


def arguments_of_library(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return what Accelerate makes of arguments that are left to it, for a sharded model."""
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration

    accumulation = GradientAccumulationPlugin(num_steps=3)
    stepped, weights = _accumulate(_accelerator(config, gradient_accumulation_plugin=accumulation))
    separate, _ = _accumulate(_accelerator(config, gradient_accumulation_steps=3, step_scheduler_with_optimizer=False))
    loaders = {
        name: _batches(_accelerator(config, dataloader_config=DataLoaderConfiguration(**{name: value})))
        for name, value in {"split_batches": True, "dispatch_batches": True, "even_batches": False}.items()
    }
    non_blocking = _accelerator(config, dataloader_config=DataLoaderConfiguration(non_blocking=True))
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = _accelerator(config, project_config=project)
    accelerator.prepare(MODELS["llama"]())
    for _ in range(3):
        accelerator.save_state()
    accelerator.wait_for_everyone()
    return {
        "weights": weights,
        "steps": {"with optimizer": stepped, "separate": separate},
        "batches": loaders,
        "non_blocking": non_blocking.prepare(_loader())._non_blocking,
        "checkpoints": sorted(os.listdir(f"{folder}/checkpoints")),
    }


def accumulated_reference() -> dict[str, torch.Tensor]:
    """The weights of :func:`_accumulate` in one process, whose scheduler steps twice after each optimizer step."""
    model = MODELS["llama"]().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(6):
        (loss_of(model, "llama", number) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.9**2
    return dict(model.state_dict())


@VERSIONS
def test_arguments_left_to_the_library_are_applied(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    first, second = two_ranks.run(arguments_of_library, config_of(version), str(tmp_path))
    assert_same_weights(first["weights"], accumulated_reference())
    assert first["steps"] == {
        "with optimizer": {"optimizer": 2, "scheduler": 4},
        "separate": {"optimizer": 2, "scheduler": 6},
    }
    assert (first["batches"], second["batches"]) == (
        {
            "split_batches": [[0, 1], [4, 5], [8, 9]],
            "dispatch_batches": [[0, 1, 2, 3], [8]],
            "even_batches": [[0, 1, 2, 3], [8, 9]],
        },
        {
            "split_batches": [[2, 3], [6, 7], [0, 1]],
            "dispatch_batches": [[4, 5, 6, 7], [9]],
            "even_batches": [[4, 5, 6, 7]],
        },
    )
    assert first["non_blocking"] is True
    assert first["checkpoints"] == ["checkpoint_1", "checkpoint_2"]


WAITING = """
    import os, sys, time, torch
    from datetime import timedelta
    from accelerate import Accelerator, PartialState
    from accelerate.utils import InitProcessGroupKwargs
    if sys.argv[1] == "state first":
        PartialState()
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=3))])
    torch.distributed.barrier()
    begin = time.monotonic()
    if os.environ["RANK"] == "1":
        time.sleep(9)
    try:
        torch.distributed.all_reduce(torch.ones(1))
    except RuntimeError:
        pass
    print(f"rank {os.environ['RANK']} waited {time.monotonic() - begin:.1f} s", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("efficient", "order"), [("true", "accelerator first"), slow("true", "state first"), slow("false", "state first")]
)
def test_timeout_of_handler_ends_a_collective(tmp_path: Path, efficient: str, order: str) -> None:
    """RAM-efficient loading and `PartialState()` start the process group before the script gives a time-out."""
    write(tmp_path, WAITING)
    config = tmp_path / "fsdp.yaml"
    config.write_text(config.read_text().replace("loading: false", f"loading: {efficient}"))
    done = launch(tmp_path, "--cpu", "--num_processes", "2", "--hang_timeout", "0", "train.py", order)
    waited = dict(re.findall(r"rank (\d) waited ([\d.]+) s", done.stdout))
    assert 2.5 <= float(waited["0"]) <= 6, done.stdout + done.stderr
