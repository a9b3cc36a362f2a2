"""With RAM-efficient loading only rank 0 reads the weights, and all computed values stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases_loading import load_and_train, save_both_names, save_plain, trainer_from_pretrained
from ranks import Ranks
from tiny import parallel_config

# Untied, tied, three tied weights, converted experts, scalars and position ids, a scaled embedding.
LOADED = ["llama", "llama-tied", "bert-mlm", "t5", "mixtral", "clip", "gemma"]


def config_of(version: int, efficient: bool = True, **top: Any) -> dict[str, Any]:
    return {**parallel_config("full_shard", version, 2, fsdp_cpu_ram_efficient_loading=efficient), **top}


def row(report: dict[str, Any], setting: str) -> dict[str, Any]:
    return next(row for row in report["settings"] if row["setting"] == setting)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("family", LOADED)
def test_only_rank_0_reads_weights_and_results_are_equal(
    two_ranks: Ranks, tmp_path: Path, family: str, version: int
) -> None:
    two_ranks.run(save_plain, family, str(tmp_path))
    efficient = two_ranks.run(load_and_train, family, str(tmp_path), config_of(version))
    normal = two_ranks.run(load_and_train, family, str(tmp_path), config_of(version, efficient=False))
    assert efficient[0]["on_meta"] == 0
    assert efficient[1]["on_meta"] == efficient[1]["num_filled"] == efficient[1]["num_parameters"]
    assert [rank["on_meta"] for rank in normal] == [0, 0]
    assert row(efficient[0]["report"], "loading.ram_efficient")["status"] == "applied"
    assert f" {efficient[1]['num_filled']} of them " in row(efficient[0]["report"], "loading.ram_efficient")["reason"]
    assert efficient[0]["losses"] == normal[0]["losses"]
    assert efficient[0]["norms"] == normal[0]["norms"]
    assert all(torch.equal(efficient[0]["weights"][name], weight) for name, weight in normal[0]["weights"].items())
    for rank in (0, 1):
        assert efficient[rank]["buffers"].keys() == normal[rank]["buffers"].keys()
        assert all(torch.equal(efficient[rank]["buffers"][name], b) for name, b in normal[rank]["buffers"].items())


@pytest.mark.parametrize("version", [1, 2])
def test_bf16_weights_are_read_once_and_kept_in_fp32(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(save_plain, "llama-tied", str(tmp_path))
    config = config_of(version, mixed_precision="bf16")
    efficient = two_ranks.run(load_and_train, "llama-tied", str(tmp_path), config, "bfloat16")
    normal = config_of(version, efficient=False, mixed_precision="bf16")
    loaded = two_ranks.run(load_and_train, "llama-tied", str(tmp_path), normal, "bfloat16")
    assert efficient[1]["on_meta"] == efficient[1]["num_parameters"]
    assert {weight.dtype for weight in efficient[0]["weights"].values()} == {torch.float32}
    assert efficient[0]["losses"] == loaded[0]["losses"]


@pytest.mark.parametrize("equal", [True, False], ids=["one-tensor", "two-tensors"])
def test_checkpoint_with_both_names_of_tie_is_read_by_all(two_ranks: Ranks, tmp_path: Path, equal: bool) -> None:
    two_ranks.run(save_both_names, str(tmp_path), equal)
    efficient = two_ranks.run(load_and_train, "llama-tied", str(tmp_path), config_of(2))
    normal = two_ranks.run(load_and_train, "llama-tied", str(tmp_path), config_of(2, efficient=False))
    assert [rank["on_meta"] for rank in efficient] == [0, 0]
    assert efficient[0]["losses"] == normal[0]["losses"]


@pytest.mark.parametrize("version", [1, 2])
def test_trainer_reads_weights_on_rank_0_only(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(save_plain, "llama-tied", str(tmp_path / "model"))
    runs = {
        efficient: two_ranks.run(
            trainer_from_pretrained,
            "llama-tied",
            str(tmp_path / "model"),
            str(tmp_path / f"out-{efficient}"),
            version=version,
            cpu_ram_efficient_loading=efficient,
        )
        for efficient in (True, False)
    }
    assert [rank["on_meta"] > 0 for rank in runs[True]] == [False, True]
    assert [rank["on_meta"] for rank in runs[False]] == [0, 0]
    assert runs[True][0]["losses"] == runs[False][0]["losses"]
    assert row(runs[True][0]["report"], "loading.ram_efficient")["status"] == "applied"
