"""Modules called outside the model's forward give the same results as in one process."""

from __future__ import annotations

from typing import Any

import cases_submodule_calls as cases
import pytest
import torch
from ranks import RankError, Ranks
from tiny import parallel_config

VERSIONS = pytest.mark.parametrize("version", [1, 2])
LAYOUTS = pytest.mark.parametrize(
    ("version", "settings"),
    [(1, {}), (1, {"fsdp_use_orig_params": False}), (2, {})],
    ids=["fsdp1", "fsdp1-flat", "fsdp2"],
)


def config_of(version: int, **settings: Any) -> dict[str, Any]:
    return parallel_config("full_shard", version, 2, **settings)


@VERSIONS
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "clip", "bert"])
def test_submodule_calls_equal_those_of_bare_model(two_ranks: Ranks, name: str, version: int) -> None:
    layers = {"fsdp_transformer_layer_cls_to_wrap": ",".join(cases.FAMILIES[name].layers)}
    for run in two_ranks.run(cases.call_submodules, name, config_of(version, **layers)):
        for call, (found, expected) in run.items():
            torch.testing.assert_close(found, expected, msg=call)


@LAYOUTS
def test_submodule_calls_run_in_mixed_precision(two_ranks: Ranks, version: int, settings: dict[str, Any]) -> None:
    config = {**config_of(version, **settings), "mixed_precision": "bf16"}
    for run in two_ranks.run(cases.call_submodules, "llama", config):
        for call, (found, expected) in run.items():
            torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2, msg=call)


@LAYOUTS
@pytest.mark.parametrize("name", ["llama", "lora"])
def test_loss_by_submodules_trains_as_in_one_process(
    two_ranks: Ranks, name: str, version: int, settings: dict[str, Any]
) -> None:
    if name == "lora":
        pytest.importorskip("peft")
        if settings:
            pytest.skip("a flat parameter is frozen or trained as a whole")
    found, expected, intact = two_ranks.run(cases.train_with_submodules, name, config_of(version, **settings))[0]
    assert found == pytest.approx(expected, rel=1e-5)
    assert intact == [True] * cases.NUM_STEPS


@LAYOUTS
@pytest.mark.parametrize("how", ["model", "unwrapped", "peft", "summoned", "root summoned"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_generate_works_wherever_it_is_called(
    two_ranks: Ranks, how: str, version: int, settings: dict[str, Any], precision: str
) -> None:
    if "summoned" in how and version == 2:
        pytest.skip("FSDP2 has no summon_full_params")
    if how == "peft":
        pytest.importorskip("peft")
        if settings:
            pytest.skip("a flat parameter is frozen or trained as a whole")
    for tokens, expected, equal in two_ranks.run(
        cases.generate, {**config_of(version, **settings), "mixed_precision": precision}, how
    ):
        assert tokens == expected or (precision == "bf16" and len(tokens[0]) == len(expected[0]))
        assert equal


@VERSIONS
def test_resize_of_sharded_embeddings_is_refused(two_ranks: Ranks, version: int) -> None:
    with pytest.raises(RankError, match="FSDP-E610"):
        two_ranks.run(cases.resize, config_of(version))
