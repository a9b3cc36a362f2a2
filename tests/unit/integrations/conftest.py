"""Fixtures of the tests of the integrations, which run in one process without ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.hooks import HOOKS


@pytest.fixture(scope="package", autouse=True)
def libraries() -> None:
    """Import the hooked modules before the leak check: one of their imports creates a folder."""
    for hook in (hook for hooks in HOOKS.values() for hook in hooks):
        if importlib.util.find_spec(hook.module.partition(".")[0]):
            importlib.import_module(hook.module)


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test without hooks. The stock plugin's constructor sets this variable."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    hfp.uninstall()
    yield
    hfp.uninstall()
