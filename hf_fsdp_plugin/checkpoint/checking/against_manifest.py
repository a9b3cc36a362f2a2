"""Comparison of a checkpoint's names, dtypes and shapes with those of its manifest."""

from __future__ import annotations

from hf_fsdp_plugin.checkpoint.formats.errors import COPY_AGAIN, problem
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredOptimizer, labelled_tensors
from hf_fsdp_plugin.checkpoint.names import is_adapter, is_wrapped_by_peft
from hf_fsdp_plugin.checkpoint.optimizer_state import state_layout
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, format_shape, plural


def manifest_problems(model: StoredModel, optimizer: StoredOptimizer | None, manifest: Manifest) -> list[Problem]:
    """Return errors for missing names, unexpected names, and dtypes and shapes that differ from the manifest."""
    group_of = {name: tie for tie in manifest.ties for name in tie}
    # The files and the manifest need to contain only one name of each group of tied names.
    stored = {other for name in model.tensors for other in group_of.get(name, (name,))}
    known = {other for name in manifest.parameters for other in group_of.get(name, (name,))}
    missing = [name for name in manifest.parameters if name not in stored]
    if is_adapter(model.tensors) and is_wrapped_by_peft(manifest.parameters):
        # Earlier versions listed the base model of an adapter too, which the Trainer does not save.
        missing = [name for name in missing if ".lora_" in name]
    unexpected = [name for name in model.tensors if name not in known]
    other = [
        f"{name} ({tensor.dtype} {format_shape(tensor.shape)}, in the manifest {dtype} {format_shape(shape)})"
        for name, tensor in model.tensors.items()
        for dtype, shape in [manifest.parameters.get(name, (tensor.dtype, tensor.shape))]
        if (dtype, shape) != (tensor.dtype, tensor.shape)
    ]
    if optimizer is not None:
        shapes = {name: shape for name, (_, shape) in manifest.parameters.items()}
        unexpected += [f"optimizer state of {name}" for name in optimizer.state if name not in known]
        other += [
            f"{label} ({format_shape(tensor.shape)}, the parameter {format_shape(shapes[tensor.name])})"
            for label, tensor in labelled_tensors(optimizer)
            if tensor.name in shapes
            and state_layout(label.partition(" of ")[0], tensor.shape, shapes[tensor.name]) == "unsupported"
        ]
    total = len(manifest.parameters)
    found = [
        ("FSDP-E477", missing, f"does not contain {len(missing)} of the {total} parameters of its manifest"),
        ("FSDP-E478", unexpected, f"contains {plural(len(unexpected), 'parameter')} that its manifest does not list"),
        (
            "FSDP-E479",
            other,
            f"contains {plural(len(other), 'tensor')} with another dtype or shape than in its manifest",
        ),
    ]
    return [problem(code, model.root, f"{text}: {format_names(n, 3)}.", COPY_AGAIN) for code, n, text in found if n]
