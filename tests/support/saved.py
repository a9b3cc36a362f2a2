"""Small checkpoints for tests, in the format of this package or written by torch and Transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
from safetensors.numpy import save_file

from hf_fsdp_plugin.checkpoint.formats import manifest as manifests
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange, FileRecord, Manifest, hash_file, record_file
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.tools.verify.verification import Verdict, verify

Places = Mapping[str, list[tuple[int, int, str]]]
"""File -> start, stop and name of the tensors in it."""

SHAPES = {"embed.weight": (4, 2), "norm.weight": (2,), "head.weight": (4, 2)}
"""Shapes of the local checkpoint; ``head.weight`` is tied to ``embed.weight``."""


FACTS: dict[str, Any] = {
    "kind": "local", "backend": "fsdp2", "world_size": 2, "mesh": {"shard": 2}, "strategy": "full_shard", "step": 20,
    "asynchronous": True, "created": "2026-01-02T03:04:05+00:00", "versions": {"torch": "2.13.0"},
    "settings": {"fsdp.version": 2, "wrap.classes": ["LlamaDecoderLayer"]}, "batch": {"per_device": 4},
}  # fmt: skip
"""The fields of the manifests, without parameters and files."""


def manifest(**changed: Any) -> Manifest:
    """Return a manifest with a value in every field."""
    contents: dict[str, Any] = {"parameters": {}, "ties": (), "files": ()}
    return Manifest(**(FACTS | contents | changed))


def write_manifest(folder: Path, *, places: Places | None = None, **changed: Any) -> Manifest:
    """Write the manifest of the files in a folder, with a range for each tensor and for the bytes between them."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST_NAME]
    names = [path.relative_to(folder).as_posix() for path in paths]
    written = manifest(files=tuple(_record(folder, name, (places or {}).get(name)) for name in names), **changed)
    manifests.write_manifest(folder, written)
    return written


def _record(folder: Path, relative: str, places: list[tuple[int, int, str]] | None) -> FileRecord:
    if places is None:
        return record_file(folder, relative)
    path, ranges, at = folder / relative, [], 0
    size = path.stat().st_size
    for start, stop, name in [*sorted(places), (size, size, "")]:
        if at < start:
            ranges.append(FileRange(start=at, stop=start, hash=hash_file(path, at, start)))
        if start < stop:
            ranges.append(FileRange(start=start, stop=stop, hash=hash_file(path, start, stop), name=name))
        at = stop
    return FileRecord(path=relative, size=size, ranges=tuple(ranges))


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], metadata: dict[str, str]
) -> list[tuple[int, int, str]]:
    """Write float32 tensors of random numbers. Return the start, the stop and the name of each in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(len(str(path)))
    save_file({name: draw.random(shape, dtype="f4") for name, shape in shapes.items()}, path, metadata)
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    offsets = {name: entry["data_offsets"] for name, entry in json.loads(data[8:begin]).items() if name in shapes}
    return [(begin + start, begin + stop, name) for name, (start, stop) in offsets.items()]


def write_shards(
    folder: Path,
    tensors: Mapping[str, Any],
    *,
    state: Mapping[str, Mapping[str, Any]] | None = None,
    groups: tuple[dict[str, Any], ...] = (),
    aliases: Mapping[str, str] | None = None,
    world_size: int = 2,
    ranks: Iterable[int] | None = None,
) -> Places:
    """Write a model, and an optimizer if there is state, as the ranks of a run do: rows of each tensor on each rank.

    Args:
        tensors: name -> array. Scalars are whole on every rank.
        state: parameter -> key -> array or plain value.
        ranks: the ranks that write; by default, all.
    """
    import torch.distributed as dist

    from hf_fsdp_plugin.checkpoint.saved_state import ModelShards, OptimizerShards
    from hf_fsdp_plugin.checkpoint.writing.dcp_files import complete_folders
    from hf_fsdp_plugin.checkpoint.writing.file_parts import PartWriter
    from hf_fsdp_plugin.checkpoint.writing.state_files import model_files, optimizer_files

    records, entries = [], []
    for rank in range(world_size) if ranks is None else ranks:
        with mock.patch.multiple(dist, get_rank=lambda at=rank: at, get_world_size=lambda: world_size):
            shards = tuple(_shard(name, whole, rank, world_size) for name, whole in tensors.items())
            files = [model_files(ModelShards(shards, aliases or {}), "local")]
            if state is not None:
                held = {
                    name: {
                        key: _shard(f"state.{name}.{key}", value, rank, world_size)
                        if hasattr(value, "shape")
                        else value
                        for key, value in entry.items()
                    }
                    for name, entry in state.items()
                }
                files.append(optimizer_files(OptimizerShards(held, groups)))
        for each in files:
            records += PartWriter().write(folder, each.parts)
        entries.append([own for each in files for own in each.entries])
    records += complete_folders(folder, entries)
    return {record.path: [(part.start, part.stop, part.name) for part in record.ranges] for record in records}


def _shard(name: str, whole: Any, rank: int, world_size: int) -> Any:
    import torch

    from hf_fsdp_plugin.checkpoint.formats.boxes import Box
    from hf_fsdp_plugin.checkpoint.saved_state import LocalShard, Piece

    tensor = torch.from_numpy(numpy.array(whole))
    parts = numpy.array_split(numpy.arange(len(whole)), world_size) if whole.ndim else []
    box, own = Box((), ()), tensor
    if whole.ndim:
        start, count = sum(map(len, parts[:rank])), len(parts[rank])
        own = tensor[start : start + count]
        box = Box((start, *(0 for _ in whole.shape[1:])), tuple(own.shape))
    return LocalShard(name, tensor.dtype, tuple(tensor.shape), (Piece(box, own.contiguous()),))


def local_checkpoint(folder: Path, world_size: int = 2, **trainer_state: Any) -> Path:
    """Write a checkpoint with ``fsdp_state_dict_type: LOCAL``: rows of each tensor, and Adam's first moment.

    Args:
        trainer_state: further fields of ``trainer_state.json``.
    """
    draw = numpy.random.default_rng(len(str(folder)))
    names = [name for name in SHAPES if name != "head.weight"]
    places = write_shards(
        folder,
        {name: draw.random(SHAPES[name], dtype="f4") for name in names},
        state={name: {"exp_avg": draw.random(SHAPES[name], dtype="f4"), "step": 20.0} for name in names},
        groups=({"params": names, "lr": 0.001},),
        aliases={"head.weight": "embed.weight"},
        world_size=world_size,
    )
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 20, **trainer_state}))
    write_manifest(
        folder,
        places=places,
        world_size=world_size,
        parameters={name: ("float32", shape) for name, shape in SHAPES.items()},
        ties=(("embed.weight", "head.weight"),),
    )
    return folder


def tiny_llama(vocab_size: int = 32, *, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def stock_checkpoint(folder: Path, model: Any, step: int = 7) -> Path:
    """Write a checkpoint as the Trainer does with ``fsdp_state_dict_type: SHARDED``, from one rank."""
    import torch
    import torch.distributed.checkpoint as dcp

    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long)).loss.backward()
    optimizer.step()
    state = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": list(state)}]
    for entries, part in (
        ({"model": model.state_dict()}, "pytorch_model_fsdp_0"),
        ({"optimizer": {"state": state, "param_groups": groups}}, "optimizer_0"),
    ):
        dcp.save(entries, storage_writer=dcp.FileSystemWriter(folder / part), no_dist=True)
    torch.save({"last_epoch": step}, folder / "scheduler.pt")
    for rank in range(2):
        torch.save({"python": rank}, folder / f"rng_state_{rank}.pth")
    model.config.save_pretrained(folder)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def any_checkpoint(folder: Path, kind: str) -> Path:
    """Write a local checkpoint, or for every other kind one of the Trainer without ``config.json`` and manifest.

    With the config, each comparison with the model takes seconds.
    """
    if kind == "local":
        return local_checkpoint(folder)
    stock_checkpoint(folder, tiny_llama())
    (folder / "config.json").unlink()
    return folder


def errors(verdict: Verdict) -> list[str]:
    return [str(problem) for problem in verdict.problems if problem.severity == "error"]


def notes(verdict: Verdict) -> list[str]:
    return [str(problem) for problem in verdict.problems if problem.severity == "note"]


def only_error(folder: Path, code: str, **options: Any) -> str:
    """Verify a checkpoint that must have one error, with this code. Returns its text."""
    found = [problem for problem in verify(folder, **options).problems if problem.severity == "error"]
    assert [problem.code for problem in found] == [code], found
    return str(found[0])
