"""The copies of a rank's shards for an asynchronous save, which a thread takes while the training goes on.

From a save to the next step of an optimizer, forwards and backwards read the weights, and nothing is expected to change
them. Therefore the copies are taken beside the next forward and backward, from an accelerator on a stream of their own,
and the step waits for them: the device waits, not the host. Buffers, which a forward changes, are copied before.

A script may change weights earlier, for example exchange them for averaged ones. Such a change is found, because the
copies are compared with samples of the tensors from the time of the save.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from hf_fsdp_plugin.checkpoint.writing.file_parts import FilePart, bytes_of, copy_window, num_bytes, on_accelerator
from hf_fsdp_plugin.checkpoint.writing.staging_buffers import StagingBuffers
from hf_fsdp_plugin.devices import DEVICES, available_device
from hf_fsdp_plugin.problems import CheckpointError, Problem

_SAMPLES, _SAMPLE_BYTES = 256, 256
"""Number of tensors that are sampled, and the bytes of each. Exchanged weights differ in nearly all of them."""


class WeightsChangedError(CheckpointError):
    """A script has changed weights between a save and the next optimizer step: the copies are not from one time."""

    def __init__(self) -> None:
        message = "the script has changed weights while they were copied in the background, between the save and the "
        message += "next optimizer step: this checkpoint is removed. Later saves of this run copy before they return."
        fix = "Change weights (to averaged ones, by merge_adapter, …) before the save or after the next optimizer "
        super().__init__([Problem(code="FSDP-W435", message=message, fix=f"{fix}step, or set fsdp_async_save: false.")])


class ShardCopies:
    """The copies of one save.

    The thread of the training adds parts, and calls :meth:`begin`, and :meth:`wait_in_stream` before each optimizer
    step. A thread of the save calls :meth:`take`.

    Attributes:
        parts: the parts of files that are copied.
        memory: their copies, one after the other.
    """

    def __init__(self, buffers: StagingBuffers) -> None:
        self._buffers = buffers
        self.parts: list[FilePart] = []
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._started = threading.Event()
        self._device = DEVICES["cpu"]
        self._index = 0
        self._now = self._copied = self._device.record_event()
        self._places: list[tuple[int, int]] = []
        self._samples: torch.Tensor | None = None

    def begin(self) -> None:
        """Mark the present values as the values to copy."""
        if on_accelerator(self.parts):
            self._device = available_device()
            self._index = self._device.current_index()
        self._sample()
        self._now = self._device.record_event()

    def take(self) -> None:
        """Copy the tensors, and wait for the copies.

        Raises:
            WeightsChangedError: the copies differ from the values at :meth:`begin`.
        """
        try:
            self._device.set_current(self._index)  # a new thread starts on device 0, and would create a context there
            size = sum(part.span for part in self.parts)
            self.memory = self._buffers.take(0, size, pinned=self._device.type != "cpu")
            with self._device.new_stream():
                self._now.wait()
                try:
                    copy_parts(self.parts, self.memory)
                finally:
                    self._copied = self._device.record_event()
        finally:
            self._started.set()
            self._copied.synchronize()
        if self._samples is not None:
            copied = [self.memory[start : start + size] for start, size in self._places]
            if not torch.equal(torch.cat(copied), self._samples.cpu()):
                raise WeightsChangedError

    def wait_in_stream(self) -> None:
        """Let the current stream wait for the copies. The calling thread waits until they are started."""
        self._started.wait()
        self._copied.wait()

    def _sample(self) -> None:
        """Read the first bytes of tensors on the device, in one piece, without waiting for them."""
        found = [each for each in _tensors_in(self.parts) if each[0].device.type == self._device.type]
        found = found[:: -(-len(found) // _SAMPLES) or 1]
        self._places = [(start, size) for _, start, size in found]
        if found:
            self._samples = torch.cat([bytes_of(tensor)[:size] for tensor, _, size in found])


def _tensors_in(parts: Sequence[FilePart]) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield the contiguous tensors with the offset in the memory of :func:`copy_parts`, and the bytes of a sample."""
    begin = 0
    for window in (window for part in parts for window in part.windows):
        for item in window.items:
            offset = item.offset
            for content in item.contents:
                size = min(num_bytes(content), _SAMPLE_BYTES, window.stop - offset)
                begins_here = size > 0 and offset >= window.start
                if begins_here and isinstance(content, torch.Tensor) and content.is_contiguous():
                    yield content, begin + offset - window.origin, size
                offset += num_bytes(content)
        begin += window.span


def copy_parts(parts: Sequence[FilePart], memory: torch.Tensor) -> None:
    """Copy all windows one after the other to ``memory``, which must have at least the sum of their spans.

    Copies from an accelerator are asynchronous.
    """
    for part in parts:
        for window, place in part.windows_in(memory):
            copy_window(window, place)
        memory = memory[part.span :]
