"""Damaged files of a model end all ranks with one error that names file, tensor and remedy; one rank shows a bar."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import transformers as hf
from accelerate import Accelerator
from transformers import core_model_loading

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from tests.support.matrices import slow
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


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n"

DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda folder: (path := _shard_of(folder, NEEDED)).write_bytes(path.read_bytes()[:-4]),
    "empty": lambda folder: _shard_of(folder, NEEDED).write_bytes(b""),
    "broken-header": lambda folder: _shard_of(folder, NEEDED).write_bytes(b"\x04" + bytes(7) + b"{no}"),
    "missing-shard": lambda folder: _shard_of(folder, NEEDED).unlink(),
    "broken-index": lambda folder: (folder / INDEX).write_text("{"),
    "index-without-metadata": lambda folder: _edit_index(folder, lambda index: index.pop("metadata")),
    "file-outside": lambda folder: _edit_index(folder, lambda index: index["weight_map"].update({NEEDED: "../x"})),
    "absent-tensor": lambda folder: _edit_header(_shard_of(folder, NEEDED), _is_renamed),
    "other-shape": lambda folder: _edit_header(_shard_of(folder, NEEDED), lambda header: _transpose(header[NEEDED])),
    "lfs-pointer": lambda folder: _shard_of(folder, NEEDED).write_bytes(POINTER),
    "lfs-pointer-index": lambda folder: (folder / INDEX).write_bytes(POINTER),
}
"""Name -> function that damages the model in a folder."""


def _transpose_experts(folder: Path) -> None:
    """Give one matrix of all experts of a layer another shape: Transformers fuses them before it knows the shape."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    for name in weight_map:
        if name.startswith("model.layers.0.") and name.endswith(".w2.weight"):
            _edit_header(_shard_of(folder, name), lambda header, name=name: _transpose(header[name]))


def _add_tied_to_index(folder: Path) -> None:
    """List the tied weight too, which none of the files contains."""
    _edit_index(folder, lambda index: index["weight_map"].update({"lm_head.weight": NO_FILE}))
    (folder / NO_FILE).write_bytes((min(folder.glob("*.safetensors"))).read_bytes())


NO_FILE = "another.safetensors"

CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "fused-shape": ("mixtral", _transpose_experts),
    "tied": ("llama-tied", _add_tied_to_index),
}
"""Name -> family, and the change of its files."""


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


def save_shards(folder: str) -> None:
    """Save a model in several files, once for each rank."""
    if dist.get_rank() == 0:
        FAMILIES["llama"].build().save_pretrained(f"{folder}/copy0", max_shard_size="20KB")
        for rank in range(1, dist.get_world_size()):
            shutil.copytree(f"{folder}/copy0", f"{folder}/copy{rank}")
    dist.barrier()


def _load(folder: Path, config: dict[str, Any], form: str, **kwargs: Any) -> Any:
    """Load and prepare the model of a folder with one of the forms of this package."""
    if form == "accelerator":
        accelerator = fresh_accelerator(config)
    elif form == "from_pretrained":
        return hfp.from_pretrained(folder, hfp.load_spec(config, environ={}), **kwargs)
    elif form == "install":
        hfp.install(config)
        accelerator = Accelerator()
    else:
        fsdp = {"version": 2, "cpu_ram_efficient_loading": config["fsdp_config"]["fsdp_cpu_ram_efficient_loading"]}
        args = hfp.FsdpTrainingArguments(
            output_dir=f"{folder}-out", fsdp="full_shard auto_wrap", fsdp_config=fsdp, use_cpu=True, max_steps=1,
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        model = hf.AutoModelForCausalLM.from_pretrained(folder, **kwargs)
        rows = [{k: v[0] for k, v in FAMILIES["llama"].batch(0).items()}]
        hfp.FsdpTrainer(model=model, args=args, train_dataset=rows * 4).train()
        return model
    return accelerator.prepare(hf.AutoModelForCausalLM.from_pretrained(folder, **kwargs))


def _error(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except SpecError as error:
        return type(error).__name__, str(error)
    return "", ""


def errors_of_damages(
    folder: str, config: dict[str, Any], form: str, only_rank: int | None, names: list[str]
) -> dict[str, tuple[str, str]]:
    """Return damage -> class and message of the error that this rank has."""
    found = {}
    for name in names:
        copy = Path(folder) / f"copy{dist.get_rank()}"
        damaged = Path(folder) / name / str(dist.get_rank()) / "model"
        shutil.copytree(copy, damaged)
        if only_rank in (None, dist.get_rank()):
            DAMAGES[name](damaged)
        # The ranks have different folders, as they have on different machines, with the same path.
        with contextlib.chdir(damaged.parent):
            found[name] = _error(lambda: _load(Path("model"), config, form))
        dist.barrier()
    return found


@efficient_or_not
@pytest.mark.parametrize("form", ["accelerator", "install", "arguments", "from_pretrained"])
def test_damage_ends_all_ranks_with_one_error(two_ranks: Ranks, tmp_path: Path, form: str, efficient: bool) -> None:
    two_ranks.run(save_shards, str(tmp_path))
    first, second = two_ranks.run(errors_of_damages, str(tmp_path), config(efficient), form, None, list(CODES))
    assert first == second and first.keys() == DAMAGES.keys()
    for name, code in CODES.items():
        kind, message = first[name]
        assert kind == "CheckpointError" and f"[{code}]" in message and message.count("\n") == 0, (name, message)
        assert ".safetensors" in message and "rank" not in message, (name, message)
        assert NEEDED in message or name not in NAMES_TENSOR, (name, message)
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
    two_ranks.run(save_shards, str(tmp_path))
    first, second = two_ranks.run(errors_of_damages, str(tmp_path), config(False), form, 1, names)
    assert first == second
    assert all(f"[{CODES[name]}]" in first[name][1] and "rank 1: " in first[name][1] for name in names), first


@pytest.mark.slow
def test_damage_on_one_of_four_ranks_is_named_by_all(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(save_shards, str(tmp_path))
    settings = parallel_config("full_shard", 2, 4)
    errors = four_ranks.run(errors_of_damages, str(tmp_path), settings, "accelerator", 2, ["truncated"])
    assert all(found == errors[0] for found in errors)
    assert "[FSDP-E453]" in errors[0]["truncated"][1] and "rank 2: " in errors[0]["truncated"][1]


def error_of_change(folder: str, config: dict[str, Any], name: str) -> tuple[str, str]:
    """Return class and message of the error that this rank has after a change of a family's files."""
    family, change = CHANGES[name]
    if dist.get_rank() == 0:
        FAMILIES[family].build().save_pretrained(folder, max_shard_size="20KB")
        change(Path(folder))
    dist.barrier()
    return _error(lambda: _load(Path(folder), config, "accelerator"))


@efficient_or_not
def test_shape_of_fused_experts_ends_all_ranks(two_ranks: Ranks, tmp_path: Path, efficient: bool) -> None:
    first, second = two_ranks.run(error_of_change, str(tmp_path), config(efficient), "fused-shape")
    assert first == second and "[FSDP-E479]" in first[1] and "down_proj" in first[1]


@efficient_or_not
def test_index_may_list_a_tied_weight(two_ranks: Ranks, tmp_path: Path, efficient: bool) -> None:
    assert two_ranks.run(error_of_change, str(tmp_path), config(efficient), "tied") == [("", "")] * 2


def recover_on_one_rank(folder: str, config: dict[str, Any]) -> list[tuple[str, str]]:
    """Load another folder after the first could not be loaded, on rank 1 only. Return the errors of both loads."""
    accelerator = fresh_accelerator(config)
    good, bad = Path(folder) / "copy0", Path(folder) / f"copy{dist.get_rank()}"
    errors = [("", "")]
    if dist.get_rank() == 1:
        DAMAGES["empty"](bad)
        errors = [_error(lambda: hf.AutoModelForCausalLM.from_pretrained(bad))]
    return [*errors, _error(lambda: accelerator.prepare(hf.AutoModelForCausalLM.from_pretrained(good)))]


def test_rank_that_loads_another_folder_continues(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_shards, str(tmp_path))
    first, second = two_ranks.run(recover_on_one_rank, str(tmp_path), config(False))
    assert first == [("", ""), ("", "")] and "[FSDP-E453]" in second[0][1] and second[1] == ("", "")


def load_with_ignored_shapes(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Load a model with a weight of another shape, which is initialized anew."""
    copy = Path(folder) / f"copy{dist.get_rank()}"
    DAMAGES["other-shape"](copy)
    model = _load(copy, config, "accelerator", ignore_mismatched_sizes=True)
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
