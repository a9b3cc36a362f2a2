"""A config as a tree of nodes with line numbers: from a file, from YAML or JSON text, or from Python objects."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.vocabulary import BLANKS

MAX_TEXT = 80
MAX_NODES = 20_000
MAX_DEPTH = 20
MAX_BITS = 2048
MAX_BYTES = 1 << 20
"""Limits: characters of a value in messages, nodes of a file, levels of nesting, bits of an integer, and bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigEntry:
    """A key of a mapping, with its 1-based line.

    Attributes:
        is_switch: whether the key is a flag without a value, so that the user did not write ``value``.
    """

    key: str
    line: int | None
    value: Node
    is_switch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of the tree: a scalar, a tuple of nodes, or the entries of a mapping.

    Attributes:
        text: the value as written, shortened, for messages.
    """

    value: Any
    line: int | None = None
    text: str = ""

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, Entries)

    @property
    def is_empty(self) -> bool:
        """Whether the value is null, a blank string, or an empty list or mapping."""
        value = self.value.strip(BLANKS) if isinstance(self.value, str) else self.value
        return value is None or value in ("", ())

    @property
    def shown(self) -> str:
        """The value for messages. Strings are quoted, and empty lists and mappings have brackets."""
        if isinstance(self.value, tuple) and not self.value:
            return "{}" if self.is_mapping else "[]"
        return repr(self.text) if isinstance(self.value, str) else self.text

    def plain(self) -> Any:
        """Return the tree as Python objects, without lines."""
        if isinstance(self.value, Entries):
            return {entry.key: entry.value.plain() for entry in self.value}
        if isinstance(self.value, tuple):
            return [item.plain() for item in self.value]
        return self.value


class ObjectText(str):
    """The text of an object such as a dtype, which may be a choice, but is not text that a user wrote."""


class Entries(tuple[ConfigEntry, ...]):
    """The entries of a mapping, in their original order."""


def one_line(text: str) -> str:
    """Return the text as one line of at most ``MAX_TEXT`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def from_python(value: Any, *, depth: int = 0) -> Node:
    """Return the tree of a Python object. Enums and classes become text, as in a file.

    Args:
        depth: level of nesting, in calls of this function by itself.

    Raises:
        SpecError: the object contains itself, or it has too many levels.
    """
    if depth > MAX_DEPTH:
        message, fix = "a value contains itself or is nested too deeply.", "Pass a dict of plain values."
        raise SpecError([Problem(code="FSDP-E055", message=message, fix=fix)])
    if isinstance(value, Mapping):
        nodes = [(_text(key), from_python(item, depth=depth + 1)) for key, item in value.items()]
        return _mapping_node([ConfigEntry(key=key, line=None, value=node) for key, node in nodes])
    if isinstance(value, (list, tuple, Set)):
        items = sorted(value, key=_text) if isinstance(value, Set) else value
        return _list_node([from_python(item, depth=depth + 1) for item in items])
    scalar = _scalar(value)
    return Node(value=scalar, text=one_line(_text(scalar)))


def _mapping_node(entries: Sequence[ConfigEntry], line: int | None = None) -> Node:
    """Return the node of a mapping. Messages show its first entries."""
    first = ", ".join(f"{entry.key}: {entry.value.text}" for entry in entries[:5])
    return Node(value=Entries(entries), line=line, text=one_line(f"{{{first}}}"))


def _list_node(items: Sequence[Node], line: int | None = None) -> Node:
    return Node(value=tuple(items), line=line, text=one_line(", ".join(item.text for item in items)))


def _scalar(value: Any) -> Any:
    if isinstance(value, Enum):  # the values of torch's enums are numbers
        return str(value.value) if isinstance(value.value, str) else value.name
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return ObjectText(f"an integer of {value.bit_length():,} bits")  # Python may refuse to convert it to text
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, type):
        return value.__name__
    try:
        return operator.index(value)
    except TypeError:
        return ObjectText(_text(value))


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # an integer of more digits than Python converts, or an object whose __str__ fails
        return f"a value of the type {type(value).__name__}"


_TOO_DEEP = "the content is nested too deeply or too long for a config.", "Check that the path names a config."


class ConfigFileError(SpecError):
    """A config that cannot be parsed. ``problem`` contains the reason and the remedy."""

    def __init__(self, code: str, message: str, fix: str, *, source: str, line: int | None = None) -> None:
        self.problem = Problem(code=code, message=message, fix=fix, origin=Origin(source=source, line=line))
        super().__init__([self.problem])


def parse_text(text: str, *, source: str) -> Node:
    """Parse YAML or JSON whose top level is a mapping. Raises ``ConfigFileError``; its message names `source`."""
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON may be indented with tabs; YAML may not
    try:
        composed = yaml.compose(text, Loader=yaml.SafeLoader)
        root = Node(value=None) if composed is None else _FromYaml(source).node(composed)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message, fix = "invalid YAML: a control character.", "Remove it."
        raise ConfigFileError("FSDP-E006", message, fix, source=source, line=line) from None
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, source) from None
    except RecursionError:
        raise ConfigFileError("FSDP-E004", *_TOO_DEEP, source=source) from None
    if root.value is None and not root.text:
        fix = "Write at least distributed_type: FSDP and an fsdp_config."
        raise ConfigFileError("FSDP-E008", "the file is empty.", fix, source=source)
    if not root.is_mapping:
        found = "a list" if isinstance(root.value, tuple) else "a single value"
        message = f"the top level is {found}; expected 'key: value' lines."
        fix = "Begin with keys such as distributed_type: FSDP."
        raise ConfigFileError("FSDP-E009", message, fix, source=source, line=root.line)
    return root


def _syntax_error(error: yaml.YAMLError, text: str, source: str) -> ConfigFileError:
    mark: Any = getattr(error, "problem_mark", None)
    lines = text.splitlines()
    # An unclosed bracket is reported after the last line.
    line = max(1, min(mark.line + 1, len(lines))) if mark is not None else None
    reason = " ".join(filter(None, (getattr(error, name, None) for name in ("context", "problem"))))
    if "nesting depth" in reason:  # PyYAML 6.0.4 limits the depth itself
        return ConfigFileError("FSDP-E004", *_TOO_DEEP, source=source, line=line)
    message, fix = f"invalid YAML: {reason or 'the text cannot be parsed'}.", "Correct this line."
    if line is not None and "\t" in "".join(lines[line - 1 : line]):
        message, fix = "invalid YAML: the line contains a tab.", "Indent with spaces."
    return ConfigFileError("FSDP-E006", message, fix, source=source, line=line)


class _FromYaml:
    """Makes a tree of the nodes of PyYAML. Refuses tags, duplicate keys, and excessive depth or size."""

    def __init__(self, source: str) -> None:
        self._source, self._num_nodes = source, 0
        self._constructor = yaml.constructor.SafeConstructor()

    def node(self, node: yaml.Node, depth: int = 0) -> Node:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise self._error("FSDP-E004", *_TOO_DEEP, node)
        if not node.tag.startswith(_STANDARD_TAG) or "/" in node.tag:
            message = f"the YAML tag '{one_line(node.tag)}' is not supported."
            raise self._error("FSDP-E011", message, "Write a plain value.", node)
        if isinstance(node, yaml.ScalarNode):
            return Node(value=self._scalar(node), line=_line(node), text=one_line(node.value))
        if isinstance(node, yaml.SequenceNode):
            return _list_node([self.node(item, depth + 1) for item in node.value], _line(node))
        entries: dict[str, ConfigEntry] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                message = "invalid YAML: a key is a list or a mapping."
                raise self._error("FSDP-E006", message, "Write 'key: value', and put braces in quotes.", key)
            if key.value in entries:
                message = f"the key '{one_line(key.value)}' occurs twice, here and in line {entries[key.value].line}."
                raise self._error("FSDP-E013", message, "Keep one of them.", key)
            entries[key.value] = ConfigEntry(key=key.value, line=_line(key), value=self.node(value, depth + 1))
        return _mapping_node(tuple(entries.values()), _line(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            value = self._constructor.construct_object(node)
        except (yaml.YAMLError, ValueError, ArithmeticError, LookupError):
            return node.value  # for example 2024-99-99, which looks like a date
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not _DECIMAL.fullmatch(node.value):
            return node.value  # YAML 1.1 reads 010 as 8, 8:12 as 492 and 0x10 as 16
        return value if value is None or isinstance(value, (bool, int, float, str)) else node.value

    def _error(self, code: str, message: str, fix: str, node: yaml.Node) -> ConfigFileError:
        return ConfigFileError(code, message, fix, source=self._source, line=_line(node))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


_DECIMAL = re.compile(r"[-+]?(?:0|[1-9]\d*)(?:\.\d+)?(?:e[-+]?\d+)?|[-+]?\.inf|\.nan", re.ASCII | re.IGNORECASE)
_STANDARD_TAG = "tag:yaml.org,2002:"


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

    @property
    def is_script(self) -> bool:
        """Whether it is a script of a shell or of Python by its name."""
        return self.path.suffix.lower() in (".sh", ".bash", ".slurm", ".sbatch", ".py")


def config_tree(file: ConfigFile | Mapping[str, Any]) -> Node:
    """Return the content of a file or dict. Raises ``ConfigFileError``."""
    if isinstance(file, Mapping):
        return from_python(file)
    return parse_text(read_text(file), source=file.shown)


def read_text(file: ConfigFile) -> str:
    """Return the text of a config file. Raises ``ConfigFileError``."""
    source = file.shown
    data = file.data if file.data is not None else _read_bytes(file.path, source)
    if len(data) > MAX_BYTES:
        message = "the file is larger than 1 MiB, the limit for configs."
        raise ConfigFileError("FSDP-E004", message, "Check that the path names a config.", source=source)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = "the file is not UTF-8 text."
        raise ConfigFileError("FSDP-E005", message, "Save it as UTF-8.", source=source, line=line) from None


def _read_bytes(path: Path, source: str) -> bytes:
    try:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        message = "the path is not a regular file." if path.exists() else "the file does not exist."
    except (OSError, ValueError) as error:
        message = f"the file cannot be read: {getattr(error, 'strerror', None) or error}."
        fix = "Check the path and its permissions."
        raise ConfigFileError("FSDP-E003", message, fix, source=one_line(source)) from None
    fix = "Check the path. accelerate config writes a config file."
    raise ConfigFileError("FSDP-E001", message, fix, source=source)
