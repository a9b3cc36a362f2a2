"""Which sharded models are in a block of ``full_parameters``, and what is refused there."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from hf_fsdp_plugin.problems import Problem, SpecError

_MARK: Final = "_hf_fsdp_has_whole_parameters"
"""Attribute of a sharded model in a block of ``full_parameters``."""


def set_whole(root: nn.Module, whole: bool) -> None:
    setattr(root, _MARK, whole)


def check_not_whole(root: nn.Module, doing: str) -> None:
    """Raise ``SpecError`` if a sharded model is in a block of ``full_parameters``, where its shards are not in use."""
    if getattr(root, _MARK, False):
        raise misuse(f"{doing} inside of a block of full_parameters", "Do it after the block.")


def refuse_forward(root: nn.Module) -> Any:
    """Return a forward pre-hook that refuses calls of the model's modules in the block."""

    def before_forward(*_: Any) -> None:
        check_not_whole(root, "the model was called")

    return before_forward


def misuse(what: str, fix: str) -> SpecError:
    return SpecError([Problem(code="FSDP-E308", message=f"{what}.", fix=fix)])
