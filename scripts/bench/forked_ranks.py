"""Two gloo ranks forked from this process, which tell it what they do until they end or are killed.

Importing torch and transformers takes a process seconds, and a rank that is to be killed must be a process of its own.
Whoever forks must not have started a thread or a process group: call :func:`preload` first, and work on ranks only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORLD_SIZE = 2
HANG_S = 60.0
"""Seconds without a word after which ranks count as hung."""


class RanksFailed(Exception):
    """They hang, or have ended before they did what was waited for."""


def preload() -> None:
    """Everything that ranks import, once for all of them; nothing here may start a thread or a process group."""
    os.environ.update(
        WORLD_SIZE=str(WORLD_SIZE), LOCAL_WORLD_SIZE=str(WORLD_SIZE), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    import torch._dynamo
    import torch.distributed._composable_state
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    import hf_fsdp_plugin.checkpoint.checking.verify
    import hf_fsdp_plugin.checkpoint.reading.model
    import hf_fsdp_plugin.integrations.transformers.trainer  # noqa: F401


@dataclass(slots=True)
class World:
    """Forked ranks, and what became of them.

    Attributes:
        events: of each rank, what it has said as (monotonic time, event, value).
        ended: exit codes by rank, negative for the signal that ended it.
    """

    processes: list[int]
    pipes: list[int]
    log: Path
    events: list[list[tuple[float, str, Any]]] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    _unread: list[bytes] = field(default_factory=list)

    @staticmethod
    def fork(function: Callable[..., None], log: Path, *args: Any, **kwargs: Any) -> World:
        """``function(rank, say, *args, **kwargs)`` on every rank; ``say(event, value)`` tells us of JSON values."""
        rendezvous = tempfile.mktemp(prefix="rendezvous_", dir=log.parent)
        world = World([], [], log)
        for rank in range(WORLD_SIZE):
            ours, theirs = os.pipe()
            process = os.fork()
            if process == 0:
                os.close(ours)
                _be_rank(rank, theirs, rendezvous, log, function, args, kwargs)
            os.close(theirs)
            os.set_blocking(ours, False)
            world.processes.append(process)
            world.pipes.append(ours)
            world.events.append([])
            world._unread.append(b"")
        return world

    def listen(self, seconds: float) -> None:
        """Take in what the ranks say, for at most so long; return as soon as there is something."""
        ready, _, _ = select.select(self.pipes, [], [], max(seconds, 0))
        for rank, pipe in enumerate(self.pipes):
            if pipe not in ready:
                continue
            with contextlib.suppress(BlockingIOError):
                while data := os.read(pipe, 1 << 16):
                    self._unread[rank] += data
            *lines, self._unread[rank] = self._unread[rank].split(b"\n")
            self.events[rank] += [tuple(json.loads(line)) for line in lines]
        if ready:
            self.reap()

    def reap(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.ended:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    self.ended[rank] = os.waitstatus_to_exitcode(status)

    def last(self, event: str, rank: int = 0) -> Any:
        return next((value for _, name, value in reversed(self.events[rank]) if name == event), None)

    def time_of(self, event: str, value: Any, rank: int = 0) -> float | None:
        return next((t for t, name, found in self.events[rank] if (name, found) == (event, value)), None)

    def until(self, what: Callable[[], Any], seconds: float = HANG_S) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            if len(self.ended) == WORLD_SIZE:
                raise RanksFailed(f"the ranks ended too early:\n{self.log.read_text()[-3000:]}")
            if time.monotonic() > deadline:
                raise RanksFailed(f"the ranks hang:\n{self.log.read_text()[-3000:]}")
            self.listen(0.2)

    def signal(self, number: int, ranks: list[int]) -> None:
        for rank in ranks:
            if rank not in self.ended:
                os.kill(self.processes[rank], number)

    def wait(self, seconds: float) -> bool:
        """Whether all ranks have ended, given so long."""
        deadline = time.monotonic() + seconds
        while True:
            self.reap()
            if len(self.ended) == WORLD_SIZE or time.monotonic() > deadline:
                return len(self.ended) == WORLD_SIZE
            time.sleep(0.01)

    def end(self, patience: float) -> None:
        """As a launcher ends the ranks that are left when one has died: some time, SIGTERM, some time, SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(patience):
                break
            self.signal(number, list(range(WORLD_SIZE)))
        self.wait(HANG_S)
        self.listen(0)

    def close(self) -> None:
        self.signal(signal.SIGKILL, list(range(WORLD_SIZE)))
        self.wait(HANG_S)
        for pipe in self.pipes:
            os.close(pipe)


def _be_rank(
    rank: int, pipe: int, rendezvous: str, log: Path, function: Callable[..., None], args: Any, kwargs: Any
) -> None:
    """In the forked process; never returns."""
    import torch.distributed as dist

    atexit._clear()  # what our parent has registered is not ours
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))

    def say(event: str, value: Any) -> None:
        os.write(pipe, json.dumps([time.monotonic(), event, value]).encode() + b"\n")

    code = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE)
        function(rank, say, *args, **kwargs)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        traceback.print_exc()
        say("error", f"{type(error).__name__}: {error}")
        sys.last_type, code = type(error), 1
    # The end of an interpreter; this one's frames belong to our parent.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
