"""Reads config files, with limits. A file is parsed again only if it changes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_plugin.sources.tree import Node, shorten
from hf_fsdp_plugin.sources.yaml_tree import ConfigFileError, parse_text

MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFile:
    """The path of a config file, independent of the working directory.

    Attributes:
        path: absolute path.
        shown: path as the user wrote it, for messages.
    """

    path: Path
    shown: str

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> ConfigFile:
        """Return the file at `path`, relative to the current working directory."""
        return cls(path=Path(os.path.expanduser(path)).absolute(), shown=str(path))


class ConfigFiles:
    """A cache of parsed config files. A file is parsed again if its size or modification time changes."""

    def __init__(self) -> None:
        self._trees: dict[Path, tuple[tuple[int, int], Node]] = {}

    def tree(self, file: ConfigFile) -> Node:
        """Return the content of `file`. Raises ``ConfigFileError``."""
        version = _version(file.path)
        parsed = self._trees.get(file.path)
        if parsed is None or parsed[0] != version:
            text = _read_text(file.path, file.shown)
            parsed = version, parse_text(text, source=file.shown, is_json=file.path.suffix.lower() == ".json")
            self._trees[file.path] = parsed
        return parsed[1]


def _version(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return (-1, -1)  # _read_text reports the reason
    return status.st_mtime_ns, status.st_size


def _read_text(path: Path, source: str) -> str:
    try:
        if not path.exists():
            fix = "Check the path. accelerate config writes a config file."
            raise ConfigFileError("FSDP-E001", "the file does not exist.", fix, source=source)
        if not path.is_file():
            message = "the path is a directory." if path.is_dir() else "the path is not a regular file."
            raise ConfigFileError("FSDP-E002", message, "Give a YAML or JSON file.", source=source)
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except ConfigFileError:
        raise
    except PermissionError:
        fix = "Change its permissions (chmod u+r)."
        raise ConfigFileError("FSDP-E003", "permission denied.", fix, source=source) from None
    except (OSError, ValueError) as error:
        message = f"the file cannot be read: {getattr(error, 'strerror', None) or error}."
        raise ConfigFileError("FSDP-E003", message, "Check the path.", source=shorten(source)) from None
    if len(data) > MAX_BYTES:
        message = "the file is larger than 1 MiB, the limit for configs."
        raise ConfigFileError("FSDP-E004", message, "Check that the path names a config.", source=source)
    if b"\0" in data:
        raise ConfigFileError("FSDP-E005", "the file is binary.", "Give a YAML or JSON file in UTF-8.", source=source)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = "the file is not UTF-8 text."
        raise ConfigFileError("FSDP-E005", message, "Save it as UTF-8.", source=source, line=line) from None
