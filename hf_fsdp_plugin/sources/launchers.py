"""The sources of a process that a launcher started: ``hf-fsdp launch`` or stock ``accelerate launch``.

``hf-fsdp launch`` passes its sources to the ranks as JSON in one environment variable, ``HF_FSDP_LAUNCH``. It sets some
of Accelerate's variables for its ranks (``ACCELERATE_USE_CPU`` and others), which are not settings of the user. The
handover therefore contains the user's variables, and a rank reads these instead of ``os.environ``.

::

    {"config": "/abs/fsdp.yaml" | null, "config_shown": "fsdp.yaml" | null, "quiet": false,
     "command_line": ["--fsdp_offload_params=true"], "overrides": ["mesh.shard=2"],
     "report": "/abs/report.json" | null, "report_table": false, "environ": {"FSDP_VERSION": "2"}}

Stock ``accelerate launch`` passes on only settings for which it has environment variables. The plugin therefore reads
the launcher's command line from the process table, and then the launcher's config file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources import environment
from hf_fsdp_plugin.sources.command_line import flags_before_script, parse_flags
from hf_fsdp_plugin.sources.interface import ConfigFile, Sources

LAUNCH_VARIABLE = "HF_FSDP_LAUNCH"
CONFIG_NOT_FOUND = Problem(
    code="FSDP-W041",
    message="this process was started by accelerate launch, whose config file was not found. Only the environment "
    "is read, which contains fewer settings.",
    fix="Use hf-fsdp launch --config_file, or call hf_fsdp_plugin.install(config) in the script.",
    origin=Origin(source=environment.SOURCE),
)


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
            config, flags = launch
            shown = config.shown if config is not None else "the launcher's flags"
            message = f"this process was started by accelerate launch; its settings are read from {shown}."
            problems.append(Problem(code="FSDP-N040", message=message))
            sources = replace(sources, config=config, command_line=(*flags, *sources.command_line), environ={})
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
    return (default, ()) if environment.written_by_accelerate(variables) and default is not None else None


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
    folder = Path(environment.accelerate_cache(variables))
    paths = (folder / f"default_config.{suffix}" for suffix in ("yaml", "json"))
    return next((ConfigFile(path=path, shown=str(path)) for path in paths if path.is_file()), None)


def user_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that can be settings."""
    prefixes = ("FSDP_", "ACCELERATE_", "PARALLELISM_")
    return {name: value for name, value in environ.items() if name.startswith(prefixes)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchHandover:
    """The sources and options of the launcher.

    Attributes:
        sources: a config file, command line, overrides, and the user's environment variables.
        quiet: whether the ranks print errors only.
        report: absolute path of the report; ``None`` for the default path.
        report_table: whether the tables of the report are printed, instead of a summary.
    """

    sources: Sources
    quiet: bool = False
    report: str | None = None
    report_table: bool = False

    def to_env(self) -> dict[str, str]:
        """Return the variables to add to a rank's environment."""
        file = self.sources.config
        assert file is None or isinstance(file, ConfigFile), "the launcher reads its config from a file"
        content = {
            "config": str(file.path) if file is not None else None,
            "config_shown": file.shown if file is not None else None,
            "quiet": self.quiet,
            "command_line": list(self.sources.command_line),
            "overrides": list(self.sources.overrides),
            "report": self.report,
            "report_table": self.report_table,
            "environ": dict(self.sources.environ or {}),
        }
        return {LAUNCH_VARIABLE: json.dumps(content)}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> LaunchHandover | None:
        """Return the handover in `environ`; ``None`` if ``hf-fsdp launch`` did not start this process.

        Raises:
            ValueError: the variable does not contain a handover.
        """
        text = environ.get(LAUNCH_VARIABLE)
        if text is None:
            return None
        try:
            content = json.loads(text)
            path, shown = content.pop("config"), content.pop("config_shown")
            sources = Sources(
                config=ConfigFile(path=Path(path), shown=shown or path) if path is not None else None,
                command_line=tuple(content.pop("command_line")),
                overrides=tuple(content.pop("overrides")),
                environ=dict(content.pop("environ")),
            )
            return cls(sources=sources, **content)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"the environment variable {LAUNCH_VARIABLE} does not contain a launcher's handover ({error!r}). "
                f"Unset it: only `hf-fsdp launch` and `python -m hf_fsdp_plugin` set it."
            ) from error


def absolute_path(path: str | None) -> str | None:
    """Make `path` absolute, so that it stays valid when the script changes its working directory."""
    return None if path is None else str(Path(path).expanduser().absolute())
