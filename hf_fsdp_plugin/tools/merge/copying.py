"""Copies tensors to the output of a merge block by block, converts their dtype, and compares the result."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.file_io import InputFiles
from hf_fsdp_plugin.checkpoint.formats.boxes import flat_range
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.checkpoint.formats.safetensors import SafetensorsFile
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredTensor
from hf_fsdp_plugin.checkpoint.reading.resharding import execute_transfers, plan_transfers
from hf_fsdp_plugin.checkpoint.saved_state import pieces_in
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.tools.common import Progress
from hf_fsdp_plugin.tools.loaded_weights import ComputedTensor, read_tensor
from hf_fsdp_plugin.tools.merge.merge_plan import MergePlan

BLOCK = 4 << 20
"""Number of elements that are read at once."""
_MERGE_AGAIN = "Merge again. If the problem persists, check the disk."


def read_blocks(files: InputFiles, stored: StoredTensor, dtype: str = "") -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the elements of a tensor in blocks, converted to ``dtype``, with rounding to nearest even.

    A computed tensor is in memory as a whole.

    Returns:
        A flat tensor, and the number of finite values that became infinite.
    """
    numel, target = math.prod(stored.shape), getattr(torch, dtype or stored.dtype)
    whole = read_tensor(files, stored).contiguous().view(-1) if isinstance(stored, ComputedTensor) else None
    for start in range(0, numel, BLOCK):
        stop = min(start + BLOCK, numel)
        if whole is not None:
            values = whole[start:stop]
        else:
            values = torch.empty(stop - start, dtype=getattr(torch, stored.dtype))
            execute_transfers(files, plan_transfers(stored, pieces_in(values, flat_range(stored.shape, start, stop))))
        if values.dtype == target:
            yield values, 0
            continue
        converted = values.to(target)
        yield converted, int((converted.isinf() & values.isfinite()).sum())


def copy_file(
    source: InputFiles, plan: MergePlan, file: SafetensorsFile, path: Path, progress: Progress
) -> dict[str, int]:
    """Write ``file`` to ``path``. Return tensor name -> number of values that became infinite in the new dtype."""
    infinite: Counter[str] = Counter()
    with path.open("wb") as opened:
        opened.write(file.header)
        progress("merge", len(file.header), plan.num_bytes)
        for name in file.offsets:
            for values, count in read_blocks(source, plan.tensors[name], plan.dtypes[name]):
                opened.write(values.view(torch.uint8).numpy().data)
                infinite[name] += count
                progress("merge", values.nbytes, plan.num_bytes)
        opened.flush()
        os.fsync(opened.fileno())
    return +infinite


def byte_problems(source: InputFiles, plan: MergePlan, folder: Path, progress: Progress) -> list[Problem]:
    """Compare all written bytes with the checkpoint."""
    written, problems = read_stored_model(folder), []
    with InputFiles(folder) as files:
        for file in plan.files:
            different = []
            for name in file.offsets:
                tensor = written.tensors[name]
                if not same_elements(source, plan.tensors[name], files, tensor):
                    different.append(name)
                progress("verify", tensor.num_bytes, plan.num_bytes)
            if different:
                message = f"contains {plural(len(different), 'tensor')} whose bytes differ from the checkpoint"
                text = f"{message}: {format_names(different, 3)}."
                problems.append(problem("FSDP-E486", folder / file.name, text, _MERGE_AGAIN))
    return problems


def same_elements(files: InputFiles, tensor: StoredTensor, other_files: InputFiles, other: StoredTensor) -> bool:
    """Whether two tensors of one shape have the same bytes if ``tensor`` is converted to the dtype of ``other``."""
    pairs = zip(read_blocks(files, tensor, other.dtype), read_blocks(other_files, other), strict=True)
    return all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for (one, _), (two, _) in pairs)
