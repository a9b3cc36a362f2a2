"""The preflight as an observer of its rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from hf_fsdp_plugin.observers import ObservedPhase, Observer
from hf_fsdp_plugin.tools.preflight.stages import preflight

_STAGES: Final = {"clipping": "clip", "checkpoint": "save"}


class PreflightObserver(Observer):
    """Records the stages of calls that this package replaces for every run."""

    may_end_run = True

    def phase(self, phase: ObservedPhase) -> AbstractContextManager[Any]:
        """Return the stage of a phase. Only the first run records stages."""
        records = phase in _STAGES and preflight().active and preflight().phase == "first run"
        return preflight().stage(_STAGES[phase]) if records else nullcontext()
