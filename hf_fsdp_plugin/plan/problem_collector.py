"""Collects the problems that the plan finds."""

from __future__ import annotations

from collections.abc import Iterable

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.model import FsdpSpec


class ProblemCollector:
    """Collects problems about one spec, so that all of them are reported at once."""

    def __init__(self, spec: FsdpSpec) -> None:
        self._spec = spec
        self._problems: list[Problem] = []

    def add(self, code: str, setting: str | None, message: str, fix: str = "") -> None:
        """Add a problem. Its origin is where ``setting`` was written; a default has no origin."""
        origin = self._spec.origins.get(setting) if setting is not None else None
        self._problems.append(Problem(code=code, message=message, fix=fix, setting=setting, origin=origin))

    def extend(self, problems: Iterable[Problem]) -> None:
        self._problems += problems

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(self._problems)
