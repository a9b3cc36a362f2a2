"""What every reader of settings takes and returns: ``Sources``, with the config files, and ``SourceSettings``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources import tree
from hf_fsdp_plugin.sources.tree import ConfigFileError, Node
from hf_fsdp_plugin.vocabulary import BY_NAME, canonical_setting

MAX_BYTES = 1 << 20
SourceFamily = Literal["accelerate", "training_arguments"]
"""Selects the defaults: FSDP1 without wrapping (Accelerate), or FSDP2 with the model's layers (TrainingArguments)."""
ENVIRONMENT: Final = "environment"
"""Name of the source of environment variables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFile:
    """The path of a config file, independent of the working directory.

    Attributes:
        path: absolute path.
        shown: path as the user wrote it, for messages.
        data: the content, if it was read already, for example from stdin.
        start: a line of the command or call in a script that is meant, if it has several of them.
    """

    path: Path
    shown: str
    data: bytes | None = None
    start: int | None = None

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> ConfigFile:
        """Return the file at `path`, relative to the current working directory. ``train.sh:12`` is a line of a file."""
        found, start = Path(os.path.expanduser(path)).absolute(), None
        name, _, line = found.name.rpartition(":")
        if name and line.isdecimal() and not found.exists():
            found, start = found.with_name(name), int(line)
        return cls(path=found, shown=str(path).removesuffix(f":{start}"), start=start)

    @property
    def is_script(self) -> bool:
        """Whether it is a script of a shell or of Python by its name."""
        return self.path.suffix.lower() in (".sh", ".bash", ".slurm", ".sbatch", ".py")

    @property
    def address(self) -> str:
        """The absolute path, with the line: what :meth:`at` reads."""
        return str(self.path) if self.start is None else f"{self.path}:{self.start}"


def config_tree(file: ConfigFile | Mapping[str, Any]) -> Node:
    """Return the content of a file or dict. Raises ``ConfigFileError``."""
    if isinstance(file, Mapping):
        return tree.from_python(file)
    return tree.parse_text(read_text(file), source=file.shown, is_json=file.path.suffix.lower() == ".json")


def read_text(file: ConfigFile) -> str:
    """Return the text of a config file. Raises ``ConfigFileError``."""
    source = file.shown
    data = file.data if file.data is not None else _read_bytes(file.path, source)
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
        raise ConfigFileError("FSDP-E003", message, "Check the path.", source=tree.one_line(source)) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The sources of settings. Attributes that are also arguments of ``load_spec`` are documented there.

    Attributes:
        training_arguments: keyword arguments of ``TrainingArguments``, including ``fsdp`` and ``fsdp_config``.
        distributed_config: a ``DistributedConfig``, a dict with its fields, or a ``ConfigFile`` with them.
        world_size: the value of ``check --world-size``, a number of ranks with the precedence of ``--set``.
        converted: the settings of `config`, if it is a config of another program that a command has converted. Without
            them, such a config is an error.
        allows_deepspeed: whether `config` may be a file of Accelerate for DeepSpeed, such as that of the ``accelerate
            launch`` that has started this process with DeepSpeed.
        problems: the problems found by :func:`sources.environment.locate_config`.
    """

    config: ConfigFile | Mapping[str, Any] | None = None
    training_arguments: Mapping[str, Any] = field(default_factory=dict)
    plugin_object: Mapping[str, Any] | None = None
    distributed_config: Any = None
    parallelism_config: Any = None
    command_line: Sequence[str] = ()
    overrides: Mapping[str, Any] | Sequence[str] = ()
    world_size: int | None = None
    environ: Mapping[str, str] | None = None
    default_file: bool = False
    as_launched: bool = False
    converted: SourceSettings | None = None
    allows_deepspeed: bool = False
    problems: tuple[Problem, ...] = ()


def config_of(config: str | Path | ConfigFile | Mapping[str, Any] | None) -> ConfigFile | Mapping[str, Any] | None:
    """Convert a config that a user passed to the value of ``Sources.config``."""
    return ConfigFile.at(config) if isinstance(config, (str, os.PathLike)) else config


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of one source.

    Attributes:
        name: canonical name.
        value: the value as written; after ``spec.values.parse_settings``, the typed value.
        implied: whether another setting implies this one (``mixed_precision`` implies ``precision.param``). An explicit
            value of the same source overrides an implied value.
        inactive: whether the setting applies only if another source enables FSDP, such as an ``fsdp_config`` without
            ``fsdp``, which Transformers ignores.
        level: level of precedence; set by ``spec.values.parse_settings``.
    """

    name: str
    value: Any
    origin: Origin
    implied: bool = False
    inactive: bool = False
    level: str = ""

    @property
    def written(self) -> str:
        """Key and value as written: ``fsdp_sharding_strategy=1``."""
        return self.origin.written

    @property
    def enables_fsdp(self) -> bool:
        return not self.inactive and enables_fsdp(self.name, self.value, self.origin)

    def problem(self, code: str, message: str, fix: str = "") -> Problem:
        """Return a problem of this setting, with its origin."""
        return Problem(code=code, message=message, fix=fix, setting=canonical_setting(self.name), origin=self.origin)


@dataclass(kw_only=True, slots=True)
class SourceSettings:
    """All settings and problems of one source.

    Attributes:
        source: name for messages; the path of a file as the user wrote it.
        not_set: settings whose key has the value null, which means that they are not set.
        family: selects the defaults; ``None`` if the source does not mention FSDP.
        level: level of precedence; set by ``spec.load.read_settings``.
        inactive_problems: the problems of inactive settings.
        enables_fsdp: whether a setting enables FSDP, also one with an invalid value.
    """

    source: str = ""
    settings: list[Setting] = field(default_factory=list)
    not_set: list[Setting] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    family: SourceFamily | None = None
    level: str = ""
    inactive_problems: list[Problem] = field(default_factory=list)
    enables_fsdp: bool = False

    def joined(self, other: SourceSettings) -> SourceSettings:
        """Return the settings and problems of both, as those of one source."""
        lists = {name: [*getattr(self, name), *getattr(other, name)] for name in (*_SETTINGS, *_PROBLEMS)}
        enables_fsdp = self.enables_fsdp or other.enables_fsdp
        return replace(self, family=self.family or other.family, enables_fsdp=enables_fsdp, **lists)

    def to_json(self) -> dict[str, Any]:
        """Return settings whose values are typed, and problems, as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SourceSettings:
        """Return what :meth:`to_json` has converted."""
        fields = dict(content)
        for name in _SETTINGS:
            fields[name] = [_setting_from_json(each) for each in content[name]]
        for name in _PROBLEMS:
            fields[name] = [Problem(**{**each, "origin": _origin_from_json(each["origin"])}) for each in content[name]]
        return cls(**fields)


_SETTINGS: Final = ("settings", "not_set")
_PROBLEMS: Final = ("problems", "inactive_problems")


def _setting_from_json(fields: Mapping[str, Any]) -> Setting:
    row, value = BY_NAME.get(fields["name"]), fields["value"]
    if row is not None and row.kind == "names" and value is not None:
        value = tuple(value)
    return Setting(**{**fields, "value": value, "origin": _origin_from_json(fields["origin"])})


def _origin_from_json(fields: Mapping[str, Any] | None) -> Any:
    return None if fields is None else Origin(**fields)


Reader = Callable[[Sources], SourceSettings | None]
"""Reads one source; returns ``None`` if it is not given."""


def enables_fsdp(name: str, value: Any, origin: Origin) -> bool:
    """Whether a setting enables FSDP. A precision or a number of processes does not.

    Environment variables configure FSDP but do not enable it, except ``ACCELERATE_USE_FSDP``: Transformers itself sets
    some of them.
    """
    if name == "launch.distributed_type":
        return str(value).strip().upper() == "FSDP"
    section, _, key = name.partition(".")
    if section == "mesh" and key not in ("shard", "replicate"):
        return False
    return section not in ("launch", "precision", "activation") and origin.source != ENVIRONMENT


def check_arguments(sources: Sources) -> tuple[Problem, ...]:
    """Return an error for each source that has the wrong type, or that is nested too deeply or contains itself."""
    problems = []
    for name, is_valid, expected in _EXPECTED:
        value, origin = getattr(sources, name), Origin(source=name)
        if value is None and name not in ("command_line", "overrides"):
            continue
        if not is_valid(value):
            is_container = isinstance(value, Mapping | Set | list | tuple)
            text = "" if is_container else tree.from_python(value).text or repr(value)
            message = f"{name} is {text or f'a {type(value).__name__} of other values'}; expected {expected}."
            problems.append(Problem(code="FSDP-E055", message=message, fix=f"Pass {expected}.", origin=origin))
            continue
        try:
            if isinstance(value, Mapping):
                tree.from_python(value)
        except ValueError:
            message, fix = f"{name} contains itself or is nested too deeply.", "Pass a dict of plain values."
            problems.append(Problem(code="FSDP-E014", message=message, fix=fix, origin=origin))
    return tuple(problems)


def _are_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _has_names(value: Any) -> bool:
    return isinstance(value, Mapping) and _are_texts(value)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and _are_texts(value)


_EXPECTED: Final[tuple[tuple[str, Callable[[Any], bool], str], ...]] = (
    ("config", lambda value: isinstance(value, ConfigFile | Mapping), "a path or a dict"),
    ("distributed_config", lambda value: isinstance(value, ConfigFile | Mapping) or hasattr(value, "to_dict"),
        "a DistributedConfig, a dict or a path"),
    ("parallelism_config", lambda value: isinstance(value, Mapping) or hasattr(value, "dp_shard_size"),
        "a ParallelismConfig or a dict"),
    ("training_arguments", _has_names, "a dict whose keys are names"),
    ("plugin_object", _has_names, "a dict whose keys are names"),
    ("environ", lambda value: _has_names(value) and _are_texts(value.values()), "a dict of text"),
    ("command_line", _is_list_of_texts, "a list of words, such as ['--fsdp', 'full_shard']"),
    ("overrides", lambda value: isinstance(value, str) or _is_list_of_texts(value) or _has_names(value),
        "a dict whose keys are names, or a list of NAME=VALUE"),
)  # fmt: skip
"""Source -> whether a value of it is valid, and what is expected."""
