"""Reads ``--set NAME=VALUE``. The name is canonical, or a key of any scope."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources import command_line
from hf_fsdp_plugin.sources.collector import Collector, entry_of
from hf_fsdp_plugin.sources.command_line import parse_flags
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.sources.settings import SourceSettings
from hf_fsdp_plugin.spellings import lower
from hf_fsdp_plugin.vocabulary import BY_NAME, Scope, find, suggest

SOURCE = "--set"
ALL_SCOPES: tuple[Scope, ...] = ("launch", "fsdp", "parallelism", "precision", "dynamo", "training")


def read(sources: Sources) -> SourceSettings | None:
    """Read ``sources.overrides`` and the ``--set`` flags of ``sources.command_line``; ``None`` if there are none."""
    out = Collector(SOURCE, nulls=())
    given = [sources.overrides] if isinstance(sources.overrides, str) else sources.overrides
    pairs: list[tuple[str, Any]] = list(given.items() if isinstance(given, Mapping) else _split(given, out))
    pairs += _split((flag.text for flag in parse_flags(sources.command_line) if flag.name == "set"), out)
    if not pairs and not out.problems and sources.world_size is None:
        return None
    for name, value in pairs:
        entry = entry_of(name, value)
        row = BY_NAME.get(lower(name)) if "." in name else find(name, ALL_SCOPES)
        if row is not None and row.opens is not None and not entry.value.is_mapping:
            fix = "Set one of its settings, such as sharding.strategy=shard_grad_op, or pass --fsdp_config with JSON."
            out.report("FSDP-E032", entry, f"'{name}' is a section, not a setting.", fix)
        elif row is None:
            nearest = _nearest(name)
            fix = f"Did you mean {nearest}?" if nearest else "hf-fsdp check --json lists the names."
            out.report("FSDP-E032", entry, f"unknown setting '{name}'.", fix)
        else:
            out.add_entry(row, entry)
    if sources.world_size is not None:
        flag = Collector(command_line.SOURCE)
        flag.add("launch.num_processes", entry_of("--world-size", sources.world_size))
        out.extend(flag)
    return out.result(None)


def _split(texts: Iterable[Any], out: Collector) -> Iterable[tuple[str, str]]:
    for text in texts:
        name, equals, value = str(text).partition("=")
        if equals and name.strip():
            yield name.strip(), value
        else:
            message = f"'{text}' is not of the form NAME=VALUE."
            fix = "Write, for example, --set sharding.strategy=shard_grad_op."
            out.problems.append(Problem(code="FSDP-E031", message=message, fix=fix, origin=Origin(source=SOURCE)))


def _nearest(name: str) -> str:
    names = [row.name for row in BY_NAME.values() if not row.internal]
    nearest = next(iter(difflib.get_close_matches(name.lower(), names, n=1)), "")
    return nearest if "." in name else suggest(name, ALL_SCOPES) or nearest
