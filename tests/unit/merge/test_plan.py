"""The plan of a merge: tied names, dtypes, adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint.formats.boxes import row_major, whole_box
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, StoredPiece, StoredTensor
from hf_fsdp_plugin.checkpoint.names import is_adapter
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.merge.merge_plan import plan_merge

GB = 10**9


def index_of(**tensors: tuple[str, tuple[int, ...], int]) -> StoredModel:
    """Each keyword is a name (with ``__`` for the dot), with dtype, shape and byte offset in a single file."""
    found = {}
    for key, (dtype, shape, offset) in tensors.items():
        name = key.replace("__", ".")
        piece = StoredPiece(whole_box(shape), "f", offset, row_major(shape))
        found[name] = StoredTensor(name, dtype, shape, (piece,))
    return StoredModel(Path("run"), "dcp", found, ())


def test_names_that_share_bytes_are_written_once() -> None:
    index = index_of(lm_head__weight=("float32", (4, 2), 0), model__embed__weight=("float32", (4, 2), 0))
    plan = plan_merge(index, [], dtype=None, max_shard_size=GB)
    assert dict(plan.aliases) == {"lm_head.weight": "model.embed.weight"}
    assert list(plan.files[0].offsets) == ["model.embed.weight"]


def test_overlapping_groups_of_ties_are_merged() -> None:
    parts = dict.fromkeys(("a__w", "b__w", "c__w"), ("float32", (2,), 0))
    index = index_of(**{name: (dtype, shape, 8 * at) for at, (name, (dtype, shape, _)) in enumerate(parts.items())})
    plan = plan_merge(index, [("b.w", "c.w"), ("a.w", "b.w"), ("c.w", "gone.w")], dtype=None, max_shard_size=GB)
    assert dict(plan.aliases) == {"c.w": "a.w", "b.w": "a.w"}


def test_empty_tensors_are_not_tied() -> None:
    index = index_of(a__w=("float32", (0,), 0), b__w=("float32", (0,), 0))
    assert dict(plan_merge(index, [], dtype=None, max_shard_size=GB).aliases) == {}


def test_only_floating_point_tensors_are_converted() -> None:
    index = index_of(a__w=("float32", (2,), 0), b__w=("int64", (2,), 8), c__w=("float8_e4m3fn", (2,), 24))
    plan = plan_merge(index, [], dtype="bfloat16", max_shard_size=GB)
    assert dict(plan.dtypes) == {"a.w": "bfloat16", "b.w": "int64", "c.w": "float8_e4m3fn"}


def test_checkpoint_without_tensors_is_refused() -> None:
    with pytest.raises(CheckpointError, match="FSDP-E451"):
        plan_merge(StoredModel(Path("run"), "dcp", {}, ()), [], dtype=None, max_shard_size=GB)


def test_adapter_is_one_file_with_the_name_of_peft() -> None:
    name = "base_model__model__q_proj__lora_A__weight"
    index = index_of(**{name: ("float32", (100,), 0), name.replace("A", "B"): ("float32", (100,), 400)})
    plan = plan_merge(index, [], dtype=None, max_shard_size=1)
    assert plan.adapter
    assert [file.name for file in plan.files] == ["adapter_model.safetensors"]


def test_model_with_adapter_is_not_an_adapter() -> None:
    assert not is_adapter(["base_model.model.q_proj.base_layer.weight", "base_model.model.q_proj.lora_A.weight"])
    assert not is_adapter(["model.norm.weight"])
