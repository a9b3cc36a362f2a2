"""``hf-fsdp profile``: its flags, its folder, and what it reports without a profile. Ranks run in tests/gloo."""

import errno
import json
import os
from dataclasses import asdict
from types import MappingProxyType

import pytest

from hf_fsdp_plugin.cli import launch
from hf_fsdp_plugin.cli.main import main, make_parser
from hf_fsdp_plugin.problems import UsageError
from hf_fsdp_plugin.tools.profile import run_profile as profiling
from hf_fsdp_plugin.tools.profile import verb as profile
from hf_fsdp_plugin.tools.profile.rank_profile import RankProfile, Times
from hf_fsdp_plugin.tools.profile.run_profile import OPTIONS_VARIABLE, ProfileOptions, read_ranks, write_file
from tests.support.json_schema import assert_valid


def namespace(*words: str):
    return make_parser("profile").parse_args(words)


def parse(*words: str, environ=MappingProxyType({})):
    return profile.read_arguments(namespace(*words), environ)


def test_own_flags_and_those_of_launch_precede_the_script():
    launched, options = parse(
        "--config_file", "a.yaml", "--active", "2", "--to-end", "--cpu", "train.py", "--active", "9"
    )
    assert (options.active, options.stops) == (2, False)
    assert launched.script == "train.py" and launched.script_args == ("--active", "9")
    assert launched.options == {"config_file": "a.yaml"} and launched.command_line == ("--cpu",)
    assert ProfileOptions(**json.loads(launched.env[OPTIONS_VARIABLE])) == options


def test_variables_of_the_user_are_kept():
    assert "glibc.malloc.mmap_threshold" in parse("train.py")[0].env["GLIBC_TUNABLES"]
    own, _ = parse("train.py", environ={"GLIBC_TUNABLES": "glibc.malloc.check=3", "KINETO_LOG_LEVEL": "0"})
    assert not own.env.keys() & {"GLIBC_TUNABLES", "KINETO_LOG_LEVEL"}


def test_module_and_equals_signs_are_parsed():
    launched, options = parse("--wait=0", "--to_end", "-m", "package.train", "--json")
    assert (options.wait, options.stops) == (0, False)
    assert launched.script == "package.train" and launched.script_args == ("--json",)


@pytest.mark.parametrize(
    "words", [("--active", "0"), ("--wait", "x"), ("--wait",), ("--json=1",), ("--actve", "2", "t.py"), ("--dry_run",)]
)
def test_wrong_flags_are_refused(words):
    with pytest.raises(UsageError):
        parse(*words)


def test_steps_of_the_schedule_do_not_overlap():
    options = ProfileOptions(folder="f", wait=1, warmup=2, active=4, after=3)
    assert (options.last_traced, options.last) == (7, 10)


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path / "fsdp_profile"


def rank_file(folder, rank: int, *, steps: int = 12, profiled: bool = True) -> None:
    made = RankProfile(
        rank=rank, world_size=2, host="a", device="cpu", num_made=steps, num_steps=int(profiled),
        times={"forward": Times(seconds=1.0, compute=0.6)}, profiled=(1.0,), unprofiled=(0.9,),
    )  # fmt: skip
    write_file(ProfileOptions(folder=str(folder)).rank_file(rank), json.dumps(asdict(made)).encode())


def run(monkeypatch, capsys, code: int, *flags: str, ranks=lambda: None):
    """Run the verb with `ranks` in the place of the launcher, which returns `code`."""
    monkeypatch.setattr(launch, "run_launch", lambda arguments: ranks() or code)
    found = main(["profile", "--json", *flags, "train.py"])
    tree = json.loads(capsys.readouterr().out)
    assert_valid("profile", tree)
    return found, [problem["code"] for problem in tree["problems"]]


def test_complete_profile_has_json_and_no_problem(in_folder, monkeypatch, capsys):
    ranks = lambda: [rank_file(in_folder, rank) for rank in (0, 1)] and None  # noqa: E731
    assert run(monkeypatch, capsys, 0, ranks=ranks) == (0, [])
    assert_valid("profile", json.loads((in_folder / "profile.json").read_text()))
    assert run(monkeypatch, capsys, 0, ranks=ranks) == (1, ["FSDP-E774"])
    assert run(monkeypatch, capsys, 0, "--force", ranks=ranks) == (0, [])


@pytest.mark.parametrize("code, problem", [(0, "FSDP-E770"), (1, "FSDP-E773"), (130, "FSDP-E775")])
def test_run_without_a_profile_leaves_nothing(in_folder, monkeypatch, capsys, code, problem):
    ranks = lambda: rank_file(in_folder, 0, steps=1, profiled=False)  # noqa: E731
    assert run(monkeypatch, capsys, code, ranks=ranks) == (code or 1, [problem])
    assert list(in_folder.iterdir()) == []


def test_interrupted_rank_leaves_no_file_of_another(in_folder, monkeypatch, capsys):
    def ranks() -> None:
        rank_file(in_folder, 0)
        (in_folder / "ranks/rank_1.json.part").write_text("{")

    assert run(monkeypatch, capsys, 130, ranks=ranks) == (130, ["FSDP-E775"])
    assert list(in_folder.iterdir()) == []


def test_fewer_steps_and_missing_ranks_are_warned_of(in_folder, monkeypatch, capsys):
    assert run(monkeypatch, capsys, 0, ranks=lambda: rank_file(in_folder, 0, steps=4)) == (
        0,
        ["FSDP-W777", "FSDP-W771"],
    )


def test_folder_that_cannot_be_written_is_refused_first(in_folder, monkeypatch, capsys):
    in_folder.write_text("a file")
    started = []
    assert run(monkeypatch, capsys, 0, ranks=lambda: started.append(1)) == (1, ["FSDP-E772"])
    assert not started


def test_full_disk_leaves_no_result(in_folder, monkeypatch, capsys):
    def full(path, content):
        if path.name == "profile.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(path, content)

    monkeypatch.setattr(profiling, "write_file", full)
    ranks = lambda: [rank_file(in_folder, rank) for rank in (0, 1)] and None  # noqa: E731
    assert run(monkeypatch, capsys, 0, ranks=ranks) == (1, ["FSDP-E772"])
    assert not (in_folder / "profile.json").exists()


def test_file_is_complete_or_absent(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_file(tmp_path / "b.json", b"{}")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_file(tmp_path / "b.json", b"half")
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]
    assert (tmp_path / "b.json").read_text() == "{}"


def test_files_of_ranks_are_in_rank_order(tmp_path):
    for rank in (10, 2):
        rank_file(tmp_path, rank)
    assert [profile.rank for profile in read_ranks(tmp_path)] == [2, 10]
