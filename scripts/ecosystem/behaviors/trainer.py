"""What people do with ``transformers.Trainer``: arguments, callbacks, overridden methods, models changed before it."""

from __future__ import annotations

import math
from typing import Any

import datasets
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    DataCollatorWithPadding,
    DefaultDataCollator,
    EarlyStoppingCallback,
    EvalPrediction,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

from scripts.ecosystem.behaviors.common import (
    Regression,
    Rows,
    arguments,
    classified,
    llama,
    numbers,
    texts,
    tokens,
    trained,
)


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def early_stopping() -> Any:
    more = {"eval_dataset": texts(8, seed=5), "callbacks": [EarlyStoppingCallback(1, 1.0)]}
    return trained(
        llama(),
        texts(),
        more=more,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )


def best_model_by_metric() -> Any:
    more = {"eval_dataset": classified(8), "compute_metrics": _accuracy}
    return trained(
        llama(LlamaForSequenceClassification),
        classified(),
        more=more,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        greater_is_better=True,
    )


def curriculum_of_two_trainers() -> Any:
    model = llama()
    Trainer(model=model, args=arguments(max_steps=2), train_dataset=texts()).train()
    return trained(model, texts(seed=3))


def curriculum_on_the_trainers_model() -> Any:
    first = Trainer(model=llama(), args=arguments(max_steps=2), train_dataset=texts())
    first.train()
    return trained(first.model, texts(seed=3))


def train_called_twice() -> Any:
    trainer = Trainer(model=llama(), args=arguments(max_steps=2), train_dataset=texts())
    trainer.train()
    trainer.train()
    trainer.save_model("final")
    return trainer


class _Weighted(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


def custom_compute_loss() -> Any:
    more = {"eval_dataset": classified(8), "compute_metrics": _accuracy}
    return trained(
        llama(LlamaForSequenceClassification), classified(), _Weighted, more, eval_strategy="steps", eval_steps=3
    )


def _focal(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    loss = nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def compute_loss_func() -> Any:
    return trained(llama(LlamaForSequenceClassification), classified(), more={"compute_loss_func": _focal})


def _lengths(num_rows: int = 16) -> Rows:
    return [{"input_ids": row[: 3 + number % 5].tolist(), "labels": number % 2} for number, row in enumerate(tokens(num_rows))]  # fmt: skip  # noqa: E501


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(64)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w2")), pad_token="w0")


def group_by_length_with_padding() -> Any:
    more = {"data_collator": DataCollatorWithPadding(_tokenizer())}
    model = llama(LlamaForSequenceClassification)
    return trained(model, _lengths(), more=more, train_sampling_strategy="group_by_length")


def saved_with_processing_class() -> Any:
    return trained(llama(), texts(), more={"processing_class": _tokenizer(), "data_collator": default_data_collator})


def optimizer_class_and_kwargs() -> Any:
    more = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True})}
    return trained(llama(), texts(), more=more)


class _Groups(Trainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        named = list((model or self.model).named_parameters())
        groups = [
            {"params": [p for name, p in named if "embed" in name], "lr": 1e-3},
            {"params": [p for name, p in named if "embed" not in name], "lr": 1e-2},
        ]
        self.optimizer = torch.optim.AdamW(groups, eps=1e-3, weight_decay=0.1)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: 1 / math.sqrt(step + 1))
        return self.lr_scheduler


def own_optimizer_and_scheduler() -> Any:
    return trained(llama(), texts(), _Groups)


def optimizers_given_to_the_trainer() -> Any:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return trained(model, texts(), more={"optimizers": (optimizer, LambdaLR(optimizer, lambda step: 0.5**step))})


def evaluation_accumulated() -> Any:
    return trained(
        llama(LlamaForSequenceClassification),
        classified(),
        more={"eval_dataset": classified(11), "compute_metrics": _accuracy},
        eval_accumulation_steps=1,
        eval_strategy="steps",
        eval_steps=1,
    )


class _Running:
    """Metrics that are collected batch by batch."""

    def __init__(self) -> None:
        self.right: list[float] = []

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        self.right += (prediction.predictions.argmax(-1) == prediction.label_ids).float().tolist()
        return {"accuracy": sum(self.right) / len(self.right)} if compute_result else {}


def metrics_batch_by_batch() -> Any:
    return trained(
        llama(LlamaForSequenceClassification),
        classified(),
        more={"eval_dataset": classified(8), "compute_metrics": _Running()},
        batch_eval_metrics=True,
        eval_strategy="steps",
        eval_steps=3,
    )


def logits_preprocessed_for_metrics() -> Any:
    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}

    rows = [{"input_ids": row, "labels": row % 3} for row in tokens()]
    more = {
        "eval_dataset": rows[:8],
        "compute_metrics": metrics,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }
    return trained(
        llama(LlamaForTokenClassification, num_labels=3), rows, more=more, eval_strategy="steps", eval_steps=3
    )


def several_evaluation_sets() -> Any:
    more = {"eval_dataset": {"easy": texts(8), "hard": texts(6, seed=4)}}
    return trained(llama(), texts(), more=more, eval_strategy="steps", eval_steps=2, eval_on_start=True)


def predict_and_evaluate_after_training() -> Any:
    trainer = trained(llama(LlamaForSequenceClassification), classified(), more={"compute_metrics": _accuracy})
    found = trainer.predict(classified(7)).metrics | trainer.evaluate(classified(9))
    return {name: value for name, value in found.items() if "loss" in name or "accuracy" in name}


def frozen_embeddings() -> Any:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    return trained(model, texts())


def frozen_base() -> Any:
    model = llama(LlamaForSequenceClassification)
    for parameter in model.model.parameters():
        parameter.requires_grad = False
    return trained(model, classified())


def layer_unfrozen_between_two_trainers() -> Any:
    model = llama()
    model.model.layers[1].requires_grad_(False)
    Trainer(model=model, args=arguments(max_steps=2), train_dataset=texts()).train()
    model.model.layers[1].requires_grad_(True)
    return trained(model, texts(seed=3))


def head_initialized_again() -> Any:
    model = llama(LlamaForSequenceClassification)
    nn.init.normal_(model.score.weight, std=0.5)
    return trained(model, classified())


def embeddings_resized() -> Any:
    model = llama()
    model.resize_token_embeddings(70, mean_resizing=False)
    return trained(model, texts())


def module_replaced_before_training() -> Any:
    model = llama()
    model.lm_head = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 64))
    return trained(model, texts())


class _Iterable(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(texts(24))


def iterable_dataset() -> Any:
    return trained(llama(), _Iterable())


def streamed_dataset() -> Any:
    rows = datasets.Dataset.from_list([{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens(24)])
    return trained(llama(), rows.to_iterable_dataset(num_shards=2), more={"data_collator": DefaultDataCollator()})


def dataset_with_unused_columns() -> Any:
    rows = [{"input_ids": row.tolist(), "labels": row.tolist(), "text": "unused"} for row in tokens(16)]
    return trained(llama(), datasets.Dataset.from_list(rows))


def own_dataloader() -> Any:
    class Ordered(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

    return trained(llama(), texts(), Ordered)


def own_collator() -> Any:
    def masked(rows: Rows) -> dict[str, torch.Tensor]:
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids.masked_fill(ids % 3 == 0, -100)}

    return trained(llama(), texts(), more={"data_collator": masked})


def resumed_from_a_checkpoint() -> Any:
    values = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    Trainer(model=llama(), args=arguments(**values), train_dataset=texts()).train()
    trainer = Trainer(model=llama(), args=arguments(**values), train_dataset=texts())
    trainer.train(resume_from_checkpoint="out/checkpoint-2")
    trainer.save_model("final")
    return trainer


def resumed_with_more_steps() -> Any:
    Trainer(
        model=llama(),
        args=arguments(save_strategy="steps", save_steps=2, max_steps=2, lr_scheduler_type="constant"),
        train_dataset=texts(),
    ).train()
    trainer = Trainer(model=llama(), args=arguments(max_steps=4, lr_scheduler_type="constant"), train_dataset=texts())
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model("final")
    return trainer


def save_total_limit() -> Any:
    trainer = trained(llama(), texts(), save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=4)
    from pathlib import Path

    left = len(list(Path("out").glob("checkpoint-*")))
    return {f"loss {row['step']}": row["loss"] for row in trainer.state.log_history if "loss" in row} | {
        "num_left": left
    }


class _Control(TrainerCallback):
    """Logs, evaluates, saves and stops at its own steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_evaluate = state.global_step == 2
        control.should_save = state.global_step == 2
        control.should_training_stop = state.global_step == 3
        return control


def callback_that_stops_and_saves() -> Any:
    more = {"callbacks": [_Control()], "eval_dataset": texts(8)}
    return trained(llama(), texts(), more=more, max_steps=8, logging_strategy="steps")


class _Rate(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.1 * state.global_step


def callback_that_changes_the_optimizer() -> Any:
    return trained(llama(), texts(), more={"callbacks": [_Rate()]})


class _Clamp(TrainerCallback):
    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.03, 0.03)


def weights_clamped_in_a_callback() -> Any:
    return trained(llama(), texts(), more={"callbacks": [_Clamp()]})


class _Average(TrainerCallback):
    """An exponential moving average of the parameters, which is put into the model at the end."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            self.kept[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.kept[name])


def average_of_parameters_by_hand() -> Any:
    return trained(llama(), texts(), more={"callbacks": [_Average()]})


class _Distilled(Trainer):
    def __init__(self, *args: Any, teacher: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits
        loss = outputs.loss + nn.functional.mse_loss(outputs.logits, wanted)
        return (loss, outputs) if return_outputs else loss


def distilled_from_a_teacher() -> Any:
    teacher = llama(num_hidden_layers=3)
    return trained(llama(), texts(), _Distilled, {"teacher": teacher})


class _Contrastive(Trainer):
    """Two forward passes of one model in a step."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        first = model(**inputs)
        second = model(input_ids=inputs["input_ids"].flip(1), labels=inputs["labels"].flip(1))
        loss = first.loss + 0.5 * second.loss
        return (loss, first) if return_outputs else loss


def two_forward_passes_in_a_loss() -> Any:
    return trained(llama(), texts(), _Contrastive)


class _Step(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


def own_training_step() -> Any:
    return trained(llama(), texts(), _Step)


def own_log_entries() -> Any:
    class Logged(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            self.log({"value": float(self.accelerator.gather(outputs["loss"].detach()).mean())})
            return (loss, outputs) if return_outputs else loss

    return trained(llama(), texts(), Logged)


def model_init() -> Any:
    from transformers import set_seed

    def make() -> Any:
        set_seed(7)
        return llama()

    trainer = Trainer(model_init=make, args=arguments(), train_dataset=texts())
    trainer.train()
    trainer.save_model("final")
    return trainer


def plain_module_resumed() -> Any:
    values = {"save_strategy": "steps", "save_steps": 1}
    Trainer(model=Regression(), args=arguments(**values), train_dataset=numbers()).train()
    trainer = Trainer(model=Regression(), args=arguments(**values), train_dataset=numbers())
    trainer.train(resume_from_checkpoint="out/checkpoint-1")
    trainer.save_model("final")
    return trainer


def mask_of_gradients_by_hook() -> Any:
    model = llama()
    mask = (torch.arange(64) >= 32).float()[:, None]
    model.lm_head.weight.register_hook(lambda gradient: gradient * mask)
    return trained(model, texts())


def forward_hooks_that_change_activations() -> Any:
    model = llama()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    model.model.layers[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5, *inputs[1:]))
    return trained(model, texts())


def two_models_one_after_the_other() -> Any:
    first = trained(llama(), texts())
    second = trained(llama(num_hidden_layers=1), texts(seed=2))
    histories = (("first", first), ("second", second))
    return {
        f"{which} loss {row['step']}": row["loss"]
        for which, trainer in histories
        for row in trainer.state.log_history
        if "loss" in row
    }
