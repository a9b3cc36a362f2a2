"""The Trainer with FSDP settings in its arguments: training, evaluation, generation, checkpoints and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.gloo import cases_trainer as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks

MODEL_FILES = {
    "full": {"model.safetensors", "optimizer_0", "config.json"},
    "sharded": {"pytorch_model_fsdp_0", "optimizer_0", "config.json"},
    "local": {"pytorch_model_fsdp_0", "optimizer_0", "config.json"},
}
both_versions = pytest.mark.parametrize("version", [1, 2])


def settings(version: int, words: str = "full_shard auto_wrap", **config: Any) -> dict[str, Any]:
    """Return the FSDP arguments of ``TrainingArguments``."""
    return {"fsdp": words, "fsdp_config": {"version": version, **config}}


@pytest.mark.parametrize(
    ("words", "version", "kind"),
    [
        ("full_shard auto_wrap", 1, "full"),
        ("full_shard auto_wrap", 2, "sharded"),
        slow("full_shard auto_wrap", 1, "sharded"),
        slow("full_shard auto_wrap", 2, "full"),
        ("full_shard auto_wrap", 1, "local"),
        slow("full_shard auto_wrap", 2, "local"),
        slow("shard_grad_op auto_wrap", 1, "full"),
        slow("no_shard auto_wrap", 1, "full"),
        slow("no_shard auto_wrap", 2, "sharded"),
        ("SHARD_GRAD_OP,auto_wrap", 2, "sharded"),
    ],
)
def test_resumed_training_equals_uninterrupted(
    two_ranks: Ranks, tmp_path: Path, words: str, version: int, kind: str
) -> None:
    arguments = settings(version, words, state_dict_type=kind)
    run = two_ranks.run(cases.train_and_resume, str(tmp_path), **arguments)[0]
    assert MODEL_FILES[kind] <= set(run["files"])
    assert run["resumed"] == run["whole"]
    assert run["report"]["backend"] == f"fsdp{version}"
    whole, resumed = run["weights"]
    assert whole.keys() == resumed.keys()
    assert all((whole[name] == resumed[name]).all() for name in whole)


@both_versions
def test_run_that_is_resumed_after_its_end_trains_nothing(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    """The Trainer alone trains a fourth step."""
    run = two_ranks.run(cases.resume_after_the_end, str(tmp_path), **settings(version))[0]
    whole, resumed = run["weights"]
    assert "FSDP-N410" in run["printed"]
    assert run["steps"] == 3 and all((whole[name] == resumed[name]).all() for name in whole)


@both_versions
def test_save_override_finds_files_of_the_run(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    (tmp_path / "args.json").write_text("{}")
    two_ranks.run(cases.train_with_save_override, str(tmp_path), **settings(version))
    for step in (1, 2):
        copied = tmp_path / f"checkpoint-{step}" / "args.json"
        assert copied.read_text() == "{}"
        assert not copied.is_symlink()
    assert (tmp_path / "saves.txt").read_text() == "checkpoint-2"
    assert (tmp_path / "args.json").read_text() == "{}"
    assert not list(tmp_path.glob(".*"))


@both_versions
def test_restored_best_weights_are_not_no_training(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    arguments = settings(version, state_dict_type="SHARDED_STATE_DICT")
    run = two_ranks.run(cases.report_of_restored_first_step, str(tmp_path), **arguments)[0]
    assert run["best"].endswith("checkpoint-1")
    assert "FSDP-E510" not in [problem["code"] for problem in run["report"]["problems"]]


def test_evaluation_before_training_keeps_losses(two_ranks: Ranks, tmp_path: Path) -> None:
    plain = two_ranks.run(cases.train, str(tmp_path), **settings(2))[0]
    runs = [two_ranks.run(cases.evaluate_around_training, str(tmp_path), **settings(version))[0] for version in (1, 2)]
    for run in runs:
        assert run["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert run["after"] < run["before"]
        assert run["generated"] == runs[0]["generated"]


@both_versions
@pytest.mark.parametrize("arguments", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_saved_model_loads_with_from_pretrained(
    two_ranks: Ranks, tmp_path: Path, version: int, arguments: dict[str, Any]
) -> None:
    saved = two_ranks.run(cases.save_model, str(tmp_path), **settings(version), **arguments)[0]
    assert {"config.json", "model.safetensors"} <= set(saved["files"])
    assert saved["num_equal"] == saved["num_weights"] > 0


@both_versions
def test_full_save_after_changing_state_dict_type(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    arguments = settings(version, state_dict_type="SHARDED_STATE_DICT")
    saved = two_ranks.run(cases.save_model, str(tmp_path), save_as="FULL_STATE_DICT", **arguments)[0]
    assert saved["num_equal"] == saved["num_weights"] > 0


@both_versions
@pytest.mark.parametrize("kind", [slow("full"), "sharded"])
def test_best_model_is_loaded_at_end(two_ranks: Ranks, tmp_path: Path, version: int, kind: str) -> None:
    arguments = settings(version, state_dict_type=kind)
    run = two_ranks.run(cases.train_with_best_model, str(tmp_path), **arguments)[0]
    assert run["again"] == pytest.approx(run["best"], rel=1e-6)
    assert run["num_checkpoints"] == 2


@both_versions
def test_accumulation_equals_one_larger_batch(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    small = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    accumulated = two_ranks.run(cases.train, str(tmp_path), **settings(version), **small)[0]
    whole = two_ranks.run(cases.train, str(tmp_path), **settings(version))[0]
    # The order of the micro-batches differs, but each epoch of six steps has the same 48 sequences.
    assert accumulated["report"]["effective_batch_size"] == whole["report"]["effective_batch_size"] == 8
    assert accumulated["losses"][0] == pytest.approx(whole["losses"][0], rel=0.02)


@pytest.mark.parametrize(("use_orig", "weight_decay"), [(False, 0.01), (False, 0.0), (True, 0.01)])
def test_weight_decay_of_biases_and_norms_is_a_warning(
    two_ranks: Ranks, tmp_path: Path, use_orig: bool, weight_decay: float
) -> None:
    arguments = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 1, "use_orig_params": use_orig},
        "weight_decay": weight_decay,
    }
    printed, _ = two_ranks.run(cases.printed_about_weight_decay, str(tmp_path), **arguments)
    assert ("FSDP-W692" in printed) == (not use_orig and weight_decay > 0)


@pytest.mark.parametrize("kind", ["t5", "bert", "llama"])
@pytest.mark.parametrize("version", [1, 2])
def test_loss_that_ignores_the_number_of_labels_is_a_mean(
    two_ranks: Ranks, tmp_path: Path, version: int, kind: str
) -> None:
    run = two_ranks.run(cases.train_one_step_of, kind, str(tmp_path), **settings(version))[0]
    assert run["losses"] == pytest.approx([run["expected"]] * 2, rel=1e-5)
    assert ("FSDP-N644" in run["printed"]) == (kind != "llama")


def test_batch_size_is_found_after_an_error(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = (
        two_ranks.run(cases.train_after_memory_error, str(tmp_path / str(version)), **settings(version))[0]
        for version in (1, 2)
    )
    assert len(first) == 6
    assert first == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_full_eval_needs_the_dtype_of_the_training(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    def run(train: bool, **more: Any) -> dict[str, Any]:
        return two_ranks.run(cases.evaluate_converted, str(tmp_path), train, **settings(version), **more)[0]

    assert run(True)["codes"] == ["FSDP-E645"]
    alone, mixed = run(False), run(True, bf16=True)
    assert alone["codes"] == mixed["codes"] == []
    assert alone["differing"] == mixed["differing"] == []


@pytest.mark.parametrize("version", [1, 2])
def test_trainer_counts_whole_parameters(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    run = two_ranks.run(cases.count_parameters, str(tmp_path), **settings(version))[0]
    assert run["counts"] == [run["expected"]] * 2


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_is_created_with_original_shapes(
    two_ranks: Ranks, tmp_path: Path, version: int, evaluates: bool
) -> None:
    run = two_ranks.run(cases.train_with_groups_by_dimensions, str(tmp_path), evaluates, **settings(version))[0]
    matrices, vectors, created, trained = run
    assert (matrices, vectors) == ([2], [1])
    assert created == trained
    assert min(created) > 0


@both_versions
@pytest.mark.parametrize(
    ("how", "kind", "setting", "reason"),
    [
        ("adapters", "full", "checkpoint.state_dict", "PEFT writes the whole file"),
        ("own save", "full", "checkpoint.state_dict", "OwnSave._save writes the whole file"),
        ("model only", "sharded", "checkpoint.state_dict", "save_only_model=True"),
        ("checkpointing", "sharded", "activation.checkpointing", "the script has enabled"),
        ("every second layer", "sharded", "activation.checkpointing", "every_n_layers=2"),
        ("half evaluation", "sharded", "precision.param", "the dtype of the parameters"),
        ("norm only", "sharded", "sharding.strategy", ""),
    ],
)
def test_value_that_is_set_on_purpose_is_applied(
    two_ranks: Ranks, tmp_path: Path, version: int, how: str, kind: str, setting: str, reason: str
) -> None:
    if how == "every second layer" and not hasattr(PreTrainedModel, "_activation_checkpointing_enable"):
        pytest.skip("since Transformers 5.24")
    found = two_ranks.run(cases.report_on_purpose, str(tmp_path), how, **settings(version, state_dict_type=kind))[0]
    assert [row for row in found["settings"].values() if row["status"] == "differs"] == [] and found["errors"] == []
    assert found["settings"][setting]["status"] == "applied" and reason in found["settings"][setting]["reason"]
