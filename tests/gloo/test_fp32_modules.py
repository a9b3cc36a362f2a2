"""Modules that compute in fp32 while the others compute in bf16, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.torch_private.fsdp2 import first_version_with_dtype_per_parameter, installed_behavior
from tests.gloo import cases_fp32_modules as cases
from tests.gloo.cases_communication import counted_and_estimated
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS
from tests.support.training import assert_same_training, differing

NEEDS_OVERRIDES = pytest.mark.skipif(
    not installed_behavior().dtype_per_parameter,
    reason=f"FSDP2 has one dtype for all parameters of a unit before torch {first_version_with_dtype_per_parameter()}",
)
NORMS = r".*norm"


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
    run = two_ranks.run(cases.train_with, name, cases.config_of(pattern, **settings))[0]
    assert_same_training(run, cases.reference(name, pattern, 2))
    assert differing(run["report"]) == []
    assert run["masters"] == {"torch.float32"}
    (row,) = [row for row in run["report"]["settings"] if row["setting"] == "precision.fp32_modules"]
    assert row["status"] == "applied"


@NEEDS_OVERRIDES
@pytest.mark.parametrize(("strategy", "accumulation"), [("hybrid_shard", 2), slow("no_shard", 1)])
def test_replicas_train_like_one_process(four_ranks: Ranks, strategy: str, accumulation: int) -> None:
    config = cases.config_of(NORMS, 4, strategy)
    run = four_ranks.run(cases.train_with, "llama", config, accumulation)[0]
    assert_same_training(run, cases.reference("llama", NORMS, 4 * accumulation))
    assert differing(run["report"]) == []


@NEEDS_OVERRIDES
def test_model_sharded_by_from_pretrained_trains_equally(two_ranks: Ranks, tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)  # type: ignore[operator]
    run = two_ranks.run(cases.train_loaded, str(tmp_path), NORMS)[0]
    assert_same_training(run, cases.reference("llama", NORMS, 2))
    assert differing(run["report"]) == []


@NEEDS_OVERRIDES
def test_only_selected_parameters_are_gathered_in_fp32(two_ranks: Ranks) -> None:
    for found in two_ranks.run(cases.gather_dtypes, "llama", cases.config_of(NORMS)):
        assert {name for name, dtype in found.items() if dtype == "float32"} == {n for n in found if "norm" in n}
        assert set(found.values()) == {"float32", "bfloat16"}


@NEEDS_OVERRIDES
@pytest.mark.parametrize("pattern", [NORMS, r"model\.layers\.0|lm_head"])
def test_collectives_equal_estimate(two_ranks: Ranks, pattern: str) -> None:
    for counted, estimated in two_ranks.run(counted_and_estimated, "llama", cases.config_of(pattern), accumulation=2):
        assert counted == estimated
        assert counted


@NEEDS_OVERRIDES
def test_other_modules_in_fp32_differ_in_the_report(two_ranks: Ranks) -> None:
    report = two_ranks.run(cases.report_after_change, cases.config_of(NORMS))[0]
    (row,) = [row for row in report["settings"] if row["setting"] == "precision.fp32_modules"]
    assert (row["status"], row["observed"]) == ("differs", ["lm_head"])


@pytest.mark.parametrize("version", [1, 2])
def test_setting_is_refused_where_a_unit_has_one_dtype(two_ranks: Ranks, version: int) -> None:
    supported = version == 2 and installed_behavior().dtype_per_parameter
    expected: list[str] = [] if supported else ["FSDP-E282"]
    assert two_ranks.run(cases.prepare_refused, cases.config_of(NORMS, version=version)) == [expected] * 2
