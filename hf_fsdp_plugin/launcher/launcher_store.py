"""The store that the launchers of several machines share: its keys, and requests that do not wait without end."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

PREFIX = "hf_fsdp_store_"
from hf_fsdp_plugin.runs.restart_rule import Decision, Verdict

POLL_SECONDS = 0.1
_REQUEST_SECONDS = 10.0
"""Seconds that a request to the store may take."""

_T = TypeVar("_T")


class StoreLost(Exception):
    """The store is gone, or does not answer."""


class LauncherStore:
    """The store of one meeting and of the attempt that follows it, as one launcher sees it.

    Attributes:
        store: torch's store.
        machine: number of this machine.
        number: number of the meeting in this store, from 0.
    """

    def __init__(self, store: Any, machine: int, number: int = 0) -> None:
        self.store, self.machine, self.number = store, machine, number

    def key(self, name: str) -> str:
        """Return the key of a value that belongs to this meeting."""
        return f"{self.number}/{name}"

    def own(self, name: str) -> str:
        """Return the key of a value that belongs to this meeting and this machine."""
        return f"{self.number}/{name}/{self.machine}"

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def has(self, *keys: str) -> bool:
        return bool(self.store.check(list(keys)))

    def get(self, key: str) -> str:
        """Return the value of a key, which must be there: a request that waits cannot be interrupted."""
        value: bytes = self.store.get(key)
        return value.decode()

    def count(self, key: str, more: int = 0) -> int:
        """Add to a counter, and return its value."""
        return int(self.store.add(key, more))

    def wait_for(self, key: str, deadline: float) -> str:
        """Return the value of a key when it is there. Raises ``TimeoutError`` after `deadline`."""
        while not self.has(key):
            if time.monotonic() > deadline:
                raise TimeoutError(f"machine 0 did not write {key} in time")
            time.sleep(POLL_SECONDS)
        return self.get(key)

    def announce(self, text: str) -> str:
        """Announce a failure on this machine, which stops the ranks of all. Returns the first announced failure."""
        first: bytes = self.store.compare_set(self.key("failed"), "", f"machine {self.machine}: {text}")
        return first.decode()

    def has_failure(self) -> bool:
        """Return whether a machine has announced a failure."""
        return self.has(self.key("failed"))

    def put_verdict(self, verdict: Verdict) -> None:
        self.set(self.own("verdict"), verdict.to_text())

    def verdict_of(self, machine: int) -> Verdict | None:
        key = self.key(f"verdict/{machine}")
        return Verdict.from_text(self.get(key)) if self.has(key) else None

    def put_decision(self, decision: Decision) -> None:
        self.set(self.key("decision"), decision.to_text())

    def has_decision(self) -> bool:
        return self.has(self.key("decision"))

    def read_decision(self, deadline: float) -> Decision:
        return Decision.from_text(self.wait_for(self.key("decision"), deadline))

    def leave(self) -> None:
        """Announce that the ranks of this machine have exited, and that it does not come back."""
        self.set(left_key(self.machine), "1")

    def has_left(self, *machines: int) -> bool:
        return self.has(*map(left_key, machines))

    def ask(self, request: Callable[[], _T], seconds: float = _REQUEST_SECONDS) -> _T:
        """Return the result of requests to the store. Raises ``StoreLost`` if they fail, or take too long."""
        try:
            return in_thread(request, seconds)
        except Exception as error:  # the process that hosts the store can fail in many ways
            raise StoreLost from error


def beat_key(machine: int) -> str:
    return f"beat/{machine}"


def left_key(machine: int) -> str:
    return f"left/{machine}"


def in_thread(function: Callable[[], _T], seconds: float = float("inf")) -> _T:
    """Return the result of a function that blocks without handling signals. Raises ``TimeoutError``."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name=f"{PREFIX}request", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(min(0.2, max(deadline - time.monotonic(), 0.0)))
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


@contextlib.contextmanager
def torch_log_level() -> Iterator[None]:
    """Import torch with a log level that hides C++ stacks of a closed store. Python still raises these errors.

    Torch reads the variable when it is imported. It is removed afterwards, because the ranks inherit the environment.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "ERROR")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]
