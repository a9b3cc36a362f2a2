"""Hooks on parameters and torch's own clipping give the results of one process, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo import cases_parameter_hooks as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import OTHER_UNITS, parallel_config
from tests.support.training import assert_same_training, assert_same_weights

VERSIONS = pytest.mark.parametrize("version", [1, 2])


@VERSIONS
@pytest.mark.parametrize(
    "settings",
    [
        {},
        *OTHER_UNITS,
        slow({"fsdp_offload_params": True}),
    ],
    ids=str,
)
def test_parameter_hooks_train_like_one_process(two_ranks: Ranks, settings: dict[str, Any], version: int) -> None:
    config = parallel_config("full_shard", version, 2, **settings)
    run = two_ranks.run(cases.train_with_hooks, "llama", config)[0]
    assert_same_training(run, cases.reference_with_hooks("llama"))


def test_flat_parameters_call_parameter_hooks(two_ranks: Ranks) -> None:
    config = parallel_config("full_shard", 1, 2, fsdp_use_orig_params=False)
    run = two_ranks.run(cases.train_with_hooks, "llama", config)[0]
    assert_same_training(run, cases.reference_with_hooks("llama"))


@VERSIONS
def test_removed_parameter_hook_is_not_called(two_ranks: Ranks, version: int) -> None:
    run = two_ranks.run(cases.train_with_hooks, "llama", parallel_config("full_shard", version, 2), remove=True)[0]
    assert_same_training(run, cases.reference_with_hooks("llama"))


@VERSIONS
def test_hook_after_accumulation_is_refused(two_ranks: Ranks, version: int) -> None:
    config = parallel_config("full_shard", version, 2)
    assert two_ranks.run(cases.prepare_with_late_hook, config) == [["FSDP-E307"]] * 2


@VERSIONS
@pytest.mark.parametrize("kind", ["all", "some", "largest", "value", "accelerator"])
def test_clipping_functions_equal_one_process(two_ranks: Ranks, kind: str, version: int) -> None:
    expected = cases.reference_clipped(kind)
    runs = two_ranks.run(cases.train_clipped, kind, parallel_config("full_shard", version, 2))
    assert all(run["norms"] == pytest.approx(expected["norms"], rel=1e-5) for run in runs)
    assert_same_weights(runs[0]["weights"], expected["weights"])


@VERSIONS
def test_get_total_norm_is_whole_or_refused(two_ranks: Ranks, version: int) -> None:
    for run in two_ranks.run(cases.norm_without_clipping, parallel_config("full_shard", version, 2)):
        assert run["codes"] == ({"all": "FSDP-E611", "last": "FSDP-E611"} if version == 1 else {})
        assert "other" in run["found"]
        assert run["found"].get("all", 1.0) == pytest.approx(1.0, rel=1e-5)
        assert run["found"].get("last", 0.5) < 1.0
