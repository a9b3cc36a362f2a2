"""``hf-fsdp launch``: checks the config, starts one process a rank with the plugin in it, and tells how they ended."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_fsdp_plugin.cli.account import exit_code, first_failure, summary, tell
from hf_fsdp_plugin.cli.launch_flags import LaunchWords, UsageError, add_help, read_words
from hf_fsdp_plugin.cli.ranks import Outcome, Ranks
from hf_fsdp_plugin.cli.rendezvous import Rendezvous, RendezvousError, describe, meet_locally, meet_machines, place
from hf_fsdp_plugin.cli.run_script import FAILURE_VARIABLE, LAUNCHER_VARIABLE
from hf_fsdp_plugin.cli.scripts import check_script
from hf_fsdp_plugin.cli.world import World, find_accelerators, num_threads, resolve_world
from hf_fsdp_plugin.devices import DEVICES
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.sources.handover import LaunchHandover, absolute, user_variables
from hf_fsdp_plugin.spec.model import FsdpSpec, LaunchSection

HELP = "check a config, then run an unmodified script on every rank with the plugin installed"
EXAMPLES = (
    "hf-fsdp launch --config_file fsdp.yaml train.py --epochs 3",
    "hf-fsdp launch --num_processes 4 --cpu --dry_run -m package.train",
)
DEFAULT_GRACE = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Only the help: what follows SCRIPT is the script's, so the words are read by :func:`parse_argv`."""
    add_help(parser)


def parse_argv(argv: Sequence[str]) -> LaunchWords:
    """The arguments after ``launch``; ``SystemExit`` for wrong usage."""
    try:
        return read_words(argv)
    except UsageError as error:
        print(f"hf-fsdp launch: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run(words: LaunchWords) -> int:
    """Exit code: the script's; 1 for a config with errors, 2 for wrong usage."""
    try:
        _check_usage(words)
    except UsageError as error:
        print(f"hf-fsdp launch: {error}", file=sys.stderr)
        return 2
    try:
        return _launch(words)
    except SpecError as error:
        print(error, file=sys.stderr)
        return 1
    except RendezvousError as error:
        print(f"hf-fsdp: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before or after the ranks; while they run, signals are passed on
        return 130


def _launch(words: LaunchWords) -> int:
    handover = _handover(words)
    spec = _check(handover)
    _say(words, *(str(problem) for problem in spec.problems if problem.severity == "warning"))
    world = resolve_world(spec, find_accelerators())
    _say(words, *world.notices)
    if handover.config is None and not handover.command_line and not handover.overrides:
        _say(words, "no config: FSDP runs only where the script's own TrainingArguments or Accelerator asks for it")
    if "dry_run" in words.ours:
        print(describe(world, spec.launch))
        print(f"a rank runs: {shlex.join(_command(words))}")
        return 0
    if world.num_machines > 1:
        _say(words, f"waiting for {world.num_machines} machines at {place(spec.launch)}")
        met = meet_machines(spec.launch, world, rdzv_conf=words.ours.get("rdzv_conf", ""))
    else:
        met, notice = meet_locally(spec.launch)
        _say(words, *([notice] if notice else []))
    try:
        _say(words, describe(world, spec.launch, met=met))
        return _run_ranks(words, spec, world, met, handover)
    finally:
        met.close()


def _run_ranks(words: LaunchWords, spec: FsdpSpec, world: World, met: Rendezvous, handover: LaunchHandover) -> int:
    log_dir = Path(words.ours["log_dir"]) if "log_dir" in words.ours else None
    show_all = words.ours.get("show_ranks") == "all" or words.ours.get("tee", "0") != "0"
    base = {**os.environ, **_settings_env(spec, world, words), **handover.to_env()}
    with tempfile.TemporaryDirectory(prefix="hf_fsdp_") as scratch:
        ranks = Ranks(show_all=show_all, log_dir=log_dir, scratch=Path(scratch))
        try:
            for local_rank in range(world.num_local):
                env = {**base, **_rank_env(world, met, local_rank, role=words.ours.get("role", "default"))}
                ranks.start(met.first_rank + local_rank, _command(words), env, failure_variable=FAILURE_VARIABLE)
            outcome = ranks.watch(grace=float(words.ours.get("grace", DEFAULT_GRACE)), peers=met.peers)
        finally:
            ranks.kill()
        if first := first_failure(outcome.ends):
            met.peers.announce(f"rank {first.rank}: {summary(first)}")
        met.peers.leave()
    return _report(outcome, words, show_all=show_all, first_rank=met.first_rank, debug=spec.launch.debug)


def _report(outcome: Outcome, words: LaunchWords, *, show_all: bool, first_rank: int, debug: bool) -> int:
    live = [end.rank for end in outcome.ends] if show_all else [first_rank]
    sys.stdout.flush()
    if text := tell(outcome, debug=debug, shown_live=live):
        print(text, file=sys.stderr)
        failed = first_failure(outcome.ends)
        if "log_dir" in words.ours and failed is not None:
            print(f"hf-fsdp: all output is in {words.ours['log_dir']}/rank_*.log", file=sys.stderr)
    return exit_code(outcome)


def _check_usage(words: LaunchWords) -> None:
    ours = words.ours
    if not words.script:
        raise UsageError("no script. Usage: hf-fsdp launch [FLAGS] SCRIPT [ARGS ...]")
    check_script(words)
    if ours.get("show_ranks", "main") not in ("main", "all"):
        raise UsageError(f"--show_ranks {ours['show_ranks']}: write main or all.")
    if ours.get("max_restarts", "0") != "0":
        raise UsageError("--max_restarts: a failed run is not restarted; resume it from its last checkpoint.")
    _check_places(ours)
    for name in ("grace", "num_cpu_threads_per_process"):
        text = ours.get(name, "1")
        if not text.replace(".", "", 1).isdigit() or (name != "grace" and not text.isdigit()):
            raise UsageError(f"--{name} {text}: expected a number.")


def _check_places(ours: Mapping[str, str]) -> None:
    """Whether logs and the report can be written, while nothing has been spent yet."""
    for name in ("log_dir", "report"):
        if name not in ours:
            continue
        path = Path(ours[name])
        folder = path if name == "log_dir" or path.is_dir() else path.absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--{name} {ours[name]}: {error.strerror or error}.") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"--{name} {ours[name]}: no permission to write there.")


def _handover(words: LaunchWords) -> LaunchHandover:
    from hf_fsdp_plugin.sources.host_launcher import default_config_file

    config = words.ours.get("config_file")
    if config is None and (default := default_config_file(os.environ)) is not None:
        config = str(default)
        _say(words, f"no --config_file: Accelerate's default file is read, {config}")
    return LaunchHandover(
        config=absolute(config),
        config_shown=config,
        quiet="quiet" in words.ours,
        command_line=tuple(_with_absolute_path(word) for word in words.command_line),
        overrides=words.overrides,
        report=absolute(words.ours.get("report")),
        environ=user_variables(os.environ),
    )


def _with_absolute_path(word: str) -> str:
    name, _, value = word.partition("=")
    is_path = name == "--fsdp_config" and "{" not in value and Path(value).exists()
    return f"{name}={absolute(value)}" if is_path else word


def _check(handover: LaunchHandover) -> FsdpSpec:
    from hf_fsdp_plugin.spec.load import load_spec

    return load_spec(
        handover.config_file(),
        command_line=handover.command_line,
        overrides=handover.overrides,
        environ=handover.environ,
    )


def _command(words: LaunchWords) -> list[str]:
    module = ["-m"] if "module" in words.ours else []
    return [sys.executable, "-u", "-m", "hf_fsdp_plugin.cli.run_script", *module, words.script, *words.script_args]


def _settings_env(spec: FsdpSpec, world: World, words: LaunchWords) -> dict[str, str]:
    """What must stand in the environment before a script imports Accelerate or Transformers."""
    launch = spec.launch
    env = {LAUNCHER_VARIABLE: str(os.getpid())}
    threads = words.ours.get("num_cpu_threads_per_process")
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = threads or str(num_threads(world.num_local))
    if world.device == "cpu":
        env["ACCELERATE_USE_CPU"] = "true"
    if spec.asked("launch.mixed_precision"):
        env["ACCELERATE_MIXED_PRECISION"] = launch.mixed_precision
    if spec.loading.ram_efficient:  # from_pretrained looks at both
        env |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    if world.gpu_ids:
        env[DEVICES[world.device].visible_variable] = world.gpu_ids
    if world.device == "cuda" and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
        env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun
    return env | _passed_on(launch)


def _passed_on(launch: LaunchSection) -> dict[str, str]:
    env = {}
    if launch.debug:
        env["ACCELERATE_DEBUG_MODE"] = "true"
    if launch.enable_cpu_affinity:
        env["ACCELERATE_CPU_AFFINITY"] = "1"
    if launch.downcast_bf16:
        env["ACCELERATE_DOWNCAST_BF16"] = "true"
    for key, value in launch.dynamo_config.items():
        text = str(value).upper() if key == "backend" else str(value)
        env[f"ACCELERATE_DYNAMO_{key.removeprefix('dynamo_').upper()}"] = text
    return env


def _rank_env(world: World, met: Rendezvous, local_rank: int, *, role: str) -> Mapping[str, str]:
    """torchrun's variables, so that whatever runs under torchrun runs here."""
    rank = met.first_rank + local_rank
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.num_local),
        "GROUP_RANK": str(met.machine),
        "GROUP_WORLD_SIZE": str(world.num_machines),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world.size),
        "ROLE_NAME": role,
        "MASTER_ADDR": met.address,
        "MASTER_PORT": str(met.port),
        "TORCHELASTIC_RUN_ID": "hf_fsdp",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(met.hosted),
    }


def _say(words: LaunchWords, *lines: str) -> None:
    """Notices go to stderr: stdout is the script's."""
    if "quiet" not in words.ours:
        for line in lines:
            print(f"hf-fsdp: {line}", file=sys.stderr, flush=True)
