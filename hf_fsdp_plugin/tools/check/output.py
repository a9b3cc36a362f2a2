"""``Checked``: a config with its problems and plan, and what ``check`` and ``launch --dry_run`` print of it.

The plan of a model imports torch when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.cli import output
from hf_fsdp_plugin.cli.output import Color, colored
from hf_fsdp_plugin.problems import DEFAULT_ORIGIN, Origin, Problem, SpecError, has_errors
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources, SourceSettings
from hf_fsdp_plugin.spec.fsdp_spec import FAMILY_DEFAULTS, FsdpSpec
from hf_fsdp_plugin.spec.load import assess
from hf_fsdp_plugin.spec.rules import fsdp_is_off
from hf_fsdp_plugin.spec.value_parsers import setting_to_json
from hf_fsdp_plugin.text import format_value, plural, printable, wrap_words
from hf_fsdp_plugin.tools.common import colored_table, wrap_items
from hf_fsdp_plugin.vocabulary import BY_NAME, ROWS, canonical_setting, find_row

if TYPE_CHECKING:
    from torch import nn

    from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
    from hf_fsdp_plugin.tools.preflight.run import PreflightResult

_PARAGRAPH: Final = 110
_ROW_INDENT: Final = 4
"""Width of the line numbers before the keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The settings of all sources, and their problems.

    Attributes:
        config: the config as the user named it; ``None`` if only flags and the environment are checked.
        exit_code: 0 without errors, 1 with errors, 2 if there is no such config.
        converted: the settings of a config of another program.
        run: what ``check --run`` has found.
    """

    config: str | None
    spec: FsdpSpec
    problems: tuple[Problem, ...]
    plan: FsdpPlan | None
    exit_code: int
    converted: SourceSettings | None = None
    run: PreflightResult | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints, without the run, for :func:`print_json`."""
        refused = refused_settings(self.spec, self.problems)
        settings = {
            name: {"value": None, "refused": True, "origin": refused[name]}
            if name in refused
            else {"value": setting_to_json(value), "refused": False, "origin": origin}
            for name, value, origin in self.spec.settings()
        }
        return {
            "ok": not has_errors(self.problems),
            "config": self.config,
            "enabled": self.spec.enabled,
            "settings": settings,
            "problems": self.problems,
            "plan": self.plan,
        }

    def print_text(self, *blocks: str) -> None:
        """Print the problems, the settings, the plan, further blocks, the stages of a preflight and the verdict."""
        output.print_problems(self.problems)
        # If the config could not be read, a table of defaults would hide the reason.
        table = settings_table(self.spec, self.problems, self.config) if self.spec.origins else ""
        plan = self.plan.text(width=output.text_width()) if self.plan is not None else ""
        stages = ""
        if self.run is not None:
            from hf_fsdp_plugin.tools.preflight.run import stage_table

            stages = stage_table(self.run)
        verdict = verdict_line(self.spec, self.problems, self.config or "flags")
        print("\n\n".join(filter(None, [table, plan, *blocks, stages, verdict])))


def check_sources(
    sources: Sources,
    find_plan: Callable[[FsdpSpec], tuple[FsdpPlan | None, Sequence[Problem]]] = lambda spec: (None, ()),
) -> Checked:
    """Return the spec of the sources with all problems.

    Args:
        find_plan: returns the plan, if there is one, and its problems. It is called for a spec without errors.
    """
    assessment = assess(sources)
    spec, problems, plan = assessment.spec, list(assessment.problems), None
    if assessment.ok:
        if not spec.enabled and not spec.uses_xla:
            problems.append(fsdp_is_off(spec))
        plan, more = find_plan(spec)
        problems += more
    if not has_errors(problems):
        problems += _check_defaults_without_script(spec)
    config = sources.config.shown if isinstance(sources.config, ConfigFile) else None
    found = tuple(output.in_line_order(dict.fromkeys(problems)))
    code = output.exit_code(found, config)
    return Checked(config=config, spec=spec, problems=found, plan=plan, exit_code=code, converted=sources.converted)


def plan_of_model(
    spec: FsdpSpec, model: str, *, world_size: int, device_type: str
) -> tuple[FsdpPlan | None, tuple[Problem, ...]]:
    """Return the plan and its problems; no plan if a problem is an error, or if the model cannot be built.

    Args:
        model: a folder with a ``config.json``, or a hub id.
    """
    try:
        built = load_meta_model(model)
    except SpecError as error:
        return None, error.problems
    return plan_with_problems(spec, built, world_size=world_size, device_type=device_type)


def plan_with_problems(
    spec: FsdpSpec, model: nn.Module, *, world_size: int, device_type: str
) -> tuple[FsdpPlan | None, tuple[Problem, ...]]:
    """Return the plan and its problems; no plan if a problem is an error."""
    from hf_fsdp_plugin.plan.padding import with_padding_warning
    from hf_fsdp_plugin.plan.resolve import resolve

    try:
        plan = with_padding_warning(resolve(spec, model, world_size=world_size, device_type=device_type), model)
    except SpecError as error:
        return None, error.problems
    return plan, plan.problems


def load_meta_model(model: str) -> nn.Module:
    """Return the model on the meta device. Raises ``SpecError`` if it does not exist or cannot be built (FSDP-E709)."""
    from hf_fsdp_plugin.tools.meta_model import meta_model

    with reading_model(model):
        return meta_model(model)


@contextmanager
def reading_model(model: str) -> Iterator[None]:
    """Raise ``SpecError`` (FSDP-E709) if the block fails because a model does not exist or cannot be built."""
    try:
        yield
    except SpecError:
        raise
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split())
        has_advice = any(f"{word} " in message for word in ("Give", "Correct", "Name"))
        fix = "" if has_advice else "Give a directory with a config.json, or the name of a model in the local cache."
        origin = Origin(source="--model", spelling="--model", text=model)
        raise SpecError([Problem(code="FSDP-E709", message=message, fix=fix, origin=origin)]) from error


def settings_table(spec: FsdpSpec, problems: Sequence[Problem], shown: str | None) -> str:
    """Return the settings that a source sets, one per line with its origin, then the defaults in one paragraph.

    The defaults of FSDP are omitted if FSDP is not enabled.

    Args:
        shown: the config as the user named it. Its name is the heading of the last column, and is not repeated.
    """
    refused = refused_settings(spec, problems)
    width = output.text_width()
    rows: list[tuple[str, str, Origin]] = []
    defaults = []
    for name, value, origin in spec.settings():
        if name in refused:
            rows.append((name, "refused", refused[name]))
        elif spec.asked(name):
            rows.append((name, format_value(value), origin))
        elif spec.enabled and not name.startswith(("launch.", "xla.")):
            defaults.append(f"{name} {format_value(value)}")
    lines = wrap_items(defaults, min(width or _PARAGRAPH, _PARAGRAPH), label="defaults: ")
    lines = [colored(line, "dim") for line in lines]
    if not rows:
        return "\n".join(lines)
    used = max(len(name) for name, _, _ in rows) + max(len(value) for _, value, _ in rows) + 4
    room = None if width is None else width - used
    cells = [(name, value, _origin_text(origin, shown, room)) for name, value, origin in rows]
    colors: list[Color | None] = ["red" if name in refused else None for name, _, _ in rows]
    return "\n".join([colored_table([("setting", "value", shown or "origin"), *cells], colors), "", *lines])


def _origin_text(origin: Origin, shown: str | None, room: int | None) -> str:
    """Return an origin, without its value if that does not fit: the second column contains it."""
    place = "" if origin.source in ("command line", "--set") else origin.source_line
    if origin.file is not None and origin.file == shown:
        place = str(origin.line or "").rjust(_ROW_INDENT) + " "
    flag = "--set" if origin.source == "--set" else ""
    text = " ".join(filter(None, (place, flag, origin.written)))
    return text if room is None or len(text) <= room else text.removesuffix(f"={origin.text}")


def refused_settings(spec: FsdpSpec, problems: Iterable[Problem]) -> dict[str, Origin]:
    """Return the settings whose value or key was refused, and that no other source sets: the default is not meant."""
    refused: dict[str, Origin] = {}
    names = {name for name, _, _ in spec.settings()}
    for problem in problems:
        name, origin, key = problem.setting, problem.origin, problem.suggestion
        if problem.severity != "error" or origin is None or origin == DEFAULT_ORIGIN or not origin.spelling:
            continue
        if problem.code == "FSDP-E020":
            row = BY_NAME.get(key) or find_row(key, dict.fromkeys(row.scope for row in ROWS)) if key else None
            name = canonical_setting(row.name) if row is not None else None
        if name in names and not spec.asked(name):
            refused.setdefault(name, origin)
    return refused


def verdict_line(spec: FsdpSpec, problems: Sequence[Problem], shown: str) -> str:
    """Return the last line: the number of errors and warnings, or what will run."""
    counts = {severity: sum(p.severity == severity for p in problems) for severity in ("error", "warning")}
    found = ", ".join(plural(count, severity) for severity, count in counts.items() if count) or "no problems"
    color: Color = "red" if counts["error"] else "yellow" if counts["warning"] else "green"
    if counts["error"]:
        return f"{printable(shown)}: {colored(found, color)}"
    lines = wrap_words(f"{printable(shown)}: {found}. {describe_run(spec)}", output.text_width())
    return "\n".join(lines).replace(found, colored(found, color), 1)


def describe_run(spec: FsdpSpec) -> str:
    """Return sentences on the run of a spec without errors, also in a script with other default settings."""
    launch, ranks = spec.launch, spec.launch.num_processes
    where = "CPU rank" if launch.use_cpu else "rank"
    on = f"on {plural(ranks, where)}" if ranks != "auto" else f"on all {where}s of the launcher"
    if spec.uses_xla:
        return f"Transformers runs the FSDP of PyTorch/XLA {on}."
    if not spec.enabled:
        return f"Runs without FSDP {on}."
    precision: str = "no mixed precision" if spec.precision.param == "auto" else spec.precision.param
    precision = f"fp8 and {precision}" if spec.uses_fp8 else precision
    text = f"Runs FSDP{spec.fsdp.version} {spec.sharding.strategy} {on}; {_units(spec)}; {precision}."
    if of_script := _defaults_of_script(spec):
        other = spec.with_values(of_script, {})
        text += f" If TrainingArguments in the script set fsdp, it runs FSDP{other.fsdp.version}; {_units(other)}."
    return text


def _units(spec: FsdpSpec) -> str:
    return {
        "transformer": f"each {format_value(spec.wrap.classes) if spec.wrap.classes else 'layer'} is a unit",
        "size": f"units of at least {spec.wrap.min_num_params:,} parameters",
        "none": "the whole model is one unit",
    }[spec.wrap.policy]


def _defaults_of_script(spec: FsdpSpec) -> Mapping[str, Any]:
    """Return the settings that have another default in a script whose ``TrainingArguments`` set ``fsdp``."""
    defaults = FAMILY_DEFAULTS["training_arguments"] if spec.enabled else {}
    return {name: value for name, value in defaults.items() if not spec.asked(name) and spec.get(name) != value}


def _check_defaults_without_script(spec: FsdpSpec) -> Iterator[Problem]:
    """Report defaults that depend on the script, for a caller that does not know the script."""
    if of_script := _defaults_of_script(spec):
        keys = " and ".join(BY_NAME[name].key for name in of_script)
        here = ", ".join(f"{name} {spec.get(name)}" for name in of_script)
        there = ", ".join(f"{name} {value}" for name, value in of_script.items())
        message = (
            f"no source sets {keys}, and the defaults depend on the script: {here}; if TrainingArguments in the script "
            f"set fsdp: {there}."
        )
        yield spec.problem("FSDP-N161", next(iter(of_script)), message, f"Set {keys}.")
