"""With RAM-efficient loading only rank 0 reads the weights, and all computed values stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases_loading as cases
import pytest
import torch
from ranks import Ranks
from tiny import parallel_config

# Untied, tied, three tied weights, converted experts, scalars and position ids, a scaled embedding.
LOADED = ["llama", "llama-tied", "bert-mlm", "t5", "mixtral", "clip", "gemma"]
both_versions = pytest.mark.parametrize("version", [1, 2])


def load_both_ways(
    ranks: Ranks, family: str, folder: Path, version: int, dtype: str = "float32", **top: Any
) -> list[list[dict[str, Any]]]:
    """Return the results of all ranks with and without RAM-efficient loading."""
    return [
        ranks.run(
            cases.load_and_train,
            family,
            str(folder),
            parallel_config("full_shard", version, 2, fsdp_cpu_ram_efficient_loading=efficient) | top,
            dtype,
        )
        for efficient in (True, False)
    ]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def row(report: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in report["settings"] if row["setting"] == "loading.ram_efficient")


@both_versions
@pytest.mark.parametrize("family", LOADED)
def test_only_rank_0_reads_weights_and_results_are_equal(
    two_ranks: Ranks, tmp_path: Path, family: str, version: int
) -> None:
    two_ranks.run(cases.save_plain, family, str(tmp_path))
    efficient, normal = load_both_ways(two_ranks, family, tmp_path, version)
    assert efficient[0]["on_meta"] == 0
    assert efficient[1]["on_meta"] == efficient[1]["num_filled"] == efficient[1]["num_parameters"]
    assert [rank["on_meta"] for rank in normal] == [0, 0]
    assert row(efficient[0]["report"])["status"] == "applied"
    assert f" {efficient[1]['num_filled']} of them " in row(efficient[0]["report"])["reason"]
    assert efficient[0]["steps"] == normal[0]["steps"]
    assert equal(efficient[0]["weights"], normal[0]["weights"])
    assert all(equal(efficient[rank]["buffers"], normal[rank]["buffers"]) for rank in (0, 1))


@both_versions
def test_bf16_weights_are_read_once_and_kept_in_fp32(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(cases.save_plain, "llama-tied", str(tmp_path))
    efficient, normal = load_both_ways(two_ranks, "llama-tied", tmp_path, version, "bfloat16", mixed_precision="bf16")
    assert efficient[1]["on_meta"] == efficient[1]["num_parameters"]
    assert {weight.dtype for weight in efficient[0]["weights"].values()} == {torch.float32}
    assert efficient[0]["steps"] == normal[0]["steps"]


@pytest.mark.parametrize("is_equal", [True, False], ids=["one-tensor", "two-tensors"])
def test_checkpoint_with_both_names_of_tie_is_read_by_all(two_ranks: Ranks, tmp_path: Path, is_equal: bool) -> None:
    two_ranks.run(cases.save_both_names, str(tmp_path), is_equal)
    efficient, normal = load_both_ways(two_ranks, "llama-tied", tmp_path, 2)
    assert [rank["on_meta"] for rank in efficient] == [0, 0]
    assert efficient[0]["steps"] == normal[0]["steps"]


@both_versions
def test_trainer_reads_weights_on_rank_0_only(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    model, output_dir = str(tmp_path / "model"), str(tmp_path / "out")
    two_ranks.run(cases.save_plain, "llama-tied", model)
    efficient, normal = (
        two_ranks.run(
            cases.load_and_train_with_trainer,
            "llama-tied",
            model,
            output_dir,
            version=version,
            cpu_ram_efficient_loading=is_efficient,
        )
        for is_efficient in (True, False)
    )
    assert [rank["on_meta"] > 0 for rank in efficient] == [False, True]
    assert [rank["on_meta"] for rank in normal] == [0, 0]
    assert efficient[0]["losses"] == normal[0]["losses"]
    assert row(efficient[0]["report"])["status"] == "applied"
