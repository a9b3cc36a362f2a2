"""The comparison of ``hf-fsdp migrate --prove``: rows, tolerance and problems of two recorded runs."""

from __future__ import annotations

import json
import math

import pytest

from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.tools.migrate.proof import check_run, compare, proof_table
from hf_fsdp_plugin.tools.preflight.run import PreflightResult

NOTE = Problem(code="FSDP-N757", message="a note.")


def run_of(*losses: float, backend: str = "fsdp1", ok: bool = True, prefetch: str = "none") -> PreflightResult:
    memory = {"params_bytes": 1024, "grads_bytes": 1024, "optimizer_bytes": 2048, "peak_bytes": None}
    settings = [
        {"setting": "prefetch.backward", "observed": prefetch, "status": "applied"},
        {"setting": "params.use_orig", "observed": None, "status": "unobservable"},
    ]
    report = {"backend": backend, "mesh": {"replicate": 2, "shard": 2}, "units": [{}], "memory": memory}
    return PreflightResult(
        tree={"ok": ok},
        problems=[NOTE],
        signal_number=0,
        steps=[{"loss": loss, "grad_norm": 1.0} for loss in losses],
        report={**report, "settings": settings},
    )


def test_losses_within_the_tolerance_are_equal():
    proof = compare(run_of(6.0, 5.0), run_of(6.0, 5.00001, backend="fsdp2", prefetch="pre"), tolerance=1e-5)
    assert proof.to_json()["equal"] and list(proof.problems) == [NOTE]
    rows = {row["what"]: row for row in proof.rows}
    assert rows["loss, step 2"]["difference"] == pytest.approx(2e-6)
    assert rows["mesh"]["old"] == "2 replicate × 2 shard"
    assert rows["memory, peak"] == {"what": "memory, peak", "old": None, "new": None, "difference": None}
    assert "prefetch.backward" in rows and "params.use_orig" not in rows
    lines = proof_table(proof).splitlines()
    assert lines[0].split() == ["old", "new", "difference"] and lines[1].split() == [
        "backend",
        "fsdp1",
        "fsdp2",
        "differs",
    ]
    assert lines[-1] == "losses are equal within 1e-05 (relative)"


@pytest.mark.parametrize("other", [5.001, math.nan, math.inf])
def test_other_losses_are_an_error(other):
    proof = compare(run_of(6.0, 5.0), run_of(6.0, other), tolerance=1e-5)
    tree = proof.to_json()
    assert not tree["equal"] and json.loads(json.dumps(tree, allow_nan=False)) == tree
    assert [problem.code for problem in proof.problems] == ["FSDP-N757", "FSDP-E793"]
    assert "loss, step 2" in proof.problems[1].message and "step 1" not in proof.problems[1].message
    assert "losses differ by more than" in proof_table(proof)


@pytest.mark.parametrize("run", [run_of(6.0, ok=False), run_of()])
def test_run_without_losses_is_an_error(run):
    check_run("old", run_of(6.0))
    with pytest.raises(SpecError) as caught:
        check_run("old", run)
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E794", "FSDP-N757"]
