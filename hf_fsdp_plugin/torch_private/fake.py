"""A fake process group, whose collectives do nothing, and calls by torch's autograd engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hf_fsdp_plugin.contracts import contracts_of, guard

CONTRACTS = (
    *contracts_of("torch.testing._internal.distributed.fake_pg", "refused", "the table of contracts", "FakeStore"),
    *contracts_of("torch.autograd.graph", "refused", "the prediction of memory", "_engine_run_backward"),
)


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a world whose collectives do nothing.

    Args:
        world_size: number of ranks, which do not exist.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def called_by_engine(depth: int) -> bool:
    """Return whether the autograd engine has called a function without Python in between.

    Args:
        depth: number of frames between the caller and that function's own.
    """
    return sys._getframe(depth + 1).f_code.co_name == "_engine_run_backward"


guard(globals(), CONTRACTS)
