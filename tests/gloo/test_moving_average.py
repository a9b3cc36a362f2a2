"""Exponential moving averages of shards equal those of one process, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp_plugin.checkpoint.checking.verify import verify
from tests.gloo import cases_moving_average as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config

VERSIONS = pytest.mark.parametrize("version", [1, 2])


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


def assert_results(run: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_close(run["average"], expected["average"])
    assert run["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@VERSIONS
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("tied", {}),
        ("half", {"fsdp_activation_checkpointing": True}),
        ("lora", {}),
        ("llama", {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_state_dict_type": "FULL_STATE_DICT"}),
        ("llama", {"fsdp_sharding_strategy": "NO_SHARD"}),
        ("llama", {"fsdp_offload_params": True, "fsdp_async_save": True}),
        slow("llama", {"fsdp_auto_wrap_policy": "NO_WRAP"}),
    ],
    ids=str,
)
def test_averages_equal_one_process(
    two_ranks: Ranks, name: str, settings: dict[str, Any], version: int, tmp_path: Path
) -> None:
    runs = two_ranks.run(
        cases.train_with_average, name, parallel_config("full_shard", version, 2, **settings), str(tmp_path)
    )
    assert_results(runs[0], cases.reference(name))
    assert runs[1]["average"] == {}
    assert verify(tmp_path / "state").ok


@VERSIONS
def test_averages_on_a_hybrid_mesh_equal_one_process(four_ranks: Ranks, version: int, tmp_path: Path) -> None:
    config = parallel_config("hybrid_shard", version, 4)
    assert_results(
        four_ranks.run(cases.train_with_average, "llama", config, str(tmp_path))[0], cases.reference("llama")
    )


@pytest.mark.parametrize("name", ["llama", "tied"])
@VERSIONS
def test_averages_resume_with_other_settings(
    two_ranks: Ranks, one_rank: Ranks, name: str, version: int, tmp_path: Path
) -> None:
    two_ranks.run(cases.train_with_average, name, parallel_config("full_shard", version, 2), str(tmp_path))
    expected = cases.reference(name)
    other = parallel_config("full_shard", 3 - version, 2)
    assert_results(two_ranks.run(cases.resume_with_average, name, other, str(tmp_path))[0], expected)
    alone = parallel_config("full_shard", version, 1)
    assert_results(one_rank.run(cases.resume_with_average, name, alone, str(tmp_path))[0], expected)


@VERSIONS
def test_average_loads_whole_tensors(two_ranks: Ranks, version: int) -> None:
    run = two_ranks.run(cases.load_whole, parallel_config("full_shard", version, 2))[0]
    assert_close(run["average"], cases.other_state())
    assert len(run["errors"]) == 1


@VERSIONS
def test_misuse_of_averages_is_refused(two_ranks: Ranks, version: int, tmp_path: Path) -> None:
    for codes in two_ranks.run(cases.misuse, parallel_config("full_shard", version, 2), str(tmp_path)):
        assert codes.pop("other") == ["FSDP-E422"]
        assert codes == {kind: ["FSDP-E312"] for kind in codes}


@VERSIONS
def test_average_absent_from_checkpoint_begins_anew(two_ranks: Ranks, version: int, tmp_path: Path) -> None:
    runs = two_ranks.run(cases.load_without_average, parallel_config("full_shard", version, 2), str(tmp_path))
    assert runs[0]["printed"].count("FSDP-W435") == 1
    assert_close(runs[0]["average"], runs[0]["weights"])


@VERSIONS
def test_callback_evaluates_saves_resumes_and_exports(two_ranks: Ranks, version: int, tmp_path: Path) -> None:
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": version}}
    run = two_ranks.run(cases.train_and_resume, str(tmp_path), **fsdp)[0]
    assert "exponential_moving_average.safetensors" in run["files"]
    assert verify(tmp_path / "checkpoint-3").ok
    assert_close(run["averages"][1], run["averages"][0])
    assert_close(run["weights"][1], run["weights"][0])
    assert_close(run["exported"], run["averages"][0])
    assert_close(run["applied"], run["averages"][0])
    assert run["after"] == run["evaluated"][-1]
    assert abs(run["after"] - run["plain"]) > 1e-4
    assert run["losses"][0][3:] == pytest.approx(run["losses"][1][-3:], rel=1e-6)


@VERSIONS
def test_bema_of_trl_is_refused(two_ranks: Ranks, version: int, tmp_path: Path) -> None:
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": version}}
    assert two_ranks.run(cases.train_with_bema, str(tmp_path), **fsdp) == [["FSDP-E627"]] * 2
