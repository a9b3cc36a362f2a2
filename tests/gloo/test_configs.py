"""Every file in configs/ runs on CPU ranks: its report shows its settings, and its losses match one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_fsdp_plugin import load_spec
from tests.support.ranks import RankError, Ranks
from tests.support.training import adamw, differing, reference, train

NUM_STEPS = 4
CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
FP16 = [config for config in CONFIGS if "fp16" in config.stem]
ON_FOUR = [config for config in CONFIGS if "hybrid" in config.stem]
ON_TWO = [config for config in CONFIGS if config not in FP16 + ON_FOUR]


@cache
def reference_losses(name: str) -> list[float]:
    return reference(name, adamw, NUM_STEPS)["losses"]


def run_config(path: Path, ranks: Ranks) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Train with a file of configs/ on these CPU ranks. Returns the model's name, the config and the results."""
    config = {**yaml.safe_load(path.read_text()), "num_processes": ranks.world_size, "use_cpu": True}
    name = "bert" if "BertLayer" in path.read_text() else "small-llama"
    return name, config, ranks.run(train, name, config, adamw, NUM_STEPS)[0]


def check_run(path: Path, ranks: Ranks) -> None:
    name, config, run = run_config(path, ranks)
    # bf16 has an 8-bit significand, so neighboring values differ by a factor of up to 1 + 2**-7.
    tolerance = 1e-5 if load_spec(config, environ={}).precision.param in ("auto", "fp32") else 2**-7
    assert run["losses"] == pytest.approx(reference_losses(name), rel=tolerance)
    assert differing(run["report"]) == []
    assert not [problem for problem in run["report"]["problems"] if problem["severity"] == "error"]
    assert len(run["report"]["units"]) > 1 or "wrap_none" in path.stem


@pytest.mark.parametrize("config", ON_TWO, ids=lambda config: config.stem)
def test_config_matches_single_process(two_ranks: Ranks, config: Path) -> None:
    check_run(config, two_ranks)


@pytest.mark.parametrize("config", ON_FOUR, ids=lambda config: config.stem)
def test_hybrid_config_matches_single_process(four_ranks: Ranks, config: Path) -> None:
    check_run(config, four_ranks)


@pytest.mark.cpu_ranks("an accelerator computes in fp16")
@pytest.mark.parametrize("config", FP16, ids=lambda config: config.stem)
def test_fp16_is_rejected_on_cpu_ranks(two_ranks: Ranks, config: Path) -> None:
    with pytest.raises(RankError, match="FSDP-E147"):
        run_config(config, two_ranks)
