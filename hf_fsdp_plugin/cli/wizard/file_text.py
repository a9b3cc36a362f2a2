"""The text of the file: a new one, or an existing one with changed settings. No I/O."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from hf_fsdp_plugin.cli.wizard.settings import Entry
from hf_fsdp_plugin.cli.yaml_edit import Key, YamlText, line_of
from hf_fsdp_plugin.spec.model import FsdpSpec
from hf_fsdp_plugin.vocabulary import Scope, find, plain_key

_TOP: Final[tuple[Scope, ...]] = ("launch", "training", "fsdp", "parallelism")
_SCOPES: Final[Mapping[str, tuple[Scope, ...]]] = {
    "": _TOP,
    "fsdp_config": ("fsdp", "precision", "parallelism"),
    "parallelism_config": ("parallelism",),
}
_SAME: Final[Mapping[str, Collection[str]]] = {
    "sharding.strategy": ("sharding.strategy", "sharding.reshard"),
    "launch.mixed_precision": ("launch.mixed_precision", "launch.fp16", "training.bf16", "training.fp16"),
    "activation.checkpointing": ("activation.checkpointing", "activation.trainer"),
}
"""Setting -> names of the rows whose keys set it."""
OTHER_ENGINES: Final = ("deepspeed_config", "megatron_lm_config", "fp8_config")
"""Sections that FSDP refuses unless they are empty."""

HEADER: Final = "# hf-fsdp config: "
"""Begins each line of the comment at the beginning of a file."""


def new_text(entries: Sequence[Entry], header: Iterable[str], *, is_json: bool = False) -> str:
    """Return the text of a new file.

    Args:
        header: lines of the comment at the beginning.
    """
    sections = list(dict.fromkeys(entry.section for entry in entries))
    if is_json:
        tree: dict[str, Any] = {entry.key: entry.value for entry in entries if not entry.section}
        for section in filter(None, sections):
            tree[section] = {entry.key: entry.value for entry in entries if entry.section == section}
        return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
    lines = [f"{HEADER}{line}" for line in header]
    for section in sections:
        lines += [f"{section}:"] if section else []
        indent = "  " if section else ""
        lines += [
            line_of(entry.key, entry.value, entry.comment, indent) for entry in entries if entry.section == section
        ]
    return "\n".join(lines) + "\n"


def with_header(text: str, header: Iterable[str]) -> str:
    """Return the text with another comment at its beginning, if it has one of this verb."""
    lines = text.splitlines(keepends=True)
    own = [number for number, line in enumerate(lines) if line.startswith(HEADER)]
    if not own:
        return text
    new = [f"{HEADER}{line}\n" for line in header]
    rest = [line for number, line in enumerate(lines) if number > own[0] and number not in own]
    return "".join([*lines[: own[0]], *new, *rest])


def changed_text(
    text: str, entries: Sequence[Entry], unused: Collection[str], present: FsdpSpec, *, is_json: bool = False
) -> str:
    """Return the text of an existing file in which only settings with another value are changed.

    Args:
        entries: the settings that the file shall have.
        unused: canonical names whose keys are removed.
        present: the settings that the file has.
    """
    new = [entry for entry in entries if not (present.asked(entry.name) and present.get(entry.name) == entry.means)]
    if is_json or text.lstrip().startswith("{"):
        tree = _changed_tree(yaml.safe_load(text.replace("\t", " ")), new, unused)
        if is_json or _is_json(text):
            return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    edited = YamlText(text)
    for name in unused:
        while (key := next(_keys_of(edited, name), None)) is not None:
            edited.remove(key)
    for entry in new:
        while len(found := list(_keys_of(edited, entry.name))) > 1:
            edited.remove(found[-1])
        old = found[0] if found else None
        spelling = old.name if old is not None and _has_key(old, entry) else entry.key
        edited.put(entry.section, spelling, entry.value, entry.comment, replaces=old)
    for engine in OTHER_ENGINES:
        for key in [key for key in edited.all_keys() if not key.section and _is(key.name, engine)]:
            if getattr(key.value, "value", None):
                edited.comment_out(key, "Not used with distributed_type: FSDP:")
    return edited.text


def _keys_of(text: YamlText, name: str) -> Iterator[Key]:
    """Return the keys of a text that set a setting."""
    names = _SAME.get(name, (name,))
    for key in text.all_keys():
        row = find(key.name, _SCOPES[key.section]) if key.section in _SCOPES else None
        if row is not None and row.name in names:
            yield key


def _has_key(key: Key, entry: Entry) -> bool:
    """Whether a key of the file is another spelling of the entry's key."""
    row, wanted = find(key.name, _SCOPES[key.section]), find(entry.key, _SCOPES[entry.section])
    return key.section == entry.section and row is not None and wanted is not None and row.name == wanted.name


def _is(written: str, key: str) -> bool:
    return plain_key(written, "launch") == key


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _changed_tree(tree: dict[str, Any], new: Iterable[Entry], unused: Collection[str]) -> dict[str, Any]:
    """Change the content of a file in JSON or in flow style, which has no comments."""
    for name in [*unused, *(entry.name for entry in new)]:
        names = _SAME.get(name, (name,))
        for section, scopes in _SCOPES.items():
            keys = tree if not section else tree.get(section)
            if isinstance(keys, dict):
                rows = {key: find(key, scopes) for key in keys}
                for key in [key for key, row in rows.items() if row is not None and row.name in names]:
                    del keys[key]
    for entry in new:
        if not entry.section:
            tree[entry.key] = entry.value
            continue
        if not isinstance(tree.get(entry.section), dict):
            tree[entry.section] = {}
        tree[entry.section][entry.key] = entry.value
    for engine in OTHER_ENGINES:
        tree.pop(engine, None)
    return tree
