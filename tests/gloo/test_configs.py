"""Every file in configs/ runs on real ranks, and its report shows the requested settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases_fidelity import report_of_file
from ranks import RankError, Ranks

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
FP16 = [config for config in CONFIGS if "fp16" in config.stem]
ON_FOUR = [config for config in CONFIGS if "hybrid" in config.stem]
ON_TWO = [config for config in CONFIGS if config not in FP16 + ON_FOUR]


def model_of(config: Path) -> str:
    return "bert" if "BertLayer" in config.read_text() else "llama"


def check_report(config: Path, ranks: Ranks) -> None:
    report = ranks.run(report_of_file, str(config), model_of(config))[0]
    assert {row["setting"] for row in report["settings"] if row["status"] == "differs"} == set()
    assert not [problem for problem in report["problems"] if problem["severity"] == "error"]
    assert len(report["units"]) > 1 or "wrap_none" in config.stem


@pytest.mark.parametrize("config", ON_TWO, ids=lambda config: config.stem)
def test_report_shows_settings_of_config(two_ranks: Ranks, config: Path) -> None:
    check_report(config, two_ranks)


@pytest.mark.parametrize("config", ON_FOUR, ids=lambda config: config.stem)
def test_report_shows_settings_of_hybrid_config(four_ranks: Ranks, config: Path) -> None:
    check_report(config, four_ranks)


@pytest.mark.parametrize("config", FP16, ids=lambda config: config.stem)
def test_fp16_is_rejected_on_cpu_ranks(two_ranks: Ranks, config: Path) -> None:
    with pytest.raises(RankError, match="FSDP-E147"):
        two_ranks.run(report_of_file, str(config), model_of(config))
