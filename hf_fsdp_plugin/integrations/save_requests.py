"""Requests for a checkpoint while a training runs: signals, and the file ``save_now`` in the folder of the run.

A signal may reach some ranks only, and at different moments. All ranks save after the same step, on which they agree
without waiting for each other (``backends.ranks.agreed_step``). After a signal the training ends, with an exit code
with which Slurm, Kubernetes and torch's agent start it again; after the file it goes on.
"""

from __future__ import annotations

import atexit
import json
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks.agreed_step import AgreedStep
from hf_fsdp_plugin.integrations.accelerate.plugin import planned_plugin
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.rank_variables import launched_rank
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

    def tell(self, saved: str) -> None:
        """Print on rank 0 how long the save took. Call it when the checkpoint is complete."""
        if launched_rank() == 0:
            then = "the training stops" if self.ends else "the training goes on"
            then = f"the ranks exit with code {self.exit_code}" if self.exit_code else then
            seconds = time.time() - self.time
            print(
                f"hf-fsdp: {self.text}: {saved} was complete {seconds:.1f} s later; {then}", file=sys.stderr, flush=True
            )


class SaveRequests:
    """What this process has received: signals, and on rank 0 the file. Closed, it has its former handlers again.

    A handler of the script is kept. So is that of a save in the background, which waits for the save and then calls
    the handler before it.

    Args:
        setting: the value of ``fsdp_save_on_signal``.
        folder: the folder of the run, in which rank 0 looks for the file; ``None`` for none.
    """

    def __init__(self, setting: SaveOnSignal, folder: Path | None) -> None:
        self._file = folder / SAVE_NOW if folder is not None and dist.get_rank() == 0 else None
        self._received = ""
        self._handled: list[int] = []
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in SIGNALS[setting]):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._receive)
                    self._handled.append(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._received:
            text = f"{signal.Signals(number).name} to rank {dist.get_rank()}"
            self._received = str(SaveRequest(text=text, time=time.time(), ends=True, exit_code=128 + number))

    def find(self) -> str:
        """Return the request that this rank has, as text; ``""`` for none."""
        if not self._received and self._file is not None and self._file.exists():
            return str(SaveRequest(text=f"{self._file}", time=time.time()))
        return self._received

    def remove_file(self) -> None:
        """Remove the file after its save, so that it can be created again."""
        with suppress(OSError):
            if self._file is not None:
                self._file.unlink()

    def close(self) -> None:
        for number in self._handled:
            if signal.getsignal(number) == self._receive:
                signal.signal(number, signal.SIG_DFL)


class LoopRequests:
    """The requests of the training loop of this process, whose steps are the calls of :func:`save_requested`.

    Attributes:
        due: the request for which the ranks save now.
    """

    def __init__(self) -> None:
        self.due: SaveRequest | None = None
        self._requests: SaveRequests | None = None
        self._agreement: AgreedStep | None = None
        self._num_calls = 0

    def is_due(self, accelerator: Any) -> bool:
        """Count a step, and return whether the ranks save after it. The first call is collective."""
        if self._agreement is None:
            plugin = planned_plugin(accelerator)
            setting = plugin.spec.checkpoint.save_on_signal if plugin is not None else "none"
            folder = Path(accelerator.project_dir) if accelerator.project_dir else None
            self._requests = SaveRequests(setting, folder)
            self._agreement = AgreedStep(self._num_calls + 1, self._requests.find)
            atexit.register(self.close)
        self._num_calls += 1
        if self._agreement.is_reached(self._num_calls):
            self.due = SaveRequest.parse(self._agreement.reason)
        return self.due is not None

    def finish(self) -> None:
        """Do what follows the save. See :func:`end_requested_save`."""
        due, self.due = self.due, None
        if due is None or self._requests is None:
            return
        manager().wait()
        due.tell("the checkpoint")
        self._requests.remove_file()
        if due.exit_code:
            self.close()
            raise SystemExit(due.exit_code)

    def close(self) -> None:
        if self._agreement is not None and self._requests is not None:
            self._agreement.close()
            self._requests.close()
            atexit.unregister(self.close)
        self._agreement = self._requests = None


loop_requests = process.owns(LoopRequests)
"""Return the requests of the training loop."""


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
    return loop_requests().is_due(accelerator)


def end_requested_save() -> None:
    """Wait until the checkpoint is complete, print how long it took, and exit if a signal has asked for it. Collective.

    Raises:
        SystemExit: after a signal, with the code 128 + number of the signal.
    """
    loop_requests().finish()
