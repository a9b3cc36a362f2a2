"""The program that tests the plugin on GPUs: every check runs on CPU ranks and on a simulated device, and may fail."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.accelerator.accelerator_build import available
from tests.support.matrices import slow
from tests.support.ranks import ACCELERATOR_BACKEND, RankError, Ranks

ROOT = Path(__file__).resolve().parents[2]


ON_CPU = (
    "launcher", "restart", "profiler", "overlap", "bench", "spawned_child", "resume_on_one_rank", "layers",
    "one_visible_gpu", "ranks_per_machine", "throughput",
)  # fmt: skip
"""Checks whose case in the quick tests runs on CPU ranks: those that start processes, which take long."""

ON_ONE_RANK = ("launcher", "restart", "profiler", "spawned_child", "bench")
"""Of these, the checks that the quick tests run on one rank: other tests train on several with what they start."""

ON_DEVICE = (
    "training", "scaler", "fused_resume", "parity", "memory_error", "extra_forward", "generation", "sync_free_steps",
    "host_time", "load_speed", "save_stall", "pinning", "compiled", "nccl", "lora", "qlora",
    "collectives", "contexts", "pinned_saves", "state_dict", "clipping",
    "activation_offload", "optimizer_offload", "loading", "ignored_modules", "reports", "process_groups", "hangs",
)  # fmt: skip
"""Checks whose case in the quick tests runs on the simulated device, which shows more."""

ON_RANKS = ("prediction", "checkpointed_prediction", "host_prediction")
"""Checks whose case in the quick tests runs on ranks of the tests."""


@contextmanager
def _faulty(fault: str) -> Iterator[None]:
    import torch

    from hf_fsdp_plugin.tools.bench.rank import Loop
    from scripts.bench.gpu_checks import loading, memory

    step, load, measure = Loop.step, loading._load, memory.measure

    def waiting_step(self: Any, batch: Any) -> Any:
        loss = step(self, batch)
        if self.hooked:
            loss.item()
        return loss

    def wrong_load(*args: Any, stock: bool) -> Any:
        seconds, model = load(*args, stock=stock)
        if not stock:
            with torch.no_grad():
                loading.local(next(model.parameters())).add_(1)
        return seconds, model

    def other_memory(*args: Any) -> dict[str, int]:
        return {name: 2 * size for name, size in measure(*args).items()}

    faults = {
        "wait": (Loop, "step", waiting_step),
        "weights": (loading, "_load", wrong_load),
        "memory": (memory, "measure", other_memory),
    }
    if not fault:
        yield
        return
    target, name, replacement = faults[fault]
    with patch.object(target, name, replacement):
        yield


def run(case: dict[str, Any], fault: str = "") -> Any:
    """Return the figures of a case, which raises an error if it fails, the codes of its refusal, or why it is skipped.

    Args:
        fault: what is wrong in this package: a ``wait`` in each step, loaded ``weights``, or predicted ``memory``.
    """
    import hf_fsdp_plugin as hfp
    from scripts.bench.gpu_checks import Skipped, run_check

    try:
        with _faulty(fault):
            return run_check(case)
    except Skipped as error:
        return str(error)
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]


SKIPPED = {"qlora": "not installed: bitsandbytes", "contexts": "only CUDA has contexts"}
"""Checks that these machines cannot run, and the reason that their row has."""

NOT_ON_CPU = ("sync_free_steps", "pinning", "contexts")
"""Checks that have nothing to show on CPU ranks."""


@pytest.fixture
def gpu() -> SimpleNamespace:
    """The modules of the program."""
    from scripts.bench.gpu_checks import base, cases, results, workers
    from scripts.bench.measure import gpu_check

    return SimpleNamespace(check=gpu_check, base=base, cases=cases, results=results, workers=workers)


def case_of(check: str, version: int, precision: str = "", **changed: Any) -> dict[str, Any]:
    """Return a case, by default in the precision that the check needs."""
    precision = precision or ("bf16" if check in ("ignored_modules", "throughput", "load_speed") else "fp32")
    return {
        "check": check, "version": version, "device": "cpu", "ranks": 2, "backend": "gloo", "offload": False,
        "strategy": "full_shard", "precision": precision, **changed,
    }  # fmt: skip


def run_program(out: Path, *arguments: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """Run the script that users start, and return check -> the row of its first case."""
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--out", str(out), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1800, check=False, env={**os.environ, **(environ or {})}
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    rows: dict[str, Any] = {}
    for row in json.loads(out.read_text())["rows"]:
        rows.setdefault(row["name"].split()[0], row)  # of the modes of a check, the first
    return rows


def check_rows(rows: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert rows.keys() == set(expected)
    for name, row in rows.items():
        if name in SKIPPED:
            assert (row["status"], row["reason"]) == ("skipped", SKIPPED[name])
        else:
            assert row["status"] == "passed" and row["figures"], row
            assert row["ranks"] == (1 if name in ON_ONE_RANK else 2)


@pytest.mark.cpu_ranks("the next test runs the program on devices")
@pytest.mark.timeout(2400)
def test_program_passes_on_cpu_ranks(tmp_path: Path) -> None:
    one, two = ("|".join(name for name in ON_CPU if (name in ON_ONE_RANK) == is_one) for is_one in (True, False))
    # Of the modes of a layer, the one without and the one with all that a mode adds.
    only = (
        f"^((?!layers)({two}) .*2 ranks|layers bf16 (eager|compiled selective|fp8 compiled),.*2 ranks|({one}) .*1 rank)"
    )
    rows = run_program(tmp_path / "out.json", "--cpu", "--one-of-each", "--only", only)
    check_rows(rows, ON_CPU)
    result = json.loads((tmp_path / "out.json").read_text())["rows"]
    modes = {row["name"].removeprefix("layers bf16 "): row["status"] for row in result if "layers" in row["name"]}
    assert modes.pop("fp8 compiled") == "skipped"
    assert modes == dict.fromkeys(("eager", "compiled selective"), "passed")


@pytest.mark.cpu_ranks("runs once, on devices of its own")
@pytest.mark.timeout(2400)
def test_program_passes_on_simulated_devices(tmp_path: Path) -> None:
    if reason := available():
        pytest.skip(f"no simulated accelerator: {reason}")
    environ = {"PYTHONPATH": str(ACCELERATOR_BACKEND), "SIM_ACCELERATOR_COUNT": "2"}
    only = f"^({'|'.join(ON_DEVICE)}) .*2 ranks"
    check_rows(run_program(tmp_path / "out.json", "--one-of-each", "--only", only, environ=environ), ON_DEVICE)


def test_every_check_has_a_case_in_the_quick_tests(gpu: SimpleNamespace) -> None:
    assert {*ON_CPU, *ON_DEVICE, *ON_RANKS} == set(gpu.base.CHECKS) and not {*ON_CPU}.intersection(ON_DEVICE)


EVERY = [slow(name, version, "") for name in (*ON_CPU, *ON_DEVICE) for version in (1, 2) if name != "layers"]

PREDICTIONS = [
    ("prediction", 2, "bf16"),
    ("host_prediction", 2, "bf16"),
    slow("host_prediction", 1, "bf16"),
    slow("prediction", 2, "fp32"),
    *(slow("prediction", 1, precision) for precision in ("fp32", "bf16")),
    *(slow("checkpointed_prediction", version, "") for version in (1, 2)),
]


@pytest.mark.cpu_ranks("the next test runs the checks on devices")
@pytest.mark.parametrize(("check", "version", "precision"), [*EVERY, *(slow(name, 2, "") for name in ON_RANKS)])
def test_check_passes_on_cpu_ranks(two_ranks: Ranks, check: str, version: int, precision: str) -> None:
    for figures in two_ranks.run(run, case_of(check, version, precision)):
        assert json.dumps(figures) and (isinstance(figures, str) == (check in NOT_ON_CPU))


@pytest.mark.parametrize(("check", "version", "precision"), [*EVERY, *PREDICTIONS])
def test_check_passes_on_simulated_device(
    two_accelerator_ranks: Ranks, check: str, version: int, precision: str
) -> None:
    """The same checks, as on a GPU: the first contact with one does not fail in the check itself."""
    precision = "fp16" if check == "scaler" else precision  # CPU ranks have none: there, the check adds the scaler
    case = case_of(check, version, precision, device="npu", backend="hccl")
    for figures in two_accelerator_ranks.run(run, case):
        assert json.dumps(figures) and (isinstance(figures, str) == (check in ("contexts", "qlora")))


def test_check_fails_for_another_device(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"the parameters are on|the report names"):
        two_ranks.run(run, case_of("reports", 2) | {"device": "meta", "top": {"use_cpu": True}})


def test_wait_in_a_step_fails_sync_free_steps(two_accelerator_ranks: Ranks) -> None:
    case = case_of("sync_free_steps", 2, device="npu", backend="hccl")
    with pytest.raises(RankError, match=r"waits in each step: .*'plugin': \[1, 1, 1, 1, 1\]"):
        two_accelerator_ranks.run(run, case, fault="wait")


def test_changed_weights_fail_load_speed(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="weights differ from those of stock Accelerate"):
        two_ranks.run(run, case_of("load_speed", 2), fault="weights")


def test_wrong_prediction_fails(two_accelerator_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="the prediction is not near the peak"):
        two_accelerator_ranks.run(run, case_of("prediction", 2, device="npu", backend="hccl"), fault="memory")


def test_refused_case_has_its_codes(two_ranks: Ranks) -> None:
    assert two_ranks.run(run, case_of("generation", 2, precision="fp16")) == [["FSDP-E147"]] * 2


def test_one_gpu_runs_every_check_and_two_run_more(gpu: SimpleNamespace) -> None:
    one, two, four = (gpu.cases.cases(num_devices=count, device="cuda") for count in (1, 2, 4))
    cpu = gpu.cases.cases(num_devices=2, device="cpu")
    for found in (one, two, four, cpu):
        assert {case["check"] for case in found} == set(gpu.base.CHECKS)
        assert len(set(map(gpu.cases.key, found))) == len(found)
    assert {case["ranks"] for case in one if not case.get("shared")} == {1}
    assert {case["check"] for case in two if case["ranks"] == 2} == set(gpu.base.CHECKS)
    assert {case["strategy"] for case in four if case["ranks"] == 4} == {"hybrid_shard", "hybrid_shard_zero2"}
    assert {case["device"] for case in one + two} == {"cuda"} and {case["device"] for case in cpu} == {"cpu"}
    assert "fp16" not in {case["precision"] for case in cpu}


def test_telling_checks_come_first_and_fit_into_one_call(gpu: SimpleNamespace) -> None:
    one = gpu.cases.cases(num_devices=1, device="cuda")
    seconds, reached = 0.0, []
    for case in one:
        seconds += gpu.base.CHECKS[case["check"]].seconds
        reached += [case["check"]] if seconds < 7 * 60 else []
    silent = {"training", "scaler", "fused_resume", "parity", "memory_error", "extra_forward", "generation"}
    assert {*silent, "sync_free_steps", "layers"} <= set(reached)
    checks = [gpu.base.CHECKS[case["check"]] for case in one if case["ranks"] == 1]
    assert sum(check.seconds for check in checks if check.min_ranks == 1) < 25 * 60


def fake(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, results: dict[str, Any]) -> list[tuple[str, float]]:
    """Replace the ranks by results by name of the check, and return the list of what they are asked to run."""
    asked: list[tuple[str, float]] = []

    def run_case(self: Any, case: dict[str, Any], seconds_left: float) -> Any:
        asked.append((case["check"], seconds_left))
        return results.get(case["check"], {"status": "passed", "seconds": 1.0, "reason": "fine", "figures": {"a": 1}})

    monkeypatch.setattr(gpu.workers.Workers, "run", run_case)
    return asked


def test_next_call_runs_what_has_no_result_of_this_code(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    asked = fake(
        gpu, monkeypatch, {"scaler": None, "clipping": {"status": "failed", "seconds": 2, "reason": "no\nclip"}}
    )
    every = ["--cpu", "--out", str(out)]
    assert gpu.check.main([*every, "--only", "clipping.*1 rank"]) == 1
    assert "clipping fp32, FSDP2, 1 rank: failed (2.0 s) no clip" in capsys.readouterr().out
    row = json.loads(out.read_text())["rows"][0]
    assert {"name", "version", "ranks", "status", "seconds", "figures", "reason", "code"} <= row.keys()
    asked.clear()
    assert gpu.check.main(every) == 1
    names = [check for check, _ in asked]
    assert "training" in names and "sync_free_steps" in names and names.count("clipping") == 2  # those of two ranks
    asked.clear()
    gpu.check.main(every)
    assert {check for check, _ in asked} == {"scaler"}  # ended before its time limit, so it has no row
    monkeypatch.setattr(gpu.check, "code_version", lambda: "newer")
    asked.clear()
    gpu.check.main([*every, "--missing"])
    assert {check for check, _ in asked} == {"scaler"}
    asked.clear()
    gpu.check.main(every)
    assert len(asked) > 50
    assert "the next call begins with" in capsys.readouterr().out


def test_minutes_limit_what_is_started(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = fake(gpu, monkeypatch, {})
    monkeypatch.setattr(gpu.check, "_SLOWER", 1.0)
    gpu.check.main(["--cpu", "--minutes", "0.4", "--out", str(tmp_path / "out.json")])
    assert asked and all(gpu.base.CHECKS[check].seconds + 15 <= left <= 24 for check, left in asked)
    assert "throughput" not in {check for check, _ in asked}


def test_case_that_needs_two_devices_is_not_seen_on_one(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(gpu, monkeypatch, {})
    monkeypatch.setattr(gpu.check, "find_device", lambda cpu: ("npu", 1, "one device"))
    monkeypatch.setattr(gpu.cases, "get_device", lambda device: SimpleNamespace(collectives="hccl"))
    gpu.check.main(["--only", "hangs", "--out", str(tmp_path / "out.json")])
    assert "hangs bf16, FSDP2, 1 rank: skipped (0.0 s) not seen: needs 2 devices" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert gpu.results.table(result["rows"])[0].startswith("**One GPU.**")
    assert not gpu.results.table([{**result["rows"][0], "ranks": 2}])[0].startswith("**One GPU.**")


def test_file_of_another_device_is_not_continued(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(gpu, monkeypatch, {})
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"device": "1 x another", "rows": []}))
    assert gpu.check.main(["--cpu", "--out", str(out)]) == 1
    assert "has results of 1 x another" in capsys.readouterr().err
    out.write_text("[")
    assert gpu.check.main(["--cpu", "--out", str(out)]) == 1
    assert "is not a file of results" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", "is built without CUDA"),
        ("mps", "device type 'mps' is not supported"),
        ("npu", "npu:0 has 0.00 of 1.0 GB free"),
    ],
)
def test_unusable_device_causes_one_message(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    device: str, expected: str,
) -> None:  # fmt: skip
    import torch

    from hf_fsdp_plugin import devices

    if device == "cpu" and torch.version.cuda:
        pytest.skip("torch is built for CUDA")
    monkeypatch.setattr(devices, "accelerator_type", lambda: device)
    if device == "npu":
        module = SimpleNamespace(mem_get_info=lambda: (1 << 20, 10**9))
        monkeypatch.setattr(gpu.base, "device_module", lambda _: module)
        monkeypatch.setattr(gpu.base, "torch_device", lambda _: "npu:0")
        monkeypatch.setattr(gpu.base, "device_of", lambda _: SimpleNamespace(visible_variable=""))
        result = gpu.workers._result(lambda: gpu.base.check_free_memory({"device": "npu"}))
        fake(gpu, monkeypatch, dict.fromkeys(gpu.base.CHECKS, result))
    argv = ["--cpu"] if device == "npu" else []
    assert gpu.check.main([*argv, "--out", str(tmp_path / "out.json")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("gpu_check: ") and expected in message and message.count("\n") == 1


@pytest.mark.slow
def test_ranks_run_cases_in_turn_and_are_ended_by_the_limit(gpu: SimpleNamespace) -> None:
    workers = gpu.workers.Workers()
    try:
        for check in ("ranks_per_machine", "clipping"):
            assert workers.run(case_of(check, 2), 200)["status"] == "passed"
            assert workers.serves(case_of("reports", 2))
        assert workers.run(case_of("training", 2), 0.5) is None and not workers.serves(case_of("reports", 2))
        refused = workers.run(case_of("generation", 2, precision="fp16"), 200)
        assert refused["status"] == "refused" and "FSDP-E147" in refused["reason"] and "traceback" in refused
    finally:
        workers.stop()
