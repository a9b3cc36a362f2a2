"""A model of torch's caching allocator for GPUs: which memory it reserves for a sequence of allocations and frees.

It follows ``DeviceCachingAllocator`` in c10/cuda/CUDACachingAllocator.cpp of torch 2.13, whose functions the methods
name. Not modelled: pools of CUDA graphs, callbacks that free memory, and ``garbage_collection_threshold``, which is off
by default.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Final

# c10/core/AllocatorConfig.h
MIN_BLOCK: Final = 512
_SMALL: Final = 1 << 20
"""Largest size of the small pool."""
_SMALL_SEGMENT: Final = 2 << 20
_MIN_LARGE: Final = 10 << 20
"""Size from which an allocation gets a segment of its own."""
_ROUND_LARGE: Final = 2 << 20
_MIB_POWER: Final = 20
"""The first element of ``roundup_power2_divisions`` is for sizes below 2 MiB, the next for those below 4 MiB, …"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """Settings of the environment variable ``PYTORCH_ALLOC_CONF``, in bytes.

    Attributes:
        max_split_size: blocks of this size and larger are not split; ``None`` for no limit.
        roundup_power2_divisions: divisions by power of two, from 1 MiB on; empty to round to 512 bytes.
    """

    expandable_segments: bool = False
    large_segment_size: int = 20 << 20
    max_split_size: int | None = None
    max_non_split_rounding_size: int = 20 << 20
    roundup_power2_divisions: tuple[int, ...] = ()


class OutOfDeviceMemory(Exception):
    """An allocation that fails although all cached memory was released."""


@dataclass(eq=False, slots=True)
class Block:
    """Consecutive bytes of a segment, in use or free.

    Attributes:
        size: bytes that are taken from the segment; torch counts them as allocated.
        uses: other streams that were recorded.
        num_events: events of such streams that are not complete, after the block was freed.
        base: address of the expandable segment; ``None`` in a segment of fixed size.
    """

    stream: int
    size: int
    address: int
    pool: _Pool
    base: int | None = None
    is_allocated: bool = False
    is_mapped: bool = True
    previous: Block | None = None
    next: Block | None = None
    uses: set[int] = field(default_factory=set)
    num_events: int = 0

    @property
    def is_free(self) -> bool:
        return not self.is_allocated and not self.num_events and not self.uses

    def insert(self, before: Block | None, after: Block | None) -> None:
        """Insert this block between two neighbours (``splice``)."""
        self.previous, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.previous = self


class _Sorted:
    """Blocks in the order of a key, as ``std::set``."""

    def __init__(self, *, by_size: bool) -> None:
        self._by_size = by_size
        self.keys: list[tuple[int, ...]] = []
        self.blocks: dict[tuple[int, ...], Block] = {}

    def _key(self, block: Block) -> tuple[int, ...]:
        return (block.stream, block.size, block.address) if self._by_size else (block.stream, block.address)

    def add(self, block: Block) -> None:
        key = self._key(block)
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        key = self._key(block)
        del self.keys[bisect_left(self.keys, key)], self.blocks[key]

    def since(self, *key: int) -> list[Block]:
        """Return the blocks of a stream from a key on."""
        start, end = bisect_left(self.keys, key), bisect_left(self.keys, (key[0] + 1,))
        return [self.blocks[each] for each in self.keys[start:end]]

    def first(self, *key: int) -> Block | None:
        """Return the first block of a stream from a key on (``lower_bound``)."""
        start = bisect_left(self.keys, key)
        found = self.blocks[self.keys[start]] if start < len(self.keys) else None
        return found if found is not None and found.stream == key[0] else None


class _Pool:
    """Free blocks of one size class (``BlockPool``). Those of an expandable segment may have no memory (`unmapped`)."""

    def __init__(self, segment_size: int, *, is_small: bool) -> None:
        self.segment_size, self.is_small = segment_size, is_small
        self.free, self.unmapped = _Sorted(by_size=True), _Sorted(by_size=False)


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        allocated, reserved: bytes now, as ``torch.cuda.memory_allocated`` and ``memory_reserved`` count them.
        peak_allocated, peak_reserved: largest ones so far.
        num_retries: allocations for which cached memory was released.
    """

    def __init__(self, settings: AllocatorSettings | None = None, capacity: int | None = None) -> None:
        """Create the allocator of an empty device of `capacity` bytes; ``None`` for a device without limit."""
        self._settings = settings or AllocatorSettings()
        self._capacity = capacity
        self._small = _Pool(_SMALL_SEGMENT, is_small=True)
        self._large = _Pool(self._settings.large_segment_size, is_small=False)
        self._end = 1 << 21  # where the next segment begins
        self._events: dict[int, deque[Block]] = {}
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.num_retries = 0

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocate at least `size` bytes for a stream.

        Raises:
            OutOfDeviceMemory: the device has too little memory, also after all cached memory was released.
        """
        size = self.round_size(size)
        pool = self._small if size <= _SMALL else self._large
        block = self._take_free(pool, size, stream)
        if block is None:
            block = self._new_block(pool, size, stream)
        if self._should_split(block, size):
            rest = block
            block = Block(stream, size, rest.address, pool, rest.base)
            block.insert(rest.previous, rest)
            rest.address += size
            rest.size -= size
            pool.free.add(rest)
        block.is_allocated = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Free a block. Others can use it when the recorded streams have reached this point (:meth:`synchronize`)."""
        block.is_allocated = False
        self.allocated -= block.size
        streams, block.uses = block.uses, set()
        for stream in streams:  # insert_events
            block.num_events += 1
            self._events.setdefault(stream, deque()).append(block)
        if not streams:
            self._release_to_pool(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Record that another stream uses a block."""
        if stream != block.stream:
            block.uses.add(stream)

    def synchronize(self, stream: int | None = None, leave: int = 0) -> None:
        """Complete the frees that wait for a stream, or for all, but the last `leave` ones (``process_events``)."""
        for queue in list(self._events.values()) if stream is None else [self._events.get(stream, deque())]:
            while len(queue) > leave:
                block = queue.popleft()
                block.num_events -= 1
                if not block.num_events:
                    self._release_to_pool(block)

    def empty_cache(self) -> None:
        """Return all memory that is not in use to the device (``release_cached_blocks``)."""
        self.synchronize()
        for pool in (self._large, self._small):
            for block in list(pool.free.blocks.values()):
                if block.base is not None:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    self._release_segment(block)

    def round_size(self, size: int) -> int:
        """Return the size of an allocation in the allocator."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        if table := self._settings.roundup_power2_divisions:
            power = size.bit_length() - 1
            divisions = table[min(max(power - _MIB_POWER, 0), len(table) - 1)]
            if divisions > 1 and size > MIN_BLOCK * divisions:
                step = max((1 << power) // divisions, 1)
                return -(-size // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    # Search

    def _take_free(self, pool: _Pool, size: int, stream: int) -> Block | None:
        """Take the best free block of a stream (``get_free_block``)."""
        found = pool.free.first(stream, size, 0)
        if found is None:
            return None
        if found.base is not None:  # of blocks that can grow, the one whose segment has least room
            later = pool.free.since(stream, found.size, found.address)
            for block in later[1:]:
                if _room(block) >= _room(found):
                    break
                found = block
        limit = self._settings.max_split_size
        if limit is not None:
            if size < limit <= found.size:
                return None
            if size >= limit and found.size >= size + self._settings.max_non_split_rounding_size:
                return None
        pool.free.remove(found)
        return found

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.is_small or self._settings.expandable_segments:
            return rest >= MIN_BLOCK
        limit = self._settings.max_split_size
        return (limit is None or size < limit) and rest > _SMALL

    def _new_block(self, pool: _Pool, size: int, stream: int) -> Block:
        """Get memory of the device; if it has too little, release cached memory and try again (``malloc``)."""
        block = self._from_device(pool, size, stream)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._from_device(pool, size, stream)
        if block is None:
            self.num_retries += 1
            self.empty_cache()
            block = self._from_device(pool, size, stream)
        if block is None:
            message = f"{size:,} bytes cannot be allocated: {self.allocated:,} bytes are allocated and "
            raise OutOfDeviceMemory(f"{message}{self.reserved:,} reserved of {self._capacity or 0:,}")
        return block

    # Segments

    def _from_device(self, pool: _Pool, size: int, stream: int) -> Block | None:
        """Return a new block (``alloc_block``); ``None`` if the device has too little memory."""
        if self._settings.expandable_segments:
            return self._expand(pool, size, stream)
        fixed = pool.is_small or size < _MIN_LARGE
        size = pool.segment_size if fixed else -(-size // _ROUND_LARGE) * _ROUND_LARGE
        if not self._reserve(size):
            return None
        return Block(stream, size, self.segment_address(size), pool)

    def segment_address(self, size: int) -> int:
        """Return the address of a new segment. Addresses break ties between free blocks of equal size."""
        address, self._end = self._end, self._end + size
        return address

    def _reserve(self, size: int) -> bool:
        if self._capacity is not None and self.reserved + size > self._capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _release_segment(self, block: Block) -> None:
        block.pool.free.remove(block)
        self.reserved -= block.size

    def _release_oversize(self, pool: _Pool, size: int, stream: int) -> bool:
        """Release blocks that are too large to be split (``release_available_cached_blocks``). Return if enough."""
        limit = self._settings.max_split_size
        if limit is None:
            return False
        needed = max(size, limit)
        found = pool.free.first(stream, needed, 0)
        candidates = [found] if found is not None else pool.free.since(stream, limit, 0)[::-1]
        released = 0
        for block in candidates:
            if released < needed:
                released += block.size
                self._release_segment(block)
        return released >= needed

    def _release_to_pool(self, block: Block) -> None:
        """Merge a block with free neighbours (``free_block``)."""
        self._merge(block, block.previous)
        self._merge(block, block.next)
        block.pool.free.add(block)

    def _merge(self, block: Block, other: Block | None) -> None:
        """Merge a free neighbour into a block (``try_merge_blocks``)."""
        if other is None or not other.is_free or block.is_mapped != other.is_mapped:
            return
        (other.pool.free if other.is_mapped else other.pool.unmapped).remove(other)
        if block.previous is other:
            block.address = other.address
            block.insert(other.previous, block.next)
        else:
            block.insert(block.previous, other.next)
        block.size += other.size

    # Expandable segments

    def _expand(self, pool: _Pool, size: int, stream: int) -> Block | None:
        """Add memory at the lowest address with enough room (``try_allocate_expandable_block``)."""
        block = self._expandable(pool, size, stream)
        if not block.is_mapped and not self._map(block, size):
            return None
        while block.size < size:
            grown = block.next
            assert grown is not None, "the segment has room"
            if not self._map(grown, min(size - block.size, grown.size)):
                return None
            block = grown
        pool.free.remove(block)
        return block

    def _expandable(self, pool: _Pool, size: int, stream: int) -> Block:
        """Return the first free or unmapped block of a segment with enough room (``find_expandable_block``)."""
        for block in pool.unmapped.since(stream):
            before = block.previous
            start = before if before is not None and before.is_free else block
            room, current = 0, start if start.is_free else None
            while room < size and current is not None and current.is_free:
                room, current = room + current.size, current.next
            if room >= size:
                return start
        room = -(-max(self._capacity or 0, 1 << 45) * 9 // 8 // pool.segment_size) * pool.segment_size
        base = self.segment_address(room)
        block = Block(stream, room, base, pool, base, is_mapped=False)
        pool.unmapped.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Give memory to the start of an unmapped block, in steps of the segment's size (``map_block``)."""
        step = block.pool.segment_size
        size = -(-size // step) * step
        if not self._reserve(size):
            return False
        pool = block.pool
        pool.unmapped.remove(block)
        block.is_mapped = True
        if size < block.size:
            rest = Block(block.stream, block.size - size, block.address + size, pool, block.base, is_mapped=False)
            rest.insert(block, block.next)
            block.size = size
            pool.unmapped.add(rest)
        self._release_to_pool(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Return whole steps inside of a free block to the device (``unmap_block``)."""
        assert block.base is not None
        step, pool = block.pool.segment_size, block.pool
        start = block.base + -(-(block.address - block.base) // step) * step
        end = block.base + (block.address + block.size - block.base) // step * step
        if start >= end:
            return
        pool.free.remove(block)
        before, after = start - block.address, block.address + block.size - end
        if before:
            kept = Block(block.stream, before, block.address, pool, block.base)
            kept.insert(block.previous, block)
            pool.free.add(kept)
        if after:
            kept = Block(block.stream, after, end, pool, block.base)
            kept.insert(block, block.next)
            pool.free.add(kept)
        block.address, block.size, block.is_mapped = start, end - start, False
        self.reserved -= block.size
        self._merge(block, block.previous)
        self._merge(block, block.next)
        pool.unmapped.add(block)


def _room(block: Block) -> int:
    """Return the size to which a block of an expandable segment can grow."""
    grown = block.next
    return block.size + (grown.size if grown is not None and not grown.is_mapped else 0)
