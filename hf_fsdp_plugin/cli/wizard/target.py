"""The file that is written: its place, its present content, and the atomic write."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.sources import environment
from hf_fsdp_plugin.sources.accelerate_launch import default_config_file
from hf_fsdp_plugin.sources.config_file import ConfigFile, ConfigFiles, read_text
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.sources.yaml_tree import ConfigFileError
from hf_fsdp_plugin.spec.load import Assessment, assess
from hf_fsdp_plugin.vocabulary import TRAINING_FILE_MARKS

STDOUT = "-"
_OTHER_CONFIG = "FSDP-E766"


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
    """Replace the file by the text, atomically, with the permissions of the present file.

    Raises:
        SpecError: the text cannot be written (FSDP-E764). The present file is unchanged.
    """
    assert target.path is not None, "stdout is written by the verb"
    path = Path(os.path.realpath(target.path))  # a link stays a link
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", newline="", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            partial = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        os.replace(partial, path)
    except OSError as error:
        raise _unwritable(target.shown, error.strerror or str(error)) from None
    finally:
        if partial is not None:
            with contextlib.suppress(OSError):
                os.unlink(partial)


def _read(path: Path, shown: str) -> tuple[str, Assessment]:
    file = ConfigFile(path=path, shown=shown)
    try:
        text = read_text(file)
        tree = ConfigFiles().tree(file)
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
