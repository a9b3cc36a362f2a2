"""The copy of a Trainer that a preflight resumes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.integrations.transformers.private import untrained_copy


class Callback:
    trainer: Any = None


def trainer(**more: Any) -> Any:
    found = SimpleNamespace(
        model=nn.Linear(2, 2), args=SimpleNamespace(lr=1), optimizer=None, lr_scheduler=None, processing_class=None,
        accelerator=object(), train_dataset=object(), eval_dataset=object(),
        callback_handler=SimpleNamespace(callbacks=[Callback()]),
    )  # fmt: skip
    found.model_wrapped = found.model
    vars(found).update(more)
    return found


def test_copy_has_its_own_model_arguments_and_callbacks() -> None:
    original = trainer()
    fresh = untrained_copy(original)
    assert fresh.model is fresh.model_wrapped is not original.model
    assert torch.equal(fresh.model.weight, original.model.weight)
    assert fresh.args is not original.args and fresh.train_dataset is original.train_dataset
    assert fresh.callback_handler.callbacks[0] is not original.callback_handler.callbacks[0]


def test_callback_of_the_copy_refers_to_the_copy() -> None:
    original = trainer()
    original.callback_handler.callbacks[0].trainer = original
    fresh = untrained_copy(original)
    assert fresh.callback_handler.callbacks[0].trainer is fresh


@pytest.mark.parametrize("in_dict", [False, True])
def test_loss_that_contains_the_model_is_copied_with_it(in_dict: bool) -> None:
    original, reference = trainer(), nn.Linear(2, 2)
    loss = nn.ModuleList([original.model, nn.Linear(2, 1)])
    original.loss, original.reference = {"a": loss} if in_dict else loss, reference
    fresh = untrained_copy(original)
    copied = fresh.loss["a"] if in_dict else fresh.loss
    assert copied[0] is fresh.model and copied[1] is not loss[1]
    assert fresh.reference is reference


def test_trainer_with_an_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer"):
        untrained_copy(trainer(optimizer=object()))
