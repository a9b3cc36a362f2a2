"""Records the memory of one step: the allocations by torch's profiler, and the state of the units at some moments."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from hf_fsdp_plugin.estimate.results import Moment
from hf_fsdp_plugin.integrations.profiling.marking import marks
from hf_fsdp_plugin.observe.memory import gradient_bytes, state_tensors, storage_bytes, unmanaged_parameters
from hf_fsdp_plugin.observe.profile.marks import BOUNDARY, SAMPLE
from hf_fsdp_plugin.observe.profile.memory_points import Sample, memory_moments
from hf_fsdp_plugin.observe.profile.trace import read_trace
from hf_fsdp_plugin.observe.units import observe_units

_MAX_SAMPLES: Final = 100
"""A sample reads all units, so that a step of a large model has few of them."""


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
