"""The record of a preflight: results of stages from the events of ranks, and comparisons of two runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.tools.preflight.stages import (
    STAGES,
    Options,
    Preflight,
    problems_of,
    problems_of_error,
    read_records,
    stage_results,
)
from hf_fsdp_plugin.tools.preflight.training import compare_runs, differing_names

PROBLEM = Problem(code="FSDP-E750", message="no", origin=Origin(source="a.yaml", line=2, spelling="x", text="1"))


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Preflight, Preflight]:
    made = Preflight(), Preflight()
    for rank, preflight in enumerate(made):
        monkeypatch.setenv("RANK", str(rank))
        preflight.begin(Options(folder=str(tmp_path)))
    return made


def results(folder: Path, *, stopped: bool = False) -> dict[str, str]:
    return {row["stage"]: row["result"] for row in stage_results(read_records(folder), stopped=stopped)}


def test_stages_pass_when_all_ranks_have_ended_them(ranks: tuple[Preflight, ...], tmp_path: Path) -> None:
    for rank in ranks:
        for stage in (*STAGES, None):
            rank.enter(stage)
    assert set(results(tmp_path).values()) == {"passed"}
    assert list(results(tmp_path)) == list(STAGES)


def test_failure_of_one_rank_fails_the_stage_and_names_it(ranks: tuple[Preflight, ...], tmp_path: Path) -> None:
    ranks[0].enter("step")
    ranks[0].enter(None)
    ranks[1].enter("step")
    ranks[1].fail(SpecError([PROBLEM]))
    assert results(tmp_path)["step"] == "failed" and results(tmp_path)["save"] == "not tested"
    (problem,) = problems_of(read_records(tmp_path))
    assert (problem.rank, problem.origin) == (1, PROBLEM.origin)


def test_what_only_a_gpu_can_run_is_not_tested(ranks: tuple[Preflight, ...], tmp_path: Path) -> None:
    for rank in ranks:
        rank.enter("step")
        rank.fail(AssertionError("Torch not compiled with CUDA enabled"))
    (row,) = (row for row in stage_results(read_records(tmp_path), stopped=False) if row["stage"] == "step")
    assert row["result"] == "not tested" and row["reason"].startswith("needs a GPU: AssertionError: Torch not compiled")
    (problem,) = problems_of(read_records(tmp_path))
    assert (problem.code, problem.severity) == ("FSDP-W756", "warning")


def test_failure_of_all_ranks_is_one_problem(ranks: tuple[Preflight, ...], tmp_path: Path) -> None:
    for rank in ranks:
        rank.enter("save")
        rank.fail(SpecError([PROBLEM]))
    assert problems_of(read_records(tmp_path)) == [PROBLEM]


def test_stage_without_an_end_stood_still_or_failed(ranks: tuple[Preflight, ...], tmp_path: Path) -> None:
    ranks[1].enter("clip")
    assert [record.running for record in read_records(tmp_path)] == ["start", "clip"]
    assert results(tmp_path, stopped=True)["clip"] == "stood still"
    assert results(tmp_path)["clip"] == "failed"


def test_file_that_is_being_written_is_not_read(ranks: tuple[Preflight, ...], tmp_path: Path) -> None:
    (tmp_path / "rank_2.part").write_bytes(b"\x80")
    assert len(read_records(tmp_path)) == 2


def test_skipped_stage_has_its_reason(ranks: tuple[Preflight, ...], tmp_path: Path) -> None:
    ranks[0].skip("evaluate", "eval_strategy is no")
    row = next(row for row in stage_results(read_records(tmp_path), stopped=False) if row["stage"] == "evaluate")
    assert (row["result"], row["reason"]) == ("not tested", "eval_strategy is no")


def test_stage_that_has_passed_is_not_skipped(ranks: tuple[Preflight, ...], tmp_path: Path) -> None:
    ranks[0].enter("save")
    ranks[0].enter(None)
    ranks[0].skip("save", "save_strategy is no")
    assert results(tmp_path)["save"] == "passed"


def test_problems_of_this_package_keep_their_codes() -> None:
    known = Problem(code="FSDP-E411", message="state")
    note = Problem(code="FSDP-N105", message="note")
    assert problems_of_error(SpecError([known, note]), "save") == [known]
    (other,) = problems_of_error(KeyError("metric_for_best_model"), "evaluate")
    assert other.code == "FSDP-E750" and "'evaluate' failed: KeyError: 'metric_for_best_model'" in other.message


def weights(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values)}


def test_equal_runs_are_accepted() -> None:
    compare_runs(weights(1.0, float("nan")), weights(1.0, float("nan")))


@pytest.mark.parametrize("values", [(1.0, 1.1), (1.0, float("nan")), (1.0,)])
def test_run_that_differs_after_resuming_is_reported(values: tuple[float, ...]) -> None:
    with pytest.raises(SpecError) as found:
        compare_runs(weights(1.0, 1.0), weights(*values))
    assert {problem.code for problem in found.value.problems} == {"FSDP-E753"}


def test_differing_names_missing_and_changed_tensors() -> None:
    one = {"same": torch.ones(2), "changed": torch.ones(2), "missing": torch.ones(1), "empty": torch.empty(0)}
    other = {"same": torch.ones(2), "changed": torch.zeros(2), "empty": torch.empty(0)}
    assert differing_names(one, other, 1e-5) == ["missing", "changed"]
    assert differing_names({"w": torch.ones(2)}, {"w": torch.ones(3)}, 1e-5) == ["w"]
