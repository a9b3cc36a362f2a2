"""The warning about padding under FSDP2. tests/gloo/test_communication.py counts padded bytes of real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.padding import SIGNIFICANT, padding_of, unit_shapes, with_padding_warning
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.tools.check.output import plan_with_problems


def mixtral(experts: int) -> nn.Module:
    config = hf.MixtralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_local_experts=experts, vocab_size=512,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    with torch.device("meta"):
        return hf.MixtralForCausalLM(config)


def plan_for(
    model: nn.Module, world: int, *, version: int = 2, shard: int | None = None, layer: str = "MixtralDecoderLayer"
) -> FsdpPlan:
    mesh: dict[str, Any] = {} if shard is None else {"parallelism_config": {"parallelism_config_dp_shard_size": shard}}
    config = {
        "distributed_type": "FSDP", "num_processes": world, "use_cpu": True, **mesh,
        "fsdp_config": {
            "fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": layer,
        },
    }  # fmt: skip
    return resolve(load_spec(config, environ={}), model, world_size=world)


def warnings_of(model: nn.Module, world: int, **settings: Any) -> list[str]:
    plan = with_padding_warning(plan_for(model, world, **settings), model)
    return [problem.message + problem.fix for problem in plan.problems if problem.code == "FSDP-W837"]


def test_few_experts_on_many_ranks_are_reported() -> None:
    (text,) = warnings_of(mixtral(8), 64)
    assert "model.layers.0.mlp.experts.gate_up_proj has 8 rows and is padded to 64" in text
    assert "(parallelism_config_dp_shard_size) to 8: with 8 replicas of 8 shards, 0% is padding" in text
    assert "fsdp_version: 1" in text


def test_padding_of_a_tiny_model_is_not_reported() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert warnings_of(model, 2, layer="Linear") == []


@pytest.mark.parametrize(
    ("world", "settings"), [(8, {}), (4, {}), (64, {"shard": 8}), (64, {"version": 1}), (64, {"shard": 4})]
)
def test_experts_that_are_divisible_are_not_reported(world: int, settings: dict[str, Any]) -> None:
    assert warnings_of(mixtral(8), world, **settings) == []


def test_rows_that_are_not_divisible_are_reported() -> None:
    (text,) = warnings_of(mixtral(9), 8)
    assert "has 9 rows and is padded to 16" in text
    assert "to 4: with 2 replicas of 4 shards" not in text  # 9 rows in 4 parts are padded to 12
    (text,) = warnings_of(mixtral(2), 3)
    assert "has 2 rows and is padded to 3" in text
    assert "replicas" not in text  # 3 ranks have no smaller shard group


def test_padding_outside_of_experts_is_reported() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(4096, 5)

    model = nn.Sequential(Wide(), Wide())
    (text,) = warnings_of(model, 8, layer="Wide")
    assert "has 5 rows and is padded to 8" in text


def test_one_large_padded_unit_is_enough() -> None:
    # A parameter that is small in the model, but makes the largest buffer.
    units = [{"dense": (1024, 1000)} for _ in range(100)] + [{"experts": (2, 600, 1000)}]
    share, lost = padding_of(units, 4)
    assert lost == {"dense": 0, "experts": 1_200_000} and share > SIGNIFICANT


@pytest.mark.parametrize("shards", [2, 3, 4, 7, 64])
def test_padded_elements_equal_estimated_buffers(shards: int) -> None:
    from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import unit_bytes

    model = mixtral(3)
    plan = plan_for(model, shards)
    _, lost = padding_of(unit_shapes(plan, model), shards)
    padded = sum(lost.values()) + sum(parameter.numel() for parameter in model.parameters())
    assert padded * 4 == sum(unit.gathered for unit in unit_bytes(plan, model))


def test_command_line_reports_padding() -> None:
    spec = load_spec(fsdp="full_shard auto_wrap", fsdp_config={"version": 2})
    plan, problems = plan_with_problems(spec, mixtral(2), world_size=16, device_type="cuda")
    assert plan is not None
    assert [problem.code for problem in problems].count("FSDP-W837") == 1
