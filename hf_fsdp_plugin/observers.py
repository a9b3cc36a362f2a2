"""Observers: how a tool that must run inside the ranks, such as a profiler, follows a training.

The runtime imports no tool and knows the name of none. The verb of a tool names a function in the environment of the
ranks (:data:`VARIABLE`), and ``install()`` calls the function. A script can attach an observer itself, too:
:func:`hf_fsdp_plugin.integrations.observing.attach`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, Literal

from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.state import process

VARIABLE: Final = "HF_FSDP_OBSERVERS"
"""Environment variable of the ranks: functions that attach observers, each ``MODULE:FUNCTION``, separated by blanks.

``install()`` calls them at its end with the spec, and removes the variable. Processes of the script do not attach them.
"""
ObservedPhase = Literal["data", "backward", "clipping", "checkpoint"]
"""Parts of a step in code that the runtime replaces; ``data`` is a batch of a ``DataLoader``. For forwards, the hooks
of the model suffice that :meth:`Observer.model_prepared` gets.
"""
ObservedCall = Literal["wait", "gather", "reduction"]
"""The wait for a collective, and the calls in which an FSDP1 unit gathers parameters and reduces gradients."""


class Observer:
    """The moments of a run. A method that a tool does not override does nothing.

    An exception of an observer ends the observer, not the run.

    Attributes:
        may_end_run: whether an exception of this observer ends the run. ``SystemExit`` always does.
    """

    may_end_run: bool = False

    def model_prepared(self, accelerator: Any, model: Any, plan: Any, *, is_trained: bool) -> None:
        """A model is sharded.

        Args:
            is_trained: ``False`` for the teachers and reference models of TRL's Trainers.
        """

    def phase(self, phase: ObservedPhase) -> AbstractContextManager[Any]:
        """Return the context in which a phase runs. It gets the exception that ends the phase."""
        return nullcontext()

    def call(self, kind: ObservedCall, unit: Any) -> AbstractContextManager[Any]:
        """Return the context of a call.

        Args:
            unit: torch's state of the FSDP1 unit; ``None`` for a wait.
        """
        return nullcontext()

    def step_ended(self, optimizer: Any) -> None:
        """An optimizer has made a step, also one that the plugin has not prepared."""

    def run_ended(self, error: BaseException | None) -> None:
        """The script has ended. Called under ``hf-fsdp launch`` and ``python -m hf_fsdp_plugin`` only."""


class Observers:
    """The observers of a process, which are called in the order in which they were added."""

    def __init__(self) -> None:
        self._observers: tuple[Observer, ...] = ()
        self._of_calls = False  # whether one of them overrides `call`, because there are many calls in a step

    def __bool__(self) -> bool:
        return bool(self._observers)

    def add(self, observer: Observer) -> None:
        self._set((*self._observers, observer))

    def remove(self, observer: Observer) -> None:
        self._set(tuple(each for each in self._observers if each is not observer))

    def _set(self, observers: tuple[Observer, ...]) -> None:
        self._observers = observers
        self._of_calls = any(type(each).call is not Observer.call for each in observers)

    def notify(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method of each observer that has the name of the event."""
        for observer in self._observers:
            self._call(observer, getattr(observer, event), *args, **kwargs)

    def notify_one(self, observer: Observer, event: str, *args: Any) -> None:
        """Call the method of one observer, unless it was removed."""
        if observer in self._observers:
            self._call(observer, getattr(observer, event), *args)

    def phase(self, phase: ObservedPhase) -> AbstractContextManager[Any]:
        """Return the contexts of all observers for a phase."""
        return self._in_contexts("phase", phase) if self._observers else nullcontext()

    def call(self, kind: ObservedCall, unit: Any = None) -> AbstractContextManager[Any]:
        """Return the contexts of all observers for a call."""
        return self._in_contexts("call", kind, unit) if self._of_calls else nullcontext()

    @contextmanager
    def _in_contexts(self, event: str, *args: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self._observers:
                context = self._call(observer, getattr(observer, event), *args)
                if context is not None:
                    self._call(observer, context.__enter__)
                    stack.push(functools.partial(self._leave, observer, context))
            yield

    def _leave(self, observer: Observer, context: AbstractContextManager[Any], *details: Any) -> None:
        self._call(observer, context.__exit__, *details)

    def _call(self, observer: Observer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if observer.may_end_run:
                raise
            self.remove(observer)
            reason = f"{type(error).__name__}: {error}"
            print_once(f"{type(observer).__name__} failed, and no longer observes the run, which continues: {reason}.")
            return None


observers = process.owns(Observers)
"""Return the observers of this process."""


def mark_phase(phase: ObservedPhase) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the calls of a function are a phase of the step."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with observers().phase(phase):
                return function(*args, **kwargs)

        return call

    return decorate
