"""``Sources``: the input of all readers of settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources.config_file import ConfigFile, ConfigFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The sources of settings. Attributes that are also arguments of ``load_spec`` are documented there.

    Attributes:
        training_arguments: keyword arguments of ``TrainingArguments``, including ``fsdp`` and ``fsdp_config``.
        distributed_config: a ``DistributedConfig``, a dict with its fields, or a ``ConfigFile`` with them.
        world_size: the value of ``check --world-size``, a number of ranks with the precedence of ``--set``.
        problems: the problems found by :func:`sources.accelerate_launch.locate_config`.
        files: the config files parsed so far. Copies made with ``dataclasses.replace`` share it.
    """

    config: ConfigFile | Mapping[str, Any] | None = None
    training_arguments: Mapping[str, Any] = field(default_factory=dict)
    plugin_object: Mapping[str, Any] | None = None
    distributed_config: Any = None
    parallelism_config: Any = None
    command_line: Sequence[str] = ()
    overrides: Mapping[str, Any] | Sequence[str] = ()
    world_size: int | None = None
    environ: Mapping[str, str] | None = None
    default_file: bool = False
    as_launched: bool = False
    problems: tuple[Problem, ...] = ()
    files: ConfigFiles = field(default_factory=ConfigFiles, compare=False, repr=False)


def config_of(config: str | Path | ConfigFile | Mapping[str, Any] | None) -> ConfigFile | Mapping[str, Any] | None:
    """Convert a config that a user passed to the value of ``Sources.config``."""
    return ConfigFile.at(config) if isinstance(config, (str, os.PathLike)) else config
