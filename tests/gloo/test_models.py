"""Models other than plain Transformers models, and unusual uses: they match training in one process."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import cases_models as cases
from tests.support.json_schema import assert_valid
from tests.support.matrices import slow
from tests.support.ranks import RankError, Ranks
from tests.support.tiny import parallel_config, tiny_llama
from tests.support.training import RELATIVE, assert_same_training, assert_same_weights, differing, reference, sgd, train

VERSIONS = pytest.mark.parametrize("version", [1, 2])


@cache
def reference_of(name: str) -> dict[str, Any]:
    return reference(name, sgd, cases.NUM_STEPS)


def train_model(ranks: Ranks, name: str, config: dict[str, Any]) -> dict[str, Any]:
    return ranks.run(train, name, config, sgd, cases.NUM_STEPS)[0]


def config_of(version: int, **settings: Any) -> dict[str, Any]:
    return parallel_config("full_shard", version, 2, **settings)


@VERSIONS
@pytest.mark.parametrize(
    "policy",
    [
        {"fsdp_auto_wrap_policy": "NO_WRAP"},
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000},
        {"fsdp_transformer_layer_cls_to_wrap": "Linear"},
        {},
    ],
    ids=["none", "size", "classes", "default"],
)
def test_plain_module_trains_with_every_wrap_policy(two_ranks: Ranks, version: int, policy: dict[str, Any]) -> None:
    run = train_model(two_ranks, "simple", config_of(version, **policy))
    assert_same_training(run, reference_of("simple"))
    assert differing(run["report"]) == []


@pytest.mark.parametrize("config_version", [1, 2])
@pytest.mark.parametrize(("version", "use_orig"), [(1, True), (1, False), (2, True)])
@pytest.mark.parametrize("order", ["before preparing", "after"])
@pytest.mark.parametrize("name", ["llama", "simple"])
def test_model_wrapped_by_author_keeps_units_and_trains(
    two_ranks: Ranks, name: str, order: str, version: int, use_orig: bool, config_version: int
) -> None:
    run = two_ranks.run(cases.train_wrapped_by_author, name, config_of(config_version), version, order, use_orig)[0]
    assert run["same"]
    assert_same_training(run, reference_of(name))
    report = run["report"]
    layers = ["layer1", "layer2"] if name == "simple" else [f"model.layers.{i}" for i in range(3)]
    assert [unit["name"] for unit in report["units"]] == [*layers, ""]
    assert report["backend"] == f"fsdp{version}"
    assert differing(run["report"]) == [*(["fsdp.version"] if version != config_version else []), "wrap.policy"]
    assert "FSDP-W251" in [problem["code"] for problem in report["problems"]]
    assert not [problem for problem in report["problems"] if problem["severity"] == "error"]


@pytest.mark.parametrize(
    ("version", "settings"),
    [(1, {}), (1, {"fsdp_use_orig_params": False, "fsdp_ignored_modules": "lm_head"}), (2, {}),
     (2, {"fsdp_ignored_modules": "lm_head"})],
)  # fmt: skip
def test_model_wrapped_with_plugin_fields_trains(two_ranks: Ranks, version: int, settings: dict[str, Any]) -> None:
    config = config_of(version, fsdp_sync_module_states=True, fsdp_offload_params=True, **settings)
    run = two_ranks.run(cases.train_wrapped_with_fields, config)[0]
    if not settings.get("fsdp_ignored_modules"):  # FSDP does not reduce the gradients of ignored modules
        assert_same_training(run, reference_of("llama"))
    layers = [unit["name"] for unit in run["report"]["units"]]
    assert layers == ([f"model.layers.{i}" for i in range(3)] if version == 1 else []) + [""]


def test_clipping_of_unprepared_fsdp1_model_is_refused(two_ranks: Ranks) -> None:
    for settings in ({}, {"fsdp_use_orig_params": False}):
        with pytest.raises(RankError, match="FSDP-E611"):
            two_ranks.run(cases.clip_unprepared, config_of(1, **settings))
    norm, expected = two_ranks.run(cases.clip_unprepared, config_of(2))[0]
    assert norm == pytest.approx(expected, rel=RELATIVE)


@VERSIONS
def test_further_models_are_sharded_and_reported(two_ranks: Ranks, version: int) -> None:
    run = two_ranks.run(
        cases.evaluate_further_models, config_of(version, fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer")
    )[0]
    assert_same_training(run, reference_of("llama"))
    assert run["found"] == pytest.approx(run["expected"], rel=RELATIVE)
    report = run["report"]
    assert_valid("report", report)
    assert report["model_class"] == "LlamaForCausalLM"
    bert, simple = report["other_models"]
    assert (bert["model_class"], simple["model_class"]) == ("BertForMaskedLM", "SimpleModel")
    assert {"bert.encoder.layer.0", "bert.encoder.layer.2"} <= {unit["name"] for unit in bert["units"]}
    assert [unit["name"] for unit in simple["units"]] == [""]
    for other in (bert, simple):
        assert differing(other) == []
        assert "FSDP-W260" in [problem["code"] for problem in other["problems"]]
    assert "other model" in run["text"] and "BertForMaskedLM" in run["text"]


@pytest.mark.parametrize(("version", "use_orig"), [(1, False), (2, True)])
def test_optimizer_created_before_wrapping_is_refused(two_ranks: Ranks, version: int, use_orig: bool) -> None:
    with pytest.raises(RankError, match=r"4 parameters of SGD.*FSDP-E604"):
        two_ranks.run(cases.train_wrapped_by_author, "simple", config_of(version), version, "before wrapping", use_orig)


def test_use_orig_params_accepts_optimizer_created_before_wrap(two_ranks: Ranks) -> None:
    run = two_ranks.run(cases.train_wrapped_by_author, "simple", config_of(1), 1, "before wrapping", True)[0]
    assert_same_training(run, reference_of("simple"))


@VERSIONS
def test_trainer_accepts_model_wrapped_by_author(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    by_author, by_plan = two_ranks.run(cases.train_wrapped_in_trainer, str(tmp_path), version)[0]
    assert by_author["losses"] == pytest.approx(by_plan["losses"], rel=RELATIVE)
    assert by_author["report"]["units"][-1]["name"] == ""
    assert differing(by_author["report"]) == ["wrap.policy"]


@pytest.mark.parametrize(
    ("version", "use_orig", "frozen"),
    [
        (1, True, "half"),
        (1, False, "half"),
        (1, True, "embeddings"),
        (1, False, "embeddings"),  # a unit of their own
        (2, True, "half"),
        (2, True, "embeddings"),
    ],
)
def test_frozen_parameters_keep_their_values(two_ranks: Ranks, version: int, use_orig: bool, frozen: str) -> None:
    run = train_model(two_ranks, frozen, config_of(version, fsdp_use_orig_params=use_orig))
    assert_same_training(run, reference_of(frozen))
    assert "params.use_orig" not in differing(run["report"]) or version == 2


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
def test_recompute_repeats_dropout_of_forward(two_ranks: Ranks, version: int, settings: dict[str, Any]) -> None:
    ours = {key: value for key, value in settings.items() if key != "native"}
    bare, sharded = two_ranks.run(cases.dropout_step, config_of(version, **ours), "native" in settings)[0]
    assert_same_weights(sharded, bare)


@VERSIONS
def test_bf16_model_is_trained_with_fp32_master_weights(two_ranks: Ranks, version: int) -> None:
    run = train_model(two_ranks, "llama-bf16", {**config_of(version), "mixed_precision": "bf16"})
    assert run["masters"] == {"torch.float32"}
    assert {unit["master_dtype"] for unit in run["report"]["units"] if unit["num_params"]} == {"fp32"}
    # bf16 has 8 significant bits, so results differ by up to 1/256; weights, which change little, differ less.
    assert_same_training(run, reference_of("llama-bf16"), relative=4e-3)
    assert differing(run["report"]) == []


@VERSIONS
def test_bf16_model_without_mixed_precision_is_warned_about(two_ranks: Ranks, version: int) -> None:
    run = train_model(two_ranks, "llama-bf16", config_of(version))
    assert run["masters"] == {"torch.bfloat16"}
    assert "FSDP-W231" in [problem["code"] for problem in run["report"]["problems"]]


@VERSIONS
@pytest.mark.parametrize("how", ["config", slow("wrapper"), slow("in place")])
def test_compiled_model_trains_with_its_compiler(two_ranks: Ranks, version: int, how: str) -> None:
    dynamo = {"dynamo_config": {"dynamo_backend": "aot_eager"}} if how == "config" else {}
    config = {**config_of(version), **dynamo}
    run = two_ranks.run(cases.train_compiled, config, how)[0]
    assert_same_training(run, reference_of("llama"))
    assert run["dynamo"] > 0
    assert how == "config" or run["num_graphs"] > 0
    assert differing(run["report"]) == []


@VERSIONS
def test_compiled_layers_with_ignored_modules_are_one_graph(two_ranks: Ranks, version: int) -> None:
    """torch.compile breaks the graph at modules that are marked as managed by FSDP and as having flat parameters."""
    config = config_of(version, fsdp_ignored_modules=r".*\.mlp")
    run = two_ranks.run(cases.train_compiled, {**config, "dynamo_config": {"dynamo_backend": "aot_eager"}}, "config")[0]
    assert_same_training(run, reference_of("llama"))
    assert run["dynamo"] > 0 and not [reason for reason in run["breaks"] if "use_orig_params" in reason], run["breaks"]


@VERSIONS
@pytest.mark.parametrize("kind", [True, "selective"])
def test_layers_are_compiled_with_their_checkpoints(two_ranks: Ranks, version: int, kind: Any) -> None:
    config = config_of(version, fsdp_activation_checkpointing=kind)
    run = two_ranks.run(cases.train_compiled, {**config, "dynamo_config": {"dynamo_backend": "aot_eager"}}, "config")[0]
    assert_same_training(run, reference_of("llama"))
    assert differing(run["report"]) == []
    assert run["unique_graphs"] == 1 and run["breaks"] == []
    rows = {row["setting"]: row["observed"] for row in run["report"]["settings"]}
    assert rows["launch.dynamo_config"] == "compiled"
    assert rows["activation.checkpointing"] == ("full" if kind is True else kind)


@VERSIONS
def test_compiled_selective_checkpoint_saves_products(two_ranks: Ranks, version: int) -> None:
    """The policy does not know the operators of compiled code: in a checkpoint, all products would be recomputed."""
    for found in two_ranks.run(cases.matmuls_of_backward, version):
        per_layer = 7  # the last product of a layer is not needed for its gradients
        assert found["full"] - found["none"] == cases.NUM_LAYERS * (per_layer - 1)
        assert found["selective"] - found["none"] == cases.NUM_LAYERS * (per_layer // 2)


@VERSIONS
def test_two_models_are_prepared_in_one_call(two_ranks: Ranks, version: int) -> None:
    config = config_of(version, fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=2000)
    llama, simple = two_ranks.run(cases.train_two, config)[0]
    assert_same_training(llama, reference_of("llama"))
    assert_same_training(simple, reference_of("simple"))


@VERSIONS
@pytest.mark.parametrize("trained", [False, True], ids=["alone", "with-student"])
def test_model_without_optimizer_is_prepared(two_ranks: Ranks, version: int, trained: bool) -> None:
    run = two_ranks.run(cases.evaluate_only, config_of(version), trained)[0]
    assert run["loss"] == pytest.approx(reference_of("llama")["losses"][0], rel=RELATIVE)
    assert_same_weights(run["weights"], tiny_llama().state_dict())
    if trained:
        assert_same_training(run["student"], reference_of("llama"))
        assert not [problem for problem in run["student"]["report"]["problems"] if problem["severity"] == "error"]


@VERSIONS
def test_norm_of_parameter_subset_covers_all_ranks(two_ranks: Ranks, version: int) -> None:
    norm, expected = two_ranks.run(cases.clip_subset, config_of(version))[0]
    assert norm == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@VERSIONS
def test_adapter_trains_on_frozen_base(two_ranks: Ranks, version: int) -> None:
    run = train_model(two_ranks, "lora", config_of(version))
    assert_same_training(run, reference_of("lora"))
    assert torch.equal(run["weights"]["base_model.model.lm_head.weight"], tiny_llama().state_dict()["lm_head.weight"])
