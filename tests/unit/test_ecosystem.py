"""The driver of the ecosystem suite: what it reads off a run, and which differences it finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_fsdp_plugin.spec.load import load_spec
from scripts.ecosystem.cases import CASES
from scripts.ecosystem.checks import check_report, compare_numbers, compare_weights, read_error, read_numbers
from scripts.ecosystem.grouped import BEHAVIORS, REFUSED, Behavior, compare_folders, compare_values
from scripts.ecosystem.grouped import HERE as BEHAVIOR_FILES
from scripts.ecosystem.model import Case
from scripts.ecosystem.results import find_missing, is_expected, merge_rows, select
from scripts.ecosystem.runs import HERE, Run, Suite, make_config


def finished(folder: Path, log: str = "", *, code: int = 0, timed_out: bool = False) -> Run:
    (folder / "log.txt").write_text(log)
    return Run(folder=str(folder), code=code, seconds=1.0, timed_out=timed_out)


def write_report(folder: Path, *, status: str = "applied", units: int = 1) -> None:
    settings = [{"setting": "wrap.policy", "status": status}]
    report = {"settings": settings, "problems": [], "units": [{}] * units}
    (folder / "fsdp_report.json").write_text(json.dumps(report))


def save(folder: Path, name: str, **tensors: torch.Tensor) -> Path:
    (folder / name).mkdir()
    save_file(tensors, folder / name / "model.safetensors")
    return folder / name


def test_every_case_has_its_own_name_and_folder() -> None:
    folders = [case.name.replace("/", "-").replace(" ", "_") for case in CASES]
    assert len(folders) == len(set(folders)) >= 60


def test_configs_of_all_cases_are_valid() -> None:
    for case in CASES:
        for version in (1, 2):
            spec = load_spec(make_config(case, version))
            assert spec.fsdp.version == version
            assert [problem for problem in spec.problems if problem.severity == "error"] == []


def test_scripts_do_not_know_the_plugin() -> None:
    scripts = list(HERE.glob("*.py"))
    assert scripts and [path.name for path in scripts if "fsdp_plugin" in path.read_text()] == []


def test_losses_are_read_from_the_trainer_state(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    history = [{"step": 1, "loss": 2.5, "epoch": 0.1}, {"step": 2, "eval_loss": 3.0, "eval_runtime": 7.0}]
    (tmp_path / "out" / "checkpoint-2" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert read_numbers(finished(tmp_path)) == {"step 1 loss": 2.5, "step 2 eval_loss": 3.0}


def test_losses_are_read_from_the_output_of_a_loop(tmp_path: Path) -> None:
    log = "epoch 0: {'accuracy': 0.5, 'f1': 0.25}\n{'loss': 2.5}\nnoise {'\n"
    assert read_numbers(finished(tmp_path, log)) == {"line 1 accuracy": 0.5, "line 1 f1": 0.25, "line 2 loss": 2.5}


@pytest.mark.parametrize(
    ("ours", "fault"),
    [
        ({"a loss": 2.0}, ""),
        ({"a loss": 2.0001}, ""),
        ({"a loss": 2.001}, "a loss is 2.001 instead of 2"),
        ({"a loss": float("nan")}, "a loss is nan"),
        ({}, "a loss is missing"),
    ],
)
def test_differing_losses_are_faults(ours: dict[str, float], fault: str) -> None:
    _, faults = compare_numbers(ours, {"a loss": 2.0}, 1e-4)
    assert bool(faults) is bool(fault)
    assert fault in "".join(faults)


def test_equal_weights_have_no_faults(tmp_path: Path) -> None:
    start = save(tmp_path, "start", w=torch.zeros(4))
    ours, reference = (save(tmp_path, name, w=torch.ones(4)) for name in ("ours", "reference"))
    assert compare_weights(ours, reference, start, 1e-3) == (0.0, [])


@pytest.mark.parametrize(
    ("ours", "fault"),
    [
        ({"w": torch.full((4,), 1.1)}, "differ by 1.0e-01"),
        ({"w": torch.full((4,), float("nan"))}, "not finite"),
        ({"w": torch.ones(0)}, "(0,) torch.float32, expected (4,)"),
        ({"w": torch.ones(4, dtype=torch.bfloat16)}, "torch.bfloat16"),
        ({"v": torch.ones(4)}, "1 missing ['w'], 1 extra ['v']"),
    ],
    ids=["other", "nan", "empty", "dtype", "names"],
)
def test_differing_weights_are_faults(tmp_path: Path, ours: dict[str, torch.Tensor], fault: str) -> None:
    start = save(tmp_path, "start", w=torch.zeros(4))
    reference = save(tmp_path, "reference", w=torch.ones(4))
    _, faults = compare_weights(save(tmp_path, "ours", **ours), reference, start, 1e-3)
    assert fault in "; ".join(faults)


def test_untrained_weights_are_a_fault(tmp_path: Path) -> None:
    start, ours, reference = (save(tmp_path, name, w=torch.ones(4)) for name in ("start", "ours", "reference"))
    assert compare_weights(ours, reference, start, 1e-3)[1] == ["the saved weights are the initial ones"]


def test_report_with_a_difference_is_a_fault(tmp_path: Path) -> None:
    run = finished(tmp_path)
    assert check_report(run) == ["no fsdp_report.json"]
    write_report(tmp_path)
    assert check_report(run) == []
    write_report(tmp_path, status="differs", units=0)
    assert check_report(run) == [
        "fsdp_report.json: wrap.policy differs",
        "fsdp_report.json: nothing is sharded",
    ]


@pytest.mark.parametrize(
    ("log", "error", "code"),
    [
        ("hf-fsdp: rank 1 failed (pid 7 on vm): ValueError: no\n  file.py:3\n", "ValueError: no", ""),
        ("note\nfsdp.yaml:3: a.b is c. Use d. [FSDP-E123]\n", "fsdp.yaml:3: a.b is c. Use d. [FSDP-E123]", "FSDP-E123"),
        ("Traceback (most recent call last):\n  x\nKeyError: 'a'\n", "KeyError: 'a'", ""),
        ("", "no output", ""),
    ],
)
def test_error_of_a_failed_run_is_read(tmp_path: Path, log: str, error: str, code: str) -> None:
    assert read_error(finished(tmp_path, log, code=1)) == (error, code)


def test_run_without_an_end_is_an_error(tmp_path: Path) -> None:
    assert read_error(finished(tmp_path, "FSDP-E123", code=1, timed_out=True)) == ("no end after 1 s", "")


def test_missing_package_and_folder_skip_a_case(tmp_path: Path) -> None:
    suite = Suite(work=tmp_path)
    case = Case(name="a", package="no_such_package", script="-m json")
    assert find_missing(case, suite) == "no_such_package is not installed"
    case = Case(name="a", package="json", script="{transformers}/run_clm.py")
    assert find_missing(case, suite) == "--transformers-examples is not given"
    assert find_missing(case, Suite(work=tmp_path, transformers=tmp_path)) == "run_clm.py does not exist"
    assert find_missing(Case(name="a", package="json", script="-m json"), suite) == ""


def test_refusal_is_expected_only_where_it_is_declared() -> None:
    case = Case(name="a", package="json", script="-m json", refused={1: "FSDP-E123"})
    assert is_expected(case, {"version": 1, "status": "refused"})
    assert not is_expected(case, {"version": 1, "status": "works"})
    assert is_expected(case, {"version": 2, "status": "works"})
    assert not is_expected(case, {"version": 2, "status": "fails"})


def test_skipped_row_replaces_no_result(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    name = CASES[0].name
    done = {"case": name, "version": 1, "status": "works"}
    path.write_text(json.dumps({"cases": [done, {"case": "removed", "version": 1, "status": "works"}]}))
    assert merge_rows(path, [{"case": name, "version": 1, "status": "skipped"}]) == [done]
    failed = {"case": name, "version": 1, "status": "fails"}
    assert merge_rows(path, [failed]) == [failed]


def test_cases_are_selected_by_word_or_name() -> None:
    assert {case.name for case in select(CASES, ["=trl sft"])} == {"trl sft"}
    assert len(select(CASES, ["trl sft"])) > 10
    assert select(CASES, []) == CASES


def test_behaviors_have_names_and_known_refusals() -> None:
    keys = {behavior.key for behavior in BEHAVIORS}
    assert len(keys) == len(BEHAVIORS) >= 60
    assert REFUSED.keys() <= keys


def test_behaviors_do_not_know_the_plugin() -> None:
    files = list(BEHAVIOR_FILES.glob("*.py"))
    assert files and [path.name for path in files if "fsdp_plugin" in path.read_text()] == []


def test_losses_of_behaviors_are_compared() -> None:
    wanted = {"0 loss": 2.0, "0 runtime": 1.0, "0 grad_norm": 3.0}
    assert compare_values({"0 loss": 2.0, "0 runtime": 9.0, "0 grad_norm": 3.0001}, wanted) == (0.0, [])
    assert compare_values({"0 loss": 2.0001, "0 grad_norm": 3.01}, wanted)[1] == [
        "0 loss is 2.0001 instead of 2",
        "0 grad_norm is 3.01 instead of 3",
    ]
    assert compare_values({}, {"0 loss": 2.0})[1] == ["0 loss is nan instead of 2"]


def test_equal_folders_have_no_faults(tmp_path: Path) -> None:
    ours, reference = (save(tmp_path, name, w=torch.ones(4)) for name in ("ours", "reference"))
    (ours / "fsdp_report.json").write_text("{}")
    assert compare_folders(ours, reference) == (0.0, [])


@pytest.mark.parametrize(
    ("name", "tensor", "config", "more", "fault"),
    [
        ("w", torch.full((4,), 1.001), "{}", "", "w differs by 1.0e-03"),
        ("v", torch.ones(4), "{}", "", "tensors ['v', 'w'] differ by name"),
        ("w", torch.ones(2), "{}", "", "w has another shape or dtype"),
        ("w", torch.ones(4), '{"a": 1}', "", "config.json differs"),
        ("w", torch.ones(4), "{}", "_fsdp_param.py", "_fsdp_param.py is saved, too"),
    ],
)
def test_differing_folders_are_faults(
    tmp_path: Path, name: str, tensor: torch.Tensor, config: str, more: str, fault: str
) -> None:
    ours, reference = save(tmp_path, "ours", **{name: tensor}), save(tmp_path, "reference", w=torch.ones(4))
    (ours / "config.json").write_text(config)
    (reference / "config.json").write_text("{}")
    if more:
        (ours / more).touch()
    assert fault in compare_folders(ours, reference)[1]


def test_expected_refusal_of_a_behavior_has_its_code() -> None:
    behavior = Behavior(group="trainer", function="a_name")
    assert behavior.name == "trainer: a name"
    assert is_expected(behavior, {"version": 1, "status": "works"})
    assert not is_expected(behavior, {"version": 1, "status": "refused"})
