"""gloo ranks that are started once and run many cases, because importing transformers takes seconds per process."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.leaks import ProcessState, leaks_since

_MAX_RANKS = 4
CASE_TIMEOUT_S = 560
AFTER_FAILURE_S = 60
_PR_SET_PDEATHSIG = 1
ACCELERATOR_BACKEND = Path(__file__).resolve().parents[1] / "accelerator" / "backend"
_VARIABLES = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
_IMPORTED = (
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "accelerate", "transformers.trainer",
    "transformers.models.llama.modeling_llama", "hf_fsdp_plugin",
)  # fmt: skip
"""Modules of the process from which ranks are forked."""
_LIBRARY_VARIABLES = (
    "ACCELERATE_USE_FSDP",  # set by Accelerator if it has an FSDP plugin
    "FSDP_CPU_RAM_EFFICIENT_LOADING",  # set by FullyShardedDataParallelPlugin and TrainingArguments
)


class RankError(AssertionError):
    """A case failed on some ranks; the message contains their tracebacks."""


class Ranks:
    """``world_size`` processes with a process group, which run one function after the other.

    If a rank ends or hangs in a case, all ranks are started again for the next one. Between cases the processes are
    stopped (SIGSTOP): gloo has a thread for each process group, which wakes up a hundred times a second, and the groups
    of all earlier cases remain.

    Args:
        device: ``cpu``, or ``accelerator``: the simulated accelerator of tests/accelerator, one device per rank. A case
            then fails if the device has found a race or another error.
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size = world_size
        self.device = device
        self._start()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        # The ranks outlive the test that starts them, so their temporary files are not in its temporary folder.
        self._folder = tempfile.TemporaryDirectory(prefix="hf_fsdp_ranks_", ignore_cleanup_errors=True)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.world_size):
            pipe, rank_pipe = context.Pipe()
            arguments = (rank, self.world_size, self._folder.name, rank_pipe, self.device)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            _fork(process, self.device)
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a top-level function on every rank and return the results in rank order.

        Raises:
            RankError: a rank raised an exception, ended, or did not answer in time.
        """
        if not self._processes:
            self._start()
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((function.__module__, function.__qualname__, args, kwargs))
            except OSError:
                code = self._processes[rank].exitcode
                self.stop()
                raise RankError(f"rank {rank} ended with exit code {code} after the case before") from None
        self._signal(signal.SIGCONT)
        replies = self._replies()
        self._signal(signal.SIGSTOP)
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in sorted(replies.items()) if not ok]
        if failures:
            raise RankError("\n".join(failures))
        return [replies[rank][1] for rank in range(self.world_size)]

    def _replies(self) -> dict[int, tuple[bool, Any]]:
        """Wait for all ranks, and after the first failure only for ``AFTER_FAILURE_S``: the others may hang in a
        collective with the failed rank.
        """
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + CASE_TIMEOUT_S
        while len(replies) < self.world_size:
            pending = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in replies}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                return replies | dict.fromkeys(pending.values(), (False, "did not answer: a collective may hang"))
            for pipe in ready:
                rank = pending[pipe]
                try:
                    replies[rank] = pipe.recv()
                except EOFError:
                    self._processes[rank].join(10)
                    code = self._processes[rank].exitcode
                    self.stop()
                    raise RankError(f"rank {rank} ended with exit code {code}") from None
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        return replies

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
        self._folder.cleanup()


_servers: dict[str, forkserver.ForkServer] = {}
"""Device -> the process that has imported the libraries and forks all ranks of the session: 7 seconds per rank."""


def _fork(process: Any, device: str) -> None:
    """Start a rank. The simulated accelerator must be switched on before torch is imported."""
    if device not in _servers:
        _servers[device] = forkserver.ForkServer()
        _servers[device].set_forkserver_preload(list(_IMPORTED))
    with (
        patch.dict(os.environ, _VARIABLES | _accelerator_variables() if device == "accelerator" else _VARIABLES),
        patch.object(forkserver, "connect_to_new_process", _servers[device].connect_to_new_process),
    ):
        process.start()


def _serve(rank: int, world_size: int, folder: str, pipe: Connection, device: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process does not see that its pipe is closed
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
        TMPDIR=folder, **_VARIABLES,
    )  # fmt: skip
    tempfile.tempdir = folder
    gc.disable()  # until the first case has imported what it needs
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = "gloo"
    if device == "accelerator":
        from hf_fsdp_plugin.devices import available_device

        backend = available_device().process_group_backend
        torch.accelerator.set_device_index(rank)
        _ignore_use_cpu()
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    num_modules = 0
    while True:
        try:
            module, name, args, kwargs = pipe.recv()
        except EOFError:
            return
        before = ProcessState.read()
        try:
            try:
                case = getattr(importlib.import_module(module), name)
                if device == "accelerator":
                    args, kwargs = _without_use_cpu(args), _without_use_cpu(kwargs)
                reply = (True, _on_cpu(case(*args, **kwargs)))
            finally:
                reset_process()
                findings = _take_findings()
            if findings:
                reply = (False, f"{name} is wrong on an accelerator:\n" + "\n".join(findings))
            # Files are not compared: all ranks use the same temporary folder.
            if leaks := leaks_since(before, files=False):
                reply = (False, f"{name} leaks {'; '.join(leaks)}")
        except BaseException:
            reply = (False, traceback.format_exc())
        before.restore()
        if len(sys.modules) > num_modules + 50:
            # Accelerate collects garbage in each training: without this, among the objects of all imported modules.
            gc.collect()
            gc.freeze()
            gc.enable()
            num_modules = len(sys.modules)
        _save_coverage()
        pipe.send(reply)


def _save_coverage() -> None:
    """Write what this rank has executed, under scripts/coverage.sh: a rank ends by SIGKILL."""
    coverage = sys.modules.get("coverage")
    if coverage is not None and (running := coverage.Coverage.current()) is not None:
        running.save()


def _accelerator_variables() -> dict[str, str]:
    """Return the variables with which a process and its children have the simulated accelerator."""
    paths = [str(ACCELERATOR_BACKEND), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "SIM_ACCELERATOR_COUNT": str(_MAX_RANKS)}


def _ignore_use_cpu() -> None:
    """Let the training arguments of cases that were written for CPU ranks select the accelerator."""
    from transformers import TrainingArguments

    original = TrainingArguments.__post_init__

    @functools.wraps(original)
    def post_init(self: TrainingArguments) -> None:
        self.use_cpu = False
        original(self)

    TrainingArguments.__post_init__ = post_init


def _without_use_cpu(value: Any) -> Any:
    """Return arguments of a case without the settings ``use_cpu`` of configs."""
    if isinstance(value, dict):
        return {key: False if key == "use_cpu" else _without_use_cpu(each) for key, each in value.items()}
    return type(value)(map(_without_use_cpu, value)) if type(value) in (list, tuple) else value


def _on_cpu(value: Any) -> Any:
    """Return a result whose tensors can be sent to a process without the device."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    return type(value)(map(_on_cpu, value)) if type(value) in (list, tuple) else value


def on_accelerator() -> bool:
    """Whether this rank has a device of the simulated accelerator, which cases that choose a device must use."""
    return os.environ.get("ACCELERATE_USE_CPU") != "true"


def own_device() -> Any:
    """The device of this rank."""
    import torch

    kind = torch.accelerator.current_accelerator() if on_accelerator() else None
    return torch.device(kind.type, int(os.environ["LOCAL_RANK"])) if kind else torch.device("cpu")


def _take_findings() -> list[str]:
    """What the simulated accelerator has found in this case."""
    device = sys.modules.get("torch_npu")
    return [str(finding) for finding in device.take_findings()] if device is not None else []


def reset_accelerate() -> None:
    """Reset Accelerate's singletons, so that the next Accelerator has a new configuration."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def forget_end_of_script() -> None:
    """Remove the announcement that the script of this rank has ended, because the rank runs another case."""
    import torch.distributed as dist

    from hf_fsdp_plugin.backends.ranks.agreement import LEFT, arrival_store

    if dist.is_initialized():
        for key in (f"{LEFT}/rank{dist.get_rank()}", LEFT):
            arrival_store().delete_key(key)


def reset_process() -> None:
    """Undo what the plugin, Accelerate and Transformers leave in a process by design."""
    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.backends.sharding.shard import sharded_models

    hfp.uninstall()
    sharded_models().clear()  # those of earlier cases are not collected yet, and a sharded model asks for FSDP
    reset_accelerate()
    forget_end_of_script()
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
        dynamo.counters.clear()  # FLOPs are not counted in a process that has compiled code
    for variable in _LIBRARY_VARIABLES:
        os.environ.pop(variable, None)
