"""The config of the ``accelerate launch`` that started this process.

Stock ``accelerate launch`` passes on only the variables that it knows. The plugin therefore takes the launcher's
command line from the process table and reads its config file again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources import environment
from hf_fsdp_plugin.sources.command_line import LaunchLine, split_launch
from hf_fsdp_plugin.sources.config_file import ConfigFile
from hf_fsdp_plugin.sources.model import Sources

MAX_PARENTS = 32
MODULES = frozenset({"accelerate.commands.launch", "accelerate.commands.accelerate_cli"})


@dataclass(frozen=True, kw_only=True, slots=True)
class AccelerateLaunch:
    """What ``accelerate launch`` was started with.

    Attributes:
        config: the file that it read; ``None`` if there was none.
        flags: its own flags, as given; read by ``sources.command_line``.
    """

    config: ConfigFile | None
    flags: tuple[str, ...]


def locate_config(sources: Sources) -> Sources:
    """Resolve ``as_launched`` and ``default_file`` to the config that they select.

    If ``accelerate launch`` started this process, its flags are added to the command line. The environment is then no
    longer a source, because the launcher wrote its variables from the config.
    """
    problems = list(sources.problems)
    variables = environment.variables_of(sources)
    if sources.config is None and sources.as_launched:
        launch = find_launch(variables)
        if launch is not None:
            shown = launch.config.shown if launch.config is not None else "the launcher's flags"
            problems.append(
                Problem(
                    code="FSDP-N040",
                    message=f"this process was started by accelerate launch; its settings are read from {shown}.",
                )
            )
            flags = (*launch.flags, *sources.command_line)
            sources = replace(sources, config=launch.config, command_line=flags, environ={})
        elif environment.written_by_accelerate(variables):
            problems.append(_config_not_found())
    if sources.config is None and sources.default_file:
        default = default_config_file(variables)
        sources = replace(sources, config=default)
        if default is None:
            problems.append(_no_default_file(variables))
    return replace(sources, as_launched=False, default_file=False, problems=tuple(problems))


def find_launch(
    variables: Mapping[str, str], *, proc: Path = Path("/proc"), pid: int | None = None
) -> AccelerateLaunch | None:
    """Return the ``accelerate launch`` that started this process; ``None`` if there was none.

    Args:
        variables: the environment variables of this process.
        proc: the process file system. Systems without one (macOS) only find Accelerate's default file.
        pid: the process to start from; this one by default.
    """
    for ancestor in _ancestors(proc, os.getpid() if pid is None else pid):
        if (line := launch_line(_words(proc, ancestor))) is not None:
            return AccelerateLaunch(
                config=_config_of(line, _directory(proc, ancestor)) or default_config_file(variables), flags=line.flags
            )
    if environment.written_by_accelerate(variables) and (default := default_config_file(variables)) is not None:
        return AccelerateLaunch(config=default, flags=())
    return None


def launch_line(words: Sequence[str]) -> LaunchLine | None:
    """Return the arguments of ``accelerate launch`` from a process's command line; ``None`` for other programs."""
    for position, word in enumerate(words[:4]):
        name = os.path.basename(word)
        following = words[position + 1] if position + 1 < len(words) else ""
        if name == "accelerate-launch" or (word in MODULES and word.endswith(".launch")):
            return split_launch(words[position + 1 :])
        if word.replace(os.sep, "/").endswith("accelerate/commands/launch.py"):
            return split_launch(words[position + 1 :])
        if (name == "accelerate" or word in MODULES) and following == "launch":
            return split_launch(words[position + 2 :])
    return None


def default_config_file(variables: Mapping[str, str]) -> ConfigFile | None:
    """Return Accelerate's default config, YAML before JSON; ``None`` if neither exists."""
    folder = Path(environment.accelerate_cache(variables))
    paths = (folder / f"default_config.{suffix}" for suffix in ("yaml", "json"))
    return next((ConfigFile(path=path, shown=str(path)) for path in paths if path.is_file()), None)


def _config_of(line: LaunchLine, directory: Path | None) -> ConfigFile | None:
    """``--config_file``, relative to the launcher's directory: the script may have changed its own."""
    if not line.config_file:
        return None
    return ConfigFile(path=(directory or Path()) / Path(line.config_file).expanduser(), shown=line.config_file)


def _config_not_found() -> Problem:
    return Problem(
        code="FSDP-W041",
        message="this process was started by accelerate launch, whose config file was not found. Only the environment "
        "is read, which contains fewer settings.",
        fix="Use hf-fsdp launch --config_file, or call hf_fsdp_plugin.install(config) in the script.",
        origin=Origin(source=environment.SOURCE),
    )


def _no_default_file(variables: Mapping[str, str]) -> Problem:
    return Problem(
        code="FSDP-E042",
        message=f"no config is given, and {environment.accelerate_cache(variables)} contains no default config.",
        fix="Name a config file, or write the default one with accelerate config.",
    )


def _ancestors(proc: Path, pid: int) -> Sequence[int]:
    found: list[int] = []
    while pid > 1 and len(found) < MAX_PARENTS:
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


def _directory(proc: Path, pid: int) -> Path | None:
    try:
        return Path(os.readlink(proc / str(pid) / "cwd"))
    except OSError:
        return None
