"""Every file in configs/ runs on real ranks, and its report shows the requested settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases_fidelity import report_of_file
from ranks import RankError, Ranks

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


def num_ranks(config: Path) -> int:
    return 4 if "hybrid" in config.stem else 2


def model_of(config: Path) -> str:
    return "bert" if "BertLayer" in config.read_text() else "llama"


@pytest.mark.parametrize("config", [c for c in CONFIGS if "fp16" not in c.stem], ids=lambda config: config.stem)
def test_report_shows_settings_of_config(request: pytest.FixtureRequest, config: Path) -> None:
    ranks: Ranks = request.getfixturevalue("four_ranks" if num_ranks(config) == 4 else "two_ranks")
    report = ranks.run(report_of_file, str(config), model_of(config))[0]
    differing = {row["setting"] for row in report["settings"] if row["status"] == "differs"}
    assert differing == set()
    assert not [problem for problem in report["problems"] if problem["severity"] == "error"]
    assert len(report["units"]) > 1 or "wrap_none" in config.stem


@pytest.mark.parametrize("config", [c for c in CONFIGS if "fp16" in c.stem], ids=lambda config: config.stem)
def test_fp16_is_rejected_on_cpu_ranks(two_ranks: Ranks, config: Path) -> None:
    with pytest.raises(RankError, match="fp16"):
        two_ranks.run(report_of_file, str(config), model_of(config))
