"""What is done after some answers: the model is read, and the planner's table is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hf_fsdp_plugin.cli.wizard.conversation import Asker, Hook
from hf_fsdp_plugin.cli.wizard.model_facts import read_model
from hf_fsdp_plugin.cli.wizard.question import State


def read_named_model(state: State, asker: Asker) -> None:
    """Read the model that was named, and show what it is."""
    name = str(state.answers["model"])
    if not name:
        return
    asker.show(f"Reading {name} ...")
    state.model = read_model(name)
    asker.show(state.model.text)


HOOKS: Final[Mapping[str, Hook]] = {"model": read_named_model}
