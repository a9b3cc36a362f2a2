"""Cases that ranks run: Trainers with FSDP settings in their arguments."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import torch

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.patching import install_hooks
from tests.support.tiny import GLOBAL_BATCH, MODELS, global_batch
from tests.support.training import fresh_accelerator


class Batches(torch.utils.data.Dataset):
    """The sequences of ``num_batches`` global batches."""

    def __init__(self, num_batches: int) -> None:
        batches = [global_batch(step) for step in range(num_batches)]
        self.rows = [{key: value[i] for key, value in batch.items()} for batch in batches for i in range(GLOBAL_BATCH)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def make_trainer(
    output_dir: str,
    model: str | torch.nn.Module | None = "llama",
    callbacks: Any = (),
    optimizers: tuple[Any, Any] = (None, None),
    model_init: Any = None,
    trainer_class: Any = hfp.FsdpTrainer,
    **arguments: Any,
) -> Any:
    world_size = torch.distributed.get_world_size()
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": GLOBAL_BATCH // world_size, "max_steps": 6, "learning_rate": 1e-3,
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "seed": 3,
        "save_strategy": "no", "lr_scheduler_type": "linear",
    }  # fmt: skip
    args = hfp.FsdpTrainingArguments(output_dir=output_dir, **{**defaults, **arguments})
    return trainer_class(
        model=MODELS[model]() if isinstance(model, str) else model,
        args=args,
        train_dataset=Batches(6),
        eval_dataset=Batches(1),
        callbacks=list(callbacks),
        optimizers=optimizers,
        model_init=model_init,
    )


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
    CopyingTrainer(model=MODELS["llama"](), args=args, train_dataset=Batches(2)).train()


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def gathered(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.accelerator.get_state_dict(trainer.model).items()}


def train(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train six steps."""
    trainer = make_trainer(output_dir, **arguments)
    trainer.train()
    return {"losses": losses(trainer), "report": json.loads((Path(output_dir) / "fsdp_report.json").read_text())}


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


def printed_about_weight_decay(output_dir: str, **arguments: Any) -> str:
    """Train one step, and return what was printed."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        make_trainer(output_dir, max_steps=1, **arguments).train()
    return printed.getvalue()


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
        model = MODELS[kind]()
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


def count_parameters(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """The counts of trainable parameters of a prepared model by the Trainer, and of the unsharded model."""
    from transformers import trainer as module

    model = MODELS["llama"]()
    model.get_input_embeddings().weight.requires_grad_(False)
    expected = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trainer = make_trainer(output_dir, model, **arguments)
    trainer.evaluate()
    install_hooks("transformers")  # the Trainer calls the function for its log
    try:
        logged = module.get_model_param_count(trainer.model, trainable_only=True)
    finally:
        hfp.uninstall()
    return {"counts": [trainer.get_num_trainable_parameters(), logged], "expected": expected}


def train_and_resume(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train six steps without interruption, then again from the checkpoint at step 3."""
    arguments = {"save_strategy": "steps", "save_steps": 3, **arguments}
    whole = make_trainer(output_dir, **arguments)
    whole.train()
    resumed = make_trainer(output_dir, **arguments)
    checkpoint = Path(output_dir) / "checkpoint-3"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    return {
        "whole": losses(whole),
        "resumed": losses(resumed),
        "files": sorted(path.name for path in checkpoint.iterdir()),
        "weights": (gathered(whole), gathered(resumed)),
        "report": json.loads((Path(output_dir) / "fsdp_report.json").read_text()),
    }


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


def evaluate_around_training(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Evaluate before and after training, and generate tokens at the end."""
    trainer = make_trainer(output_dir, **arguments)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    generated = trainer.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    return {"before": before, "losses": losses(trainer), "after": after, "generated": generated.tolist()}


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
        model: Any = MODELS["llama"]()
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


def _settings_of(report: dict[str, Any]) -> dict[str, Any]:
    errors = [problem["code"] for problem in report["problems"] if problem["severity"] == "error"]
    return {"settings": {row["setting"]: row for row in report["settings"]}, "errors": errors}
