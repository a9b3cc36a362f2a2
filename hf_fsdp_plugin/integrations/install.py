"""``install``: from here on, FSDP in this process is read by our parser, run by our plan, and reported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hf_fsdp_plugin.devices import accelerator_type
from hf_fsdp_plugin.integrations import session
from hf_fsdp_plugin.integrations.environment import restore_variables, set_loading_variables, set_variables
from hf_fsdp_plugin.integrations.messages import close_messages, install_excepthook, print_warnings, set_quiet
from hf_fsdp_plugin.integrations.patching import install_hooks, remove_hooks
from hf_fsdp_plugin.integrations.run_report import abandon, report_at_exit
from hf_fsdp_plugin.integrations.session import Session
from hf_fsdp_plugin.sources.accelerate_yaml import ConfigFile
from hf_fsdp_plugin.sources.handover import LaunchHandover, absolute
from hf_fsdp_plugin.spec.model import FsdpSpec


def install(
    config: Any = None, *, command_line: Sequence[str] = (), overrides: Sequence[str] = (), report: str | None = None
) -> FsdpSpec | None:
    """Hook Accelerate and Transformers in this process. Call it before the first Accelerator or TrainingArguments.

    Args:
        config: path of an Accelerate YAML or JSON, or a dict with its content. Left out, it is what the launcher was
        given:
            ``hf-fsdp launch`` hands it over, behind a stock ``accelerate launch`` it is looked up; else the
            environment is all there is.
        command_line: setting flags as on a launcher's command line.
        overrides: ``NAME=VALUE`` as for ``--set``.
        report: where ``fsdp_report.json`` goes; default the Trainer's output folder.

    Returns:
        The spec of these sources, or ``None`` where they do not ask for FSDP (a script's TrainingArguments still may).

    Raises:
        SpecError: with all problems of all sources.
    """
    install_excepthook()
    handover = LaunchHandover.from_env(os.environ)
    if handover is not None and handover.quiet:
        set_quiet()
    spec = session.begin(_make_session(handover, config, command_line, overrides, report))
    print_warnings(spec.problems, printed_by_launcher=handover is not None)
    install_hooks("accelerate", "transformers")
    asked = session.asks_for_fsdp(spec)
    # After the session has read the environment: what is set here is no wish of the user's.
    _choose_cpu_ranks(spec)
    if asked:
        set_loading_variables(spec)
        if spec.loading.ram_efficient:
            _start_process_group(spec)
    report_at_exit()
    return spec if asked else None


def uninstall() -> None:
    """Undo ``install``: hooks, import finder, ``sys.excepthook``, exit handler, environment variables and session.

    Models, Accelerators and Trainers that exist already keep their plan; the process group stays.
    """
    abandon()
    session.close()
    remove_hooks()
    restore_variables()
    close_messages()


def _make_session(
    handover: LaunchHandover | None,
    config: Any,
    command_line: Sequence[str],
    overrides: Sequence[str],
    report: str | None,
) -> Session:
    """What was said here, on top of what the launcher handed over, or of an ``install`` before this one."""
    if isinstance(config, (str, os.PathLike)):
        config = ConfigFile.written(os.fspath(config))
    before = session.current_session() if session.is_installed() else _launched_session(handover)
    return Session(
        config=config if config is not None else before.config,
        command_line=(*before.command_line, *command_line),
        overrides=(*before.overrides, *overrides),
        environ=before.environ,
        report=absolute(report) or before.report,
        as_launched=before.as_launched and config is None,
    )


def _launched_session(handover: LaunchHandover | None) -> Session:
    if handover is None:
        return Session(environ=dict(os.environ), as_launched=True)
    return Session(
        config=handover.config_file(),
        command_line=handover.command_line,
        overrides=handover.overrides,
        environ=handover.environ,
        report=handover.report,
    )


def _choose_cpu_ranks(spec: FsdpSpec) -> None:
    """Accelerate makes no process group on CPU ranks of a stock launcher unless a variable says that they are meant."""
    if "RANK" in os.environ and (spec.launch.use_cpu or accelerator_type() == "cpu"):
        set_variables(ACCELERATE_USE_CPU="true")


def _start_process_group(spec: FsdpSpec) -> None:
    """``from_pretrained`` loads on rank 0 alone only where a process group is up; scripts load before they make one."""
    if "RANK" not in os.environ:
        return
    from accelerate import PartialState

    # Without a GPU, Accelerate makes no process group unless told that the CPU is meant.
    PartialState(cpu=spec.launch.use_cpu or accelerator_type() == "cpu")
