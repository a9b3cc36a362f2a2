"""Wrap policies: which modules become units, what is refused, and how shared parameters are assigned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_fsdp_plugin.problems import Origin, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from tests.support.model_families import on_meta
from tests.unit.plan.plans import planned, problem_in, refused, units_of, wrapping


class Block(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)


class WideBlock(Block):
    pass


class Plain(nn.Module):
    """A model that is not from Transformers."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(8, 2)


LAYERS = ["blocks.0", "blocks.1", "blocks.2"]


def sized(threshold: int, **settings: Any) -> FsdpSpec:
    return wrapping(policy="size", min_num_params=threshold, **settings)


def test_plain_module_is_wrapped_by_its_own_classes() -> None:
    plan = planned(wrapping("Block"), Plain())
    assert [unit.name for unit in plan.units] == [*LAYERS, ""]
    assert plan.units[-1].parameters == ("first.weight", "first.bias", "last.weight", "last.bias")


def test_several_classes_are_wrapped() -> None:
    model = Plain()
    model.blocks.append(nn.LSTM(8, 8))
    assert units_of(wrapping("Block", "LSTM"), model) == [*LAYERS, "blocks.3", ""]


def test_base_class_selects_subclasses() -> None:
    model = Plain()
    model.blocks.append(WideBlock())
    assert "blocks.3" in units_of(wrapping("Block"), model)
    assert units_of(wrapping("WideBlock"), model) == ["blocks.3", ""]


def test_error_about_absent_class_lists_the_models_classes() -> None:
    origin = Origin(source="fsdp.yaml", line=14, spelling="x", text="y")
    spec = replace(wrapping("LamaDecoderLayer"), origins={"wrap.classes": origin})
    problem = refused("FSDP-E214", spec, on_meta("llama"))
    assert (problem.setting, problem.origin) == ("wrap.classes", origin)
    assert "'LamaDecoderLayer'" in problem.message
    counts = "LlamaDecoderLayer ×2, LlamaRMSNorm ×5, LlamaAttention ×2, LlamaMLP ×2, LlamaModel ×1 and 2 more"
    assert f"It has {counts}." in problem.message
    assert "LlamaDecoderLayer" in problem.fix


def test_error_about_absent_class_names_the_models_layers() -> None:
    problem = refused("FSDP-E214", wrapping("BertLayer"), on_meta("gpt2"))
    assert "GPT2LMHeadModel has no module of class 'BertLayer'" in problem.message
    assert "GPT2Block ×2" in problem.message
    assert "GPT2Block" in problem.fix


def test_absent_classes_next_to_present_one_give_one_warning() -> None:
    classes = ("LlamaDecoderLayer", "CLIPEncoderLayer", "ViTLayer")
    problems = planned(wrapping(*classes), on_meta("llama")).problems
    assert [(p.code, p.setting) for p in problems] == [("FSDP-W213", "wrap.classes")]
    assert all(name in problems[0].message for name in classes)


def test_repeated_layers_of_a_model_that_declares_none_are_units() -> None:
    plan = planned(wrapping(), Plain())
    assert [unit.name for unit in plan.units] == [*LAYERS, ""]
    (problem,) = plan.problems
    assert (problem.code, problem.setting, "Block ×3" in problem.message) == ("FSDP-N215", "wrap.policy", True)


def test_model_without_repeated_layers_is_one_unit() -> None:
    plan = planned(wrapping(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    assert [unit.name for unit in plan.units] == [""]
    assert [problem.code for problem in plan.problems] == ["FSDP-W218"]


@pytest.mark.parametrize("own", [["Block"], {"Block"}, ("Block", "Absent")])
def test_model_declares_its_layers_in_any_collection(own: object) -> None:
    model = Plain()
    model._no_split_modules = own  # type: ignore[assignment]
    assert units_of(wrapping(), model) == [*LAYERS, ""]


def test_submodules_declare_their_layers() -> None:
    model = Plain()
    model.tower = on_meta("vit")
    assert "tower.vit.layers.0" in units_of(wrapping(), model)


def test_size_policy_wraps_modules_from_the_threshold() -> None:
    block = sum(p.numel() for p in Block().parameters())
    assert units_of(sized(block), Plain()) == [*LAYERS, ""]
    problem = refused("FSDP-E219", sized(10**9), Plain())
    assert problem.setting == "wrap.min_num_params"
    assert "840" in problem.fix


def test_size_policy_does_not_split_attention() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2), "mlp": nn.Linear(64, 64)})
    assert units_of(sized(100), nn.Sequential(model)) == ["0.mlp", ""]


def test_size_policy_makes_no_units_of_parameter_lists() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    weights = [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    model[0].prompts, model[0].scales = nn.ParameterList(weights[:1]), nn.ParameterDict({"a": weights[1]})
    assert units_of(sized(100), nn.Sequential(model)) == ["0.0", ""]


def test_root_is_the_only_unit_without_a_policy() -> None:
    plan = planned(FsdpSpec(), on_meta("llama"))
    assert [unit.name for unit in plan.units] == [""]
    assert [(p.code, p.setting) for p in plan.problems] == [("FSDP-W218", "wrap.policy")]


def test_wrapping_the_root_class_is_refused() -> None:
    assert "'Plain'" in refused("FSDP-E214", wrapping("Plain"), Plain()).message


def test_ignored_modules_match_by_full_name() -> None:
    plan = planned(wrapping("Block", ignored_modules=r"first|blocks\.1"), Plain())
    assert plan.ignored_modules == ("first", "blocks.1")
    assert [unit.name for unit in plan.units] == ["blocks.0", "blocks.2", ""]
    assert plan.units[-1].parameters == ("last.weight", "last.bias")
    message = problem_in(plan.problems, "FSDP-N223").message
    assert "first.weight, first.bias, blocks.1.up.weight" in message


def test_frozen_ignored_modules_are_not_reported() -> None:
    model = Plain()
    model.first.requires_grad_(False)
    assert planned(wrapping("Block", ignored_modules="first"), model).problems == ()


@pytest.mark.parametrize(
    ("pattern", "code", "named"),
    [
        ("lm_head", "FSDP-E212", "Plain"),
        ("block", "FSDP-E212", "blocks, blocks.0"),
        (".*", "FSDP-E211", "'.*'"),
    ],
)
def test_pattern_that_ignores_nothing_or_all_is_refused(pattern: str, code: str, named: str) -> None:
    problem = refused(code, wrapping("Block", ignored_modules=pattern), Plain())
    assert problem.setting == "wrap.ignored_modules"
    assert named in problem.message


def test_ignoring_every_layer_is_refused() -> None:
    problem = refused("FSDP-E219", wrapping("Block", ignored_modules=r"blocks\..*"), Plain())
    assert problem.setting == "wrap.classes"


def test_layer_without_parameters_is_not_a_unit() -> None:
    model = Plain()
    model.blocks[1] = nn.Identity()
    assert units_of(wrapping("Block", "Identity"), model) == ["blocks.0", "blocks.2", ""]


@pytest.mark.parametrize("version", [1, 2])
def test_layers_with_shared_parameters_are_not_units(version: int) -> None:
    model = Plain(blocks=5)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[3].up.weight = model.blocks[1].up.weight
    plan = planned(wrapping("Block", version=version), model)
    assert [unit.name for unit in plan.units] == ["blocks.4", ""]
    assert plan.ties == tuple((f"blocks.{i}.up.weight", f"blocks.{i + 2}.up.weight") for i in (0, 1))
    assert plan.units[-1].parameters.count("blocks.0.up.weight") == 1
    message = problem_in(plan.problems, "FSDP-N217").message
    assert message.startswith("4 modules are not wrapped")
    assert "Shared: blocks.0.up.weight = blocks.2.up.weight, blocks.1.up.weight = blocks.3.up.weight." in message


def test_parameter_shared_by_all_layers_is_refused() -> None:
    model = Plain(blocks=2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    assert "share parameters" in refused("FSDP-E219", wrapping("Block"), model).message


def test_module_registered_twice_is_one_unit() -> None:
    model = Plain(blocks=1)
    model.blocks.append(model.blocks[0])
    plan = planned(wrapping("Block"), model)
    assert [unit.name for unit in plan.units] == ["blocks.0", ""]
    assert ("blocks.0.up.weight", "blocks.1.up.weight") in plan.ties
    assert sum(unit.num_params for unit in plan.units) == sum(p.numel() for p in model.parameters())


def test_tie_inside_one_unit_keeps_all_units() -> None:
    model = Plain()
    model.blocks[0].twin = nn.Linear(8, 16)
    model.blocks[0].twin.weight = model.blocks[0].up.weight
    plan = planned(wrapping("Block"), model)
    assert [unit.name for unit in plan.units] == [*LAYERS, ""]
    assert plan.ties == (("blocks.0.up.weight", "blocks.0.twin.weight"),)


@pytest.mark.parametrize("version", [1, 2])
def test_size_policy_keeps_tied_embeddings_in_one_unit(version: int) -> None:
    plan = planned(sized(3_000, version=version), on_meta("llama-tied"))
    holders = [unit for unit in plan.units if "model.embed_tokens.weight" in unit.parameters]
    assert len(holders) == 1
    assert ("lm_head" in holders[0].modules) == (version == 2)


def test_unit_of_layer_contains_embedding_inside_it() -> None:
    assert units_of(wrapping("LlamaModel"), on_meta("llama")) == ["model", "lm_head", ""]


def test_tied_embedding_inside_a_layer_is_grouped_with_the_head() -> None:
    assert units_of(wrapping("LlamaModel"), on_meta("llama-tied")) == ["model.embed_tokens + lm_head", "model", ""]


def test_checkpointed_layers_are_wrapped_with_their_wrapper() -> None:
    model = Plain()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    assert units_of(wrapping("Block"), model) == [*LAYERS, ""]


def test_model_without_parameters_is_refused() -> None:
    assert "Identity" in refused("FSDP-E252", FsdpSpec(), nn.Identity()).message


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        planned(wrapping("Blok", ignored_modules="nothing"), Plain(), world_size=0)
    assert {problem.code: problem.setting for problem in caught.value.problems} == {
        "FSDP-E201": None,
        "FSDP-E212": "wrap.ignored_modules",
        "FSDP-E214": "wrap.classes",
    }
