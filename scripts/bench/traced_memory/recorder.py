"""Record when the storages of fake tensors are allocated, resized and freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.torch_private.functions import (
    TorchDispatchMode,
    called_by_engine,
    in_backward,
    storage_key,
    tree_leaves,
)
from scripts.bench.traced_memory.kernels import collective_bytes, run, scratch_bytes
from scripts.bench.traced_memory.private import watch_propagation, watch_resizes

Label = Literal["params", "grads", "optimizer", "buffers", "gathered", "host"]
ShardCopies = Literal["none", "until_gathered", "while_gathered"]
"""How long the device keeps copies of offloaded shards that it gathers."""
_COPY = torch.ops.aten.copy_.default


@dataclass(slots=True)
class Block:
    """One storage, from its allocation until it is freed or resized.

    Attributes:
        label: what it contains, if that does not follow from where it was allocated.
        where: the place in the step at which it was allocated.
        stream: number of the stream in which it was allocated; 0 for the default stream, which computes.
    """

    size: int
    where: str
    label: Label | None = None
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation (``sign`` 1) or a free (-1). Memory that only a kernel uses is an allocation and a free."""

    block: Block
    sign: Literal[1, -1]
    where: str


class Recorder(TorchDispatchMode):
    """Records the storages that operators create. Enter it inside of a ``FakeTensorMode``.

    Attributes:
        events: what happened so far.
    """

    def __init__(self, place: Callable[[], str], *, on_cpu: bool = True, shard_copies: ShardCopies = "none") -> None:
        """Create a recorder.

        Args:
            place: returns the present place in the step.
            on_cpu: whether collectives allocate what gloo allocates, and elementwise operators cast operands to
                temporary tensors, as on the CPU.
            shard_copies: how long shards of parameters, which are in host memory, are on the device.
        """
        super().__init__()
        self._on_cpu, self._shard_copies = on_cpu, shard_copies
        self._copies: dict[int, Block] = {}
        """Copy of a shard by the storage into which it was gathered."""
        self.events: list[Event] = []
        self._place = place
        self._alive: dict[int, Block] = {}
        self._added: tuple[int, Block, Block] | None = None
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._streams: dict[Any, int] = {torch.cpu.current_stream(): 0}
        self._stack = ExitStack()
        self._is_paused = False

    def __enter__(self) -> Recorder:
        self._stack.enter_context(watch_resizes(self._resized))
        self._stack.enter_context(watch_propagation(self._pause))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor calls operators on its local tensors
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        result = run(func, args, kwargs)
        in_place = func is torch.ops.aten.add.Tensor and in_backward() and called_by_engine(1)
        for tensor in _tensors(result):
            if tensor.device.type == "meta":
                continue
            self._see(tensor.untyped_storage(), replaces=args[0] if in_place else None)
        if self._on_cpu and (scratch := scratch_bytes(func, args, kwargs, result)):
            self._use(scratch)
        if self._on_cpu and (buffer := collective_bytes(func, args)):
            self._use(buffer, "gathered")
        if self._shard_copies != "none" and (func.namespace in ("c10d", "fsdp") or func is _COPY):
            keeps = self._shard_copies == "while_gathered" and func is not _COPY
            self._copy_shards(list(_tensors((args, kwargs))), keeps=keeps)
        if func.namespace == "c10d":
            self.label(_tensors((args, kwargs)), "gathered")
        elif func.__name__.startswith("resize_"):
            self._resized(args[0].untyped_storage())
        return result

    def label(self, tensors: Iterable[torch.Tensor | None], label: Label) -> None:
        """Set what the storages of tensors contain.

        A later label replaces an earlier one, except that ``gathered`` replaces none, and none replaces ``host``.
        """
        for tensor in tensors:
            block = self._block_of(tensor)
            if block is not None and block.label != "host" and (label != "gathered" or block.label is None):
                block.label = label

    def move_to_host(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Record that the storages of tensors are freed on the device, after they were copied to host memory."""
        for tensor in tensors:
            block = self._block_of(tensor)
            if block is not None and block.label != "host":
                self._settle()
                copy = Block(block.size, self._place(), "host")
                self._alive[storage_key(_local(tensor))] = copy
                self._record(copy, 1)
                self._record(block, -1)

    def _block_of(self, tensor: torch.Tensor | None) -> Block | None:
        return None if tensor is None else self._alive.get(storage_key(_local(tensor)))

    def _copy_shards(self, tensors: list[torch.Tensor], *, keeps: bool) -> None:
        """Record copies of the shards among the tensors of an all-gather; the first one is the output of FSDP1's.

        FSDP2 copies all shards of a unit (``all_gather_inputs`` of ``FSDPParam``), FSDP1 the flat shard
        (``FlatParamHandle.pre_unshard``). Without an all-gather, FSDP2 copies on one rank and FSDP1 to cast.
        """
        blocks = {storage_key(tensor): self._block_of(tensor) for tensor in tensors}
        size = sum(block.size for block in blocks.values() if block is not None and block.label == "params")
        if size and keeps:
            self._settle()
            copy = self._copies[storage_key(tensors[0])] = self._block(size, "gathered")
            self._record(copy, 1)
        elif size:
            self._use(size, "gathered")

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Record copies of parameters of ``size`` bytes that exist in this context."""
        copies = self._block(size, "gathered")
        self._settle()
        self._record(copies, 1)
        yield
        self._settle()
        self._record(copies, -1)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Record nothing: what is created has no memory on a real device either."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def finish(self) -> list[Event]:
        """Return all events."""
        self._settle()
        return self.events

    def _see(self, storage: torch.UntypedStorage, replaces: torch.Tensor | None) -> None:
        key = storage_key(storage)
        if key in self._alive:
            return
        self._references[key] = weakref.ref(storage, lambda _: self._freed(key))
        block = self._block(storage.nbytes())
        old = None if replaces is None else self._alive.get(storage_key(replaces))
        self._settle()
        self._alive[key] = block
        if old is not None and old.size == block.size:
            self._added = (key, block, old)
        else:
            self._record(block, 1)

    def _block(self, size: int, label: Label | None = None) -> Block:
        # On the CPU, FSDP enters streams that do nothing.
        stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
        return Block(size, self._place(), label, stream)

    def _use(self, size: int, label: Label | None = None) -> None:
        self._settle()
        block = self._block(size, label)
        self._record(block, 1)
        self._record(block, -1)

    def _freed(self, key: int) -> None:
        block = self._alive.pop(key)
        del self._references[key]
        if self._added is not None and block is self._added[2]:
            # Autograd adds a gradient to another one in place if nothing else refers to it. To fake tensors it adds
            # out of place (torch/csrc/autograd/input_buffer.cpp). The new block takes the place of the old one.
            new_key = self._added[0]
            self._added = None
            if new_key in self._alive:
                self._alive[new_key] = block
            return
        self._settle()
        self._record(block, -1)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._settle()
        key, size = storage_key(storage), storage.nbytes()
        old = self._alive.get(key)
        if old is None:
            self._see(storage, None)
        elif old.size != size:
            # Only FSDP resizes storages in a step: those of gathered parameters.
            self._alive[key] = self._block(size, "gathered")
            if size:
                self._record(self._alive[key], 1)
            elif key in self._copies:
                self._record(self._copies.pop(key), -1)
            self._record(old, -1)

    def _settle(self) -> None:
        """Record the result of an addition whose operand still exists: it was no addition in place."""
        if self._added is not None:
            _, block, _ = self._added
            self._added = None
            self._record(block, 1)

    def _record(self, block: Block, sign: Literal[1, -1]) -> None:
        if block.size:
            self.events.append(Event(block, sign, self._place()))


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return (values,)
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
