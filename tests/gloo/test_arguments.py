"""Arguments that a script passes in Python: the mesh of a ``ParallelismConfig``, time-outs, ``TrainingArguments``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.gloo import cases_arguments as cases
from tests.support.launching import launch, write
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.training import assert_same_training, assert_same_weights, differing, reference

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


@VERSIONS
@pytest.mark.parametrize("entry", ["object", slow("object and plugin"), "variables"])
def test_mesh_of_parallelism_config_is_applied(four_ranks: Ranks, version: int, entry: str) -> None:
    runs = four_ranks.run(cases.train_on_mesh, config_of(version), SIZES, entry)
    assert_two_by_two(runs[0]["report"], "environment" if entry == "variables" else "ParallelismConfig")
    assert_same_training(runs[0], reference("llama", num_steps=cases.NUM_STEPS))
    # Scripts can read Accelerate's own mesh, where Accelerate has one.
    assert runs[0]["mesh"] == ((2, 2) if version == 2 else None)
    assert entry == "variables" or runs[0]["of second"] == (2, 2)
    assert sorted(batch for run in runs for batch in run["batches"]) == list(range(8))


@VERSIONS
def test_mesh_of_training_arguments_is_applied(four_ranks: Ranks, tmp_path: Path, version: int) -> None:
    assert_two_by_two(
        four_ranks.run(cases.train_on_mesh_of_arguments, str(tmp_path), SIZES, version)[0], "ParallelismConfig"
    )


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
    assert set(four_ranks.run(cases.code_of_refusal, config_of(version), sizes)) == {code}


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
    report = two_ranks.run(cases.report_of_arguments, str(tmp_path), **arguments)[0]
    row = rows_of(report)[setting]
    assert (row["observed"], row["status"]) == (observed, "applied")
    assert differing(report) == []
    assert report["dynamo"] == arguments.get("torch_compile_backend", "no").upper()


@VERSIONS
def test_arguments_left_to_the_library_are_applied(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    first, second = two_ranks.run(cases.arguments_of_library, config_of(version), str(tmp_path))
    assert_same_weights(first["weights"], cases.accumulated_reference())
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
