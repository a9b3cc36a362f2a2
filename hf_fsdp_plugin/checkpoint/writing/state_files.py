"""Model and optimizer state in the files that Accelerate and the Trainer look for.

The names are the host's, so that its tools read what we write:

===========  ==============================================  ==========================================
kind         model                                           optimizer
===========  ==============================================  ==========================================
``sharded``  ``pytorch_model_fsdp_0/``, torch's sharded      ``optimizer_0/``, torch's sharded layout
             layout
``full``     ``model.safetensors`` (and its index), as       ``optimizer_0/``, torch's sharded layout:
             ``from_pretrained`` reads it                    nobody needs it in one piece
``local``    ``pytorch_model_fsdp_local/``, a safetensors    ``optimizer_local/``, likewise
             file a rank
===========  ==============================================  ==========================================

Whatever the kind, every rank writes its own shards from where they lie in memory, and reads only what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.checkpoint.formats.boxes import slices, whole
from hf_fsdp_plugin.checkpoint.io import write_text
from hf_fsdp_plugin.checkpoint.names import (
    FSDP_MODEL,
    HF_MODEL,
    OPTIMIZER,
    index_file,
    local_file,
    local_folder,
    numbered,
    numbered_from_one,
    safetensors_file,
)
from hf_fsdp_plugin.checkpoint.shards import Held, ModelShards, OptimizerShards, model_shards, optimizer_shards, owned
from hf_fsdp_plugin.checkpoint.writing.dcp import DcpPart, StatePath, dcp_file, last_files, plain_value, scalar
from hf_fsdp_plugin.checkpoint.writing.images import FileImage
from hf_fsdp_plugin.checkpoint.writing.safetensors_files import (
    MAX_SHARD_SIZE,
    full_files,
    local_model_file,
    local_optimizer_file,
)
from hf_fsdp_plugin.checkpoint.writing.save import open_save
from hf_fsdp_plugin.checkpoint.writing.write import write_live
from hf_fsdp_plugin.spec.model import StateDictKind


@dataclass(frozen=True, slots=True)
class StateFiles:
    """This rank's part of a model's or an optimizer's files.

    Attributes:
        texts: small files that rank 0 adds, by name.
    """

    images: list[FileImage]
    dcp: tuple[DcpPart, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()


def model_files(
    shards: ModelShards, kind: StateDictKind, index: int = 0, *, max_shard_size: int = MAX_SHARD_SIZE
) -> StateFiles:
    """Where this rank's part of a model goes. No communication."""
    rank = dist.get_rank()
    if kind == "full":
        stem = numbered_from_one(HF_MODEL, index)
        images, index_text = full_files(shards.tensors, rank, stem=stem, max_shard_size=max_shard_size)
        return StateFiles(images, texts=((index_file(safetensors_file(stem)), index_text),) if index_text else ())
    if kind == "local":
        path = f"{local_folder(FSDP_MODEL)}/{local_file(index, rank)}"
        return StateFiles([local_model_file(path, shards.tensors, shards.aliases, rank, dist.get_world_size())])
    scalars = [held for held in shards.tensors if not held.shape]
    tensors: list[tuple[StatePath, Held]] = [
        (("model", held.name), held) for held in owned(shards.tensors) if held.shape
    ]
    image, part = dcp_file(numbered(FSDP_MODEL, index), rank, tensors)
    part.smalls += [scalar(("model", held.name), held.pieces[0].tensor) for held in scalars]
    part.aliases += [(("model", alias), ("model", name)) for alias, name in shards.aliases.items()]
    return StateFiles([image], (part,))


def optimizer_files(shards: OptimizerShards, kind: StateDictKind, index: int = 0) -> StateFiles:
    """Where this rank's part of an optimizer goes. No communication."""
    rank = dist.get_rank()
    if kind == "local":
        path = f"{local_folder(OPTIMIZER)}/{local_file(index, rank)}"
        return StateFiles([local_optimizer_file(path, shards, rank, dist.get_world_size())])
    cut: dict[str, tuple[StatePath, Held]] = {}
    smalls = []
    for name, state in shards.state.items():
        for key, value in state.items():
            path_in_state: StatePath = ("optimizer", "state", name, key)
            if not isinstance(value, Held):
                smalls.append(plain_value(path_in_state, value))
            elif not value.shape:
                smalls.append(scalar(path_in_state, value.pieces[0].tensor))
            else:
                cut[value.name] = (path_in_state, value)
    image, part = dcp_file(
        numbered(OPTIMIZER, index), rank, [cut[held.name] for held in owned(value for _, value in cut.values())]
    )
    part.smalls += smalls
    if rank == 0:
        part.smalls += _group_entries(shards)
    return StateFiles([image], (part,))


def _group_entries(shards: OptimizerShards) -> list[Any]:
    """torch flattens a state dict down to its leaves, and reads it so."""
    return [
        plain_value(("optimizer", "param_groups", number, key), value)
        for number, group in enumerate(shards.groups)
        for key, value in group.items()
    ]


def save_model(
    model: nn.Module,
    folder: Path,
    kind: StateDictKind,
    index: int = 0,
    *,
    adapter_only: bool = False,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write the model's state into ``folder``, as part of the save that is open there or at once. Collective."""
    with on_all_ranks("looking at the model's shards"):
        shards = model_shards(model)
        if adapter_only:
            shards = ModelShards(tuple(held for held in shards.tensors if not held.frozen), {})
        files = model_files(shards, kind, index, max_shard_size=max_shard_size)
    write_files(folder, files)
    if (save := open_save(folder)) is not None:
        save.models.add(index)


def save_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, kind: StateDictKind, index: int = 0
) -> None:
    """Write the optimizer's state, keyed by parameter names, like :func:`save_model`. Collective."""
    with on_all_ranks("looking at the optimizer's shards"):
        files = optimizer_files(optimizer_shards(model, optimizer), kind, index)
    write_files(folder, files)


def write_files(folder: Path, files: StateFiles) -> None:
    """Add files to the save that is open in ``folder``; without one, write them there, finished. Collective."""
    save = open_save(folder)
    with on_all_ranks(f"writing {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            for name, text in files.texts:
                write_text(folder / name, text)
        if save is None:
            write_live(folder, files.images)
    if save is not None:
        save.write(files.images, files.dcp)
    elif files.dcp:
        _complete(folder, files.dcp)


def _complete(folder: Path, mine: Sequence[DcpPart]) -> None:
    parts: list[Sequence[DcpPart]] = [()] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    with on_all_ranks(f"writing {folder}"):
        if dist.get_rank() == 0:
            for number, part in enumerate(mine):
                write_live(folder, last_files(part.folder, [theirs[number] for theirs in parts]))


def full_model_state(model: nn.Module) -> dict[str, Any]:
    """The whole model's state dict under canonical names, on the CPU of rank 0; empty elsewhere. Collective.

    For callers that want a state dict in memory; nothing here is saved that way. Tied weights are one tensor under all
    their names, as in the model's own state dict.
    """
    # On CPU ranks there is nothing to offload, and FSDP1 crashes if asked to.
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    options = StateDictOptions(full_state_dict=True, cpu_offload=not on_cpu)
    state = _tied(model, get_model_state_dict(model, options=options))
    return state if dist.get_rank() == 0 else {}


def trainable_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is trained, whole and by canonical names, on the CPU of rank 0; empty elsewhere. Collective.

    For adapters: their frozen base, which may be many times their size, is not gathered.
    """
    mine = [
        (held.name, held.shape, piece.box, piece.tensor.detach().cpu().contiguous())
        for held in owned(model_shards(model).tensors)
        if not held.frozen
        for piece in held.pieces
    ]
    rank = dist.get_rank()
    gathered: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(mine, gathered)
    state: dict[str, torch.Tensor] = {}
    for name, shape, box, tensor in (piece for pieces in gathered or () for piece in pieces):
        if name not in state:
            state[name] = torch.empty(shape, dtype=tensor.dtype)
        state[name][slices(box, whole(shape))] = tensor
    return state


def _tied(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Names of one parameter share one tensor again; torch gathers it once for each of them."""
    plan = plan_of(model)
    for names in plan.ties if plan is not None else ():
        present = [name for name in names if name in state]
        for name in present[1:]:
            state[name] = state[present[0]]
    return state
