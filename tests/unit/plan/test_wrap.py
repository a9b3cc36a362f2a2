"""Wrap policies on plain modules: what becomes a unit, what is refused, and what a shared parameter does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model_families import on_meta, wrapping
from torch import nn

from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve, try_resolve
from hf_fsdp_plugin.problems import Origin, SpecError
from hf_fsdp_plugin.spec.model import FsdpSection, FsdpSpec, WrapSection


class Block(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)


class WideBlock(Block):
    pass


class Plain(nn.Module):
    """A model that Transformers knows nothing of."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(8, 2)


def names(plan: FsdpPlan) -> list[str]:
    return [unit.name for unit in plan.units]


def sized(threshold: int, **wrap: str) -> FsdpSpec:
    return FsdpSpec(wrap=WrapSection(policy="size", min_num_params=threshold, **wrap))


def test_a_plain_module_is_wrapped_by_its_own_classes() -> None:
    plan = resolve(wrapping("Block"), Plain(), world_size=2)
    assert names(plan) == ["blocks.0", "blocks.1", "blocks.2", ""]
    assert plan.units[-1].parameters == ("first.weight", "first.bias", "last.weight", "last.bias")


def test_several_classes_are_all_wrapped() -> None:
    model = Plain()
    model.blocks.append(nn.LSTM(8, 8))
    assert names(resolve(wrapping("Block", "LSTM"), model, world_size=2)) == [*(f"blocks.{i}" for i in range(4)), ""]


def test_a_base_class_picks_its_subclasses_too() -> None:
    model = Plain()
    model.blocks.append(WideBlock())
    assert "blocks.3" in names(resolve(wrapping("Block"), model, world_size=2))
    assert names(resolve(wrapping("WideBlock"), model, world_size=2)) == ["blocks.3", ""]


def test_an_absent_class_is_an_error_that_lists_what_the_model_has() -> None:
    spec = wrapping("LamaDecoderLayer")
    spec = FsdpSpec(
        wrap=spec.wrap, origins={"wrap.classes": Origin(source="fsdp.yaml", line=14, spelling="x", text="y")}
    )
    with pytest.raises(SpecError) as caught:
        resolve(spec, on_meta("llama"), world_size=2)
    assert str(caught.value) == (
        "fsdp.yaml:14: wrap.classes: no module of class 'LamaDecoderLayer' in LlamaForCausalLM; it has "
        "LlamaDecoderLayer ×2, LlamaRMSNorm ×5, LlamaAttention ×2, LlamaMLP ×2, LlamaModel ×1, … Write "
        "LlamaDecoderLayer, or leave the key out: the model names its own layer class."
    )


def test_a_class_of_another_model_is_an_error_that_names_the_model_s_own_layer() -> None:
    with pytest.raises(SpecError, match="no module of class 'BertLayer' in GPT2LMHeadModel; it has GPT2Block ×2") as e:
        resolve(wrapping("BertLayer"), on_meta("gpt2"), world_size=2)
    assert "Write GPT2Block" in str(e.value)


def test_an_absent_class_beside_one_that_is_there_is_a_warning() -> None:
    plan = resolve(wrapping("LlamaDecoderLayer", "CLIPEncoderLayer"), on_meta("llama"), world_size=2)
    assert [(p.severity, p.setting) for p in plan.problems] == [("warning", "wrap.classes")]
    assert (
        "no module of class 'CLIPEncoderLayer' in LlamaForCausalLM; only LlamaDecoderLayer" in plan.problems[0].message
    )


def test_a_plain_module_without_classes_is_an_error_that_names_the_ways_out() -> None:
    with pytest.raises(SpecError, match="Plain names no layer class of its own; it has Block ×3") as caught:
        resolve(wrapping(), Plain(), world_size=2)
    assert "Set fsdp_transformer_layer_cls_to_wrap: Block," in str(caught.value)
    assert "fsdp_min_num_params" in str(caught.value)


@pytest.mark.parametrize("own", [["Block"], {"Block"}, ("Block", "Absent")])
def test_a_model_may_name_its_layers_in_any_collection(own: object) -> None:
    model = Plain()
    model._no_split_modules = own  # type: ignore[assignment]
    assert names(resolve(wrapping(), model, world_size=2)) == ["blocks.0", "blocks.1", "blocks.2", ""]


def test_the_parts_of_a_composed_model_name_their_layers() -> None:
    model = Plain()
    model.tower = on_meta("vit")
    assert "tower.vit.layers.0" in names(resolve(wrapping(), model, world_size=2))


def test_the_size_policy_wraps_from_the_threshold_on() -> None:
    block = sum(p.numel() for p in Block().parameters())
    assert names(resolve(sized(block), Plain(), world_size=2)) == ["blocks.0", "blocks.1", "blocks.2", ""]
    with pytest.raises(SpecError, match="only the root would be a unit") as caught:
        resolve(sized(10**9), Plain(), world_size=2)
    assert "the largest part, blocks, has 840" in str(caught.value)


@pytest.mark.parametrize("threshold", [0, -1])
def test_the_size_policy_without_a_threshold_is_an_error(threshold: int) -> None:
    with pytest.raises(SpecError, match="the size policy needs a threshold above 0"):
        resolve(sized(threshold), Plain(), world_size=2)


def test_the_size_policy_keeps_attention_whole() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2), "mlp": nn.Linear(64, 64)})
    assert names(resolve(sized(100), nn.Sequential(model), world_size=2)) == ["0.mlp", ""]


def test_without_a_policy_the_root_is_the_only_unit_and_its_cost_is_said() -> None:
    plan = resolve(FsdpSpec(), on_meta("llama"), world_size=2)
    assert names(plan) == [""]
    assert [(p.severity, p.setting) for p in plan.problems] == [("warning", "wrap.policy")]
    assert "every rank gathers the whole model at once" in plan.problems[0].message


def test_wrapping_the_model_s_own_class_is_an_error() -> None:
    with pytest.raises(SpecError, match="no module of class 'Plain' in Plain"):
        resolve(wrapping("Plain"), Plain(), world_size=2)


def test_ignored_modules_are_matched_by_their_full_name() -> None:
    plan = resolve(wrapping("Block", ignored_modules=r"first|blocks\.1"), Plain(), world_size=2)
    assert plan.ignored_modules == ("first", "blocks.1")
    assert names(plan) == ["blocks.0", "blocks.2", ""]
    assert plan.units[-1].parameters == ("last.weight", "last.bias")
    assert any("so they are averaged after each backward" in problem.message for problem in plan.problems)


def test_frozen_ignored_modules_need_no_note() -> None:
    model = Plain()
    model.first.requires_grad_(False)
    assert resolve(wrapping("Block", ignored_modules="first"), model, world_size=2).problems == ()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("lm_head", "matches the full name of no module of Plain"),
        ("block", r"it would have to match the whole name, such as blocks, blocks\.0"),
        (".*", "matches the whole model"),
        ("(", "is no regular expression"),
    ],
)
def test_a_pattern_that_ignores_nothing_or_everything_is_an_error(pattern: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resolve(wrapping("Block", ignored_modules=pattern), Plain(), world_size=2)


def test_ignoring_every_layer_is_an_error() -> None:
    with pytest.raises(SpecError, match="only the root would be a unit"):
        resolve(wrapping("Block", ignored_modules=r"blocks\..*"), Plain(), world_size=2)


def test_a_layer_without_parameters_is_no_unit() -> None:
    model = Plain()
    model.blocks[1] = nn.Identity()
    assert names(resolve(wrapping("Block", "Identity"), model, world_size=2)) == ["blocks.0", "blocks.2", ""]


@pytest.mark.parametrize("version", [1, 2])
def test_layers_that_share_a_parameter_are_dissolved_into_the_module_round_them(version: int) -> None:
    model = Plain()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    plan = resolve(wrapping("Block", version=version), model, world_size=2)
    assert names(plan) == ["blocks.1", ""]
    assert plan.ties == (("blocks.0.up.weight", "blocks.2.up.weight"),)
    assert plan.units[-1].parameters.count("blocks.0.up.weight") == 1
    assert any(p.message.startswith("no unit of its own for blocks.0, blocks.2: ") for p in plan.problems)


def test_layers_that_all_share_a_parameter_are_an_error_with_the_reason() -> None:
    model = Plain(blocks=2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    with pytest.raises(SpecError, match="shares parameters with modules outside it"):
        resolve(wrapping("Block"), model, world_size=2)


def test_a_module_used_twice_is_one_unit() -> None:
    model = Plain(blocks=1)
    model.blocks.append(model.blocks[0])
    plan = resolve(wrapping("Block"), model, world_size=2)
    assert names(plan) == ["blocks.0", ""]
    assert ("blocks.0.up.weight", "blocks.1.up.weight") in plan.ties
    assert sum(unit.num_params for unit in plan.units) == sum(p.numel() for p in model.parameters())


def test_a_tie_inside_one_unit_dissolves_nothing() -> None:
    model = Plain()
    model.blocks[0].twin = nn.Linear(8, 16)
    model.blocks[0].twin.weight = model.blocks[0].up.weight
    plan = resolve(wrapping("Block"), model, world_size=2)
    assert names(plan) == ["blocks.0", "blocks.1", "blocks.2", ""]
    assert plan.ties == (("blocks.0.up.weight", "blocks.0.twin.weight"),)


@pytest.mark.parametrize("version", [1, 2])
def test_tied_embeddings_picked_by_size_stay_in_one_unit(version: int) -> None:
    spec = FsdpSpec(fsdp=FsdpSection(version=version), wrap=WrapSection(policy="size", min_num_params=3_000))
    plan = resolve(spec, on_meta("llama-tied"), world_size=2)
    holders = [unit for unit in plan.units if "model.embed_tokens.weight" in unit.parameters]
    assert len(holders) == 1
    assert ("lm_head" in holders[0].modules) == (version == 2)


def test_a_layer_that_holds_the_embedding_keeps_it() -> None:
    plan = resolve(wrapping("LlamaModel"), on_meta("llama"), world_size=2)
    assert names(plan) == ["model", "lm_head", ""]


def test_a_layer_that_holds_the_tied_embedding_yields_it_to_the_head_s_group() -> None:
    plan = resolve(wrapping("LlamaModel"), on_meta("llama-tied"), world_size=2)
    assert names(plan) == ["model.embed_tokens + lm_head", "model", ""]


def test_layers_that_their_author_checkpointed_are_wrapped_with_their_wrapper() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Plain()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    assert names(resolve(wrapping("Block"), model, world_size=2)) == ["blocks.0", "blocks.1", "blocks.2", ""]


def test_a_model_without_parameters_is_an_error() -> None:
    with pytest.raises(SpecError, match="Identity has no parameters"):
        resolve(FsdpSpec(), nn.Identity(), world_size=2)


def test_all_problems_come_at_once() -> None:
    spec = FsdpSpec(wrap=WrapSection(policy="transformer", classes=("Blok",), ignored_modules="nothing"))
    plan, problems = try_resolve(spec, Plain(), world_size=0)
    assert plan is None
    assert {problem.setting for problem in problems if problem.severity == "error"} == {
        None,
        "wrap.classes",
        "wrap.ignored_modules",
    }


@pytest.mark.parametrize(
    ("build", "layers"),
    [
        (lambda hf: hf.DistilBertForMaskedLM(hf.DistilBertConfig(n_layers=2, dim=32, n_heads=4)), "TransformerBlock"),
        (lambda hf: hf.ElectraForMaskedLM(hf.ElectraConfig(num_hidden_layers=2)), "ElectraLayer"),
        (lambda hf: hf.PvtForImageClassification(hf.PvtConfig()), "PvtLayer"),
    ],
)
def test_a_model_that_names_no_layers_is_read_for_its_repeated_ones(
    build: Callable[..., nn.Module], layers: str
) -> None:
    import transformers as hf

    with torch.device("meta"):
        model = build(hf)
    with pytest.raises(SpecError, match=f"Set fsdp_transformer_layer_cls_to_wrap: {layers}, or take SIZE_BASED_WRAP"):
        resolve(wrapping(), model, world_size=2)
    assert {unit.class_name for unit in resolve(wrapping(layers), model, world_size=2).units if unit.from_policy} == {
        layers
    }
