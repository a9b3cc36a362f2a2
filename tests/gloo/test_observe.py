"""The report has the values of the live model, whatever the config contains."""

from __future__ import annotations

import gc
import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin import load_spec, report, resolve
from hf_fsdp_plugin.backends.sharding.shard import shard
from hf_fsdp_plugin.integrations.accelerate.run_report import RunReporter, report_run
from hf_fsdp_plugin.observe import weights
from hf_fsdp_plugin.observe.first_step import record_first_step
from hf_fsdp_plugin.observe.report import BatchShape, Report
from hf_fsdp_plugin.observe.report_builder import build_report
from hf_fsdp_plugin.observe.units import observe_units
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from tests.support.json_schema import assert_valid
from tests.support.matrices import alternating
from tests.support.ranks import Ranks, own_device
from tests.support.tiny import MODELS, global_batch, my_part, parallel_config
from tests.support.training import fresh_accelerator

# torch pads each FSDP2 parameter's first dimension, and each FSDP1 flat parameter, to a multiple of the shard size.
PADDING = 0.02


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


def config_of(version: int = 2, *, top: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """A config for two ranks, with keys of ``fsdp_config`` and, in ``top``, keys of the top level."""
    return {**parallel_config(settings.pop("strategy", "full_shard"), version, 2, **settings), **(top or {})}


BF16 = {"mixed_precision": "bf16"}


def setting(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in found["settings"] if row["setting"] == name)


def status(found: dict[str, Any], name: str) -> tuple[Any, str]:
    row = setting(found, name)
    return row["observed"], row["status"]


def problem(found: dict[str, Any], code: str) -> dict[str, Any]:
    """The only problem with this code."""
    [problem] = [problem for problem in found["problems"] if problem["code"] == code]
    return problem


def assert_nothing_differs(found: dict[str, Any]) -> None:
    assert [row for row in found["settings"] if row["status"] == "differs"] == []
    assert [problem for problem in found["problems"] if problem["severity"] == "error"] == []


def assert_fractions(reports: list[dict[str, Any]], parts: int) -> None:
    """Each rank has one of ``parts`` parts of the parameters, the gradients and the optimizer state."""
    num_params = reports[0]["num_params"]
    for memory in (found["memory"] for found in reports):
        for kind in ("params", "grads", "optimizer"):
            assert memory[f"{kind}_bytes"] == pytest.approx(memory[f"ddp_{kind}_bytes"] / parts, rel=PADDING)
        assert memory["ddp_params_bytes"] == 4 * num_params
        # AdamW: two fp32 moments a parameter, and a step counter a tensor.
        assert memory["ddp_optimizer_bytes"] == pytest.approx(8 * num_params, rel=PADDING)
    locals_ = [sum(unit["num_local_params"] for unit in found["units"]) for found in reports]
    assert sum(locals_) == num_params * len(reports) // parts


def make(config: dict[str, Any], name: str = "llama") -> tuple[nn.Module, FsdpPlan]:
    model = MODELS[name]()
    return model, resolve(
        load_spec(config, environ={}), model, world_size=dist.get_world_size(), device_type=own_device().type
    )


def make_sharded(config: dict[str, Any], name: str = "llama") -> tuple[Any, FsdpPlan]:
    model, plan = make(config, name)
    return shard(plan, model, own_device()), plan


def backward(model: nn.Module) -> None:
    model(**my_part(global_batch(0), dist.get_rank(), dist.get_world_size())).loss.backward()


def to_json(found: Report) -> dict[str, Any]:
    return {**found.to_json(), "text": str(found)}


def report_of_trained(model: nn.Module, plan: FsdpPlan) -> dict[str, Any]:
    """Train one step; return the report of this rank and its text."""
    optimizer = torch.optim.AdamW(model.parameters())
    record_first_step(model, optimizer)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    batch = BatchShape(per_device=4, accumulation=2, seq_len=12)
    return to_json(build_report(model, plan, optimizers=[optimizer], batch=batch))


def planned(config: dict[str, Any], name: str = "llama") -> dict[str, Any]:
    return report_of_trained(*make_sharded(config, name))


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("model", ["llama", "bert"])
def test_strategy_and_memory_share_on_two_ranks(two_ranks: Ranks, strategy: str, version: int, model: str) -> None:
    reports = two_ranks.run(planned, config_of(version, strategy=strategy), model)
    assert reports[0]["backend"] == f"fsdp{version}"
    assert status(reports[0], "sharding.strategy") == (strategy, "applied")
    assert_nothing_differs(reports[0])
    assert_fractions(reports, 1 if strategy == "no_shard" else 2)


@pytest.mark.parametrize(("strategy", "version"), alternating(["full_shard", "hybrid_shard", "hybrid_shard_zero2"]))
def test_strategy_and_memory_share_on_four_ranks(four_ranks: Ranks, strategy: str, version: int) -> None:
    reports = four_ranks.run(planned, parallel_config(strategy, version, 4))
    assert status(reports[0], "sharding.strategy") == (strategy, "applied")
    shard = 4 if strategy == "full_shard" else 2
    assert reports[0]["mesh"] == {"replicate": 4 // shard, "shard": shard}
    assert status(reports[0], "mesh.shard") == (shard, "applied")
    assert_nothing_differs(reports[0])
    assert_fractions(reports, shard)


@pytest.mark.parametrize(
    ("settings", "name", "observed"),
    [
        ({"fsdp_forward_prefetch": True}, "prefetch.forward", True),
        ({"fsdp_forward_prefetch": False}, "prefetch.forward", False),
        ({"fsdp_limit_all_gathers": True}, "prefetch.limit_all_gathers", True),
        ({"fsdp_activation_checkpointing": True}, "activation.checkpointing", "full"),
        ({"fsdp_activation_checkpointing": "selective"}, "activation.checkpointing", "selective"),
        (
            {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
            "activation.offload",
            True,
        ),
        ({"fsdp_use_orig_params": True}, "params.use_orig", True),
        ({"fsdp_ignored_modules": "lm_head"}, "wrap.ignored_modules", ["lm_head"]),
        ({"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}, "wrap.classes", ["LlamaDecoderLayer"]),
    ],
)
def test_setting_that_took_effect_is_applied(
    two_ranks: Ranks, settings: dict[str, Any], name: str, observed: Any, version: int
) -> None:
    found = two_ranks.run(planned, config_of(version, **settings))[0]
    assert status(found, name) == (observed, "applied")
    assert_nothing_differs(found)


def unlike_the_plan(config: dict[str, Any], ran: dict[str, Any]) -> dict[str, Any]:
    """Shard a model by the config ``ran``, and compare it with the plan of another config."""
    model, _ = make_sharded(ran)
    _, plan = make(config)
    return report_of_trained(model, plan)


@pytest.mark.parametrize(
    ("asked", "ran", "name", "observed"),
    [
        ({"strategy": "shard_grad_op"}, {"strategy": "full_shard"}, "sharding.strategy", "full_shard"),
        ({"strategy": "full_shard"}, {"strategy": "no_shard"}, "mesh.shard", 1),
        ({"top": BF16}, {}, "precision.param", "fp32"),
        ({}, {"fsdp_activation_checkpointing": True}, "activation.checkpointing", "full"),
        ({"fsdp_forward_prefetch": True}, {}, "prefetch.forward", False),
        (
            {"fsdp_backward_prefetch": "NO_PREFETCH"},
            {"fsdp_backward_prefetch": "BACKWARD_PRE"},
            "prefetch.backward",
            "pre",
        ),
        ({}, {"fsdp_auto_wrap_policy": "NO_WRAP"}, "wrap.policy", "none"),
        ({"fsdp_transformer_layer_cls_to_wrap": "LlamaMLP"}, {}, "wrap.classes", ANY),
    ],
)
def test_model_sharded_by_another_config_differs(
    two_ranks: Ranks, asked: dict[str, Any], ran: dict[str, Any], name: str, observed: Any, version: int
) -> None:
    found = two_ranks.run(unlike_the_plan, config_of(version, **asked), config_of(version, **ran))[0]
    assert status(found, name) == (observed, "differs")
    assert ("FSDP-E503", name) in [(problem["code"], problem["setting"]) for problem in found["problems"]]
    assert "DIFFERS" in found["text"] and "[FSDP-E503]" in found["text"]


def test_other_fsdp_version_differs(two_ranks: Ranks) -> None:
    found = two_ranks.run(unlike_the_plan, config_of(2), config_of(1))[0]
    assert status(found, "fsdp.version") == (1, "differs")


def not_sharded(config: dict[str, Any]) -> dict[str, Any]:
    """Train with DistributedDataParallel, as Accelerate does on CPU ranks without the plugin."""
    model, plan = make(config)
    return report_of_trained(nn.parallel.DistributedDataParallel(model), plan)


def test_ddp_instead_of_fsdp_is_an_error(two_ranks: Ranks) -> None:
    found = two_ranks.run(not_sharded, config_of())[0]
    assert found["backend"] == "ddp" and found["units"] == []
    assert status(found, "sharding.strategy") == ("not sharded", "differs")
    assert "LlamaForCausalLM" in problem(found, "FSDP-E501")["message"]
    assert found["memory"]["params_bytes"] == found["memory"]["ddp_params_bytes"] == 4 * found["num_params"]


def changed_after_sharding(config: dict[str, Any], how: str) -> dict[str, Any]:
    """Shard a model as planned, then change the live model, in two cases on the last rank only."""
    model, plan = make_sharded(config)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if how == "half":
        model.to(torch.bfloat16)
    elif how == "reshard":
        model.model.layers[0].set_reshard_after_forward(False)
    elif how == "buffer" and is_last:
        model.model.rotary_emb.inv_freq.add_(1.0)
    elif how == "weights" and is_last:
        next(model.parameters()).detach().to_local().add_(1.0)
    return to_json(build_report(model, plan))


def test_layer_without_reshard_is_a_mixed_strategy(two_ranks: Ranks) -> None:
    found = two_ranks.run(changed_after_sharding, config_of(), "reshard")[0]
    assert status(found, "sharding.strategy") == ("mixed: full_shard, shard_grad_op", "differs")


def test_master_weights_cast_after_sharding_are_an_error(two_ranks: Ranks) -> None:
    found = two_ranks.run(changed_after_sharding, config_of(top=BF16), "half")[0]
    assert "bf16 instead of fp32" in problem(found, "FSDP-E502")["message"]


@pytest.mark.parametrize(
    ("strategy", "changed", "reason"),
    [("full_shard", "buffer", "bit-identical tensors from rank 0"), ("no_shard", "weights", "")],
)
def test_weights_that_differ_between_ranks_are_reported(
    two_ranks: Ranks, strategy: str, changed: str, reason: str
) -> None:
    config = config_of(strategy=strategy, fsdp_sync_module_states=True)
    found = two_ranks.run(changed_after_sharding, config, changed)[0]
    assert status(found, "loading.sync_module_states") == (False, "differs")
    assert changed != "buffer" or "inv_freq" in setting(found, "loading.sync_module_states")["reason"]
    equal = two_ranks.run(planned, config)[0]
    assert status(equal, "loading.sync_module_states") == (True, "applied")
    assert reason in setting(equal, "loading.sync_module_states")["reason"]


def before_and_after_first_forward(config: dict[str, Any]) -> list[list[dict[str, Any]]]:
    model, _ = make_sharded(config)
    before = [unit.to_json() for unit in observe_units(model)]
    backward(model)
    return [before, [unit.to_json() for unit in observe_units(model)]]


def test_units_are_the_same_after_first_forward(two_ranks: Ranks, version: int) -> None:
    for before, after in two_ranks.run(before_and_after_first_forward, config_of(version)):
        assert before == after
        assert [unit["name"] for unit in before if unit["class"] == "LlamaDecoderLayer"] == [
            f"model.layers.{index}" for index in range(3)
        ]


def gradient_sources(config: dict[str, Any]) -> list[tuple[int, str]]:
    """Return gradient bytes and their source: before any backward, after a backward, and after ``zero_grad``."""
    model, plan = make_sharded(config)
    optimizer = torch.optim.AdamW(model.parameters())
    observed = [build_report(model, plan).memory]
    record_first_step(model, optimizer)
    backward(model)
    observed.append(build_report(model, plan).memory)
    optimizer.step()
    optimizer.zero_grad()
    observed.append(build_report(model, plan).memory)
    return [(memory["grads_bytes"], memory["grads_source"]) for memory in observed]


# With use_orig_params zero_grad clears the views, but FSDP1 keeps the flat gradient until the next forward.
@pytest.mark.parametrize(
    ("version", "use_orig", "cleared"),
    [(1, True, "alive"), (1, False, "optimizer step"), (2, True, "optimizer step")],
)
def test_gradient_bytes_are_equal_for_all_three_sources(
    two_ranks: Ranks, version: int, use_orig: bool, cleared: str
) -> None:
    config = config_of(version, fsdp_use_orig_params=use_orig)
    for computed, alive, recorded in two_ranks.run(gradient_sources, config):
        assert [computed[1], alive[1], recorded[1]] == ["trainable shards", "alive", cleared]
        assert alive[0] == recorded[0] == pytest.approx(computed[0], rel=PADDING)


def wrapped_by_hand(version: int) -> list[dict[str, Any]]:
    """Shard the layers with torch alone, without a root: observation must not depend on the plugin's backends."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard

    model = MODELS["llama"]()
    layers: Any = model.model.layers
    for index, layer in enumerate(layers):
        if version == 1:
            low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            layers[index] = FullyShardedDataParallel(layer, device_id=own_device(), mixed_precision=low)
        else:
            fully_shard(layer)
    return [unit.to_json() for unit in observe_units(model)]


def test_layers_wrapped_by_hand_are_observed(two_ranks: Ranks, version: int) -> None:
    units = two_ranks.run(wrapped_by_hand, version)[0]
    assert [unit["name"] for unit in units] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert {unit["class"] for unit in units} == {"LlamaDecoderLayer"}
    assert {unit["param_dtype"] for unit in units} == {"bf16" if version == 1 else "fp32"}


def test_text_has_100_columns_and_groups_layers(two_ranks: Ranks) -> None:
    text = two_ranks.run(planned, config_of(top=BF16))[0]["text"]
    assert max(map(len, text.splitlines())) <= 100
    assert "model.layers.0–2" in text and "LlamaDecoderLayer ×3" in text
    assert "effective batch size 16 = 4 per device × 2 accumulated × 2 data-parallel ranks, 192 tokens" in text


def written(config: dict[str, Any], path: str) -> str | None:
    """Write the public report of a model; return the path that it returns."""
    model, _ = make_sharded(config)
    file = report(model).write(Path(path))
    return None if file is None else str(file)


def test_only_rank_0_writes_the_report_file(two_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "out" / "fsdp_report.json"
    assert two_ranks.run(written, config_of(), str(path)) == [str(path), None]
    assert [file.name for file in path.parent.iterdir()] == ["fsdp_report.json"]
    found = json.loads(path.read_text())
    assert_valid("report", found)
    assert [row["rank"] for row in found["ranks"]] == [0, 1]


def report_at_exit(config: dict[str, Any], folder: str) -> str:
    """Report the last run of several accelerators as at the end of a script. Returns what is printed to stderr."""
    reporter = RunReporter()
    for number in range(3):
        accelerator = fresh_accelerator(config)
        accelerator.project_configuration.project_dir = f"{folder}/{number}"
        accelerator.prepare(nn.Linear(number + 2, 2))
        reporter.add_prepared(accelerator)
    del accelerator
    gc.collect()
    with redirect_stderr(StringIO()) as printed:
        reporter._at_exit()
    reporter.close()
    return printed.getvalue()


def test_last_accelerator_is_reported_at_exit(two_ranks: Ranks, tmp_path: Path) -> None:
    printed = two_ranks.run(report_at_exit, config_of(fsdp_auto_wrap_policy="NO_WRAP"), str(tmp_path))[0]
    (file,) = tmp_path.glob("*/fsdp_report.json")
    found = json.loads(file.read_text())
    assert file.parent.name == "2"
    assert sum(row["num_local_params"] for row in found["ranks"]) == found["num_params"] == 2 * 5
    assert "no report of 2 runs" in printed


def unreadable_on_one_rank(config: dict[str, Any]) -> str:
    model, plan = make_sharded(config)
    unreadable: Any = object() if dist.get_rank() == 1 else model
    try:
        build_report(unreadable, plan)
    except ValueError as error:
        return str(error)
    return "no error"


def test_unreadable_rank_is_named_on_every_rank(two_ranks: Ranks) -> None:
    for text in two_ranks.run(unreadable_on_one_rank, config_of()):
        assert "rank 1" in text


def unwritable_report(config: dict[str, Any]) -> str:
    """End a run whose report cannot be written, then take part in another collective."""
    model, _ = make_sharded(config)
    accelerator = SimpleNamespace(_models=[model], _optimizers=[], _dataloaders=[], state=None)
    report_run(accelerator, output_dir="/dev/null/no/folder")
    dist.barrier()
    return "done"


def test_unwritable_report_does_not_block_other_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(unwritable_report, config_of()) == ["done", "done"]


def failing_report(config: dict[str, Any], folder: str) -> str:
    """End a run for whose report one rank has not enough memory, then take part in another collective."""
    checksum, model = weights._checksum, make_sharded(config)[0]
    accelerator = SimpleNamespace(_models=[model], _optimizers=[], _dataloaders=[], state=None)

    def out_of_memory(tensors: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if dist.get_rank() == 1:
        weights._checksum = out_of_memory
    try:
        with redirect_stderr(StringIO()) as printed:
            report_run(accelerator, output_dir=folder)
    finally:
        weights._checksum = checksum
    dist.barrier()
    return printed.getvalue()


def test_failed_report_does_not_end_the_run(two_ranks: Ranks, tmp_path: Path) -> None:
    config = config_of(fsdp_sync_module_states=True)
    first, _ = two_ranks.run(failing_report, config, str(tmp_path))
    assert "no report" in first and "rank 1" in first and "CUDA out of memory" in first
    assert list(tmp_path.iterdir()) == []
