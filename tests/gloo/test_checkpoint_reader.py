"""A checkpoint of any format, world and layout comes back bit for bit in any other."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_checkpoint_reader import (
    Layout,
    one_group,
    read,
    read_after_an_evaluation,
    read_in_bf16,
    read_uneven_state,
    read_wrongly,
    write,
    write_and_read_adapters,
    write_and_read_without_state,
    write_uneven_state,
)
from ranks import Ranks

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
        (FSDP2, "dcp", [FSDP2, FSDP1, FLAT, WHOLE2, WHOLE1, WHOLE_FLAT, HYBRID2, HYBRID1, HYBRID_FLAT]),
        (FSDP1, "dcp", [FSDP2, FSDP1, HYBRID_FLAT]),
        (FLAT, "dcp", [FSDP2, FLAT, HYBRID1]),
        (FSDP2, "bin", [HYBRID2, FLAT]),
        (FSDP1, "bin", [FSDP2, HYBRID1]),
        (FLAT, "bin", [FSDP2, FLAT]),
        (FSDP2, "per_rank", [HYBRID2, FSDP1]),
        (FSDP1, "per_rank", [FSDP2, HYBRID_FLAT]),
        (FLAT, "per_rank", [FSDP1]),
        (FSDP2, "local", [FSDP2, FLAT, HYBRID1]),
        (FSDP1, "local", [FSDP2, HYBRID_FLAT]),
        (FLAT, "local", [FSDP2, FSDP1]),
        (FSDP2, "full", [FSDP1]),
        (FLAT, "full", [FSDP2]),
        (FSDP2, "sharded", [FLAT]),
        (FSDP1, "sharded", [HYBRID2]),
    ],
    ids=name,
)
def test_what_two_ranks_wrote_is_read_by_four(
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
        (WHOLE_FLAT, "dcp", [FSDP2]),
        (FSDP2, "bin", [FSDP1, WHOLE2]),
        (FSDP2, "per_rank", [FLAT]),
        (HYBRID1, "local", [FSDP2]),
        (HYBRID_FLAT, "local", [FSDP2]),
    ],
    ids=name,
)
def test_what_four_ranks_wrote_is_read_by_two(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, layout: Layout, kind: str, others: list[Layout]
) -> None:
    written = four_ranks.run(write, str(tmp_path), layout, kind)[0]
    for other in others:
        assert_same(two_ranks.run(read, str(tmp_path), other)[0], written)


def test_one_and_three_ranks_read_it_too(one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path) -> None:
    written = two_ranks.run(write, str(tmp_path), FSDP2, "dcp")[0]
    for layout in (FSDP2, FSDP1, FLAT):
        assert_same(one_rank.run(read, str(tmp_path), layout)[0], written)
        three = three_ranks.run(read, str(tmp_path), layout)[0]
        # The batch of eight is dealt to three ranks otherwise, and so are the losses.
        assert_same({**three, "losses": written["losses"]}, written)


@pytest.mark.parametrize("kind", ["dcp", "bin", "full"])
@pytest.mark.parametrize("layout", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow), FLAT], ids=name)
def test_tied_weights_come_back_under_either_name(
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
def test_weights_loaded_after_an_evaluation_are_those_that_train(
    two_ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    written = two_ranks.run(write, str(tmp_path), FSDP2, "dcp")[0]
    assert two_ranks.run(read_after_an_evaluation, str(tmp_path), layout)[0]["losses"] == pytest.approx(
        written["losses"], rel=1e-5
    )


@pytest.mark.parametrize(("layout", "other"), [(FSDP2, FSDP1), (FSDP1, FSDP2), (FSDP2, FLAT)])
def test_an_optimizer_that_keeps_nothing_gets_its_hyperparameters(
    two_ranks: Ranks, tmp_path: Path, layout: Layout, other: Layout
) -> None:
    assert two_ranks.run(write_and_read_without_state, str(tmp_path), layout, other)[0] == {"lr": 0.5, "state": 0}


@pytest.mark.parametrize("layout", [FSDP2, FSDP1])
def test_weights_are_cast_to_the_dtype_of_the_model(two_ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    written = two_ranks.run(write, str(tmp_path), FSDP2, "dcp")[0]["weights"]
    for key, tensor in two_ranks.run(read_in_bf16, str(tmp_path), layout)[0].items():
        assert torch.equal(tensor, written[key].to(torch.bfloat16)), key


@pytest.mark.parametrize("layout", [FSDP2, FSDP1, FLAT], ids=name)
def test_another_architecture_is_told_by_all_its_differences_and_nothing_is_changed(
    two_ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    said = two_ranks.run(read_wrongly, str(tmp_path), layout, layers=3)
    assert said[0] == said[1]
    assert said[0]["untouched"]
    message = said[0]["model"]
    assert "holds nothing for 9 tensors of the model: model.layers.2." in message
    assert "Load it into the model that it was saved from, a LlamaForCausalLM (llama)" in message
    fewer = two_ranks.run(read_wrongly, str(tmp_path), layout, layers=1)[0]
    assert "holds 9 tensors that the model does not have: model.layers.1." in fewer["model"]
    assert "only among the saved are model.layers.1." in fewer["optimizer"]
    assert fewer["untouched"]


def test_other_parameter_groups_are_told(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    said = two_ranks.run(read_wrongly, str(tmp_path), FSDP1, optimizer=one_group)[0]
    assert "the optimizer has 1 parameter group of 21 parameters, the checkpoint 2 of 18 + 3" in said["optimizer"]
    assert "the same parameters are dealt out otherwise" in said["optimizer"]
    assert "model" not in said


def test_a_checkpoint_without_an_optimizer_is_told(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    shutil.rmtree(tmp_path / "optimizer_0")
    said = two_ranks.run(read_wrongly, str(tmp_path), FSDP2)
    assert said[0] == said[1]
    assert "holds no optimizer state. Resume from a checkpoint that was saved with it" in said[0]["optimizer"]


def test_what_one_rank_cannot_read_stops_all_before_a_weight_changes(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    said = two_ranks.run(read_wrongly, str(tmp_path), FSDP2, broken_on=1)
    for rank in said:
        assert "rank 1" in rank["model"] and "nowhere" in rank["model"]
        assert "rank 1" in rank["optimizer"]
        assert rank["untouched"]


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_file_that_is_gone_or_cut_short_is_told_before_a_weight_changes(
    two_ranks: Ranks, tmp_path: Path, damage: str
) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        file = tmp_path / folder / "__1_0.distcp"
        if damage == "gone":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size - 1000)
    said = two_ranks.run(read_wrongly, str(tmp_path), FSDP1)
    assert said[0] == said[1]
    assert "__1_0.distcp" in said[0]["model"] and "__1_0.distcp" in said[0]["optimizer"]
    assert said[0]["untouched"]


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("other", [FSDP2, FSDP1], ids=name)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_adapters_alone_are_read_under_the_names_that_peft_gives_them(
    two_ranks: Ranks, tmp_path: Path, other: Layout, kind: str
) -> None:
    result = two_ranks.run(write_and_read_adapters, str(tmp_path), FSDP2, other, kind)[0]
    adapters = {key for key in result["read"] if "lora_" in key or "modules_to_save" in key}
    assert len(adapters) == 9
    for key, tensor in result["read"].items():
        assert torch.equal(tensor, result["written" if key in adapters else "fresh"][key]), key
    assert set(result["lacking"]) == result["read"].keys() - adapters
    assert "holds nothing for" in result["refused"]


def test_parameters_without_saved_state_have_none_and_counts_stay_their_own(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(write_uneven_state, str(tmp_path), FSDP2)
    for layout in (FSDP2, FSDP1, HYBRID1):
        ranks = four_ranks.run(read_uneven_state, str(tmp_path), layout)
        steps = {name: step for rank in ranks for name, step in rank["steps"].items()}
        assert "model.norm.weight" not in steps
        assert len(steps) == 20
        assert steps.pop("lm_head.weight") == 2.0
        assert set(steps.values()) == {3.0}
        assert all(rank["told"] == [] for rank in ranks)


def test_one_flat_parameter_has_one_count_and_that_is_told(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write_uneven_state, str(tmp_path), FSDP2)
    for rank in two_ranks.run(read_uneven_state, str(tmp_path), FLAT):
        assert set(rank["steps"].values()) == {3.0}
        [told] = rank["told"]
        assert "several values of the optimizer's 'step'" in told and "3.0 is taken for all" in told
        assert rank["norm"] == 0.0
