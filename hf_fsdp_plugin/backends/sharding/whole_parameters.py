"""``full_parameters``: a context in which the whole parameters of a sharded model can be read or changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.loading.pinned_windows import wait_for_reads
from hf_fsdp_plugin.backends.ranks.agreement import on_all_ranks
from hf_fsdp_plugin.backends.ranks.collective_entry import collective_call
from hf_fsdp_plugin.backends.sharding.shard import locate_module
from hf_fsdp_plugin.backends.sharding.submodule_calls import (
    WHOLE_ATTRIBUTE,
    check_not_whole,
    free_gathered,
    misuse,
)
from hf_fsdp_plugin.backends.torch_types import shard_like
from hf_fsdp_plugin.plan.names import named_parameters, unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private import fsdp1, fsdp2
from hf_fsdp_plugin.torch_private.functions import num_changes
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters

_FIX: Final = "Call it on all ranks, outside of `if accelerator.is_main_process:`."


@contextmanager
def full_parameters(module: nn.Module, modify: bool = False) -> Iterator[dict[str, nn.Parameter]]:
    """Let a prepared model, or a module of it, have its whole parameters in the block. Collective.

    In the block, ``module.weight`` and ``module.parameters()`` are whole tensors in the dtype of the shards, under both
    FSDP versions. The block runs under ``torch.no_grad()``. Each rank holds all parameters of ``module`` in the
    block: pass a module of the model, such as ``model.get_input_embeddings()``, to limit the memory. FSDP1 gathers the
    whole units that contain the module's parameters.

    Gradients and optimizers are not affected; an optimizer continues from the changed values. The model can neither be
    called nor saved in the block. A model that is not sharded has whole parameters already, and is left unchanged.

    Args:
        module: a model that ``accelerator.prepare`` or the Trainer has prepared, or a module of it.
        modify: write rank 0's values to the shards of all ranks at the end of the block. So the ranks may change them
            differently, or only rank 0. If the block raises, nothing is written.

    Yields:
        The whole parameters, by their names in ``module`` without FSDP.

    Raises:
        SpecError: parameters were changed without ``modify``; the model is in a forward, a backward or another such
            block; it is sharded, but not by this package; or some ranks do not make the call.
    """
    place = locate_module(module)
    if place is None:
        _check_not_sharded(module)
        with torch.no_grad():
            yield dict(named_parameters(module))
        return
    root = place.root
    with collective_call(f"full_parameters of {type(unwrapped(module)).__name__}", fix=_FIX), torch.no_grad():
        _check_idle(root)
        free_gathered(root)
        whole: _WholeOfFsdp1 | _WholeOfFsdp2
        whole = _WholeOfFsdp1(root, module) if isinstance(root, FSDP) else _WholeOfFsdp2(module)
        with whole.gathered():
            parameters = dict(named_parameters(module))
            with on_all_ranks("running the block of full_parameters"), _in_block(root, module):
                before = {name: num_changes(parameter) for name, parameter in parameters.items()}
                yield parameters
                changed = [name for name, parameter in parameters.items() if num_changes(parameter) != before[name]]
                if changed and not modify:
                    raise misuse(
                        f"{format_names(changed, 3)} was changed in a block of full_parameters, which does "
                        "not keep changes",
                        "Call full_parameters(module, modify=True).",
                    )
            if modify:
                for parameter in {id(parameter): parameter for parameter in parameters.values()}.values():
                    dist.broadcast(parameter.data, 0)
                whole.write()


def _check_idle(root: nn.Module) -> None:
    check_not_whole(root, "full_parameters was called")
    is_idle = fsdp1.is_idle(root) if isinstance(root, FSDP) else not isinstance(root, FSDPModule) or fsdp2.is_idle(root)
    if not is_idle:
        raise misuse(
            "full_parameters was called while the model is in a forward or a backward",
            "Call it between steps, for example in `on_step_end` of a callback.",
        )


def _check_not_sharded(module: nn.Module) -> None:
    if any(isinstance(inner, FSDP) for inner in module.modules()) or any(
        isinstance(parameter, DTensor) for parameter in module.parameters()
    ):
        message = f"{type(module).__name__} is sharded, but was not prepared by an Accelerator or a Trainer."
        fix = "Pass the model to accelerator.prepare(), after hfp.install()."
        raise SpecError([Problem(code="FSDP-E309", message=message, fix=fix)])


@contextmanager
def _in_block(root: nn.Module, module: nn.Module) -> Iterator[None]:
    """Refuse what would use the shards, or gather them again, in the block."""
    modules = {id(inner): inner for inner in (root, *module.modules())}

    def before_forward(*_: Any) -> None:
        check_not_whole(root, "the model was called")

    hooks = [inner.register_forward_pre_hook(before_forward, prepend=True) for inner in modules.values()]
    setattr(root, WHOLE_ATTRIBUTE, True)
    try:
        yield
    finally:
        setattr(root, WHOLE_ATTRIBUTE, False)
        for hook in hooks:
            hook.remove()


class _WholeOfFsdp1:
    """The whole parameters of a module: those of the units of FSDP1 that contain one of them."""

    def __init__(self, root: FSDP, module: nn.Module) -> None:
        root.check_is_root()  # otherwise a unit that is gathered before the first forward takes itself for the root
        wanted = {id(inner) for inner in module.modules()}
        units = [(unit, fsdp1.flat_parameter(unit)) for unit in FSDP.fsdp_modules(root)]
        self._units = [(unit, flat) for unit, flat in units if flat is not None and wanted & _owners(flat)]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Let the module have whole parameters in the block. Collective."""
        with ExitStack() as stack:
            for unit, _ in self._units:
                stack.enter_context(FSDP.summon_full_params(unit, recurse=False, writeback=False))
            yield

    def write(self) -> None:
        """Copy this rank's part of the whole parameters to its shards."""
        wait_for_reads(fsdp1.local_shard(flat) for _, flat in self._units)
        for _, flat in self._units:
            shard = fsdp1.local_shard(flat)
            for member in fsdp1.members(flat):
                whole = getattr(member.module, member.attribute).detach().reshape(-1)
                own = whole[member.start : member.stop]
                shard.narrow(0, member.offset, own.numel()).copy_(own)


def _owners(flat: Any) -> set[int]:
    """Return the ids of the modules in which the parameters of a flat parameter are registered."""
    tied = (other for other, _ in fsdp1.tied_places(flat))
    return {id(member.module) for member in fsdp1.members(flat)} | {id(module) for module, _ in tied}


class _WholeOfFsdp2:
    """The whole parameters of a module, gathered one by one."""

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str, Any]] = [
            (registered, name, parameter)
            for registered in map(own_parameters, module.modules())
            for name, parameter in registered.items()
            if isinstance(parameter, DTensor)
        ]
        self._wholes: dict[int, nn.Parameter] = {}

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Let the module have whole parameters in the block. Collective."""
        for _, _, shard in self._places:
            if id(shard) not in self._wholes:  # a tied parameter is one object
                self._wholes[id(shard)] = nn.Parameter(shard.full_tensor(), requires_grad=shard.requires_grad)
        for registered, name, shard in self._places:
            registered[name] = self._wholes[id(shard)]
        try:
            yield
        finally:
            for registered, name, shard in self._places:
                registered[name] = shard

    def write(self) -> None:
        """Copy this rank's part of the whole parameters to its shards."""
        wait_for_reads(shard.to_local() for _, _, shard in self._places)
        for _, _, shard in self._places:
            shard.to_local().copy_(shard_like(shard, self._wholes[id(shard)].data).to_local())
