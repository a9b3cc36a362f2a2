"""The formats ``full``: the safetensors files of a Hugging Face folder, and of a PEFT adapter."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

from hf_fsdp_plugin.checkpoint.formats.boxes import row_major, whole
from hf_fsdp_plugin.checkpoint.formats.errors import COPY_AGAIN, problem, raise_if_any
from hf_fsdp_plugin.checkpoint.formats.safetensors_header import read_header, read_weight_map
from hf_fsdp_plugin.checkpoint.formats.stored import (
    CheckpointFormat,
    StoredModel,
    StoredPiece,
    StoredTensor,
    file_problems_inside,
    without_replicas,
)
from hf_fsdp_plugin.checkpoint.names import ADAPTER, HF_MODEL, index_file, numbered_from_one, safetensors_file
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural


def read_model(root: Path, name: str) -> StoredModel | None:
    """Return the model in the file ``name``, or in the shards that its index lists; ``None`` if neither exists."""
    index = root / index_file(name)
    shards: Mapping[str, Set[str] | None]
    files: tuple[str, ...]
    if (root / name).is_file():
        raise_if_any(file_problems_inside(root, [name], root))
        shards, files = {name: None}, (name,)
    elif index.is_file():
        shards = read_weight_map(root, index)
        files = index.name, *shards
    else:
        return None
    tensors: dict[str, StoredTensor] = {}
    problems: list[Problem] = []
    for shard, names in shards.items():
        entries, _ = read_header(root / shard)
        names = entries.keys() if names is None else names
        absent = sorted(names - entries.keys())
        if absent:
            message = f"lists {plural(len(absent), 'tensor')} that {shard} does not contain: "
            problems.append(problem("FSDP-E459", index, f"{message}{format_names(absent, 3)}.", COPY_AGAIN))
        for key in (key for key in entries if key in names):
            entry = entries[key]
            piece = StoredPiece(whole(entry.shape), shard, entry.offset, row_major(entry.shape))
            plain = canonical_name(key)
            tensors[plain] = StoredTensor(plain, entry.dtype, entry.shape, without_replicas([piece]))
    raise_if_any(problems)
    return StoredModel(root, FORMAT.name, tensors, files)


_MODEL_FILE = safetensors_file(f"{HF_MODEL}{{suffix}}")
_ADAPTER_FILE = safetensors_file(ADAPTER)

FORMAT = CheckpointFormat(
    name="full",
    state_dict_type="full",
    model_files=(_MODEL_FILE, index_file(_MODEL_FILE)),
    read_model=lambda root, number: read_model(root, safetensors_file(numbered_from_one(HF_MODEL, number))),
    hugging_face_names=True,
    index_files=(index_file(safetensors_file(HF_MODEL)),),
)
ADAPTER_FORMAT = CheckpointFormat(
    name="full",
    state_dict_type="full",
    model_files=(_ADAPTER_FILE, index_file(_ADAPTER_FILE)),
    read_model=lambda root, number: read_model(root, _ADAPTER_FILE),
    hugging_face_names=True,
)
