"""The profile of one process without FSDP: by the optimizer's steps, without ranks."""

import json

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.integrations.patching import changes
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.tools.profile.run import Profiling
from hf_fsdp_plugin.tools.profile.run_profile import ProfileOptions


@pytest.fixture
def profile(tmp_path):
    made = []

    def begin(**more) -> Profiling:
        made.append(Profiling(ProfileOptions(folder=str(tmp_path), **more)))
        return made[0]

    yield begin
    made[0].end(failed=True)
    changes().remove()
    assert not made[0].traces


def train(num_steps: int) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_script_ends_after_the_last_step(profile, tmp_path):
    profile(warmup=1, active=2, after=2)
    with pytest.raises(SystemExit):
        train(100)
    tree = json.loads((tmp_path / "ranks/rank_0.json").read_text())
    assert tree["num_made"] == 6 and tree["num_steps"] == 2
    assert {"backward", "optimizer"} <= set(tree["times"])
    assert len(tree["profiled"]) == 2 and len(tree["unprofiled"]) == 1
    assert (tmp_path / "traces/rank_0.json.gz").exists()


def test_script_that_ends_early_is_profiled_by_its_steps(profile, tmp_path):
    profiling = profile()
    train(3)
    profiling.end()
    tree = json.loads((tmp_path / "ranks/rank_0.json").read_text())
    assert tree["num_made"] == 3 and tree["num_steps"] == 1


def test_script_without_steps_has_no_profile(profile, tmp_path):
    profiling = profile()
    profiling.end()
    assert json.loads((tmp_path / "ranks/rank_0.json").read_text())["num_steps"] == 0


def test_profiler_of_the_script_is_a_problem(profile):
    profile()
    with torch.profiler.profile(), pytest.raises(SpecError) as raised:
        train(2)
    assert [problem.code for problem in raised.value.problems] == ["FSDP-E776"]


def test_folder_that_cannot_be_written_is_a_problem(profile, tmp_path):
    (tmp_path / "ranks").write_text("a file")
    profiling = profile()
    train(3)
    with pytest.raises(SpecError) as raised:
        profiling.end()
    assert [problem.code for problem in raised.value.problems] == ["FSDP-E772"]
    assert not list(tmp_path.rglob("*.part"))
