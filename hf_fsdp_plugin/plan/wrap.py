"""Spec + model -> units: the policy's layers, the embedding, norm and head that FSDP2 groups apart, and the root."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from hf_fsdp_plugin.plan.complaints import Complaints, shortened
from hf_fsdp_plugin.plan.modules import ModelIndex, ParameterEntry, common_path, is_inside, parent_of
from hf_fsdp_plugin.plan.policy import policy_modules, post_order
from hf_fsdp_plugin.plan.units import UnitPlan, unit_plan
from hf_fsdp_plugin.problems import has_errors
from hf_fsdp_plugin.spec.model import FsdpSpec, Version
from hf_fsdp_plugin.strategies import STRATEGIES


@dataclass(kw_only=True, slots=True)
class Draft:
    """A unit in the making: first names of its modules. Members leave it where a tie forces them out."""

    members: list[str]
    from_policy: bool
    reshard: bool


def wrap_units(
    spec: FsdpSpec, index: ModelIndex, strategy: str, version: Version, complaints: Complaints
) -> tuple[UnitPlan, ...]:
    """The units, bottom-up, the root last.

    Under version 2 these are the groups that Accelerate's ``fsdp2_prepare_model`` makes: the input embedding, and final
    norm with output head (with tied weights all three together), beside the layers of the policy. Under version 1 they
    are the layers and the root. Where one parameter would be seen by two units, the inner ones give way to the module
    that holds all its users: FSDP2 refuses such a model, and FSDP1 would untie the weights without a word.
    """
    reshard = STRATEGIES[strategy].reshards_after_forward
    found = len(complaints.problems)
    picked = policy_modules(spec, index, complaints)
    if has_errors(complaints.problems[found:]):
        return ()  # what the root would hold now says nothing about the model as it will be
    drafts = [Draft(members=[name], from_policy=True, reshard=reshard) for name in picked]
    if version == 2 and spec.wrap.policy != "none":
        drafts = _with_embedding_and_head(index, drafts, reshard)
    root = Draft(members=[""], from_policy=False, reshard=False)
    drafts.append(root)
    dissolved = _dissolve_shared(index, drafts, complaints)
    owned = _owned(index, drafts)
    units = []
    for draft, entries in zip(drafts, owned, strict=True):
        if draft is not root:
            used = {member for entry in entries for member in _members_over(index, draft, entry)}
            draft.members = [member for member in draft.members if member in used]
        if draft.members:
            units.append(_unit(index, draft, entries))
    layers = {name for unit in units if unit.from_policy for name in unit.modules}
    units = [replace(unit, from_policy=unit.from_policy and not _within(unit, layers)) for unit in units]
    _judge(spec, index, picked, units, dissolved, complaints)
    return tuple(units)


def _unit(index: ModelIndex, draft: Draft, entries: Iterable[ParameterEntry]) -> UnitPlan:
    return unit_plan(
        draft.members,
        [type(index.modules[name]).__name__ for name in draft.members],
        [(e.name, e.parameter.numel(), e.parameter.dtype, e.parameter.requires_grad) for e in entries],
        reshard=draft.reshard,
        from_policy=draft.from_policy,
    )


def _within(unit: UnitPlan, layers: set[str]) -> bool:
    """Whether a layer lies in another one, which is checkpointed with all that is in it."""
    path = parent_of(unit.modules[0])
    while path and path not in layers:
        path = parent_of(path)
    return bool(path)


def _with_embedding_and_head(index: ModelIndex, drafts: list[Draft], reshard: bool) -> list[Draft]:
    """Adds the input embedding, and the group of final norm and output head, which stays gathered until backward."""
    embedding, head = _accessor(index, "get_input_embeddings"), _accessor(index, "get_output_embeddings")
    norm = _final_norm(index)
    chosen = {name for draft in drafts for name in draft.members}
    tied = embedding is not None and head is not None and _weight(index, embedding) is _weight(index, head) is not None

    def free(name: str | None) -> bool:
        """Neither picked by the policy nor inside a module that is: its unit gathers it anyway."""
        return name is not None and not any(is_inside(name, outer) for outer in chosen)

    specials = []
    if tied:
        assert embedding is not None and head is not None, "tied means both are there"
        drafts = [draft for draft in drafts if draft.members[0] not in (embedding, head)]
        chosen -= {embedding, head}
        # Both even where a unit holds one of them: two groups must not see one parameter.
        tail = [embedding, *([norm] if norm is not None and free(norm) else []), head]
        specials.append(Draft(members=list(dict.fromkeys(tail)), from_policy=False, reshard=False))
    else:
        if embedding is not None and free(embedding):
            specials.append(Draft(members=[embedding], from_policy=False, reshard=reshard))
        taken = {name for special in specials for name in special.members}
        tail = [name for name in (norm, head) if name is not None and free(name) and name not in taken]
        if tail:
            specials.append(Draft(members=list(dict.fromkeys(tail)), from_policy=False, reshard=False))
    return _in_order(index, [*drafts, *specials])


def _in_order(index: ModelIndex, drafts: list[Draft]) -> list[Draft]:
    """Inner units before those round them, otherwise as forward meets them."""
    position = {name: at for at, name in enumerate(post_order(name for name, _ in index.named() if name))}
    return sorted(drafts, key=lambda draft: min(position[name] for name in draft.members))


def _accessor(index: ModelIndex, method: str) -> str | None:
    """The module that a Transformers accessor returns, if it is a part of this model."""
    getter = getattr(index.model, method, None)
    if getter is None:
        return None
    try:
        found = getter()
    except (NotImplementedError, AttributeError):  # Transformers' way to say that a model has none
        return None
    return index.name_of(found) or None


def _weight(index: ModelIndex, name: str) -> object:
    return getattr(index.modules[name], "weight", None)


def _final_norm(index: ModelIndex) -> str | None:
    """The last norm among the base model's direct children, which is where Accelerate looks for it."""
    model = index.model
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    if not isinstance(base, nn.Module):
        return None
    norms = [child for _, child in base.named_children() if "Norm" in type(child).__name__]
    return index.name_of(norms[-1]) if norms else None


def _owners(index: ModelIndex, drafts: list[Draft]) -> dict[str, int]:
    """Path of every module -> position of the unit that holds it, the innermost one."""
    unit_of = {id(index.modules[name]): at for at, draft in enumerate(drafts) for name in draft.members}
    owners: dict[str, int] = {}
    for path, module in index.modules.items():
        owners[path] = unit_of[id(module)] if id(module) in unit_of else owners[parent_of(path)]
    return owners


def _owned(index: ModelIndex, drafts: list[Draft]) -> list[list[ParameterEntry]]:
    owners = _owners(index, drafts)
    owned: list[list[ParameterEntry]] = [[] for _ in drafts]
    for entry in index.parameters:
        if not entry.ignored:
            owned[owners[entry.occurrences[0].module]].append(entry)
    return owned


def _members_over(index: ModelIndex, draft: Draft, entry: ParameterEntry) -> list[str]:
    """The members of a unit in which a parameter is found."""
    members = {id(index.modules[name]): name for name in draft.members}
    found = []
    for occurrence in entry.occurrences:
        path = occurrence.module
        while path:
            if id(index.modules[path]) in members:
                found.append(members[id(index.modules[path])])
                break
            path = parent_of(path)
    return found


def _dissolve_shared(index: ModelIndex, drafts: list[Draft], complaints: Complaints) -> dict[str, str]:
    """Takes apart units that see a parameter another unit sees too. Returns member -> the parameter that forced it."""
    dissolved: dict[str, str] = {}
    while True:
        owners = _owners(index, drafts)
        leaving: dict[int, str] = {}
        for entry in index.parameters:
            users = {owners[occurrence.module] for occurrence in entry.occurrences}
            if entry.ignored or len(users) == 1:
                continue
            top = common_path(occurrence.module for occurrence in entry.occurrences)
            for occurrence in entry.occurrences:
                path = occurrence.module
                while path != top:
                    leaving.setdefault(id(index.modules[path]), entry.name)
                    path = parent_of(path)
        gone = {name: leaving[key] for key, name in index.first_names.items() if key in leaving}
        gone = {name: why for name, why in gone.items() if any(name in draft.members for draft in drafts if name)}
        if not gone:
            break
        for draft in drafts:
            draft.members = [name for name in draft.members if name not in gone]
        drafts[:] = [draft for draft in drafts if draft.members]
        dissolved |= gone
    if dissolved:
        names = {entry.name: entry.names for entry in index.parameters}
        for parameter in dict.fromkeys(dissolved.values()):
            members = [name for name, why in dissolved.items() if why == parameter]
            complaints.note(
                "wrap.policy",
                f"no unit of its own for {shortened(members)}: {shortened(names[parameter])} are one parameter, and a "
                "parameter belongs to one unit. The unit round all its users holds it.",
            )
    return dissolved


def _judge(
    spec: FsdpSpec,
    index: ModelIndex,
    picked: tuple[str, ...],
    units: list[UnitPlan],
    dissolved: dict[str, str],
    complaints: Complaints,
) -> None:
    """Says what wrapping less than the whole costs."""
    policy = spec.wrap.policy
    model_name = type(index.model).__name__
    if policy == "none":
        complaints.warning(
            "wrap.policy",
            f"no wrap policy: all of {model_name} is one unit, so every rank gathers the whole model at once and "
            "keeps it until backward ends; only gradients and optimizer state are cut.",
            "Take TRANSFORMER_BASED_WRAP (auto_wrap).",
        )
        return
    chosen = set(picked)
    if any(unit.from_policy or not chosen.isdisjoint(unit.modules) for unit in units):
        return
    if lost := [name for name in picked if name in dissolved]:
        reason = f"every module picked ({shortened(lost)}) shares parameters with modules outside it"
        fix = "Wrap classes that hold all users of the shared parameters, or take fsdp_auto_wrap_policy: NO_WRAP."
    elif picked:
        reason = f"every module picked ({shortened(picked)}) has no parameters of its own left to shard"
        fix = "Wrap another class, or ignore fewer modules."
    elif policy == "size":
        reason = f"no part of {model_name} has {spec.wrap.min_num_params:,} parameters that are not in a smaller unit"
        fix = f"Set fsdp_min_num_params lower; {_largest(index)}."
    else:
        classes = ", ".join(spec.wrap.classes) or "the model's own layer classes"
        reason = f"{classes} match nothing that FSDP may wrap (ignored modules and the model itself are not)"
        fix = "Name the class of the repeated layer."
    setting = {"size": "wrap.min_num_params"}.get(policy, "wrap.classes" if spec.wrap.classes else "wrap.policy")
    complaints.error(setting, f"wrapping was asked for, but only the root would be a unit: {reason}.", fix)


def _largest(index: ModelIndex) -> str:
    sizes = [(sum(p.numel() for p in module.parameters()), name) for name, module in index.named() if name]
    if not sizes:
        return "the model has no parts"
    size, name = max(sizes, key=lambda pair: pair[0])
    return f"the largest part, {name}, has {size:,}"
