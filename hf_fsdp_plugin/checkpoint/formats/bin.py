"""The format ``bin``: a full state dict in a file of ``torch.save``."""

from __future__ import annotations

from pathlib import Path

from hf_fsdp_plugin.checkpoint.formats.nested import optimizer_parts
from hf_fsdp_plugin.checkpoint.formats.safetensors_header import read_weight_map
from hf_fsdp_plugin.checkpoint.formats.stored import CheckpointFormat, StoredModel, StoredOptimizer
from hf_fsdp_plugin.checkpoint.formats.torch_state_dict import model_entries, read_state_dict
from hf_fsdp_plugin.checkpoint.names import FSDP_MODEL, HF_MODEL_BIN, OPTIMIZER, index_file, numbered_from_one


def read_model(root: Path, number: int) -> StoredModel | None:
    """Return the model in Accelerate's file, or in the file or shards of a Hugging Face folder."""
    for stem in (FSDP_MODEL, HF_MODEL_BIN):
        name = f"{numbered_from_one(stem, number)}.bin"
        index = root / index_file(name)
        if (root / name).is_file() or index.is_file():
            names = [name] if (root / name).is_file() else list(read_weight_map(root, index))
            tensors, objects = model_entries(read_state_dict(root, names))
            listed = (index.name,) if index.name not in names and index.is_file() else ()
            return StoredModel(root, FORMAT.name, tensors, (*listed, *names), objects)
    return None


def read_optimizer(root: Path, number: int) -> StoredOptimizer | None:
    """Return the optimizer in Accelerate's file; ``None`` if the file does not exist."""
    path = root / f"{numbered_from_one(OPTIMIZER, number)}.bin"
    if not path.is_file():
        return None
    state, groups = optimizer_parts(read_state_dict(root, [path.name]), root, path)
    return StoredOptimizer(root, FORMAT.name, state, groups, (path.name,))


_HF_FILE = f"{HF_MODEL_BIN}{{suffix}}.bin"

FORMAT = CheckpointFormat(
    name="bin",
    state_dict_type="full",
    model_files=(f"{FSDP_MODEL}{{suffix}}.bin", _HF_FILE, index_file(_HF_FILE)),
    read_model=read_model,
    read_optimizer=read_optimizer,
    hugging_face_names=True,
    index_files=(index_file(f"{HF_MODEL_BIN}.bin"),),
)
