"""Runs a job of this package on ranks of this machine, with hidden output: a preflight or a benchmark."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hf_fsdp_plugin.launcher.environment import launch_env
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.runs.exits import RunResult
from hf_fsdp_plugin.sources.launchers import LaunchHandover
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec

_GRACE: Final = 3.0
"""Seconds between SIGTERM and SIGKILL."""


def run_job(
    words: Sequence[str],
    spec: FsdpSpec,
    world: World,
    handover: LaunchHandover,
    *,
    env: Mapping[str, str],
    should_stop: Callable[[], str | None],
) -> RunResult:
    """Run a script or a module once on every rank, as ``hf-fsdp launch`` does, and return how the ranks exited.

    Args:
        words: SCRIPT ARGS or ``-m`` MODULE ARGS.
        env: variables of the ranks in addition to those of the spec.
        should_stop: called again and again while the ranks run. Returns why they are stopped; ``None`` if they are not.
    """
    from hf_fsdp_plugin.launcher.agent import RankJob  # lazy: imports torch
    from hf_fsdp_plugin.launcher.attempts import run_locally

    command = [sys.executable, "-u", "-m", "hf_fsdp_plugin.launcher.run_script", *words]
    env = {**launch_env(spec, world, handover), **env}
    return run_locally(RankJob(command=command, num_local=world.size, env=env, grace=_GRACE, should_stop=should_stop))
