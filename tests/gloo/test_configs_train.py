"""Every file in configs/ that CPU ranks can run has the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cases_configs import reference, train
from ranks import Ranks

from hf_fsdp_plugin import load_spec

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.name for path in CONFIGS.glob("*.yaml"))
ON_FOUR = [name for name in NAMES if "hybrid" in name]
ON_TWO = [name for name in NAMES if name not in ON_FOUR and "fp16" not in name]


def on_cpu_ranks(name: str, world_size: int) -> dict[str, Any]:
    """Return the config with this number of CPU ranks."""
    content = yaml.safe_load((CONFIGS / name).read_text())
    return {**content, "num_processes": world_size, "use_cpu": True}


def check_losses(name: str, ranks: Ranks) -> None:
    model_name = "bert" if name == "seed_hf_guide.yaml" else "llama"
    config = on_cpu_ranks(name, ranks.world_size)
    losses = ranks.run(train, model_name, config)[0]
    # bf16 has an 8-bit significand, so neighboring values differ by a factor of up to 1 + 2**-7.
    tolerance = 1e-5 if load_spec(config, environ={}).precision.param in ("auto", "fp32") else 2**-7
    assert losses == pytest.approx(reference(model_name), rel=tolerance)


@pytest.mark.parametrize("name", ON_TWO)
def test_losses_equal_one_process(name: str, two_ranks: Ranks) -> None:
    check_losses(name, two_ranks)


@pytest.mark.parametrize("name", ON_FOUR)
def test_hybrid_losses_equal_one_process(name: str, four_ranks: Ranks) -> None:
    check_losses(name, four_ranks)
