"""Requests for a checkpoint while a training runs: signals, and the file ``save_now`` in the folder of the run.

A signal may reach some ranks only, and at different moments. All ranks save after the same step, on which they agree
without waiting for each other (``backends.ranks.agreed_step``). After a signal the training ends, with an exit code
with which Slurm, Kubernetes and torch's agent start it again; after the file it goes on.
"""

from __future__ import annotations

import atexit
import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks.agreed_step import AgreedStep
from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin, planned_plugin
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.spec.fsdp_spec import SaveOnSignal
from hf_fsdp_plugin.state import process

SAVE_NOW: Final = "save_now"
"""Name of the file with which a user asks for a checkpoint."""
SIGNALS: Final[Mapping[SaveOnSignal, tuple[str, ...]]] = {
    "none": (),
    "usr1": ("SIGUSR1",),
    "term": ("SIGTERM",),
    "both": ("SIGUSR1", "SIGTERM"),
}
"""Value of ``fsdp_save_on_signal`` -> the signals that ask for a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """Why the ranks save.

    Attributes:
        text: what has asked for the checkpoint, such as ``SIGUSR1 to rank 3``.
        time: when, in seconds since the epoch.
        ends: whether the training ends after the save.
        exit_code: the exit code of the ranks after the save; 0 if the script goes on.
    """

    text: str
    time: float
    ends: bool = False
    exit_code: int = 0

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> SaveRequest:
        return cls(**json.loads(text))


class SaveRequests:
    """The requests of a training, for which all ranks save after the same event: a step, or a batch of an evaluation.

    Created, counted and closed on all ranks. Collective only when it is created and when ranks save. A handler of the
    script is kept. So is that of a save in the background, which waits for the save and then calls the one before it.

    Args:
        plugin: the FSDP plugin of the training; ``None`` without one, in which case signals are left alone.
        folder: the folder of the run, in which rank 0 looks for the file; ``None`` for none.
        find_other: returns the request of another source, as text, or ``""``.
    """

    def __init__(
        self, plugin: PlannedFsdpPlugin | None, folder: Path | None, find_other: Callable[[], str] = lambda: ""
    ) -> None:
        self._file = folder / SAVE_NOW if folder is not None and dist.get_rank() == 0 else None
        self._find_other, self._received = find_other, ""
        self._handled: list[int] = []
        if plugin is not None and threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in SIGNALS[plugin.spec.checkpoint.save_on_signal]):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._receive)
                    self._handled.append(number)
        self._num_events = 0
        self._due: SaveRequest | None = None
        self._agreement = AgreedStep(1, self._find)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._received:
            text = f"{signal.Signals(number).name} to rank {dist.get_rank()}"
            self._received = str(SaveRequest(text=text, time=time.time(), ends=True, exit_code=128 + number))

    def _find(self) -> str:
        """Return the request that this rank has, as text; ``""`` for none."""
        found = self._find_other() or self._received
        if not found and self._file is not None and self._file.exists():
            return str(SaveRequest(text=f"{self._file}", time=time.time()))
        return found

    def due(self) -> SaveRequest | None:
        """Count an event that has ended. Return the request for which the ranks save, until :meth:`finish`."""
        self._num_events += 1
        if self._agreement.is_reached(self._num_events):
            self._due = SaveRequest.parse(self._agreement.reason())
        return self._due

    def finish(self, saved: str) -> None:
        """Wait until the checkpoint is complete, print how long it took, and look for the next request. Collective.

        Args:
            saved: the checkpoint, for the message.

        Raises:
            SystemExit: after a signal.
        """
        due, self._due = self._due, None
        if due is None:
            return
        manager().wait()
        outcome = f"was complete {time.time() - due.time:.1f} s later"
        if manager().has_lost_save:
            outcome = "was not stored, as the warning says"
        then = "the training stops" if due.ends else "the training goes on"
        then = f"the ranks exit with code {due.exit_code}" if due.exit_code else then
        print_once(f"{due.text}: {saved} {outcome}; {then}")
        with suppress(OSError):
            if self._file is not None:
                self._file.unlink()  # so that it can be created again
        if due.exit_code:
            self.close()
            raise SystemExit(due.exit_code)
        if not due.ends:
            self._agreement.begin_round(self._num_events + 1)

    def close(self) -> None:
        """Stop looking for requests, and restore the handlers of signals. Can be called again."""
        self._agreement.close()
        for number in self._handled:
            if signal.getsignal(number) == self._receive:
                signal.signal(number, signal.SIG_DFL)


class _LoopRequests:
    """The requests of the training loop of this process, whose events are the calls of :func:`save_requested`."""

    def __init__(self) -> None:
        self.requests: SaveRequests | None = None

    def of(self, accelerator: Any) -> SaveRequests:
        """Return the requests, which the first call creates."""
        if self.requests is None:
            folder = Path(accelerator.project_dir) if accelerator.project_dir else None
            self.requests = SaveRequests(planned_plugin(accelerator), folder)
            atexit.register(self.close)
        return self.requests

    def close(self) -> None:
        if self.requests is not None:
            self.requests.close()
            atexit.unregister(self.close)
        self.requests = None


_loop_requests = process.owns(_LoopRequests)


def save_requested(accelerator: Any) -> bool:
    """Return whether all ranks are to save a checkpoint now, because of a signal or the file ``save_now``.

    For training loops without a Trainer, which does this itself. Call it after each optimizer step on all ranks: it
    returns true after the same call on each of them, and no rank waits for another one before. Then save, and call
    :func:`end_requested_save`::

        if hfp.save_requested(accelerator):
            accelerator.save_state(f"checkpoints/step_{step}")
            hfp.end_requested_save()

    The signals are those of ``fsdp_save_on_signal``, and the file is searched in ``accelerator.project_dir``.
    """
    return _loop_requests().of(accelerator).due() is not None


def end_requested_save() -> None:
    """Wait until the checkpoint is complete, print how long it took, and exit if a signal has asked for it. Collective.

    Raises:
        SystemExit: after a signal, with the code 128 + number of the signal.
    """
    if (requests := _loop_requests().requests) is not None:
        requests.finish("the checkpoint")
