"""The figures of the run of this process: attaches the clock, adds figures to logs, and reports slow ranks.

Each rank writes the rows of its steps to memory that the ranks of its machine share (``metrics.rows``). Rank 0 reads
the rows of the others at a log and once per window. Nothing here is collective after the model is prepared, and an
error ends the figures, not the run.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.ranks.agreement import gather_objects
from hf_fsdp_plugin.backends.sharding.script_access import ParameterCounts
from hf_fsdp_plugin.checkpoint.writing.manager import Save
from hf_fsdp_plugin.devices import get_device, peak_flops
from hf_fsdp_plugin.hangs.calls import record
from hf_fsdp_plugin.hangs.hang_queries import watch_store
from hf_fsdp_plugin.integrations.observing import attach
from hf_fsdp_plugin.integrations.session import current_run
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.metrics.clock import ClockPhase, DeviceClock, HostClock
from hf_fsdp_plugin.metrics.figures import GIB, Slower, StragglerSearch, figures_of, memory_figures, passes
from hf_fsdp_plugin.metrics.rows import JobRows, Row, Rows, newest_rows, share_rows
from hf_fsdp_plugin.metrics.run_file import VERSION, RunFile, numbers_in
from hf_fsdp_plugin.observe.first_step import rows_of_tokens
from hf_fsdp_plugin.observe.units import storage_bytes
from hf_fsdp_plugin.observers import ObservedPhase, Observer, observers
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.state import find_part, process
from hf_fsdp_plugin.torch_private.flops import FlopCount, can_count
from hf_fsdp_plugin.torch_private.modules import plain_tensors

_PHASES: Final[Mapping[ObservedPhase, ClockPhase]] = {"data": "data", "backward": "backward", "checkpoint": "saving"}
_MEMORY_SECONDS: Final = 1.0
"""Seconds between two readings of the memory."""
_COUNTED_FORWARD: Final = 2
"""The training forward whose FLOPs are counted: the first one shows whether it calls compiled code."""


def _ends_figures(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: an error of the method stops the figures, and is printed; the method then returns ``None``."""

    @functools.wraps(method)
    def call(metrics: RunMetrics, *args: Any, **kwargs: Any) -> Any:
        if metrics.clock is None:
            return None
        try:
            return method(metrics, *args, **kwargs)
        except Exception as error:
            metrics.close()
            print_once(f"no more figures of the run, which continues: {type(error).__name__}: {error}.")

    return call


class RunMetrics(Observer):
    """The figures of one run. Without :meth:`follow`, every function returns at once.

    Attributes:
        clock: the clock of this rank; ``None`` if nothing is measured.
        flops: FLOPs of the model per token, forward and backward; 0 until they are counted.
        machines: machine of each rank.
        job: the rows of all machines; ``None`` on ranks that are not the lowest one of their machine.
        rows: the rows of this rank; on rank 0 also those of the other ranks that it sees.
        search: the search for slow ranks; ``None`` on other ranks than 0, or without it.
    """

    def __init__(self) -> None:
        self.clock: HostClock | None = None
        self.search: StragglerSearch | None = None
        self.flops = 0.0
        self._ends: list[Callable[[], None]] = []
        self._file: RunFile | None = None
        self._counter: tuple[FlopCount, int] | None = None  # and the tokens of its forward
        self._has_started = False

    # The measurement on each rank

    def follow(self, model: nn.Module, plan: FsdpPlan, folder: Callable[[], str]) -> None:
        """Measure the training of a model that was sharded. Collective.

        Args:
            folder: returns the folder of the run.
        """
        self.close()
        spec = plan.spec.metrics
        if spec.log == "none" and not spec.straggler_percent:
            return
        self._folder, self._plan = folder, plan
        self.machines = gather_objects(socket.gethostname())
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._device = get_device(plan.device_type)
        self._memory, self._memory_time = {"peak": 0.0, "reserved": 0.0}, 0.0
        self.optimizer: Callable[[], Any] = lambda: None
        self._model, self._optimizers = weakref.ref(model), weakref.WeakSet[torch.optim.Optimizer]()
        self._held: tuple[int, dict[str, int]] = -1, {}  # number of optimizer states, kind of memory -> bytes
        self._counts, self.flops, self._num_forwards = "tokens", 0.0, 0
        self._before: Rows = {}
        self._offset, self._last_save = 0, dict[str, float]()
        self.rows = share_rows(self._rank, self.machines)
        is_first = self.machines.index(self.machines[self._rank]) == self._rank
        self.job = JobRows(self._rank, self.rows, self.machines, watch_store) if is_first else None
        is_searching = self._rank == 0 and spec.straggler_percent > 0 and len(self.machines) > 1
        self.search = StragglerSearch(spec.straggler_percent / 100) if is_searching else None
        calls = record()
        calls.times_waits = True
        self.clock = HostClock(lambda: calls.waited_ns, self._write)
        if plan.device_type != "cpu":
            with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError, TypeError):
                self._device.timed_event()  # not every device type has them
                self.clock = DeviceClock(self._device, self._write)
        before = model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        after = model.register_forward_hook(self._after_forward, always_call=True)
        self._ends = [attach(self), before.remove, after.remove]

    def close(self) -> None:
        """Stop measuring."""
        for end in self._ends:
            end()
        if self._counter is not None:
            self._counter[0].__exit__(None, None, None)
        self._ends, self._has_started, self._counter = [], False, None
        if self.clock is not None and self.job is not None:
            self.job.close()
        self.clock = None
        self._file, record().times_waits = None, False

    def _write(self, row: Row) -> None:
        now = time.monotonic()
        if now - self._memory_time >= _MEMORY_SECONDS:
            self._memory_time = now
            self._memory = {"peak": self._device.peak_memory(), "reserved": self._device.reserved_memory()}
        self.rows[self._rank].add(row._replace(**self._memory))

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
            self.begin_forward(module, args, kwargs)

    @_ends_figures
    def begin_forward(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Count the tokens of a training forward, and begin its phase."""
        if not self._has_started:
            self.start(self._folder(), step=record().counts.total)
        if (clock := self.clock) is None:
            return
        clock.enter("forward")
        number = self._count(args, kwargs)
        clock.tokens += number
        self._num_forwards += 1
        if self._num_forwards == _COUNTED_FORWARD and number and can_count(module):
            self._counter = FlopCount(), number
            self._counter[0].__enter__()

    @_ends_figures
    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._counter is not None:
            (counter, number), self._counter = self._counter, None
            counter.__exit__(None, None, None)
            counts = find_part(module, ParameterCounts)
            factor = passes(counts.total, counts.trainable) if counts is not None else 3.0
            self.flops = factor * counter.total / number

    def _count(self, args: Any, kwargs: Mapping[str, Any]) -> int:
        """Return the tokens of a batch; its samples if it has no tokens."""
        if (rows := rows_of_tokens(args, kwargs)) is not None:
            return rows[0] * rows[1]
        self._counts = "samples"
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim())
        return next((each.shape[0] for each in tensors), 0)

    @contextlib.contextmanager
    def phase(self, phase: ObservedPhase) -> Iterator[None]:
        clock, name = self.clock, _PHASES.get(phase)
        if clock is None or name is None or not record().is_main_thread():
            yield
            return
        before = clock.enter(name)
        try:
            yield
        finally:
            clock.enter("optimizer" if name == "backward" != before else before)

    @_ends_figures
    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        clock = self.clock
        if clock is None or not self._has_started:
            return
        self._optimizers.add(optimizer)
        if self.optimizer() is None:
            self.optimizer = weakref.ref(optimizer)
        if optimizer is not self.optimizer():
            return
        clock.step_ended()
        if self.job is not None and (self.search is None or self.search.is_due(time.time())):
            rows = self.job.newest()  # also sends those of this machine to rank 0
            if self.search is not None and (slower := self.search.add(rows)) is not None:
                self._report(slower)

    # Rank 0

    def _report(self, slower: Slower) -> None:
        machine = self.machines[slower.rank]
        text = f"rank {slower.rank} on {machine} is slower than the others: all ranks wait for it, and a step takes "
        text += f"{slower.by:.0%} longer. Most of it is in the phase {slower.phase}: {slower.seconds:.3g} s per step, "
        text += f"the median of the other ranks is {slower.usual:.3g} s."
        fix = "Look at that rank's disk, network, processor and device. fsdp_straggler_percent: 0 switches this off."
        print_once(Problem(code="FSDP-W521", message=text, fix=fix))
        event = {"rank": slower.rank, "machine": machine, "phase": slower.phase, "slower_by": slower.by, "text": text}
        self._event("straggler", step=self._step, **event)

    @property
    def _step(self) -> int:
        return self._offset + (self.clock.num_steps if self.clock is not None else 0)

    @_ends_figures
    def start(self, folder: str, *, step: int = 0, max_steps: int = 0) -> None:
        """Begin a training.

        Args:
            folder: the folder of the run; empty if the script has named none. The file is then in the working folder,
                and only if figures are asked for.
            step: optimizer steps before.
            max_steps: the last step; 0 if it is unknown.
        """
        assert self.clock is not None
        self.end("finished")
        self.clock.skip()
        self._has_started, self._max_steps, self._offset = True, max_steps, step - self.clock.num_steps
        self._first = Row(time=time.time())
        self._before = {rank: row._replace(time=self._first.time) for rank, row in newest_rows(self.rows).items()}
        has_file = {"none": False, "file": bool(folder), "log": True}[self._plan.spec.metrics.log]
        self._file = RunFile(Path(folder)) if self._rank == 0 and has_file else None
        machines = list(dict.fromkeys(self.machines))
        about = {"world_size": len(self.machines), "machines": machines, "backend": self._plan.backend}
        about |= {"device": self._plan.device_type, "max_steps": max_steps, "version": VERSION}
        self._event("start", attempt=current_run().restarts.count, **about)

    def end(self, result: str) -> None:
        """Write the end of the training, if one has begun.

        Args:
            result: ``finished``, or ``failed:`` and the error.
        """
        if self._has_started:
            self._event("end", step=self._step, result=result)
            self._has_started = False

    def _event(self, event: str, **values: Any) -> None:
        if self._file is not None:
            self._file.write(event, **values)

    @_ends_figures
    def saved(self, save: Save) -> None:
        """Write a checkpoint that is complete."""
        times = {"seconds": time.monotonic() - save.begun, "stall_seconds": save.stall}
        self._last_save = {f"last_save_{name}": value for name, value in times.items()}
        step = self._step if save.step is None else save.step
        self._event("save", step=step, checkpoint=save.final.name, **times, asynchronous=save.asynchronous)

    @_ends_figures
    def figures(
        self, logs: Mapping[str, Any], *, step: int | None = None, is_training: bool = True, **more: Any
    ) -> Mapping[str, float] | None:
        """Return the figures since the log before, if they are to be added, and write the log to the run's file.

        Args:
            is_training: whether it is a log of training steps. Others get no figures.
            more: entries of the run's file only.
        """
        assert self.clock is not None
        self.clock.flush()
        if self._rank != 0 or not self._has_started:
            return None
        figures = self._figures() if is_training else {}
        step = self._step if step is None else step
        if figures and self._max_steps:
            left = max(0, self._max_steps - step)
            figures |= {"steps_left": left, "seconds_left": left * figures["step_seconds"]}
        by_kind = self._memory_by_kind() if figures and self._file is not None else {}
        self._event("log", step=step, **{**figures, **by_kind, **numbers_in({**more, **logs})})
        if self._plan.spec.metrics.log != "log":
            return None
        if figures and "mfu" not in figures and self._num_forwards >= _COUNTED_FORWARD:
            reason = f"the peak of {self._device.name() or 'CPUs'} is not known" if self.flops else "code is compiled"
            print_once(Problem(code="FSDP-N522", message=f"logs have no MFU: {reason}."))
        return figures

    def _memory_by_kind(self) -> dict[str, float]:
        """Return what the largest memory of this rank so far consists of.

        What is neither a shard, nor the gradient of one, nor optimizer state, is activations and gathered units on a
        device. On CPU ranks, whose memory is that of the process, it is also the libraries.
        """
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        if (model := self._model()) is not None and len(states) != self._held[0]:
            trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
            tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
            sizes = {
                "params": storage_bytes(self._on_device(model.parameters())),
                "grads": sum(each.nbytes for each in self._on_device(trained)),
                "optimizer": storage_bytes(self._on_device(tensors)),
            }
            self._held = len(states), sizes
        rest = "other" if self._plan.device_type == "cpu" else "activations"
        sizes = self._held[1] | {rest: max(0, int(self._memory["peak"]) - sum(self._held[1].values()))}
        return {f"memory_{name}_gib": size / GIB for name, size in sizes.items()}

    def _on_device(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the local parts of tensors, without those that are offloaded to the host."""
        return (each for each in plain_tensors(tensors) if each.device.type == self._plan.device_type)

    def _figures(self) -> dict[str, float]:
        """Return the figures of the steps since the call before; none without a new step of all ranks."""
        now = newest_rows(self.rows)
        if not now or now[self._rank].step <= self._before.get(self._rank, self._first).step:
            return {}
        before = {rank: self._before.get(rank, self._first) for rank in now}
        peak = peak_flops(self._device.name())
        size = len(self.machines) // self._plan.mesh.tensor  # ranks of the tensor axis have the same samples
        found = figures_of(before, now, world_size=size, counts=self._counts, flops=self.flops, peak=peak)
        self._before = now
        return {**found, **memory_figures(now, self._device.total_memory()), **self._last_save}


run_metrics = process.owns(RunMetrics)
"""Return the figures of this process."""


def data(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the method that returns the next batch of a ``DataLoader``: the observers see it as a phase."""

    def call(iterator: Any) -> Any:
        with observers().phase("data"):
            return original(iterator)

    return call


def exposed_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method in which the stream that computes waits for the collectives of a unit: the clock measures it."""
    metrics = run_metrics()

    def call(unit: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if metrics.clock is None else metrics.clock.exposed_wait():
            return original(unit, *args, **kwargs)

    return call


def log_of_accelerator(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the figures to a log."""

    def log(values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> Any:
        figures = run_metrics().figures(values, step=step) or {}
        return original({**figures, **values} if figures else values, step=step, log_kwargs=log_kwargs)

    return log(*args, **kwargs)


def log_of_trainer(
    original: Callable[..., Any], trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any
) -> Any:
    """Add the figures to the logs of a training."""
    state, of_steps = trainer.state, "loss" in logs
    figures = run_metrics().figures(logs, step=state.global_step, is_training=of_steps, epoch=state.epoch)
    for name, value in (figures or {}).items():
        logs.setdefault(name, value)  # in place: a caller may read what the Trainer adds
    return original(logs, *args, **kwargs)
