"""``trace_memory``: the memory of one rank, from a step under fake tensors."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hf_fsdp_plugin.backends.torch_types import device_mesh
from hf_fsdp_plugin.estimate.results import MemoryEstimate
from hf_fsdp_plugin.estimate.trace.places import ROOT, Places
from hf_fsdp_plugin.estimate.trace.recorder import Recorder
from hf_fsdp_plugin.estimate.trace.step import Step
from hf_fsdp_plugin.estimate.trace.timeline import merged, moments
from hf_fsdp_plugin.estimate.trace.values import unpacked_samples
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.torch_private.fake import FakeTensorMode, fake_process_group


def trace_memory(plan: FsdpPlan, model: nn.Module, workload: Workload) -> MemoryEstimate:
    """Return the memory of rank 0, from a training step of ``model`` under fake tensors.

    Args:
        model: the model that was planned, for example on the meta device. It is not changed.
    """
    plan = replace(plan, device_type="cpu", ram_efficient=False, sync_module_states=False)
    places = Places()
    recorder = Recorder(places.now)
    with fake_process_group(plan.world_size):
        device_mesh(plan)
        with FakeTensorMode(), recorder, unpacked_samples():
            step = Step(plan, model, workload, recorder, places)
            step.run(1)
            step.label()
            start = len(recorder.events)
            step.run(workload.accumulation)
            events = list(recorder.finish())
    found = moments(events, start)
    peak = max(found, key=lambda moment: moment.bytes)
    return MemoryEstimate(method="traced", peak=peak, timeline=merged(found, lambda where: where.endswith(ROOT)))
