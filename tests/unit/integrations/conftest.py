"""Fixtures of the tests of the integrations, which run in one process without ranks."""

from __future__ import annotations

import importlib.util

import pytest

from hf_fsdp_plugin.integrations.hooks import HOOKS


@pytest.fixture(scope="package", autouse=True)
def libraries() -> None:
    """Import the hooked modules before the leak check: one of their imports creates a folder."""
    for hook in (hook for hooks in HOOKS.values() for hook in hooks):
        if importlib.util.find_spec(hook.module.partition(".")[0]):
            importlib.import_module(hook.module)
