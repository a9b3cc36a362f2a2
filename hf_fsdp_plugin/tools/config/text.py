"""The text of a config for Accelerate: a new file, or other settings in an existing one; and how it is written.

In an existing text everything else stays: order, comments, blanks, quotes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from hf_fsdp_plugin.axes import MODEL_AXES
from hf_fsdp_plugin.checkpoint.file_io import write_atomically
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_value
from hf_fsdp_plugin.vocabulary import BY_NAME, PREFIXES, TABLES, Scope, SettingRow, find_row, plain_key

_STOCK_NAMES: Final = frozenset({"wrap.policy", "prefetch.backward", "checkpoint.state_dict"})
"""Settings whose values stock Accelerate accepts under one name only, such as ``TRANSFORMER_BASED_WRAP``."""
_SECTIONS: Final[Mapping[str, str]] = {"fsdp": "fsdp_config", "parallelism": "parallelism_config"}
"""Scope of a key -> its section in the file."""
_SCOPES: Final[Mapping[str, tuple[Scope, ...]]] = {
    "": ("launch", "training", "fsdp", "parallelism"),
    "fsdp_config": ("fsdp", "precision", "parallelism"),
    "parallelism_config": ("parallelism",),
}
"""Section -> the scopes whose keys it may contain."""
_SAME: Final[Mapping[str, Collection[str]]] = {
    "sharding.strategy": ("sharding.strategy", "sharding.reshard"),
    "launch.mixed_precision": ("launch.mixed_precision", "launch.fp16", "training.bf16", "training.fp16"),
    "activation.checkpointing": ("activation.checkpointing", "activation.trainer"),
}
"""Setting -> names of the rows whose keys set it."""
_OTHER_ENGINES: Final = ("deepspeed_config", "megatron_lm_config")
"""Sections that FSDP refuses unless they are empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingLine:
    """One line of the file.

    Attributes:
        name: canonical name of the setting.
        section: ``fsdp_config`` or ``parallelism_config``; empty at the top level.
        value: what is written: text, a number or a bool.
        means: the value of the setting.
        comment: why; without ``#``.
    """

    name: str
    section: str
    key: str
    value: Any
    means: Any
    comment: str = ""

    @property
    def text(self) -> str:
        return line_of(self.key, self.value, self.comment)


def setting_lines(settings: Mapping[str, Any], version: int, comments: Mapping[str, str]) -> list[SettingLine]:
    """Return the lines that set the settings for stock Accelerate. A setting whose value is "" has no line.

    Args:
        settings: canonical name -> value.
        version: the FSDP version, which determines the key of the strategy.
        comments: canonical name -> why the setting has its value.
    """
    lines = []
    for name, value in settings.items():
        row = BY_NAME[name]
        section, key, written = _SECTIONS.get(row.scope, ""), row.key, value
        if name == "sharding.strategy":
            strategy, key, written = STRATEGIES[value], "fsdp_sharding_strategy", value.upper()
            if version == 2 and strategy.is_sharded and not (strategy.hybrid and strategy.reshards_after_forward):
                key, written = "fsdp_reshard_after_forward", strategy.reshards_after_forward
        elif name.startswith("mesh.") and name != "mesh.context_exchange":
            axis = name.partition(".")[2]
            section, key = "parallelism_config", f"{PREFIXES['parallelism']}{MODEL_AXES.get(axis, f'dp_{axis}')}_size"
        elif name in _STOCK_NAMES and value in row.choices:
            written = next(spelling.upper() for spelling in row.choices[value] if "_" in spelling)
        elif name == "activation.checkpointing":
            written = {"none": False, "full": True}.get(value, value)
        elif isinstance(written, tuple):
            written = ",".join(written)
        if written != "":
            comment = comments.get(name, "")
            lines.append(SettingLine(name=name, section=section, key=key, value=written, means=value, comment=comment))
    return lines


def stock_limits(settings: Mapping[str, Any], version: int, *, gpus: int = 0) -> Iterator[str]:
    """Yield the limits of stock ``accelerate launch`` with these settings, one sentence each.

    Args:
        gpus: the size of the shard axis with which FSDP1 needs no mesh.
    """
    for limit in TABLES["stock_limits"]:
        value = format_value(settings.get(limit["setting"]), "")
        if str(version) in limit["versions"].split() and value in limit["values"].split():
            yield f"Stock Accelerate {limit['text']}."
    if version == 1 and settings.get("mesh.shard", gpus) != gpus:
        yield "Stock Accelerate refuses parallelism_config under FSDP1."
    if settings.get("mesh.tensor", 1) > 1:
        yield "Stock Accelerate divides no layers: the script must load the model with a tensor-parallel plan."
    if settings.get("mesh.expert", 1) > 1:
        yield "Stock Accelerate has no expert axis."


def script_arguments(micro_batch: int, accumulation: int, sync_each_batch: bool) -> list[str]:
    """Return the arguments of a script with TrainingArguments that the file does not contain."""
    sync = """--accelerator_config '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'"""
    sizes = [f"--per_device_train_batch_size {micro_batch}", f"--gradient_accumulation_steps {accumulation}"]
    return [*sizes, sync] if sync_each_batch else sizes


def new_text(lines: Sequence[SettingLine], *, is_json: bool = False) -> str:
    """Return the text of a new file."""
    texts: list[str] = []
    for section in dict.fromkeys(line.section for line in lines):
        own = [line.text for line in lines if line.section == section]
        texts += [f"{section}:", *(f"  {text}" for text in own)] if section else own
    text = "\n".join(texts) + "\n"
    return as_json(text) if is_json else text


def changed_text(text: str, new: Sequence[SettingLine], unused: Collection[str], *, is_json: bool = False) -> str:
    """Return the text of an existing file in which some settings are changed.

    Args:
        new: the settings that have another value or another key.
        unused: canonical names whose keys are removed.
    """
    text, is_json = in_yaml(text, is_json=is_json)
    if not text:
        return new_text(new, is_json=is_json)
    if any(_changes(text, new, unused)):
        newline = "\r\n" if "\r\n" in text else "\n"
        text = in_block_style(text, _SECTIONS.values())
        text = change_keys(text, *_changes(text, new, unused)).replace("\n", newline)
    return as_json(text) if is_json else text


def in_yaml(text: str, *, is_json: bool) -> tuple[str, bool]:
    """Return the text of a config as YAML in block style, and whether it is JSON."""
    with contextlib.suppress(ValueError):
        is_json = isinstance(json.loads(text), dict)
    if is_json or text.lstrip().startswith("{"):  # in flow style, which has no comments
        tree = yaml.safe_load(text.replace("\t", " "))
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=1 << 20) if tree else ""
    return text, is_json


def rows_of(keys: Iterable[Key]) -> dict[Key, SettingRow]:
    """Return key -> its row of the vocabulary, for the keys that have one."""
    known = {key: find_row(key.name, _SCOPES[key.section]) for key in keys if key.section in _SCOPES}
    return {key: row for key, row in known.items() if row is not None}


def _changes(text: str, new: Sequence[SettingLine], unused: Collection[str]) -> Changes:
    keys = keys_of(text)
    rows = rows_of(keys)
    replaced: dict[Key, list[str]] = {}
    added: dict[str, list[str]] = {}
    for key in keys:
        if not key.section and plain_key(key.name, "launch") in _OTHER_ENGINES and getattr(key.value, "value", None):
            lines = text.splitlines()[key.start : key.stop]
            replaced[key] = ["# Not used with distributed_type: FSDP:", *(f"# {line}" for line in lines)]
    set_by = {
        name: [key for key, row in rows.items() if row.name in _SAME.get(name, (name,))]
        for name in (*unused, *(line.name for line in new))
    }
    replaced |= {key: [] for found in set_by.values() for key in found}
    for line in new:
        old = next((key for key in set_by[line.name] if key.section == line.section), None)
        if old is None:
            added.setdefault(line.section, []).append(line.text)
        else:
            spelling = old.name if rows[old] == find_row(line.key, _SCOPES[line.section]) else line.key
            end = old.value.end_mark
            behind = text.splitlines()[end.line][end.column :] if end.line == old.start and not line.comment else ""
            replaced[old] = [old.indent + line_of(spelling, line.value, line.comment) + behind]
    return replaced, added


def as_json(text: str) -> str:
    return json.dumps(yaml.safe_load(text), indent=2, ensure_ascii=False) + "\n"


def line_of(key: str, value: Any, comment: str = "") -> str:
    """Return ``key: value  # comment``, with the quotes that YAML needs: ``'no'`` has quotes, ``true`` has none."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("...\n").strip()
    return f"{key}: {text}{f'  # {comment}' if comment else ''}"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a YAML text whose top level is a mapping in block style.

    Attributes:
        section: the key whose mapping contains it; empty at the top level.
        value: the node of its value.
        indent: the blanks before it.
        start, stop: its lines, from 0, without `stop`.
    """

    section: str
    name: str
    value: Any = field(compare=False)
    indent: str
    start: int
    stop: int


Changes = tuple[dict[Key, list[str]], dict[str, list[str]]]
"""The other lines of keys, and the lines that are added to each section (see :func:`change_keys`)."""


def keys_of(text: str) -> list[Key]:
    """Return the keys of the top level, each followed by the keys of its section."""
    found = []
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, value in root.value:
        found.append(_key("", key, value))
        if isinstance(value, yaml.MappingNode):
            found += [_key(str(key.value), *pair) for pair in value.value]
    return found


def _key(section: str, key: Any, value: Any) -> Key:
    start = key.start_mark
    stop = max(key.end_mark.line + 1, _stop_line(value))
    return Key(section, str(key.value), value, " " * start.column, start.line, stop)


def _stop_line(node: Any) -> int:
    """Return the line after the content of a node. The end mark of a block collection is after its comments."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        return int(node.end_mark.line) + (node.end_mark.column > 0)  # a block scalar ends before a line
    parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
    return max(map(_stop_line, parts))


def in_block_style(text: str, names: Iterable[str]) -> str:
    """Return the text in which these sections have one line per key, also those in flow style: ``{a: 1}``."""
    lines = text.splitlines()
    for key in reversed(keys_of(text)):
        is_section = not key.section and key.name in names and isinstance(key.value, yaml.MappingNode)
        if is_section and key.value.flow_style and key.value.value:
            content = yaml.SafeLoader("").construct_object(key.value, deep=True)
            keys = [f"  {line_of(name, value)}" for name, value in content.items()]
            lines[key.start : key.stop] = [f"{key.name}:", *keys]
    return "\n".join(lines) + "\n"


def change_keys(text: str, replaced: Mapping[Key, Sequence[str]], added: Mapping[str, Sequence[str]]) -> str:
    """Return the text with other lines for some keys, and with new keys at the end of their sections.

    A section without keys is removed. Everything else stays: order, comments, blanks, quotes.

    Args:
        replaced: key in block style -> its lines; without lines, the key is removed.
        added: section, or "" for the top level -> lines of new keys, without indent.
    """
    replaced, keys = dict(replaced), keys_of(text)
    end = list(added.get("", ()))
    edits: list[tuple[int, int, Sequence[str]]] = []
    for owner in [key for key in keys if not key.section]:
        members = [key for key in keys if key.section == owner.name]
        block = [(members[0].indent if members else "  ") + line for line in added.get(owner.name, ())]
        if members and not block and all(replaced.get(key) == [] for key in members):
            replaced = {key: lines for key, lines in replaced.items() if key not in members} | {owner: []}
        elif block and members:
            edits.append((members[-1].stop, members[-1].stop, block))
        elif block:
            edits.append((owner.start, owner.stop, [f"{owner.name}:", *block]))
    for section in added.keys() - {"", *(key.name for key in keys if not key.section)}:
        end += [f"{section}:", *(f"  {line}" for line in added[section])]
    edits = [(keys[-1].stop, keys[-1].stop, end), *edits, *((key.start, key.stop, replaced[key]) for key in replaced)]
    changed = text.splitlines()
    for start, stop, lines in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        changed[start:stop] = lines
    return "\n".join(changed) + "\n"


def check_place(path: Path, shown: str, *, makes_folders: bool = False) -> None:
    """Raise ``SpecError`` if a file cannot be written at a path.

    Args:
        shown: the path in messages.
        makes_folders: whether :func:`write_config` may make folders that do not exist.
    """
    folder = path.parent
    while makes_folders and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if path.is_dir():
        raise _unwritable(shown, "it is a folder")
    if not folder.is_dir():
        raise _unwritable(shown, f"{folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(shown, f"no permission to write to {folder}")


def file_exists_error(shown: str, message: str, option: str) -> SpecError:
    """Return the error of a file that is not replaced without ``--force``."""
    fix = f"Pass --force to change it, or another path with {option}."
    return SpecError([Problem(code="FSDP-E761", message=message, fix=fix, origin=Origin(source=shown))])


def check_new_file(path: Path, shown: str, *, force: bool) -> None:
    """Raise ``SpecError`` if a file that ``--out`` names exists, unless ``force``, or cannot be written."""
    if os.path.lexists(path) and not force and not path.is_dir():
        raise file_exists_error(shown, "the file exists.", "--out")
    check_place(path, shown)


def write_config(path: Path, shown: str, text: str) -> None:
    """Write a config, and the folders that it needs. Raises ``SpecError`` if this fails; then nothing has changed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text, preserve=True)
    except OSError as error:
        raise _unwritable(shown, error.strerror or str(error)) from None


def _unwritable(shown: str, reason: str) -> SpecError:
    message = f"the file cannot be written: {reason}. It was not changed."
    fix = "Choose another path."
    return SpecError([Problem(code="FSDP-E764", message=message, fix=fix, origin=Origin(source=shown))])
