"""Finds the config of a process: that of the ``accelerate launch`` that started it, or Accelerate's default file.

Stock ``accelerate launch`` passes on only settings for which it has environment variables. The plugin therefore reads
the launcher's command line from the process table, and then the launcher's config file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.command_line import flags_before_script, parse_flags
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.environment_variables import SOURCE, variables_of
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.vocabulary import TRUE_WORDS

CONFIG_NOT_FOUND = Problem(
    code="FSDP-W041",
    message="this process was started by accelerate launch, whose config file was not found. Only the environment "
    "is read, which contains fewer settings.",
    fix="Use hf-fsdp launch --config_file, or call hf_fsdp_plugin.install(config) in the script.",
    origin=Origin(source=SOURCE),
)


def accelerate_cache(variables: Mapping[str, str]) -> str:
    """Return the folder of Accelerate's default config, in ``HF_HOME``, ``XDG_CACHE_HOME`` or ``~/.cache``."""
    home = variables.get("HF_HOME") or os.path.join(variables.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    if home.startswith("~") and "HOME" in variables:
        home = variables["HOME"] + home[1:]
    return os.path.join(os.path.expanduser(home), "accelerate")


def written_by_accelerate(variables: Mapping[str, str]) -> bool:
    """Whether ``accelerate launch`` started this process. It always sets ``ACCELERATE_MIXED_PRECISION``."""
    return "ACCELERATE_MIXED_PRECISION" in variables or "ACCELERATE_USE_FSDP" in variables


def locate_config(sources: Sources) -> tuple[Sources, list[Problem]]:
    """Return the sources with the config that ``as_launched`` and ``default_file`` select, and problems of that.

    If ``accelerate launch`` started this process, its flags are added to the command line, and the environment is
    ignored, because the launcher set the variables from the config.
    """
    problems: list[Problem] = []
    variables = variables_of(sources)
    if variables.get("ACCELERATE_USE_DEEPSPEED", "").lower() in TRUE_WORDS:
        sources = replace(sources, allows_deepspeed=True)  # accelerate launch has started DeepSpeed itself
    if sources.config is None and sources.as_launched:
        if (launch := find_launch(variables)) is not None:
            config, flags = launch
            shown = config.shown if config is not None else "the launcher's flags"
            message = f"this process was started by accelerate launch; its settings are read from {shown}."
            problems.append(Problem(code="FSDP-N040", message=message))
            command_line = (*flags, *sources.command_line)
            sources = replace(sources, config=config, command_line=command_line, environ={}, allows_deepspeed=True)
        elif written_by_accelerate(variables):
            problems.append(CONFIG_NOT_FOUND)
    if sources.config is None and sources.default_file:
        default = default_config_file(variables)
        sources = replace(sources, config=default)
        if default is None:
            message = f"no config is given, and {accelerate_cache(variables)} contains no default config."
            fix = "Give a config file, or write the default one with accelerate config."
            problems.append(Problem(code="FSDP-E042", message=message, fix=fix))
    return sources, problems


def find_launch(variables: Mapping[str, str]) -> tuple[ConfigFile | None, tuple[str, ...]] | None:
    """Return config and flags of the ``accelerate launch`` that is a parent of this process; ``None`` without one."""
    import psutil  # few processes need it

    default = default_config_file(variables)
    with contextlib.suppress(psutil.Error):  # a parent has ended, or belongs to another user
        for process in psutil.Process().parents():
            if (flags := launch_flags(process.cmdline())) is None:
                continue
            named = [flag.text for flag in parse_flags(flags) if flag.name == "config_file" and flag.text]
            if not named:
                return default, flags
            return ConfigFile(path=Path(process.cwd(), os.path.expanduser(named[-1])), shown=named[-1]), flags
    return (default, ()) if written_by_accelerate(variables) and default is not None else None


def launch_flags(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the flags in the command line of a process; ``None`` if it is not ``accelerate launch``."""
    for position, word in enumerate(words[:4]):
        name = os.path.basename(word)
        is_file = word.replace(os.sep, "/").endswith("accelerate/commands/launch.py")
        if is_file or name == "accelerate-launch" or word == "accelerate.commands.launch":
            return flags_before_script(words[position + 1 :])
        is_command = name == "accelerate" or word == "accelerate.commands.accelerate_cli"
        if is_command and words[position + 1 : position + 2] == ["launch"]:
            return flags_before_script(words[position + 2 :])
    return None


def default_config_file(variables: Mapping[str, str]) -> ConfigFile | None:
    """Return Accelerate's default config, YAML before JSON; ``None`` if neither exists."""
    folder = Path(accelerate_cache(variables))
    paths = (folder / f"default_config.{suffix}" for suffix in ("yaml", "json"))
    return next((ConfigFile(path=path, shown=str(path)) for path in paths if path.is_file()), None)
