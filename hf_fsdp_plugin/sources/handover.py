"""What ``hf-fsdp launch`` hands over to its ranks: the settings that it has read and checked, and its options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from hf_fsdp_plugin.problems import UsageError
from hf_fsdp_plugin.sources.interface import SourceSettings

LAUNCH_VARIABLE: Final = "HF_FSDP_LAUNCH"
_MAX_BYTES: Final = 131_000
"""Linux limits one variable to 32 pages of 4,096 bytes, with its name (MAX_ARG_STRLEN)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchHandover:
    """The settings that the launcher has read and checked, and its options. A rank reads no source again.

    Attributes:
        given: the settings of each source, with their origins and problems, highest precedence first.
        quiet: whether the ranks print errors only.
        report: absolute path of the report; ``None`` for the default path.
        report_table: whether the tables of the report are printed, instead of a summary.
    """

    given: tuple[SourceSettings, ...]
    quiet: bool = False
    report: str | None = None
    report_table: bool = False

    def to_env(self) -> dict[str, str]:
        """Return the variables to add to a rank's environment. Raises ``UsageError`` if they are too long for it."""
        text = json.dumps(asdict(self))
        if len(text) > _MAX_BYTES:
            settings = (setting for source in self.given for setting in source.settings)
            largest = max(settings, key=lambda setting: len(str(setting.value)))
            message = f"the settings for the ranks need {len(text):,} bytes, and a variable of the environment has at "
            message += f"most {_MAX_BYTES:,}. The longest is {largest.origin.spelling or largest.name}: shorten it, or "
            raise UsageError(f"{message}start the script with torchrun, under which each rank reads the config.")
        return {LAUNCH_VARIABLE: text}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> LaunchHandover | None:
        """Return the handover in `environ`; ``None`` if ``hf-fsdp launch`` did not start this process.

        Raises:
            ValueError: the variable does not contain a handover.
        """
        if (text := environ.get(LAUNCH_VARIABLE)) is None:
            return None
        try:
            content = json.loads(text)
            return cls(given=tuple(SourceSettings.from_json(source) for source in content.pop("given")), **content)
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            message = f"the environment variable {LAUNCH_VARIABLE} does not contain a launcher's handover ({error!r})."
            raise ValueError(f"{message} Unset it: only commands of `hf-fsdp` that start ranks set it.") from error
