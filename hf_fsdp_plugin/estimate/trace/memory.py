"""``trace_memory``: the memory of one rank, from a step under fake tensors."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.torch_types import device_mesh
from hf_fsdp_plugin.estimate.memory.device import UNKNOWN, Gpu
from hf_fsdp_plugin.estimate.results import MemoryEstimate
from hf_fsdp_plugin.estimate.trace.device import Device
from hf_fsdp_plugin.estimate.trace.places import Places
from hf_fsdp_plugin.estimate.trace.recorder import Event, Recorder
from hf_fsdp_plugin.estimate.trace.reserved import simulated_memory
from hf_fsdp_plugin.estimate.trace.step import Step
from hf_fsdp_plugin.estimate.trace.timeline import merged, moments
from hf_fsdp_plugin.estimate.trace.values import unpacked_samples
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.fake import FakeTensorMode, fake_process_group

_OTHER_METHOD = "Use the closed form: hf-fsdp plan without --trace, or hf_fsdp_plugin.estimate.memory.estimate_memory."


def trace_memory(plan: FsdpPlan, model: nn.Module, workload: Workload, *, gpu: Gpu = UNKNOWN) -> MemoryEstimate:
    """Return the memory of the rank that needs most, from a training step of ``model`` under fake tensors.

    The backends shard a copy of the model in a fake process group of ``plan.world_size`` ranks. A first step creates
    the state of the optimizer and of FSDP; the second one is recorded. Needs no memory for tensors.

    Args:
        model: the model that was planned, for example on the meta device. It is not changed.
        gpu: what is known of the GPU of a plan for CUDA.

    Raises:
        SpecError: this process already has a process group (FSDP-E801), the step cannot run under fake tensors
            (FSDP-E802), or the backend refuses the optimizer.
    """
    if dist.is_initialized():
        message = "this process is a rank of a run, so it cannot be rank 0 of a world that does not exist."
        raise SpecError([Problem(code="FSDP-E801", message=message, fix="Trace in a process of its own.")])
    device = Device(plan, gpu)
    events, start = _record(_traceable(plan), model, workload, device)
    found, host = moments(events, start, device)
    return MemoryEstimate(
        method="traced",
        peak=max(found, key=lambda moment: moment.bytes),
        timeline=merged(found, lambda where: where.endswith(f" of {plan.model_class}")),
        host_bytes=host,
        assumptions=device.assumptions(workload, plan),
        device=simulated_memory(plan, gpu, events, start, lambda block: device.kind_of(block) is not None),
    )


def _traceable(plan: FsdpPlan) -> FsdpPlan:
    """Return the plan for the CPU, without collectives whose results the program reads."""
    return replace(
        plan,
        device_type="cpu",
        ram_efficient=False,
        sync_module_states=False,
        pin_memory=False,
        offload_params=plan.offload_params and plan.device_type == "cpu",
    )


def _record(plan: FsdpPlan, model: nn.Module, workload: Workload, device: Device) -> tuple[list[Event], int]:
    """Return all events since the model was created, and the index of the recorded step's first one."""
    places = Places(plan.model_class)
    recorder = Recorder(places.now, on_cpu=device.is_cpu, shard_copies=device.shard_copies)
    try:
        with fake_process_group(plan.world_size):
            device_mesh(plan)
            with FakeTensorMode(), recorder, unpacked_samples(), device.functions(recorder):
                step = Step(plan, model, workload, recorder, places, device)
                step.run(1)
                step.label()
                start = len(recorder.events)
                step.run(workload.accumulation)
                return list(recorder.finish()), start
    except SpecError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        message = f"a step of {plan.model_class} cannot be traced: {type(error).__name__}: {reason}"
        raise SpecError([Problem(code="FSDP-E802", message=message, fix=_OTHER_METHOD)]) from error
