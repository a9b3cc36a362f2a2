"""``hf-fsdp check``: every setting with its origin, and every problem at once."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from hf_fsdp_plugin.problems import Origin, Problem, SpecError, has_errors
from hf_fsdp_plugin.spec.load import Assessment, assess
from hf_fsdp_plugin.spec.model import FsdpSpec

HELP = "Judge an FSDP config: what every setting is, who said so, and what is wrong."
EXAMPLES = (
    "hf-fsdp check fsdp.yaml --world-size 8",
    'hf-fsdp check --fsdp "full_shard auto_wrap" --json',
)
MAX_WORLD_SIZE = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="Accelerate's YAML or JSON; its default file where left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument(
        "--fsdp", nargs="?", const="true", metavar="WORDS", help='as in TrainingArguments: "full_shard auto_wrap"'
    )
    parser.add_argument("--fsdp-config", "--fsdp_config", metavar="JSON|PATH", help="as in TrainingArguments")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="overrides", help="overrule a setting"
    )
    parser.add_argument("--model", metavar="DIR|ID", help="resolve the config against this model")
    parser.add_argument(
        "--world-size", type=_world_size, metavar="N", help="number of ranks; num_processes where left out"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the verdict. Returns 0 without errors, 1 with them."""
    assessment = _assess(args)
    problems = list(assessment.problems)
    plan: Mapping[str, Any] | None = None
    if args.model and assessment.ok:
        plan, more = _plan(assessment.spec, args.model, args.world_size)
        problems += [problem for problem in more if problem not in problems]
    if args.json:
        print(
            json.dumps(
                _to_json(assessment.spec, problems, plan, with_plan=bool(args.model)), indent=2, ensure_ascii=False
            )
        )
    else:
        # A file that could not be read said nothing: a table of defaults would hide the reason under noise.
        if assessment.ok or assessment.spec.origins:
            print(_table(assessment.spec))
        if plan is not None:
            print(f"\n{plan['text']}" if "text" in plan else "")
        for problem in problems:
            print(problem, file=sys.stderr)
    return 1 if has_errors(problems) else 0


def _assess(args: argparse.Namespace) -> Assessment:
    alone = args.fsdp is None and args.fsdp_config is None
    overrides = list(args.overrides)
    if args.world_size is not None:
        overrides.append(f"launch.num_processes={args.world_size}")
    return assess(
        args.config,
        fsdp=args.fsdp,
        fsdp_config=args.fsdp_config,
        overrides=overrides,
        default_file=alone,
    )


def _plan(spec: FsdpSpec, model: str, world_size: int | None) -> tuple[Mapping[str, Any] | None, tuple[Problem, ...]]:
    """The plan for a model, as JSON. Only here is torch imported."""
    from hf_fsdp_plugin.plan.load_model import meta_model
    from hf_fsdp_plugin.plan.resolve import resolve

    world = world_size if world_size is not None else _world_of(spec)
    try:
        plan = resolve(spec, meta_model(model), world_size=world, device_type="cpu" if spec.launch.use_cpu else "cuda")
    except SpecError as error:
        return None, error.problems
    except (ValueError, OSError) as error:  # a model that is not there, or no model
        problem = Problem(
            severity="error",
            message=" ".join(str(error).split()),
            fix="Give a directory with config.json, or the name of a model that was downloaded.",
            origin=Origin(source="--model", spelling="--model", text=model),
        )
        return None, (problem,)
    return {**plan.to_json(), "text": str(plan)}, plan.problems


def _world_of(spec: FsdpSpec) -> int:
    """``num_processes``, or else the smallest world that the mesh fits."""
    if spec.launch.num_processes != "auto":
        return spec.launch.num_processes
    return math.prod(size for size in (spec.mesh.shard, spec.mesh.replicate) if size != "auto")


def _to_json(
    spec: FsdpSpec, problems: list[Problem], plan: Mapping[str, Any] | None, *, with_plan: bool
) -> dict[str, Any]:
    settings = {name: {"value": _jsonable(value), "origin": str(origin)} for name, value, origin in spec.settings()}
    verdict: dict[str, Any] = {
        "ok": not has_errors(problems),
        "settings": settings,
        "problems": [problem.to_json() for problem in problems],
    }
    if with_plan:
        verdict["plan"] = {key: value for key, value in plan.items() if key != "text"} if plan is not None else None
    return verdict


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)  # JSON has no such numbers
    return value


def _table(spec: FsdpSpec) -> str:
    """What was asked, one setting a line with its origin; then the defaults, on as few lines as they need."""
    rows = [(name, _shown(value), str(origin)) for name, value, origin in spec.settings() if spec.asked(name)]
    defaults = [
        f"{name} {_shown(value)}"
        for name, value, _ in spec.settings()
        if not spec.asked(name) and not name.startswith(("launch.", "xla."))
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows]
    return "\n".join([*lines, *([""] if lines else []), *_dimmed(_wrapped("defaults: ", defaults))])


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ", ".join(str(item) for item in value) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_shown(item)}" for key, item in value.items()) or "-"
    return str(value) if value != "" else "-"


def _wrapped(label: str, items: list[str], width: int = 110) -> list[str]:
    lines = [label]
    for position, item in enumerate(items):
        word = item + (", " if position + 1 < len(items) else "")
        if len(lines[-1]) + len(word.rstrip()) > width:
            lines.append(" " * len(label))
        lines[-1] += word
    return [line.rstrip() for line in lines]


def _dimmed(lines: list[str]) -> list[str]:
    return [f"\033[2m{line}\033[0m" for line in lines] if sys.stdout.isatty() else lines


def _world_size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number") from None
    if not 1 <= size <= MAX_WORLD_SIZE:
        raise argparse.ArgumentTypeError(f"{size} is no number of ranks")
    return size
