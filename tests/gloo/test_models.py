"""Models that are no plain Transformers models, or not plainly used, compute what one process computes."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_models import (
    clip_a_part,
    dropout_step,
    evaluate_only,
    reference,
    reference_adapter,
    train,
    train_adapter,
    train_compiled,
    train_two,
    train_wrapped_by_hand,
    train_wrapped_in_trainer,
)
from ranks import RankError, Ranks
from tiny import parallel_config, tiny_llama

RELATIVE = 1e-5
VERSIONS = pytest.mark.parametrize("version", [1, 2])
reference_of = cache(reference)


def config_of(version: int, **settings: Any) -> dict[str, Any]:
    return parallel_config("full_shard", version, 2, **settings)


def assert_as(run: dict[str, Any], expected: dict[str, Any], relative: float = RELATIVE) -> None:
    assert run["losses"] == pytest.approx(expected["losses"], rel=relative)
    assert run["norms"] == pytest.approx(expected["norms"], rel=relative)
    assert_weights(run["weights"], expected["weights"], relative)


def assert_weights(weights: dict[str, Any], expected: dict[str, Any], relative: float = RELATIVE) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert weights[name].dtype == weight.dtype
        assert (weights[name] - weight).norm() <= relative * weight.norm().clamp(min=1e-3), name


def differing(run: dict[str, Any]) -> list[str]:
    return [row["setting"] for row in run["report"]["settings"] if row["status"] == "differs"]


@VERSIONS
@pytest.mark.parametrize(
    "policy",
    [
        {"fsdp_auto_wrap_policy": "NO_WRAP"},
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000},
        {"fsdp_transformer_layer_cls_to_wrap": "Linear"},
    ],
    ids=["none", "size", "classes"],
)
def test_a_plain_module_trains_under_every_policy(two_ranks: Ranks, version: int, policy: dict[str, Any]) -> None:
    run = two_ranks.run(train, "simple", config_of(version, **policy))[0]
    assert_as(run, reference_of("simple"))
    assert differing(run) == []


@VERSIONS
def test_a_plain_module_without_layer_classes_is_refused_with_the_ways_out(two_ranks: Ranks, version: int) -> None:
    with pytest.raises(RankError, match=r"SimpleModel.*Linear ×2.*FSDP-E215"):
        two_ranks.run(train, "simple", config_of(version))


@pytest.mark.parametrize("config_version", [1, 2])
@pytest.mark.parametrize(("version", "use_orig"), [(1, True), (1, False), (2, True)])
@pytest.mark.parametrize("order", ["before preparing", "after"])
@pytest.mark.parametrize("name", ["llama", "simple"])
def test_a_model_wrapped_by_hand_stays_as_it_is_and_trains_right(
    two_ranks: Ranks, name: str, order: str, version: int, use_orig: bool, config_version: int
) -> None:
    run = two_ranks.run(train_wrapped_by_hand, name, config_of(config_version), version, order, use_orig)[0]
    assert run["same"]
    assert_as(run, reference_of(name))
    report = run["report"]
    layers = ["layer1", "layer2"] if name == "simple" else [f"model.layers.{i}" for i in range(3)]
    assert [unit["name"] for unit in report["units"]] == [*layers, ""]
    assert report["backend"] == f"fsdp{version}"
    assert differing(run) == [*(["fsdp.version"] if version != config_version else []), "wrap.policy"]
    assert "FSDP-W251" in [problem["code"] for problem in report["problems"]]
    assert not [problem for problem in report["problems"] if problem["severity"] == "error"]


@pytest.mark.parametrize(("version", "use_orig"), [(1, False), (2, True)])
def test_an_optimizer_made_before_wrapping_by_hand_is_refused(two_ranks: Ranks, version: int, use_orig: bool) -> None:
    with pytest.raises(RankError, match=r"4 parameters of SGD .*\[FSDP-E604\]"):
        two_ranks.run(train_wrapped_by_hand, "simple", config_of(version), version, "before wrapping", use_orig)


def test_original_parameters_let_an_optimizer_be_made_before_wrapping_by_hand(two_ranks: Ranks) -> None:
    run = two_ranks.run(train_wrapped_by_hand, "simple", config_of(1), 1, "before wrapping", True)[0]
    assert_as(run, reference_of("simple"))


@VERSIONS
def test_a_trainer_takes_a_model_wrapped_by_hand(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    runs = two_ranks.run(train_wrapped_in_trainer, str(tmp_path), version)[0]
    assert runs["by hand"]["losses"] == pytest.approx(runs["by config"]["losses"], rel=RELATIVE)
    assert [unit["name"] for unit in runs["by hand"]["report"]["units"]][-1] == ""
    assert differing(runs["by hand"]) == ["wrap.policy"]


@pytest.mark.parametrize(
    ("version", "use_orig", "frozen"),
    [(1, True, "half"), (1, False, "half"), (1, True, "embeddings"), (2, True, "half"), (2, True, "embeddings")],
)
def test_frozen_parameters_stay_and_the_others_train(
    two_ranks: Ranks, version: int, use_orig: bool, frozen: str
) -> None:
    run = two_ranks.run(train, frozen, config_of(version, fsdp_use_orig_params=use_orig))[0]
    assert_as(run, reference_of(frozen))
    assert "params.use_orig" not in differing(run) or version == 2


def test_a_unit_that_is_frozen_in_part_is_refused_without_original_parameters(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"model\.embed_tokens\.weight.*FSDP-E222"):
        two_ranks.run(train, "embeddings", config_of(1, fsdp_use_orig_params=False))


@VERSIONS
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fsdp_activation_checkpointing": True},
        {"fsdp_activation_checkpointing": "selective"},
        {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
        {"native": True},
    ],
    ids=["none", "full", "selective", "offload", "native"],
)
def test_a_recompute_draws_the_dropout_of_the_forward(two_ranks: Ranks, version: int, settings: dict[str, Any]) -> None:
    ours = {key: value for key, value in settings.items() if key != "native"}
    bare, sharded = two_ranks.run(dropout_step, config_of(version, **ours), "native" in settings)[0]
    assert_weights(sharded, bare)


@VERSIONS
def test_a_model_in_bf16_is_trained_on_fp32_masters(two_ranks: Ranks, version: int) -> None:
    run = two_ranks.run(train, "llama-bf16", {**config_of(version), "mixed_precision": "bf16"})[0]
    assert run["masters"] == {"torch.float32"}
    assert {unit["master_dtype"] for unit in run["report"]["units"] if unit["num_params"]} == {"fp32"}
    # bf16 keeps 8 bits: 1/256 in what is computed, and far less in weights that moved a little.
    assert_as(run, reference_of("llama-bf16"), relative=4e-3)
    assert differing(run) == []


@VERSIONS
def test_a_model_in_bf16_without_mixed_precision_is_warned_of(two_ranks: Ranks, version: int) -> None:
    run = two_ranks.run(train, "llama-bf16", config_of(version))[0]
    assert run["masters"] == {"torch.bfloat16"}
    assert any("small updates are rounded away" in problem["message"] for problem in run["report"]["problems"])


@VERSIONS
@pytest.mark.parametrize(
    "how", ["config", pytest.param("wrapper", marks=pytest.mark.slow), pytest.param("in place", marks=pytest.mark.slow)]
)
def test_a_compiled_model_trains_right_with_its_author_s_compiler(two_ranks: Ranks, version: int, how: str) -> None:
    config = config_of(version)
    if how == "config":
        config["dynamo_config"] = {"dynamo_backend": "aot_eager"}
    run = two_ranks.run(train_compiled, config, how)[0]
    assert_as(run, reference_of("llama"))
    assert run["dynamo"] > 0
    assert how == "config" or run["num_graphs"] > 0
    assert differing(run) == []


@VERSIONS
def test_two_models_are_prepared_in_one_call(two_ranks: Ranks, version: int) -> None:
    config = config_of(version, fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=2000)
    llama, simple = two_ranks.run(train_two, config)[0]
    assert_as(llama, reference_of("llama"))
    assert_as(simple, reference_of("simple"))


@VERSIONS
@pytest.mark.parametrize("trained", [False, True], ids=["alone", "beside-a-student"])
def test_a_model_needs_no_optimizer(two_ranks: Ranks, version: int, trained: bool) -> None:
    run = two_ranks.run(evaluate_only, config_of(version), trained)[0]
    assert run["loss"] == pytest.approx(reference_of("llama")["losses"][0], rel=RELATIVE)
    assert_weights(run["weights"], tiny_llama().state_dict())
    if trained:
        assert_as(run["student"], reference_of("llama"))
        assert not [problem for problem in run["student"]["report"]["problems"] if problem["severity"] == "error"]


@VERSIONS
def test_the_norm_of_some_parameters_is_theirs_on_all_ranks(two_ranks: Ranks, version: int) -> None:
    norm, expected = two_ranks.run(clip_a_part, config_of(version))[0]
    assert norm == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@VERSIONS
def test_an_adapter_trains_on_a_frozen_base(two_ranks: Ranks, version: int) -> None:
    run = two_ranks.run(train_adapter, config_of(version))[0]
    expected = reference_adapter()
    assert torch.isfinite(torch.tensor(run["losses"])).all()
    assert_as(run, expected)
    assert torch.equal(run["weights"]["base_model.model.lm_head.weight"], tiny_llama().state_dict()["lm_head.weight"])
