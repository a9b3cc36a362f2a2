"""The profile of this process: starts and stops torch's profiler by the optimizer's steps, and writes its files.

In the trace are marks of this package: phases of a step, forwards of units, and waits for collectives.

The trace of a rank is analyzed in the rank, so that the launcher reads a small file per rank.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, record_function, supported_activities
from torch.profiler import profile as torch_profile

from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.devices import available_device
from hf_fsdp_plugin.hangs.process_end import is_failure
from hf_fsdp_plugin.integrations.accelerate.run_report import RunReporter
from hf_fsdp_plugin.integrations.observing import attach as attach_observer
from hf_fsdp_plugin.observe.units import UnitObservation, observe_units
from hf_fsdp_plugin.observers import ObservedCall, ObservedPhase, Observer
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.rank_variables import launched_rank, launched_world_size
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.tools.profile import rank_profile, run_profile
from hf_fsdp_plugin.torch_private.functions import profiler_is_running
from hf_fsdp_plugin.torch_private.modules import set_unit_name, unit_name

_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class _OpenMarks(threading.local):
    """The forwards that are running in a thread: a recomputed forward runs in a thread of autograd."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, AbstractContextManager[Any]]] = []


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


class Profiling(Observer):
    """Profiles the steps of one run from its creation on, and writes marks into the trace while torch's profiler runs.

    A step ends when the first optimizer that makes a step has made its next one.

    Attributes:
        active: whether steps are still profiled or measured.
        traces: whether torch's profiler runs.
    """

    may_end_run = True

    def __init__(self, options: run_profile.ProfileOptions) -> None:
        self.options = options
        self.active, self.traces = True, False
        self._open = _OpenMarks()
        self._hooks: list[Any] = []
        self._profiler: Any = None
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._num_steps = 0
        self._step_began: float | None = None
        self._seconds: dict[int, float] = {}  # number of a step, from 1 -> its time
        self._detach = attach_observer(self)

    def model_prepared(self, accelerator: Any, model: nn.Module, plan: Any, *, is_trained: bool) -> None:
        """Mark the forwards of a sharded model, and those of its units."""
        for unit in observe_units(model):
            set_unit_name(unit.live.source, unit.name)
            if not unit.live.is_root and unit.num_params:
                # A checkpointed module is called again inside its wrappers.
                self._mark_forwards(unwrapped(unit.live.modules[0]), f"{rank_profile.UNIT}{unit.name}")
        self._mark_forwards(model)
        self._hooks.append(model.register_forward_pre_hook(self._see_forward, prepend=True))
        self._model = model if self._model is None else self._model

    def phase(self, phase: ObservedPhase) -> AbstractContextManager[Any]:
        return self._mark(f"{rank_profile.PREFIX}{phase}")

    def call(self, kind: ObservedCall, unit: Any) -> AbstractContextManager[Any]:
        if kind == "wait":
            return self._mark(rank_profile.WAIT)
        prefix = rank_profile.GATHER if kind == "gather" else rank_profile.REDUCE
        return self._mark(f"{prefix}{unit_name(unit, root='')}")

    def run_ended(self, error: BaseException | None) -> None:
        self.end(failed=error is not None and is_failure(error))

    def _mark(self, name: str) -> AbstractContextManager[Any]:
        return record_function(name) if self.traces else nullcontext()

    def _mark_boundary(self) -> None:
        with self._mark(rank_profile.BOUNDARY):
            pass

    def end(self, *, failed: bool = False) -> None:
        """Write the result of the steps that were made, if it is not written yet; nothing after a failure.

        Raises:
            SpecError: the result cannot be written (FSDP-E772). No file of this rank is left then.
        """
        if not self.active:
            return
        self.active = False
        self._detach()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._stop_tracing()
        if failed:
            _remove_files(self.options)
        else:
            self._write()

    def _mark_forwards(self, module: nn.Module, name: str = "") -> None:
        """Mark the forwards of a module by a name, or by their phase.

        A forward that an exception ends, as recomputation does, is marked too.
        """

        def begin(module: nn.Module, _: Any) -> None:
            if not torch.compiler.is_compiling():
                mark = self._mark(name or f"{rank_profile.PREFIX}{'forward' if _trains(module) else 'evaluation'}")
                mark.__enter__()
                self._open.marks.append((id(module), mark))

        def end(module: nn.Module, *_: Any) -> None:
            stack = [] if torch.compiler.is_compiling() else self._open.marks
            while stack and any(key == id(module) for key, _ in stack):
                key, mark = stack.pop()
                mark.__exit__(None, None, None)
                if key == id(module):
                    return

        self._hooks.append(module.register_forward_pre_hook(begin, prepend=True))
        self._hooks.append(module.register_forward_hook(end, always_call=True))

    def _see_forward(self, module: nn.Module, _: Any) -> None:
        """Start the profiler with the first step, if no step is waited for."""
        if torch.compiler.is_compiling() or not _trains(module):
            return
        if self._num_steps == 0 and self.options.wait == 0 and self._profiler is None:
            self._start_tracing()

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        now, options = time.perf_counter(), self.options
        if self._optimizer is None:
            self._optimizer = optimizer
        if not self.active or optimizer is not self._optimizer:
            return
        self._num_steps += 1
        if self._step_began is not None:
            self._seconds[self._num_steps] = now - self._step_began
        self._mark_boundary()
        if self._num_steps == options.last_traced:
            self._stop_tracing()
        elif self._num_steps == options.wait:
            self._start_tracing()
        if self._num_steps == options.last:
            self.end()
            if options.stops:
                process.end(RunReporter)  # no report, because the run is not complete
                raise SystemExit(0)
        self._step_began = time.perf_counter()

    def _start_tracing(self) -> None:
        if profiler_is_running():
            message = "the script runs torch's profiler itself, and a process can have one at a time."
            fix = "Remove the script's own profiler for this run."
            raise SpecError([Problem(code="FSDP-E776", message=message, fix=fix)])
        on_device = available_device().is_initialized() and available_device().type != "cpu"
        activities = set(supported_activities()) if on_device else {ProfilerActivity.CPU}
        self._profiler = torch_profile(activities=activities)
        self._profiler.start()
        self.traces = True
        self._mark_boundary()

    def _stop_tracing(self) -> None:
        if self.traces:
            self.traces = False
            self._profiler.stop()

    def _write(self) -> None:
        """Write the profile of this rank, and the trace if it is one of the first ranks."""
        options, rank = self.options, _rank()
        trace, content = rank_profile.Trace(), None
        with tempfile.TemporaryDirectory(prefix="hf_fsdp_profile_") as scratch:
            path = Path(scratch) / "trace.json"
            try:
                if self._profiler is not None:
                    self._profiler.export_chrome_trace(str(path))
                    trace, content = rank_profile.read_trace(path), path.read_bytes()
            except (OSError, ValueError) as error:
                # torch ignores errors when it writes a trace, so that a full disk shows as incomplete JSON.
                reason = error.strerror if isinstance(error, OSError) and error.strerror else "the disk may be full"
                place = os.environ.get("TMPDIR") or "/tmp"
                message = f"a trace in {place} is incomplete or cannot be written: {reason}."
                raise _not_written(message, "Free space there, or set TMPDIR to another folder.") from error
        plan = plan_of(self._model) if self._model is not None else None
        units = observe_units(self._model) if self._model is not None else ()
        first_active = options.wait + options.warmup + 1
        profile = rank_profile.profile_of(
            trace,
            unit_names=[unit.name for unit in units],
            skip=options.warmup,
            most=options.active,
            rank=rank,
            world_size=dist.get_world_size() if dist.is_initialized() else launched_world_size(),
            host=socket.gethostname(),
            device=plan.device_type if plan is not None else "cpu",
            num_made=self._num_steps,
            profiled=[self._seconds[n] for n in self._seconds if first_active <= n <= options.last_traced],
            # The first step takes longer, and so does the one after the profiler was stopped.
            unprofiled=[self._seconds[n] for n in self._seconds if n <= options.wait or n > options.last_traced + 1],
            facts=self._facts(plan, units),
        )
        try:
            run_profile.write_file(options.rank_file(rank), json.dumps(asdict(profile)).encode())
            if content is not None and rank < run_profile.NUM_TRACES:
                run_profile.write_file(options.trace_file(rank), gzip.compress(content, compresslevel=3, mtime=0))
        except OSError as error:
            _remove_files(options)
            message = f"the profile cannot be written to {options.folder}: {error.strerror or error}."
            fix = "Free space, or write to another folder: --output DIR."
            raise _not_written(message, fix) from error

    def _facts(self, plan: Any, units: Sequence[UnitObservation]) -> dict[str, Any]:
        """Return values that the trace does not contain: the model, and sizes and ranks of units."""
        of_units = {
            unit.name: {
                "bytes": unit.num_params * _ITEM_BYTES.get(unit.param_dtype, 4),
                "group": f"{len(unit.live.shard_ranks)} from {min(unit.live.shard_ranks, default=0)}",
            }
            for unit in units
        }
        facts: dict[str, Any] = {"units": of_units}
        if plan is not None:
            facts["plan"] = {name: getattr(plan, name) for name in ("backend", "strategy", "model_class")}
        return facts


def _remove_files(options: run_profile.ProfileOptions) -> None:
    with contextlib.suppress(OSError):
        run_profile.remove_paths([options.rank_file(_rank()), options.trace_file(_rank())])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else launched_rank()


def _not_written(message: str, fix: str) -> SpecError:
    return SpecError([Problem(code="FSDP-E772", message=message, fix=fix, rank=_rank())])


def attach(spec: Any) -> None:
    """Profile the script of this rank, with the options that ``hf-fsdp profile`` has put into the environment."""
    Profiling(run_profile.ProfileOptions(**json.loads(os.environ.pop(run_profile.OPTIONS_VARIABLE))))
