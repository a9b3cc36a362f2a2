"""``verify`` compares with the model of a config in another process, beside the hashing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import saved
from tests.support.child_programs import in_children


def verified(folder: Path) -> dict[str, Any]:
    """Return the JSON object of ``hf-fsdp verify``, and check that its process has not imported torch."""
    program = "import sys; from hf_fsdp_plugin.cli.main import main; main(); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", program, "verify", "--json", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)
    return {"codes": [problem["code"] for problem in found["problems"]], "error": done.stderr}


def test_equal_and_other_models_are_told_apart(hf: Path) -> None:
    assert verified(hf)["codes"] == []
    (hf / "fsdp_manifest.json").unlink()
    saved.tiny_llama(vocab_size=48).config.save_pretrained(hf)
    assert verified(hf)["codes"] == ["FSDP-E479"]


def test_killed_comparison_is_an_error(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "if sys.orig_argv[2].endswith('against_model'): os.kill(os.getpid(), signal.SIGKILL)"
    in_children(monkeypatch, tmp_path / "site", program)
    assert verified(hf)["codes"] == ["FSDP-E440"]
