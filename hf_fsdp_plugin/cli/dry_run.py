"""``hf-fsdp launch --dry_run``: what would run, without starting anything."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.cli.check_output import check_sources
from hf_fsdp_plugin.cli.model_plan import plan_of_model
from hf_fsdp_plugin.cli.output import print_json, text_width
from hf_fsdp_plugin.launcher.device_search import find_devices
from hf_fsdp_plugin.launcher.environment import settings_env
from hf_fsdp_plugin.launcher.flags import LaunchArguments, model_of_script
from hf_fsdp_plugin.launcher.world import World, describe_world, resolve_world
from hf_fsdp_plugin.problems import Problem, SpecError, has_errors
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.text import printable

if TYPE_CHECKING:
    from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan


def show_run(arguments: LaunchArguments, sources: Sources, command: Sequence[str]) -> int:
    """Print the settings, the units, and the command and the variables of a rank. Returns the exit code.

    Args:
        command: the command of a rank.
    """
    world: World | None = None
    model, is_own = model_of_script(arguments)

    def find_plan(spec: FsdpSpec) -> tuple[FsdpPlan | None, Sequence[Problem]]:
        nonlocal world
        try:
            world = resolve_world(spec, find_devices())
        except SpecError as error:
            return None, error.problems
        if not model or not spec.enabled:
            return None, world.problems
        plan, found = plan_of_model(spec, model, world_size=world.size, device_type=world.device)
        # The script may know a model that is unknown here, for example its own folder.
        unknown = not is_own and any(problem.code == "FSDP-E709" for problem in found)
        return plan, world.problems if unknown else (*world.problems, *found)

    checked = check_sources(sources, find_plan)
    spec, plan = checked.spec, checked.plan
    env = settings_env(spec, world, arguments) if world is not None else {}
    if "json" in arguments.options:
        print_json(
            {
                **checked.to_json(),
                "plan": plan.to_json() if plan is not None else None,
                "world": _world_json(world) if world is not None else None,
                "command": list(command),
                "environment": env,
            }
        )
        return checked.exit_code
    checked.print_settings()
    if world is not None and spec.enabled:
        print(f"\n{plan.text(width=text_width()) if plan is not None else _no_units(model)}")
    if world is not None:
        print(f"\n{describe_world(world, spec.launch)}")
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        print(printable(f"command of a rank: {shlex.join(command)}"))
        print(printable(f"variables of a rank: {variables}"))
    checked.print_verdict()
    if not has_errors(checked.problems):
        print("Nothing was started (--dry_run).")
    return checked.exit_code


def _no_units(model: str) -> str:
    if model:
        return f"units: unknown, {model} cannot be built here. Pass --model with a folder that has a config.json."
    return "units: unknown without the model. Pass --model DIR|ID to show them."


def _world_json(world: World) -> dict[str, Any]:
    return {
        "device": world.device,
        "collectives": world.backend,
        "world_size": world.size,
        "num_machines": world.num_machines,
        "machine_rank": world.machine_rank,
        "num_local": world.num_local,
    }
