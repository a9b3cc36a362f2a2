"""The program that tests the plugin on GPUs, on CPU ranks: every check runs, fails if it should, and is summarized."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cases_gpu_check import BENCH, run
from matrices import slow
from ranks import RankError, Ranks

SLOW = (
    "training", "launcher", "restart", "compiled", "ignored_modules", "scaler", "activation_offload", "generation",
    "loading", "pinned_saves", "bench", "profiler", "prediction", "hangs",
)  # fmt: skip
"""Checks that take seconds."""


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_check

    return gpu_check


def cpu_cases() -> list[Any]:
    """Each check with two CPU ranks: under FSDP1, under FSDP2 if it is quick."""
    names = (
        "state_dict", "clipping", "reports", "process_groups", "ranks_per_machine", "collectives", *SLOW,
    )  # fmt: skip
    found: list[Any] = []
    for number, name in enumerate(names):
        for version in (1, 2):
            is_quick = name not in SLOW and version == 1 + number % 2
            found.append((name, version) if is_quick else slow(name, version))
    return found


def case_of(check: str, version: int, **changed: Any) -> dict[str, Any]:
    precision = "bf16" if check == "ignored_modules" else "fp32"
    return {
        "check": check, "version": version, "device": "cpu", "ranks": 2, "backend": "gloo", "offload": False,
        "strategy": "full_shard", "precision": precision, **changed,
    }  # fmt: skip


@pytest.mark.cpu_ranks("the next test runs the checks on devices")
@pytest.mark.parametrize(("check", "version"), cpu_cases())
def test_check_passes_on_cpu_ranks(two_ranks: Ranks, check: str, version: int) -> None:
    for measurements in two_ranks.run(run, case_of(check, version)):
        assert measurements and json.dumps(measurements)


@pytest.mark.parametrize(("check", "version"), cpu_cases())
def test_check_passes_on_simulated_device(two_accelerator_ranks: Ranks, check: str, version: int) -> None:
    """The same checks, as on a GPU: the first contact with one does not fail in the check itself."""
    case = case_of(check, version, device="npu", backend="hccl")
    for measurements in two_accelerator_ranks.run(run, case):
        assert measurements and json.dumps(measurements)


def test_check_fails_for_another_device(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"the parameters are on|the report names"):
        two_ranks.run(run, case_of("reports", 2) | {"device": "meta", "top": {"use_cpu": True}})


def test_refused_case_has_its_codes(two_ranks: Ranks) -> None:
    assert two_ranks.run(run, case_of("generation", 2, precision="fp16")) == [["FSDP-E147"]] * 2


def test_every_check_is_tested(gpu_check: ModuleType) -> None:
    tested = {getattr(values, "values", values)[0] for values in cpu_cases()}
    assert tested == set(gpu_check.CHECKS)


def test_one_gpu_runs_every_check_and_two_run_more(gpu_check: ModuleType) -> None:
    one, two, cpu = gpu_check.cases(num_gpus=1), gpu_check.cases(num_gpus=2), gpu_check.cases(num_gpus=0, cpu=True)
    for found in (one, two, cpu):
        assert {case["check"] for case in found} == set(gpu_check.CHECKS)
        assert len(set(map(gpu_check.name_of, found))) == len(found)
    assert {case["ranks"] for case in one if not case.get("shared")} == {1}
    assert {case["check"] for case in two if case["ranks"] == 2} == set(gpu_check.CHECKS)
    assert {case["device"] for case in one + two} == {"cuda"} and {case["device"] for case in cpu} == {"cpu"}


def test_results_are_summarized(gpu_check: ModuleType) -> None:
    results = [
        {"check": "scaler", "status": "passed"}, {"check": "scaler", "status": "failed"},
        {"check": "training", "status": "refused"}, {"check": "training", "status": "failed", "shared": True},
    ]  # fmt: skip
    assert gpu_check.summary(results) == [
        ["check", "passed", "refused", "failed"], ["scaler", "1", "0", "1"], ["training", "0", "1", "1"],
    ]  # fmt: skip
    assert [gpu_check.counts_as_failure(result) for result in results] == [False, True, False, False]


def test_without_gpu_nothing_is_checked(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    if gpu_check.main(["--list"]) == 0 and __import__("torch").cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert gpu_check.main([]) == 1
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_program_runs_cases_and_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # torchrun leaves a folder
    script = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
    command = ["bash", str(script), "--cpu", "--only", "clipping fsdp2.*2 ranks", "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "clipping" in done.stdout.splitlines()[-3] or "clipping" in done.stdout
    (case,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert case["status"] == "passed" and set(case["norms"]) == {"1.0", "2.0", "inf"}
