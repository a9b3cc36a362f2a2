"""Collects the problems that the plan finds."""

from __future__ import annotations

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec


class ProblemCollector:
    """Collects the problems of one spec, so that all of them are reported at once."""

    def __init__(self, spec: FsdpSpec) -> None:
        self._origins = spec.origins
        self.problems: list[Problem] = []

    def add(self, code: str, setting: str | None, message: str, fix: str = "") -> None:
        """Add a problem. Its origin is the source of ``setting``; a default has no origin."""
        origin = self._origins.get(setting) if setting is not None else None
        self.problems.append(Problem(code=code, message=message, fix=fix, setting=setting, origin=origin))
