"""``hf-fsdp profile`` in a rank, and ``ProfilerCallback``: which steps are profiled, and what is written.

This module contains the options of a profile, and profiles the script of a rank. It imports torch only in such a rank.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

OPTIONS_VARIABLE: Final = "HF_FSDP_PROFILE"
"""Environment variable with :class:`ProfileOptions` as JSON."""
NUM_TRACES: Final = 8
"""Ranks that keep their Chrome trace, from rank 0."""
RANKS_FOLDER: Final = "ranks"
TRACES_FOLDER: Final = "traces"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Which steps are profiled, and what follows.

    Attributes:
        folder: absolute path of the folder for the result.
        wait: optimizer steps before the profiler starts. The first one initializes FSDP.
        warmup: steps with the profiler that are not analyzed.
        active: steps that are analyzed.
        after: steps without the profiler after them, with which its overhead is measured.
        stops: whether the script ends after these steps.
        raises: whether a failure of the profile ends the script. Otherwise the training continues without it.
    """

    folder: str
    wait: int = 1
    warmup: int = 2
    active: int = 4
    after: int = 3
    stops: bool = True
    raises: bool = True

    @property
    def last_traced(self) -> int:
        """Number of steps after which the profiler stops."""
        return self.wait + self.warmup + self.active

    @property
    def last(self) -> int:
        return self.last_traced + self.after

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


@contextlib.contextmanager
def profiled_run() -> Iterator[None]:
    """Profile the script that runs in this context, if the launcher asks for it.

    Raises:
        SpecError: the profile cannot be made or written.
    """
    options = ProfileOptions.from_env(os.environ)
    if options is None:
        yield
        return
    os.environ.pop(OPTIONS_VARIABLE)  # processes that the script starts are not ranks
    from hf_fsdp_plugin.integrations.profiling.run import profiling

    profiling.begin(options)
    try:
        yield
    except BaseException as error:
        profiling.end(failed=not isinstance(error, SystemExit) or error.code not in (None, 0))
        raise
    profiling.end()
