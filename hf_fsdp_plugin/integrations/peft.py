"""Whole adapters of a sharded PEFT model, and PEFT's own saving code on one rank.

PEFT selects the tensors of an adapter from the model's state dict by the names of the modules. Some modules it asks
directly: those of ``modules_to_save`` for their state dict, and prompt encoders for their output. In a sharded model
names contain wrappers, and the answers are collective or parts of tensors. Here, rank 0 asks PEFT which tensors belong
to the adapters, all ranks gather them, and PEFT's code runs on rank 0 with the modules and the tensors of an unsharded
model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version as version_of
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.checkpoint.saved_state import ModelShards
from hf_fsdp_plugin.checkpoint.writing.state_files import gathered_state
from hf_fsdp_plugin.integrations.session import attributes_in_block
from hf_fsdp_plugin.plan.names import below, canonical_name, named_parameters, unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private import modules
from hf_fsdp_plugin.torch_private.functions import compute_local_shape_and_global_offset

_PROMPT_ENCODER = "prompt_encoder"


def adapter_state(model: nn.Module, shards: ModelShards, **settings: Any) -> dict[str, torch.Tensor]:
    """Return the whole tensors that PEFT saves, by canonical names, on the CPU of rank 0; empty elsewhere. Collective.

    Args:
        model: the model with adapters, with or without wrappers around it.
        shards: its shards, by its own names.
        settings: arguments of ``get_peft_model_state_dict``, which decide about the embeddings.
    """
    shards = _with_shared_buffers(model, shards)
    names: set[str] = set()
    with on_all_ranks("selecting the weights of the adapters"):
        if dist.get_rank() == 0:
            names = _selected_by_peft(unwrapped(model), shards, settings)
    names = broadcast_object(names)
    aliases = {alias: name for alias, name in shards.aliases.items() if name in names}
    return gathered_state(ModelShards(tuple(held for held in shards.tensors if held.name in names), aliases))


def _with_shared_buffers(model: nn.Module, shards: ModelShards) -> ModelShards:
    """Add the other names of buffers that modules share. PEFT asks for the projections of VeRA by the last of them."""
    held = {shard.name for shard in shards.tensors}
    names: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(canonical_name(name))
    aliases = dict(shards.aliases)
    for shared in names.values():
        if stored := [name for name in shared if name in held]:
            aliases.update({name: stored[0] for name in shared if name not in held})
    return ModelShards(shards.tensors, aliases)


def _selected_by_peft(model: Any, shards: ModelShards, settings: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors from which PEFT makes the files of any adapter."""
    from peft import get_peft_model_state_dict

    on_meta = {held.name: torch.empty(held.shape, dtype=held.dtype, device="meta") for held in shards.tensors}
    state = {**on_meta, **{alias: on_meta[name] for alias, name in shards.aliases.items()}}
    owners = {id(tensor): name for name, tensor in on_meta.items()}
    prompts = tuple(f"{_PROMPT_ENCODER}.{adapter}." for adapter in model.peft_config)
    selected = {owners[id(tensor)] for name, tensor in state.items() if name.startswith(prompts)}
    no_prompt = torch.empty(0)
    saved: list[torch.Tensor] = []
    with (
        warnings.catch_warnings(),
        as_unsharded(model, state),
        attributes_in_block(model, get_prompt_embedding_to_save=lambda adapter_name: no_prompt),
    ):
        warnings.simplefilter("ignore")  # PEFT repeats its warnings when it saves
        try:
            for adapter in model.peft_config:
                saved += get_peft_model_state_dict(model, dict(state), adapter, **settings).values()
        except Exception:  # PEFT computes with the values, which the meta device does not have
            return set(on_meta)
    found = {owners.get(id(tensor)) for tensor in saved if tensor is not no_prompt}
    return set(on_meta) if None in found else selected | {name for name in found if name is not None}


@contextmanager
def as_unsharded(model: Any, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Remove the wrappers in a model with adapters, and let its modules answer PEFT from ``state``. Not collective.

    Args:
        model: the model itself, without wrappers around it.
        state: whole tensors by canonical names, at least those of the adapters.
    """
    with ExitStack() as stack:
        for module in list(model.modules()):
            # Register the wrapped modules instead of their wrappers: the names of modules are those without FSDP.
            if modules.wrapped_module(module) is None:
                children = modules.children(module)
                bare = {name: unwrapped(child) for name, child in children.items() if child is not None}
                stack.enter_context(modules.entries_in_block(bare, children))
        for name, module in model.named_modules():
            saved = getattr(module, "modules_to_save", None)
            if isinstance(saved, nn.ModuleDict):
                for adapter, inner in saved.items():
                    part = below(state, f"{name}.modules_to_save.{adapter}.")
                    stack.enter_context(attributes_in_block(inner, state_dict=partial(dict, part)))
        for adapter, encoder in getattr(model, _PROMPT_ENCODER, {}).items():
            weights = below(state, f"{_PROMPT_ENCODER}.{adapter}.")
            stack.enter_context(modules.with_tensors(encoder, weights))
            stack.enter_context(modules.without_forward_hooks(encoder))
        yield


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield canonical names and the layers that PEFT has put into a model, without those inside others."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    outer = "."
    for raw_name, module in model.named_modules():
        name = canonical_name(raw_name)
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not name.startswith(outer):
            outer = f"{name}."
            yield name, module


@torch.no_grad()
def merge_layer(layer: Any, adapters: Sequence[str]) -> nn.Module:
    """Merge a layer of PEFT, as its ``merge_and_unload`` does. Return the layer of the base model."""
    settings = {"safe_merge": False, "adapter_names": list(adapters)}
    if hasattr(layer, "unload_and_optionally_merge_module"):  # target_parameters, tokens, attention of torch
        unloaded: nn.Module = layer.unload_and_optionally_merge_module(merge=True, **settings)
        return unloaded
    layer.merge(**settings)
    base: nn.Module = layer.get_base_layer()
    return base


def replaces_base(layer: Any) -> bool:
    """Return whether a merge replaces parameters of the base layer by other objects, as for attention of torch."""
    return isinstance(getattr(layer, "base_layer", None), nn.MultiheadAttention)


def merged_weights(layer: Any, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a layer of the base model after the merge of its active adapters. Not collective.

    PEFT's code merges into ``whole``; the layer keeps its own parameters.

    Args:
        layer: a layer of PEFT in a model, which may be sharded.
        whole: whole parameters, by all of their canonical names in the layer.

    Returns:
        The weights, by their names in the layer of the base model.
    """
    with ExitStack() as stack:
        for raw_name, module in layer.named_modules():
            names = {
                attribute: canonical_name(f"{raw_name}.{attribute}".lstrip("."))
                for attribute in modules.parameters(module)
            }
            entries = {
                attribute: nn.Parameter(whole[name], requires_grad=False)
                for attribute, name in names.items()
                if name in whole
            }
            stack.enter_context(modules.entries_in_block(entries, modules.parameters(module)))
            if hasattr(module, "merged_adapters"):
                state = {"merged_adapters": list(module.merged_adapters), "_caches": {}}
                stack.enter_context(attributes_in_block(module, **state))
        base = merge_layer(layer, layer.active_adapters)
        return {name: parameter.detach() for name, parameter in named_parameters(base)}


def check_adapters(model: nn.Module, *, version: int) -> None:
    """Raise ``SpecError`` for adapters that would train with one rank's shards as if they were larger matrices.

    Args:
        version: the version of FSDP.
    """
    given = getattr(unwrapped(model), "peft_config", None)
    configs: dict[str, Any] = given if isinstance(given, dict) else {}
    kinds = {name: config.peft_type for name, config in configs.items()}
    if found := [f"{name!r} (ADALORA)" for name, kind in kinds.items() if getattr(kind, "value", kind) == "ADALORA"]:
        message = f"the adapter {', '.join(found)} is not supported with FSDP: AdaLoRA computes its regularization and "
        message += "the importance of ranks from whole matrices and gradients, and each rank has only parts of them."
        raise SpecError([Problem(code="FSDP-E630", message=message, fix="Use LoRA, or train without FSDP.")])
    targets = {name: getattr(config, "target_parameters", None) for name, config in configs.items()}
    if version == 1 and (found := [f"{name!r} ({', '.join(each)})" for name, each in targets.items() if each]):
        message = f"the adapter {', '.join(found)} has target_parameters, which PEFT replaces in each forward by sums. "
        message += "Under FSDP1 they are views of a flat parameter, which cannot be replaced."
        fix = "Set fsdp_version: 2, or use target_modules."
        raise SpecError([Problem(code="FSDP-E646", message=message, fix=fix)])
    wrong = [name for name, parameter in model.named_parameters() if kinds and not _has_its_part(parameter)]
    if wrong:
        message = f"PEFT {version_of('peft')} has created {format_names(wrong, 2)} with the size of a shard, not of "
        message += "this rank's part on the tensor axis: it takes the rows of a shard of FSDP for those of the part."
        fix = "Train the adapters without a tensor axis: set tp_size to 1 and a larger dp_shard_size or cp_size."
        raise SpecError([Problem(code="FSDP-E634", message=message, fix=fix)])


def _has_its_part(parameter: torch.Tensor) -> bool:
    """Return whether a parameter's local tensor has the shape of this rank's part."""
    if not isinstance(parameter, DTensor):
        return True
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return shape == parameter.to_local().shape


def refuse_if_sharded(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise ``SpecError`` for a sharded model: PEFT would multiply shards, and replace modules that FSDP manages."""
    if not any(modules.is_fsdp_managed(module) for module in tuner.modules()):
        return original(*args, **kwargs)
    message = "each rank has only parts of the weights, so adapters cannot be merged or removed in a sharded model."
    fix = "Save the adapters (trainer.save_model, or save_pretrained on all ranks), and merge them in one process: "
    fix += "`hf-fsdp merge FOLDER OUT --fold-adapter BASE_MODEL`."
    raise SpecError([Problem(code="FSDP-E631", message=message, fix=fix)])
