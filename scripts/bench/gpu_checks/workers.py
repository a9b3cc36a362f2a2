"""The processes that run cases: one per rank, without torchrun, for as many cases as pass one after the other."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from scripts.bench.gpu_checks.base import (
    CHECKS,
    Case,
    Skipped,
    Unusable,
    check_free_memory,
    new_accelerator,
    on_accelerator,
    reset_process,
)

_START_LIMIT = 180.0
"""Seconds in which ranks import torch and start their process group."""
_AFTER_FAILURE = 15.0
"""Seconds for the other ranks after the first has failed: they may wait for it in a collective."""
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}


class Workers:
    """The ranks of one world. They are started by the first case, and again after a case that has not passed.

    Args:
        slower: what time limits are multiplied by.
    """

    def __init__(self, *, slower: float = 1.0) -> None:
        self._slower = slower
        self._world: tuple[Any, ...] | None = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def serves(self, case: Case) -> bool:
        """Whether the ranks that run now can run the case."""
        return self._world == _world(case) and not CHECKS[case["check"]].fresh

    def run(self, case: Case, seconds_left: float) -> Case | None:
        """Run a case and return its result; ``None`` if ``seconds_left`` ended it before its time limit did."""
        started = time.monotonic()
        check = CHECKS[case["check"]]
        if not self.serves(case):
            self.stop()
            if (failure := self._start(case, min(_START_LIMIT * self._slower, seconds_left))) is not None:
                self.stop()
                return failure if time.monotonic() - started < seconds_left else None
        begun = time.monotonic()
        limit = check.limit * self._slower
        left = seconds_left - (begun - started)
        for pipe in self._pipes:
            pipe.send(case)
        result = self._collect(min(limit, left))
        if result is None:
            self.stop()
            if left < limit:
                return None
            result = {"status": "failed", "reason": f"did not finish within {limit:.0f} s{self._last_lines()}"}
        elif result["status"] not in ("passed", "skipped") or check.fresh:
            self.stop()
        return {**result, "seconds": round(time.monotonic() - begun, 1)}

    def stop(self) -> None:
        """Kill the ranks, and all processes that they have started."""
        for process in self._processes:
            for target in (os.killpg, os.kill):  # the group exists once the rank has made it
                try:
                    target(process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
            process.join(10)
        self._processes, self._pipes, self._world = [], [], None

    def _start(self, case: Case, limit: float) -> Case | None:
        """Start the ranks. Returns a failed result if they do not start."""
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="gpu_check_ranks_", ignore_cleanup_errors=True)
        port = _free_port()
        for rank in range(case["ranks"]):
            pipe, rank_pipe = context.Pipe()
            log = str(Path(self._folder.name) / f"rank{rank}.log")
            process = context.Process(target=_serve, args=(rank, port, case, rank_pipe, log), daemon=True)
            process.start()
            rank_pipe.close()
            self._processes.append(process)
            self._pipes.append(pipe)
        self._world = _world(case)
        result = self._collect(limit)
        if result is None:
            return {"status": "failed", "seconds": limit, "reason": f"ranks did not start in {limit:.0f} s"}
        return None if result["status"] == "passed" else {**result, "seconds": 0.0}

    def _collect(self, limit: float) -> Case | None:
        """Return the result of rank 0, or of the rank that was refused or has failed; ``None`` after the time limit."""
        replies: dict[int, Case] = {}
        deadline = time.monotonic() + limit
        while len(replies) < len(self._pipes):
            pending = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in replies}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                try:
                    replies[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._processes[rank].join(10)
                    code = self._processes[rank].exitcode
                    reason = f"rank {rank} ended with exit code {code}{self._last_lines(rank)}"
                    replies[rank] = {"status": "failed", "reason": reason}
                if replies[rank]["status"] in ("failed", "refused"):
                    deadline = min(deadline, time.monotonic() + _AFTER_FAILURE)
        order = ("unusable", "refused", "failed", "skipped", "passed")
        found = sorted(replies.items(), key=lambda item: (order.index(item[1]["status"]), item[0]))
        if not found or (len(found) < len(self._pipes) and found[0][1]["status"] in ("skipped", "passed")):
            return None
        return found[0][1]

    def _last_lines(self, rank: int = 0) -> str:
        assert self._folder is not None
        log = Path(self._folder.name) / f"rank{rank}.log"
        text = log.read_text(errors="replace")[-1500:].strip() if log.exists() else ""
        return f". Its last lines: {text}" if text else ""


def _world(case: Case) -> tuple[Any, ...]:
    """Return what ranks must have in common to run two cases."""
    own_device = case["check"] == "one_visible_gpu"
    environment = str(case.get("environment", ""))
    return case["device"], case["ranks"], case["backend"], bool(case.get("shared")), own_device, environment


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# ---- in the rank ----------------------------------------------------------------------------------------------------


def _serve(rank: int, port: int, case: Case, pipe: Connection, log: str) -> None:
    """Run the cases that arrive, until the parent closes the pipe."""
    os.setsid()  # the parent kills the group, with what a check has started
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    ranks = case["ranks"]
    threads = 1 if case["device"] == "cpu" else max(1, min(16, (os.cpu_count() or 1) // ranks))
    os.environ.update(
        _ENVIRONMENT, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **case.get("environment", {}),
    )  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if case["check"] == "one_visible_gpu" and case["device"] == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    pipe.send(_result(lambda: _start_process_group(case)))
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            os._exit(0)  # teardown could hang on a broken process group
        pipe.send(_result(lambda case=case: _run(case)))  # type: ignore[misc]


def _run(case: Case) -> Case:
    from scripts.bench.gpu_checks import run_check

    return run_check(case)


def _result(run: Any) -> Case:
    """Call a function, and return its result as that of a case."""
    try:
        figures = run() or {}
        text = figures.pop("text", None) or _line(figures)
        return {"status": "passed", "reason": text, "figures": json.loads(json.dumps(figures))}
    except Skipped as error:
        return {"status": "skipped", "reason": str(error)}
    except Unusable as error:
        return {"status": "unusable", "reason": str(error)}
    except Exception as error:
        from hf_fsdp_plugin.problems import SpecError

        traceback.print_exc()
        sys.stderr.flush()
        status = "refused" if isinstance(error, SpecError) else "failed"
        return {
            "status": status,
            "reason": f"{type(error).__name__}: {error}"[:2000],
            "traceback": traceback.format_exc()[-4000:],
        }


def _line(figures: Case) -> str:
    """Return the plain line of a check that has none of its own: its figures."""
    items = (f"{name.replace('_', ' ')} {value}" for name, value in figures.items())
    return ", ".join(items)[:200]


def _start_process_group(case: Case) -> None:
    """Start the process group. On GPUs an Accelerator starts ``cpu:gloo,cuda:nccl``, as in a script."""
    import torch
    import torch.distributed as dist

    import scripts.bench.gpu_checks  # noqa: F401  (imports take seconds that belong to no check)

    if case["device"] == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    elif case.get("shared"):
        os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(0)
        # Clipping with offload reduces CPU tensors.
        dist.init_process_group(f"cpu:gloo,cuda:{case['backend']}")
    else:
        new_accelerator({**case, "strategy": "full_shard", "offload": False})
        reset_process()
    if on_accelerator(case):
        check_free_memory(case)
    import transformers  # noqa: F401
