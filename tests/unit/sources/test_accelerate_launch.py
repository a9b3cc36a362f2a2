"""The config of the ``accelerate launch`` that started a process."""

from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from hf_fsdp_plugin.sources.config_location import default_config_file, find_launch, launch_flags


@pytest.fixture
def parents(monkeypatch):
    """Return a function that sets the command lines of the parents of this process, and their working directory."""

    def set_parents(directory: Path, *command_lines: list[str]) -> None:
        processes = [Mock(cmdline=lambda words=words: words, cwd=lambda: str(directory)) for words in command_lines]
        monkeypatch.setattr(psutil, "Process", lambda: Mock(parents=lambda: processes))

    return set_parents


@pytest.mark.parametrize(
    "program",
    [
        ["/usr/bin/python", "/usr/bin/accelerate", "launch"],
        ["python", "-m", "accelerate.commands.launch"],
        ["python", "-u", "-m", "accelerate.commands.launch"],
        ["python", "-m", "accelerate.commands.accelerate_cli", "launch"],
        ["/usr/bin/python", "/usr/bin/accelerate-launch"],
        ["python", "/x/site-packages/accelerate/commands/launch.py"],
    ],
)
def test_launcher_is_found_among_parent_processes(parents, tmp_path, program):
    (tmp_path / "c.yaml").write_text("distributed_type: FSDP\n")
    flags = ["--config_file", "c.yaml", "--num_processes", "2"]
    parents(tmp_path, ["python", "-u", "train.py"], [*program, *flags, "train.py", "--lr", "1"])
    found = find_launch({})
    assert found is not None and found[0] is not None
    assert found[0].path.samefile(tmp_path / "c.yaml")
    assert found[1] == tuple(flags)


@pytest.mark.parametrize(
    "words", [["bash"], ["python", "accelerate", "config"], ["python", "launch"], ["vim", "accelerate.yaml"]]
)
def test_other_program_is_not_launcher(words):
    assert launch_flags(words) is None


def test_default_file_is_read_without_config_file_flag(parents, tmp_path):
    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.json").write_text("{}")
    parents(tmp_path, ["python", "train.py"], ["accelerate", "launch", "train.py"])
    environ = {"HF_HOME": str(tmp_path / "hf")}
    found = find_launch(environ)
    assert found is not None and found[0] is not None and found[0].path == folder / "default_config.json"
    (folder / "default_config.yaml").write_text("a: 1")
    default = default_config_file(environ)
    assert default is not None and default.path == folder / "default_config.yaml"


def test_default_file_is_read_without_visible_launcher(assess, tmp_path):
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "default_config.yaml").write_text("fsdp_config:\n  fsdp_limit_all_gathers: false\n")
    environ = {"HF_HOME": str(tmp_path), "ACCELERATE_MIXED_PRECISION": "no", "FSDP_VERSION": "2"}
    assessment = assess(environ=environ, as_launched=True)
    assert not assessment.spec.prefetch.limit_all_gathers
    assert assessment.spec.fsdp.version == 1, "the variables of the launcher must be ignored"
    assert assessment.problems[0].code == "FSDP-N040"


def test_torchrun_alone_does_not_use_default_file(parents, tmp_path):
    parents(tmp_path, ["torchrun", "train.py"])
    assert find_launch({"HF_HOME": str(tmp_path)}) is None


def test_parents_that_have_ended_are_no_launcher(monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "Process", Mock(side_effect=psutil.NoSuchProcess(1)))
    assert find_launch({"HF_HOME": str(tmp_path)}) is None


def test_missing_config_of_launcher_is_warning(assess, tmp_path):
    assessment = assess(environ={"HF_HOME": str(tmp_path), "ACCELERATE_USE_FSDP": "true"}, as_launched=True)
    assert assessment.problems[0].code == "FSDP-W041"


def test_missing_default_file_is_error(assess, tmp_path):
    environ = {"HF_HOME": str(tmp_path)}
    (problem,) = assess(environ=environ, default_file=True).problems
    assert problem.code == "FSDP-E042" and str(tmp_path) in problem.message
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("distributed_type: FSDP\n")
    assert assess(environ=environ, default_file=True).ok


def test_deepspeed_of_accelerate_launch_is_not_read_as_fsdp(assess, parents, tmp_path):
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
    (tmp_path / "ds.yaml").write_text(text)
    parents(tmp_path, ["python", "train.py"], ["accelerate", "launch", "--config_file", "ds.yaml", "train.py"])
    found = assess(as_launched=True)
    assert not found.spec.enabled and "FSDP-E120" in [problem.code for problem in found.problems]
    assert "FSDP-E060" in [problem.code for problem in assess(tmp_path / "ds.yaml").problems]
