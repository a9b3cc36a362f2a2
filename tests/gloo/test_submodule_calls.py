"""Modules called outside the model's forward give the same results as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import cases_submodule_calls as cases
from tests.support.matrices import slow
from tests.support.ranks import RankError, Ranks
from tests.support.tiny import parallel_config

VERSIONS = pytest.mark.parametrize("version", [1, 2])
LAYOUTS = pytest.mark.parametrize(
    ("version", "settings"),
    [(1, {}), (1, {"fsdp_use_orig_params": False}), (2, {})],
    ids=["fsdp1", "fsdp1-flat", "fsdp2"],
)


def config_of(version: int, **settings: Any) -> dict[str, Any]:
    return parallel_config("full_shard", version, 2, **settings)


@VERSIONS
@pytest.mark.parametrize("name", ["llama", "clip", *(slow(name) for name in ("gpt2", "t5", "bert"))])
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
@pytest.mark.parametrize("how", ["model", "unwrapped", "peft", "own parameter", "summoned", "root summoned"])
@pytest.mark.parametrize("precision", ["no", slow("bf16")])
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


@pytest.mark.parametrize(
    ("version", "settings"),
    [(1, {}), slow(1, {"fsdp_use_orig_params": False}), (2, {})],
)
def test_generate_in_callbacks_does_not_change_training(
    two_ranks: Ranks, tmp_path: Path, version: int, settings: dict[str, Any]
) -> None:
    use_orig = settings.get("fsdp_use_orig_params", True)
    fsdp_config = {
        "version": version,
        "use_orig_params": use_orig,
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    }
    arguments = {"fsdp": "full_shard auto_wrap", "fsdp_config": fsdp_config, "eval_strategy": "steps", "eval_steps": 2}
    plain, generating, num_calls = two_ranks.run(cases.train_with_callback, str(tmp_path), arguments)[0]
    assert generating == pytest.approx(plain, rel=1e-6)
    assert num_calls > 12


@VERSIONS
@pytest.mark.parametrize("how", ["Trainer", "Accelerator"])
def test_generate_on_one_rank_raises(two_ranks: Ranks, tmp_path: Path, version: int, how: str) -> None:
    assert two_ranks.run(cases.generate_on_one_rank, str(tmp_path), version, how) == [["FSDP-E670"], []]


@VERSIONS
def test_seq2seq_trainer_generates_as_one_process(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, version: int
) -> None:
    config = config_of(version, fsdp_transformer_layer_cls_to_wrap="T5Block")
    run = two_ranks.run(cases.train_seq2seq, str(tmp_path), config)[0]
    expected = one_rank.run(cases.train_seq2seq, str(tmp_path), None)[0]
    assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert run["eval losses"] == pytest.approx(expected["eval losses"], rel=1e-5)
    assert run["tokens"] == expected["tokens"]
