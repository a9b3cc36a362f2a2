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
        data: the content, if it was read already, for example from stdin.
    """

    path: Path
    shown: str
    data: bytes | None = None

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
        is_json = file.path.suffix.lower() == ".json"
        if file.data is not None:
            return parse_text(read_text(file), source=file.shown, is_json=is_json)
        version = _version(file.path)
        parsed = self._trees.get(file.path)
        if parsed is None or parsed[0] != version:
            parsed = version, parse_text(read_text(file), source=file.shown, is_json=is_json)
            self._trees[file.path] = parsed
        return parsed[1]


def read_text(file: ConfigFile) -> str:
    """Return the text of a config file. Raises ``ConfigFileError``."""
    data = file.data if file.data is not None else _read_bytes(file.path, file.shown)
    return _decoded(data, file.shown)


def _version(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return (-1, -1)  # _read_bytes reports the reason
    return status.st_mtime_ns, status.st_size


def _read_bytes(path: Path, source: str) -> bytes:
    try:
        if not path.exists():
            fix = "Check the path. accelerate config writes a config file."
            raise ConfigFileError("FSDP-E001", "the file does not exist.", fix, source=source)
        if not path.is_file():
            message = "the path is a directory." if path.is_dir() else "the path is not a regular file."
            raise ConfigFileError("FSDP-E002", message, "Give a YAML or JSON file.", source=source)
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except ConfigFileError:
        raise
    except PermissionError:
        fix = "Change its permissions (chmod u+r)."
        raise ConfigFileError("FSDP-E003", "permission denied.", fix, source=source) from None
    except (OSError, ValueError) as error:
        message = f"the file cannot be read: {getattr(error, 'strerror', None) or error}."
        raise ConfigFileError("FSDP-E003", message, "Check the path.", source=shorten(source)) from None


def _decoded(data: bytes, source: str) -> str:
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
