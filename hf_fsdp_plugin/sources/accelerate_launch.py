"""The config of the ``accelerate launch`` that started this process.

Stock ``accelerate launch`` passes on only settings for which it has environment variables. The plugin therefore reads
the launcher's command line from the process table, and then the launcher's config file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources import environment
from hf_fsdp_plugin.sources.command_line import LaunchLine, split_launch
from hf_fsdp_plugin.sources.config_file import ConfigFile
from hf_fsdp_plugin.sources.model import Sources

CONFIG_NOT_FOUND = Problem(
    code="FSDP-W041",
    message="this process was started by accelerate launch, whose config file was not found. Only the environment "
    "is read, which contains fewer settings.",
    fix="Use hf-fsdp launch --config_file, or call hf_fsdp_plugin.install(config) in the script.",
    origin=Origin(source=environment.SOURCE),
)


class AccelerateLaunch(NamedTuple):
    """Arguments of the ``accelerate launch`` command.

    Attributes:
        config: the config file; ``None`` if there is none.
        flags: the launcher's flags, as on the command line.
    """

    config: ConfigFile | None
    flags: tuple[str, ...]


def locate_config(sources: Sources) -> Sources:
    """Return the sources with ``as_launched`` and ``default_file`` replaced by the config that they select.

    If ``accelerate launch`` started this process, its flags are added to the command line, and the environment is
    ignored, because the launcher set the variables from the config.
    """
    problems = list(sources.problems)
    variables = environment.variables_of(sources)
    if sources.config is None and sources.as_launched:
        launch = find_launch(variables)
        if launch is not None:
            shown = launch.config.shown if launch.config is not None else "the launcher's flags"
            message = f"this process was started by accelerate launch; its settings are read from {shown}."
            problems.append(Problem(code="FSDP-N040", message=message))
            flags = (*launch.flags, *sources.command_line)
            sources = replace(sources, config=launch.config, command_line=flags, environ={})
        elif environment.written_by_accelerate(variables):
            problems.append(CONFIG_NOT_FOUND)
    if sources.config is None and sources.default_file:
        default = default_config_file(variables)
        sources = replace(sources, config=default)
        if default is None:
            message = f"no config is given, and {environment.accelerate_cache(variables)} contains no default config."
            fix = "Give a config file, or write the default one with accelerate config."
            problems.append(Problem(code="FSDP-E042", message=message, fix=fix))
    return replace(sources, as_launched=False, default_file=False, problems=tuple(problems))


def find_launch(
    variables: Mapping[str, str], *, proc: Path = Path("/proc"), pid: int | None = None
) -> AccelerateLaunch | None:
    """Return the ``accelerate launch`` that started this process; ``None`` if there was none.

    Args:
        variables: the environment variables of this process.
        proc: the process file system. Without one (macOS), only Accelerate's default file can be found.
        pid: the process whose parents are searched; by default the current one.
    """
    for ancestor in _ancestors(proc, os.getpid() if pid is None else pid):
        if (line := launch_line(_words(proc, ancestor))) is not None:
            config = default_config_file(variables)
            if line.config_file:  # relative to the launcher's working directory
                path = _directory(proc, ancestor) / Path(line.config_file).expanduser()
                config = ConfigFile(path=path, shown=line.config_file)
            return AccelerateLaunch(config=config, flags=line.flags)
    if environment.written_by_accelerate(variables) and (default := default_config_file(variables)) is not None:
        return AccelerateLaunch(config=default, flags=())
    return None


def launch_line(words: Sequence[str]) -> LaunchLine | None:
    """Parse the command line of a process; return ``None`` if it is not ``accelerate launch``."""
    for position, word in enumerate(words[:4]):
        name = os.path.basename(word)
        is_file = word.replace(os.sep, "/").endswith("accelerate/commands/launch.py")
        if is_file or name == "accelerate-launch" or word == "accelerate.commands.launch":
            return split_launch(words[position + 1 :])
        is_command = name == "accelerate" or word == "accelerate.commands.accelerate_cli"
        if is_command and words[position + 1 : position + 2] == ["launch"]:
            return split_launch(words[position + 2 :])
    return None


def default_config_file(variables: Mapping[str, str]) -> ConfigFile | None:
    """Return Accelerate's default config, YAML before JSON; ``None`` if neither exists."""
    folder = Path(environment.accelerate_cache(variables))
    paths = (folder / f"default_config.{suffix}" for suffix in ("yaml", "json"))
    return next((ConfigFile(path=path, shown=str(path)) for path in paths if path.is_file()), None)


def _ancestors(proc: Path, pid: int) -> Sequence[int]:
    found: list[int] = []
    while pid > 1 and len(found) < 32:
        found.append(pid)
        try:
            stat = (proc / str(pid) / "stat").read_text(errors="replace")
            pid = int(stat.rpartition(")")[2].split()[1])  # the name in parentheses may contain spaces
        except (OSError, ValueError, IndexError):
            break
    return found[1:]


def _words(proc: Path, pid: int) -> Sequence[str]:
    try:
        data = (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ()
    return [word.decode(errors="replace") for word in data.split(b"\0")[:-1]]


def _directory(proc: Path, pid: int) -> Path:
    try:
        return Path(os.readlink(proc / str(pid) / "cwd"))
    except OSError:
        return Path()
