"""``hfp.from_pretrained``, and ``from_pretrained`` of Transformers with RAM-efficient loading.

Transformers maps the files of a checkpoint, and all processes of a machine share the pages of a mapped file. So every
rank has a whole model, which needs no private memory, if its weights are those of the files.

Weights that differ from the file, because they are cast to another dtype or fused, are computed by rank 0
alone. The other ranks have the model on the meta device until ``prepare`` sends them their shards, one unit at a time.
Until then a script can change such a model, but read no values of it
(:mod:`hf_fsdp_plugin.backends.loading.deferred_weights`).

Transformers leaves the weights that a checkpoint lacks, such as a new head, on the meta device on all
ranks but the first. With these replacements, every rank initializes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import nn
from transformers import DistributedConfig, modeling_utils
from transformers.core_model_loading import WeightConverter

from hf_fsdp_plugin.axes import CONTEXT_AXIS, REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS
from hf_fsdp_plugin.backends.loading.deferred_weights import defer_weights
from hf_fsdp_plugin.backends.loading.mapped_files import parameter_memory
from hf_fsdp_plugin.backends.ranks.agreement import on_all_ranks
from hf_fsdp_plugin.devices import accelerator_type
from hf_fsdp_plugin.integrations import patching
from hf_fsdp_plugin.integrations.accelerate.accelerator import accelerator, mesh_of_world
from hf_fsdp_plugin.integrations.accelerate.prepare import shard_model
from hf_fsdp_plugin.integrations.script_arguments import print_or_raise
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.integrations.transformers import private
from hf_fsdp_plugin.integrations.transformers.model_files import without_progress_bar
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, MeshPlan, ProblemCollector
from hf_fsdp_plugin.plan.model_config import config_and_class
from hf_fsdp_plugin.plan.resolve import check_installed_axes
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.rank_variables import launched_rank, launched_world_size
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import MADE_FROM_SPEC
from hf_fsdp_plugin.text import format_bytes, format_names


def from_pretrained(
    name_or_folder: str | Path, spec_or_plan: FsdpSpec | FsdpPlan, *, model_class: Any = None, **kwargs: Any
) -> nn.Module:
    """Load a model and shard it. Collective: all ranks call it with the same arguments.

    No rank has the model in private memory: the files are mapped, and each rank copies its own shards to its device.
    The result can be passed to ``Accelerator.prepare`` or to a Trainer, or be trained by hand.

    Args:
        name_or_folder: what ``from_pretrained`` of Transformers accepts.
        spec_or_plan: from :func:`hf_fsdp_plugin.load_spec` or :func:`hf_fsdp_plugin.resolve`. A plan must be one for
            this model and this number of ranks.
        model_class: the class to load; by default the one in the config's ``architectures``.
        kwargs: other arguments of Transformers' ``from_pretrained``, such as ``dtype``.

    Raises:
        SpecError: the spec does not enable FSDP, the process is not a rank of a launcher, or the settings do not fit.
        ValueError: the config names no class of Transformers.
    """
    spec = spec_or_plan.spec if isinstance(spec_or_plan, FsdpPlan) else spec_or_plan
    if not spec.enabled:
        message = "hf_fsdp_plugin.from_pretrained was called with a spec that does not enable FSDP."
        fix = "Enable FSDP in the config (distributed_type: FSDP), or call from_pretrained of the model's class."
        raise SpecError([Problem(code="FSDP-E694", message=message, fix=fix)])
    prepared_by = accelerator(spec)
    with on_all_ranks(f"loading {name_or_folder}"):
        loaded_class = model_class or config_and_class(name_or_folder)[1]
        with patching.loading_ram_efficiently():
            model = loaded_class.from_pretrained(name_or_folder, **kwargs)
    return shard_model(prepared_by, model, plan=spec_or_plan if isinstance(spec_or_plan, FsdpPlan) else None)


_OWN_LAYOUT: Final = frozenset({"distributed_config", "tp_plan", "tp_size", "device_map"})
"""Arguments of ``from_pretrained`` with which a script decides where the weights are."""


def from_pretrained_on_axes(original: Callable[..., Any], kind: type, *args: Any, **kwargs: Any) -> Any:
    """Divide the layers of a model over the tensor and expert axes of the settings while it is loaded.

    A mesh in the call asks for FSDP, also before the script has created its ``TrainingArguments``.

    Raises:
        SpecError: the sizes do not fit the world, or the installed Transformers does not have the axes.
    """
    spec = session().trainer_spec or session().ambient or FsdpSpec()
    if (mesh := _given_mesh(kwargs)) is not None:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("tp_plan", "tp_size", "device_mesh")}
    elif not session().is_active() or max(spec.mesh.tensor, spec.mesh.expert) == 1 or kwargs.keys() & _OWN_LAYOUT:
        return original(*args, **kwargs)
    else:
        mesh, _ = mesh_of_world(spec, launched_world_size(), "cpu" if spec.launch.use_cpu else accelerator_type())
    collector = ProblemCollector(spec)
    check_installed_axes(mesh, collector)
    print_or_raise(collector.problems)
    fields: dict[str, Any] = {"tp_size": mesh.tensor, "fsdp_size": mesh.num_shards, "ep_size": mesh.expert}
    fields |= {"dp_replicate_size": mesh.replicate} if mesh.replicate > 1 else {}
    config = DistributedConfig(**fields, fsdp_cpu_offload=spec.offload.params)
    setattr(config, MADE_FROM_SPEC, True)
    return original(*args, **kwargs, distributed_config=config)


def _given_mesh(kwargs: Mapping[str, Any]) -> MeshPlan | None:
    """Return Accelerate's mesh in ``tp_plan="auto", device_mesh=…``, if it has shards beside the tensor axis.

    The examples of Accelerate load models so. Transformers 5 ignores the mesh, and divides the layers over all ranks.
    """
    mesh = kwargs.get("device_mesh")
    sizes = dict(zip(getattr(mesh, "mesh_dim_names", None) or (), getattr(mesh, "shape", ()), strict=False))
    replicate, shard, context, size = (
        sizes.get(axis, 1) for axis in (REPLICATE_AXIS, SHARD_AXIS, CONTEXT_AXIS, TENSOR_AXIS)
    )
    if size == 1 or kwargs.get("tp_plan", "auto") != "auto" or kwargs.get("tp_size", size) not in (None, size):
        return None
    found = MeshPlan(replicate=replicate, shard=shard, context=context, tensor=size)
    return found if found.num_shards > 1 else None


def is_fsdp_enabled(original: Callable[[], bool]) -> bool:
    """Return false, so that Transformers loads and initializes all weights on every rank."""
    return False


def load_pretrained_model(
    original: Callable[..., Any],
    model: Any,
    state_dict: Any,
    checkpoint_files: Sequence[str] | None,
    load_config: Any,
    expected_keys: Any = None,
) -> Any:
    """Load the weights. Only rank 0 shows a progress bar.

    The parameters have the names of Transformers, whose adapters are loaded with keyword arguments.
    """
    load = functools.partial(original, model, state_dict, checkpoint_files, load_config, expected_keys)
    if not patching.has_fsdp_settings():
        return load()
    with nullcontext() if launched_rank() == 0 else without_progress_bar():
        # expected_keys is given only for adapters, and a device mesh only for models that Transformers shards.
        if not patching.loads_ram_efficiently() or expected_keys is not None or load_config.device_mesh is not None:
            result = load()
        else:
            reason = _obstacle(state_dict, checkpoint_files, load_config)
            is_computed = reason is None and _needs_private_memory(model, checkpoint_files or (), load_config)
            defers = is_computed and launched_rank() != 0
            result = _load_on_meta(original, model, checkpoint_files or (), load_config) if defers else load()
            if is_computed and _has_both_names(model, result[0].missing_keys):
                reason, defers = "the files contain both of two tied weights, whose values are compared", False
                result = load() if launched_rank() != 0 else result
            if defers:
                defer_weights(model)
            if reason is not None:
                _report_private_memory(model, reason)
    _check_index(model, result[0].missing_keys, load_config)
    return result


def _check_index(model: Any, missing: Collection[str], load_config: Any) -> None:
    """Raise ``SpecError`` if a file lacks a tensor that the index lists. Transformers would initialize it anew."""
    weight_map = (load_config.sharded_metadata or {}).get("weight_map") or {}
    tied = private.tied_weights(model)
    if absent := sorted(set(missing) & weight_map.keys() - tied.keys() - set(tied.values())):
        message = f"{load_config.pretrained_model_name_or_path}: {weight_map[absent[0]]} does not contain "
        message += f"{format_names(absent, 3)}, which the index of the model lists there."
        raise SpecError([Problem(code="FSDP-E459", message=message, fix="Copy the files again.")])


def _obstacle(state_dict: Any, files: Sequence[str] | None, load_config: Any) -> str | None:
    """Return why rank 0 cannot load the weights for all ranks; ``None`` if it can."""
    if load_config.is_quantized:
        method = load_config.hf_quantizer.quantization_config.quant_method
        return f"the weights are quantized ({getattr(method, 'value', method)})"
    if state_dict is not None or not files:
        return "the weights do not come from files"
    devices = {str(device) for device in (load_config.device_map or {"": "cpu"}).values()}
    return None if devices == {"cpu"} else f"device_map places them on {', '.join(sorted(devices))}"


def _read_shapes(files: Iterable[str], load_config: Any) -> dict[str, Any]:
    """Return the checkpoint's state dict with every tensor on the meta device, so that no weights are read."""
    shapes: dict[str, Any] = {}
    for file in files:
        shapes.update(modeling_utils.load_state_dict(file, map_location="meta", weights_only=load_config.weights_only))
    return shapes


def _needs_private_memory(model: Any, files: Sequence[str], load_config: Any) -> bool:
    """Return whether loaded weights may differ from the mapped files. May be true although none does."""
    is_converted = any(isinstance(transform, WeightConverter) for transform in load_config.weight_mapping or ())
    if is_converted or getattr(load_config, "disable_mmap", None):
        return True
    tensors = [*_read_shapes(files, load_config).values(), *model.state_dict().values()]
    return len({tensor.dtype for tensor in tensors if tensor.is_floating_point()}) > 1


def _load_on_meta(original: Callable[..., Any], model: Any, files: Sequence[str], load_config: Any) -> Any:
    """Leave a model on the meta device, in the form that it has on rank 0. No weights are read."""
    meta_config = replace(load_config, device_map={"": "meta"})
    return original(model, _read_shapes(files, load_config), None, meta_config, None)


def _has_both_names(model: Any, missing: Collection[str]) -> bool:
    """Return whether the files contain both of two tied weights, which Transformers ties if they are equal."""
    return any(not {target, source} & set(missing) for target, source in private.tied_weights(model).items())


def _report_private_memory(model: nn.Module, reason: str) -> None:
    """Print that every rank has its own copy of the weights, with its size."""
    num_bytes = parameter_memory(model.parameters()).private_bytes
    if num_bytes:
        message = f"every rank loads {type(model).__name__} into its own memory, {format_bytes(num_bytes)} on each "
        message += f"rank, because {reason}."
        fix = "Provide that memory for each rank, or load unquantized weights from safetensors files."
        print_once(Problem(code="FSDP-W660", setting="loading.ram_efficient", message=message, fix=fix))
