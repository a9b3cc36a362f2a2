"""``hf-fsdp launch``: Check a config, then run an unmodified script on every rank with the plugin installed.

Examples::

    hf-fsdp launch --config_file fsdp.yaml train.py --epochs 3
    hf-fsdp launch --num_processes 4 --cpu --dry_run --model ./llama -m package.train
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import hf_fsdp_plugin
import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.cli.main import tool
from hf_fsdp_plugin.cli.output import exit_code, in_line_order, print_problems
from hf_fsdp_plugin.launcher import flags
from hf_fsdp_plugin.launcher import world as worlds
from hf_fsdp_plugin.launcher.rank_processes import RankJob, launch_env, rank_command
from hf_fsdp_plugin.launcher.run_script import check_script
from hf_fsdp_plugin.problems import Problem, SpecError, UsageError
from hf_fsdp_plugin.rank_variables import POD_ID_VARIABLE, RUN_ID_VARIABLE, exit_limit, hang_limit
from hf_fsdp_plugin.sources import environment_variables
from hf_fsdp_plugin.sources.config_location import default_config_file
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.handover import LaunchHandover
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec

_OF_ONE_MACHINE = frozenset({"launch.machine_rank", "launch.main_process_ip", "launch.gpu_ids"})
"""Settings that may differ between machines."""
_NUMBERS = (("grace", r"\d+(\.\d+)?"), ("num_cpu_threads_per_process", r"\d+"), ("max_restarts", r"\d{1,6}"))


def add_arguments(parser: flags.Parser) -> None:
    flags.add_launch_flags(parser)


def run(args: argparse.Namespace) -> int:
    return run_launch(flags.read_launch_arguments(args))


def run_launch(arguments: flags.LaunchArguments) -> int:
    """Run the script. Returns its exit code, or 1 for a config with errors. Raises ``UsageError``."""
    try:
        arguments = _with_variables(arguments)
        _check_usage(arguments)
        return _launch(arguments)
    except SpecError as error:
        print_problems(problem for problem in in_line_order(error.problems) if problem.severity != "note")
        return exit_code(error.problems, arguments.options.get("config_file"))


def _with_variables(arguments: flags.LaunchArguments) -> flags.LaunchArguments:
    """Add the options that the variables of torchrun set, as in a pod of Kubernetes, and that no flag sets."""
    found = environment_variables.torchrun_options(os.environ)
    given = {name: value for name, value in found.items() if name not in arguments.options}
    restarts = given.get("max_restarts", "0")
    if not re.fullmatch(dict(_NUMBERS)["max_restarts"], restarts):
        raise UsageError(f"PET_MAX_RESTARTS is {restarts!r}; expected a number.")
    return replace(arguments, options={**given, **arguments.options})


def _launch(arguments: flags.LaunchArguments) -> int:
    from hf_fsdp_plugin.spec.load import combine, read_settings

    sources = _sources(arguments)
    if sources.config is None and not sources.command_line and not sources.overrides:
        message = "no config: FSDP runs only if the script's own TrainingArguments or Accelerator enables it."
        _print_notices(arguments, Problem(code="FSDP-N713", message=message))
    if "dry_run" in arguments.options:
        return int(tool("check.dry_run").show_run(arguments, sources, _command(arguments)))
    given = read_settings(sources)
    spec = combine(given).checked_spec()
    if "quiet" not in arguments.options:
        tool("convert.conversion").print_conversion(sources.converted)
    _print_notices(arguments, *(problem for problem in spec.problems if problem.severity == "warning"))
    world = worlds.resolve_world(spec, worlds.find_devices())
    _print_notices(arguments, *world.problems)
    options, report = arguments.options, environment_variables.absolute_path(arguments.options.get("report"))
    handover = LaunchHandover(
        given=tuple(given), quiet="quiet" in options, report=report, report_table="report_table" in options
    )
    return _run_ranks(arguments, spec, world, handover)


def _run_ranks(arguments: flags.LaunchArguments, spec: FsdpSpec, world: worlds.World, handover: LaunchHandover) -> int:
    options, launch = arguments.options, spec.launch
    from hf_fsdp_plugin.launcher.rendezvous import Rendezvous  # lazy: imports torch
    from hf_fsdp_plugin.launcher.start_ranks import run_attempts
    from hf_fsdp_plugin.runs.attempts import Restarts

    restarts = Restarts(run_id=_run_id(options) or uuid.uuid4().hex, max_restarts=int(options.get("max_restarts", 0)))
    rendezvous = Rendezvous(
        launch,
        world,
        restarts,
        facts=_facts(arguments, spec, world),
        conf=options.get("rdzv_conf", ""),
        notice=lambda problem: _print_notices(arguments, problem),
    )
    if world.num_machines > 1:
        _print_notices(arguments, f"waiting for {world.num_machines} machines at {worlds.rendezvous_address(launch)}")

    def describe_start() -> None:
        machine, address = rendezvous.machine, rendezvous.address
        _print_notices(arguments, worlds.describe_world(world, launch, machine=machine, address=address))

    job = RankJob(
        on_start=describe_start,
        command=_command(arguments),
        num_local=world.num_local,
        env=launch_env(spec, world, handover, arguments),
        role=options.get("role", "default"),
        grace=float(options.get("grace", time_limits.GRACE)),
        shown="all" if options.get("show_ranks") == "all" or options.get("tee", "0") != "0" else "first",
        log_dir=Path(options["log_dir"]) if "log_dir" in options else None,
        notice=lambda notice: _print_notices(arguments, notice),
        debug=launch.debug,
    )
    return run_attempts(job, rendezvous)


def _run_id(options: Mapping[str, str]) -> str:
    """Return the id that the user or the cluster has given the run; empty without one."""
    return options.get("run_id") or os.environ.get(RUN_ID_VARIABLE) or os.environ.get(POD_ID_VARIABLE, "")


def _facts(arguments: flags.LaunchArguments, spec: FsdpSpec, world: worlds.World) -> dict[str, str]:
    """Return the facts of the run that must be the same on all machines."""
    options = arguments.options
    return {
        "the number of ranks": f"{world.num_local} on {world.device}",
        "the run": _run_id(options) or os.environ.get("SLURM_JOB_ID", "") or "without an id",
        "the version of hf_fsdp_plugin": hf_fsdp_plugin.__version__,
        "--num_machines": str(world.num_machines),
        "--max_restarts": options.get("max_restarts", "0"),
        "the script": f"`{shlex.join([arguments.script, *arguments.script_args])}`",
        **{name: repr(value) for name, value, _ in spec.settings() if name not in _OF_ONE_MACHINE},
    }


def _check_usage(arguments: flags.LaunchArguments) -> None:
    options = arguments.options
    if not arguments.script:
        raise UsageError("no script. Usage: hf-fsdp launch [FLAGS] SCRIPT [ARGS ...]")
    check_script(arguments)
    for name in ("json", "model"):
        if name in options and "dry_run" not in options:
            raise UsageError(f"--{name} needs --dry_run.")
    _check_writable(options)
    for name, pattern in _NUMBERS:
        if name in options and not re.fullmatch(pattern, options[name]):
            raise UsageError(f"--{name} is {options[name]!r}; expected a number.")
    try:
        hang_limit(options.get("hang_timeout"))
        exit_limit()
    except SpecError as error:
        raise UsageError(error.problems[0].message) from None


def _check_writable(options: Mapping[str, str]) -> None:
    """Check that logs and the report can be written, before any rank starts."""
    for name in ("log_dir", "report"):
        if name not in options:
            continue
        path = Path(options[name])
        folder = path if name == "log_dir" or path.is_dir() else path.absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--{name} {options[name]}: {error.strerror or error}.") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"--{name} {options[name]}: permission denied.")


def _sources(arguments: flags.LaunchArguments) -> Sources:
    if given := arguments.options.get("config_file"):
        config: ConfigFile | None = ConfigFile.at(given)
    elif config := default_config_file(os.environ):
        _print_notices(arguments, f"no --config_file: reading Accelerate's default config file {config.shown}")
    sources = Sources(config=config, command_line=arguments.command_line, overrides=arguments.overrides)
    return cast(Sources, tool("convert.conversion").with_converted_config(sources, arguments.script_args))


def _command(arguments: flags.LaunchArguments) -> list[str]:
    module = ["-m"] if "module" in arguments.options else []
    return rank_command([*module, arguments.script, *arguments.script_args])


def _print_notices(arguments: flags.LaunchArguments, *lines: object) -> None:
    """Print notices to stderr, because stdout belongs to the script."""
    if "quiet" not in arguments.options:
        for line in lines:
            print(f"hf-fsdp: {line}", file=sys.stderr, flush=True)
