"""Which process is a rank, and not a child of one: children inherit the variables of their rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

RANK_VARIABLE: Final = "HF_FSDP_RANK_PID"
"""Environment variable with the process that is the rank, and the address at which the ranks of its job meet.

The children of a rank inherit its variables, but have other process numbers: they are no ranks, unless they are started
as ranks of another job, which meet at another address.
"""


def rank_process(environ: Mapping[str, str]) -> str:
    """Return the value of ``RANK_VARIABLE`` for this process."""
    return f"{os.getpid()} {environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"


def may_be_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this process has the variables of a rank, and did not inherit them from a rank of the same job."""
    own = rank_process(environ)
    marked = environ.get(RANK_VARIABLE, own)
    return "RANK" in environ and (marked == own or marked.partition(" ")[2] != own.partition(" ")[2])


def is_rank() -> bool:
    """Return whether this process is the rank itself, and not one that it has forked."""
    return os.environ.get(RANK_VARIABLE, "").partition(" ")[0] == str(os.getpid())
