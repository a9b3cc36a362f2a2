"""One row of the table of hooks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hf_fsdp_plugin.contracts import Contract, Without


@dataclass(frozen=True, slots=True)
class Hook:
    """One function or method of another library that is replaced.

    Attributes:
        target: ``module:function`` or ``module:Class.method``.
        replacement: ``module:function``, relative to ``hf_fsdp_plugin.integrations``; imported at the first call.
        reason: why the original is not sufficient.
        until: the change in the other library, or in this package, after which the row can be deleted.
        always: whether it runs in every process, for example to find out whether FSDP is asked for. Others run only
            after FSDP was asked for, or while a model is sharded; before, the original runs as it is.
        direct: for functions that are called many times in a step: ``replacement(original)`` is called once, when the
            hook is installed, and returns what replaces the target.
        without: what happens if the library has no such function: the replacement is off with a warning, or the import
            of the library is refused, because settings would be lost or wrong files written.
        optional: some supported versions of the library do not have the function, so its absence is not reported.
        instead: names that other supported versions have in place of the target's last name. The first name that
            exists is replaced.
    """

    target: str
    replacement: str
    reason: str
    until: str
    always: bool = False
    direct: bool = False
    without: Without = "off"
    optional: bool = False
    instead: tuple[str, ...] = ()

    @property
    def contract(self) -> Contract:
        use = f"the replacement {self.replacement}"
        return Contract(target=self.target, without=self.without, use=use, instead=self.instead)

    def of(self, owner: Any) -> Hook | None:
        """Return the row with the name that its module or class has; ``None`` if it has none of them."""
        names = (self.name, *self.instead)
        found = next((name for name in names if getattr(owner, name, None) is not None or name == "__new__"), None)
        return None if found is None else replace(self, target=self.target.removesuffix(self.name) + found, instead=())

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
