"""What this process was told about FSDP, before and beside the script that runs in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.spec.model import FsdpSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """The sources that stand beside a script's own arguments.

    Attributes:
        config: path of a config file, or a dict with its content; ``None`` where there is none.
        command_line: setting flags as written on a launcher's command line.
        overrides: the ``NAME=VALUE`` of every ``--set``.
        environ: the environment variables to read settings from.
        report: where the report goes; ``None`` for the script's own output folder.
        as_launched: look for the config file behind the stock launcher that started this process.
    """

    config: Any = None
    command_line: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    report: str | None = None
    as_launched: bool = False

    def load(
        self,
        training_arguments: Mapping[str, Any] | None = None,
        *,
        plugin_object: Mapping[str, Any] | None = None,
    ) -> FsdpSpec:
        """The spec of all sources together. Raises ``SpecError`` with all their problems."""
        return load_spec(
            self.config,
            training_arguments=training_arguments,
            plugin_object=plugin_object,
            command_line=self.command_line,
            overrides=self.overrides,
            environ=self.environ,
            as_launched=self.as_launched,
        )


def asks_for_fsdp(spec: FsdpSpec) -> bool:
    """Whether any source asked for FSDP, as against a precision or a number of processes for any kind of training.

    A stray ``FSDP_*`` variable tunes FSDP, and does not turn it on; ``ACCELERATE_USE_FSDP`` does.
    """
    if spec.launch.distributed_type != "FSDP":
        return False
    about_fsdp = (
        origin
        for name, origin in spec.origins.items()
        if name.partition(".")[0] not in ("launch", "precision", "activation")
    )
    return spec.asked("launch.distributed_type") or any(origin.source != "environment" for origin in about_fsdp)


_session: Session | None = None
_ambient: FsdpSpec | None = None
_current: ContextVar[FsdpSpec | None] = ContextVar("hf_fsdp_spec", default=None)
# By id: TrainingArguments is unhashable, and whatever hangs on it is pickled into every checkpoint.
_of_arguments: dict[int, FsdpSpec] = {}


def begin(session: Session) -> FsdpSpec:
    """Make this the process's session. Returns the spec of its sources; where they ask for FSDP, Accelerators that say
    nothing themselves get it.
    """
    global _session, _ambient
    _session = session
    spec = session.load()
    _ambient = spec if asks_for_fsdp(spec) else None
    return spec


def close() -> None:
    """End the process's session."""
    global _session, _ambient
    _session = _ambient = None


def is_installed() -> bool:
    """Whether ``install`` was called in this process."""
    return _session is not None


def current_session() -> Session:
    """The session that ``install`` began, or an empty one: nothing but the script's own arguments."""
    return _session or Session()


def ambient_spec() -> FsdpSpec | None:
    """What the sources beside the script asked for; ``None`` where it was not FSDP."""
    return _ambient


def current_spec() -> FsdpSpec | None:
    """The spec for an Accelerator that is being made now: its Trainer's, else the session's."""
    return _current.get() or _ambient


def in_trainer() -> bool:
    """Whether a Trainer whose arguments were read is making its Accelerator now."""
    return _current.get() is not None


@contextmanager
def using(spec: FsdpSpec | None) -> Iterator[None]:
    """Accelerators made inside the block get this spec."""
    token = _current.set(spec)
    try:
        yield
    finally:
        _current.reset(token)


def remember(arguments: Any, spec: FsdpSpec) -> None:
    """Keep the spec read from a ``TrainingArguments`` for the Trainer that will be made with it."""
    _of_arguments[id(arguments)] = spec
    weakref.finalize(arguments, _of_arguments.pop, id(arguments), None)


def spec_of_arguments(arguments: Any) -> FsdpSpec | None:
    return _of_arguments.get(id(arguments))
