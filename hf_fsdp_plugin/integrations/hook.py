"""One row of the table of hooks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hook:
    """One function or method of another library that is replaced.

    Attributes:
        target: ``module:function`` or ``module:Class.method``.
        replacement: ``module:function``, relative to ``hf_fsdp_plugin.integrations``; imported at the first call.
        reason: why the original is not sufficient.
        until: the change in the other library, or in this package, after which the row can be deleted.
        direct: for functions that are called many times in a step: ``replacement(original)`` is called once, when the
            hook is installed, and returns what replaces the target. A target that an older version of the library
            lacks is skipped.
    """

    target: str
    replacement: str
    reason: str
    until: str
    direct: bool = False

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def class_name(self) -> str:
        """Name of the class; empty for a module-level function."""
        return self.target.partition(":")[2].rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.target.partition(":")[2].rpartition(".")[2]
