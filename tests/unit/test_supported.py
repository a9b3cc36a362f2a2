"""Supported versions of other libraries, found by the names of metadata folders."""

from __future__ import annotations

import configparser
import sys
from pathlib import Path

import pytest

from hf_fsdp_plugin.contracts import SUPPORTED
from hf_fsdp_plugin.supported import installed_versions, release_of, unsupported_versions, untested_versions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", (2, 13, 0)), ("2.16.0rc1", (2, 16, 0)), ("2.16.0.dev20261101+cu132", (2, 16, 0)), ("git", ())],
)
def test_release_has_the_leading_numbers(version: str, release: tuple[int, ...]) -> None:
    assert release_of(version) == release


def test_old_and_new_versions_are_found(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(installed)])  # the result does not depend on what is installed
    assert installed_versions()["torch"] == "2.9.1"
    [message] = unsupported_versions()
    assert "torch 2.9.1" in message and "'torch>=2.11'" in message and "FSDP-E623" in message
    assert untested_versions() == [f"accelerate 1.99.0 (tested up to {SUPPORTED['accelerate'][1]})"]


def test_setup_requires_the_oldest_supported_versions() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"] + setup["options.extras_require"]["test"]
    for library, (oldest, _) in SUPPORTED.items():
        assert f"{library}>={oldest}" in required.replace(" ", "")
