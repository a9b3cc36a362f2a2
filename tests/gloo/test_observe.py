"""The report has the values of the live model, whatever the config contains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cases_observe as cases
import pytest
from ranks import RankError, Ranks
from tiny import parallel_config

PLAIN = ("full_shard", "shard_grad_op", "no_shard")
HYBRID = ("hybrid_shard", "hybrid_shard_zero2")
# torch pads each FSDP2 parameter's first dimension, and each FSDP1 flat parameter, to a multiple of the shard size.
PADDING = 0.02


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
    num_params = reports[0]["num_params"]
    for found in reports:
        memory = found["memory"]
        for held, whole in (
            (memory["params_bytes"], memory["ddp_params_bytes"]),
            (memory["grads_bytes"], memory["ddp_grads_bytes"]),
            (memory["optimizer_bytes"], memory["ddp_optimizer_bytes"]),
        ):
            assert held == pytest.approx(whole / parts, rel=PADDING)
        assert memory["ddp_params_bytes"] == 4 * num_params
        # AdamW: two fp32 moments a parameter, and a step counter a tensor.
        assert memory["ddp_optimizer_bytes"] == pytest.approx(8 * num_params, rel=PADDING)
    locals_ = [sum(unit["num_local_params"] for unit in found["units"]) for found in reports]
    assert sum(locals_) == num_params * len(reports) // parts


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("strategy", PLAIN)
@pytest.mark.parametrize("model", ["llama", "bert"])
def test_strategy_and_memory_share_on_two_ranks(two_ranks: Ranks, strategy: str, version: int, model: str) -> None:
    reports = two_ranks.run(cases.planned, parallel_config(strategy, version, 2), model)
    assert reports[0]["backend"] == f"fsdp{version}"
    assert status(reports[0], "sharding.strategy") == (strategy, "applied")
    assert_nothing_differs(reports[0])
    assert_fractions(reports, 1 if strategy == "no_shard" else 2)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("strategy", ["full_shard", *HYBRID])
def test_strategy_and_memory_share_on_four_ranks(four_ranks: Ranks, strategy: str, version: int) -> None:
    reports = four_ranks.run(cases.planned, parallel_config(strategy, version, 4))
    assert status(reports[0], "sharding.strategy") == (strategy, "applied")
    shard = 4 if strategy == "full_shard" else 2
    assert reports[0]["mesh"] == {"replicate": 4 // shard, "shard": shard}
    assert status(reports[0], "mesh.shard") == (shard, "applied")
    assert_nothing_differs(reports[0])
    assert_fractions(reports, shard)


@pytest.mark.parametrize("version", [1, 2])
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
    found = two_ranks.run(cases.planned, parallel_config("full_shard", version, 2, **settings))[0]
    assert status(found, name) == (observed, "applied")
    assert_nothing_differs(found)


@pytest.mark.parametrize("version", [1, 2])
def test_bf16_computes_in_bf16_and_reduces_in_fp32(two_ranks: Ranks, version: int) -> None:
    config = {**parallel_config("full_shard", version, 2), "mixed_precision": "bf16"}
    reports = two_ranks.run(cases.planned, config)
    for unit in (unit for unit in reports[0]["units"] if unit["num_params"]):
        assert (unit["param_dtype"], unit["reduce_dtype"], unit["master_dtype"]) == ("bf16", "fp32", "fp32")
    assert status(reports[0], "precision.param") == ("bf16", "applied")
    assert status(reports[0], "launch.mixed_precision") == ("bf16", "applied")
    assert_nothing_differs(reports[0])
    assert_fractions(reports, 2)


def test_offload_is_observed_under_version_2(two_ranks: Ranks) -> None:
    found = two_ranks.run(cases.planned, parallel_config("full_shard", 2, 2, fsdp_offload_params=True))[0]
    assert status(found, "offload.params") == (True, "applied")
    assert all(unit["offloaded"] for unit in found["units"] if unit["num_params"])


@pytest.mark.parametrize(
    ("name", "asked"),
    [("prefetch.limit_all_gathers", "fsdp_limit_all_gathers"), ("params.use_orig", "fsdp_use_orig_params")],
)
def test_setting_not_supported_by_fsdp2_is_a_warning(two_ranks: Ranks, name: str, asked: str) -> None:
    found = two_ranks.run(cases.planned, parallel_config("full_shard", 2, 2, **{asked: False}))[0]
    assert status(found, name) == (True, "differs")
    assert problem(found, "FSDP-W506")["setting"] == name
    # FSDP1 supports the setting.
    found = two_ranks.run(cases.planned, parallel_config("full_shard", 1, 2, **{asked: False}))[0]
    assert status(found, name) == (False, "applied")


@pytest.mark.parametrize("version", [1, 2])
def test_fp32_model_differs_from_asked_bf16(two_ranks: Ranks, version: int) -> None:
    ran = parallel_config("full_shard", version, 2)
    found = two_ranks.run(cases.unlike_the_plan, {**ran, "mixed_precision": "bf16"}, ran)[0]
    assert status(found, "precision.param") == ("fp32", "differs")
    differing = {p["setting"] for p in found["problems"] if p["code"] == "FSDP-E503"}
    assert "precision.param" in differing
    assert "DIFFERS" in found["text"] and "[FSDP-E503]" in found["text"]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("asked", "ran", "name", "observed"),
    [
        ({"strategy": "shard_grad_op"}, {"strategy": "full_shard"}, "sharding.strategy", "full_shard"),
        ({"strategy": "full_shard"}, {"strategy": "no_shard"}, "mesh.shard", 1),
        ({}, {"fsdp_activation_checkpointing": True}, "activation.checkpointing", "full"),
        ({"fsdp_forward_prefetch": True}, {}, "prefetch.forward", False),
        (
            {"fsdp_backward_prefetch": "NO_PREFETCH"},
            {"fsdp_backward_prefetch": "BACKWARD_PRE"},
            "prefetch.backward",
            "pre",
        ),
        ({}, {"fsdp_auto_wrap_policy": "NO_WRAP"}, "wrap.policy", "none"),
        ({"fsdp_transformer_layer_cls_to_wrap": "LlamaMLP"}, {}, "wrap.classes", ["LlamaDecoderLayer"]),
    ],
)
def test_model_sharded_by_another_config_differs(
    two_ranks: Ranks, asked: dict[str, Any], ran: dict[str, Any], name: str, observed: Any, version: int
) -> None:
    first = parallel_config(**{"strategy": "full_shard", **asked}, version=version, world_size=2)
    second = parallel_config(**{"strategy": "full_shard", **ran}, version=version, world_size=2)
    found = two_ranks.run(cases.unlike_the_plan, first, second)[0]
    assert status(found, name)[1] == "differs"
    if name != "wrap.classes":
        assert status(found, name)[0] == observed
    assert ("FSDP-E503", name) in [(p["code"], p["setting"]) for p in found["problems"]]


def test_other_fsdp_version_differs(two_ranks: Ranks) -> None:
    asked, ran = parallel_config("full_shard", 2, 2), parallel_config("full_shard", 1, 2)
    assert status(two_ranks.run(cases.unlike_the_plan, asked, ran)[0], "fsdp.version") == (1, "differs")


def test_ddp_instead_of_fsdp_is_an_error(two_ranks: Ranks) -> None:
    found = two_ranks.run(cases.not_sharded, parallel_config("full_shard", 2, 2))[0]
    assert found["backend"] == "ddp" and found["units"] == []
    assert status(found, "sharding.strategy") == ("not sharded", "differs")
    assert "LlamaForCausalLM" in problem(found, "FSDP-E501")["message"]
    assert found["memory"]["params_bytes"] == found["memory"]["ddp_params_bytes"] == 4 * found["num_params"]


def test_layer_without_reshard_is_a_mixed_strategy(two_ranks: Ranks) -> None:
    found = two_ranks.run(cases.changed_after_sharding, parallel_config("full_shard", 2, 2), "reshard")[0]
    assert status(found, "sharding.strategy") == ("mixed: full_shard, shard_grad_op", "differs")


def test_master_weights_cast_after_sharding_are_an_error(two_ranks: Ranks) -> None:
    config = {**parallel_config("full_shard", 2, 2), "mixed_precision": "bf16"}
    found = two_ranks.run(cases.changed_after_sharding, config, "half")[0]
    assert "bf16 instead of fp32" in problem(found, "FSDP-E502")["message"]


def test_buffer_that_differs_between_ranks_is_reported(two_ranks: Ranks) -> None:
    config = parallel_config("full_shard", 2, 2, fsdp_sync_module_states=True)
    found = two_ranks.run(cases.changed_after_sharding, config, "buffer")[0]
    assert status(found, "loading.sync_module_states") == (False, "differs")
    assert "inv_freq" in setting(found, "loading.sync_module_states")["reason"]
    equal = two_ranks.run(cases.planned, config)[0]
    assert status(equal, "loading.sync_module_states") == (True, "applied")
    assert "bit-identical tensors from rank 0" in setting(equal, "loading.sync_module_states")["reason"]


def test_replicas_are_compared_between_ranks(two_ranks: Ranks) -> None:
    config = parallel_config("no_shard", 2, 2, fsdp_sync_module_states=True)
    assert status(two_ranks.run(cases.planned, config)[0], "loading.sync_module_states") == (True, "applied")
    found = two_ranks.run(cases.changed_after_sharding, config, "weights")[0]
    assert status(found, "loading.sync_module_states") == (False, "differs")


@pytest.mark.parametrize("version", [1, 2])
def test_units_are_the_same_after_first_forward(two_ranks: Ranks, version: int) -> None:
    for before, after in two_ranks.run(cases.before_and_after_first_forward, parallel_config("full_shard", version, 2)):
        assert before == after
        assert [unit["name"] for unit in before if unit["class"] == "LlamaDecoderLayer"] == [
            f"model.layers.{index}" for index in range(3)
        ]


# With use_orig_params zero_grad clears the views, but FSDP1 keeps the flat gradient until the next forward.
@pytest.mark.parametrize(
    ("version", "use_orig", "cleared"),
    [(1, True, "alive"), (1, False, "optimizer step"), (2, True, "optimizer step")],
)
def test_gradient_bytes_have_three_sources(two_ranks: Ranks, version: int, use_orig: bool, cleared: str) -> None:
    config = parallel_config("full_shard", version, 2, fsdp_use_orig_params=use_orig)
    for computed, alive, recorded in two_ranks.run(cases.gradient_sources, config):
        assert [computed[1], alive[1], recorded[1]] == ["trainable shards", "alive", cleared]
        assert alive[0] == recorded[0] == pytest.approx(computed[0], rel=PADDING)


@pytest.mark.parametrize(("version", "dtype"), [(1, "bf16"), (2, "fp32")])
def test_layers_wrapped_by_hand_are_observed(two_ranks: Ranks, version: int, dtype: str) -> None:
    units = two_ranks.run(cases.wrapped_by_hand, version)[0]
    assert [unit["name"] for unit in units] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert {unit["class"] for unit in units} == {"LlamaDecoderLayer"}
    assert {unit["param_dtype"] for unit in units} == {dtype}


def test_text_has_100_columns_and_groups_layers(two_ranks: Ranks) -> None:
    text = two_ranks.run(cases.planned, {**parallel_config("full_shard", 2, 2), "mixed_precision": "bf16"})[0]["text"]
    assert max(map(len, text.splitlines())) <= 100
    assert "model.layers.0–2" in text and "LlamaDecoderLayer ×3" in text
    assert "effective batch size 16 = 4 per device × 2 accumulated × 2 data-parallel ranks, 192 tokens" in text


def test_only_rank_0_writes_the_report_file(two_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "out" / "fsdp_report.json"
    assert two_ranks.run(cases.written, parallel_config("full_shard", 2, 2), str(path)) == [str(path), None]
    assert [file.name for file in path.parent.iterdir()] == ["fsdp_report.json"]
    found = json.loads(path.read_text())
    assert {"backend", "world_size", "mesh", "device", "units", "settings", "memory", "problems"} <= found.keys()
    assert {"params_bytes", "grads_bytes", "optimizer_bytes", "peak_bytes"} <= found["memory"].keys()
    assert {
        "name", "class", "num_params", "num_local_params", "param_dtype", "reduce_dtype", "reshard_after_forward",
        "offloaded", "checkpointed",
    } <= found["units"][0].keys()  # fmt: skip
    assert [row["rank"] for row in found["ranks"]] == [0, 1]


def test_report_requires_a_prepared_model(two_ranks: Ranks) -> None:
    config = parallel_config("full_shard", 2, 2)
    assert two_ranks.run(cases.public_report, "prepared", config)[0]["backend"] == "fsdp2"
    with pytest.raises(RankError, match=r"LlamaForCausalLM.*FSDP-E508"):
        two_ranks.run(cases.public_report, "unprepared", config)


def test_unreadable_rank_is_named_on_every_rank(two_ranks: Ranks) -> None:
    for text in two_ranks.run(cases.unreadable_on_one_rank, parallel_config("full_shard", 2, 2)):
        assert "rank 1" in text


def test_unwritable_report_does_not_block_other_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(cases.unwritable_report, parallel_config("full_shard", 2, 2)) == ["done", "done"]
