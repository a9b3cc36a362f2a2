"""Damaged files of a model end all ranks with one error that names file, tensor and remedy; one rank shows a bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gloo import cases_model_files as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config

CODES = {
    "truncated": "FSDP-E453",
    "empty": "FSDP-E453",
    "broken-header": "FSDP-E453",
    "missing-shard": "FSDP-E457",
    "broken-index": "FSDP-E453",
    "index-without-metadata": "FSDP-E453",
    "file-outside": "FSDP-E456",
    "absent-tensor": "FSDP-E459",
    "other-shape": "FSDP-E479",
    "lfs-pointer": "FSDP-E469",
    "lfs-pointer-index": "FSDP-E469",
}
NAMES_TENSOR = ("absent-tensor", "other-shape")
efficient_or_not = pytest.mark.parametrize("efficient", [False, True], ids=["plain", "ram-efficient"])


def config(efficient: bool) -> dict[str, Any]:
    return parallel_config("full_shard", 2, 2, fsdp_cpu_ram_efficient_loading=efficient)


@efficient_or_not
@pytest.mark.parametrize("form", ["accelerator", "install", "arguments", "from_pretrained"])
def test_damage_ends_all_ranks_with_one_error(two_ranks: Ranks, tmp_path: Path, form: str, efficient: bool) -> None:
    two_ranks.run(cases.save_shards, str(tmp_path))
    first, second = two_ranks.run(cases.errors_of_damages, str(tmp_path), config(efficient), form, None, list(CODES))
    assert first == second and first.keys() == cases.DAMAGES.keys()
    for name, code in CODES.items():
        kind, message = first[name]
        assert kind == "CheckpointError" and f"[{code}]" in message and message.count("\n") == 0, (name, message)
        assert ".safetensors" in message and "rank" not in message, (name, message)
        assert cases.NEEDED in message or name not in NAMES_TENSOR, (name, message)
    assert "32×64 in the file, 64×32 in the model" in first["other-shape"][1]
    assert first["truncated"][1].count("bytes") >= 2 and "size is 123456" in first["lfs-pointer"][1]


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("accelerator", ["truncated"]),
        ("from_pretrained", ["truncated", "other-shape"]),
        slow("accelerator", [name for name in CODES if name != "truncated"]),
    ],
)
def test_damage_on_one_rank_ends_all_and_names_it(
    two_ranks: Ranks, tmp_path: Path, form: str, names: list[str]
) -> None:
    two_ranks.run(cases.save_shards, str(tmp_path))
    first, second = two_ranks.run(cases.errors_of_damages, str(tmp_path), config(False), form, 1, names)
    assert first == second
    assert all(f"[{CODES[name]}]" in first[name][1] and "rank 1: " in first[name][1] for name in names), first


@pytest.mark.slow
def test_damage_on_one_of_four_ranks_is_named_by_all(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(cases.save_shards, str(tmp_path))
    settings = parallel_config("full_shard", 2, 4)
    errors = four_ranks.run(cases.errors_of_damages, str(tmp_path), settings, "accelerator", 2, ["truncated"])
    assert all(found == errors[0] for found in errors)
    assert "[FSDP-E453]" in errors[0]["truncated"][1] and "rank 2: " in errors[0]["truncated"][1]


@efficient_or_not
def test_shape_of_fused_experts_ends_all_ranks(two_ranks: Ranks, tmp_path: Path, efficient: bool) -> None:
    first, second = two_ranks.run(cases.error_of_change, str(tmp_path), config(efficient), "fused-shape")
    assert first == second and "[FSDP-E479]" in first[1] and "down_proj" in first[1]


@efficient_or_not
def test_index_may_list_a_tied_weight(two_ranks: Ranks, tmp_path: Path, efficient: bool) -> None:
    assert two_ranks.run(cases.error_of_change, str(tmp_path), config(efficient), "tied") == [("", "")] * 2


def test_rank_that_loads_another_folder_continues(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases.save_shards, str(tmp_path))
    first, second = two_ranks.run(cases.recover_on_one_rank, str(tmp_path), config(False))
    assert first == [("", ""), ("", "")] and "[FSDP-E453]" in second[0][1] and second[1] == ("", "")


@efficient_or_not
def test_ignored_shape_mismatch_is_loaded(two_ranks: Ranks, tmp_path: Path, efficient: bool) -> None:
    two_ranks.run(cases.save_shards, str(tmp_path))
    first, second = two_ranks.run(cases.load_with_ignored_shapes, str(tmp_path), config(efficient))
    assert first == second


def test_errors_without_fsdp_settings_are_unchanged(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases.save_shards, str(tmp_path))
    assert two_ranks.run(cases.stock_error, str(tmp_path)) == ["JSONDecodeError"] * 2


def test_one_rank_shows_the_bar_of_transformers(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases.save_shards, str(tmp_path))
    assert two_ranks.run(cases.shows_bar, str(tmp_path), config(False)) == [True, False]
    assert two_ranks.run(cases.shows_bar, str(tmp_path), None) == [True, True]
