"""The hooks: every function of another library that this package replaces. The table is in ``hooks.yaml``.

Each row contains the replaced function, its replacement, the reason, and when the row can be deleted.
:mod:`hf_fsdp_plugin.integrations.patching` installs and removes the rows; ``docs/hooks.md`` is generated from them. To
hook another function, write its replacement in the file or folder of the library in ``integrations/`` and add a row to
the table (those for TRL and sentence-transformers are beside those for the functions of Accelerate that they resemble).
The rows were checked with accelerate 1.15 and transformers 5.17 to 5.24.

A replacement is called as ``replacement(original, *args, **kwargs)``; the original of a method is bound, and ``self``
is the first of ``args``. A replacement that finds no FSDP settings of this package calls the original.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from hf_fsdp_plugin.contracts import Contract, Without


@dataclass(frozen=True, slots=True)
class Hook:
    """One function or method of another library that is replaced.

    Attributes:
        target: ``module:function`` or ``module:Class.method``.
        replacement: ``module:function``, relative to ``hf_fsdp_plugin.integrations``; imported at the first call.
        reason: why the original is not sufficient.
        until: the change in another library after which the row can be deleted; a key of ``scripts/upstream.yaml``.
        always: whether it runs in every process, for example to find out whether FSDP is asked for. Others run only
            after FSDP was asked for, or while a model is sharded; before, the original runs as it is.
        direct: for functions that are called many times in a step: ``replacement(original)`` is called once, when the
            hook is installed, and returns what replaces the target.
        without: what happens if the library has no such function: the replacement is off with a warning, or the import
            of the library is refused, because settings would be lost or wrong files written.
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
    instead: tuple[str, ...] = ()

    @property
    def contract(self) -> Contract:
        use = f"the replacement {self.replacement}"
        return Contract(target=self.target, without=self.without, use=use, instead=self.instead)

    def name_in(self, owner: Any) -> str | None:
        """Return the name that a module or class has; ``None`` if it has none of them."""
        names = (self.name, *self.instead)
        return next((name for name in names if getattr(owner, name, None) is not None), None)

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def class_name(self) -> str:
        """Name of the class; empty for a module-level function."""
        return self.target.partition(":")[2].rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.target.rpartition(":")[2].rpartition(".")[2]


COLLECTIVES: Final = {
    "allreduce": ("all-reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all-gather (list)", 1),
    "reduce_scatter": ("reduce-scatter (list)", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all-to-all", 1),
    "barrier": ("barrier", None),
    "monitored_barrier": ("monitored barrier", None),
    "allreduce_coalesced": ("all-reduce (coalesced)", 0),
    # torch 2.11 and 2.12 have the other names, and call them.
    "all_gather_single|_allgather_base": ("all-gather", 1),
    "reduce_scatter_single|_reduce_scatter_base": ("reduce-scatter", 1),
    "all_to_all_single|alltoall_base": ("all-to-all", 1),
}
"""Method of a process group -> the operation in messages, and the position of this rank's tensors."""

Group = Literal["accelerate", "transformers", "loading", "calls", "hangs", "phases"]


def _hooks_of(targets: Iterable[str], **fields: Any) -> Iterator[Hook]:
    """Yield the hook of each target of a row in ``hooks.yaml``, which describes the fields."""
    for pattern in targets:
        for collective in COLLECTIVES if "{collective}" in pattern else ("",):
            target, *instead = pattern.replace("{collective}", collective).split("|")
            hook = Hook(target=target, instead=tuple(instead), **fields)
            yield replace(hook, replacement=hook.replacement.replace("*", hook.name))


_TABLE: Final = yaml.load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"),
    Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
HOOKS: Final[Mapping[Group, tuple[Hook, ...]]] = {
    group: tuple(hook for row in rows for hook in _hooks_of(**row)) for group, rows in _TABLE.items()
}
