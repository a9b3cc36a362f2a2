"""Training loops with ``accelerate.Accelerator``, as its documentation writes them, and their variants."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader

from scripts.ecosystem.behaviors.common import EPSILON, Regression, llama, numbers, texts

Loss = Callable[[Any, dict[str, Any]], torch.Tensor]


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=EPSILON)


def _loader(rows: Any, batch: int = 2, **changes: Any) -> DataLoader[Any]:
    return DataLoader(rows, batch_size=batch, **changes)


def _mean(accelerator: Accelerator, loss: torch.Tensor) -> float:
    return float(accelerator.gather(loss.detach().reshape(1)).mean())


def _save(accelerator: Accelerator, model: Any, folder: str = "final") -> None:
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    whole = accelerator.unwrap_model(model)
    if hasattr(whole, "save_pretrained"):
        whole.save_pretrained(folder, is_main_process=accelerator.is_main_process, state_dict=state)
    else:
        accelerator.save_model(model, folder)


def _finish(accelerator: Accelerator, losses: Any, *models: Any) -> Any:
    for number, model in enumerate(models):
        _save(accelerator, model, "final" if number == 0 else f"final/{number}")
    accelerator.end_training()
    return losses


def _start(
    make_model: Callable[[], Any], rows: Any, batch: int = 2, *, shuffle: bool = False, **settings: Any
) -> tuple[Accelerator, Any, Any, Any]:
    """Return an Accelerator, and what it has prepared: model, optimizer and loader."""
    accelerator = Accelerator(**settings)
    model = make_model()
    loader = _loader(rows, batch, shuffle=shuffle)
    return accelerator, *accelerator.prepare(model, _adamw(model.parameters()), loader)


def _clip(accelerator: Accelerator, model: Any) -> None:
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


def _steps(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, *, loss_of: Loss | None = None,
    clip: Callable[[Accelerator, Any], None] | None = _clip, after: Callable[[], Any] = lambda: None,
) -> list[float]:  # fmt: skip
    """Train on the batches, and return the losses. ``after`` is called after each step of the optimizer."""
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"] if loss_of is None else loss_of(model, batch)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                clip(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
            after()
        losses.append(_mean(accelerator, loss))
    return losses


def language_model() -> Any:
    accelerator, model, optimizer, loader = _start(llama, texts())
    return _finish(accelerator, _steps(accelerator, model, optimizer, loader), model)


def model_prepared_first() -> Any:
    accelerator = Accelerator()
    model = accelerator.prepare(llama())
    optimizer, loader = accelerator.prepare(_adamw(model.parameters()), _loader(texts()))
    return _finish(accelerator, _steps(accelerator, model, optimizer, loader), model)


def plain_module() -> Any:
    accelerator, model, optimizer, loader = _start(Regression, numbers())
    return _finish(accelerator, _steps(accelerator, model, optimizer, loader), model)


def accumulate_with_a_rest() -> Any:
    accelerator, model, optimizer, loader = _start(llama, texts(20), gradient_accumulation_steps=3)
    return _finish(accelerator, _steps(accelerator, model, optimizer, loader), model)


def accumulate_without_the_end_of_the_data() -> Any:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator, model, optimizer, loader = _start(llama, texts(12), gradient_accumulation_plugin=plugin)
    losses = _steps(accelerator, model, optimizer, loader) + _steps(accelerator, model, optimizer, loader)
    return _finish(accelerator, losses, model)


def no_sync_by_hand() -> Any:
    accelerator, model, optimizer, loader = _start(llama, texts())
    losses = []
    for number, batch in enumerate(loader):
        if number % 2 == 0:
            with accelerator.no_sync(model):
                loss = model(**batch).loss
                accelerator.backward(loss / 2)
        else:
            loss = model(**batch).loss
            accelerator.backward(loss / 2)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(_mean(accelerator, loss))
    return _finish(accelerator, losses, model)


def norm_of_gradients_logged() -> Any:
    accelerator, model, optimizer, loader = _start(llama, texts(8))
    found: dict[str, float] = {}
    for number, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"{number} loss": _mean(accelerator, loss), f"{number} grad_norm": float(norm)}
    return _finish(accelerator, found, model)


def gradients_clipped_by_value() -> Any:
    def clip(accelerator: Accelerator, model: Any) -> None:
        accelerator.clip_grad_value_(model.parameters(), 0.01)

    accelerator, model, optimizer, loader = _start(llama, texts(8))
    return _finish(accelerator, _steps(accelerator, model, optimizer, loader, clip=clip), model)


def scheduler_prepared() -> Any:
    accelerator = Accelerator()
    model = llama()
    optimizer = _adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=16)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, _loader(texts()), scheduler)
    losses = _steps(accelerator, model, optimizer, loader, clip=None, after=scheduler.step)
    return _finish(accelerator, losses, model)


def metrics_gathered_with_uneven_batches() -> Any:
    accelerator = Accelerator()
    model = llama()
    model, optimizer, loader, test = accelerator.prepare(
        model, _adamw(model.parameters()), _loader(texts(8)), _loader(texts(7, seed=3))
    )
    losses = _steps(accelerator, model, optimizer, loader)
    model.eval()
    found = []
    for batch in test:
        with torch.no_grad():
            output = model(**batch)
        each = nn.functional.cross_entropy(output.logits.transpose(1, 2), batch["labels"], reduction="none").mean(1)
        found.append(accelerator.gather_for_metrics(each))
    numbers_found = torch.cat(found)
    values = {f"{number} loss": loss for number, loss in enumerate(losses)}
    values |= {"num_rows": len(numbers_found), "eval_loss": float(numbers_found.mean())}
    return _finish(accelerator, values, model)


def state_saved_and_loaded() -> Any:
    accelerator, model, optimizer, loader = _start(llama, texts(8))
    losses = _steps(accelerator, model, optimizer, loader)
    accelerator.save_state("state")
    _steps(accelerator, model, optimizer, loader)
    accelerator.load_state("state")
    losses += _steps(accelerator, model, optimizer, loader)
    return _finish(accelerator, losses, model)


def state_loaded_by_another_accelerator() -> Any:
    set_seed(3)
    accelerator, model, optimizer, loader = _start(llama, texts(8))
    losses = _steps(accelerator, model, optimizer, loader)
    accelerator.save_state("state")
    accelerator.free_memory()
    other = llama()
    other, optimizer, loader = accelerator.prepare(other, _adamw(other.parameters()), _loader(texts(8)))
    accelerator.load_state("state")
    losses += _steps(accelerator, other, optimizer, loader)
    return _finish(accelerator, losses, other)


def first_batches_skipped() -> Any:
    accelerator, model, optimizer, loader = _start(llama, texts())
    losses = _steps(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 2))
    return _finish(accelerator, losses, model)


class _BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


def batch_norm_statistics() -> Any:
    accelerator, model, optimizer, loader = _start(_BatchNorm, numbers(), batch=4)
    losses = _steps(accelerator, model, optimizer, loader)
    model.eval()
    with torch.no_grad():
        losses += [_mean(accelerator, model(**batch)["loss"]) for batch in loader]
    return _finish(accelerator, losses, model)


def generator_and_discriminator() -> Any:
    accelerator = Accelerator()
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    generator, critic, first, second, loader = accelerator.prepare(
        generator, critic, _adamw(generator.parameters()), _adamw(critic.parameters()), _loader(numbers())
    )
    losses = []
    for number, batch in enumerate(loader):
        noise = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
        real, fake = critic(batch["x"]), critic(generator(noise).detach())
        loss = nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()
        accelerator.backward(loss)
        second.step()
        second.zero_grad()
        other = nn.functional.softplus(-critic(generator(noise))).mean()
        accelerator.backward(other)
        first.step()
        first.zero_grad()
        second.zero_grad()
        losses += [_mean(accelerator, loss), _mean(accelerator, other)]
    return _finish(accelerator, losses, generator, critic)


def _two_models(accelerator: Accelerator, first: Any, second: Any, optimizer: Any, loader: Any) -> Any:
    losses = []
    for batch in loader:
        hidden = first(batch["x"])
        loss = (second(hidden) - batch["labels"]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(accelerator, loss))
    return _finish(accelerator, losses, first, second)


def one_optimizer_over_two_models() -> Any:
    accelerator = Accelerator()
    first, second = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 1))
    optimizer = _adamw(chain(first.parameters(), second.parameters()))
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, _loader(numbers()))
    return _two_models(accelerator, first, second, optimizer, loader)


def one_optimizer_over_two_prepared_models() -> Any:
    accelerator = Accelerator()
    first, second = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 1))
    first, second, loader = accelerator.prepare(first, second, _loader(numbers()))
    optimizer = accelerator.prepare(_adamw(chain(first.parameters(), second.parameters())))
    return _two_models(accelerator, first, second, optimizer, loader)


def two_models_accumulated() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 1))
    first, second, one, two, loader = accelerator.prepare(
        first, second, _adamw(first.parameters()), _adamw(second.parameters()), _loader(numbers())
    )
    losses = []
    for batch in loader:
        with accelerator.accumulate(first, second):
            loss = (second(first(batch["x"])) - batch["labels"]).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(first.parameters(), 1.0)
                accelerator.clip_grad_norm_(second.parameters(), 1.0)
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
        losses.append(_mean(accelerator, loss))
    return _finish(accelerator, losses, first, second)


def polyak_update_of_a_target() -> Any:
    accelerator = Accelerator()
    model, target = Regression(), Regression()
    target.load_state_dict(model.state_dict())
    model, target, optimizer, loader = accelerator.prepare(
        model, target, _adamw(model.parameters()), _loader(numbers())
    )

    def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            wanted = target(batch["x"])["logits"]
        found = model(**batch)
        return found["loss"] + (found["logits"] - wanted).square().mean()

    @torch.no_grad()
    def update() -> None:
        for ours, theirs in zip(model.parameters(), target.parameters(), strict=True):
            theirs.mul_(0.9).add_(ours, alpha=0.1)

    losses = _steps(accelerator, model, optimizer, loader, loss_of=loss_of, clip=None, after=update)
    return _finish(accelerator, losses, model, target)


def weights_clamped() -> Any:
    @torch.no_grad()
    def clamp() -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)

    accelerator, model, optimizer, loader = _start(Regression, numbers())
    return _finish(accelerator, _steps(accelerator, model, optimizer, loader, clip=None, after=clamp), model)


def joined_uneven_inputs() -> Any:
    accelerator, model, optimizer, loader = _start(Regression, numbers(14))
    with accelerator.join_uneven_inputs([model], even_batches=True):
        losses = _steps(accelerator, model, optimizer, loader)
    return _finish(accelerator, losses, model)


def trigger_set_on_one_rank() -> Any:
    accelerator, model, optimizer, loader = _start(Regression, numbers(32))
    losses = []
    for number, batch in enumerate(loader):
        losses += _steps(accelerator, model, optimizer, [batch])
        if accelerator.is_main_process and number == 3:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return _finish(accelerator, losses, model)


def shuffled_with_seedable_sampler() -> Any:
    set_seed(11)
    accelerator, model, optimizer, loader = _start(llama, texts(), shuffle=True)
    losses = _steps(accelerator, model, optimizer, loader) + _steps(accelerator, model, optimizer, loader)
    return _finish(accelerator, losses, model)


def several_dataloaders() -> Any:
    accelerator = Accelerator()
    model = llama()
    model, optimizer, first, second = accelerator.prepare(
        model, _adamw(model.parameters()), _loader(texts(8)), _loader(texts(8, seed=2))
    )
    losses = []
    for one, two in zip(first, second, strict=True):
        losses += _steps(accelerator, model, optimizer, [one, two])
    return _finish(accelerator, losses, model)


def penalty_on_outputs_and_hidden_states() -> Any:
    def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        output = model(**batch, output_hidden_states=True)
        penalties = output.hidden_states[1].square().mean() + output.logits.square().mean()
        return output.loss + 0.01 * penalties

    accelerator, model, optimizer, loader = _start(llama, texts(8))
    losses = _steps(accelerator, model, optimizer, loader, loss_of=loss_of, clip=None)
    return _finish(accelerator, losses, model)


def whole_state_by_unwrap_model() -> Any:
    accelerator, model, optimizer, loader = _start(Regression, numbers())
    losses = _steps(accelerator, model, optimizer, loader)
    state = accelerator.unwrap_model(model).state_dict()
    whole = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()}
    found = {f"value {name}": float(tensor.norm()) for name, tensor in whole.items()}
    return _finish(accelerator, found | {f"{number} loss": loss for number, loss in enumerate(losses)}, model)


def optimizer_with_several_groups() -> Any:
    accelerator = Accelerator()
    model = llama()
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = _adamw([{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}])
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(texts()))
    return _finish(accelerator, _steps(accelerator, model, optimizer, loader), model)


def adaptive_optimizers_of_torch() -> Any:
    accelerator = Accelerator()
    losses, models = [], []
    for kind in (torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax):
        set_seed(1)
        model = Regression()
        model, optimizer, loader = accelerator.prepare(
            model, kind(model.parameters(), lr=1e-2, eps=EPSILON), _loader(numbers())
        )
        losses += _steps(accelerator, model, optimizer, loader)
        models.append(model)
    return _finish(accelerator, losses, *models)
