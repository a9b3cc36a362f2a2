"""The Trainer with FSDP settings in its arguments: training, evaluation, generation, checkpoints and resuming."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.patching import changes
from tests.support import trainer_runs
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.trainer_runs import Batches, gathered, losses, make_trainer, train_and_resume
from tests.support.training import fresh_accelerator


class OwnSave(hfp.FsdpTrainer):
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict=state_dict)


class NormOnly(torch.nn.Module):
    """A module in which the wrap policy finds no layer, and FSDP2 gets a unit for the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(self.norm(self.first(inputs)))
        return outputs


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
    run = two_ranks.run(train_and_resume, str(tmp_path), **arguments)[0]
    assert MODEL_FILES[kind] <= set(run["files"])
    assert run["resumed"] == run["whole"]
    assert run["report"]["backend"] == f"fsdp{version}"
    whole, resumed = run["weights"]
    assert whole.keys() == resumed.keys()
    assert all((whole[name] == resumed[name]).all() for name in whole)


def resume_after_the_end(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train half of the data, and resume from the checkpoint of the last step."""
    arguments = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3, **arguments}
    whole = make_trainer(output_dir, **arguments)
    whole.train()
    resumed = make_trainer(output_dir, **arguments)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        resumed.train(resume_from_checkpoint=True)
    weights = gathered(whole), gathered(resumed)
    return {"steps": resumed.state.global_step, "weights": weights, "printed": printed.getvalue()}


@both_versions
def test_run_that_is_resumed_after_its_end_trains_nothing(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    """The Trainer alone trains a fourth step."""
    run = two_ranks.run(resume_after_the_end, str(tmp_path), **settings(version))[0]
    whole, resumed = run["weights"]
    assert "FSDP-N410" in run["printed"]
    assert run["steps"] == 3 and all((whole[name] == resumed[name]).all() for name in whole)


def train_with_save_override(output_dir: str, **arguments: Any) -> None:
    """Save with a method that copies a file beside the checkpoint into it, and writes another beside it."""

    class CopyingTrainer(hfp.FsdpTrainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict=state_dict)
            beside = Path(str(output_dir)).parent
            shutil.copy(beside / "args.json", str(output_dir))
            (beside / "saves.txt").write_text(Path(str(output_dir)).name)

    defaults: dict[str, Any] = {
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": "none",
        "use_cpu": True,
    }
    args = hfp.FsdpTrainingArguments(output_dir=output_dir, disable_tqdm=True, **defaults, **arguments)
    CopyingTrainer(model=trainer_runs.MODELS["llama"](), args=args, train_dataset=Batches(2)).train()


@both_versions
def test_save_override_finds_files_of_the_run(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    (tmp_path / "args.json").write_text("{}")
    two_ranks.run(train_with_save_override, str(tmp_path), **settings(version))
    for step in (1, 2):
        copied = tmp_path / f"checkpoint-{step}" / "args.json"
        assert copied.read_text() == "{}"
        assert not copied.is_symlink()
    assert (tmp_path / "saves.txt").read_text() == "checkpoint-2"
    assert (tmp_path / "args.json").read_text() == "{}"
    assert not list(tmp_path.glob(".*"))


def report_of_restored_first_step(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train, and restore the checkpoint of the first step, whose learning rate is 0, as the best one."""
    trainer = make_trainer(
        output_dir, max_steps=3, warmup_steps=1, save_strategy="steps", save_steps=1, eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
        **arguments,
    )  # fmt: skip
    trainer.train()
    best = str(trainer.state.best_model_checkpoint)
    return {"best": best, "report": json.loads((Path(output_dir) / "fsdp_report.json").read_text())}


@both_versions
def test_restored_best_weights_are_not_no_training(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    arguments = settings(version, state_dict_type="SHARDED_STATE_DICT")
    run = two_ranks.run(report_of_restored_first_step, str(tmp_path), **arguments)[0]
    assert run["best"].endswith("checkpoint-1")
    assert "FSDP-E510" not in [problem["code"] for problem in run["report"]["problems"]]


def train(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train six steps."""
    trainer = make_trainer(output_dir, **arguments)
    trainer.train()
    return {"losses": losses(trainer), "report": json.loads((Path(output_dir) / "fsdp_report.json").read_text())}


def evaluate_around_training(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Evaluate before and after training, and generate tokens at the end."""
    trainer = make_trainer(output_dir, **arguments)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    generated = trainer.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    return {"before": before, "losses": losses(trainer), "after": after, "generated": generated.tolist()}


def test_evaluation_before_training_keeps_losses(two_ranks: Ranks, tmp_path: Path) -> None:
    plain = two_ranks.run(train, str(tmp_path), **settings(2))[0]
    runs = [two_ranks.run(evaluate_around_training, str(tmp_path), **settings(version))[0] for version in (1, 2)]
    for run in runs:
        assert run["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert run["after"] < run["before"]
        assert run["generated"] == runs[0]["generated"]


def save_model(output_dir: str, save_as: str | None = None, **arguments: Any) -> dict[str, Any]:
    """Call ``trainer.save_model`` after training, and load the folder with ``from_pretrained``.

    Args:
        save_as: the state dict type that is set before saving, as the Hugging Face guide does.
    """
    from transformers import LlamaForCausalLM

    trainer = make_trainer(output_dir, **arguments)
    trainer.train()
    if save_as is not None:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type(save_as)
    trainer.save_model(output_dir)
    torch.distributed.barrier()
    loaded = LlamaForCausalLM.from_pretrained(output_dir).state_dict()
    weights = gathered(trainer)
    return {
        "files": sorted(path.name for path in Path(output_dir).iterdir()),
        "num_equal": sum(torch.equal(loaded[name], weight) for name, weight in weights.items()),
        "num_weights": len(weights),
    }


@both_versions
@pytest.mark.parametrize("arguments", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_saved_model_loads_with_from_pretrained(
    two_ranks: Ranks, tmp_path: Path, version: int, arguments: dict[str, Any]
) -> None:
    saved = two_ranks.run(save_model, str(tmp_path), **settings(version), **arguments)[0]
    assert {"config.json", "model.safetensors"} <= set(saved["files"])
    assert saved["num_equal"] == saved["num_weights"] > 0


@both_versions
def test_full_save_after_changing_state_dict_type(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    arguments = settings(version, state_dict_type="SHARDED_STATE_DICT")
    saved = two_ranks.run(save_model, str(tmp_path), save_as="FULL_STATE_DICT", **arguments)[0]
    assert saved["num_equal"] == saved["num_weights"] > 0


def train_with_best_model(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Evaluate and save every second step, keep two checkpoints, and load the best one at the end."""
    trainer = make_trainer(
        output_dir, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", **arguments,
    )  # fmt: skip
    trainer.train()
    best = trainer.state.best_metric
    num_checkpoints = len(list(Path(output_dir).glob("checkpoint-*")))
    return {"best": best, "again": trainer.evaluate()["eval_loss"], "num_checkpoints": num_checkpoints}


@both_versions
@pytest.mark.parametrize("kind", [slow("full"), "sharded"])
def test_best_model_is_loaded_at_end(two_ranks: Ranks, tmp_path: Path, version: int, kind: str) -> None:
    arguments = settings(version, state_dict_type=kind)
    run = two_ranks.run(train_with_best_model, str(tmp_path), **arguments)[0]
    assert run["again"] == pytest.approx(run["best"], rel=1e-6)
    assert run["num_checkpoints"] == 2


@both_versions
def test_accumulation_equals_one_larger_batch(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    small = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    accumulated = two_ranks.run(train, str(tmp_path), **settings(version), **small)[0]
    whole = two_ranks.run(train, str(tmp_path), **settings(version))[0]
    # The order of the micro-batches differs, but each epoch of six steps has the same 48 sequences.
    assert accumulated["report"]["effective_batch_size"] == whole["report"]["effective_batch_size"] == 8
    assert accumulated["losses"][0] == pytest.approx(whole["losses"][0], rel=0.02)


def printed_about_weight_decay(output_dir: str, **arguments: Any) -> str:
    """Train one step, and return what was printed."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        make_trainer(output_dir, max_steps=1, **arguments).train()
    return printed.getvalue()


@pytest.mark.parametrize(("use_orig", "weight_decay"), [(False, 0.01), (False, 0.0), (True, 0.01)])
def test_weight_decay_of_biases_and_norms_is_a_warning(
    two_ranks: Ranks, tmp_path: Path, use_orig: bool, weight_decay: float
) -> None:
    arguments = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 1, "use_orig_params": use_orig},
        "weight_decay": weight_decay,
    }
    printed, _ = two_ranks.run(printed_about_weight_decay, str(tmp_path), **arguments)
    assert ("FSDP-W692" in printed) == (not use_orig and weight_decay > 0)


def _step_loss_of(model: Any, rows: list[dict[str, torch.Tensor]]) -> float:
    with torch.no_grad():
        return float(model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss)


def train_one_step_of(kind: str, output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Evaluate and train one step of all samples, of a model that ignores the number of labels or divides by it.

    Returns:
        The losses, the loss of the whole step in one process, and what was printed.
    """
    from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    small: dict[str, Any] = {"vocab_size": 64, "num_layers": 1, "num_heads": 2}
    if kind == "t5":
        config = T5Config(d_model=16, d_kv=8, d_ff=32, decoder_start_token_id=0, dropout_rate=0.0, **small)
        model: Any = T5ForConditionalGeneration(config)
    elif kind == "bert":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=4, **sizes, **dropout))
    else:
        model = trainer_runs.MODELS[kind]()
    ids = torch.randint(2, 32, (8, 10))
    labels = torch.randint(0, 4, (8,)) if kind == "bert" else ids[:, :6] if kind == "t5" else ids
    rows = [{"input_ids": ids[i], "labels": labels[i]} for i in range(8)]
    expected = _step_loss_of(model, rows)
    args = hfp.FsdpTrainingArguments(
        output_dir=output_dir, max_steps=1, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        gradient_accumulation_steps=2, logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True,
        save_strategy="no", **arguments,
    )  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        trainer = hfp.FsdpTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.train()
    return {"losses": [evaluated, *losses(trainer)], "expected": expected, "printed": printed.getvalue()}


@pytest.mark.parametrize("kind", ["t5", "bert", "llama"])
@pytest.mark.parametrize("version", [1, 2])
def test_loss_that_ignores_the_number_of_labels_is_a_mean(
    two_ranks: Ranks, tmp_path: Path, version: int, kind: str
) -> None:
    run = two_ranks.run(train_one_step_of, kind, str(tmp_path), **settings(version))[0]
    assert run["losses"] == pytest.approx([run["expected"]] * 2, rel=1e-5)
    assert ("FSDP-N644" in run["printed"]) == (kind != "llama")


def train_after_memory_error(output_dir: str, **arguments: Any) -> list[float]:
    """Train with a search of the batch size, in which batches of more than two samples are too large."""

    class SmallMemory(hfp.FsdpTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if len(inputs["labels"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. (simulated)")
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = make_trainer(
        output_dir, trainer_class=SmallMemory, auto_find_batch_size=True, per_device_train_batch_size=4, **arguments
    )
    trainer.train()
    return losses(trainer)


def test_batch_size_is_found_after_an_error(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = (
        two_ranks.run(train_after_memory_error, str(tmp_path / str(version)), **settings(version))[0]
        for version in (1, 2)
    )
    assert len(first) == 6
    assert first == pytest.approx(second, rel=1e-5)


def evaluate_converted(output_dir: str, train: bool, **arguments: Any) -> dict[str, Any]:
    """Evaluate with ``bf16_full_eval``, after a training or alone."""
    trainer = make_trainer(output_dir, max_steps=1, bf16_full_eval=True, **arguments)
    try:
        if train:
            trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    except hfp.SpecError as error:
        return {"codes": [problem.code for problem in error.problems]}
    found = hfp.report(trainer).to_json()["settings"]
    return {"codes": [], "loss": loss, "differing": [each["setting"] for each in found if each["status"] == "differs"]}


@pytest.mark.parametrize("version", [1, 2])
def test_full_eval_needs_the_dtype_of_the_training(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    def run(train: bool, **more: Any) -> dict[str, Any]:
        return two_ranks.run(evaluate_converted, str(tmp_path), train, **settings(version), **more)[0]

    assert run(True)["codes"] == ["FSDP-E645"]
    alone, mixed = run(False), run(True, bf16=True)
    assert alone["codes"] == mixed["codes"] == []
    assert alone["differing"] == mixed["differing"] == []


def count_parameters(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """The counts of trainable parameters of a prepared model by the Trainer, and of the unsharded model."""
    from transformers import trainer as module

    model = trainer_runs.MODELS["llama"]()
    model.get_input_embeddings().weight.requires_grad_(False)
    expected = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trainer = make_trainer(output_dir, model, **arguments)
    trainer.evaluate()
    changes().install("transformers")  # the Trainer calls the function for its log
    try:
        logged = module.get_model_param_count(trainer.model, trainable_only=True)
        counted = trainer.get_num_trainable_parameters()
    finally:
        hfp.uninstall()
    return {"counts": [counted, logged], "expected": expected}


@pytest.mark.parametrize("version", [1, 2])
def test_trainer_counts_whole_parameters(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    run = two_ranks.run(count_parameters, str(tmp_path), **settings(version))[0]
    assert run["counts"] == [run["expected"]] * 2


def _settings_of(report: dict[str, Any]) -> dict[str, Any]:
    errors = [problem["code"] for problem in report["problems"] if problem["severity"] == "error"]
    return {"settings": {row["setting"]: row for row in report["settings"]}, "errors": errors}


def report_on_purpose(output_dir: str, how: str, **arguments: Any) -> dict[str, Any]:
    """Return the settings and the codes of the report of a run in which the plugin or the script sets a value."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    if how == "adapters":
        trainer = make_trainer(output_dir, "lora", **saving, **arguments)
    elif how == "own save":
        trainer = make_trainer(output_dir, **saving, **arguments)
        trainer.__class__ = OwnSave
    elif how == "model only":
        trainer = make_trainer(output_dir, save_only_model=True, **saving, **arguments)
    elif how == "checkpointing":
        model: Any = trainer_runs.MODELS["llama"]()
        model.gradient_checkpointing_enable()
        trainer = make_trainer(output_dir, model, max_steps=2, **arguments)
    elif how == "every second layer":
        every = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}
        trainer = make_trainer(output_dir, max_steps=2, **every, **arguments)
    elif how == "half evaluation":
        trainer = make_trainer(output_dir, bf16_full_eval=True, **arguments)
    else:
        trainer = None
    if trainer is None:
        fsdp = {"fsdp_version": arguments["fsdp_config"]["version"], "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        config = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": fsdp}
        accelerator = fresh_accelerator(config)
        plain = NormOnly()
        prepared, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
        accelerator.backward(prepared(torch.randn(4, 8)).sum())
        optimizer.step()
        report = hfp.report(accelerator)
    elif how == "half evaluation":
        trainer.evaluate()
        report = hfp.report(trainer)
    else:
        trainer.train()
        return _settings_of(json.loads((Path(output_dir) / "fsdp_report.json").read_text()))
    return _settings_of(report.to_json())


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
    found = two_ranks.run(report_on_purpose, str(tmp_path), how, **settings(version, state_dict_type=kind))[0]
    assert [row for row in found["settings"].values() if row["status"] == "differs"] == [] and found["errors"] == []
    assert found["settings"][setting]["status"] == "applied" and reason in found["settings"][setting]["reason"]


def train_with_groups_by_dimensions(output_dir: str, evaluates: bool, **arguments: Any) -> list[list[int]]:
    """Train one step with groups of matrices and vectors. Returns the numbers of dimensions of their members."""
    groups: list[list[int]] = []

    class GroupingTrainer(hfp.FsdpTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            matrices = [p for p in parameters if p.ndim >= 2]
            vectors = [p for p in parameters if p.dim() < 2]
            groups.extend(sorted({p.ndim for p in group}) for group in (matrices, vectors))
            groups.append([len(matrices), len(vectors)])
            self.optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
            return self.optimizer

    trainer = make_trainer(output_dir, max_steps=1, trainer_class=GroupingTrainer, **arguments)
    if evaluates:
        trainer.evaluate()
    trainer.train()
    groups.append([len(group["params"]) for group in trainer.optimizer.param_groups])
    return groups


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_is_created_with_original_shapes(
    two_ranks: Ranks, tmp_path: Path, version: int, evaluates: bool
) -> None:
    run = two_ranks.run(train_with_groups_by_dimensions, str(tmp_path), evaluates, **settings(version))[0]
    matrices, vectors, created, trained = run
    assert (matrices, vectors) == ([2], [1])
    assert created == trained
    assert min(created) > 0
