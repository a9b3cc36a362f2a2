"""Compiles the simulated accelerator for tests. Only ranks and child processes get the device, not this process."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

BACKEND = Path(__file__).resolve().parent / "backend"
"""In the PYTHONPATH of a process, this folder switches the device on."""


@cache
def _build_module() -> ModuleType:
    spec: Any = importlib.util.spec_from_file_location("accelerator_build_script", BACKEND / "torch_npu" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def available() -> str:
    """The reason why tests on the simulated accelerator must be skipped; empty if they can run.

    Compiles it if necessary.
    """
    build = _build_module()
    reason: str = build.available()
    if not reason:
        build.build()
    return reason
