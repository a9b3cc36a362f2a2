"""``hf-fsdp enable`` and ``disable`` in a virtual environment of its own, and which processes run the plugin then."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.cli import enable
from hf_fsdp_plugin.version import __version__
from tests.support.json_schema import assert_valid

ROOT = Path(__file__).parents[3]
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
LOADED = "import sys; print([name for name in sys.modules if name.startswith('hf_fsdp')])"
STARTED = "import sys; f = sys.meta_path[0]; print([*f._waiting] if type(f).__name__ == 'ImportCallbacks' else [])"
STARTS = "['accelerate', 'transformers']\n"


class Environment:
    """A virtual environment with the packages of the present one, which has no file of ``hf-fsdp enable`` yet."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        scheme = sysconfig.get_paths("venv", vars={"base": str(folder), "platbase": str(folder)})
        self.site = Path(scheme["purelib"])
        self.paths = self.site / "paths.pth"
        self.paths.write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = ("PYTHON", "HF_FSDP_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_", "FSDP_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(kept)} | variables
        environ["PYTHONDONTWRITEBYTECODE"] = "1"
        command = [str(self.python), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=self.site.anchor, check=False)

    def verb(self, *arguments: str) -> Any:
        """Run ``hf-fsdp VERB --json`` and return its problems, or what it says of the environment."""
        done = self.run("-m", "hf_fsdp_plugin.cli.main", *arguments, "--json")
        found = json.loads(done.stdout)
        assert_valid(arguments[0], found)
        assert done.returncode == (0 if found["ok"] else 1), done.stderr
        return found["problems"] or found["enabled"]

    def printed(self, *arguments: str, **variables: str) -> str:
        """Return what Python has printed to stdout, and nothing to stderr."""
        done = self.run(*arguments, **variables)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("enable") / "venv")


@pytest.fixture
def enabled(environment: Environment) -> Iterator[Environment]:
    environment.verb("enable")
    yield environment
    (environment.site / enable.FILE_NAME).unlink(missing_ok=True)


def test_enable_writes_one_file_which_disable_removes(environment: Environment) -> None:
    before = sorted(environment.site.rglob("*"))
    file = environment.site / enable.FILE_NAME
    for _ in range(2):
        found = environment.verb("enable")
        assert (found["file"], found["version"], found["starts"]) == (str(file), __version__, True)
    assert sorted({*environment.site.rglob("*")} - {*before}) == [file]
    for _ in range(2):
        assert environment.verb("disable")["file"] is None
    assert sorted(environment.site.rglob("*")) == before


def test_rank_of_a_launcher_runs_the_plugin(enabled: Environment) -> None:
    assert enabled.printed("-c", STARTED, **RANK) == STARTS
    assert enabled.printed("-u", "-W", "ignore", "-c", STARTED, **RANK) == STARTS
    assert enabled.printed("-c", LOADED) == "[]\n"


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ([], {}),
        ([], {"RANK": "0", "WORLD_SIZE": "8"}),  # a pod of a cluster
        (["-E"], RANK),
        (["-I"], RANK),
        (["-S"], RANK),
        ([], {**RANK, "HF_FSDP_LAUNCH": "{}"}),
        ([], {**RANK, "HF_FSDP_RANK_PID": "1 :"}),
    ],
)
def test_other_processes_do_not_run_the_plugin(
    enabled: Environment, flags: list[str], variables: dict[str, str]
) -> None:
    assert enabled.printed(*flags, "-c", STARTED, **variables) == "[]\n"


def test_children_of_a_rank_do_not_run_the_plugin(enabled: Environment, tmp_path: Path) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LOADED!r}])"
    assert enabled.printed("-c", child, **RANK) == "[]\n"
    # A forked process has the finder of the rank, but gets no hooks.
    (tmp_path / "accelerate.py").touch()
    hooked = "import accelerate, sys; print('hf_fsdp_plugin.integrations.patching' in sys.modules, flush=True)"
    fork = f"import os\nif not os.fork():\n    {hooked}\n    os._exit(0)\nos.wait()\n{hooked}"
    assert enabled.printed("-c", fork, **RANK, PYTHONPATH=str(tmp_path)) == "False\nTrue\n"


@pytest.mark.parametrize("program", ["torchrun", "accelerate", "hf-fsdp"])
def test_launcher_in_a_pod_is_no_rank(enabled: Environment, tmp_path: Path, program: str) -> None:
    """A cluster may have set the variables of a rank for the launcher, whose ranks run the plugin."""
    script = tmp_path / program
    script.write_text(f"{STARTED}\nimport subprocess\nsubprocess.run([sys.executable, '-c', {STARTED!r}])\n")
    assert sorted(enabled.printed(str(script), **RANK).splitlines()) == sorted(["[]", STARTS.strip()])


def test_module_of_this_package_installs_itself(enabled: Environment) -> None:
    assert "usage: accelerate launch" in enabled.printed("-m", "hf_fsdp_plugin", "--help", **RANK)
    code = f"import runpy, sys; sys.orig_argv = ['python', '-m', 'hf_fsdp_plugin']; {STARTED}"
    assert enabled.printed("-c", code) == "[]\n"


def test_removed_package_leaves_a_silent_file(enabled: Environment) -> None:
    text = enabled.paths.read_text()
    enabled.paths.write_text("")
    try:
        assert enabled.printed("-c", STARTED, **RANK) == "[]\n"
        assert enabled.printed("-c", STARTED) == "[]\n"
    finally:
        enabled.paths.write_text(text)


def test_old_library_is_reported_once(enabled: Environment, tmp_path: Path) -> None:
    (tmp_path / "transformers-4.57.0.dist-info").mkdir()
    run = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'])"
    done = enabled.run("-c", run, **RANK, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr.count("hf-fsdp: not used: transformers 4.57.0")) == (0, 1), done.stderr
    assert enabled.run("-c", "pass", **{**RANK, "RANK": "1"}, PYTHONPATH=str(tmp_path)).stderr == ""


def test_file_that_python_does_not_run_is_refused(environment: Environment) -> None:
    """Only the verb itself finds the package."""
    paths = environment.paths.read_text()
    environment.paths.write_text("")
    code = f"import sys; sys.path += {paths.split()}; from hf_fsdp_plugin.cli.main import main; sys.exit(main())"
    try:
        done = environment.run("-c", code, "enable")
    finally:
        environment.paths.write_text(paths)
    assert (done.returncode, done.stdout) == (1, "") and "[FSDP-E628]" in done.stderr
    assert not (environment.site / enable.FILE_NAME).exists()


def test_user_site_that_is_not_in_use_is_refused(environment: Environment) -> None:
    found = environment.verb("enable", "--user")
    assert [problem["code"] for problem in found] == ["FSDP-E628"]


def test_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf_fsdp: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(enable.sysconfig, "get_path", lambda name: str(tmp_path / "file"))
    monkeypatch.setattr(enable.site, "ENABLE_USER_SITE", False)
    code, out, err = hf_fsdp("enable")
    assert (code, out) == (1, "") and f"cannot change {tmp_path / 'file'}: Not a directory." in err, err
    assert "python -m venv" in err and "FSDP-E628" in err


def test_doctor_warns_of_a_file_without_effect(tmp_path: Path) -> None:
    file = tmp_path / enable.FILE_NAME
    assert enable.check_enabled(enable.Enabled()) == []
    assert enable.check_enabled(enable.Enabled(file=file, version=__version__, starts=True)) == []
    for found in (
        enable.Enabled(file=file, version=__version__, starts=False),
        enable.Enabled(file=file, version="0.0.9", starts=True),
    ):
        (problem,) = enable.check_enabled(found)
        assert problem.code == "FSDP-W629" and str(file) in problem.message


def test_file_of_another_version_is_recognized(enabled: Environment) -> None:
    file = enabled.site / enable.FILE_NAME
    file.write_text(file.read_text().replace(f"hf_fsdp_plugin {__version__}", "hf_fsdp_plugin 0.0.9"))
    code = (
        "from hf_fsdp_plugin.cli.enable import find_enabled; found = find_enabled(); print(found.version, found.starts)"
    )
    assert enabled.printed("-c", code) == "0.0.9 True\n"
    file.write_text("import os\n")
    assert enabled.printed("-c", code) == "unknown False\n"
