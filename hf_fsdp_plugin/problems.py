"""The type of all errors, warnings and notes: their location, what was given and expected, and what to do.

Every problem has a stable code, such as ``FSDP-E201``: the letter is the severity (E, W, N), the first digit the area,
and the number is unique across severities. The pages in ``problem_pages/`` describe each code; ``hf-fsdp explain CODE``
prints one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from hf_fsdp_plugin.text import plural, printable

Severity = Literal["error", "warning", "note"]

_PACKAGES: Final = ("sources", "spec", "plan", "backends", "checkpoint", "observe", "integrations", "cli", "estimate")
AREAS: Final[Mapping[str, str]] = {str(digit): name for digit, name in enumerate(_PACKAGES)}
"""First digit of a code -> the area of the problem, which is the name of the page in ``problem_pages/``."""

CODE: Final = re.compile(r"FSDP-([EWN])([0-8])\d\d")
_SUGGESTION: Final = re.compile(r"Did you mean (?:--)?([^\s?]+)\?")
_SEVERITIES: Final[Mapping[str, Severity]] = {"E": "error", "W": "warning", "N": "note"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The source of a value: file and line, or the name of another source.

    Attributes:
        source: a file name as the user gave it (``fsdp.yaml``), or ``TrainingArguments``, ``command line``,
            ``environment``, ``--set``, ``default``.
        line: 1-based line, if the source is a file.
        spelling: the key as written (``fsdp_sharding_strategy``); empty for defaults.
        text: the value as written (``1``); empty for defaults, ``None`` for a flag without a value (``--cpu``).
    """

    source: str
    line: int | None = None
    spelling: str = ""
    text: str | None = ""

    @property
    def written(self) -> str:
        """Key and value as written: ``fsdp_sharding_strategy=1``, or a flag without a value; empty for defaults."""
        return self.spelling if self.text is None else f"{self.spelling}={self.text}" if self.spelling else ""

    @property
    def source_line(self) -> str:
        """``fsdp.yaml:12``, or the name of a source without lines."""
        return f"{self.source}:{self.line}" if self.line is not None else self.source

    @property
    def file(self) -> str | None:
        """The path of the file as the user gave it; ``None`` for a source that is not a file."""
        name = self.source.removesuffix(_JSON_TEXT)
        is_named = name in NAMED_SOURCES and (self.line is None or name != self.source)
        return None if is_named else self.source

    def to_json(self) -> dict[str, Any]:
        """Return the object ``origin`` of the JSON output."""
        return {
            "source": self.source if self.file is None else "file",
            "file": self.file,
            "line": self.line,
            "key": self.spelling or None,
            "text": self.text if self.spelling else None,
        }

    def __str__(self) -> str:
        return f"{self.source_line} {self.written}" if self.spelling else self.source_line


DEFAULT_ORIGIN = Origin(source="default")

NAMED_SOURCES: Final = (
    "--model", "--set", "Accelerator()", "DistributedConfig", "FullyShardedDataParallelPlugin", "ParallelismConfig",
    "TrainingArguments", "command line", "config", "default", "environment", "the world size",
)  # fmt: skip
"""Sources that are not files."""

_JSON_TEXT: Final = " fsdp_config"
"""Suffix of the source's name if ``fsdp_config`` is given as JSON text: ``TrainingArguments fsdp_config:1``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One error, warning or note.

    Attributes:
        code: stable identifier, such as ``FSDP-E201``; described in ``problem_pages/``.
        message: what was given and what was expected.
        fix: what to do, as one imperative sentence; may be empty for notes.
        setting: canonical name (``wrap.classes``), if the problem is about one setting.
        origin: source of the invalid value.
        rank: the rank that raised the problem, if only some ranks did.
    """

    code: str
    message: str
    fix: str = ""
    setting: str | None = None
    origin: Origin | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        assert CODE.fullmatch(self.code), f"{self.code!r} is not a problem code"

    @property
    def severity(self) -> Severity:
        """An ``error`` stops the run; a ``warning`` or ``note`` is printed and added to the report."""
        return _SEVERITIES[self.code[len("FSDP-")]]

    @property
    def suggestion(self) -> str:
        """The key or value that was probably meant; empty if none is similar to what was written."""
        found = _SUGGESTION.search(self.fix)
        return found[1] if found is not None else ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object in the output of all verbs and in ``fsdp_report.json``."""
        return {
            "code": self.code,
            "severity": self.severity,
            "setting": self.setting,
            "origin": self.origin.to_json() if self.origin is not None else None,
            "message": self.message,
            "fix": self.fix,
            "suggestion": self.suggestion or None,
            **({"rank": self.rank} if self.rank is not None else {}),
        }

    def __str__(self) -> str:
        return self.text("" if self.severity == "error" else f"{self.severity}: ")

    def text(self, label: str) -> str:
        """Return the problem as one printable line, with a label such as ``error: `` after its origin."""
        where = f"{self.origin.source_line}: " if self.origin is not None else ""
        rank = f"rank {self.rank}: " if self.rank is not None else ""
        setting = f"{self.setting}: " if self.setting else ""
        fix = f" {self.fix}" if self.fix else ""
        return printable(f"{where}{label}{rank}{setting}{self.message}{fix} [{self.code}]")


def has_errors(problems: Iterable[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)


MAX_SHOWN: Final = 100
"""Maximum number of problems that are printed one by one."""


def shown_problems(problems: Iterable[Problem]) -> tuple[list[Problem], list[str]]:
    """Return the problems to print one by one, and a line with the number of others by code if there are too many.

    If some are not printed, errors are printed first.
    """
    problems = list(problems)
    if len(problems) <= MAX_SHOWN:
        return problems, []
    problems.sort(key=lambda problem: problem.severity != "error")
    counts = Counter(problem.code for problem in problems[MAX_SHOWN:])
    codes = ", ".join(f"{count:,} × {code}" for code, count in counts.most_common())
    return problems[:MAX_SHOWN], [f"… and {plural(len(problems) - MAX_SHOWN, 'more problem')}: {codes}"]


class UsageError(ValueError):
    """Wrong usage of the command line: exit code 2."""

    def __str__(self) -> str:
        return printable(super().__str__())


class SpecError(ValueError):
    """All problems of a config at once; at least one of them is an error.

    Attributes:
        problems: all problems, including warnings and notes.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        shown, rest = shown_problems(problem for problem in self.problems if problem.severity != "note")
        super().__init__("\n".join([*map(str, shown), *rest]))


class CheckpointError(SpecError):
    """All problems of a checkpoint at once: it is damaged, incomplete, unreadable, missing or of another model."""
