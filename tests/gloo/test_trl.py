"""TRL's Trainers with a reference model have the losses of one process, and the reference model obeys the config."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo import cases_trl as cases
from tests.support.matrices import FSDP1_RACE
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import differing

pytest.importorskip("trl")
pytest.importorskip("peft")
SLOW = pytest.mark.slow
VERSIONS = pytest.mark.parametrize("version", [1, 2])
UNITS = {
    1: ["model.layers.0", "model.layers.1", "model.layers.2", ""],
    2: ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm + lm_head"],
}


def config_of(version: int, **settings: Any) -> dict[str, Any]:
    return parallel_config("full_shard", version, 2, fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer", **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trl")
    cases.write_model(str(path))
    return str(path)


@pytest.fixture(scope="module")
def dpo_reference(folder: str, one_rank: Ranks) -> dict[str, Any]:
    return {how: one_rank.run(cases.train_dpo, folder, None, how)[0] for how in ("reference", "path", "sync", "peft")}


@pytest.mark.parametrize(
    "how", ["reference", "peft", pytest.param("path", marks=SLOW), pytest.param("sync", marks=SLOW)]
)
@VERSIONS
def test_dpo_has_losses_of_one_process(
    two_ranks: Ranks, folder: str, dpo_reference: dict[str, Any], version: int, how: str
) -> None:
    config = config_of(version, fsdp_cpu_ram_efficient_loading=how in ("path", "sync"))
    run = two_ranks.run(cases.train_dpo, folder, config, how)[0]
    assert run["losses"] == pytest.approx(dpo_reference[how]["losses"], rel=1e-4)
    assert differing(run["report"]) == []
    others = run["report"]["other_models"]
    assert len(others) == (how != "peft")
    for other in others:
        assert [unit["name"] for unit in other["units"] if unit["num_params"]] == UNITS[version]
        assert differing(other) == []
        assert all(unit["num_frozen"] == unit["num_params"] for unit in other["units"])


@pytest.mark.parametrize("how", ["path", pytest.param("peft", marks=SLOW)])
@pytest.mark.parametrize("version", [pytest.param(1, marks=FSDP1_RACE), 2])
def test_grpo_has_losses_of_unsharded_ranks(two_ranks: Ranks, folder: str, version: int, how: str) -> None:
    expected = two_ranks.run(cases.train_grpo, folder, None, how)[0]
    run = two_ranks.run(cases.train_grpo, folder, config_of(version), how)[0]
    assert any(abs(loss) > 1e-3 for loss in expected["losses"])
    assert run["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert len(run["report"]["other_models"]) == (how != "peft")
