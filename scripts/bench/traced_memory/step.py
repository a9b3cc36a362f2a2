"""One training step of a sharded model under fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.optimizers.clipping import clip_grad_norm
from hf_fsdp_plugin.backends.optimizers.known_optimizers import decide_step_mode
from hf_fsdp_plugin.backends.optimizers.parameters import set_step_mode
from hf_fsdp_plugin.backends.sharding.forwards import configs_with_cache
from hf_fsdp_plugin.backends.sharding.script_access import free_before_step
from hf_fsdp_plugin.backends.sharding.shard import shard
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, torch_dtype
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.tools.plan.estimate.memory.meta_pass import meta_batch
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from hf_fsdp_plugin.torch_private.modules import buffers as own_buffers
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters
from scripts.bench.traced_memory.device import Device
from scripts.bench.traced_memory.optimizers import make_optimizers
from scripts.bench.traced_memory.places import Places
from scripts.bench.traced_memory.recorder import Recorder

_MAX_NORM = 1.0


class Step:
    """A sharded model with its optimizer, and the steps of a workload. Create and use it under fake tensors."""

    def __init__(
        self,
        plan: FsdpPlan,
        model: nn.Module,
        workload: Workload,
        recorder: Recorder,
        places: Places,
        device: Device,
    ) -> None:
        """Shard a copy of ``model``. ``plan`` is for the CPU; ``device`` is that of the user's plan."""
        self._plan, self._workload, self._recorder, self._places = plan, workload, recorder, places
        self._offloads = device.offloads
        sizes = {"micro_batch": workload.micro_batch, "seq_len": workload.seq_len}
        self._batch = meta_batch(model, **sizes)
        model = allocated(model).train()
        set_attention: Any = getattr(model, "set_attn_implementation", None)
        if set_attention is not None:
            set_attention("eager" if workload.attention == "eager" else "sdpa")
        for config in configs_with_cache(model):
            config.use_cache = False
        self.optimizers = make_optimizers(model, workload, device.type)
        self.model = shard(plan, model, torch.device("cpu"), self.optimizers)
        for optimizer in self.optimizers:
            mode, problem = decide_step_mode(optimizer, plan)
            if problem is not None and problem.severity == "error":
                raise SpecError([problem])
            set_step_mode(optimizer, mode)
            free_before_step(self.model, optimizer)
        if device.offloads:
            self._free_reduced_gradients()
        self._copied_bytes = self._bytes_of_copies() if device.offloads else 0
        places.watch(plan, self.model)

    def run(self, micro_batches: int) -> None:
        """Run one optimizer step."""
        for index in range(micro_batches):
            syncs = self._workload.sync_each_batch or index == micro_batches - 1
            with (
                nullcontext() if syncs else self._no_sync(),
                self._recorder.hold(self._copied_bytes),
                self._places.phase("backward"),
            ):
                self._forward_backward(micro_batches)
                if syncs and self._offloads:
                    self._recorder.move_to_host(parameter.grad for parameter in self.model.parameters())
        if self._workload.clip_norm:
            with self._places.phase("clipping"):
                clip_grad_norm([self.model], self.model.parameters(), _MAX_NORM)
        with self._places.phase("optimizer step"):
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for optimizer in self.optimizers:
            self._recorder.label(_state_tensors(optimizer), "optimizer")

    def label(self) -> None:
        """Label parameters and buffers."""
        self._recorder.label(self.model.parameters(), "params")
        self._recorder.label(self.model.buffers(), "buffers")

    def _free_reduced_gradients(self) -> None:
        """Let the device free each gradient when it is reduced, unless the backend keeps it until the end of backward.

        FSDP1 keeps all (``_saved_grad_shard``), FSDP2 all-reduced ones (``_all_reduce_state``) that it does not cast.
        """
        precision = self._plan.precision
        dtype = torch_dtype(precision.reduce) or torch_dtype(precision.param)
        for parameter in self.model.parameters():
            is_kept = self._plan.mesh.replicate > 1 and dtype in (None, parameter.dtype)
            if isinstance(parameter, DTensor) and parameter.requires_grad and not is_kept:
                parameter.register_post_accumulate_grad_hook(lambda each: self._recorder.move_to_host([each.grad]))

    def _bytes_of_copies(self) -> int:
        """Return the bytes of copies of offloaded parameters that FSDP1 does not shard.

        Nothing frees a copy that autograd has saved in forward (``FlatParamHandle.flat_param_to``).
        """
        dtype = torch_dtype(self._plan.precision.param)
        if self._plan.backend == "fsdp2" or STRATEGIES[self._plan.strategy].is_sharded:
            return 0
        return sum(p.nbytes for p in self.model.parameters() if dtype in (None, p.dtype))

    def _no_sync(self) -> AbstractContextManager[Any]:
        no_sync: Any = self.model.no_sync
        context: AbstractContextManager[Any] = no_sync()
        return context

    def _forward_backward(self, micro_batches: int) -> None:
        with self._places.phase("forward"):
            different = {id(value): value for value in self._batch.values() if isinstance(value, torch.Tensor)}
            inputs = {key: torch.empty(tensor.shape, dtype=tensor.dtype) for key, tensor in different.items()}
            loss = _loss_of(self.model(**{name: inputs.get(id(value), value) for name, value in self._batch.items()}))
        (loss / micro_batches).backward()
        self._recorder.label((parameter.grad for parameter in self.model.parameters()), "grads")


def allocated(model: nn.Module) -> nn.Module:
    """Return a copy of a model with fake tensors on the CPU instead of its tensors. Ties are kept."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        parameters, buffers = own_parameters(module).values(), own_buffers(module).values()
        for tensor in (*parameters, *buffers, *vars(module).values()):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in copies:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                copies[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    return copy.deepcopy(model, copies)


def _loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output[0]
    return loss


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
