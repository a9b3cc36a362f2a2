"""What the behaviors share: models without dropout, data, and arguments of a Trainer."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Trainer, TrainingArguments

Rows = list[dict[str, Any]]
VOCABULARY = 64
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EPSILON = 1e-3  # Adam scales a gradient that is only rounding error up to a whole step, unless epsilon is larger


def made(model_class: Any, config: PreTrainedConfig) -> Any:
    """Return a model with random weights and without dropout, because every rank draws other masks."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return model_class(config)


def llama(model_class: Any = LlamaForCausalLM, **changes: Any) -> Any:
    return made(model_class, LlamaConfig(**{**SMALL, "num_key_value_heads": 2, **changes}))


def tokens(num_rows: int = 16, length: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (num_rows, length), generator=torch.Generator().manual_seed(seed))


def texts(num_rows: int = 16, seed: int = 0) -> Rows:
    """Rows for a language model."""
    return [{"input_ids": row, "labels": row} for row in tokens(num_rows, seed=seed)]


def classified(num_rows: int = 16, classes: int = 2) -> Rows:
    return [{"input_ids": row, "labels": number % classes} for number, row in enumerate(tokens(num_rows))]


def translated(num_rows: int = 16) -> Rows:
    pairs = zip(tokens(num_rows), tokens(num_rows, seed=1), strict=True)
    return [{"input_ids": source, "labels": target} for source, target in pairs]


def tagged() -> Rows:
    return [{"input_ids": row, "labels": row % 3} for row in tokens()]


def answered() -> Rows:
    return [{"input_ids": row, "start_positions": 1, "end_positions": 3} for row in tokens()]


def images(num_rows: int = 16, size: int = 32, segments: int = 0) -> Rows:
    """Pictures of two classes, or with one of several segments for each pixel."""
    pixels = torch.randn(num_rows, 3, size, size, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(size * size).reshape(size, size) % segments if segments else None
    return [
        {"pixel_values": picture, "labels": number % 2 if labels is None else labels}
        for number, picture in enumerate(pixels)
    ]


def sounds(spoken: bool = False) -> Rows:
    """Sounds of two classes, or with the spoken text."""
    values = torch.randn(16, 800, generator=torch.Generator().manual_seed(0))
    rows = enumerate(zip(values, tokens(), strict=True))
    return [{"input_values": sound, "labels": row[:4] if spoken else number % 2} for number, (sound, row) in rows]


def spectra() -> Rows:
    values = torch.randn(16, 8, 32, generator=torch.Generator().manual_seed(0))
    return [{"input_features": sound, "labels": row} for sound, row in zip(values, tokens(), strict=True)]


def series() -> Rows:
    values = torch.randn(16, 36, 2, generator=torch.Generator().manual_seed(0))
    return [{"past_values": row[:32], "future_values": row[32:]} for row in values]


def numbers(num_rows: int = 16, width: int = 8) -> Rows:
    values = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": row.sum().sin().reshape(1)} for row in values]


def arguments(**changes: Any) -> TrainingArguments:
    return TrainingArguments(**argument_values(**changes))


def argument_values(**changes: Any) -> dict[str, Any]:
    return {
        "output_dir": "out",
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "adam_epsilon": EPSILON,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **changes,
    }


def trained(model: nn.Module, rows: Any, trainer_class: Any = Trainer, more: Any = None, **changes: Any) -> Any:
    """Train and save a model. Returns the Trainer, whose history is compared."""
    trainer = trainer_class(model=model, args=arguments(**changes), train_dataset=rows, **(more or {}))
    trainer.train()
    trainer.save_model("final")
    return trainer


def train_row(model: str = "", config: Any = None, rows: Any = "texts", adapter: Any = None, **more: Any) -> Any:
    """Train and save what a row of ``behaviors.yaml`` describes."""
    if model:
        model_class = getattr(transformers, model)
        network = made(model_class, model_class.config_class(**config))
    else:
        network = llama(**(config or {}))
    if adapter:
        import peft

        values = {"type": "LoraConfig", **adapter}
        network = peft.get_peft_model(network, getattr(peft, values.pop("type"))(**values))
    evaluated = {"eval_dataset": _rows(more["evaluated"])} if "evaluated" in more else None
    return trained(network, _rows(rows), more=evaluated, **more.get("arguments", {}))


def _rows(named: str | dict[str, Any]) -> Rows:
    ((name, values),) = {named: {}}.items() if isinstance(named, str) else named.items()
    rows: Rows = globals()[name](**values)
    return rows


class Regression(nn.Module):
    """A plain module with two equal blocks, that returns its loss as the Trainer expects it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        prediction = self.head(x)
        found = {"logits": prediction}
        return found if labels is None else {"loss": (prediction - labels).square().mean(), **found}
