"""The profile of this process: starts and stops torch's profiler by the optimizer's steps."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, supported_activities
from torch.profiler import profile as torch_profile

from hf_fsdp_plugin.devices import available_device
from hf_fsdp_plugin.estimate.results import Moment
from hf_fsdp_plugin.integrations.call_hooks import call_marks
from hf_fsdp_plugin.integrations.patching import install_hooks
from hf_fsdp_plugin.integrations.profiling.marking import marks
from hf_fsdp_plugin.integrations.profiling.options import ProfileOptions
from hf_fsdp_plugin.integrations.profiling.result import Recorded, temporary_files, write_rank_files
from hf_fsdp_plugin.integrations.run_report import stop_reporting
from hf_fsdp_plugin.observe.memory import gradient_bytes, state_tensors, storage_bytes
from hf_fsdp_plugin.observe.profile.activity import Sample, memory_moments
from hf_fsdp_plugin.observe.profile.trace import BOUNDARY, SAMPLE, WAIT, read_trace
from hf_fsdp_plugin.observe.units import observe_units, unmanaged_parameters
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.functions import profiler_is_running

_MAX_SAMPLES: Final = 100
"""Samples of memory in one step. A sample reads all units, so that a step of a large model has few of them."""


class ProfileEnd(SystemExit):
    """Ends the script after the profiled steps."""

    def __init__(self) -> None:
        super().__init__(0)


class MemoryStep:
    """One step that is slower than others, because every allocation is recorded.

    Args:
        num_collectives: of a step, by which the samples are distributed.
    """

    def __init__(self, model: nn.Module | None, optimizer: torch.optim.Optimizer, num_collectives: int) -> None:
        self._model, self._optimizer = model, optimizer
        self._every = -(-num_collectives // _MAX_SAMPLES) or 1
        self._num_calls = 0
        self._samples: list[Sample] = []
        # Kernels are not traced: memory is allocated by the CPU thread that launches them.
        self._profiler = torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        self._profiler.start()
        marks.enabled = True
        marks.instant(BOUNDARY)
        self.sample()

    def sample(self) -> None:
        """Read the memory of the units. Call it after each collective."""
        self._num_calls += 1
        if self._model is not None and (self._num_calls - 1) % self._every == 0:
            sample = self._read(self._model)
            marks.instant(SAMPLE)
            self._samples.append(sample)

    def discard(self) -> None:
        """Stop without a result."""
        marks.enabled = False
        self._profiler.stop()

    def stop(self) -> Sequence[Moment]:
        """Return the memory of the step, the last boundary of which is marked.

        Raises:
            OSError, ValueError: the trace cannot be written to the folder of temporary files.
        """
        self.discard()
        with tempfile.TemporaryDirectory(prefix="hf_fsdp_profile_") as scratch:
            path = Path(scratch) / "memory.json"
            self._profiler.export_chrome_trace(str(path))
            return memory_moments(read_trace(path), self._samples)

    def _read(self, model: nn.Module) -> Sample:
        units = observe_units(model)
        shards = [shard for unit in units for shard in unit.live.shards if not unit.offloaded]
        return Sample(
            params=storage_bytes([*shards, *unmanaged_parameters(model, units)]),
            grads=gradient_bytes(model, units),
            optimizer=storage_bytes(state_tensors([self._optimizer])),
            gathered=storage_bytes([tensor for unit in units for tensor in unit.live.gathered], excluding=shards),
        )


class Profiling:
    """Profiles the steps of one run. Without ``begin``, every function returns at once.

    A step ends when the first optimizer that makes a step has made its next one.

    Attributes:
        active: whether steps are still profiled or measured.
        options: those of the newest profile.
        failure: why the newest profile was given up; ``None`` if it was not, or if failures are raised.
    """

    def __init__(self) -> None:
        self.active = False
        self.options = ProfileOptions(folder="")
        self.failure: SpecError | None = None
        self._hook: Any = None

    def begin(self, options: ProfileOptions) -> None:
        """Profile from now on. An earlier profile that did not end, because its training has failed, is discarded."""
        self.end(failed=True)
        self.options = options
        self.failure = None
        self._recorded = Recorded()
        self._profiler: Any = None
        self._memory: MemoryStep | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._num_steps = 0
        self._step_began: float | None = None
        self.active = True
        install_hooks("calls", "profile")
        call_marks.wait, call_marks.gather, call_marks.reduction = self._wait, marks.gather, marks.reduction
        marks.on_forward = self._see_forward
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def watch(self, model: nn.Module) -> None:
        """Mark the forwards of a sharded model. Call it after the model is sharded."""
        if self.active:
            marks.watch(model)
            if self._recorded.model is None:
                self._recorded.model = model

    def end(self, *, failed: bool = False) -> None:
        """Write the result of the steps that were made, if it is not written yet; nothing after a failure.

        Raises:
            SpecError: the result cannot be written (FSDP-E772). Nothing incomplete is left behind.
        """
        if not self.active:
            return
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.discard()
        try:
            self._stop_tracing(discard=failed)
        finally:
            self._close()
            if failed:
                self._recorded.close()
        if not failed:
            self._write()

    @contextlib.contextmanager
    def _wait(self) -> Iterator[None]:
        """Mark a wait for a collective. In the step that records the memory, sample it after the wait."""
        with marks(WAIT):
            yield
        if self.active and self._memory is not None:
            self._memory.sample()

    def _see_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._num_steps == 0 and self.options.wait == 0 and self._profiler is None:
            with self._failures():
                self._start_tracing()
        self._recorded.add_forward(args, kwargs)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if not self.active or optimizer is not self._optimizer:
            return
        with self._failures():
            self._end_step(optimizer, time.perf_counter())

    def _end_step(self, optimizer: torch.optim.Optimizer, now: float) -> None:
        options = self.options
        self._num_steps += 1
        self._recorded.num_steps = self._num_steps
        if self._step_began is not None:
            self._recorded.add_step(self._num_steps, now - self._step_began, options)
        marks.instant(BOUNDARY)
        if self._num_steps == options.last_traced:
            self._stop_tracing()
        elif options.memory and self._num_steps == options.last_traced + 1 and not profiler_is_running():
            # Not in the step that stops the other profiler: torch's mark around this step is still open, and would
            # write into the events of the wrong profiler when it ends.
            self._memory = MemoryStep(self._recorded.model, optimizer, self._recorded.num_waits)
            self._memory.start()
        elif self._memory is not None:
            memory, self._memory = self._memory, None
            with temporary_files():
                self._recorded.memory = memory.stop()
        elif self._num_steps == options.first_traced:
            self._start_tracing()
        if self._num_steps == options.last:
            self._close()
            self._write()
            if options.stops:
                stop_reporting()  # the run is not complete
                raise ProfileEnd
        self._step_began = time.perf_counter()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Give the profile up if it fails in this context, and raise only if the options demand it."""
        try:
            yield
        except SpecError as error:
            self.end(failed=True)
            if self.options.raises:
                raise
            self.failure = error

    def _start_tracing(self) -> None:
        activities = {ProfilerActivity.CPU}
        if available_device().is_initialized() and available_device().type != "cpu":
            activities = set(supported_activities())
        _check_only_profiler()
        self._profiler = torch_profile(activities=activities, record_shapes=True)
        self._profiler.start()
        marks.enabled = True
        marks.instant(BOUNDARY)

    def _stop_tracing(self, *, discard: bool = False) -> None:
        if marks.enabled and self._profiler is not None:
            marks.enabled = False
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            if not discard:  # a later profiler invalidates the events of this one
                self._recorded.export(profiler)

    def _close(self) -> None:
        self.active = False
        call_marks.wait = call_marks.gather = call_marks.reduction = None
        marks.unwatch()
        marks.on_forward = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _write(self) -> None:
        recorded, self._recorded = self._recorded, Recorded()
        write_rank_files(recorded, self.options)


def _check_only_profiler() -> None:
    if profiler_is_running():
        message = "the script runs torch's profiler itself, and a process can have one at a time."
        fix = "Remove the script's own profiler for this run."
        raise SpecError([Problem(code="FSDP-E776", message=message, fix=fix)])


profiling = Profiling()
"""The profile of this process."""
