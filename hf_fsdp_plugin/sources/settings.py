"""The output of the readers: settings with canonical names, values as written, and origins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hf_fsdp_plugin.problems import Origin, Problem

Dialect = Literal["accelerate", "training_arguments"]
"""Selects the defaults: FSDP1 without wrapping (Accelerate), or FSDP2 with the model's layers (TrainingArguments)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of one source.

    Attributes:
        name: canonical name.
        value: the value as written; after ``spec.parse.parse_settings``, the typed value.
        implied: whether another setting implies this one (``mixed_precision`` implies ``precision.param``). An explicit
            value of the same source overrides an implied value.
        level: level of precedence; set by ``spec.precedence``.
    """

    name: str
    value: Any
    origin: Origin
    implied: bool = False
    level: str = ""

    @property
    def written(self) -> str:
        """Key and value as written: ``fsdp_sharding_strategy=1``."""
        return f"{self.origin.spelling}={self.origin.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSettings:
    """All settings and problems of one source.

    Attributes:
        dialect: selects the defaults; ``None`` if the source does not mention FSDP.
        level: level of precedence; set by ``spec.precedence``.
    """

    settings: tuple[Setting, ...] = ()
    problems: tuple[Problem, ...] = ()
    dialect: Dialect | None = None
    level: str = ""
