"""The part of tests/unit/test_supported.py that starts processes or computes for seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.test_supported import ROOT


def run(code: str, folder: Path, *, argv0: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    code = f"import sys; sys.argv[0] = {argv0!r}; {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)


def test_import_refuses_an_old_version(installed: Path) -> None:
    done = run("import hf_fsdp_plugin", installed)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: torch 2.9.1 is installed")


def test_install_warns_of_untested_versions(tmp_path: Path) -> None:
    (tmp_path / "accelerate-1.99.0.dist-info").mkdir()
    done = run("import hf_fsdp_plugin as hfp; hfp.install({})", tmp_path)
    assert done.returncode == 0 and done.stderr.count("FSDP-W622") == 1 and "accelerate 1.99.0" in done.stderr


def test_verbs_refuse_an_old_version_in_one_line(installed: Path) -> None:
    main = "from hf_fsdp_plugin.cli.main import main; sys.exit(main(['{}']))"
    done = run(main.format("check"), installed, argv0="/bin/hf-fsdp")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert run(main.format("explain"), installed, argv0="/bin/hf-fsdp").returncode == 0
