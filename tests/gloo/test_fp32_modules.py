"""Modules that compute in fp32 while the others compute in bf16, on real ranks."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.torch_private.fsdp2 import SINCE_2_15, is_since_2_15
from tests.support.communication_runs import counted_and_estimated
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS, parallel_config
from tests.support.training import (
    MAX_NORM,
    adamw,
    assert_same_training,
    differing,
    fresh_accelerator,
    loss_of,
    train,
    train_prepared,
)

NUM_STEPS = 4


NEEDS_OVERRIDES = pytest.mark.skipif(
    not is_since_2_15(),
    reason=f"FSDP2 has one dtype for all parameters of a unit before torch {SINCE_2_15}",
)

NORMS = r".*norm"


def config_of(pattern: str, world_size: int = 2, strategy: str = "full_shard", **settings: Any) -> dict[str, Any]:
    config = parallel_config(strategy, settings.pop("version", 2), world_size, fsdp_fp32_modules=pattern, **settings)
    return {**config, "mixed_precision": "bf16"}


def train_with(name: str, config: dict[str, Any], accumulation: int = 1) -> dict[str, Any]:
    return train(name, config, num_steps=NUM_STEPS, accumulation=accumulation)


def _gradients(model: nn.Module, loss: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _cast_inputs(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return _cast(args, torch.float32), {name: _cast(value, torch.float32) for name, value in kwargs.items()}


def reference(name: str, pattern: str, num_parts: int) -> dict[str, Any]:
    """Losses, norms and weights of one process that computes in bf16 and, in the modules of a pattern, in fp32."""
    model = MODELS[name]().float()
    computing = copy.deepcopy(model)
    for parameter in computing.parameters():  # FSDP does not cast buffers
        parameter.data = parameter.data.to(torch.bfloat16)
    for path, module in computing.named_modules():
        if re.compile(pattern).fullmatch(path):
            for parameter in module.parameters():
                parameter.data = parameter.data.float()
            module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
            if path != "lm_head":
                module.register_forward_hook(lambda _module, _args, output: _cast(output, torch.bfloat16))
    optimizer = adamw(model)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        with torch.no_grad():
            for master, used in zip(model.parameters(), computing.parameters(), strict=True):
                used.copy_(master)
        parts = [_gradients(computing, loss_of(computing, name, step, part, num_parts)) for part in range(num_parts)]
        for index, master in enumerate(model.parameters()):
            master.grad = torch.stack([gradients[index].float() for _, gradients in parts]).mean(0)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(sum(loss for loss, _ in parts) / num_parts)
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


@NEEDS_OVERRIDES
@pytest.mark.parametrize(
    ("name", "pattern", "settings"),
    [
        ("llama", NORMS, {}),
        ("llama", r".*norm|lm_head|model\.embed_tokens", {}),
        ("experts", r".*\.gate", {}),
        slow("llama", r"model\.layers\.1", {}),
        slow("llama", NORMS, {"fsdp_activation_checkpointing": True}),
        slow("llama", NORMS, {"fsdp_auto_wrap_policy": "NO_WRAP"}),
        slow("llama", NORMS, {"fsdp_cpu_ram_efficient_loading": True}),
        slow("bert", r".*LayerNorm", {}),
    ],
)
def test_training_equals_one_process(two_ranks: Ranks, name: str, pattern: str, settings: dict[str, Any]) -> None:
    run = two_ranks.run(train_with, name, config_of(pattern, **settings))[0]
    assert_same_training(run, reference(name, pattern, 2))
    assert differing(run["report"]) == []
    assert run["masters"] == {"torch.float32"}
    (row,) = [row for row in run["report"]["settings"] if row["setting"] == "precision.fp32_modules"]
    assert row["status"] == "applied"


@NEEDS_OVERRIDES
@pytest.mark.parametrize(("strategy", "accumulation"), [("hybrid_shard", 2), slow("no_shard", 1)])
def test_replicas_train_like_one_process(four_ranks: Ranks, strategy: str, accumulation: int) -> None:
    config = config_of(NORMS, 4, strategy)
    run = four_ranks.run(train_with, "llama", config, accumulation)[0]
    assert_same_training(run, reference("llama", NORMS, 4 * accumulation))
    assert differing(run["report"]) == []


def train_loaded(folder: str, pattern: str) -> dict[str, Any]:
    """Train a model that ``from_pretrained`` has sharded."""
    from transformers import AutoModelForCausalLM

    accelerator = fresh_accelerator(config_of(pattern))
    fields = {"fsdp_size": accelerator.num_processes}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=fields, dtype=torch.float32)
    model, optimizer = accelerator.prepare(model, adamw(model))
    return train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)


@NEEDS_OVERRIDES
def test_model_sharded_by_from_pretrained_trains_equally(two_ranks: Ranks, tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)  # type: ignore[operator]
    run = two_ranks.run(train_loaded, str(tmp_path), NORMS)[0]
    assert_same_training(run, reference("llama", NORMS, 2))
    assert differing(run["report"]) == []


def gather_dtypes(name: str, config: dict[str, Any]) -> dict[str, str]:
    """Return the dtypes of the parameters that the forward of each module sees."""
    accelerator = fresh_accelerator(config)
    model, _ = accelerator.prepare(MODELS[name](), None)
    found: dict[str, str] = {}
    for path, module in model.named_modules():

        def record(module: nn.Module, *_: Any, path: str = path) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                found[f"{path}.{key}"] = str(parameter.dtype).removeprefix("torch.")

        module.register_forward_pre_hook(record)
    loss_of(model, name, 0)
    return found


@NEEDS_OVERRIDES
def test_only_selected_parameters_are_gathered_in_fp32(two_ranks: Ranks) -> None:
    for found in two_ranks.run(gather_dtypes, "llama", config_of(NORMS)):
        assert {name for name, dtype in found.items() if dtype == "float32"} == {n for n in found if "norm" in n}
        assert set(found.values()) == {"float32", "bfloat16"}


@NEEDS_OVERRIDES
@pytest.mark.parametrize("pattern", [NORMS, r"model\.layers\.0|lm_head"])
def test_collectives_equal_estimate(two_ranks: Ranks, pattern: str) -> None:
    for counted, estimated in two_ranks.run(counted_and_estimated, "llama", config_of(pattern), accumulation=2):
        assert counted == estimated
        assert counted


def report_after_change(config: dict[str, Any]) -> dict[str, Any]:
    """Shard by a plan without fp32 modules, and compare the model with the plan of a config that has them."""
    asked = fresh_accelerator(config)
    plan = hfp.resolve(hfp.load_spec(config, environ={}), MODELS["llama"](), world_size=asked.num_processes)
    accelerator = fresh_accelerator(
        {**config, "fsdp_config": {**config["fsdp_config"], "fsdp_fp32_modules": "lm_head"}}
    )
    model = accelerator.prepare(MODELS["llama"]())
    loss_of(model, "llama", 0).backward()
    from hf_fsdp_plugin.observe.report_builder import build_report

    return build_report(model, plan=plan).to_json()


@NEEDS_OVERRIDES
def test_other_modules_in_fp32_differ_in_the_report(two_ranks: Ranks) -> None:
    report = two_ranks.run(report_after_change, config_of(NORMS))[0]
    (row,) = [row for row in report["settings"] if row["setting"] == "precision.fp32_modules"]
    assert (row["status"], row["observed"]) == ("differs", ["lm_head"])


def prepare_refused(config: dict[str, Any]) -> list[str]:
    """Return the codes of the problems for which the config is refused."""
    try:
        fresh_accelerator(config).prepare(MODELS["llama"]())
    except SpecError as error:
        return [problem.code for problem in error.problems if problem.severity == "error"]
    return []


@pytest.mark.parametrize("version", [1, 2])
def test_setting_is_refused_where_a_unit_has_one_dtype(two_ranks: Ranks, version: int) -> None:
    supported = version == 2 and is_since_2_15()
    expected: list[str] = [] if supported else ["FSDP-E282"]
    assert two_ranks.run(prepare_refused, config_of(NORMS, version=version)) == [expected] * 2
