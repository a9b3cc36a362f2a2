"""Whole weights of a model in training, one unit at a time, as an inference engine loads them.

The names and shapes are those of the files that ``save_pretrained`` writes. While the tensors of a unit are used, the
next unit is gathered, so a rank holds two units beside its shards.

What has changed since the last time is found by hashes of the shards. Counters of changes (``Tensor._version``) would
miss the updates of optimizers with kernels of their own, such as bitsandbytes', and changes of ``parameter.data``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from accelerate.utils.modeling import is_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import PreTrainedModel

from hf_fsdp_plugin.backends.loading.equal_weights import INTEGERS
from hf_fsdp_plugin.backends.ranks.agreement import any_rank_each, collective_call, on_all_ranks
from hf_fsdp_plugin.backends.sharding import script_access
from hf_fsdp_plugin.backends.sharding.buffers import persistent_buffers, send_buffers
from hf_fsdp_plugin.backends.sharding.gathering import Finish, start_flat_gather, start_gather
from hf_fsdp_plugin.backends.sharding.shard import check_idle, check_not_sharded, locate_module
from hf_fsdp_plugin.checkpoint.saved_state import parameter_shards
from hf_fsdp_plugin.integrations.peft import adapted_layers, merged_weights, replaces_base
from hf_fsdp_plugin.integrations.transformers import private
from hf_fsdp_plugin.integrations.transformers.model_files import stores_adapters
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name, named_parameters, unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private import fsdp1

Tensors = dict[str, torch.Tensor]
_HASHED: Final = 1 << 20
"""Elements that are hashed at once."""
_MULTIPLIERS: Final = (-7046029254386353131, -4658895280553007687, 6364136223846793005)
"""Odd numbers: two of splitmix64's, and the multiplier of Knuth's generator MMIX."""


def stream_parameters(
    model: nn.Module,
    merge_adapters: bool = True,
    dtype: torch.dtype | None = None,
    changed_since: MutableMapping[str, int] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and the whole tensors of a prepared model, unit by unit. Collective.

    Every rank gets all tensors, and must take them all: a rank that ends early, by ``break`` or by an exception, leaves
    the others in an all-gather, which ``hf-fsdp launch`` reports as a hang of the place of each rank. If all ranks end
    at the same tensor, ``close()`` of the iterator frees what is gathered. The model must not be trained between the
    first tensor and the last one.

    The names are those of the files of ``save_pretrained``. A tied weight has one of its names. Buffers of the state
    dict come last. A rank holds two units beside its shards if the caller keeps no tensors; on a device a third
    one, until the work on its tensors that the caller has enqueued has run. The tensors are on the device on which the
    model computes; under FSDP1 they are views of a whole unit.

    Args:
        model: a model that ``accelerator.prepare`` or the Trainer has prepared. One that is not sharded is yielded too.
        merge_adapters: yield the weights of the base model with the active adapters merged by PEFT's own code, which
            changes copies only. If false, all parameters by their names in the PEFT model.
        dtype: dtype of floating-point tensors, in which they are sent; by default, that in which the optimizer updates
            them. Adapters are merged before the cast.
        changed_since: a dictionary that the caller keeps, empty at first. Only tensors that have changed since they
            were yielded with the same dictionary are yielded. It gets a hash of this rank's shard of each parameter.

    Raises:
        SpecError: the model is in a forward or a backward, is a part of a sharded model, has quantized weights or
            adapters that cannot be merged; or some ranks do not make the call, or make it with other arguments.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        what = f"stream_parameters was called with dtype={dtype!r}"
        raise script_access.misuse_error(what, "Pass a floating-point dtype, such as torch.bfloat16, or None.")
    place = locate_module(model)
    if place is None:
        check_not_sharded(model)
    elif place.name:
        what = f"stream_parameters was called with {place.name}, a part of a sharded model"
        raise script_access.misuse_error(what, "Pass the whole model, and skip the names of the other parts.")
    root, plan = (model, None) if place is None else (place.root, place.plan)
    return _stream(root, plan, merge_adapters, dtype, changed_since)


def iter_named_params(original: Callable[..., Any], generation: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what TRL sends to vLLM, for a sharded model unit by unit instead of from whole models. Collective."""
    if locate_module(generation.model) is None:
        return original(generation)
    return stream_parameters(generation.model)


def _stream(
    root: nn.Module,
    plan: FsdpPlan | None,
    merge: bool,
    dtype: torch.dtype | None,
    changed_since: MutableMapping[str, int] | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    name, is_partial = type(unwrapped(root)).__name__, changed_since is not None
    call = f"stream_parameters of {name} with merge_adapters={merge}, dtype={dtype}, changed_since={is_partial}"
    with collective_call(call):
        check_idle(root, "stream_parameters")
        with on_all_ranks("reading the layout of the model"):
            weights = _Weights(root, plan, merge=merge, dtype=dtype)
        if plan is not None:
            send_buffers(root)
        hashes = {} if changed_since is None else weights.changed_hashes(changed_since)
    gathers = weights.gathers()
    steps, following = deque[_Step](), next(gathers, deque())
    try:
        while following:
            # Now the tensors of the unit before are freed.
            steps, following = following, next(gathers, deque())
            while steps:
                step = steps[0]
                tensors = step.run()
                names = step.names
                del step, steps[0]
                while tensors:
                    yield tensors.popitem()
                if changed_since is not None:
                    changed_since.update((each, hashes[each]) for each in names)
    finally:
        for step in (*steps, *following):
            step.wait()  # the other ranks have started these all-gathers, too


@dataclass(frozen=True, slots=True)
class _Step:
    """Tensors of a unit that are yielded together: one, those of a layer with adapters, or those of a conversion.

    Attributes:
        gathers: name in the model -> the running all-gather.
        save: returns tensors by their names in the files, from those by their names in the model.
    """

    gathers: Mapping[str, Finish]
    save: Callable[[Tensors], Tensors]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.gathers)

    def wait(self) -> Tensors:
        return {name: finish() for name, finish in self.gathers.items()}

    @torch.no_grad()
    def run(self) -> Tensors:
        return self.save(self.wait())


class _Weights:
    """The parameters and buffers of a model, how they are gathered, and what is saved of them.

    Names are those of ``parameter_shards``.
    """

    def __init__(self, root: nn.Module, plan: FsdpPlan | None, *, merge: bool, dtype: torch.dtype | None) -> None:
        model: Any = unwrapped(root)
        merge = merge and stores_adapters(model)
        self._dtype = dtype
        self._changed: set[str] | None = None
        self._base: Any = model.get_base_model() if merge and is_peft_model(model) else model
        self._prefix = _name_in(root, self._base) if merge else ""
        self._layers = dict(adapted_layers(root)) if merge else {}
        self._is_saved_model = merge or not stores_adapters(model)
        shards, buffers = parameter_shards(root), dict(persistent_buffers(root))
        self._names, self._tensors = shards.names(), {**dict(named_parameters(root)), **buffers}
        self._names |= {name: [name] for name in buffers}
        self._parts = {held.name: [piece.tensor for piece in held.pieces] for held in shards.tensors}
        self._parts |= {name: [buffer] for name, buffer in buffers.items()}
        self._shapes = {held.name: (held.shape, held.dtype) for held in shards.tensors}
        self._shapes |= {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()}
        flats = fsdp1.flat_units(root) if isinstance(root, FSDP) else []
        self._flats = [(unit, flat, [held.name for held in shards.by_id[id(flat)]]) for unit, flat in flats]
        self._check_supported(plan)
        self._in_layer = {
            layer: [name for name, names in self._names.items() if any(each.startswith(f"{layer}.") for each in names)]
            for layer in self._layers
        }
        self._units = self._find_units(plan)
        self._is_converted = self._is_saved_model and self._converts(list(self._names))

    def _check_supported(self, plan: Any) -> None:
        """Raise ``SpecError`` for weights that have no whole form, and adapters that PEFT does not merge in place."""
        if private.is_quantized(self._base):
            message = f"the weights of {type(self._base).__name__} are quantized and sharded: there are no whole ones."
            fix = "Save the adapters that were trained (PeftModel.save_pretrained), and let the engine load them."
            raise SpecError([Problem(code="FSDP-E673", message=message, fix=fix)])
        outside = [name for name in self._names if not name.startswith(self._prefix)]
        replaced = [name for name, layer in self._layers.items() if replaces_base(layer)]
        flat = ["fsdp_use_orig_params: false"] if self._flats and self._layers and not plan.use_orig else []
        if found := [*outside, *replaced, *flat]:
            message = f"the adapters cannot be merged into {type(self._base).__name__} ({format_names(found, 2)})."
            fix = "Call stream_parameters(model, merge_adapters=False), or train LoRA adapters of linear layers and "
            fix += "embeddings, with fsdp_use_orig_params: true."
            raise SpecError([Problem(code="FSDP-E631", message=message, fix=fix)])

    def _find_units(self, plan: FsdpPlan | None) -> list[list[str]]:
        """Return the units of the plan. Units with tensors of one layer with adapters are joined."""
        planned = [names for _, _, names in self._flats] or [
            list(unit.parameters) for unit in (plan.units if plan else ())
        ]
        unit_of = dict.fromkeys(self._names, len(planned))
        unit_of |= {name: number for number, names in enumerate(planned) for name in names if name in unit_of}
        for names in self._in_layer.values():
            first, *others = sorted({unit_of[name] for name in names}) or [0]
            unit_of = {name: first if number in others else number for name, number in unit_of.items()}
        units: dict[int, list[str]] = {}
        for name, number in unit_of.items():
            units.setdefault(number, []).append(name)
        return [units[number] for number in sorted(units)]

    def changed_hashes(self, since: Mapping[str, int]) -> dict[str, int]:
        """Return the hashes of this rank's shards, and yield only what differs on any rank. Collective."""
        found = {name: hash_tensors(parts) for name, parts in self._parts.items()}
        hashes = {name: int(value) for name, value in found.items()}
        flags = any_rank_each([since.get(name) != value for name, value in hashes.items()])
        self._changed = {name for name, flag in zip(hashes, flags, strict=True) if flag}
        return hashes

    def gathers(self) -> Iterator[deque[_Step]]:
        """Start to gather each unit that has anything to yield, one at a time. Collective."""
        return filter(None, map(self._start, self._units))

    @torch.no_grad()
    def _start(self, unit: Sequence[str]) -> deque[_Step]:
        """Start to gather a unit. Collective."""
        layers = [(names, partial(self._merged, layer)) for layer, names in self._in_layer.items() if names[0] in unit]
        merged = {name for names, _ in layers for name in names}
        parts: list[tuple[list[str], Callable[[Tensors], Tensors]]] = list(layers)
        parts += [([name], self._plain) for name in unit if name not in merged]
        if self._is_converted and self._converts(unit):
            parts = [(list(unit), partial(self._converted, parts))]
        parts = [part for part in parts if self._changed is None or self._changed.intersection(part[0])]
        wanted = [name for names, _ in parts for name in names]
        gathers: dict[str, Finish] = {}
        for module, flat, names in self._flats:
            if not gathers.keys().isdisjoint(names) or set(wanted).isdisjoint(names):
                continue
            dtype = self._dtype if merged.isdisjoint(names) else None
            gathers |= zip(names, start_flat_gather(module, flat, dtype), strict=True)
        for name in wanted:
            if name not in gathers:
                gathers[name] = start_gather(self._tensors[name], None if name in merged else self._dtype)
        return deque(_Step({name: gathers[name] for name in names}, save) for names, save in parts)

    def _plain(self, whole: Tensors) -> Tensors:
        return {saved: self._cast(tensor) for name, tensor in whole.items() if (saved := self._saved_name(name))}

    def _merged(self, layer: str, whole: Tensors) -> Tensors:
        inside = {
            each.removeprefix(f"{layer}."): tensor
            for name, tensor in whole.items()
            for each in self._names[name]
            if each.startswith(f"{layer}.")
        }
        weights = merged_weights(self._layers[layer], inside)
        return self._plain({f"{layer}.{name}": tensor for name, tensor in weights.items()})

    def _converted(self, parts: Sequence[tuple[list[str], Callable[[Tensors], Tensors]]], whole: Tensors) -> Tensors:
        state: Tensors = {}
        for names, save in parts:
            state |= save({name: whole.pop(name) for name in names})
        return private.stored_state(self._base, state)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    def _saved_name(self, name: str) -> str:
        """Return the name in the files for a name in the model; empty if the tensor is not saved."""
        saved = name.removeprefix(self._prefix)
        if not self._is_saved_model:
            return saved
        tied = private.tied_weights(self._base)
        saved = tied.get(saved, saved) if len(self._names.get(name, ())) > 1 else saved
        return "" if saved in private.ignored_on_save(self._base) else saved

    def _converts(self, names: Sequence[str]) -> bool:
        """Return whether Transformers saves these tensors with other names or shapes."""
        if not isinstance(self._base, PreTrainedModel):
            return False
        state: Tensors = {}
        for name in names:
            shape, dtype = self._shapes[name]
            saved = self._saved_name(name).replace(".base_layer.", ".")
            state[saved] = torch.empty(shape, dtype=dtype, device="meta")
        try:
            stored = private.stored_state(self._base, dict(state))
        except Exception:  # the conversion computes with the values, which the meta device does not have
            return True
        return {name: tensor.shape for name, tensor in stored.items()} != {n: t.shape for n, t in state.items()}


def _name_in(root: nn.Module, model: nn.Module) -> str:
    """Return the prefix of the names of a module in the model; empty for the model itself."""
    names = (canonical_name(name) for name, module in root.named_modules() if unwrapped(module) is model)
    return f"{next(names)}.".lstrip(".")


def hash_tensors(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 64-bit hash of the elements of tensors, as a scalar on their device.

    It is a sum of the elements' bits, multiplied by odd numbers that depend on the position. So one changed element
    always changes it, and others do but for one in 2^64 cases.
    """
    total = torch.zeros((), dtype=torch.int64, device=parts[0].device if parts else "cpu")
    for part in parts:
        words = part.detach().contiguous().reshape(-1).view(INTEGERS[part.element_size()])
        for chunk in words.split(_HASHED):
            factors = torch.arange(1, chunk.numel() + 1, device=chunk.device) * _MULTIPLIERS[0]
            factors = ((factors ^ (factors >> 29)) * _MULTIPLIERS[1]) | 1
            total = total * _MULTIPLIERS[2] + (chunk.to(torch.int64) * factors).sum()
    return total
