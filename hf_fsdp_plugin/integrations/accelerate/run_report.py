"""The report at the end of a run: written to ``fsdp_report.json``, and printed as a summary or as tables."""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks.agreement import announce_end, gather_objects
from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.checkpoint.formats.known_formats import stored_state_dict_type
from hf_fsdp_plugin.checkpoint.names import REPORT_NAME
from hf_fsdp_plugin.hangs.calls import record
from hf_fsdp_plugin.integrations.accelerate import private
from hf_fsdp_plugin.integrations.accelerate.loader_batch import loader_batch
from hf_fsdp_plugin.integrations.run_metrics import run_metrics
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.session import current_run, session
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.observe.first_step import record_first_step
from hf_fsdp_plugin.observe.observed_run import common_value
from hf_fsdp_plugin.observe.report import BatchShape, Report
from hf_fsdp_plugin.observe.report_builder import build_report_of_trained
from hf_fsdp_plugin.observe.weights import optimizers_of
from hf_fsdp_plugin.state import find_part, process
from hf_fsdp_plugin.text import plural


class RunReporter:
    """Reports the runs of this process at exit, except runs that ``end_training`` or the Trainer has reported.

    ``install()`` creates it. It is ended after a failure, too.

    The newest accelerator is kept alive until its run is reported, because many scripts create it in a function and
    return without ``end_training``. Older ones are not reported, because their models may have been deleted.
    """

    def __init__(self) -> None:
        self._unreported: list[weakref.ref[Any]] = []
        self._reported: weakref.WeakSet[Any] = weakref.WeakSet()
        self._newest: Any = None
        self._has_prepared = False
        atexit.register(self._at_exit)

    def add_prepared(self, accelerator: Any) -> None:
        """Add an accelerator that has prepared a model."""
        self._has_prepared = True
        if accelerator in self._reported:
            return
        if not self.awaits(accelerator):
            self._unreported.append(weakref.ref(accelerator))
        self._newest = accelerator

    def add_reported(self, accelerator: Any) -> None:
        """Add an accelerator whose run has been reported. The run may have begun before this reporter."""
        self._reported.add(accelerator)
        self._unreported = [each for each in self._unreported if each() is not accelerator]
        if self._newest is accelerator:
            self._newest = None

    def awaits(self, accelerator: Any) -> bool:
        """Return whether the accelerator has prepared a model and its run has not been reported."""
        return any(each() is accelerator for each in self._unreported)

    def close(self) -> None:
        """Cancel the reports at exit."""
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        # After an exception, a collective may hang, because other ranks may have exited.
        if getattr(sys, "last_type", None) is not None:
            return
        announce_end()
        if (newest := self._newest) is not None:
            if dist.is_initialized():
                # A rank that is still in a step is in another collective, at which a gather of gloo fails at once. The
                # reduction with which the report begins would wait for it.
                gather_objects(None)
                report_run(newest)
            else:
                message = "the process group was destroyed first. Call accelerator.end_training() before it."
                print_once(f"no report: {message}")
            self.add_reported(newest)
        if self._unreported:
            runs = plural(len(self._unreported), "run")
            print_once(f"no report of {runs} before the last one. Call accelerator.end_training() after each run.")
        if session().ambient is not None and not self._has_prepared:
            print_once("nothing was sharded: the config enables FSDP, but the script prepared no model.")


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """The output folder of the Trainer of an Accelerator, for the report of an evaluation, written at exit."""

    path: str


def track_run(accelerator: Any) -> None:
    """Record the first step of an accelerator's models for the report. Call it after each ``prepare``."""
    if (reporter := process.find(RunReporter)) is not None:
        reporter.add_prepared(accelerator)
    for model in private.prepared_models(accelerator):
        if plan_of(model) is not None:
            record_first_step(model, *optimizers_of(model, private.prepared_optimizers(accelerator)))


def report_run(
    accelerator: Any, *, output_dir: str | None = None, batch: BatchShape | None = None, checkpoint: Path | None = None
) -> None:
    """Report the first trained model: write ``fsdp_report.json`` and print it. Collective.

    Nothing is reported without a prepared model; if ``free_memory`` has released it, a message is printed. If no report
    can be made or written, a message is printed and no error is raised, because the script may still have to save the
    trained model.

    Args:
        output_dir: folder of the report; by default that of the Trainer, the project folder or the working
            directory.
        batch, checkpoint: see :func:`report_accelerator`.
    """
    reporter = process.find(RunReporter)
    if not any(plan_of(model) is not None for model in private.prepared_models(accelerator)):
        if reporter is not None and reporter.awaits(accelerator):
            reporter.add_reported(accelerator)
            print_once(
                "no report: the prepared model was released before the end of the run, by free_memory(), which a "
                "Trainer calls before each training. Call accelerator.end_training() before it."
            )
        return
    manager().wait()
    run_metrics().end("finished")
    if reporter is not None:
        reporter.add_reported(accelerator)
    try:
        report = report_accelerator(accelerator, batch=batch, checkpoint=checkpoint)
    except Exception as error:
        print_once(f"no report: {type(error).__name__}: {error}. The run itself is not affected.")
        return
    path = Path(session().report or report_folder(accelerator, output_dir))
    if path.is_dir() or not session().report:
        path /= REPORT_NAME
    try:
        if (written := report.write(path)) is not None:
            text = f"{report}\n\nreport: {written}"
            if not session().report_table:
                text = f"{report.summary()}\nreport: {written} (--report_table prints its tables)"
            with contextlib.suppress(OSError):  # stdout may be a pipe whose reader (head, less) has exited
                print(f"\n{text}", flush=True)
    except OSError as error:
        print_once(f"cannot write the report to {path}: {error.strerror or error}. Pass a writable path as --report.")
    finally:
        # Any rank may read the file after this barrier. A failed rank must not leave the others waiting.
        dist.barrier()


def report_folder(accelerator: Any, output_dir: str | None = None) -> str:
    """Return the folder of the run in which the report is written; empty for the working folder."""
    if not output_dir and (of_trainer := find_part(accelerator, OutputFolder)) is not None:
        output_dir = of_trainer.path
    return output_dir or accelerator.project_dir or ""


def report_accelerator(accelerator: Any, *, batch: BatchShape | None = None, checkpoint: Path | None = None) -> Report:
    """Return the report of an ``Accelerator``. Collective.

    Args:
        batch: the input of one optimizer step. Default: derived from the first data loader with a batch size.
        checkpoint: a checkpoint of this run. If checkpoints were saved, their state dict types are reported, else that
            of the accelerator.

    Raises:
        SpecError: the plugin has prepared no model of this accelerator.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    models = private.prepared_models(accelerator)
    kinds: set[Any] = {kind for model in models for kind in manager().saved_kinds.get(model, ())}
    kinds.add(stored_state_dict_type(checkpoint) if checkpoint is not None else None)
    report = build_report_of_trained(
        [*models, *getattr(plugin, "evaluated_models", ())],
        private.prepared_optimizers(accelerator),
        batch=batch or loader_batch(accelerator),
        state_dict=common_value(sorted(filter(None, kinds))) or getattr(plugin, "state_dict_kind", None),
        state_dict_reason=getattr(plugin, "state_dict_reason", ""),
        saved_asynchronously=next(
            (each for each in map(manager().saved_asynchronously.get, models) if each is not None), None
        ),
        storage=manager().storage_url,
    )
    return replace(report, restarts=current_run().restarts, steps_before=record().counts.before)
