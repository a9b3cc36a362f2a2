"""``hf-fsdp launch``: checks the config, then starts one process per rank with the plugin installed."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hf_fsdp_plugin.cli.accelerators import find_accelerators
from hf_fsdp_plugin.cli.dry_run import show_run
from hf_fsdp_plugin.cli.exit_codes import USAGE, exit_code
from hf_fsdp_plugin.cli.exit_watch import LIMIT_VARIABLE, exit_limit
from hf_fsdp_plugin.cli.failure_summary import exit_code as exit_code_of_ranks
from hf_fsdp_plugin.cli.failure_summary import first_failure, format_failures, needs_places, places_of, summarize
from hf_fsdp_plugin.cli.launch_flags import LaunchArguments, UsageError, add_help, parse_launch_arguments
from hf_fsdp_plugin.cli.rank_env import rank_env, settings_env
from hf_fsdp_plugin.cli.ranks import Ranks
from hf_fsdp_plugin.cli.rendezvous import Rendezvous, describe, endpoint, meet_locally, meet_machines
from hf_fsdp_plugin.cli.script_path import check_script
from hf_fsdp_plugin.cli.terminal import in_line_order, print_problems
from hf_fsdp_plugin.cli.world import World, resolve_world
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.sources.command_line import flag_name
from hf_fsdp_plugin.sources.config_file import ConfigFile
from hf_fsdp_plugin.sources.handover import LaunchHandover, absolute, user_variables
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.spec.model import FsdpSpec

HELP = "Check a config, then run an unmodified script on every rank with the plugin installed."
EXAMPLES = (
    "hf-fsdp launch --config_file fsdp.yaml train.py --epochs 3",
    "hf-fsdp launch --num_processes 4 --cpu --dry_run --model ./llama -m package.train",
)
DEFAULT_GRACE = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the help only. :func:`parse_argv` parses, because the arguments after SCRIPT belong to the script."""
    add_help(parser)


def parse_argv(argv: Sequence[str]) -> LaunchArguments:
    """Parse the arguments after ``launch``. Raises ``SystemExit`` for wrong usage."""
    try:
        return parse_launch_arguments(argv)
    except UsageError as error:
        print(f"hf-fsdp launch: {error}", file=sys.stderr)
        raise SystemExit(USAGE) from None


def run(arguments: LaunchArguments) -> int:
    """Run the script. Returns its exit code, 1 for a config with errors, or 2 for wrong usage."""
    try:
        _check_usage(arguments)
        return _launch(arguments)
    except UsageError as error:
        print(f"hf-fsdp launch: {error}", file=sys.stderr)
        return USAGE
    except SpecError as error:
        print_problems(problem for problem in in_line_order(error.problems) if problem.severity != "note")
        return exit_code(error.problems, arguments.options.get("config_file"))


def _launch(arguments: LaunchArguments) -> int:
    from hf_fsdp_plugin.spec.load import assess

    handover = _handover(arguments)
    sources = handover.sources
    if "dry_run" in arguments.options:
        _note_missing_config(arguments, sources)
        return show_run(arguments, sources, _command(arguments))
    spec = assess(sources).checked_spec()
    _print_notices(arguments, *(problem for problem in spec.problems if problem.severity == "warning"))
    world = resolve_world(spec, find_accelerators())
    _print_notices(arguments, *world.problems)
    _note_missing_config(arguments, sources)
    if world.num_machines > 1:
        _print_notices(arguments, f"waiting for {world.num_machines} machines at {endpoint(spec.launch)}")
        rendezvous = meet_machines(spec.launch, world, rdzv_conf=arguments.options.get("rdzv_conf", ""))
    else:
        rendezvous, problems = meet_locally(spec.launch)
        _print_notices(arguments, *problems)
    try:
        _print_notices(arguments, describe(world, spec.launch, rendezvous=rendezvous))
        return _run_ranks(arguments, spec, world, rendezvous, handover)
    finally:
        rendezvous.close()


def _note_missing_config(arguments: LaunchArguments, sources: Sources) -> None:
    if sources.config is None and not sources.command_line and not sources.overrides:
        message = "no config: FSDP runs only if the script's own TrainingArguments or Accelerator enables it."
        _print_notices(arguments, Problem(code="FSDP-N713", message=message))


def _run_ranks(
    arguments: LaunchArguments, spec: FsdpSpec, world: World, rendezvous: Rendezvous, handover: LaunchHandover
) -> int:
    options = arguments.options
    log_dir = Path(options["log_dir"]) if "log_dir" in options else None
    show_all = options.get("show_ranks") == "all" or options.get("tee", "0") != "0"
    base = {**os.environ, **settings_env(spec, world, arguments), **handover.to_env()}
    with tempfile.TemporaryDirectory(prefix="hf_fsdp_") as scratch:
        ranks = Ranks(
            show_all=show_all,
            log_dir=log_dir,
            scratch=Path(scratch),
            notice=lambda notice: _print_notices(arguments, notice),
        )
        try:
            for local_rank in range(world.num_local):
                env = {**base, **rank_env(world, rendezvous, local_rank, role=options.get("role", "default"))}
                rank = rendezvous.first_rank + local_rank
                ranks.start(rank, _command(arguments), env)
            result = ranks.watch(grace=float(options.get("grace", DEFAULT_GRACE)), peers=rendezvous.peers)
        finally:
            ranks.close()
        first = first_failure(result.exits)
        if first is not None:
            rendezvous.peers.announce(f"rank {first.rank}: {summarize(first)}")
            if needs_places(result):
                elsewhere, notes = rendezvous.peers.share_places(places_of(result.exits))
                result = replace(result, elsewhere=tuple(elsewhere), notes=tuple(notes))
        rendezvous.peers.leave()
    live = [rank.rank for rank in result.exits] if show_all else [rendezvous.first_rank]
    sys.stdout.flush()
    if text := format_failures(result, debug=spec.launch.debug, shown_live=live):
        print(text, file=sys.stderr)
        if log_dir is not None and first is not None:
            print(f"hf-fsdp: all output is in {log_dir}/rank_*.log", file=sys.stderr)
    return exit_code_of_ranks(result)


def _check_usage(arguments: LaunchArguments) -> None:
    options = arguments.options
    if not arguments.script:
        raise UsageError("no script. Usage: hf-fsdp launch [FLAGS] SCRIPT [ARGS ...]")
    check_script(arguments)
    if options.get("show_ranks", "main") not in ("main", "all"):
        raise UsageError(f"--show_ranks is {options['show_ranks']!r}; expected main or all.")
    if options.get("max_restarts", "0") != "0":
        raise UsageError("--max_restarts is not supported. Resume a failed run from its last checkpoint.")
    for name in ("json", "model"):
        if name in options and "dry_run" not in options:
            raise UsageError(f"--{name} needs --dry_run.")
    _check_writable(options)
    for name, pattern in (("grace", r"\d+(\.\d+)?"), ("num_cpu_threads_per_process", r"\d+")):
        if name in options and not re.fullmatch(pattern, options[name]):
            raise UsageError(f"--{name} is {options[name]!r}; expected a number.")
    try:
        exit_limit()
    except ValueError:
        raise UsageError(f"{LIMIT_VARIABLE} is {os.environ[LIMIT_VARIABLE]!r}; expected seconds.") from None


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


def _handover(arguments: LaunchArguments) -> LaunchHandover:
    from hf_fsdp_plugin.sources.accelerate_launch import default_config_file

    if given := arguments.options.get("config_file"):
        config: ConfigFile | None = ConfigFile.at(given)
    elif config := default_config_file(os.environ):
        _print_notices(arguments, f"no --config_file: reading Accelerate's default config file {config.shown}")
    sources = Sources(
        config=config,
        command_line=tuple(_with_absolute_path(flag) for flag in arguments.command_line),
        overrides=arguments.overrides,
        environ=user_variables(os.environ),
    )
    report = absolute(arguments.options.get("report"))
    options = arguments.options
    return LaunchHandover(
        sources=sources, quiet="quiet" in options, report=report, report_table="report_table" in options
    )


def _with_absolute_path(flag: str) -> str:
    name, _, value = flag.partition("=")
    is_path = flag_name(name) == "fsdp_config" and "{" not in value and Path(value).exists()
    return f"{name}={absolute(value)}" if is_path else flag


def _command(arguments: LaunchArguments) -> list[str]:
    module = ["-m"] if "module" in arguments.options else []
    program = [sys.executable, "-u", "-m", "hf_fsdp_plugin.cli.run_script"]
    return [*program, *module, arguments.script, *arguments.script_args]


def _print_notices(arguments: LaunchArguments, *lines: object) -> None:
    """Print notices to stderr, because stdout belongs to the script."""
    if "quiet" not in arguments.options:
        for line in lines:
            print(f"hf-fsdp: {line}", file=sys.stderr, flush=True)
