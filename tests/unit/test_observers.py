"""Observers are called in order, and a failure of one ends it, not the run."""

from contextlib import contextmanager

import pytest

from hf_fsdp_plugin.observers import Observer, Observers


class Recorder(Observer):
    def __init__(self, log: list[str], name: str = "") -> None:
        self.log, self.name = log, name

    @contextmanager
    def phase(self, phase):
        self.log.append(f"{self.name}begin {phase}")
        try:
            yield
        finally:
            self.log.append(f"{self.name}end {phase}")

    def step_ended(self, optimizer):
        self.log.append(f"{self.name}step")


class Failing(Observer):
    def step_ended(self, optimizer):
        raise ValueError("no")

    def phase(self, phase):
        raise ValueError("no")


class Demanding(Failing):
    may_end_run = True


def observers_of(*each: Observer) -> Observers:
    observers = Observers()
    for observer in each:
        observers.add(observer)
    return observers


def test_observers_are_called_in_order_and_left_in_reverse():
    log: list[str] = []
    observers = observers_of(Recorder(log, "a "), Recorder(log, "b "))
    with observers.phase("clipping"):
        observers.notify("step_ended", None)
    begun = ["a begin clipping", "b begin clipping", "a step", "b step"]
    assert log == [*begun, "b end clipping", "a end clipping"]


def test_no_observer_costs_no_context():
    observers = Observers()
    assert not observers
    with observers.phase("backward"), observers.call("wait"):
        observers.notify("run_ended", None)


def test_failed_observer_is_removed_and_the_run_continues(capsys):
    log: list[str] = []
    failing = Failing()
    observers = observers_of(failing, Recorder(log))
    with observers.phase("backward"):
        pass
    observers.notify("step_ended", None)
    observers.notify_one(failing, "step_ended", None)
    assert log == ["begin backward", "end backward", "step"]
    assert capsys.readouterr().err.count("Failing failed") == 1


def test_observer_that_may_end_the_run_raises():
    observers = observers_of(Demanding())
    with pytest.raises(ValueError, match="no"):
        observers.notify("step_ended", None)
    with pytest.raises(ValueError, match="no"), observers.phase("backward"):
        pass


def test_phase_gets_the_exception_and_cannot_swallow_it():
    seen: list[object] = []

    class Swallowing(Observer):
        @contextmanager
        def phase(self, phase):
            try:
                yield
            except RuntimeError as error:
                seen.append(error)

    observers = observers_of(Swallowing())
    with pytest.raises(RuntimeError, match="of the run"), observers.phase("backward"):
        raise RuntimeError("of the run")
    assert len(seen) == 1


def test_system_exit_of_an_observer_ends_the_run():
    class Stopping(Observer):
        def step_ended(self, optimizer):
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        observers_of(Stopping()).notify("step_ended", None)
