"""Reads the command line: ``--fsdp``, ``--fsdp-config``, the flags of ``accelerate launch``, and ``--set``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import hf_fsdp_plugin.vocabulary as vocabulary
from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.config_tree import ConfigEntry
from hf_fsdp_plugin.sources.interface import Collector, SourceFamily, Sources, SourceSettings, entry_of
from hf_fsdp_plugin.sources.script_objects import add_fsdp_arguments
from hf_fsdp_plugin.vocabulary import Scope, SettingRow, did_you_mean, find_row, lower, nearest_word

SOURCE = "command line"
OVERRIDES = "--set"
SWITCHES = vocabulary.WORDS["switches"]
"""Flags of ``accelerate launch`` that take no value, not even after ``=``; all other flags take a value."""

SHORT_FLAGS = {"q": "quiet", "m": "module", "t": "tee", "h": "help"}
SETTING_OF_SWITCH: Mapping[str, tuple[str, str]] = vocabulary.TABLES["setting_of_switch"]
LAUNCHER_FLAGS = vocabulary.WORDS["launcher_flags"]
OPTIONAL_VALUE = vocabulary.WORDS["flags_with_optional_value"]
"""Flags of a training script whose value is optional; ``--fsdp`` without a value turns FSDP on."""


class GivenFlag(NamedTuple):
    """One flag of a command line.

    Attributes:
        written: the flag as written, without its value: ``--fsdp-offload-params``.
        name: the name with underscores, without leading dashes: ``fsdp_offload_params``.
        value: ``None`` if the flag has none, which is not the same as ``--flag=``.
        num_words: the number of words of the command line that form the flag.
    """

    written: str
    name: str
    value: str | None
    num_words: int

    @property
    def text(self) -> str:
        """The value, empty if there is none."""
        return "" if self.value is None else self.value

    @property
    def shown(self) -> str:
        """The flag with its value, for messages."""
        return self.written if self.value is None else f"{self.written}={self.value}"


def parse_words(argv: Sequence[str]) -> Iterator[tuple[int, GivenFlag | None]]:
    """Yield each flag of a command line with its position, and ``None`` for each other word."""
    position = 0
    while position < len(argv):
        is_flag = argv[position].startswith("-") and argv[position] not in ("-", "--")
        flag = parse_flag(argv, position) if is_flag else None
        yield position, flag
        position += 1 if flag is None else flag.num_words


def flags_before_script(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the flags in the arguments of ``accelerate launch``, which end at the script."""
    end = next((position for position, flag in parse_words(argv) if flag is None), len(argv))
    return tuple(argv[:end])


def parse_flags(argv: Sequence[str]) -> Iterator[GivenFlag]:
    """Yield the flags of a command line; other words are skipped."""
    return (flag for _, flag in parse_words(argv) if flag is not None)


def read(sources: Sources) -> SourceSettings | None:
    """Read ``sources.command_line``, except ``--set``. An unknown flag is ignored unless it begins with ``--fsdp``."""
    if not sources.command_line:
        return None
    flags, arguments = Collector(SOURCE), Collector(SOURCE)
    given: dict[str, GivenFlag] = {}
    for flag in parse_flags(sources.command_line):
        if flag.name in ("fsdp", "fsdp_config"):
            first = given.setdefault(flag.name, flag)
            if first.value != flag.value:
                message = f"{flag.shown} conflicts with {first.shown}."
                arguments.report("FSDP-E102", flag_entry(flag), message, "Keep one of them.")
        else:
            add_flag(flags, flag)
    fsdp, config = given.get("fsdp"), given.get("fsdp_config")
    entry = flag_entry(fsdp) if fsdp is not None else None
    text, key = (config.text, config.written) if config is not None else (None, "")
    add_fsdp_arguments(arguments, entry, text, config_key=key)
    if fsdp is not None and not arguments.mentions_fsdp and not flags.sets("launch.distributed_type"):
        # --fsdp "" turns FSDP off, and --use_fsdp is not given: flags such as --fsdp_min_num_params are inactive.
        flags.settings = [replace(setting, inactive=setting.enables_fsdp) for setting in flags.settings]
        flags.mentions_fsdp = False
    family: SourceFamily = "training_arguments" if arguments.mentions_fsdp else "accelerate"
    arguments.extend(flags)
    return arguments.result(family)


def flag_name(written: str) -> str:
    """Return the name of a flag that is written with two dashes: in lower case, with underscores, without dashes."""
    return lower(written.removeprefix("--")).replace("-", "_")


def parse_flag(argv: Sequence[str], position: int) -> GivenFlag:
    """Return the flag at a position of a command line, with the next word if it takes a value."""
    word = argv[position]
    written, equals, value = word.partition("=")
    name = flag_name(written) if written.startswith("--") else SHORT_FLAGS.get(written[1:], "")
    following = argv[position + 1] if position + 1 < len(argv) else None
    next_flag = "-" if name in OPTIONAL_VALUE else "--"
    if equals or following is None or name in SWITCHES or following.startswith(next_flag):
        return GivenFlag(written=written, name=name, value=value if equals else None, num_words=1)
    return GivenFlag(written=written, name=name, value=following, num_words=2)


def add_flag(out: Collector, flag: GivenFlag) -> None:
    """Add a flag of ``accelerate launch``, or one of a training script that the vocabulary has."""
    if flag.name in LAUNCHER_FLAGS or flag.name == "set":
        return
    if flag.name in SWITCHES and flag.value is not None:
        message = f"{flag.written} takes no value, but is given {flag.value!r}."
        out.report("FSDP-E054", entry_of(flag.written, flag.value), message, remedy_of_switch(flag.written))
        return
    if flag.name in SETTING_OF_SWITCH:
        setting, value = SETTING_OF_SWITCH[flag.name]
        out.mentions_fsdp |= flag.name == "use_fsdp"
        out.add(setting, flag_entry(flag), value=value)
        return
    if (row := _row_of_flag(flag.name)) is not None:
        out.add_entry(row, flag_entry(flag))
    elif flag.name.lower().startswith(("fsdp", "parallelism_config")):
        nearest = vocabulary.similar_key(flag.name, ("fsdp", "parallelism"))
        fix = did_you_mean(nearest and f"--{nearest}", "Remove it.")
        out.report("FSDP-E020", flag_entry(flag), f"unknown flag '{flag.written}'.", fix)


def flag_entry(flag: GivenFlag) -> ConfigEntry:
    """Return the entry of a flag. A flag whose value is optional is true without one."""
    default = "true" if flag.name in SWITCHES | OPTIONAL_VALUE else ""
    given = flag.value is not None
    return entry_of(flag.written, flag.value if given else default, is_switch=not given)


def remedy_of_switch(written: str) -> str:
    """Return what to do if a flag that takes no value has one. argparse refuses it too."""
    return f"Write {written} alone to turn it on, or leave it out."


def _row_of_flag(name: str) -> SettingRow | None:
    default: Scope = "training" if name in OPTIONAL_VALUE else "launch"
    prefixes = vocabulary.PREFIXES.items()
    scope = next((scope for scope, prefix in prefixes if prefix and name.startswith(prefix)), default)
    row = vocabulary.BY_KEY.get((scope, vocabulary.plain_key(name, scope)))
    return row if row is not None and row.opens is None else None


_ALL_SCOPES: tuple[Scope, ...] = ("launch", "fsdp", "parallelism", "precision", "dynamo", "fp8", "training")


def read_overrides(sources: Sources) -> SourceSettings | None:
    """Read ``sources.overrides`` and the ``--set`` flags of ``sources.command_line``; ``None`` if there are none."""
    out = Collector(OVERRIDES, nulls=())
    given = [sources.overrides] if isinstance(sources.overrides, str) else sources.overrides
    pairs: list[tuple[str, Any]] = list(given.items() if isinstance(given, Mapping) else _split_pairs(given, out))
    pairs += _split_pairs((flag.text for flag in parse_flags(sources.command_line) if flag.name == "set"), out)
    if not pairs and not out.problems and sources.world_size is None:
        return None
    for name, value in pairs:
        entry = entry_of(name, value)
        row = vocabulary.BY_NAME.get(lower(name)) if "." in name else find_row(name, _ALL_SCOPES)
        if row is not None and row.opens is not None and not entry.value.is_mapping:
            fix = "Set one of its settings, such as sharding.strategy=shard_grad_op, or pass --fsdp_config with JSON."
            out.report("FSDP-E020", entry, f"'{name}' is a section, not a setting.", fix)
        elif row is None:
            fix = did_you_mean(_nearest_name(name), "hf-fsdp check --json lists the names.")
            out.report("FSDP-E020", entry, f"unknown setting '{name}'.", fix)
        else:
            out.add_entry(row, entry)
    if sources.world_size is not None:
        flag = Collector(SOURCE)
        flag.add("launch.num_processes", entry_of("--world-size", sources.world_size))
        out.extend(flag)
    return out.result(None)


def _split_pairs(texts: Iterable[Any], out: Collector) -> Iterable[tuple[str, str]]:
    for text in texts:
        name, equals, value = str(text).partition("=")
        if equals and name.strip():
            yield name.strip(), value
        else:
            message = f"'{text}' is not of the form NAME=VALUE."
            fix = "Write, for example, --set sharding.strategy=shard_grad_op."
            out.problems.append(Problem(code="FSDP-E031", message=message, fix=fix, origin=Origin(source=OVERRIDES)))


def _nearest_name(name: str) -> str:
    nearest = nearest_word(name.lower(), [row.name for row in vocabulary.BY_NAME.values() if not row.internal])
    return nearest if "." in name else vocabulary.similar_key(name, _ALL_SCOPES) or nearest
