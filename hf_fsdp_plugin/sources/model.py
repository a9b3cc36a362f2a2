"""``Sources``: everything that settings are read from, in one value."""

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
    """The places that settings are read from.

    Attributes:
        config: Accelerate's YAML or JSON, its ``fsdp_config`` section alone, or a dict of either form.
        training_arguments: keyword arguments of ``TrainingArguments``, ``fsdp`` and ``fsdp_config`` among them.
        plugin_object: constructor arguments of Accelerate's ``FullyShardedDataParallelPlugin``; ``None`` if there is no
            such object.
        command_line: flags, those of ``accelerate launch`` among them; unknown flags are ignored.
        overrides: ``NAME=VALUE`` of every ``--set``, as strings or as a mapping.
        environ: environment variables; ``None`` for those of this process.
        default_file: if there is no config, read Accelerate's default file.
        as_launched: if there is no config, read the file of the ``accelerate launch`` that started this process.
        problems: found while the config was located; see :func:`sources.locate.locate_config`.
        files: the config files parsed so far. Copies made with ``dataclasses.replace`` share it.
    """

    config: ConfigFile | Mapping[str, Any] | None = None
    training_arguments: Mapping[str, Any] = field(default_factory=dict)
    plugin_object: Mapping[str, Any] | None = None
    command_line: Sequence[str] = ()
    overrides: Mapping[str, Any] | Sequence[str] = ()
    environ: Mapping[str, str] | None = None
    default_file: bool = False
    as_launched: bool = False
    problems: tuple[Problem, ...] = ()
    files: ConfigFiles = field(default_factory=ConfigFiles, compare=False, repr=False)


def config_of(config: str | Path | ConfigFile | Mapping[str, Any] | None) -> ConfigFile | Mapping[str, Any] | None:
    """A config as users pass it -> ``Sources.config``: paths become absolute."""
    return ConfigFile.at(config) if isinstance(config, (str, os.PathLike)) else config
