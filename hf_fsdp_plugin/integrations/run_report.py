"""The end of a run: what the model became, written and shown."""

from __future__ import annotations

import atexit
import contextlib
import sys
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.checkpoint.writing import save as saves
from hf_fsdp_plugin.integrations import session
from hf_fsdp_plugin.integrations.messages import tell
from hf_fsdp_plugin.observe.optimizer import optimizer_of, trained_pair
from hf_fsdp_plugin.observe.report import BatchShape, observe
from hf_fsdp_plugin.observe.watch import watch

REPORT_NAME = "fsdp_report.json"
# Accelerators that have prepared a model, and those of them whose run has been reported.
_open: WeakSet[Any] = WeakSet()
_reported: WeakSet[Any] = WeakSet()
_anything_prepared = False


def begin(accelerator: Any) -> None:
    """Watch the first step of the accelerator's models, and remember to report at the end; after each prepare."""
    global _anything_prepared
    _open.add(accelerator)
    _anything_prepared = True
    for model in accelerator._models:
        if plan_of(model) is not None:
            watch(model, optimizer_of(model, accelerator._optimizers))


def finish(
    accelerator: Any,
    *,
    output_dir: str | None = None,
    batch: BatchShape | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Observe the first planned model that is trained, write ``fsdp_report.json`` and print its table. Collective.

    Args:
        output_dir: the Trainer's; else the Accelerator's project folder, else the working directory.
        checkpoint: a folder that this run saved, to tell from its files what kind of state it holds.
        batch: what a step reads, where the caller knows; else it is taken from the prepared data loader.
    """
    planned = [model for model in accelerator._models if plan_of(model) is not None]
    if not planned:
        return
    saves.wait()
    model, optimizer = trained_pair(planned, accelerator._optimizers)
    plan = plan_of(model)
    assert plan is not None
    report = observe(
        model,
        plan,
        optimizer=optimizer,
        accelerator=accelerator,
        batch=batch or _loader_batch(accelerator),
        checkpoint=checkpoint,
        saved_asynchronously=saves.last_outcome.asynchronous if saves.last_outcome is not None else None,
    )
    _reported.add(accelerator)
    path = Path(session.current_session().report or output_dir or accelerator.project_dir or ".")
    if path.is_dir() or not session.current_session().report:
        path /= REPORT_NAME
    try:
        written = report.write(path)
    except OSError as error:  # the training is done; what it made is still to be saved
        tell(f"the report could not be written to {path}: {error.strerror or error}")
        return
    if written is not None:
        with contextlib.suppress(OSError):  # a reader of stdout (head, less) may have gone; the run has not failed
            print(f"\n{report}\n\nreport: {written}", flush=True)
    # Whoever goes on may read the file, on any rank.
    dist.barrier()


def report_at_exit() -> None:
    """Loops that never call ``end_training`` are reported when the interpreter ends."""
    atexit.unregister(_finish_open)
    atexit.register(_finish_open)


def abandon() -> None:
    """No report at exit: the script has failed; the other ranks may be gone, and a collective would wait for them."""
    atexit.unregister(_finish_open)


def _finish_open() -> None:
    # After an exception the other ranks may be gone, and a collective would wait for them.
    if getattr(sys, "last_type", None) is not None:
        return
    if dist.is_initialized():
        for accelerator in _open - _reported:
            finish(accelerator)
    if session.ambient_spec() is not None and not _anything_prepared:
        tell("the config asks for FSDP, and the script prepared no model with it: nothing was sharded.")


def _loader_batch(accelerator: Any) -> BatchShape | None:
    size = next((getattr(loader, "batch_size", None) for loader in accelerator._dataloaders), None)
    return BatchShape(per_device=size, accumulation=accelerator.gradient_accumulation_steps) if size else None
