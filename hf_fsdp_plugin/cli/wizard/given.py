"""Answers that are given by options, and settings of ``--set NAME=VALUE``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

from hf_fsdp_plugin.cli.wizard.conversation import BY_NAME, BY_SETTING
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.sources.command_line import read_overrides
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.spec.parse import parse_settings

_DERIVED: Final = {
    "launch.num_processes": "--num-machines and --gpus",
    "launch.distributed_type": "nothing: it is FSDP",
    "mesh.replicate": "--group-size",
}
"""Setting that follows from answers -> what sets it."""


def answers_of_options(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the answers that the options give, as text, and the other settings of ``--set``.

    Raises:
        SpecError: a ``--set`` is not valid, or an answer is given twice.
    """
    given = {name: value for name in BY_NAME if (value := getattr(args, name, None)) is not None}
    own, settings = _split(args.overrides)
    for name, value in own:
        if given.get(name, value) != value:
            raise _invalid(f"{name} is given twice: {given[name]} and {value}.", "Give it once.")
        given[name] = value
    read = read_overrides(Sources(overrides=settings, environ={}))
    level = parse_settings(read) if read is not None else None
    if level is not None and level.problems:
        raise SpecError(level.problems)
    extra: dict[str, Any] = {}
    for setting in level.settings if level is not None else ():
        name, value = setting.name, setting.value
        if name == "sharding.reshard":
            raise _invalid(f"--set {name} is not supported here.", "Use --strategy.")
        if name in _DERIVED:
            raise _invalid(f"--set {name} is not supported here.", f"It is set by {_DERIVED[name]}.")
        if name in BY_SETTING:
            given.setdefault(BY_SETTING[name].name, _text(value))
        else:
            extra[name] = value
    return given, extra


def _split(pairs: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split ``NAME=VALUE`` into answers to questions and settings."""
    answers, settings = [], []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        plain = name.strip().lower().replace("-", "_")
        if equals and plain in BY_NAME:
            answers.append((plain, value))
        else:
            settings.append(pair)
    return answers, settings


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _invalid(message: str, fix: str) -> SpecError:
    return SpecError([Problem(code="FSDP-E762", message=message, fix=fix)])
