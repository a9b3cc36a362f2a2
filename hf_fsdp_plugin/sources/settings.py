"""What every source returns: settings under their canonical names, with values as written and with their origin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from hf_fsdp_plugin.problems import Origin, Problem

Dialect = Literal["accelerate", "training_arguments"]
"""The defaults that apply: FSDP1 and no wrapping for Accelerate, FSDP2 and the model's own layers for
TrainingArguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of one source.

    Attributes:
        name: canonical name.
        value: as written; typed after ``spec.parse.parse_settings``.
        implied: derived from another setting (``mixed_precision`` implies ``precision.param``). An explicit value of
            the same source overrides it.
        level: the source in the order of precedence; set by ``spec.precedence``.
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

    def with_value(self, value: Any) -> Setting:
        return replace(self, value=value)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSettings:
    """All settings and problems of one source.

    Attributes:
        dialect: whose defaults the source brings; ``None`` if it does not mention FSDP.
        level: the source in the order of precedence; set by ``spec.precedence``.
    """

    settings: tuple[Setting, ...] = ()
    problems: tuple[Problem, ...] = ()
    dialect: Dialect | None = None
    level: str = ""
