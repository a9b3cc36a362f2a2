"""User code that reads and changes the weights of a prepared model, on real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.gloo import cases_user_code as cases
from tests.support.ranks import Ranks
from tests.support.tiny import OTHER_UNITS, parallel_config
from tests.support.training import assert_same_weights

VERSIONS = pytest.mark.parametrize("version", [1, 2])


@VERSIONS
@pytest.mark.parametrize("name", ["llama", "tied", "half", "lora"])
def test_edits_of_whole_parameters_equal_one_process(two_ranks: Ranks, name: str, version: int) -> None:
    runs = two_ranks.run(cases.train_and_edit, name, parallel_config("full_shard", version, 2))
    expected = cases.edit_reference(name)
    assert_same_weights(runs[0]["weights"], expected)
    for run in runs:
        assert run["names"] == set(expected)
        assert run["norms"] == runs[0]["norms"]


@VERSIONS
@pytest.mark.parametrize(
    "settings",
    [
        *OTHER_UNITS,
        {"fsdp_sharding_strategy": "NO_SHARD"},
        {"fsdp_offload_params": True},
        {"fsdp_ignored_modules": "model.embed_tokens"},
    ],
    ids=str,
)
def test_edits_with_other_settings_equal_one_process(two_ranks: Ranks, settings: dict[str, Any], version: int) -> None:
    runs = two_ranks.run(cases.train_and_edit, "llama", parallel_config("full_shard", version, 2, **settings))
    expected = cases.edit_reference("llama")
    assert_same_weights(runs[0]["weights"], expected)
    assert all(run["names"] == set(expected) for run in runs)


@VERSIONS
def test_edits_of_compiled_layers_equal_one_process(two_ranks: Ranks, version: int) -> None:
    config = {**parallel_config("full_shard", version, 2), "dynamo_config": {"dynamo_backend": "EAGER"}}
    runs = two_ranks.run(cases.train_and_edit, "llama", config)
    assert_same_weights(runs[0]["weights"], cases.edit_reference("llama"))


@VERSIONS
def test_edits_on_a_hybrid_mesh_equal_one_process(four_ranks: Ranks, version: int) -> None:
    runs = four_ranks.run(cases.train_and_edit, "tied", parallel_config("hybrid_shard", version, 4))
    assert_same_weights(runs[0]["weights"], cases.edit_reference("tied"))


def test_edits_of_flat_parameters_equal_one_process(two_ranks: Ranks) -> None:
    config = parallel_config("full_shard", 1, 2, fsdp_use_orig_params=False)
    runs = two_ranks.run(cases.train_and_edit, "llama", config)
    assert_same_weights(runs[0]["weights"], cases.edit_reference("llama"))


@VERSIONS
def test_whole_parameters_have_the_master_dtype(two_ranks: Ranks, version: int) -> None:
    config = {**parallel_config("full_shard", version, 2), "mixed_precision": "bf16"}
    for run in two_ranks.run(cases.edit_in_mixed_precision, config):
        assert run["dtypes"] == {"torch.float32"}
        assert 0 < run["changed"] <= 1.1e-3


@VERSIONS
def test_misuse_of_full_parameters_is_refused(two_ranks: Ranks, version: int) -> None:
    for codes in two_ranks.run(cases.misuse, parallel_config("full_shard", version, 2)):
        assert codes.pop("failed") == ["FSDP-E303"]
        assert codes.pop("nothing") == []
        assert codes.pop("weights") == ["1.0"]
        assert codes == {kind: ["FSDP-E308"] for kind in codes}


def test_full_parameters_leave_unsharded_models_unchanged(one_rank: Ranks) -> None:
    names, are_same = one_rank.run(cases.read_unsharded)[0]
    assert len(names) > 10
    assert are_same


@VERSIONS
def test_copies_of_sharded_models_are_refused(two_ranks: Ranks, version: int) -> None:
    for codes in two_ranks.run(cases.copies, parallel_config("full_shard", version, 2)):
        assert codes.pop("without weights") == []
        assert codes == {kind: ["FSDP-E310"] for kind in codes}


@VERSIONS
@pytest.mark.parametrize("after_evaluation", [False, True])
def test_unwrapped_model_loads_whole_tensors(two_ranks: Ranks, after_evaluation: bool, version: int) -> None:
    config = parallel_config("full_shard", version, 2)
    run = two_ranks.run(cases.load_whole_state_dicts, config, after_evaluation)[0]
    loaded, trained = cases.loaded_reference()
    assert_same_weights(run["loaded"], loaded, 0.0)
    assert_same_weights(run["trained"], trained)
    assert run["missing"] == []
    assert run["partial"]


@VERSIONS
@pytest.mark.parametrize("name", ["llama", "tied", "half", "lora"])
def test_counts_of_parameters_are_those_of_one_process(two_ranks: Ranks, name: str, version: int) -> None:
    for run in two_ranks.run(cases.counts, name, parallel_config("full_shard", version, 2)):
        assert run["after"] == run["before"]


@pytest.mark.cpu_ranks("FSDP1 adds gradients of flat shards that are in a loss on two streams")
@VERSIONS
def test_flat_shards_in_a_loss_are_reported_once(two_ranks: Ranks, version: int) -> None:
    config = parallel_config("full_shard", version, 2)
    kinds = ["none", "layer", "all"] if version == 1 else ["none", "layer"]
    found = [two_ranks.run(cases.penalty, config, kind)[0].count("FSDP-W311") for kind in kinds]
    assert found == ([0, 1, 1] if version == 1 else [0, 0])


@VERSIONS
def test_average_of_whole_copies_names_the_remedy(two_ranks: Ranks, version: int) -> None:
    printed = two_ranks.run(cases.average_of_copies, parallel_config("full_shard", version, 2))[0]
    assert "FSDP-E627" in printed
    assert "ExponentialMovingAverage" in printed


def test_full_parameters_of_other_sharded_models_are_refused(two_ranks: Ranks) -> None:
    assert two_ranks.run(cases.sharded_by_torch) == [["FSDP-E309"]] * 2


DOCUMENT = (Path(__file__).parents[2] / "docs" / "your_code.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


@VERSIONS
def test_examples_of_the_document_run(two_ranks: Ranks, version: int, tmp_path: Path) -> None:
    blocks = [block for block in EXAMPLES if "Trainer(" not in block and (version == 2 or "# FSDP2" not in block)]
    assert len(blocks) == (7 if version == 2 else 6)
    runs = two_ranks.run(cases.run_examples, parallel_config("full_shard", version, 2), blocks, str(tmp_path))
    before = cases.tiny_llama()
    expected = {name: float(parameter.norm()) for name, parameter in before.named_parameters()}
    for run in runs:
        assert run["norms"] == pytest.approx(expected, rel=1e-6)
        assert run["row"].tolist() == before.get_input_embeddings().weight[5].tolist()  # type: ignore[operator]
    assert (tmp_path / "state" / "exponential_moving_average.safetensors").is_file()
    assert (tmp_path / "ema" / "model.safetensors").is_file()


@VERSIONS
def test_trainer_example_of_the_document_runs(two_ranks: Ranks, version: int, tmp_path: Path) -> None:
    (block,) = [block for block in EXAMPLES if "Trainer(" in block]
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": version}}
    two_ranks.run(cases.run_trainer_example, block, str(tmp_path), **fsdp)
    assert (tmp_path / "ema" / "model.safetensors").is_file()


def test_penalty_under_fsdp2_equals_one_process(two_ranks: Ranks) -> None:
    loss, weights = two_ranks.run(cases.train_with_penalty, parallel_config("full_shard", 2, 2))[0]
    expected_loss, expected = cases.train_with_penalty(None)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_same_weights(weights, expected)


@VERSIONS
def test_double_backward_is_refused(two_ranks: Ranks, version: int) -> None:
    for codes in two_ranks.run(cases.differentiate_twice, parallel_config("full_shard", version, 2)):
        assert codes == {kind: ["FSDP-E313"] for kind in ("loss", "logits", "backward")}


@pytest.mark.parametrize(
    ("version", "strategy", "codes"),
    [(1, "full_shard", ["FSDP-E315"]), (1, "shard_grad_op", ["FSDP-E315"]), (1, "no_shard", []), (2, "full_shard", [])],
)
def test_second_backward_is_refused_if_weights_are_freed(
    two_ranks: Ranks, version: int, strategy: str, codes: list[str]
) -> None:
    assert two_ranks.run(cases.backward_twice, parallel_config(strategy, version, 2)) == [codes] * 2


@VERSIONS
def test_sharpness_aware_optimizer_is_refused(two_ranks: Ranks, version: int) -> None:
    codes = two_ranks.run(cases.prepare_sharpness_aware, parallel_config("full_shard", version, 2))
    assert codes == [["FSDP-E321"]] * 2


def test_torch_save_keeps_tied_weights_of_fsdp2(two_ranks: Ranks, tmp_path: Path) -> None:
    assert all(two_ranks.run(cases.write_tied, parallel_config("full_shard", 2, 2), str(tmp_path)))
