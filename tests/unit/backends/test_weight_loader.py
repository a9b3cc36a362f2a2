"""Parameters and buffers are allocated, broadcast and cast before they are sharded."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from hf_fsdp_plugin.backends.loading.weight_loader import (
    BroadcastRecord,
    WeightLoader,
    cast_buffers,
    materialize,
)
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan

CPU = torch.device("cpu")


def test_materialize_allocates_named_parameters_and_keeps_ties():
    with torch.device("meta"):
        model = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    model["two"].weight = model["one"].weight
    record = BroadcastRecord()
    materialize(model, ["one.weight"], CPU, record)
    assert model["two"].weight is model["one"].weight and not model["one"].weight.is_meta
    assert model["one"].bias.is_meta and record.num_filled == 1


def test_checksum_depends_on_values_and_order():
    def checksum(*values: float) -> int:
        record = BroadcastRecord()
        for value in values:
            record.add(torch.tensor([value]))
        return record.read().checksum

    assert checksum(1.0, 2.0) == checksum(1.0, 2.0)
    assert len({checksum(1.0, 2.0), checksum(2.0, 1.0), checksum(1.0, 1.0), checksum(2.0, 2.0)}) == 4


def test_broadcast_counts_parameters_and_buffers(one_rank: None, plan_for: Callable[..., FsdpPlan]):
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("positions", torch.empty(3, device="meta"), persistent=False)
    plan = plan_for(model)
    loader = WeightLoader(replace(plan, sync_module_states=False), model, CPU)
    loader.prepare_buffers()
    assert loader.record.num_tensors == 0
    loader = WeightLoader(replace(plan, sync_module_states=True), model, CPU)
    loader.prepare_buffers()
    for unit in plan.units:
        loader.prepare_unit(unit)
    record = loader.record
    assert (record.num_tensors, record.num_filled) == (3, 1)
    assert not model.positions.is_meta


def test_master_cast_skips_frozen_and_integer_parameters(plan_for: Callable[..., FsdpPlan]):
    model = nn.Linear(2, 2).to(torch.bfloat16)
    model.bias.requires_grad_(False)
    precision = plan_for(nn.Sequential(nn.Linear(2, 2))).precision
    integers = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    parameters = [*model.parameters(), integers]
    masters = (replace(precision, master=master) for master in ("unchanged", "fp32"))
    dtypes = [list(map(master.stored_dtype, parameters)) for master in masters]
    assert dtypes[0] == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert dtypes[1] == [torch.float32, torch.bfloat16, torch.int64]


def test_buffer_cast_skips_integers(plan_for: Callable[..., FsdpPlan]):
    model = nn.BatchNorm1d(2)
    plan = plan_for(nn.Sequential(nn.Linear(2, 2)))
    cast_buffers(replace(plan, precision=replace(plan.precision, buffer="bf16")), model)
    assert (model.running_mean.dtype, model.num_batches_tracked.dtype) == (torch.bfloat16, torch.int64)


def test_gradients_of_ignored_parameters_are_averaged(one_rank: None, plan_for: Callable[..., FsdpPlan]):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plan = plan_for(model, fsdp_ignored_modules="1")
    parameters = WeightLoader(plan, model, CPU).prepare_ignored()
    assert parameters == list(model[1].parameters())
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model[1].bias.grad, torch.ones(2)), "the average over one rank"
