"""Gloo ranks forked from this process. They report events to it until they exit or are killed.

Importing torch and transformers takes seconds, and each rank that is killed must be a separate process. The parent
process must not start a thread or a process group: call :func:`preload` first, and run all other work on the ranks.
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
"""Number of ranks, unless another one is given."""
HANG_S = 60.0
"""Seconds after which ranks that have not reached a state count as hung."""


class RanksFailed(Exception):
    """The ranks hang, or have exited too early."""


def preload() -> None:
    """Import everything that the ranks need, without starting a thread or a process group."""
    os.environ.update(
        ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    import torch._dynamo
    import torch.distributed._composable_state
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    from hf_fsdp_plugin.tools.verify.verification import verify  # noqa: F401


@dataclass(slots=True)
class World:
    """Forked ranks and their events.

    Attributes:
        events: reported events of each rank, as (monotonic time, event, value).
        ended: exit codes by rank; minus the number of the signal that killed the rank.
    """

    processes: list[int]
    pipes: list[int]
    log: Path
    events: list[list[tuple[float, str, Any]]] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    _unread: list[bytes] = field(default_factory=list)

    @staticmethod
    def fork(
        function: Callable[..., None], log: Path, *args: Any, world_size: int = WORLD_SIZE, **kwargs: Any
    ) -> World:
        """Run ``function(rank, report, *args, **kwargs)`` on each rank; ``report(event, value)`` sends a JSON value."""
        os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
        rendezvous = tempfile.mktemp(prefix="rendezvous_", dir=log.parent)
        world = World([], [], log)
        for rank in range(world_size):
            read_end, write_end = os.pipe()
            process = os.fork()
            if process == 0:
                os.close(read_end)
                _run_rank(rank, write_end, rendezvous, log, function, args, kwargs)
            os.close(write_end)
            os.set_blocking(read_end, False)
            world.processes.append(process)
            world.pipes.append(read_end)
            world.events.append([])
            world._unread.append(b"")
        return world

    def listen(self, seconds: float) -> None:
        """Read events of the ranks. Returns after `seconds`, or as soon as there are events."""
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
            if len(self.ended) == len(self.processes):
                raise RanksFailed(f"the ranks exited too early:\n{self.log.read_text()[-3000:]}")
            if time.monotonic() > deadline:
                raise RanksFailed(f"the ranks hang:\n{self.log.read_text()[-3000:]}")
            self.listen(0.2)

    def signal(self, number: int, ranks: list[int]) -> None:
        for rank in ranks:
            if rank not in self.ended:
                os.kill(self.processes[rank], number)

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds` and return whether all ranks have exited."""
        deadline = time.monotonic() + seconds
        while True:
            self.reap()
            if len(self.ended) == len(self.processes) or time.monotonic() > deadline:
                return len(self.ended) == len(self.processes)
            time.sleep(0.01)

    def end(self, patience: float) -> None:
        """Stop the remaining ranks as a launcher does: SIGTERM after `patience` seconds, later SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(patience):
                break
            self.signal(number, list(range(len(self.processes))))
        self.wait(HANG_S)
        self.listen(0)

    def close(self) -> None:
        self.signal(signal.SIGKILL, list(range(len(self.processes))))
        self.wait(HANG_S)
        for pipe in self.pipes:
            os.close(pipe)


def _run_rank(
    rank: int, pipe: int, rendezvous: str, log: Path, function: Callable[..., None], args: Any, kwargs: Any
) -> None:
    """Run `function` in the forked process. Does not return."""
    import torch.distributed as dist

    atexit._clear()  # handlers registered by the parent must not run here
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))

    def report(event: str, value: Any) -> None:
        os.write(pipe, json.dumps([time.monotonic(), event, value]).encode() + b"\n")

    code, world_size = 0, int(os.environ["WORLD_SIZE"])
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        function(rank, report, *args, **kwargs)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        traceback.print_exc()
        report("error", f"{type(error).__name__}: {error}")
        sys.last_type, code = type(error), 1
    # Shut down as the interpreter does. Returning is not possible: the stack frames are the parent's.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
