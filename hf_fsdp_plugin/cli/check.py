"""``hf-fsdp check``: prints every setting with its origin, and every problem at once."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.problems import Origin, Problem, SpecError, has_errors
from hf_fsdp_plugin.sources.model import Sources, config_of
from hf_fsdp_plugin.spec.load import Assessment, assess
from hf_fsdp_plugin.spec.model import FsdpSpec
from hf_fsdp_plugin.text import format_table, wrap_items

if TYPE_CHECKING:
    from hf_fsdp_plugin.plan.model import FsdpPlan

HELP = "Check an FSDP config: print every setting with its origin, and every problem."
EXAMPLES = ("hf-fsdp check fsdp.yaml --world-size 8", 'hf-fsdp check --fsdp "full_shard auto_wrap" --json')
MAX_WORLD_SIZE = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="Accelerate YAML or JSON (default: Accelerate's default config file)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument(
        "--fsdp", nargs="?", const="true", metavar="WORDS", help='as in TrainingArguments: "full_shard auto_wrap"'
    )
    parser.add_argument(
        "--fsdp-config",
        "--fsdp_config",
        metavar="JSON|PATH",
        help="as in TrainingArguments: JSON, or the path of a JSON or YAML file",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="overrides",
        help="override one setting, with the highest precedence; repeatable",
    )
    parser.add_argument(
        "--distributed-config",
        "--distributed_config",
        metavar="PATH",
        help="JSON file of a DistributedConfig, with which from_pretrained shards the model",
    )
    parser.add_argument("--model", metavar="DIR|ID", help="resolve the config against this model")
    parser.add_argument("--world-size", type=_world_size, metavar="N", help="number of ranks (default: num_processes)")


def run(args: argparse.Namespace) -> int:
    """Print the settings and the problems. Returns 0 without errors, 1 with errors."""
    assessment = _assess(args)
    problems = list(assessment.problems)
    plan = None
    if args.model and assessment.ok:
        plan, more = _plan(assessment.spec, args.model, args.world_size)
        problems += [problem for problem in more if problem not in problems]
    if args.json:
        result = _to_json(assessment.spec, problems)
        if args.model:
            result["plan"] = plan.to_json() if plan is not None else None
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        # If the config file could not be read, a table of defaults would hide the reason.
        if assessment.ok or assessment.spec.origins:
            print(_table(assessment.spec))
        if plan is not None:
            print(f"\n{plan}")
        for problem in problems:
            print(problem, file=sys.stderr)
    return 1 if has_errors(problems) else 0


def _assess(args: argparse.Namespace) -> Assessment:
    overrides = list(args.overrides)
    if args.world_size is not None:
        overrides.append(f"launch.num_processes={args.world_size}")
    given = {name: value for name in ("fsdp", "fsdp_config") if (value := getattr(args, name)) is not None}
    config = config_of(args.config)
    distributed_config = config_of(args.distributed_config)
    sources = Sources(
        config=config,
        training_arguments=given,
        overrides=overrides,
        distributed_config=distributed_config,
        default_file=not given and distributed_config is None,
    )
    return assess(sources)


def _plan(spec: FsdpSpec, model: str, world_size: int | None) -> tuple[FsdpPlan | None, tuple[Problem, ...]]:
    """Resolve the plan for a model. Torch is imported only here."""
    from hf_fsdp_plugin.plan.load_model import meta_model
    from hf_fsdp_plugin.plan.resolve import resolve

    world_size = world_size if world_size is not None else _smallest_world_size(spec)
    device_type = "cpu" if spec.launch.use_cpu else "cuda"
    try:
        plan = resolve(spec, meta_model(model), world_size=world_size, device_type=device_type)
    except SpecError as error:
        return None, error.problems
    except (ValueError, OSError) as error:  # the model does not exist, or cannot be built
        problem = Problem(
            code="FSDP-E709",
            message=" ".join(str(error).split()),
            fix="Give a directory with a config.json, or the name of a model in the local cache.",
            origin=Origin(source="--model", spelling="--model", text=model),
        )
        return None, (problem,)
    return plan, plan.problems


def _smallest_world_size(spec: FsdpSpec) -> int:
    """Return ``num_processes``. If that is ``auto``, return the number of ranks that the mesh needs."""
    if spec.launch.num_processes != "auto":
        return spec.launch.num_processes
    return math.prod(size for size in (spec.mesh.shard, spec.mesh.replicate) if size != "auto")


def _to_json(spec: FsdpSpec, problems: list[Problem]) -> dict[str, Any]:
    return {
        "ok": not has_errors(problems),
        "settings": {
            name: {"value": _jsonable(value), "origin": str(origin)} for name, value, origin in spec.settings()
        },
        "problems": [problem.to_json() for problem in problems],
    }


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)  # JSON has no NaN and no infinity
    return value


def _table(spec: FsdpSpec) -> str:
    """Return the settings that a source sets, one per line with the origin, then the defaults in one paragraph."""
    rows = [(name, _format(value), str(origin)) for name, value, origin in spec.settings() if spec.asked(name)]
    defaults = [
        f"{name} {_format(value)}"
        for name, value, _ in spec.settings()
        if not spec.asked(name) and not name.startswith(("launch.", "xla."))
    ]
    lines = wrap_items(defaults, 110, label="defaults: ")
    if sys.stdout.isatty():
        lines = [f"\033[2m{line}\033[0m" for line in lines]  # ANSI code for dimmed text
    return "\n".join([*([format_table(rows), ""] if rows else []), *lines])


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ", ".join(str(item) for item in value) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_format(item)}" for key, item in value.items()) or "-"
    return str(value) if value != "" else "-"


def _world_size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if not 1 <= size <= MAX_WORLD_SIZE:
        raise argparse.ArgumentTypeError(f"{size} is not between 1 and {MAX_WORLD_SIZE}")
    return size
