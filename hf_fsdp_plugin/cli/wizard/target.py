"""The file that is written: its place, its present content, and its new text."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from hf_fsdp_plugin.cli.output import write_atomically
from hf_fsdp_plugin.cli.wizard.settings import Entry
from hf_fsdp_plugin.cli.yaml_edit import Key, YamlText, line_of
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.sources import environment
from hf_fsdp_plugin.sources.interface import ConfigFile, ConfigFiles, Sources, read_text
from hf_fsdp_plugin.sources.launchers import default_config_file
from hf_fsdp_plugin.sources.tree import ConfigFileError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import Assessment, assess
from hf_fsdp_plugin.vocabulary import TRAINING_FILE_MARKS, Scope, find, plain_key

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
        shown = str(path)
    else:
        path, shown = ConfigFile.at(name).path, name
    _check_place(path, shown, create=name is None)
    if not os.path.lexists(path):
        return Target(path=path, shown=shown, is_default=name is None)
    try:
        text, present = _read(path, shown)
    except SpecError as error:
        if not force or error.problems[0].code == _OTHER_CONFIG:
            raise
        text, present = "", None
    return Target(path=path, shown=shown, text=text, present=present, is_default=name is None)


def assess_text(text: str, target: Target) -> Assessment:
    """Assess a text as the content of the target."""
    path = target.path or Path.cwd() / "stdout.yaml"
    return assess(Sources(config=ConfigFile(path=path, shown=target.shown, data=text.encode()), environ={}))


def write(target: Target, text: str) -> None:
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
        tree = ConfigFiles().tree(file, source=shown)
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
        return _json_text(tree)
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
    if is_json or text.lstrip().startswith("{"):  # in flow style, which has no comments
        is_json |= _is_json(text)
        tree = yaml.safe_load(text.replace("\t", " "))
        if not tree:
            return new_text(new, (), is_json=is_json)
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=1 << 20)
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
        for key in [key for key in edited.all_keys() if not key.section and plain_key(key.name, "launch") == engine]:
            if getattr(key.value, "value", None):
                edited.comment_out(key, "Not used with distributed_type: FSDP:")
    return _json_text(yaml.safe_load(edited.text)) if is_json else edited.text


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


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _json_text(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
