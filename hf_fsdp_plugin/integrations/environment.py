"""Environment variables that the integrations set for Accelerate and Transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hf_fsdp_plugin.integrations.patching import install_hooks
from hf_fsdp_plugin.spec.model import FsdpSpec
from hf_fsdp_plugin.spellings import TRUE_WORDS

_RAM_EFFICIENT: Final = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_EFFICIENT: Final = ("ACCELERATE_USE_FSDP", _RAM_EFFICIENT)
"""Variables that are true while ``from_pretrained`` loads RAM-efficiently."""


class ProcessEnvironment:
    """Sets environment variables and restores their earlier values."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def has_set(self, name: str) -> bool:
        """Return whether :meth:`set` has set a variable, and it was not restored since."""
        return name in self._before

    def restore(self) -> None:
        for name in self._before:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in self._before.items() if value is not None})
        self._before.clear()


_environment = ProcessEnvironment()
set_variables = _environment.set
restore_variables = _environment.restore


def set_loading_variables(spec: FsdpSpec) -> None:
    """Set whether ``from_pretrained``, which reads environment variables only, loads RAM-efficiently."""
    set_variables(**{_RAM_EFFICIENT: str(spec.loading.ram_efficient).lower()})
    if spec.loading.ram_efficient:
        set_variables(ACCELERATE_USE_FSDP="true")
    install_hooks("loading")


def has_fsdp_settings() -> bool:
    """Return whether this process has read FSDP settings, so that ``from_pretrained`` loads a model for them."""
    return _environment.has_set(_RAM_EFFICIENT) or loads_ram_efficiently()


@contextmanager
def loading_ram_efficiently() -> Iterator[None]:
    """Load RAM-efficiently in the block, whatever the settings are."""
    install_hooks("loading")
    before = {name: os.environ.get(name) for name in _EFFICIENT}
    os.environ.update(dict.fromkeys(_EFFICIENT, "true"))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def loads_ram_efficiently() -> bool:
    """Return whether a launcher, a plugin or :func:`set_loading_variables` has enabled RAM-efficient loading."""
    return all(os.environ.get(name, "").lower() in TRUE_WORDS for name in _EFFICIENT)
