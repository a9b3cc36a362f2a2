"""Converts whole weights, such as a Hugging Face folder, into shards from which a run starts, in batches of tensors.

The names are those of the model's modules, as ``from_pretrained`` gives them, with all names of tied weights, so that
``torch.distributed.checkpoint.load`` finds each name of a model's state dict.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from hf_fsdp_plugin.checkpoint.errors import raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.file_io import InputFiles
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, StoredTensor, shared_tensors
from hf_fsdp_plugin.tools import loaded_weights
from hf_fsdp_plugin.tools.common import Progress
from hf_fsdp_plugin.tools.convert.checkpoint import ConvertedCheckpoint, manifest_without_files, write_states
from hf_fsdp_plugin.tools.convert.deepspeed_files import SavedEngine
from hf_fsdp_plugin.tools.merge import companions, merge_plan
from hf_fsdp_plugin.tools.meta_model import meta_model
from hf_fsdp_plugin.tools.verify.comparison import config_problems

_BACKEND: Final = "huggingface"
"""The backend in the manifest of a checkpoint that no training has written."""


def convert_model_folder(
    source: Path, out: Path, *, dtype: str | None, force: bool, progress: Progress
) -> ConvertedCheckpoint:
    """Write the weights in ``source`` as a checkpoint with shards to the folder ``out``.

    Args:
        dtype: torch's name of the dtype for all floating-point tensors; ``None`` keeps their dtypes.
        force: replace an existing output folder.

    Raises:
        CheckpointError: the weights are damaged, of another model than that of ``config.json``, of an adapter or
            quantized, or ``out`` is in use. ``out`` is then unchanged.
        OSError: writing failed. ``out`` is then unchanged.
    """
    out = merge_plan.prepare_output(out, [source], force=force)
    stored = read_stored_model(source)
    folder = companions.find_config_folder(source, None)
    if reason := loaded_weights.why_not_whole(stored, folder):
        fix = "Give a model in 16 or 32 bits. Merge an adapter first: `hf-fsdp merge --fold-adapter BASE`."
        refuse("FSDP-E445", source, f"{reason}, so a run cannot start from its tensors.", fix)
    problems, fp32 = config_problems(stored, folder or source), list[str]()
    raise_if_any([each for each in problems if each.severity == "error"])
    if problems or folder is None:  # there is no model to compare with: the names stay
        tensors = stored.tensors
    else:
        model = meta_model(folder)
        stored = loaded_weights.without_root(stored, model.state_dict().keys())
        tensors, fp32 = _as_loaded(stored, model), loaded_weights.fp32_names(stored, model, dtype)
    if dtype is not None:
        tensors = {name: _cast(tensor, "float32" if name in fp32 else dtype) for name, tensor in tensors.items()}
    written = replace(stored, tensors=tensors)
    aliases = {name for _, *others in shared_tensors(written) for name in others}
    sizes = [tensor.num_bytes for name, tensor in tensors.items() if name not in aliases]
    copied = companions.companion_files(folder) if folder is not None else []
    with merge_plan.MergeStaging(out) as staging:
        progress("convert", 0, sum(sizes))
        if folder is not None:
            companions.copy_companions(folder, copied, staging.folder, dtype)
        manifest = manifest_without_files(written, _BACKEND, "no_shard", 1, step=None, versions={})
        write_states([SavedEngine(model=written)], staging.folder, manifest, progress, sum(sizes))
        staging.commit()
    return ConvertedCheckpoint(
        out=out,
        dialect=stored.format,
        step=None,
        world_size=1,
        num_tensors=len(sizes),
        num_bytes=sum(sizes),
        copied=tuple(copied),
        problems=tuple(problems),
    )


def _as_loaded(stored: StoredModel, model: Any) -> dict[str, StoredTensor]:
    """Return the entries of the model's state dict. Tied names have the same pieces."""
    groups = loaded_weights.loaded_groups(stored, model)
    found = {name: tensor for group in groups for name, tensor in group.targets.items()}
    held: dict[int, StoredTensor] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if name in found:
            held.setdefault(id(tensor), found[name])
    return {name: replace(held[id(tensor)], name=name) for name, tensor in state.items() if id(tensor) in held}


def _cast(tensor: StoredTensor, dtype: str) -> StoredTensor:
    if tensor.dtype not in merge_plan.FLOATS or tensor.dtype == dtype:
        return tensor

    def read(files: InputFiles) -> torch.Tensor:
        return loaded_weights.read_tensor(files, tensor).to(getattr(torch, dtype))

    # Tied names share the pieces of the first one.
    return replace(loaded_weights.computed(tensor.name, dtype, tensor.shape, read), pieces=tensor.pieces)
