"""The arguments of a script in Python that have no meaning under FSDP, or that are refused.

Other arguments are settings, or are left to the library. ``docs/settings.md`` lists all of them, from
``scripts/script_arguments.py``; a test compares that list with the fields of the installed versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Final

from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import Origin, Problem, SpecError, has_errors


@dataclass(frozen=True, slots=True)
class ArgumentRow:
    """Arguments of one class that are noted or refused for the same reason.

    Attributes:
        owner: name of the class.
        written: the arguments, separated by spaces; ``*`` for all.
        about: text for the documentation. After the names of arguments it is also the message.
        code: code of the note or error.
        fix: remedy of an error.
    """

    owner: str
    written: str
    about: str
    code: str = "FSDP-N613"
    fix: str = ""


_DDP: Final = "configures DistributedDataParallel, which FSDP replaces"
_HOOK: Final = "changes the dtype or the algorithm of the gradient reduction of DistributedDataParallel, not of FSDP"
_MSAMP: Final = "configures MS-AMP, which Accelerate does not combine with FSDP"
_ONE_ENGINE: Final = "selects another engine, and FSDP is enabled"

# fmt: off
ROWS: Final = (
    ArgumentRow("Accelerator", "deepspeed_plugin deepspeed_plugins megatron_lm_plugin", _ONE_ENGINE, "FSDP-E120",
                "Keep one of them."),
    ArgumentRow("Accelerator", "torch_tp_plugin", "selects tensor parallelism", "FSDP-E122",
                "Remove it, or train this model without the plugin."),
    ArgumentRow("DistributedDataParallelKwargs", "dim broadcast_buffers bucket_cap_mb find_unused_parameters "
                "check_reduction gradient_as_bucket_view static_graph comm_state_option", _DDP),
    ArgumentRow("DistributedDataParallelKwargs", "comm_hook comm_wrapper", _HOOK, "FSDP-E612",
                "Remove it, and set reduce_dtype in fsdp_mixed_precision_policy."),
    ArgumentRow("InitProcessGroupKwargs", "init_method", "is not the address that the launcher gave the ranks",
                "FSDP-E612", "Remove it, and start the script with a launcher."),
    *(ArgumentRow(owner, "*", _MSAMP, "FSDP-E121", "Pass AORecipeKwargs or TERecipeKwargs instead.")
      for owner in ("MSAMPRecipeKwargs", "FP8RecipeKwargs")),
    ArgumentRow("TrainingArguments", "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
                "ddp_static_graph", _DDP),
    ArgumentRow("TrainingArguments", "deepspeed", _ONE_ENGINE, "FSDP-E120", "Keep one of them."),
)
# fmt: on


def check_object(given: Any, *, source: str) -> Iterator[Problem]:
    """Yield a note or an error for each row of arguments of a dataclass that differ from their defaults.

    Args:
        source: the place for messages: ``Accelerator()`` or ``TrainingArguments``.
    """
    owners = {row.owner for row in ROWS}
    owner = next((kind.__name__ for kind in type(given).__mro__ if kind.__name__ in owners), "")
    yield from check_arguments(owner, given_fields(given), source=source)


def check_arguments(owner: str, given: Mapping[str, Any], *, source: str) -> Iterator[Problem]:
    """Yield a note or an error for each row of the table that has some of the given arguments."""
    for row in ROWS:
        names = given.keys() if row.written == "*" else given.keys() & set(row.written.split())
        shown = {name: _shown(given[name]) for name in sorted(names)}
        if row.owner != owner or not shown:
            continue
        what = ", ".join(f"{name}={value}" for name, value in shown.items())
        first, text = next(iter(shown.items()))
        origin = Origin(source=source, spelling=first, text=text)
        message = f"{what if source.startswith(owner) else f'{owner}({what})'} {row.about}."
        yield Problem(code=row.code, message=message, fix=row.fix, origin=origin)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float | Enum) else type(value).__name__


def print_or_raise(problems: list[Problem]) -> None:
    """Print the notes, or raise ``SpecError`` if there are errors."""
    if has_errors(problems):
        raise SpecError(problems)
    for problem in problems:
        print_once(problem)


def given_fields(given: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    found = {}
    for field in fields(given) if is_dataclass(given) else ():
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        value = getattr(given, field.name, default)
        neutral = (str(default), "env://" if field.name == "init_method" else None)
        if value is not default and value != default and not (isinstance(value, str | Enum) and str(value) in neutral):
            found[field.name] = value
    return found
