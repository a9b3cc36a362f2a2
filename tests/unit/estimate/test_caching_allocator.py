"""The model of torch's caching allocator, against sequences that follow from its source.

Function names are those of ``DeviceCachingAllocator`` in c10/cuda/CUDACachingAllocator.cpp, constants those of
c10/core/AllocatorConfig.h (torch 2.13). Sizes in MiB unless noted.
"""

import random
from itertools import pairwise

import pytest

from scripts.bench.allocator.caching_allocator import AllocatorSettings, CachingAllocator, OutOfDeviceMemory

MIB = 1 << 20


def make(capacity=None, **settings):
    return CachingAllocator(AllocatorSettings(**settings), None if capacity is None else capacity * MIB)


@pytest.mark.parametrize(
    ("size", "rounded"),
    [(0, 512), (1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)],  # round_size, kMinBlockSize
)
def test_sizes_are_rounded_to_512_bytes(size, rounded):
    assert make().round_size(size) == rounded


@pytest.mark.parametrize(
    ("size", "reserved"),
    [  # get_allocation_size: kSmallBuffer up to kSmallSize, kLargeBuffer below kMinLargeAlloc, then kRoundLarge
        (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 1024, 20 * MIB), (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB), (33 * MIB, 34 * MIB),
    ],
)  # fmt: skip
def test_segment_size_follows_the_request(size, reserved):
    allocator = make()
    allocator.malloc(size)
    assert allocator.reserved == reserved


def test_roundup_divides_between_powers_of_two():
    # roundup_power2_next_division; test_cuda.py test_allocator_settings expects power2_div(84 MiB, 4) = 96 MiB
    allocator = make(roundup_power2_divisions=(4,) * 16)
    assert allocator.round_size(84 * MIB) == 96 * MIB
    assert allocator.round_size(400 * MIB) == 448 * MIB
    assert allocator.round_size(64 * MIB) == 64 * MIB
    assert allocator.round_size(700) == 1024  # not above 512 * divisions
    by_size = make(roundup_power2_divisions=(1,) * 6 + (8,) * 10)  # from 64 MiB on
    assert by_size.round_size(84 * MIB) == 88 * MIB and by_size.round_size(33 * MIB) == 33 * MIB


def test_small_blocks_share_a_segment():
    allocator = make()
    first, second, third = (allocator.malloc(MIB) for _ in range(3))
    assert allocator.reserved == 4 * MIB and second.address == first.address + MIB
    assert third.previous is None and third.next.size == MIB


def test_rest_of_at_most_one_mib_is_not_split_off():
    # should_split: of a large block, remaining > kSmallSize. The whole block counts as allocated.
    allocator = make()
    assert allocator.malloc(11 * MIB).size == 12 * MIB and allocator.allocated == 12 * MIB
    assert allocator.malloc(13 * MIB - 512).size == 13 * MIB - 512  # the rest of a segment of 14 MiB is larger


def test_smallest_free_block_that_fits_is_taken():
    # get_free_block: lower_bound in the order of BlockComparatorSize
    allocator = make()
    blocks = [allocator.malloc(size * MIB) for size in (40, 20, 30)]
    large, medium, other = (block.address for block in blocks)
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(18 * MIB).address == medium
    assert allocator.malloc(25 * MIB).address == other
    assert allocator.malloc(31 * MIB).address == large
    assert allocator.reserved == 90 * MIB


def test_equal_blocks_are_taken_by_address():
    allocator = make()
    blocks = [allocator.malloc(20 * MIB) for _ in range(3)]
    addresses = [block.address for block in blocks]
    for block in (blocks[2], blocks[0], blocks[1]):
        allocator.free(block)
    assert [allocator.malloc(20 * MIB).address for _ in range(3)] == sorted(addresses)


def test_free_neighbours_are_merged():
    # free_block, try_merge_blocks: parts of a segment of 20 MiB become one block again
    allocator = make()
    first, second, third = (allocator.malloc(5 * MIB) for _ in range(3))
    start, end = first.address, third.address
    allocator.free(first)
    allocator.free(third)
    assert allocator.malloc(9 * MIB).address == end  # the third and the rest of the segment: 10 MiB
    allocator.free(second)
    assert allocator.malloc(10 * MIB).address == start
    assert allocator.reserved == 20 * MIB


def test_each_stream_has_free_blocks_of_its_own():
    allocator = make()
    block = allocator.malloc(20 * MIB, stream=1)
    address = block.address
    allocator.free(block)
    allocator.malloc(20 * MIB, stream=0)
    assert allocator.reserved == 40 * MIB
    assert allocator.malloc(20 * MIB, stream=1).address == address


def test_small_blocks_are_not_taken_from_large_ones():
    allocator = make()
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(MIB)
    assert allocator.reserved == 22 * MIB


def test_recorded_stream_delays_the_reuse():
    # free: insert_events for stream_uses; process_events frees when the events are complete
    allocator = make()
    block = allocator.malloc(20 * MIB)
    allocator.record_stream(block, 0)  # its own stream is ignored
    allocator.record_stream(block, 1)
    allocator.record_stream(block, 2)
    allocator.free(block)
    assert allocator.allocated == 0  # counted as free at once
    allocator.synchronize(1)
    assert allocator.malloc(20 * MIB).address != block.address
    allocator.synchronize(2)
    assert allocator.malloc(20 * MIB).address == block.address


def test_last_frees_can_stay_incomplete():
    allocator = make()
    blocks = [allocator.malloc(20 * MIB) for _ in range(3)]
    for block in blocks:
        allocator.record_stream(block, 1)
        allocator.free(block)
    allocator.synchronize(1, leave=2)
    assert [allocator.malloc(20 * MIB).address == block.address for block in blocks] == [True, False, False]


def test_cached_memory_is_returned_before_an_allocation_fails():
    # malloc: alloc_block, release_cached_blocks, alloc_block. Only whole segments can be returned.
    allocator = make(capacity=100)
    held, cached = allocator.malloc(30 * MIB), allocator.malloc(60 * MIB)
    allocator.free(cached)
    allocator.malloc(70 * MIB)
    assert (allocator.reserved, allocator.num_retries) == (100 * MIB, 1)
    with pytest.raises(OutOfDeviceMemory, match="allocated"):
        allocator.malloc(2 * MIB)
    address = held.address
    allocator.free(held)
    assert allocator.malloc(2 * MIB).address == address


def test_split_segment_cannot_be_returned():
    allocator = make(capacity=100)
    whole = allocator.malloc(60 * MIB)
    allocator.free(whole)
    part = allocator.malloc(10 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(60 * MIB)  # 50 MiB are free behind the part, 40 on the device
    allocator.free(part)
    allocator.malloc(80 * MIB)
    assert allocator.reserved == 80 * MIB


def test_oversize_blocks_are_neither_split_nor_wasted():
    # get_free_block: no oversize block for a smaller request, and only up to max_non_split_rounding_size (20 MiB) more
    allocator = make(max_split_size=40 * MIB)
    allocator.free(allocator.malloc(100 * MIB))
    allocator.malloc(30 * MIB)
    allocator.malloc(80 * MIB)
    assert allocator.reserved == 210 * MIB
    assert allocator.malloc(81 * MIB).size == 100 * MIB


def test_oversize_blocks_are_returned_first():
    # release_available_cached_blocks: the cached 50 MiB stay, as 60 MiB are enough
    allocator = make(capacity=180, max_split_size=40 * MIB)
    blocks = [allocator.malloc(size * MIB) for size in (50, 90)]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(60 * MIB)
    assert (allocator.reserved, allocator.num_retries) == (110 * MIB, 0)


def test_max_split_size_as_in_torchs_own_test():
    # test_cuda.py test_max_split_expandable: three blocks of 40 fill 120 MiB, a fourth fails, then one of 120 fits
    allocator = make(capacity=120, max_split_size=40 * MIB)
    blocks = [allocator.malloc(40 * MIB) for _ in range(3)]
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(40 * MIB)
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(120 * MIB).size == 120 * MIB


def test_expandable_segment_grows_by_20_mib():
    # try_allocate_expandable_block, map_block: kLargeBuffer steps, kSmallBuffer ones for small blocks
    allocator = make(expandable_segments=True)
    first, second = allocator.malloc(25 * MIB), allocator.malloc(10 * MIB)
    assert allocator.reserved == 40 * MIB and second.address == first.address + 25 * MIB
    third = allocator.malloc(6 * MIB)  # 5 MiB are free behind the second
    assert allocator.reserved == 60 * MIB and third.address == second.address + 10 * MIB
    allocator.malloc(100)
    assert allocator.reserved == 62 * MIB


def test_expandable_segment_serves_growing_requests():
    # Note [Expandable Segments]: a size N + 1 after N needs no second segment
    fixed, expandable = make(), make(expandable_segments=True)
    for allocator in (fixed, expandable):
        for size in range(40, 60, 4):
            allocator.free(allocator.malloc(size * MIB))
    assert fixed.reserved == (40 + 44 + 48 + 52 + 56) * MIB and expandable.reserved == 60 * MIB


def test_expandable_segments_return_whole_steps():
    # unmap_block: only steps inside of the free block. 100 MiB of the device are enough for both phases.
    allocator = make(capacity=100, expandable_segments=True)
    blocks = [allocator.malloc(30 * MIB, stream=1) for _ in range(3)]
    allocator.free(blocks[0])
    allocator.free(blocks[1])
    allocator.malloc(20 * MIB, stream=0)
    assert allocator.num_retries == 1 and allocator.reserved == 60 * MIB  # 40 of stream 1, 20 of stream 0
    again = allocator.malloc(25 * MIB, stream=1)
    assert allocator.reserved == 100 * MIB and again.address < blocks[2].address


def test_expandable_segments_do_not_lend_to_other_streams():
    allocator = make(expandable_segments=True)
    allocator.free(allocator.malloc(20 * MIB, stream=1))
    allocator.malloc(20 * MIB, stream=2)
    assert allocator.reserved == 40 * MIB


@pytest.mark.parametrize("settings", [{}, {"expandable_segments": True}, {"max_split_size": 64 * MIB}])
def test_random_sequences_keep_the_books(settings):
    """Blocks never overlap, everything can be freed, and an empty allocator returns everything."""
    generator = random.Random(7)
    allocator, live = make(capacity=4000, **settings), []
    for _ in range(3000):
        if live and (generator.random() < 0.5 or allocator.allocated > 1500 * MIB):
            allocator.free(live.pop(generator.randrange(len(live))))
        else:
            size = int(2 ** generator.uniform(8, 28))
            block = allocator.malloc(size, generator.randrange(3))
            assert block.size >= size
            live.append(block)
            if generator.random() < 0.2:
                allocator.record_stream(block, 3)
        if generator.random() < 0.1:
            allocator.synchronize()
    ranges = sorted((block.address, block.address + block.size) for block in live)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)
