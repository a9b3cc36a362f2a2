"""The environment variables of a rank: its settings, its numbers, its run, and time limits. torch is not needed.

============================  ===============================================================================
``HF_FSDP_LAUNCH``            what ``hf-fsdp launch`` hands over to its ranks (``sources.handover``)
``HF_FSDP_RANK_FILES``        path of a rank's files without their suffix; set by ``hf-fsdp launch``, which reads them
``HF_FSDP_RUN_ID``            id of the run, the same on all machines; set by ``hf-fsdp launch`` or a user
``HF_FSDP_RESTART_COUNT``     number of restarts so far, 0 on the first start; set by ``hf-fsdp launch``
``HF_FSDP_LOG_DIR``           folder of ``--log_dir``
``HF_FSDP_HANG_TIMEOUT``      seconds that a rank may wait in a collective; 0: no watch, no records
``HF_FSDP_ARRIVAL_TIMEOUT``   seconds that a rank waits for the others before a collective call
``HF_FSDP_EXIT_TIMEOUT``      seconds for which threads may keep a rank running after its script has ended
``TORCHELASTIC_ERROR_FILE``   file whose content torch's agent prints at the end of its output
``PET_RDZV_ID``               id that a job of Kubernetes has, if its user sets one
============================  ===============================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from hf_fsdp_plugin.problems import Problem, SpecError

FILES_VARIABLE: Final = "HF_FSDP_RANK_FILES"
RUN_ID_VARIABLE: Final = "HF_FSDP_RUN_ID"
RESTART_VARIABLE: Final = "HF_FSDP_RESTART_COUNT"
LOG_VARIABLE: Final = "HF_FSDP_LOG_DIR"
HANG_LIMIT_VARIABLE: Final = "HF_FSDP_HANG_TIMEOUT"
ARRIVAL_LIMIT_VARIABLE: Final = "HF_FSDP_ARRIVAL_TIMEOUT"
EXIT_LIMIT_VARIABLE: Final = "HF_FSDP_EXIT_TIMEOUT"
ERROR_FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
POD_ID_VARIABLE: Final = "PET_RDZV_ID"
DEFAULT_HANG_LIMIT: Final = 120.0


def launched_rank() -> int:
    """Return ``RANK``; 0 without a launcher."""
    return variable_number(os.environ, "RANK", 0)


def launched_local_rank() -> int:
    """Return ``LOCAL_RANK``, the number of the rank on its machine; 0 without a launcher."""
    return variable_number(os.environ, "LOCAL_RANK", 0)


def launched_world_size() -> int:
    """Return ``WORLD_SIZE``; 1 without a launcher."""
    return variable_number(os.environ, "WORLD_SIZE", 1)


def variable_number(environ: Mapping[str, str], variable: str, default: int = 0) -> int:
    """Return the number in an environment variable; ``default`` if it is absent, or no number."""
    text = environ.get(variable, "").strip()
    return int(text) if text.isdecimal() else default


def hang_limit(flag: str | None = None) -> tuple[float, bool]:
    """Return the limit in seconds (0: off), and whether it was set by the flag or the environment.

    Raises:
        SpecError: the value is not a number of at least 0.
    """
    text = flag if flag is not None else os.environ.get(HANG_LIMIT_VARIABLE, "").strip()
    if not text:
        return DEFAULT_HANG_LIMIT, False
    name = "--hang_timeout" if flag is not None else HANG_LIMIT_VARIABLE
    return _read_seconds(text, name, "seconds, or 0 to switch the diagnosis of hangs off", least=0.0), True


def exit_limit() -> float:
    """Return the limit in seconds. Raises ``SpecError`` if the environment variable is not a positive number."""
    return _read_seconds(os.environ.get(EXIT_LIMIT_VARIABLE, "").strip() or "300", EXIT_LIMIT_VARIABLE)


def arrival_limit(default: float) -> float:
    """Return the limit in seconds. Raises ``SpecError`` if the environment variable is not a positive number."""
    text = os.environ.get(ARRIVAL_LIMIT_VARIABLE, "").strip()
    return _read_seconds(text, ARRIVAL_LIMIT_VARIABLE) if text else default


def _read_seconds(text: str, name: str, expected: str = "seconds", least: float = 1e-9) -> float:
    """Return a time limit. Raises ``SpecError`` with the name of the flag or the variable if it is no such number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if least <= seconds < float("inf"):
        return seconds
    message = f"{name} is {text!r}; expected {expected}."
    raise SpecError([Problem(code="FSDP-E674", message=message, fix="Set it to a number such as 300.")])
