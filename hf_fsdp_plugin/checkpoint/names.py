"""Names of files and folders in runs and checkpoints of Accelerate, Transformers, PEFT, torch and this package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

TRAINER_PREFIX: Final = "checkpoint-"
ACCELERATE_PREFIX: Final = "checkpoint_"
PREFIXES: Final = (TRAINER_PREFIX, ACCELERATE_PREFIX)
"""Prefixes of the checkpoint folders of a run. The step (Trainer) or the iteration (Accelerate) follows."""
ACCELERATE_RUN: Final = "checkpoints"
"""The folder in the project folder that contains checkpoints with automatic names of Accelerate."""

REPORT_NAME: Final = "fsdp_report.json"
"""The report in the folder of a run."""
MANIFEST_NAME: Final = "fsdp_manifest.json"
BLOCK_FILE: Final = "fsdp_manifest.hashes"
"""The hashes of a large checkpoint of an earlier version. It is ignored."""
TRAINER_STATE: Final = "trainer_state.json"
TRAINER_SCHEDULE: Final = "scheduler.pt"
TRAINER_OPTIMIZER: Final = "optimizer.pt"
"""The optimizer of a Trainer without FSDP, with the layout of :data:`OPTIMIZER` in a ``.bin`` file."""

# Stems of file names. A number, a rank or a suffix follows.
FSDP_MODEL: Final = "pytorch_model_fsdp"
OPTIMIZER: Final = "optimizer"
HF_MODEL: Final = "model"
HF_MODEL_BIN: Final = "pytorch_model"
ADAPTER: Final = "adapter_model"
ADAPTER_CONFIG: Final = "adapter_config.json"
TRAINER_RNG: Final = "rng_state"
ACCELERATE_RNG: Final = "random_states"

DCP_METADATA: Final = ".metadata"
DCP_SUFFIX: Final = ".distcp"
ENTRY_ALIGNMENT: Final = 64
"""Each archive in a ``.distcp`` file of this package begins at a multiple of this number of bytes, after zeros."""
INDEX_FILE: Final = ".fsdp_index"
"""A file beside ``.metadata`` that earlier versions wrote. It is ignored."""
CHECKPOINT_STEMS: Final = (
    FSDP_MODEL, HF_MODEL_BIN, HF_MODEL, OPTIMIZER, ADAPTER, TRAINER_RNG, ACCELERATE_RNG, "scheduler", "scaler",
    "sampler", TRAINER_STATE, "training_args.bin", MANIFEST_NAME, BLOCK_FILE,
)  # fmt: skip
"""Prefixes of the files that a save writes. Other files in a checkpoint's folder are the user's."""

SAVING: Final = ".saving"
"""Suffix of the staging folders of saves."""
REPLACED: Final = ".replaced"
"""Suffix that a commit gives the folder that it replaces, until the commit is complete."""
MERGING: Final = ".merging"
"""Suffix of the staging folders of merges."""
MERGED: Final = ".merged-"
"""Suffix of the merged copies of checkpoints for ``from_pretrained``. A hash follows."""


def hidden_path(path: Path, suffix: str) -> Path:
    """Return the path ``.NAME.SUFFIX`` in the same folder as ``path``."""
    return path.with_name(f".{path.name}{suffix}")


def merged_copies(checkpoint: Path) -> list[Path]:
    """Return the merged copies of a checkpoint that exist."""
    prefix = hidden_path(checkpoint, MERGED).name
    return [path for path in checkpoint.parent.iterdir() if path.name.startswith(prefix)]


def numbered_name(stem: str, number: int) -> str:
    """Return ``STEM_NUMBER``, the name for one of several models or optimizers."""
    return f"{stem}_{number}"


def numbered_from_one(stem: str, number: int) -> str:
    """Return ``STEM`` for the first of several models, and ``STEM_NUMBER`` for the others."""
    return numbered_name(stem, number) if number else stem


def safetensors_file(stem: str) -> str:
    return f"{stem}.safetensors"


def index_file(name: str) -> str:
    """Return the name of the index of a model file that was split."""
    return f"{name}.index.json"


def dcp_file(rank: int) -> str:
    """Return the name of the file of one rank in a ``torch.distributed.checkpoint`` folder."""
    return f"__{rank}_0{DCP_SUFFIX}"


def trainer_rng_file(rank: int | None) -> str:
    """Return the Trainer's file of a rank's random state; ``rank`` is ``None`` in a run with one rank."""
    return f"{TRAINER_RNG}.pth" if rank is None else f"{TRAINER_RNG}_{rank}.pth"


def custom_state_file(index: int) -> str:
    """Return Accelerate's file with the state of an object that ``register_for_checkpointing`` registered."""
    return f"custom_checkpoint_{index}.pkl"


def accelerate_rng_file(rank: int) -> str:
    return f"{ACCELERATE_RNG}_{rank}.pkl"


def is_adapter(names: Iterable[str]) -> bool:
    """Whether the names are those of a PEFT adapter only, without the layers of its base model."""
    names = list(names)
    return not is_wrapped_by_peft(names) and all(
        name.startswith(("base_model.model.", "prompt_embeddings")) or ".lora_" in name for name in names
    )


def is_wrapped_by_peft(names: Iterable[str]) -> bool:
    """Whether the layers of the base model have the names that PEFT gives them."""
    return any(".base_layer." in name for name in names)
