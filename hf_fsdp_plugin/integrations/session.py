"""The FSDP settings of this process: those from outside the script, and those of each ``TrainingArguments``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from hf_fsdp_plugin.sources import environment
from hf_fsdp_plugin.sources.accelerate_launch import locate_config
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.spec.load import assess
from hf_fsdp_plugin.spec.model import FsdpSpec


class Session:
    """The sources outside the script, and the specs read so far.

    Attributes:
        sources: as given to ``install`` or by the launcher.
        report: path of the report; ``None`` for the output folder of the script.
        installed: whether ``install`` began this session. Without it, the script's own arguments are the only source.
        ambient: the spec of the sources; ``None`` if they do not enable FSDP.
    """

    def __init__(
        self, sources: Sources | None = None, *, report: str | None = None, before: Session | None = None
    ) -> None:
        self.sources = sources or Sources(environ={})
        self.report = report
        self.installed = sources is not None
        self.ambient: FsdpSpec | None = None
        self._located = locate_config(self.sources)  # once: the file behind the launcher does not change
        # By id: TrainingArguments is unhashable, and its attributes are pickled into every checkpoint.
        self._of_arguments: dict[int, FsdpSpec] = before._of_arguments if before is not None else {}

    def load(
        self, training_arguments: Mapping[str, Any] | None = None, *, plugin_object: Mapping[str, Any] | None = None
    ) -> FsdpSpec:
        """Return the spec of all sources and these arguments. Raises ``SpecError`` with all problems."""
        arguments = training_arguments or {}
        sources = replace(self._located, training_arguments=arguments, plugin_object=plugin_object)
        return assess(sources).checked_spec()

    def remember(self, arguments: Any, spec: FsdpSpec) -> None:
        """Keep the spec of a ``TrainingArguments`` for the Trainer that will be created with it."""
        self._of_arguments[id(arguments)] = spec
        weakref.finalize(arguments, self._of_arguments.pop, id(arguments), None)

    def spec_of_arguments(self, arguments: Any) -> FsdpSpec | None:
        return self._of_arguments.get(id(arguments))


def asks_for_fsdp(spec: FsdpSpec) -> bool:
    """Whether a source enables FSDP, and not only a precision or a number of processes.

    ``FSDP_*`` variables alone configure FSDP but do not enable it; ``ACCELERATE_USE_FSDP`` does.
    """
    if spec.launch.distributed_type != "FSDP":
        return False
    about_fsdp = (
        origin
        for name, origin in spec.origins.items()
        if name.partition(".")[0] not in ("launch", "precision", "activation")
    )
    return spec.asked("launch.distributed_type") or any(origin.source != environment.SOURCE for origin in about_fsdp)


_session = Session()
_current: ContextVar[FsdpSpec | None] = ContextVar("hf_fsdp_spec", default=None)


def begin(sources: Sources, *, report: str | None = None) -> FsdpSpec:
    """Begin this process's session and return the spec of its sources.

    If the sources enable FSDP, Accelerators without an FSDP plugin of their own use this spec.
    """
    global _session
    _session = Session(sources, report=report, before=_session)
    spec = _session.load()
    _session.ambient = spec if asks_for_fsdp(spec) else None
    return spec


def close() -> None:
    """End the session: the state is as before ``install``."""
    global _session
    _session = Session()


def current_session() -> Session:
    """Return the session that ``install`` began; without ``install``, one without sources."""
    return _session


def is_installed() -> bool:
    """Whether ``install`` was called in this process."""
    return _session.installed


def current_spec() -> FsdpSpec | None:
    """Return the spec for an Accelerator that is being created: its Trainer's, or else the session's."""
    return _current.get() or _session.ambient


def in_trainer() -> bool:
    """Whether the Accelerator that is being created belongs to a Trainer whose arguments were read."""
    return _current.get() is not None


@contextmanager
def using(spec: FsdpSpec | None) -> Iterator[None]:
    """Accelerators created in this context get this spec."""
    token = _current.set(spec)
    try:
        yield
    finally:
        _current.reset(token)
