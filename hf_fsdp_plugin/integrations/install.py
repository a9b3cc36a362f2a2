"""``install`` and ``uninstall``: the hooks of Accelerate and Transformers in this process.

Which functions they replace: ``integrations.hooks``. For the Trainer of another library, see ``transformers.trainer``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from hf_fsdp_plugin.backends.ranks.cluster import slurm_variables
from hf_fsdp_plugin.devices import accelerator_type, select_device
from hf_fsdp_plugin.integrations import observing, patching, resuming
from hf_fsdp_plugin.integrations.accelerate.run_report import RunReporter
from hf_fsdp_plugin.integrations.before_imports import may_be_rank
from hf_fsdp_plugin.integrations.failure_watch import watch
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import print_once, print_warnings, printer
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.rank_variables import launched_local_rank, launched_world_size
from hf_fsdp_plugin.sources import accelerate_file
from hf_fsdp_plugin.sources.environment_variables import absolute_path, variables_without_torchrun
from hf_fsdp_plugin.sources.handover import LaunchHandover
from hf_fsdp_plugin.sources.interface import Sources, SourceSettings, config_of
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import add_settings, read_settings
from hf_fsdp_plugin.spec.rules import mesh_variables
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.supported import untested_versions
from hf_fsdp_plugin.text import shorten


def install(
    config: Any = None,
    *,
    command_line: Sequence[str] = (),
    overrides: Sequence[str] = (),
    report: str | None = None,
    report_table: bool = False,
) -> FsdpSpec | None:
    """Hook Accelerate and Transformers in this process. Call it before the first Accelerator or TrainingArguments.

    Args:
        config: path of an Accelerate YAML or JSON, or a dict with its content. Default: the config of the launcher
            (passed on by ``hf-fsdp launch``; located for ``accelerate launch``). Without a launcher, the environment is
            the only source.
        command_line: setting flags, as on the command line of a launcher.
        overrides: ``NAME=VALUE``, as for ``--set``.
        report: path of ``fsdp_report.json``; by default in the Trainer's output folder.
        report_table: print the tables of the report at the end of a run, instead of a summary.

    Returns:
        The spec of these sources, or ``None`` if they do not enable FSDP. The script's TrainingArguments can still
        enable it.

    Raises:
        SpecError: any source has an error. The exception contains all problems of all sources.
    """
    state, changes = session(), patching.changes()
    state.defer(None)
    if state.is_automatic:  # undone, so that the script finds the settings and the environment as without the plugin
        changes.restore_variables()
        state.installed = state.is_automatic = False
    watch().arm()
    handover = LaunchHandover.from_env(os.environ)
    if handover is not None and handover.quiet:
        printer().quiet = True
    # The arguments complete the sources and the options of an earlier `install`, or else those of the launcher.
    before: Any = state if state.installed else handover
    arguments: Any = {"config": config_of(config), "command_line": command_line, "overrides": overrides}
    if before:
        given = add_settings(before.given, **arguments)
        _report_replaced_config(config, before.given, given)
    else:
        environ = variables_without_torchrun(os.environ)
        given = read_settings(Sources(environ=environ, as_launched=True, **arguments))
    report = absolute_path(report) or getattr(before, "report", None)
    report_table = report_table or getattr(before, "report_table", False)
    spec = state.begin(given, report=report, report_table=report_table)
    print_warnings(spec.problems, printed_by_launcher=handover is not None)
    if newer := untested_versions():
        message = f"newer than the tested versions: {', '.join(newer)}."
        print_once(Problem(code="FSDP-W622", message=message, fix="`hf-fsdp doctor` shows what changed."))
    changes.install("accelerate", "transformers", "loading")
    # The session has read the environment by now, so variables that are set here are not settings of the user.
    changes.set_variables(**slurm_variables(os.environ))
    resuming.attempt().begin()
    if "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ:
        # Otherwise torch initializes CUDA to look for GPUs, and processes that are forked later cannot use it.
        changes.set_variables(PYTORCH_NVML_BASED_CUDA_CHECK="1")
    cpu = spec.launch.use_cpu or accelerator_type() == "cpu"
    # Processes that a rank has spawned inherit its variables, and import its script again.
    is_child = "RANK" in os.environ and not may_be_rank(os.environ)
    if "RANK" in os.environ and cpu:
        # Otherwise Accelerate creates no process group on CPU ranks of other launchers.
        changes.set_variables(ACCELERATE_USE_CPU="true")
    elif "LOCAL_RANK" in os.environ and not cpu and not is_child:
        # Libraries that quantize place a model on the current device, also before the first Accelerator.
        select_device(launched_local_rank())
    if state.ambient is not None:
        changes.set_variables(**mesh_variables(spec, launched_world_size()) if "RANK" in os.environ else {})
        patching.set_loading_variables(spec)
        if spec.loading.ram_efficient and "RANK" in os.environ and not is_child:
            from accelerate import PartialState

            # Scripts and libraries that load a model first ask torch.distributed or PartialState() for their rank. The
            # time-out is applied when a script gives one.
            PartialState(cpu=cpu)
    if not is_child:
        process.get(RunReporter)
    observing.attach_named(spec)
    return state.ambient


def _report_replaced_config(config: Any, before: Iterable[SourceSettings], now: Iterable[SourceSettings]) -> None:
    """Report that the config of ``install`` replaces another one with other settings."""
    levels = [[each for each in given if each.level == accelerate_file.SOURCE] for given in (before, now)]
    values = [[(setting.name, setting.value) for each in level for setting in each.settings] for level in levels]
    if levels[0] and values[0] != values[1]:
        message = f"install() was called with {shorten(str(config), 200)}, which replaces {levels[0][0].source}."
        fix = "Pass one config to the launcher or to install(). Single values are overridden with overrides=."
        print_once(Problem(code="FSDP-W648", message=message, fix=fix))


def uninstall() -> None:
    """Undo ``install``: hooks, import finder, ``sys.excepthook``, exit handler, environment variables and session.

    Collective if a checkpoint is being written in the background: the call waits for it. Existing models, Accelerators
    and Trainers keep their plan, and the process group remains.
    """
    process.close()
