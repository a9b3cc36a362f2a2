"""Names of adapter weights in models with wrappers. PEFT finds the weights by the current names of modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_fsdp_plugin.checkpoint.names import ADAPTER, safetensors_file
from hf_fsdp_plugin.plan.names import canonical_name


def with_module_names(state: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Return ``state`` with FSDP1's wrappers in the names."""
    live = {canonical_name(name): name for name, _ in model.named_modules()}
    named = {}
    for name, tensor in state.items():
        module, _, parameter = name.rpartition(".")
        named[f"{live[module]}.{parameter}" if live.get(module) else name] = tensor
    return named


def remove_wrapper_names(folder: Path) -> None:
    """Remove the names of wrappers from the parameters in the adapter files."""
    from safetensors.torch import load_file, save_file

    for path in folder.rglob(safetensors_file(ADAPTER)):
        state = load_file(path)
        clean = {canonical_name(name): tensor for name, tensor in state.items()}
        if clean.keys() != state.keys():
            save_file(clean, path, metadata={"format": "pt"})
    for path in folder.rglob(f"{ADAPTER}.bin"):
        state = torch.load(path, weights_only=True)
        clean = {canonical_name(name): tensor for name, tensor in state.items()}
        if clean.keys() != state.keys():
            torch.save(clean, path)
