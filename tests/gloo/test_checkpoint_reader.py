"""A checkpoint of any format, world size and layout is loaded bit for bit in any other."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo.cases_checkpoint_reader import (
    Layout,
    measure_reads,
    one_group,
    read,
    read_after_an_evaluation,
    read_in_bf16,
    read_mismatch,
    read_uneven_state,
    save_wide,
    write,
    write_and_read_adapters,
    write_and_read_without_state,
    write_uneven_state,
)
from tests.support.matrices import slow
from tests.support.ranks import Ranks

FSDP2: Layout = (2, "full_shard", True)
FSDP1: Layout = (1, "full_shard", True)
FLAT: Layout = (1, "full_shard", False)
WHOLE2: Layout = (2, "no_shard", True)
WHOLE1: Layout = (1, "no_shard", True)
WHOLE_FLAT: Layout = (1, "no_shard", False)
HYBRID2: Layout = (2, "hybrid_shard", True)
HYBRID1: Layout = (1, "hybrid_shard", True)
HYBRID_FLAT: Layout = (1, "hybrid_shard", False)


def name(layout: Any) -> str:
    return "-".join(map(str, layout)) if isinstance(layout, tuple) else str(layout)


def assert_same(read: dict[str, Any], written: dict[str, Any]) -> None:
    assert read["groups"] == written["groups"]
    for part in ("weights", "state"):
        assert read[part].keys() == written[part].keys() and written[part]
        different = [key for key, tensor in written[part].items() if not torch.equal(read[part][key], tensor)]
        assert different == []
    assert read["losses"] == pytest.approx(written["losses"], rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "kind", "others"),
    [
        (FSDP2, "dcp", [FSDP1, FLAT, WHOLE2, HYBRID2]),
        slow(FSDP2, "dcp", [FSDP2, WHOLE1, WHOLE_FLAT, HYBRID1, HYBRID_FLAT]),
        slow(FSDP1, "dcp", [FSDP2, FSDP1, HYBRID_FLAT]),
        (FLAT, "dcp", [FSDP2, FLAT, HYBRID1]),
        (FSDP2, "bin", [HYBRID2, FLAT]),
        slow(FSDP1, "bin", [FSDP2, HYBRID1]),
        slow(FLAT, "bin", [FSDP2, FLAT]),
        (FSDP2, "per_rank", [HYBRID2, FSDP1]),
        slow(FSDP1, "per_rank", [FSDP2, HYBRID_FLAT]),
        slow(FLAT, "per_rank", [FSDP1]),
        slow(FSDP2, "local", [FSDP2, FLAT, HYBRID1]),
        (FSDP1, "local", [FSDP2, HYBRID_FLAT]),
        slow(FLAT, "local", [FSDP2, FSDP1]),
        slow(FSDP2, "full", [FSDP1]),
        (FLAT, "full", [FSDP2]),
        (FSDP2, "sharded", [FLAT]),
        slow(FSDP1, "sharded", [HYBRID2]),
    ],
    ids=name,
)
def test_checkpoint_of_two_ranks_is_loaded_by_four(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, layout: Layout, kind: str, others: list[Layout]
) -> None:
    written = two_ranks.run(write, str(tmp_path), layout, kind)[0]
    for other in others:
        assert_same(four_ranks.run(read, str(tmp_path), other)[0], written)


@pytest.mark.parametrize(
    ("layout", "kind", "others"),
    [
        (HYBRID2, "dcp", [FSDP2, FSDP1, FLAT]),
        (HYBRID1, "dcp", [FSDP2, WHOLE1]),
        (WHOLE2, "dcp", [FSDP1]),
        slow(WHOLE_FLAT, "dcp", [FSDP2]),
        slow(FSDP2, "bin", [FSDP1, WHOLE2]),
        (FSDP2, "per_rank", [FLAT]),
        slow(HYBRID1, "local", [FSDP2]),
        (HYBRID_FLAT, "local", [FSDP2]),
    ],
    ids=name,
)
def test_checkpoint_of_four_ranks_is_loaded_by_two(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, layout: Layout, kind: str, others: list[Layout]
) -> None:
    written = four_ranks.run(write, str(tmp_path), layout, kind)[0]
    for other in others:
        assert_same(two_ranks.run(read, str(tmp_path), other)[0], written)


@pytest.mark.parametrize(
    ("layout", "other"),
    [(FSDP2, FSDP2), slow(FLAT, FLAT), slow(FSDP1, FSDP1), slow(FSDP2, FLAT), slow(FSDP1, FSDP2)],
    ids=name,
)
def test_load_reads_and_allocates_what_it_returns(
    two_ranks: Ranks, tmp_path: Path, layout: Layout, other: Layout
) -> None:
    kinds = ["sharded", "local", "full"]
    two_ranks.run(save_wide, str(tmp_path), layout, kinds)
    # To compare hashes, whole blocks of up to 1 MB are read. The tensors of this model are smaller.
    for rank in two_ranks.run(measure_reads, str(tmp_path), other, kinds, layout == other):
        assert_bounded(rank)


@pytest.mark.slow
@pytest.mark.parametrize("other", [FSDP2, HYBRID2, FLAT], ids=name)
def test_load_with_more_ranks_reads_what_it_returns(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, other: Layout
) -> None:
    kinds = ["sharded", "local", "full"]
    two_ranks.run(save_wide, str(tmp_path), FSDP2, kinds)
    for rank in four_ranks.run(measure_reads, str(tmp_path), other, kinds, False):
        assert_bounded(rank)


def assert_bounded(rank: list[dict[str, int]]) -> None:
    """Assert that reads are at most 5% more than what is loaded, and memory 10% and one unit more."""
    for found in rank:
        assert 0.99 * found["loaded"] <= found["read"] < 1.05 * found["loaded"], found
        assert found["peak"] < found["new"] + 0.1 * found["loaded"] + found["unit"], found


@pytest.mark.slow
def test_one_and_three_ranks_load_a_checkpoint_of_two(
    one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path
) -> None:
    written = two_ranks.run(write, str(tmp_path), FSDP2, "dcp")[0]
    for layout in (FSDP2, FSDP1, FLAT):
        assert_same(one_rank.run(read, str(tmp_path), layout)[0], written)
        three = three_ranks.run(read, str(tmp_path), layout)[0]
        # Eight samples are divided differently among three ranks, so the losses differ.
        assert_same({**three, "losses": written["losses"]}, written)


@pytest.mark.parametrize("kind", ["dcp", slow("bin"), slow("full")])
@pytest.mark.parametrize("layout", [FSDP2, slow(FSDP1), FLAT], ids=name)
def test_tied_weights_are_loaded_under_either_name(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, layout: Layout, kind: str
) -> None:
    written = two_ranks.run(write, str(tmp_path), layout, kind, tied=True)[0]
    for other in (FSDP2, FSDP1, HYBRID_FLAT):
        back = four_ranks.run(read, str(tmp_path), other, tied=True)[0]
        assert back["losses"] == pytest.approx(written["losses"], rel=1e-4)
        for part in ("weights", "state"):
            for key in back[part].keys() & written[part].keys():
                assert torch.equal(back[part][key], written[part][key])
        assert "model.embed_tokens.weight" in back["weights"].keys() & written["weights"].keys()


@pytest.mark.parametrize(
    "layout", [(1, "shard_grad_op", True), (1, "shard_grad_op", False), (2, "shard_grad_op", True)]
)
def test_weights_loaded_after_an_evaluation_are_trained(two_ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    written = two_ranks.run(write, str(tmp_path), FSDP2, "dcp")[0]
    assert two_ranks.run(read_after_an_evaluation, str(tmp_path), layout)[0]["losses"] == pytest.approx(
        written["losses"], rel=1e-5
    )


@pytest.mark.parametrize(("layout", "other"), [(FSDP2, FSDP1), (FSDP1, FSDP2), (FSDP2, FLAT)])
def test_optimizer_without_state_loads_hyperparameters(
    two_ranks: Ranks, tmp_path: Path, layout: Layout, other: Layout
) -> None:
    assert two_ranks.run(write_and_read_without_state, str(tmp_path), layout, other)[0] == {"lr": 0.5, "state": 0}


@pytest.mark.parametrize("layout", [FSDP2, FSDP1])
def test_weights_are_cast_to_the_dtype_of_the_model(two_ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    written = two_ranks.run(write, str(tmp_path), FSDP2, "dcp")[0]["weights"]
    for key, tensor in two_ranks.run(read_in_bf16, str(tmp_path), layout)[0].items():
        assert torch.equal(tensor, written[key].to(torch.bfloat16)), key


@pytest.mark.parametrize("layout", [FSDP2, FSDP1, FLAT], ids=name)
def test_other_architecture_is_refused_with_all_differences(two_ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    found = two_ranks.run(read_mismatch, str(tmp_path), layout, layers=3)
    assert found[0] == found[1]
    assert found[0]["unchanged"]
    codes, text = found[0]["model"]
    assert codes == ["FSDP-E421"] and " 9 tensors " in text and ": model.layers.2." in text
    assert "LlamaForCausalLM (llama)" in text
    fewer = two_ranks.run(read_mismatch, str(tmp_path), layout, layers=1)[0]
    codes, text = fewer["model"]
    assert codes == ["FSDP-E422"] and " 9 tensors " in text and ": model.layers.1." in text
    codes, text = fewer["optimizer"]
    assert codes == ["FSDP-E425"] and "only in the checkpoint: model.layers.1." in text
    assert fewer["unchanged"]


def test_other_parameter_groups_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    found = two_ranks.run(read_mismatch, str(tmp_path), FSDP1, optimizer=one_group)[0]
    codes, text = found["optimizer"]
    assert codes == ["FSDP-E425"] and "1 parameter group of 21 " in text and "2 parameter groups of 18 + 3 " in text
    assert "model" not in found


def test_checkpoint_without_optimizer_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    shutil.rmtree(tmp_path / "optimizer_0")
    found = two_ranks.run(read_mismatch, str(tmp_path), FSDP2)
    assert found[0] == found[1]
    assert found[0]["optimizer"][0] == ["FSDP-E424"]


def test_failure_of_one_rank_stops_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    found = two_ranks.run(read_mismatch, str(tmp_path), FSDP2, broken_on=1)
    for rank in found:
        assert "rank 1" in rank["model"][1] and "nowhere" in rank["model"][1]
        assert "rank 1" in rank["optimizer"][1]
        assert rank["unchanged"]


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_missing_or_truncated_file_changes_no_weight(two_ranks: Ranks, tmp_path: Path, damage: str) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        file = tmp_path / folder / "__1_0.distcp"
        if damage == "missing":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size - 1000)
    found = two_ranks.run(read_mismatch, str(tmp_path), FSDP1)
    assert found[0] == found[1]
    for part in ("model", "optimizer"):
        codes, text = found[0][part]
        assert codes == ["FSDP-E457" if damage == "missing" else "FSDP-E453"] and "__1_0.distcp" in text
    assert found[0]["unchanged"]


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("other", [FSDP2, FSDP1], ids=name)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_adapters_alone_are_loaded(two_ranks: Ranks, tmp_path: Path, other: Layout, kind: str) -> None:
    result = two_ranks.run(write_and_read_adapters, str(tmp_path), FSDP2, other, kind)[0]
    adapters = {key for key in result["read"] if "lora_" in key or "modules_to_save" in key}
    assert len(adapters) == 9
    for key, tensor in result["read"].items():
        assert torch.equal(tensor, result["written" if key in adapters else "fresh"][key]), key
    assert set(result["missing"]) == result["read"].keys() - adapters
    assert "FSDP-E421" in result["refused"]


def test_different_steps_per_parameter_are_loaded(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write_uneven_state, str(tmp_path), FSDP2)
    for layout in (FSDP2, FSDP1, HYBRID1):
        ranks = four_ranks.run(read_uneven_state, str(tmp_path), layout)
        steps = {name: step for rank in ranks for name, step in rank["steps"].items()}
        assert "model.norm.weight" not in steps
        assert len(steps) == 20
        assert steps.pop("lm_head.weight") == 2.0
        assert set(steps.values()) == {3.0}
        assert all(rank["logged"] == [] for rank in ranks)


def test_flat_parameter_has_one_step_and_a_warning(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write_uneven_state, str(tmp_path), FSDP2)
    for rank in two_ranks.run(read_uneven_state, str(tmp_path), FLAT):
        assert set(rank["steps"].values()) == {3.0}
        (message,) = rank["logged"]
        assert "different values of the optimizer's 'step'" in message and " 3.0" in message
        assert rank["norm"] == 0.0
