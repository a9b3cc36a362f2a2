"""Loss functions with parameters: ``SoftmaxLoss``, ``GISTEmbedLoss``, ``DenoisingAutoEncoderLoss``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_fsdp_plugin.backends.replicated import replicate
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names


def replicate_parameters_of_losses(trainer: Any) -> None:
    """Keep the parameters of a Trainer's losses on every rank. Collective.

    The model in a loss is sharded as the Trainer's model. In a further trial of a hyperparameter search, the Trainer
    has no model yet, and the losses are those of the first trial.

    Raises:
        SpecError: a loss has modules with weights of the model, which are not sharded with it.
    """
    if trainer.model is None:
        return
    inside = {id(module) for module in trainer.model.modules()} | {id(unwrapped(trainer.model))}
    own = {id(parameter) for parameter in trainer.model.parameters()}
    for loss in _losses(trainer):
        found = {
            f"{path}.{name}".lstrip("."): parameter
            for path, module in loss.named_modules()
            if id(module) not in inside
            for name, parameter in module.named_parameters(recurse=False)
        }
        if tied := [name for name, parameter in found.items() if id(parameter) in own]:
            raise SpecError([_tied(loss, tied)])
        replicate(found.values(), trainer.accelerator.device)


def _losses(trainer: Any) -> Iterator[nn.Module]:
    """Yield the modules in ``trainer.loss``, which may be one for each data set."""
    loss = vars(trainer).get("loss")
    for each in loss.values() if isinstance(loss, dict) else (loss,):
        if isinstance(each, nn.Module):
            yield each


def _tied(loss: nn.Module, names: list[str]) -> Problem:
    return Problem(
        code="FSDP-E654",
        message=f"{type(loss).__name__} has modules with weights of the model ({format_names(names)}). The model is "
        "sharded, so these modules would keep the untrained weights.",
        fix="Untie them (DenoisingAutoEncoderLoss: tie_encoder_decoder=False with a decoder_name_or_path), or train "
        "without FSDP.",
    )
