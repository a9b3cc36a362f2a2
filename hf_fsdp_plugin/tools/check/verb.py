"""``hf-fsdp check``: Check FSDP configs: print every problem, every setting with its origin, and a verdict.

Examples::

    hf-fsdp check fsdp.yaml --world-size 8
    hf-fsdp check --fsdp "full_shard auto_wrap" --json
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.cli.main import make_parser
from hf_fsdp_plugin.cli.output import OK, PROBLEMS, in_line_order, print_json
from hf_fsdp_plugin.launcher.flags import Parser, add_override_flag, add_setting_flags
from hf_fsdp_plugin.problems import Problem, has_errors
from hf_fsdp_plugin.sources.config_location import default_config_file
from hf_fsdp_plugin.sources.config_tree import MAX_BYTES, ConfigFile
from hf_fsdp_plugin.sources.interface import Sources, config_of
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.tools.check.output import Checked, check_sources, plan_of_model
from hf_fsdp_plugin.tools.common import check_needs, whole_number
from hf_fsdp_plugin.tools.convert.conversion import with_converted_config
from hf_fsdp_plugin.tools.preflight import run as preflight

if TYPE_CHECKING:
    from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan

MAX_WORLD_SIZE = 1 << 20


def add_arguments(parser: Parser) -> None:
    add_config_arguments(parser, several=True)
    parser.add_argument("--model", metavar="DIR|ID", help="resolve the config against this model")
    size, about = whole_number(1, MAX_WORLD_SIZE), "number of ranks (default: num_processes)"
    parser.add_argument("--world-size", type=size, metavar="N", help=about)
    preflight.add_run_arguments(parser)
    about = "plan for cuda, cpu, … (default: the device that launch uses on this machine)"
    parser.add_argument("--device", metavar="TYPE", help=about)
    add_setting_flags(parser)
    parser.epilog = (
        "also all setting flags of `hf-fsdp launch`: --mixed_precision bf16, --fsdp_version 2, --cpu, …\n"
        "with --run also arguments of TrainingArguments"
    )


def add_config_arguments(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Add the arguments that set FSDP settings.

    Args:
        several: whether the verb reads several configs.
    """
    files = "files" if several else "file"
    default = "(default: Accelerate's default config file)"
    about = f"{files} of Accelerate, or of DeepSpeed or another program (docs/dialects.md); - reads stdin {default}"
    parser.add_argument("configs", nargs="*" if several else "?", metavar="CONFIG", help=about)
    parser.add_argument("--config-file", metavar="CONFIG", help="the same as CONFIG, as in launch")
    about = 'as in TrainingArguments: "full_shard auto_wrap"'
    parser.add_argument("--fsdp", nargs="?", const="true", metavar="WORDS", help=about)
    about = "as in TrainingArguments: JSON, or the path of a JSON or YAML file"
    parser.add_argument("--fsdp-config", metavar="JSON|PATH", help=about)
    add_override_flag(parser)
    about = "JSON file of a DistributedConfig, with which from_pretrained shards the model"
    parser.add_argument("--distributed-config", metavar="PATH", help=about)


def parse_argv(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after ``check``, with ``--run`` also those of ``TrainingArguments``."""
    parser = make_parser("check")
    training: list[str] = []
    if preflight.RUN_FLAG in argv:
        argv, training = preflight.split_run_words(argv, parser)
    args = parser.parse_args(argv)
    args.training = training
    return args


def run(args: argparse.Namespace) -> int:
    """Print the problems, settings and verdict. Returns 0 without errors, 1 with errors, 2 for a missing config."""
    check_needs(args, {"device": ("model",), "limit": ("run",)})
    names = [*args.configs, *([args.config_file] if args.config_file is not None else [])]
    files: list[ConfigFile | None] = [config_named(name) for name in names]
    if not files:
        is_set = any(value is not None for value in (args.fsdp, args.fsdp_config, args.distributed_config))
        files = [None if is_set else default_config_file(os.environ)]
    if args.run:
        preflight.check_run_usage(args, len(files))
    checked = [_with_run(args, file) if args.run else check_config(args, file) for file in files]
    if args.json:
        results = [_result(args, one) for one in checked]
        ok = all(result["ok"] for result in results)
        print_json(results[0] if len(results) == 1 else {"ok": ok, "configs": results})
    else:
        for number, one in enumerate(checked):
            print("\n" if number else "", end="")
            one.print_text()
    return max(one.exit_code for one in checked)


def config_named(name: str) -> ConfigFile:
    """Return the config with a name of the command line: the path of a file, or - for stdin."""
    if name != "-":
        return ConfigFile.at(name)
    return ConfigFile(path=Path.cwd() / "stdin", shown="<stdin>", data=sys.stdin.buffer.read(MAX_BYTES + 1))


def _sources(args: argparse.Namespace, config: ConfigFile | None) -> Sources:
    given = {name: value for name in ("fsdp", "fsdp_config") if (value := getattr(args, name)) is not None}
    distributed_config = config_of(args.distributed_config)
    sources = Sources(
        config=config,
        training_arguments=given,
        command_line=args.command_line,
        overrides=args.overrides,
        world_size=args.world_size,
        distributed_config=distributed_config,
        default_file=not given and not args.command_line and distributed_config is None,
    )
    return with_converted_config(sources, getattr(args, "training", ()))  # plan has none


def check_config(args: argparse.Namespace, config: ConfigFile | None) -> Checked:
    """Return the spec of one config with all problems, and the plan if a model is named."""

    def find_plan(spec: FsdpSpec) -> tuple[FsdpPlan | None, Sequence[Problem]]:
        if not args.model or not spec.enabled:
            return None, ()
        from hf_fsdp_plugin.launcher.world import find_devices

        device_type = args.device or ("cpu" if spec.launch.use_cpu else find_devices().kind)  # as launch does
        world_size = args.world_size or smallest_world_size(spec)
        return plan_of_model(spec, args.model, world_size=world_size, device_type=device_type)

    return check_sources(_sources(args, config), find_plan)


def _with_run(args: argparse.Namespace, config: ConfigFile | None) -> Checked:
    """Check a config and, if it has no errors, run the preflight."""
    sources = _sources(args, config)
    checked = check_sources(sources)
    if has_errors(checked.problems):
        return checked
    run = preflight.run_preflight(checked.spec, sources, preflight.options_of(args), args.limit)
    problems = in_line_order(dict.fromkeys((*checked.problems, *run.problems)))
    code = max(checked.exit_code, OK if run.tree["ok"] and not has_errors(problems) else PROBLEMS)
    code = 128 + run.signal_number if run.signal_number else code
    return replace(checked, problems=tuple(problems), exit_code=code, run=run)


def _result(args: argparse.Namespace, checked: Checked) -> dict[str, Any]:
    result = checked.to_json()
    if not args.model:
        del result["plan"]
    if args.run:
        result["run"] = checked.run.tree if checked.run is not None else None
        result["ok"] &= checked.run is not None and checked.run.tree["ok"]
    return result


def smallest_world_size(spec: FsdpSpec) -> int:
    """Return ``num_processes``. If that is ``auto``, return the number of ranks that the mesh needs."""
    if spec.launch.num_processes != "auto":
        return spec.launch.num_processes
    return math.prod(size for size in spec.mesh.rank_axes().values() if size != "auto")
