"""A tensor that the files of a model lack is an error that names it; one rank shows a bar."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import transformers as hf
from transformers import core_model_loading

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from tests.support.model_families import FAMILIES
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import fresh_accelerator

INDEX = "model.safetensors.index.json"

NEEDED = "model.layers.1.mlp.up_proj.weight"


def _edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


def _edit_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def _shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def _transpose(entry: dict[str, Any]) -> None:
    entry["shape"].reverse()


def _is_renamed(header: dict[str, Any]) -> None:
    header["another.name"] = header.pop(NEEDED)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "broken-index": lambda folder: (folder / INDEX).write_text("{"),
    "absent-tensor": lambda folder: _edit_header(_shard_of(folder, NEEDED), _is_renamed),
    "other-shape": lambda folder: _edit_header(_shard_of(folder, NEEDED), lambda header: _transpose(header[NEEDED])),
}
"""Name -> function that damages the model in a folder."""


def _add_tied_to_index(folder: Path) -> None:
    """List the tied weight too, which none of the files contains."""
    _edit_index(folder, lambda index: index["weight_map"].update({"lm_head.weight": NO_FILE}))
    (folder / NO_FILE).write_bytes((min(folder.glob("*.safetensors"))).read_bytes())


NO_FILE = "another.safetensors"


efficient_or_not = pytest.mark.parametrize("efficient", [False, True], ids=["plain", "ram-efficient"])


def config(efficient: bool) -> dict[str, Any]:
    return parallel_config("full_shard", 2, 2, fsdp_cpu_ram_efficient_loading=efficient)


def save_shards(folder: str) -> None:
    """Save a model in several files, once for each rank."""
    if dist.get_rank() == 0:
        FAMILIES["llama"].build().save_pretrained(f"{folder}/copy0", max_shard_size="20KB")
        for rank in range(1, dist.get_world_size()):
            shutil.copytree(f"{folder}/copy0", f"{folder}/copy{rank}")
    dist.barrier()


def _load(folder: Path, config: dict[str, Any], **kwargs: Any) -> Any:
    """Load and prepare the model of a folder."""
    accelerator = fresh_accelerator(config)
    return accelerator.prepare(hf.AutoModelForCausalLM.from_pretrained(folder, **kwargs))


def _error(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except SpecError as error:
        return type(error).__name__, str(error)
    return "", ""


def error_of_absent_tensor(folder: str, config: dict[str, Any]) -> tuple[str, str]:
    copy = Path(folder) / f"copy{dist.get_rank()}"
    DAMAGES["absent-tensor"](copy)
    return _error(lambda: _load(copy, config))


@efficient_or_not
def test_tensor_that_no_file_contains_is_an_error(two_ranks: Ranks, tmp_path: Path, efficient: bool) -> None:
    two_ranks.run(save_shards, str(tmp_path))
    for _, message in two_ranks.run(error_of_absent_tensor, str(tmp_path), config(efficient)):
        assert "[FSDP-E459]" in message and NEEDED in message


def error_of_tied(folder: str, config: dict[str, Any]) -> tuple[str, str]:
    if dist.get_rank() == 0:
        FAMILIES["llama-tied"].build().save_pretrained(folder, max_shard_size="20KB")
        _add_tied_to_index(Path(folder))
    dist.barrier()
    return _error(lambda: _load(Path(folder), config))


@efficient_or_not
def test_index_may_list_a_tied_weight(two_ranks: Ranks, tmp_path: Path, efficient: bool) -> None:
    assert two_ranks.run(error_of_tied, str(tmp_path), config(efficient)) == [("", "")] * 2


def load_with_ignored_shapes(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Load a model with a weight of another shape, which is initialized anew."""
    copy = Path(folder) / f"copy{dist.get_rank()}"
    DAMAGES["other-shape"](copy)
    model = _load(copy, config, ignore_mismatched_sizes=True)
    return {"num_parameters": sum(1 for _ in model.parameters())}


@efficient_or_not
def test_ignored_shape_mismatch_is_loaded(two_ranks: Ranks, tmp_path: Path, efficient: bool) -> None:
    two_ranks.run(save_shards, str(tmp_path))
    first, second = two_ranks.run(load_with_ignored_shapes, str(tmp_path), config(efficient))
    assert first == second


def stock_error(folder: str) -> str:
    """Return the class of the error without FSDP settings."""
    copy = Path(folder) / f"copy{dist.get_rank()}"
    DAMAGES["broken-index"](copy)
    hfp.install({})
    try:
        hf.AutoModelForCausalLM.from_pretrained(copy)
    except Exception as error:
        return type(error).__name__
    return ""


def test_errors_without_fsdp_settings_are_unchanged(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_shards, str(tmp_path))
    assert two_ranks.run(stock_error, str(tmp_path)) == ["JSONDecodeError"] * 2


def shows_bar(folder: str, config: dict[str, Any] | None) -> bool:
    """Return whether Transformers may show its bar on this rank while it loads a model."""
    if config is not None:
        fresh_accelerator(config)
    shown = []
    original = core_model_loading.tqdm

    def recorded(items: Any, **kwargs: Any) -> Any:
        shown.append(hf.utils.logging.is_progress_bar_enabled())
        return original(items, **kwargs)

    core_model_loading.tqdm = recorded  # type: ignore[assignment]
    try:
        hf.AutoModelForCausalLM.from_pretrained(Path(folder) / f"copy{dist.get_rank()}")
    finally:
        core_model_loading.tqdm = original
    (is_shown,) = shown
    return is_shown and hf.utils.logging.is_progress_bar_enabled()


def test_one_rank_shows_the_bar_of_transformers(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_shards, str(tmp_path))
    assert two_ranks.run(shows_bar, str(tmp_path), config(False)) == [True, False]
    assert two_ranks.run(shows_bar, str(tmp_path), None) == [True, True]
