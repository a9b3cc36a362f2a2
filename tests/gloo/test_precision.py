"""Ignored modules in mixed precision, with kernels for many tensors, and with the gradient scaler of fp16 training."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.gloo import cases_precision as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.training import assert_same_training, differing, reference

# The kernels of foreach and fused take tensors of one kind only. On a GPU foreach is the default.
HOW = ["fused", slow("foreach"), slow("plain")]
VERSIONS = pytest.mark.parametrize("version", [1, 2])


@cache
def expected(name: str) -> dict[str, Any]:
    return reference(name, num_steps=cases.NUM_STEPS)


@pytest.mark.parametrize(
    ("name", "ignored", "version"),
    [
        ("llama", "lm_head", 1),
        slow("llama", "lm_head", 2),
        slow("llama", r"model\.norm|.*layers\.1\.mlp", 1),
        ("llama", r"model\.norm|.*layers\.1\.mlp", 2),
        ("bert", r"bert\.embeddings", 1),  # its weight is tied to the head, which is not ignored
        slow("bert", r"bert\.embeddings", 2),
    ],
)
def test_ignored_modules_train_in_bf16(two_ranks: Ranks, name: str, ignored: str, version: int) -> None:
    run = two_ranks.run(cases.train_in_bf16, version, name, ignored)[0]
    assert run["losses"] == pytest.approx(expected(name)["losses"], rel=1e-2)
    assert differing(run["report"]) == []


def test_unknown_foreach_optimizer_steps_ignored_modules(two_ranks: Ranks) -> None:
    run = two_ranks.run(cases.train_own_foreach, "lm_head")[0]
    assert_same_training(run, reference("llama", cases.own_foreach, cases.NUM_STEPS))


@VERSIONS
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("name", "ignored"), [("llama", "lm_head"), ("with-scalar", "inner.model.norm")])
def test_scaled_training_equals_one_process(two_ranks: Ranks, name: str, ignored: str, how: str, version: int) -> None:
    assert_same_training(two_ranks.run(cases.train_scaled, version, name, ignored, how)[0], expected(name))


@VERSIONS
@pytest.mark.parametrize("how", ["fused", slow("plain")])
def test_infinite_gradient_of_one_rank_skips_all_ranks(two_ranks: Ranks, how: str, version: int) -> None:
    found = two_ranks.run(cases.step_with_infinite_gradient, version, "lm_head", how)
    assert found == [{"changed": [False, True], "scales": [cases.SCALE / 2, cases.SCALE / 2]}] * 2


@VERSIONS
@pytest.mark.parametrize(("how", "clip"), [("fused", False), ("fused", True), slow("plain", False)])
def test_infinite_gradient_in_host_memory_skips_the_step(
    two_accelerator_ranks: Ranks, version: int, how: str, clip: bool
) -> None:
    """Fused kernels of the CPU would read their flag from a copy that has not arrived yet."""
    found = two_accelerator_ranks.run(cases.step_offloaded_with_infinite_gradient, version, how, clip)
    assert found == [{"changed": [False, True], "scales": [cases.SCALE / 2, cases.SCALE / 2]}] * 2


@VERSIONS
def test_used_scaler_loads_the_state_of_a_checkpoint(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    saved, skipped, loaded, continued, new, again = two_ranks.run(cases.load_after_steps, str(tmp_path), version)[0]
    assert skipped["scale"] == saved["scale"] / 2
    assert loaded == new == saved
    assert continued == again and continued["_growth_tracker"] == saved["_growth_tracker"] + 1


def test_accelerator_gets_the_scaler_with_its_settings(two_ranks: Ranks) -> None:
    name, state = two_ranks.run(cases.scaler_of_accelerator, 2)[0]
    assert name == "CollectiveGradScaler"
    assert state["scale"] == 256.0
