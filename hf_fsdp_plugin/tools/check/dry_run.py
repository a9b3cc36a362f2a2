"""What ``hf-fsdp launch --dry_run`` prints: the settings, the units, and the command and the variables of a rank."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from hf_fsdp_plugin.cli.output import print_json
from hf_fsdp_plugin.launcher import flags
from hf_fsdp_plugin.launcher import world as worlds
from hf_fsdp_plugin.launcher.rank_processes import settings_env
from hf_fsdp_plugin.problems import Problem, SpecError, has_errors
from hf_fsdp_plugin.sources.command_line import parse_flags
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.text import printable
from hf_fsdp_plugin.tools.check.output import check_sources, plan_of_model
from hf_fsdp_plugin.tools.convert.conversion import print_conversion

if TYPE_CHECKING:
    from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan

_MODEL_FLAGS: Final = ("model_name_or_path", "model_name", "model")
"""Flags of training scripts that name the model."""


def show_run(arguments: flags.LaunchArguments, sources: Sources, command: Sequence[str]) -> int:
    """Print the settings, the units, and the command and the variables of a rank. Returns the exit code.

    Args:
        command: the command of a rank.
    """
    world: worlds.World | None = None
    given = {flag.name: flag.text for flag in parse_flags(arguments.script_args)}
    is_own = "model" in arguments.options
    model = arguments.options.get("model") or next((given[name] for name in _MODEL_FLAGS if given.get(name)), "")

    def find_plan(spec: FsdpSpec) -> tuple[FsdpPlan | None, Sequence[Problem]]:
        nonlocal world
        try:
            world = worlds.resolve_world(spec, worlds.find_devices())
        except SpecError as error:
            return None, error.problems
        if not model or not spec.enabled:
            return None, world.problems
        plan, found = plan_of_model(spec, model, world_size=world.size, device_type=world.device)
        # The script may know a model that is unknown here, for example its own folder.
        unknown = not is_own and any(problem.code == "FSDP-E709" for problem in found)
        return plan, world.problems if unknown else (*world.problems, *found)

    checked = check_sources(sources, find_plan)
    if "quiet" not in arguments.options and not has_errors(checked.problems):
        print_conversion(sources.converted)
    spec, plan = checked.spec, checked.plan
    env = settings_env(spec, world, arguments) if world is not None else {}
    if "json" in arguments.options:
        names = {"collectives": "backend", "world_size": "size"}
        keys = ("device", "collectives", "world_size", "num_machines", "machine_rank", "num_local")
        found = {key: getattr(world, names.get(key, key)) for key in keys} if world is not None else None
        print_json({**checked.to_json(), "world": found, "command": list(command), "environment": env})
        return checked.exit_code
    blocks = []
    if world is not None:
        units = "unknown without the model. Pass --model DIR|ID to show them."
        if model:
            units = f"unknown, {model} cannot be built here. Pass --model with a folder that has a config.json."
        blocks = [f"units: {units}"] if spec.enabled and plan is None else []
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        rank = (f"command of a rank: {shlex.join(command)}", f"variables for its settings: {variables}")
        blocks.append("\n".join([worlds.describe_world(world, spec.launch), *map(printable, rank)]))
    checked.print_text(*blocks)
    if not has_errors(checked.problems):
        print("Nothing was started (--dry_run).")
    return checked.exit_code
