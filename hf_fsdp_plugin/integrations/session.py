"""The FSDP settings of this process: those from outside the script, and those of each ``TrainingArguments``."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.runs.attempts import Restarts
from hf_fsdp_plugin.runs.identity import RunIdentity
from hf_fsdp_plugin.sources.interface import SourceSettings
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import add_settings, combine
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.torch_private.modules import entries_in_block

_OTHER_RUNS: Final = frozenset({"FSDP-E120", "FSDP-E121", "FSDP-E122"})
"""Codes of the problems that the settings are for another engine, for fp8 or for another kind of parallelism."""


class OuterCalls(threading.local):
    """What a call passes to replaced functions that a library calls inside of it, in the same thread.

    Attributes:
        allows_pickles: the ``load_state`` that is running was called with ``load_kwargs={"weights_only": False}``.
    """

    allows_pickles = False


outer_calls = process.owns(OuterCalls)


def attributes_in_block(owner: Any, **attributes: Any) -> AbstractContextManager[None]:
    """Give an object other values of attributes in the block. Those that it only inherits are removed afterwards."""
    return entries_in_block(attributes, vars(owner))


class Session:
    """The sources outside the script, and the specs that were read so far.

    Attributes:
        installed: whether ``install`` started the session. Otherwise the script's arguments are the only source.
        given: the settings of the sources outside the script: handed over by the launcher, or read by ``install``.
        report: path of the report; ``None`` for the output folder of the script.
        report_table: whether to print the tables of the report instead of a summary.
        uses_fsdp: whether any source has asked for FSDP so far. Before, no function of another library is changed.
        is_automatic: whether ``hf-fsdp enable`` started the session, which an ``install`` of the script replaces.
        waits_for_call: whether the next call of a hooked function starts the deferred session.
        ambient: the spec of the sources; ``None`` if they do not enable FSDP.
        trainer_spec: the spec of the Trainer that is creating an Accelerator, from its arguments; ``None`` otherwise.
        group_timeout: the time-out of the ``TrainingArguments`` that are being created; ``None`` otherwise.
        in_flight_file: path of a file that exists while a checkpoint is written in the background, for the launcher.
        early_group: the process group that was started without a time-out, by ``install`` or by ``PartialState()``.
    """

    def __init__(self) -> None:
        # Keyed by id: TrainingArguments is unhashable, and its attributes are pickled into every checkpoint.
        self._of_arguments: dict[int, FsdpSpec] = {}
        self.trainer_spec: FsdpSpec | None = None
        self.group_timeout: timedelta | None = None
        self.in_flight_file: Path | None = None
        self.installed = self.report_table = self.uses_fsdp = self.is_automatic = False
        self.given: tuple[SourceSettings, ...] = ()
        self.report: str | None = None
        self.ambient: FsdpSpec | None = None
        self.early_group: Any = None
        self.defer(None)

    def begin(
        self, given: Sequence[SourceSettings], *, report: str | None = None, report_table: bool = False
    ) -> FsdpSpec:
        """Begin the session and return the spec of the settings. Raises ``SpecError`` with all problems.

        If the sources enable FSDP, Accelerators that are created without an FSDP plugin use this spec.
        """
        self.installed, self.given, self.report, self.report_table = True, tuple(given), report, report_table
        self.ambient = None
        spec = self.load()
        self.ambient = spec if spec.enabled else None
        return spec

    def defer(self, install: Callable[[], None] | None, *, until_call: bool = False) -> None:
        """Call ``install`` when FSDP is first asked for, or forget it (``None``).

        Args:
            until_call: call it already at the next call of a hooked function, because the launcher asked for FSDP.
        """
        self._deferred, self.waits_for_call = install, until_call

    def start_deferred(self) -> None:
        """Call the deferred ``install``, if there is one."""
        if (install := self._deferred) is not None:
            self.defer(None)
            install()

    def ask_for_fsdp(self) -> None:
        """Note that a source has asked for FSDP, which starts a deferred session."""
        self.uses_fsdp = True
        self.start_deferred()

    def load(self, **arguments: Any) -> FsdpSpec:
        """Return the spec of all sources and of a script's arguments. Raises ``SpecError`` with all problems.

        Args:
            arguments: ``training_arguments``, ``plugin_object`` and ``parallelism_config`` of :class:`Sources`.
        """
        assessment = combine(add_settings(self.given, **arguments) if arguments else self.given)
        errors = {problem.code for problem in assessment.problems if problem.severity == "error"}
        if not assessment.spec.enabled and errors and errors <= _OTHER_RUNS:
            return assessment.spec  # a script with install() that is started without FSDP runs as without install()
        if self._deferred is not None and not assessment.spec.enabled:
            return assessment.spec  # without FSDP, `hf-fsdp enable` changes nothing
        spec = assessment.checked_spec()
        if spec.enabled:
            self.ask_for_fsdp()
        return spec

    def is_active(self) -> bool:
        """Whether FSDP was asked for, or a model is sharded. Called at each call of a replaced function."""
        if self.uses_fsdp:
            return True
        shard = sys.modules.get("hf_fsdp_plugin.backends.sharding.shard")  # which imports torch
        return shard is not None and bool(shard.sharded_models())

    def remember(self, arguments: Any, spec: FsdpSpec) -> None:
        """Keep the spec of a ``TrainingArguments`` for the Trainer that will be created with it."""
        self._of_arguments[id(arguments)] = spec
        weakref.finalize(arguments, self._of_arguments.pop, id(arguments), None)

    def storage(self) -> str:
        """Return the storage of checkpoints of the newest ``TrainingArguments`` or of the sources; empty for none."""
        specs = [*([self.ambient] if self.ambient is not None else []), *self._of_arguments.values()]
        return specs[-1].checkpoint.storage if specs else ""

    def spec_of_arguments(self, arguments: Any) -> FsdpSpec | None:
        return self._of_arguments.get(id(arguments))


session = process.owns(Session)


class CurrentRun:
    """The run of this process. ``uninstall`` does not end it: later checkpoints of the process are of the same run.

    Attributes:
        identity: which run it is, from the variables of its launcher.
        restarts: the failed attempts of the run. Under launchers that do not pass them on, ``integrations.resuming``
            adds them when the process group exists.
        num_trainings: number of calls of the Trainer's ``train`` so far.
        first_samples_per_step: samples of an optimizer step in the first attempt of the run, after a restart.
    """

    def __init__(self) -> None:
        self.identity = RunIdentity()
        self.restarts = Restarts()
        self.num_trainings = 0
        self.first_samples_per_step: int | None = None


current_run = process.owns(CurrentRun, kept=True)
