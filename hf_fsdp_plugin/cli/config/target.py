"""The file that is written: its place and its present content."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.cli.output import write_atomically
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.sources import environment
from hf_fsdp_plugin.sources.interface import ConfigFile, Sources, config_tree, read_text
from hf_fsdp_plugin.sources.launchers import default_config_file
from hf_fsdp_plugin.sources.tree import ConfigFileError
from hf_fsdp_plugin.spec.load import Assessment, assess
from hf_fsdp_plugin.vocabulary import TRAINING_FILE_MARKS

STDOUT: Final = "-"
_OTHER_CONFIG: Final = "FSDP-E766"


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
    found = default_config_file(variables) if name is None else ConfigFile.at(name)
    path = found.path if found is not None else Path(environment.accelerate_cache(variables), "default_config.yaml")
    target = Target(path=path, shown=name or str(path), is_default=name is None)
    folder = path.parent
    while target.is_default and not folder.exists() and folder != folder.parent:  # these folders are made
        folder = folder.parent
    if path.is_dir():
        raise _unwritable(target.shown, "it is a folder")
    if not folder.is_dir():
        raise _unwritable(target.shown, f"{folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(target.shown, f"no permission to write to {folder}")
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


def _unwritable(shown: str, reason: str) -> SpecError:
    message = f"the file cannot be written: {reason}. It was not changed."
    fix = "Choose another path with -o."
    return SpecError([Problem(code="FSDP-E764", message=message, fix=fix, origin=Origin(source=shown))])
