"""A rank of a benchmark: ``python -m hf_fsdp_plugin.integrations.bench.rank FOLDER``, started by ``hf-fsdp bench``.

It builds the cases, and lets their blocks of steps alternate.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.devices import Device, get_device
from hf_fsdp_plugin.integrations.bench import BenchWorkload, Case, Task, WorldJob, events_of
from hf_fsdp_plugin.integrations.bench.loops import Batch, Loop, make_loop
from hf_fsdp_plugin.integrations.install import uninstall
from hf_fsdp_plugin.integrations.preflight.sample_data import MadeData, collate
from hf_fsdp_plugin.messages import printer
from hf_fsdp_plugin.plan.meta_model import config_and_class
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.sources.launchers import LaunchHandover
from hf_fsdp_plugin.spec.load import assess

_NUM_BATCHES: Final = 4
"""Different batches of a rank. They are made before the steps, so that no data loading is measured."""
_SEED: Final = 0
_TIMEOUT: Final = timedelta(minutes=10)
"""Time without progress after which a case fails."""
_STATUS: Final = Path("/proc/self/status")
_RESET: Final = Path("/proc/self/clear_refs")
_PREFIXES: Final = ("ACCELERATE_", "FSDP_", "PARALLELISM_")

EventWriter = Callable[..., None]


class Timed(NamedTuple):
    """A block of steps: wall time of all ranks and mean CPU time of a rank, per step, and the mean last loss."""

    seconds: float
    cpu_seconds: float
    loss: float


class TaskRunner:
    """Measures the tasks of a job on one rank.

    Args:
        sources: the settings that all cases share.
        report: writes an event; called on rank 0 only.
    """

    def __init__(
        self, model: str, device: torch.device, workload: BenchWorkload, sources: Sources, report: EventWriter
    ) -> None:
        self._model, self._device, self._workload, self._sources = model, device, workload, sources
        self._report = report if dist.get_rank() == 0 else lambda **event: None
        self._table = get_device(device.type)
        self._memory = PeakMemory(self._table)
        self._environ = _settings_in(os.environ)
        self._batches: list[Batch] = []

    def prepare(self, task: Task) -> None:
        """Run one step of every case of a task, unmeasured: libraries are imported and threads are started then."""
        for case in task.cases:
            loop = self._build(case)
            loop.enter()
            loop.step(self._batch(0))
            del loop
            self._memory.free()

    def run(self, task: Task) -> None:
        """Measure a task, and report each case."""
        loops: dict[Case, Loop] = {}
        peaks: dict[Case, int | None] = {}
        # The first case allocates what the libraries keep, so each order is used in half of the rounds.
        for case in reversed(task.cases) if task.round % 2 else task.cases:
            self._report(event="begin", case=case.name, round=task.round)
            held = self._memory.free()
            loops[case] = self._build(case)
            loops[case].enter()
            for index in range(self._workload.warm_up):
                loops[case].step(self._batch(index))
            peaks[case] = self._peak_of_step(loops[case], held)
            loops[case].leave()
        timed: dict[Case, list[Timed]] = {case: [] for case in loops}
        for block in range(self._workload.blocks):
            order = list(loops) if (task.round + block) % 2 == 0 else list(reversed(loops))
            for case in order:
                timed[case].append(self._block(loops[case], block))
        for case, blocks in timed.items():
            seconds, cpu_seconds, losses = zip(*blocks, strict=True)
            self._report(
                event="measured",
                case=case.name,
                round=task.round,
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                losses=losses,
                peak_bytes=peaks[case],
                peak_source=self._memory.source,
            )
        loops.clear()
        self._memory.free()

    def _build(self, case: Case) -> Loop:
        for name in _settings_in(os.environ).keys() - self._environ.keys():
            del os.environ[name]  # set by an Accelerator of another case
        sources = replace(self._sources, overrides=(*self._sources.overrides, *case.overrides))
        spec = assess(sources).checked_spec()
        model = build_model(self._model)
        if not self._batches:
            self._batches = self._make_batches(model)
        return make_loop(case, spec, model, self._device)

    def _make_batches(self, model: nn.Module) -> list[Batch]:
        size, rank = self._workload.micro_batch, dist.get_rank()
        data = MadeData(model, dist.get_world_size() * _NUM_BATCHES * size, num_tokens=self._workload.seq_len)
        batches: list[Batch] = []
        for number in range(rank * _NUM_BATCHES, (rank + 1) * _NUM_BATCHES):
            batch = collate([data[number * size + index] for index in range(size)])
            batches.append({name: _to(value, self._device) for name, value in batch.items()})
        return batches

    def _batch(self, index: int) -> Batch:
        return self._batches[index % _NUM_BATCHES]

    def _peak_of_step(self, loop: Loop, held: int | None) -> int | None:
        """Run a step, and return the largest peak of a rank above `held`, the bytes before the loop was built."""
        self._memory.reset()
        loop.step(self._batch(0))
        self._table.synchronize()
        peak = self._memory.peak()
        grown = torch.tensor(-1 if peak is None or held is None else max(0, peak - held))
        dist.all_reduce(grown, dist.ReduceOp.MAX)
        return int(grown) if grown >= 0 else None

    def _block(self, loop: Loop, block: int) -> Timed:
        loop.enter()
        num_steps = self._workload.steps
        self._table.synchronize()
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        for index in range(num_steps):
            loss = loop.step(self._batch(block * num_steps + index))
        self._table.synchronize()
        cpu = time.process_time() - cpu
        dist.barrier()
        seconds = time.perf_counter() - start
        loop.leave()
        means = torch.tensor([cpu / num_steps, float(loss)], dtype=torch.float64)
        dist.all_reduce(means)
        cpu_seconds, mean_loss = (means / dist.get_world_size()).tolist()
        return Timed(seconds / num_steps, cpu_seconds, mean_loss)


def build_model(path_or_id: str) -> nn.Module:
    """Return the model of a config with random fp32 weights, which are the same on all ranks."""
    config, model_class = config_and_class(path_or_id)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    torch.manual_seed(_SEED)
    model: nn.Module = model_class(config)
    return model.train()


def _settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


class PeakMemory:
    """On accelerators, bytes of tensors in the allocator; on the CPU, resident memory of the process (Linux only)."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @property
    def source(self) -> str:
        return "resident memory" if self._device.type == "cpu" else self._device.peak_source

    def free(self) -> int | None:
        """Return unused memory to the system or device, and return what is held; ``None`` if that is unknown."""
        gc.collect()
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device.type)
            module.empty_cache()
            return int(module.memory_allocated())
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, which later cases would use unseen
        return _resident("VmRSS")

    def reset(self) -> None:
        """Begin a new peak. Without this function of the system, the peak is that of the process."""
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device.type)
            module.reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):
            _RESET.write_text("5")  # proc(5): resets the peak resident set size

    def peak(self) -> int | None:
        return _resident("VmHWM") if self._device.type == "cpu" else self._device.peak_memory()


def _resident(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def main(folder: Path) -> None:
    """Measure the tasks of a job. A failure ends this world, because the ranks may be in different collectives then."""
    job, events = WorldJob.read(folder), events_of(folder)
    handover = LaunchHandover.from_env(os.environ)
    assert handover is not None, "hf-fsdp bench starts its ranks with a handover"
    uninstall()  # each case installs what it needs
    printer.quiet = True  # the settings were checked by the verb
    warnings.simplefilter("ignore")
    device = _join(job.device)
    runner = TaskRunner(job.model, device, job.workload, handover.sources, events.write)
    runner.prepare(job.tasks[0])
    for task in job.tasks:
        runner.run(task)
    dist.barrier()
    dist.destroy_process_group()


def _join(device_type: str) -> torch.device:
    local_rank = int(os.environ["LOCAL_RANK"])
    table = get_device(device_type)
    table.set_current(local_rank)
    if not dist.is_initialized():  # install() starts one for some settings
        dist.init_process_group(table.process_group_backend, timeout=_TIMEOUT)
    return torch.device("cpu") if device_type == "cpu" else torch.device(device_type, local_rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
