"""``install`` and ``uninstall``: the hooks of Accelerate and Transformers in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_fsdp_plugin.devices import accelerator_type
from hf_fsdp_plugin.integrations import session
from hf_fsdp_plugin.integrations.environment import restore_variables, set_loading_variables, set_variables
from hf_fsdp_plugin.integrations.messages import close_messages, install_excepthook, print_warnings, set_quiet
from hf_fsdp_plugin.integrations.patching import install_hooks, remove_hooks
from hf_fsdp_plugin.integrations.run_report import start_reporting, stop_reporting
from hf_fsdp_plugin.sources.handover import LaunchHandover, absolute
from hf_fsdp_plugin.sources.model import Sources, config_of
from hf_fsdp_plugin.spec.model import FsdpSpec


def install(
    config: Any = None, *, command_line: Sequence[str] = (), overrides: Sequence[str] = (), report: str | None = None
) -> FsdpSpec | None:
    """Hook Accelerate and Transformers in this process. Call it before the first Accelerator or TrainingArguments.

    Args:
        config: path of an Accelerate YAML or JSON, or a dict with its content. By default the config of the launcher:
            ``hf-fsdp launch`` passes it on, and behind a stock ``accelerate launch`` it is located. Without a launcher,
            the environment is the only source.
        command_line: setting flags, as on the command line of a launcher.
        overrides: ``NAME=VALUE``, as for ``--set``.
        report: path of ``fsdp_report.json``; by default in the Trainer's output folder.

    Returns:
        The spec of these sources, or ``None`` if they do not enable FSDP. The script's TrainingArguments still may.

    Raises:
        SpecError: one of the problems is an error; it contains those of all sources.
    """
    install_excepthook()
    handover = LaunchHandover.from_env(os.environ)
    if handover is not None and handover.quiet:
        set_quiet()
    before, report_before = _sources_before(handover)
    sources = replace(
        before,
        config=before.config if config is None else config_of(config),
        command_line=(*before.command_line, *command_line),
        overrides=(*before.overrides, *overrides),
    )
    spec = session.begin(sources, report=absolute(report) or report_before)
    print_warnings(spec.problems, printed_by_launcher=handover is not None)
    install_hooks("accelerate", "transformers")
    asked = session.asks_for_fsdp(spec)
    # After the session has read the environment: the variables set here are not settings of the user.
    _choose_cpu_ranks(spec)
    if asked:
        set_loading_variables(spec)
        if spec.loading.ram_efficient:
            _start_process_group(spec)
    start_reporting()
    return spec if asked else None


def uninstall() -> None:
    """Undo ``install``: hooks, import finder, ``sys.excepthook``, exit handler, environment variables and session.

    Waits for a checkpoint that is being written; then it is collective. Models, Accelerators and Trainers that exist
    already keep their plan; the process group stays.
    """
    from hf_fsdp_plugin.integrations.saving import manager

    manager.close()
    stop_reporting()
    session.close()
    remove_hooks()
    restore_variables()
    close_messages()


def _sources_before(handover: LaunchHandover | None) -> tuple[Sources, str | None]:
    """Return the sources, and the path of the report, of an ``install`` before this one or of the launcher."""
    if session.is_installed():
        return session.current_session().sources, session.current_session().report
    if handover is not None:
        return handover.sources, handover.report
    return Sources(environ=dict(os.environ), as_launched=True), None


def _choose_cpu_ranks(spec: FsdpSpec) -> None:
    """Set the variable without which Accelerate creates no process group on the CPU ranks of a stock launcher."""
    if "RANK" in os.environ and (spec.launch.use_cpu or accelerator_type() == "cpu"):
        set_variables(ACCELERATE_USE_CPU="true")


def _start_process_group(spec: FsdpSpec) -> None:
    """Create the process group that RAM-efficient loading in ``from_pretrained`` requires; scripts create it later."""
    if "RANK" not in os.environ:
        return
    from accelerate import PartialState

    # Without an accelerator, Accelerate creates a process group only if cpu=True.
    PartialState(cpu=spec.launch.use_cpu or accelerator_type() == "cpu")
