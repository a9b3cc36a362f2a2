"""The format ``per_rank``: one file of ``torch.save`` per rank. Accelerate writes it with ``use_dcp=False``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from hf_fsdp_plugin.checkpoint.formats.errors import COPY_ALL_RANKS, problem, raise_if_any
from hf_fsdp_plugin.checkpoint.formats.nested import optimizer_parts
from hf_fsdp_plugin.checkpoint.formats.stored import (
    MAX_PROBLEMS,
    CheckpointFormat,
    StoredModel,
    StoredOptimizer,
    StoredTensor,
    coverage_problems,
)
from hf_fsdp_plugin.checkpoint.formats.torch_state_dict import model_entries, read_state_dict
from hf_fsdp_plugin.checkpoint.names import FSDP_MODEL, OPTIMIZER, numbered, numbered_from_one


def read_model(root: Path, number: int) -> StoredModel | None:
    """Return the model in ``{stem}_rank{R}.bin`` of all ranks, or ``None`` if there are no such files."""
    for stem in dict.fromkeys((numbered(FSDP_MODEL, number), numbered_from_one(FSDP_MODEL, number))):
        if names := _rank_files(root, stem):
            tensors, objects = model_entries(read_state_dict(root, names))
            _check_coverage(root, stem, names, tensors.values())
            return StoredModel(root, FORMAT.name, tensors, tuple(names), objects)
    return None


def read_optimizer(root: Path, number: int) -> StoredOptimizer | None:
    """Return the optimizer in ``{stem}_rank{R}.bin`` of all ranks, or ``None`` if there are no such files."""
    stem = numbered(OPTIMIZER, number)
    names = _rank_files(root, stem)
    if not names:
        return None
    state, groups = optimizer_parts(read_state_dict(root, names), root, root / names[0])
    tensors = (value for entry in state.values() for value in entry.values() if isinstance(value, StoredTensor))
    _check_coverage(root, stem, names, tensors)
    return StoredOptimizer(root, FORMAT.name, state, groups, tuple(names))


def _check_coverage(root: Path, stem: str, names: list[str], tensors: Iterable[StoredTensor]) -> None:
    fix = f"Only {', '.join(names)} are in the folder. {COPY_ALL_RANKS}"
    raise_if_any(coverage_problems(root / f"{stem}_rank*.bin", tensors, fix))


def _rank_files(root: Path, stem: str) -> list[str]:
    """Return the files in rank order. Raises ``CheckpointError`` if a file below the highest rank is missing."""
    pattern = re.compile(rf"{re.escape(stem)}_rank(\d{{1,7}})\.bin")
    ranks = {int(match[1]) for path in root.iterdir() if (match := pattern.fullmatch(path.name))}
    missing = [root / f"{stem}_rank{rank}.bin" for rank in range(max(ranks, default=0)) if rank not in ranks]
    message = "is missing, although files of higher ranks exist."
    raise_if_any([problem("FSDP-E457", path, message, COPY_ALL_RANKS) for path in missing[:MAX_PROBLEMS]])
    return [f"{stem}_rank{rank}.bin" for rank in sorted(ranks)]


FORMAT = CheckpointFormat(
    name="per_rank",
    state_dict_type="sharded",
    model_files=(f"{FSDP_MODEL}_{{number}}_rank*.bin", f"{FSDP_MODEL}{{suffix}}_rank*.bin"),
    read_model=read_model,
    read_optimizer=read_optimizer,
)
