"""With RAM-efficient loading every rank has a usable model in shared memory, and all computed values stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import cases_loading as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config

# Tied, three tied weights, converted experts; then untied, scalars and position ids, a scaled embedding.
LOADED = ["llama-tied", "bert-mlm", "mixtral"]
OTHERS = [slow(family) for family in ("llama", "t5", "clip", "gemma")]
both_versions = pytest.mark.parametrize("version", [1, 2])
# The file contains fp32: read as fp32 it is mapped, read as bf16 one rank casts it for both.
SHARED = pytest.mark.cpu_ranks("ranks share weights in host memory; those of devices do not")
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["mapped", "cast"])


def efficient_config(version: int = 2) -> dict[str, Any]:
    return parallel_config("full_shard", version, 2, fsdp_cpu_ram_efficient_loading=True)


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


@SHARED
@both_versions
@pytest.mark.parametrize("family", [*LOADED, *OTHERS])
def test_ranks_share_weights_and_results_are_equal(two_ranks: Ranks, tmp_path: Path, family: str, version: int) -> None:
    two_ranks.run(cases.save_plain, family, str(tmp_path))
    efficient, normal = load_both_ways(two_ranks, family, tmp_path, version)
    for rank in efficient:
        assert rank["memory"]["num_on_meta"] == rank["num_filled"] == 0
        # Transformers creates a tied bias again when it ties the weights.
        assert rank["memory"]["num_private"] == (family == "bert-mlm")
        assert (rank["memory"]["num_shared"] > 0) == (family == "mixtral")
    observed = row(efficient[0]["report"])
    assert observed["status"] == "applied"
    assert f" {efficient[1]['memory']['num_mapped']} mapped from files" in observed["reason"]
    assert efficient[0]["steps"] == normal[0]["steps"]
    assert equal(efficient[0]["weights"], normal[0]["weights"])
    assert all(equal(efficient[rank]["buffers"], normal[rank]["buffers"]) for rank in (0, 1))


@SHARED
@both_versions
def test_cast_weights_are_shared_and_kept_in_fp32(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(cases.save_plain, "llama-tied", str(tmp_path))
    efficient, normal = load_both_ways(two_ranks, "llama-tied", tmp_path, version, "bfloat16", mixed_precision="bf16")
    for rank in efficient:
        assert rank["memory"]["num_private"] == 0 < rank["memory"]["num_shared"]
    assert " in memory shared by the ranks of a machine" in row(efficient[0]["report"])["reason"]
    assert [rank["memory"]["num_shared"] for rank in normal] == [0, 0]
    assert {weight.dtype for weight in efficient[0]["weights"].values()} == {torch.float32}
    assert efficient[0]["steps"] == normal[0]["steps"]


@pytest.mark.parametrize("is_equal", [True, False], ids=["one-tensor", "two-tensors"])
@both_dtypes
def test_both_names_of_a_tie_are_compared_on_every_rank(
    two_ranks: Ranks, tmp_path: Path, is_equal: bool, dtype: str
) -> None:
    two_ranks.run(cases.save_both_names, str(tmp_path), is_equal)
    efficient, normal = load_both_ways(two_ranks, "llama-tied", tmp_path, 2, dtype)
    assert [rank["memory"]["num_private"] for rank in efficient] == [0, 0]
    assert efficient[0]["steps"] == normal[0]["steps"]


def test_bin_file_is_shared(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases.save_bin, "llama", str(tmp_path))
    efficient, normal = load_both_ways(two_ranks, "llama", tmp_path, 2)
    assert [rank["memory"]["num_private"] for rank in efficient] == [0, 0]
    assert efficient[0]["steps"] == normal[0]["steps"]


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", "float32"), ("lfm2", "float32"), slow("llama", "bfloat16")]
)
def test_gguf_file_is_dequantized_by_one_rank(two_ranks: Ranks, tmp_path: Path, architecture: str, dtype: str) -> None:
    pytest.importorskip("gguf")
    two_ranks.run(cases.save_gguf, str(tmp_path), architecture)
    efficient = two_ranks.run(cases.load_gguf, str(tmp_path), efficient_config(), dtype)
    normal, _ = two_ranks.run(cases.load_gguf, str(tmp_path), parallel_config("full_shard", 2, 2), dtype)
    for rank in efficient:
        assert rank["memory"]["num_private"] == 0 < rank["memory"]["num_shared"] == rank["from_files"]
        assert "FSDP-W660" not in rank["printed"]
    assert sorted(rank["num_moved"] > 0 for rank in efficient) == [False, True]
    assert normal["memory"]["num_shared"] == 0 and equal(efficient[0]["weights"], normal["weights"])


@both_versions
def test_trainer_loads_a_usable_model_on_every_rank(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
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
    for rank in efficient:
        assert rank["memory"]["num_private"] == rank["memory"]["num_on_meta"] == 0
    assert efficient[0]["losses"] == normal[0]["losses"]
    assert row(efficient[0]["report"])["status"] == "applied"


@both_versions
@both_dtypes
def test_scripts_use_the_model_before_prepare(two_ranks: Ranks, tmp_path: Path, version: int, dtype: str) -> None:
    two_ranks.run(cases.save_plain, "llama", str(tmp_path))
    names = [name for name in cases.TOUCHES if name != "merge_lora" or pytest.importorskip("peft")]
    results = two_ranks.run(cases.touch_and_prepare, str(tmp_path), dtype, efficient_config(version), names)
    for name in names:
        expected = {
            key: tensor.detach() for key, tensor in cases.touch_model(name, str(tmp_path), dtype).state_dict().items()
        }
        for rank in (0, 1):
            assert results[rank][name]["on_meta"] == []
            assert equal(results[rank][name]["local"], expected), f"{name} on rank {rank}"
        prepared = results[0][name]["prepared"]
        assert equal({key: tensor.to(expected[key].dtype) for key, tensor in prepared.items()}, expected), name


@both_dtypes
def test_save_pretrained_before_prepare_is_complete(two_ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    two_ranks.run(cases.save_plain, "llama", str(tmp_path))
    output = str(tmp_path / "saved")
    saved = two_ranks.run(cases.save_before_prepare, str(tmp_path), dtype, output, efficient_config())
    expected = cases.touch_model("read_weights", str(tmp_path), dtype).state_dict()
    assert equal(saved[0], expected) and equal(saved[1], expected)


@both_versions
def test_new_head_is_initialized_and_made_equal(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(cases.save_plain, "bert-mlm", str(tmp_path))
    first, second = two_ranks.run(cases.load_with_new_head, str(tmp_path), efficient_config(version))
    assert first["on_meta"] == second["on_meta"] == 0
    assert 0 < second["head"].std() < 1 and not torch.equal(first["head"], second["head"])
    assert torch.equal(first["prepared"], first["head"])
    assert row(first["report"])["status"] == "applied"


@both_versions
@both_dtypes
def test_change_in_place_stays_on_its_rank(two_ranks: Ranks, tmp_path: Path, version: int, dtype: str) -> None:
    two_ranks.run(cases.save_plain, "llama", str(tmp_path))
    first, second = two_ranks.run(cases.change_on_one_rank, str(tmp_path), dtype, efficient_config(version))
    assert torch.equal(first["seen"], first["before"] + 1)
    assert torch.equal(second["seen"], second["before"])
    # The broadcast writes to new memory, because writing to a mapped page would copy it.
    assert torch.equal(second["after"], second["before"])
    assert torch.equal(first["prepared"].to(first["seen"].dtype), first["seen"])


@both_dtypes
@pytest.mark.parametrize("rank", [0, 1])
def test_loading_on_one_rank_waits_for_nobody(two_ranks: Ranks, tmp_path: Path, dtype: str, rank: int) -> None:
    two_ranks.run(cases.save_plain, "llama", str(tmp_path))
    nums = two_ranks.run(cases.load_on_one_rank, str(tmp_path), dtype, efficient_config(), rank)
    assert nums[rank] > 0 == nums[1 - rank]


@both_dtypes
def test_second_model_is_independent_of_the_first(two_ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    two_ranks.run(cases.save_plain, "llama", str(tmp_path))
    expected = cases.touch_model("read_weights", str(tmp_path), dtype).state_dict()
    for rank in two_ranks.run(cases.load_one_after_the_other, str(tmp_path), dtype, efficient_config()):
        assert [memory["num_private"] for memory in rank["memory"]] == [0, 0]
        assert equal(rank["second"], expected)
        assert equal(rank["first"], {name: tensor * 2 for name, tensor in expected.items()})


@both_dtypes
def test_damaged_file_is_an_error_on_every_rank(two_ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    two_ranks.run(cases.save_plain, "llama", str(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    errors = two_ranks.run(cases.load_damaged, str(tmp_path), dtype, efficient_config())
    assert errors[0] == errors[1] != ""


@both_dtypes
@pytest.mark.parametrize("given", ["copied", "mapped", "no"])
def test_private_weights_are_a_warning_with_their_size(
    two_ranks: Ranks, tmp_path: Path, dtype: str, given: str
) -> None:
    two_ranks.run(cases.save_plain, "llama", str(tmp_path))
    arguments = (str(tmp_path), dtype, efficient_config(), given)
    (printed, memory), _ = two_ranks.run(cases.load_given_weights, *arguments)
    is_private = given == "copied" or (given == "mapped" and dtype != "float32")
    assert (memory["num_private"] > 0) == is_private
    assert ("FSDP-W660" in printed and "kB on each rank" in printed) == is_private


@both_versions
def test_model_that_a_script_creates_on_meta_is_filled(two_ranks: Ranks, version: int) -> None:
    first, second = two_ranks.run(cases.prepare_meta_model, efficient_config(version))
    assert first["num_filled"] == 0 < second["num_filled"]
    assert equal(first["weights"], dict(cases.FAMILIES["llama"].build().state_dict()))
    assert row(first["report"])["status"] == "applied"


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "num_mapped"), ("float32", "num_shared")])
def test_private_memory_is_small(two_ranks: Ranks, tmp_path: Path, dtype: str, kind: str) -> None:
    two_ranks.run(cases.save_large, str(tmp_path))
    ranks = two_ranks.run(cases.private_memory_of_loading, str(tmp_path), dtype, efficient_config())
    for rank in ranks:
        assert rank["memory"][kind] > 0 == rank["memory"]["num_private"]
        assert rank["model"] > 50e6
        assert rank["grown"] < 0.2 * rank["model"]
        assert rank["peak"] < 0.4 * rank["model"]  # one tensor has a fifth of the bytes
    assert any(rank["peak"] for rank in ranks) == (kind == "num_shared")


def test_converted_weights_are_shared_one_by_one(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases.save_large, str(tmp_path), "mixtral")
    ranks = two_ranks.run(cases.private_memory_of_loading, str(tmp_path), "bfloat16", efficient_config())
    assert 0 < max(rank["peak"] for rank in ranks) < 0.25 * ranks[0]["model"] > 10e6
