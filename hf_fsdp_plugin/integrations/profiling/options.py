"""What ``hf-fsdp profile`` passes to its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

OPTIONS_VARIABLE: Final = "HF_FSDP_PROFILE"
"""Environment variable with :class:`ProfileOptions` as JSON."""
MAX_TRACES: Final = 8
"""Ranks that keep their trace by default."""
RANKS_FOLDER: Final = "ranks"
TRACES_FOLDER: Final = "traces"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """Which steps are profiled, and what is kept.

    Attributes:
        folder: absolute path of the folder for the result.
        wait: optimizer steps before the profiler starts. The first one initializes FSDP.
        warmup: steps with the profiler that are not analyzed.
        active: steps that are analyzed.
        after: steps without the profiler after them, with which its overhead is measured.
        memory: whether one further step records the memory by kind.
        traces: number of ranks that keep their Chrome trace.
        stops: whether the script ends after these steps.
        raises: whether a failure of the profile ends the script. Otherwise the training continues without it.
    """

    folder: str
    wait: int = 1
    warmup: int = 2
    active: int = 4
    after: int = 3
    memory: bool = True
    traces: int = MAX_TRACES
    stops: bool = True
    raises: bool = True

    @property
    def first_traced(self) -> int:
        """Number of steps after which the profiler starts."""
        return self.wait

    @property
    def last_traced(self) -> int:
        """Number of steps after which it stops."""
        return self.wait + self.warmup + self.active

    @property
    def before_after(self) -> int:
        """Number of steps after which the profiler is not used any more. It pauses for one step before the memory."""
        return self.last_traced + 2 * int(self.memory)

    @property
    def last(self) -> int:
        return self.before_after + self.after

    def to_env(self) -> dict[str, str]:
        return {OPTIONS_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> ProfileOptions | None:
        """Return the options in `environ`; ``None`` if this process is not a rank of ``hf-fsdp profile``."""
        text = environ.get(OPTIONS_VARIABLE)
        return cls(**json.loads(text)) if text else None

    def rank_file(self, rank: int) -> Path:
        return Path(self.folder) / RANKS_FOLDER / f"rank_{rank}.json"

    def trace_file(self, rank: int) -> Path:
        return Path(self.folder) / TRACES_FOLDER / f"rank_{rank}.json.gz"
