"""Resolves the units of a model, and reads those of a model that was sharded before it was passed to the plugin.

The units are the layers that the wrap policy selects, embedding, norm and head (FSDP2 only), and the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.plan.fsdp_plan import Backend, ModelParts, PrecisionPlan, ProblemCollector, UnitPlan, unit_plan
from hf_fsdp_plugin.plan.modules import ModuleTree, ParameterEntry, post_order
from hf_fsdp_plugin.plan.names import ancestors, canonical_name, is_inside, parent_of
from hf_fsdp_plugin.plan.parameters import modules_of_other_kinds
from hf_fsdp_plugin.plan.wrap_policy import policy_modules
from hf_fsdp_plugin.problems import has_errors
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.torch_private import fsdp1, fsdp2
from hf_fsdp_plugin.torch_private.live_unit import LiveUnit


@dataclass(kw_only=True, slots=True)
class _UnitDraft:
    """A unit while its members and parameters are determined. Members that share parameters are removed."""

    members: list[str]
    from_policy: bool
    reshard: bool
    is_split_off: bool = False
    parameters: list[ParameterEntry] = field(default_factory=list)


def wrap_units(
    tree: ModuleTree, strategy: str, precision: PrecisionPlan, problems: ProblemCollector
) -> tuple[UnitPlan, ...]:
    """Return the units, children before parents, the root last.

    Under FSDP1, the units are the layers of the policy, the root, and the modules inside them that cannot be in the
    same unit because of their dtype or ``requires_grad``. FSDP2 adds the groups of Accelerate's
    ``fsdp2_prepare_model``: the input embedding, and the final norm with the output head; with tied weights, these
    three are one group. A shared parameter belongs to the innermost unit that contains all modules that use it: FSDP2
    rejects a parameter in two units, and FSDP1 would silently untie it.
    """
    spec, reshard = problems.spec, STRATEGIES[strategy].reshards_after_forward
    num_before = len(problems.problems)
    has_submodules = any(name for name, _ in tree.named())
    selected = policy_modules(tree, problems) if has_submodules else ()
    if has_errors(problems.problems[num_before:]):
        return ()  # checks of a root unit with all parameters would report misleading problems
    drafts = [_UnitDraft(members=[name], from_policy=True, reshard=reshard) for name in selected]
    if spec.fsdp.version == 2 and spec.wrap.policy != "none":
        drafts = _add_embedding_and_head(tree, drafts, reshard)
    drafts.append(_UnitDraft(members=[""], from_policy=False, reshard=False))
    removed = _remove_sharing_members(tree, drafts)
    _assign_parameters(tree, drafts)
    if spec.fsdp.version == 1:
        drafts = _split_by_kind(tree, drafts, precision, reshard, problems)
    for draft in drafts[:-1]:  # without the root: members that contain none of the unit's parameters are removed
        modules = {module for entry in draft.parameters for module in entry.modules}
        draft.members = [name for name in draft.members if any(is_inside(module, name) for module in modules)]
    layers = {name for draft in drafts if draft.from_policy for name in draft.members}
    units = tuple(_unit(tree, draft, layers) for draft in drafts if draft.members)
    if removed:
        shared = [" = ".join(entry.names) for entry in tree.parameters if entry.name in removed.values()]
        message = f"{plural(len(removed), 'module is', 'modules are')} not wrapped as separate units because of shared "
        message += f"parameters: {format_names(removed)}. Shared: {format_names(shared)}. A shared parameter belongs "
        message += "to the innermost unit that contains all modules that use it."
        problems.add("FSDP-N217", "wrap.policy", message)
    if not has_submodules or not any(name in selected for unit in units for name in unit.modules):
        _report_only_root(tree, selected, removed, problems)
    return units


def _unit(tree: ModuleTree, draft: _UnitDraft, layers: set[str]) -> UnitPlan:
    """Return the unit of a draft. A layer inside another layer is not checkpointed, because the outer one is."""
    is_nested = any(path in layers for path in ancestors(parent_of(draft.members[0])))
    return unit_plan(
        {name: type(tree.modules[name]).__name__ for name in draft.members},
        [(e.name, e.parameter.numel(), e.parameter.dtype, e.parameter.requires_grad) for e in draft.parameters],
        reshard=draft.reshard,
        from_policy=draft.from_policy and not is_nested,
        is_split_off=draft.is_split_off,
    )


def _add_embedding_and_head(tree: ModuleTree, drafts: list[_UnitDraft], reshard: bool) -> list[_UnitDraft]:
    """Add the input embedding, and the final norm with the output head, which stay gathered until backward."""

    def outside(*names: str | None) -> list[str]:
        """Return the modules that exist and are not in a layer, whose unit gathers the modules inside it."""
        layers = {name for draft in drafts for name in draft.members}
        return [name for name in names if name and not any(is_inside(name, layer) for layer in layers)]

    embedding, head = _module_from(tree, "get_input_embeddings"), _module_from(tree, "get_output_embeddings")
    norm, added = _final_norm(tree), []
    weights = [getattr(tree.modules[name], "weight", None) for name in (embedding, head) if name]
    if embedding and head and weights[0] is not None and weights[0] is weights[1]:
        # If they are tied, they are one group, even if the policy selects one of them.
        drafts = [draft for draft in drafts if draft.members[0] not in (embedding, head)]
        group = [embedding, *outside(norm), head]
    else:
        added = [_UnitDraft(members=[name], from_policy=False, reshard=reshard) for name in outside(embedding)]
        group = [name for name in outside(norm, head) if name != embedding]
    if group:
        added.append(_UnitDraft(members=list(dict.fromkeys(group)), from_policy=False, reshard=False))
    return _in_order(tree, [*drafts, *added])


def _in_order(tree: ModuleTree, drafts: list[_UnitDraft]) -> list[_UnitDraft]:
    """Return the drafts with children before parents, otherwise in forward order."""
    position = {name: at for at, name in enumerate(post_order(name for name, _ in tree.named() if name))}
    return sorted(drafts, key=lambda draft: min(position[name] for name in draft.members))


def _module_from(tree: ModuleTree, method: str) -> str | None:
    """Return the name of the module that a Transformers accessor returns; ``None`` if it is not in this model."""
    with suppress(NotImplementedError, AttributeError):  # there is no accessor, or no such module
        return tree.name_of(getattr(tree.model, method)()) or None
    return None


def _final_norm(tree: ModuleTree) -> str | None:
    """Return the last norm among the base model's direct children, as in Accelerate."""
    prefix = getattr(tree.model, "base_model_prefix", "")
    base = getattr(tree.model, prefix, None) if prefix else tree.model
    children = base.children() if isinstance(base, nn.Module) else ()
    norms = [child for child in children if "Norm" in type(child).__name__]
    return tree.name_of(norms[-1]) if norms else None


def _owners(tree: ModuleTree, drafts: list[_UnitDraft]) -> dict[str, int]:
    """Return module name -> index of the innermost unit that contains the module."""
    unit_of = {id(tree.modules[name]): at for at, draft in enumerate(drafts) for name in draft.members}
    owners: dict[str, int] = {}
    for path, module in tree.modules.items():
        owners[path] = unit_of[id(module)] if id(module) in unit_of else owners[parent_of(path)]
    return owners


def _assign_parameters(tree: ModuleTree, drafts: list[_UnitDraft]) -> None:
    owners = _owners(tree, drafts)
    for draft in drafts:
        draft.parameters.clear()
    for entry in tree.parameters:
        if not entry.ignored:
            drafts[owners[entry.modules[0]]].parameters.append(entry)


def _split_by_kind(
    tree: ModuleTree, drafts: list[_UnitDraft], precision: PrecisionPlan, reshard: bool, problems: ProblemCollector
) -> list[_UnitDraft]:
    """Add units for the modules that FSDP1 cannot flatten together with the other parameters of their unit."""
    use_orig = problems.spec.params.use_orig
    split: dict[str, None] = {}
    most = 0
    for draft in drafts:
        found = modules_of_other_kinds(tree, draft.parameters, precision, use_orig)
        split |= dict.fromkeys(found)
        most = max(most, len(found))
    if not split:
        return drafts
    added = [_UnitDraft(members=[name], from_policy=False, reshard=reshard, is_split_off=True) for name in split]
    drafts = [*_in_order(tree, [*drafts[:-1], *added]), drafts[-1]]
    _assign_parameters(tree, drafts)
    what = "one dtype" if use_orig else "one dtype, and either all trainable or all frozen"
    advice = "fsdp_version: 2" if use_orig else "fsdp_use_orig_params: true, or fsdp_version: 2,"
    are_units = "module is a unit of its own" if len(split) == 1 else "modules are units of their own"
    message = f"{len(split)} {are_units}, because the parameters of an FSDP1 unit must be {what}: "
    message += f"{format_names(split, 2)}. Each forward and each backward gathers these small units one by one, up to "
    message += f"{most} in one layer."
    fix = f"Set {advice} to gather a layer at once. Results are the same."
    problems.add("FSDP-W265", "fsdp.version" if use_orig else "params.use_orig", message, fix)
    return drafts


def _remove_sharing_members(tree: ModuleTree, drafts: list[_UnitDraft]) -> dict[str, str]:
    """Remove members until no parameter is in two units. Return removed member -> name of the shared parameter."""
    removed: dict[str, str] = {}
    while True:
        owners = _owners(tree, drafts)
        members = {name for draft in drafts for name in draft.members}
        found: dict[str, str] = {}
        for entry in tree.parameters:
            if not entry.ignored and len({owners[module] for module in entry.modules}) > 1:
                for path in entry.sharing_modules:
                    if path in members:
                        found.setdefault(path, entry.name)
        if not found:
            return removed
        for draft in drafts:
            draft.members = [name for name in draft.members if name not in found]
        drafts[:] = [draft for draft in drafts if draft.members]
        removed |= found


def _report_only_root(
    tree: ModuleTree, selected: tuple[str, ...], removed: dict[str, str], problems: ProblemCollector
) -> None:
    wrap, name = problems.spec.wrap, type(tree.model).__name__
    fix = "Name the repeated layers in fsdp_transformer_layer_cls_to_wrap, or use SIZE_BASED_WRAP."
    has_no_layers = wrap.policy == "transformer" and not wrap.classes and not tree.own_classes()
    if wrap.policy == "none" or len(tree.modules) == 1 or has_no_layers:
        reason = "without a wrap policy" if wrap.policy == "none" else "without layers that it declares or repeats"
        message = f"{reason}, {name} is one unit: each rank gathers all parameters at once and keeps them until the "
        message += "end of backward, so only gradients and optimizer state are sharded."
        if wrap.policy == "none":
            fix = "Set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, or add auto_wrap to fsdp."
        problems.add("FSDP-W218", "wrap.policy", message, fix)
        return
    setting = "wrap.classes" if wrap.classes else "wrap.policy"
    if sharing := [each for each in selected if each in removed]:
        reason = f"all selected modules ({format_names(sharing)}) share parameters with modules outside them"
    elif selected:
        reason = f"the selected modules ({format_names(selected)}) have no parameters left to shard"
    elif wrap.policy == "size":
        largest = max(sum(p.numel() for p in module.parameters()) for path, module in tree.named() if path)
        reason = f"no module of {name} has {wrap.min_num_params:,} parameters outside smaller units"
        setting, fix = "wrap.min_num_params", f"Set a lower fsdp_min_num_params. The largest module has {largest:,}."
    else:
        classes = ", ".join(wrap.classes) or "the model's own layer classes"
        reason = f"no module of {classes} can be wrapped, because it is ignored or is the model itself"
    problems.add("FSDP-E219", setting, f"the wrap policy would make the root the only unit: {reason}.", fix)


def sharded_parts(model: nn.Module, problems: ProblemCollector) -> ModelParts | None:
    """Return the parts of a model that is already sharded; ``None`` for other models."""
    if (backend := sharded_backend(model)) is None:
        return None
    spec, version, name = problems.spec, 1 if backend == "fsdp1" else 2, model_class_name(model)
    # Other parallelism, such as tensor parallelism, uses DTensors too.
    has_units = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    function = "FullyShardedDataParallel" if version == 1 else "fully_shard"
    function = function if has_units else "DTensors of another parallelism"
    if spec.fsdp.version != version:
        message = f"version {spec.fsdp.version} is overridden: the model is already sharded with {function}."
        fix = f"Set fsdp_version: {version}, or pass the model unwrapped."
        problems.add("FSDP-W250", "fsdp.version", message, fix)
    at_load = distributed_config_of(model) is not None
    kept = ["wrap.policy", "wrap.classes", "wrap.min_num_params", "wrap.ignored_modules"]
    kept += [] if at_load else ["precision.fp32_modules"]
    unused = [setting for setting in kept if spec.asked(setting)]
    ignored = f" {', '.join(unused)} {'is' if len(unused) == 1 else 'are'} ignored." if unused else ""
    if at_load and not unused:
        problems.add("FSDP-N280", None, f"from_pretrained has sharded {name}: its units, mesh and offload are kept.")
    elif has_units:
        message = f"{name} is already sharded with {function}. Its units, sharding, precision and offload are kept."
        fix = "Pass the model unwrapped to apply the config."
        problems.add("FSDP-W251", unused[0] if unused else None, f"{message}{ignored}", fix)
    else:
        message = f"the parameters of {name} are DTensors already, as tensor parallelism makes them, and it has no "
        message += "FSDP units. FSDP is not applied: nothing more is sharded, and no gradients are averaged over "
        message += f"ranks with other data.{ignored}"
        fix = "Load the model without tp_plan and without parallelize_module to train it with FSDP."
        problems.add("FSDP-W251", unused[0] if unused else None, message, fix)
    units = sharded_units(model, backend)
    if at_load:
        # Transformers never frees the last norm and the head, so these units do not show the strategy.
        units = tuple(replace(unit, from_policy=unit.from_policy and unit.reshard_after_forward) for unit in units)
    parameters = ModuleTree(model).parameters
    added = [entry.name for entry in parameters if not isinstance(entry.parameter, DTensor)]
    return ModelParts(
        backend=backend,
        units=units,
        ties=tuple(entry.names for entry in parameters if len(entry.names) > 1) if backend == "fsdp2" else (),
        # Transformers does not know of parameters that are added after from_pretrained. In a model that the script
        # sharded, the script reduces their gradients.
        ignored_parameters=tuple(added) if at_load else (),
        pre_sharded=True,
        sharded_at_load=at_load,
    )


def sharded_backend(model: nn.Module) -> Backend | None:
    """Return the version of FSDP that sharded a model; ``None`` for a model that is not sharded.

    A model with ``DTensor`` parameters counts as sharded by version 2.
    """
    sharded = (FSDPModule, FullyShardedDataParallel)
    kinds = {isinstance(module, FSDPModule) for module in model.modules() if isinstance(module, sharded)}
    if kinds:
        return "fsdp2" if True in kinds else "fsdp1"
    return "fsdp2" if any(isinstance(parameter, DTensor) for parameter in model.parameters()) else None


def distributed_config_of(model: Any) -> Any:
    """Return the ``DistributedConfig`` with which ``from_pretrained`` sharded a model; ``None`` for other models.

    A PEFT model returns the config of the model inside.
    """
    if not isinstance(model, nn.Module):
        return None
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    # A config may also be a copy of another model's.
    return config if config is not None and sharded_backend(model) == "fsdp2" else None


def model_class_name(model: nn.Module) -> str:
    """Return the name of the model's class before FSDP wrapped or renamed it."""
    if isinstance(model, FullyShardedDataParallel):
        return type(model.module).__name__
    name = type(model).__name__
    return name.removeprefix("FSDP") if isinstance(model, FSDPModule) else name


def sharded_units(model: nn.Module, backend: Backend) -> tuple[UnitPlan, ...]:
    """Return the existing units, children before parents. Counts are of whole parameters, not of shards."""
    names = {id(module): canonical_name(n) if backend == "fsdp1" else n for n, module in model.named_modules()}
    groups: dict[tuple[nn.Module, ...], list[LiveUnit]] = {}
    for live in live_units(model):  # FSDP2 has a unit for each mesh of the parameters of these modules
        groups.setdefault(live.modules, []).append(live)
    units = []
    for modules, group in groups.items():
        held = [each for live in group for each in live.held]
        paths = [f"{names[id(each.module)]}.{each.attribute}".lstrip(".") for each in held]
        unit = unit_plan(
            {names[id(module)]: model_class_name(module) for module in modules},
            [(path, e.numel, e.part.dtype, e.requires_grad) for path, e in zip(paths, held, strict=True)],
            reshard=any(live.reshards for live in group),
            from_policy=names[id(modules[0])] != "",
            is_split_off=False,
        )
        units.append(unit)
    if not units:  # DTensors without FSDP: the whole model is one unit
        divided = [(name, p) for name, p in model.named_parameters() if isinstance(p, DTensor)]
        rows = [(name, p.numel(), p.dtype, p.requires_grad) for name, p in divided]
        units = [unit_plan({"": model_class_name(model)}, rows, reshard=False, from_policy=False, is_split_off=False)]
    return tuple(reversed(units))


def live_units(model: nn.Module) -> Iterator[LiveUnit]:
    """Yield all FSDP1 and FSDP2 units in the order of the module tree, including those without parameters."""
    inside: set[int] = set()
    sharded = (module for module in model.modules() if isinstance(module, FSDPModule | FullyShardedDataParallel))
    for owner in dict.fromkeys(fsdp2.state_of(m) if isinstance(m, FSDPModule) else m for m in sharded):
        is_fsdp1 = isinstance(owner, FullyShardedDataParallel)
        modules = (owner,) if is_fsdp1 else fsdp2.modules_of(owner)
        is_root = all(id(module) not in inside for module in modules)
        yield from [fsdp1.read_unit(owner, is_root=is_root)] if is_fsdp1 else fsdp2.read_units(owner, is_root=is_root)
        inside.update(id(inner) for outer in modules for inner in outer.modules())
