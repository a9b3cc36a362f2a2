"""The file that is written: its place, its present content, and its new text."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import yaml

from hf_fsdp_plugin.cli.config.settings import SECTIONS, SettingLine
from hf_fsdp_plugin.cli.output import write_atomically
from hf_fsdp_plugin.cli.yaml_edit import Key, change_keys, in_block_style, keys_of, line_of
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.sources import environment
from hf_fsdp_plugin.sources.interface import ConfigFile, Sources, config_tree, read_text
from hf_fsdp_plugin.sources.launchers import default_config_file
from hf_fsdp_plugin.sources.tree import ConfigFileError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import Assessment, assess
from hf_fsdp_plugin.vocabulary import TRAINING_FILE_MARKS, Scope, SettingRow, find_row, plain_key

STDOUT: Final = "-"
_OTHER_CONFIG: Final = "FSDP-E766"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where the config is written.

    Attributes:
        path: ``None`` for stdout.
        shown: as the user named it.
        text: the present content; ``None`` if there is no file.
        present: the settings of the present content.
        is_default: whether it is Accelerate's default file.
    """

    path: Path | None
    shown: str
    text: str | None = None
    present: Assessment | None = None
    is_default: bool = False

    @property
    def is_json(self) -> bool:
        return self.path is not None and self.path.suffix.lower() == ".json"


def find_target(name: str | None, variables: Mapping[str, str], *, force: bool) -> Target:
    """Return the file that is written, with its present content.

    Args:
        name: a path; ``-`` for stdout; ``None`` for Accelerate's default file.
        force: whether a file that cannot be parsed may be replaced.

    Raises:
        SpecError: the place cannot be written, or has a file that cannot be read as a config.
    """
    if name == STDOUT:
        return Target(path=None, shown=STDOUT)
    if name is None:
        found = default_config_file(variables)
        folder = Path(environment.accelerate_cache(variables))
        path = found.path if found is not None else folder / "default_config.yaml"
    else:
        path = ConfigFile.at(name).path
    target = Target(path=path, shown=name or str(path), is_default=name is None)
    _check_place(path, target.shown, create=target.is_default)
    if not os.path.lexists(path):
        return target
    try:
        text, present = _read(path, target.shown)
    except SpecError as error:
        if not force or error.problems[0].code == _OTHER_CONFIG:
            raise
        text, present = "", None
    return replace(target, text=text, present=present)


def assess_text(text: str, target: Target) -> Assessment:
    """Assess a text as the content of the target."""
    path = target.path or Path.cwd() / "stdout.yaml"
    return assess(Sources(config=ConfigFile(path=path, shown=target.shown, data=text.encode()), environ={}))


def write_target(target: Target, text: str) -> None:
    """Replace the file by the text, atomically.

    Raises:
        SpecError: the text cannot be written (FSDP-E764). The present file is unchanged.
    """
    assert target.path is not None, "stdout is written by the verb"
    try:
        target.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target.path, text.encode())
    except OSError as error:
        raise _unwritable(target.shown, error.strerror or str(error)) from None


def _read(path: Path, shown: str) -> tuple[str, Assessment]:
    file = ConfigFile(path=path, shown=shown)
    try:
        text = read_text(file)
        tree = config_tree(file)
    except ConfigFileError as error:
        raise SpecError([error.problem]) from None
    keys = {entry.key.strip().lower() for entry in tree.value}
    if keys & TRAINING_FILE_MARKS and "distributed_type" not in keys:
        message = "this is the config of a training script, not a config of Accelerate."
        fix = "Give another path with -o."
        raise SpecError([Problem(code=_OTHER_CONFIG, message=message, fix=fix, origin=Origin(source=shown))])
    return text, assess(Sources(config=file, environ={}))


def _check_place(path: Path, shown: str, *, create: bool) -> None:
    """Check before the first question that the file can be written."""
    folder = path.parent
    while create and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if path.is_dir():
        raise _unwritable(shown, "it is a folder")
    if not folder.is_dir():
        raise _unwritable(shown, f"{folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(shown, f"no permission to write to {folder}")


def _unwritable(shown: str, reason: str) -> SpecError:
    message = f"the file cannot be written: {reason}. It was not changed."
    return SpecError(
        [Problem(code="FSDP-E764", message=message, fix="Choose another path with -o.", origin=Origin(source=shown))]
    )


def new_text(entries: Sequence[SettingLine], header: Iterable[str], *, is_json: bool = False) -> str:
    """Return the text of a new file.

    Args:
        header: lines of the comment at the beginning.
    """
    lines = [f"{HEADER}{line}" for line in header]
    for section in dict.fromkeys(entry.section for entry in entries):
        indent = "  " if section else ""
        lines += [f"{section}:"] if section else []
        lines += [line_of(each.key, each.value, each.comment, indent) for each in entries if each.section == section]
    text = "\n".join(lines) + "\n"
    return _as_json(text) if is_json else text


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
    text: str, entries: Sequence[SettingLine], unused: Collection[str], present: FsdpSpec, *, is_json: bool = False
) -> str:
    """Return the text of an existing file in which only settings with another value are changed.

    Args:
        entries: the settings that the file shall have.
        unused: canonical names whose keys are removed.
        present: the settings that the file has.
    """
    new = [entry for entry in entries if not (present.asked(entry.name) and present.get(entry.name) == entry.means)]
    is_json |= _is_json(text)
    if is_json or text.lstrip().startswith("{"):  # in flow style, which has no comments
        tree = yaml.safe_load(text.replace("\t", " "))
        if not tree:
            return new_text(new, (), is_json=is_json)
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=1 << 20)
    if any(_changes(text, new, unused)):
        newline = "\r\n" if "\r\n" in text else "\n"
        text = in_block_style(text, SECTIONS.values())
        text = change_keys(text, *_changes(text, new, unused)).replace("\n", newline)
    return _as_json(text) if is_json else text


def _changes(
    text: str, new: Sequence[SettingLine], unused: Collection[str]
) -> tuple[dict[Key, list[str]], dict[str, list[str]]]:
    """Return the other lines of keys, and the lines that are added to each section (see :func:`change_keys`)."""
    keys = keys_of(text)
    rows = {key: find_row(key.name, _SCOPES[key.section]) for key in keys if key.section in _SCOPES}
    replaced: dict[Key, list[str]] = {}
    added: dict[str, list[str]] = {}
    for key in keys:
        if not key.section and plain_key(key.name, "launch") in OTHER_ENGINES and getattr(key.value, "value", None):
            lines = text.splitlines()[key.start : key.stop]
            replaced[key] = ["# Not used with distributed_type: FSDP:", *(f"# {line}" for line in lines)]
    for name in unused:
        replaced |= {key: [] for key in _keys_that_set(name, rows)}
    for entry in new:
        found = _keys_that_set(entry.name, rows)
        replaced |= {key: [] for key in found}
        old = next((key for key in found if key.section == entry.section), None)
        if old is None:
            added.setdefault(entry.section, []).append(line_of(entry.key, entry.value, entry.comment))
        else:
            spelling = old.name if rows[old] == find_row(entry.key, _SCOPES[entry.section]) else entry.key
            replaced[old] = [old.indent + line_of(spelling, entry.value, entry.comment)]
    return replaced, added


def _keys_that_set(name: str, rows: Mapping[Key, SettingRow | None]) -> list[Key]:
    names = _SAME.get(name, (name,))
    return [key for key, row in rows.items() if row is not None and row.name in names]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _as_json(text: str) -> str:
    return json.dumps(yaml.safe_load(text), indent=2, ensure_ascii=False) + "\n"
