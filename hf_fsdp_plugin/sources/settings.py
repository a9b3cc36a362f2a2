"""The output of the readers: settings with canonical names, values as written, and origins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from hf_fsdp_plugin.problems import Origin, Problem

Dialect = Literal["accelerate", "training_arguments"]
"""Selects the defaults: FSDP1 without wrapping (Accelerate), or FSDP2 with the model's layers (TrainingArguments)."""


ENVIRONMENT: Final = "environment"
"""Name of the source of environment variables."""


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
        return self.origin.written


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSettings:
    """All settings and problems of one source.

    Attributes:
        not_set: settings whose key has the value null, which means that they are not set.
        dialect: selects the defaults; ``None`` if the source does not mention FSDP.
        level: level of precedence; set by ``spec.precedence``.
        inactive: settings that do not enable FSDP, and that apply only if another source enables it: an ``fsdp_config``
            without ``fsdp``, which Transformers ignores.
    """

    settings: tuple[Setting, ...] = ()
    not_set: tuple[Setting, ...] = ()
    problems: tuple[Problem, ...] = ()
    dialect: Dialect | None = None
    level: str = ""
    inactive: SourceSettings | None = None

    @property
    def enables_fsdp(self) -> bool:
        """Whether a setting of this source enables FSDP."""
        return any(enables_fsdp(s.name, s.value, s.origin) for s in self.settings)


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
