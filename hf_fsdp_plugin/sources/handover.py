"""``hf-fsdp launch`` passes its sources to the ranks as JSON in one environment variable, ``HF_FSDP_LAUNCH``.

The launcher sets some of Accelerate's variables for its ranks (``ACCELERATE_USE_CPU`` and others). These are not
settings of the user. The handover therefore contains the user's variables, and a rank reads these instead of
``os.environ``.

::

    {"config": "/abs/fsdp.yaml" | null, "config_shown": "fsdp.yaml" | null, "quiet": false,
     "command_line": ["--fsdp_offload_params=true"], "overrides": ["mesh.shard=2"],
     "report": "/abs/report.json" | null, "report_table": false, "environ": {"FSDP_VERSION": "2"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_plugin.sources.config_file import ConfigFile
from hf_fsdp_plugin.sources.model import Sources

LAUNCH_VARIABLE = "HF_FSDP_LAUNCH"


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
            path, shown = content["config"], content["config_shown"]
            sources = Sources(
                config=ConfigFile(path=Path(path), shown=shown or path) if path is not None else None,
                command_line=tuple(content["command_line"]),
                overrides=tuple(content["overrides"]),
                environ=dict(content["environ"]),
            )
            return cls(
                sources=sources,
                quiet=bool(content["quiet"]),
                report=content["report"],
                report_table=bool(content["report_table"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"the environment variable {LAUNCH_VARIABLE} does not contain a launcher's handover ({error!r}). "
                f"Unset it: only `hf-fsdp launch` and `python -m hf_fsdp_plugin` set it."
            ) from error


def absolute(path: str | None) -> str | None:
    """Make `path` absolute, so that it stays valid when the script changes its working directory."""
    return None if path is None else str(Path(path).expanduser().absolute())
