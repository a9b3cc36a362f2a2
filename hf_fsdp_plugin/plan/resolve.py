"""Resolves a spec for one model and one world size: the precision, and the checks of other settings."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib.metadata import version as version_of
from typing import Any, Final

import torch
from torch import nn

from hf_fsdp_plugin.devices import unsupported_device
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, MeshPlan, ModelParts, PrecisionPlan, ProblemCollector, has_replicas
from hf_fsdp_plugin.plan.mesh import resolve_mesh
from hf_fsdp_plugin.plan.modules import ModuleTree, class_names, matching_modules
from hf_fsdp_plugin.plan.names import is_inside
from hf_fsdp_plugin.plan.parameters import check_parameters
from hf_fsdp_plugin.plan.units import model_class_name, sharded_parts, wrap_units
from hf_fsdp_plugin.problems import SpecError, has_errors
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec, Version
from hf_fsdp_plugin.spec.rules import FP16_ON_CPU, check_fsdp1_only
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.supported import release_of
from hf_fsdp_plugin.text import format_dtype, format_names, format_value, plural
from hf_fsdp_plugin.torch_private.fsdp2 import SINCE_2_15, is_since_2_15

_FP32_MODULES: Final = "precision.fp32_modules"
_MIXED: Final = ("bf16", "fp16")
_AXES_SINCE: Final = {"tensor": (5, 19), "expert": (5, 20), "replicate": (5, 23)}
"""Axis -> the release of Transformers that added it beside the other axes of a mesh."""


def resolve(
    spec: FsdpSpec, model: nn.Module, *, world_size: int, device_type: str = "cpu", local_world_size: int | None = None
) -> FsdpPlan:
    """Return the plan of a spec for one model and one world size. Needs no process group.

    Args:
        model: on any device, including ``meta``. It is not changed.
        world_size: number of ranks.
        device_type: type of the device that the ranks compute on.
        local_world_size: number of ranks on one machine. Default: computed from the launch settings, else all ranks.

    Raises:
        SpecError: at least one problem is an error. The exception contains all problems of the spec and of the plan,
            including warnings and notes.
    """
    collector = ProblemCollector(spec)
    mesh, strategy = resolve_mesh(world_size, local_world_size, collector)
    precision = resolve_precision(model, device_type, collector)
    parts = sharded_parts(model, collector) or _planned_parts(model, strategy, precision, collector)
    version: Version = 1 if parts.backend == "fsdp1" else 2
    if spec.sharding.reduce_replicas_at_last_micro_batch and (version == 1 or not has_replicas(mesh, strategy)):
        message = f"reduce_replicas_at_last_micro_batch needs FSDP2 and replicas, but FSDP{version} runs {strategy}."
        fix = "Set fsdp_version: 2 and fsdp_sharding_strategy: HYBRID_SHARD, or remove the key."
        collector.add("FSDP-E170", "sharding.reduce_replicas_at_last_micro_batch", message, fix)
    fp32_modules, fp32_parameters = resolve_fp32_modules(model, precision, parts, collector)
    _check_attention(mesh, model, collector)
    check_divided_layers(mesh, model, collector)
    activation = spec.activation
    is_of_units = activation.checkpointing != "none" and not activation.native
    if is_of_units and spec.wrap.policy == "none" and not parts.pre_sharded:
        message = "fsdp_activation_checkpointing checkpoints the units of the wrap policy, and no wrap policy is set."
        fix = "Set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP."
        collector.add("FSDP-E241", "activation.checkpointing", message, fix)
    if version == 1 and STRATEGIES[strategy].is_sharded:
        _check_reentrant(model, parts, collector)
    if (problem := unsupported_device(device_type)) is not None:
        collector.problems.append(problem)
    if version == 2:
        collector.problems.extend(check_fsdp1_only(spec))
    problems = tuple(dict.fromkeys((*spec.problems, *collector.problems)))
    if has_errors(problems):
        raise SpecError(problems)
    return FsdpPlan(
        **{field.name: getattr(parts, field.name) for field in fields(parts)},
        model_class=model_class_name(model),
        world_size=world_size,
        device_type=device_type,
        strategy=strategy,
        mesh=mesh,
        fp32_modules=fp32_modules,
        fp32_parameters=fp32_parameters,
        offload_params=spec.offload.params,
        offload_optimizer=spec.offload.optimizer and not spec.offload.params and device_type != "cpu",
        pin_memory=spec.offload.pin_memory and device_type != "cpu",
        precision=precision,
        prefetch=replace(spec.prefetch, limit_all_gathers=spec.prefetch.limit_all_gathers or version == 2),
        state_dict=spec.checkpoint.state_dict,
        activation=spec.activation,
        ram_efficient=spec.loading.ram_efficient,
        sync_module_states=spec.loading.sync_module_states,
        use_orig=spec.params.use_orig or version == 2,
        spec=spec,
        problems=problems,
    )


def resolve_precision(model: nn.Module, device_type: str, problems: ProblemCollector) -> PrecisionPlan:
    """Return the planned dtypes.

    With mixed precision, trainable parameters are stored in fp32, and cast for each all-gather.
    """
    asked = problems.spec.precision
    dtypes: dict[str, Any] = {name: getattr(asked, name) for name in ("param", "reduce", "output", "buffer")}
    for name, dtype in dtypes.items():
        dtypes[name] = "unchanged" if dtype == "auto" else dtype
        if dtype == "fp16" and device_type == "cpu":
            problems.add("FSDP-E147", f"precision.{name}", *FP16_ON_CPU)
    if asked.param in _MIXED:
        return PrecisionPlan(**dtypes, master="fp32", fp32_modules=asked.fp32_modules)
    trained = {p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point()}
    if trained in ({torch.bfloat16}, {torch.float16}):
        name = format_dtype(trained.pop())
        message = f"the model is {name} and mixed precision is off, so master weights and optimizer state are {name} "
        message += "too. Small updates are rounded to zero."
        fix = "Set mixed_precision: bf16 to store master weights in float32, or load the model in float32."
        problems.add("FSDP-W231", "precision.param", message, fix)
    return PrecisionPlan(**dtypes, master="unchanged", fp32_modules=asked.fp32_modules)


def resolve_fp32_modules(
    model: nn.Module, precision: PrecisionPlan, parts: ModelParts, problems: ProblemCollector
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what ``precision.fp32_modules`` selects: modules and sharded parameters. FSDP casts no others.

    The modules are the outermost ones that match, and other modules that share a parameter with them. The parameters
    have their first names, in the order of the model. Both are empty without the setting or mixed precision, and for a
    model that the script sharded.
    """
    by_script = parts.pre_sharded and not parts.sharded_at_load
    if by_script or not (matched := matching_modules(_FP32_MODULES, model, problems)):
        return (), ()
    sharded = [e for e in ModuleTree(model).parameters if e.is_floating and e.name not in parts.ignored_parameters]
    entries = [e for e in sharded if any(is_inside(name, outer) for name in e.names for outer in matched)]
    if not entries:
        message = f"no sharded parameter is in the modules that {precision.fp32_modules!r} matches: "
        message += f"{format_names(matched, 3)}."
        fix = "Write a pattern for modules with parameters, or remove the key."
        problems.add("FSDP-E212", _FP32_MODULES, message, fix)
        return (), ()
    # FSDP2 can leave a parameter uncast, but not cast it to fp32.
    if others := [entry for entry in entries if precision.stored_dtype(entry.parameter) != torch.float32]:
        dtypes = sorted({format_dtype(entry.parameter.dtype) for entry in others})
        why = "mixed precision is off"
        fix = "Set mixed_precision: bf16, which stores trainable parameters in float32, or load the model in float32."
        if precision.master == "fp32":
            why, fix = "they are frozen", "Load these modules in float32, or write a pattern without them."
        message = f"{plural(len(others), 'parameter')} of the selected modules cannot be computed in fp32: the shards "
        message += f"are stored in {', '.join(dtypes)}, because {why}: "
        message += f"{format_names([entry.name for entry in others])}."
        problems.add("FSDP-E283", _FP32_MODULES, message, fix)
    if precision.param not in _MIXED:
        return (), ()  # nothing is cast
    if parts.backend == "fsdp1" or not is_since_2_15():
        is_fsdp1 = parts.backend == "fsdp1"
        version = "FSDP1" if is_fsdp1 else f"FSDP2 of torch {torch.__version__}"
        message = f"{version} computes all parameters of a unit in one dtype."
        fix = f"torch {SINCE_2_15} or newer, or remove the key."
        fix = f"Set fsdp_version: 2, with {fix}" if is_fsdp1 else f"Install {fix}"
        problems.add("FSDP-E282", _FP32_MODULES, message, fix)
    owners = dict.fromkeys(path for entry in entries for path in entry.modules)
    outermost = [name for name in matched if not any(name != other and is_inside(name, other) for other in matched)]
    tied = [path for path in owners if not any(is_inside(path, outer) for outer in outermost)]
    return (*outermost, *tied), tuple(entry.name for entry in entries)


def _planned_parts(model: nn.Module, strategy: str, precision: PrecisionPlan, problems: ProblemCollector) -> ModelParts:
    """Return the parts of a model that is not sharded yet."""
    ignored = matching_modules("wrap.ignored_modules", model, problems)
    tree = ModuleTree(model, [model.get_submodule(name) for name in ignored])
    if not tree.parameters:
        message = f"{type(model).__name__} has no parameters to shard."
        problems.add("FSDP-E252", None, message, "Pass the model that is trained.")
        return ModelParts(backend="fsdp2", units=())
    units = wrap_units(tree, strategy, precision, problems)
    check_parameters(tree, units, precision, problems)
    return ModelParts(
        backend="fsdp1" if problems.spec.fsdp.version == 1 else "fsdp2",
        units=units,
        ties=tuple(entry.names for entry in tree.parameters if len(entry.names) > 1),
        ignored_modules=ignored,
        ignored_parameters=tuple(entry.name for entry in tree.parameters if entry.ignored),
    )


def _check_attention(mesh: MeshPlan, model: nn.Module, problems: ProblemCollector) -> None:
    """Check that each layer's attention can be divided over a context axis: torch divides causal SDPA only."""
    config = getattr(model, "config", None)
    if mesh.context == 1 or config is None:
        return
    used = getattr(config, "_attn_implementation", None) or "sdpa"
    if used != "sdpa":
        message = f"mesh.context={mesh.context} divides the attention of torch (sdpa), and the model uses {used}."
        fix = "Load the model with attn_implementation='sdpa', or set cp_size to 1."
        problems.add("FSDP-E206", "mesh.context", message, fix)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    if not kinds and getattr(text, "layer_types", None) is None and getattr(text, "sliding_window", None):
        kinds = {"sliding_attention"}
    if kinds:
        message = f"mesh.context={mesh.context} divides full causal attention, and {model_class_name(model)} has "
        message += f"layers with {format_names(sorted(kinds))}."
        fix = "Set cp_size to 1, or train a model whose layers all have full attention."
        problems.add("FSDP-E206", "mesh.context", message, fix)


def check_installed_axes(mesh: MeshPlan, problems: ProblemCollector) -> None:
    """Check that the installed Transformers can divide the layers of a model over a mesh and shard it, too."""
    needed = max((since for axis, since in _AXES_SINCE.items() if getattr(mesh, axis) > 1), default=(0, 0))
    if mesh.has_divided_layers and mesh.num_shards > 1 and release_of(installed := version_of("transformers")) < needed:
        message = f"Transformers {installed} cannot make a mesh of {format_value(mesh.axes())}."
        fix = f"Install transformers>={needed[0]}.{needed[1]}."
        problems.add("FSDP-E122", "mesh.tensor" if mesh.tensor > 1 else "mesh.expert", message, fix)


def check_divided_layers(mesh: MeshPlan, model: nn.Module, problems: ProblemCollector) -> None:
    """Check that a model has plans for the tensor and expert axes, whose sizes divide its heads and experts."""
    check_installed_axes(mesh, problems)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    axes = {
        "tensor": (mesh.tensor, "tp_plan", ("num_attention_heads", "num_key_value_heads")),
        "expert": (mesh.expert, "ep_plan", ("num_experts", "num_local_experts", "n_routed_experts")),
    }
    name = model_class_name(model)
    for axis, (size, plan, counts) in axes.items():
        setting = f"mesh.{axis}"
        if size > 1 and not getattr(model, plan, None):
            message = f"{setting}={size}, but {name} has no {plan}: Transformers does not know how to divide it."
            fix = f"Set {setting} to 1, or train a model of Transformers whose config has a base_model_{plan}."
            problems.add("FSDP-E207", setting, message, fix)
        for count, number in ((count, getattr(text, count, None)) for count in counts):
            if isinstance(number, int) and number % size:
                message = f"{setting}={size} does not divide the {count}={number} of {name}."
                problems.add("FSDP-E208", setting, message, f"Set it to a divisor of {number}.")


def _check_reentrant(model: nn.Module, parts: ModelParts, problems: ProblemCollector) -> None:
    """Check that no unit of FSDP1 contains layers that Transformers computes again in backwards of their own.

    FSDP1 reduces the gradients of a unit, and frees its parameters, at the end of the first of these backwards.
    """
    for name, module in model.named_modules():
        function = vars(module).get("_gradient_checkpointing_func")
        is_enabled = module.gradient_checkpointing if "GradientCheckpointingLayer" in class_names(module) else False
        if not (is_enabled and getattr(function, "keywords", {}).get("use_reentrant")):
            continue
        others = [unit for unit in parts.units if not any(is_inside(inner, name) for inner in unit.modules)]
        around = [unit.name or "(root)" for unit in others if any(is_inside(each, name) for each in unit.parameters)]
        if around:
            message = f"use_reentrant=True of gradient checkpointing, and {name} is in the unit {around[0]}. FSDP1 "
            message += "frees the parameters of a unit after the backward of the first checkpointed layer in it."
            fix = 'Set gradient_checkpointing_kwargs={"use_reentrant": False}, fsdp_version: 2, or units that are '
            fix += "these layers: fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP."
            problems.add("FSDP-E225", None, message, fix)
            return
