"""One optimizer with parameters of several models trains, saves and resumes like an unsharded one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gloo import cases_several_models as cases
from tests.support.matrices import slow
from tests.support.ranks import RankError, Ranks


@pytest.mark.parametrize("first", ["models", "together"])
@pytest.mark.parametrize(
    ("version", "kind"),
    [(1, "FULL"), (2, "SHARDED"), slow(1, "SHARDED"), slow(1, "LOCAL"), slow(2, "FULL")],
)
def test_optimizer_of_two_models(two_ranks: Ranks, tmp_path: Path, version: int, kind: str, first: str) -> None:
    config = {"fsdp_config": {"fsdp_version": version, "fsdp_state_dict_type": f"{kind}_STATE_DICT"}}
    config |= {"use_cpu": True, "distributed_type": "FSDP"}
    result = two_ranks.run(cases.train, config, first, str(tmp_path / "saved"))[0]
    expected = cases.unsharded()
    assert result["run"] == [pytest.approx(pair, rel=1e-5) for pair in expected]
    assert result["resumed"] == [pytest.approx(pair, rel=1e-6) for pair in result["run"][2:]]
    assert result["problems"] == []


@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_of_unprepared_model_is_refused(two_ranks: Ranks, version: int) -> None:
    config = {"use_cpu": True, "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": version}}
    with pytest.raises(RankError, match="FSDP-E604"):
        two_ranks.run(cases.prepare_one_of_two, config)
