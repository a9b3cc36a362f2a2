"""What the machines of a run compare before they start it: two jobs on one port, or two configs, are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import plural, printable


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What all machines of a run must have in common.

    Attributes:
        ranks: on each machine.
        run: the id that the user or the batch system gave the run; empty without one.
        command: script and arguments.
        settings: from outside the script, without those that may differ between machines.
    """

    ranks: int
    device: str
    max_restarts: int
    machines: str
    version: str = ""
    run: str = ""
    command: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    def to_text(self) -> str:
        return json.dumps(asdict(self))


_FIX: Final = "Give every machine the same command, config and package. Give each run a port of its own."
_MAX_DIFFERENCES: Final = 4
_MAX_TEXT: Final = 200


def compare(mine: Facts, text: bytes) -> Problem | None:
    """Return a problem unless this machine is about to run what another one runs.

    Args:
        text: the facts of the other machine (:meth:`Facts.to_text`).
    """
    try:
        other = Facts(**json.loads(text))
        found = _differences(mine, other)
    except (ValueError, TypeError, AttributeError):
        found = ["another machine has another version of this package"]
    if not found:
        return None
    more = f", and {plural(len(found) - _MAX_DIFFERENCES, 'more difference')}" * (len(found) > _MAX_DIFFERENCES)
    message = f"the machines are about to run different things: {'; '.join(found[:_MAX_DIFFERENCES])}{more}."
    return Problem(code="FSDP-E708", message=message, fix=_FIX)


def _differences(mine: Facts, other: Facts) -> list[str]:
    pairs = [
        ("", _ranks(mine), _ranks(other)),
        ("the run ", mine.run or "without an id", other.run or "without an id"),
        ("hf_fsdp_plugin ", mine.version, other.version),
        ("--num_machines ", mine.machines, other.machines),
        ("--max_restarts ", mine.max_restarts, other.max_restarts),
        ("", f"`{mine.command}`", f"`{other.command}`"),
        *((f"{name} ", value, other.settings.get(name, value)) for name, value in mine.settings.items()),
    ]
    return [
        f"this machine has {name}{str(here)[:_MAX_TEXT]}, another one {printable(str(there)[:_MAX_TEXT])}"
        for name, here, there in pairs
        if here != there
    ]


def _ranks(facts: Facts) -> str:
    return f"{plural(facts.ranks, 'rank')} on {facts.device}"
