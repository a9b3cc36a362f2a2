"""Errors of the operating system during a save become problems with a code."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint import errors
from hf_fsdp_plugin.checkpoint.errors import os_errors_as_problems
from hf_fsdp_plugin.problems import CheckpointError


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "FSDP-E401"),
        (errno.EDQUOT, "FSDP-E401"),
        (errno.EROFS, "FSDP-E402"),
        (errno.EACCES, "FSDP-E402"),
        (errno.ENOTDIR, "FSDP-E403"),
        (errno.EIO, "FSDP-E404"),
    ],
)
def test_os_error_has_code_and_file(number: int, code: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught, os_errors_as_problems(tmp_path / "checkpoint-4"):
        raise OSError(number, os.strerror(number), "__0_0.distcp")
    [problem] = caught.value.problems
    assert problem.code == code
    assert str(tmp_path / "checkpoint-4") in problem.message and "__0_0.distcp" in problem.message


@pytest.mark.parametrize("full", [True, False])
def test_runtime_error_is_a_problem_on_full_disks(full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_FULL", 1 << 62 if full else 0)
    with pytest.raises(CheckpointError if full else RuntimeError) as caught, os_errors_as_problems(tmp_path / "c"):
        raise RuntimeError("PytorchStreamWriter failed")
    assert ("FSDP-E401" in str(caught.value)) == full
