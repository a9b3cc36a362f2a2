"""A small model with its plan, units and run, without ranks and without FSDP."""

from dataclasses import replace
from typing import Any

from torch import nn

from hf_fsdp_plugin import load_spec, resolve
from hf_fsdp_plugin.observe.observed_run import ObservedRun
from hf_fsdp_plugin.observe.units import UnitObservation
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.torch_private.live_unit import LiveUnit


class Block(nn.Linear):
    pass


def make_model() -> nn.Module:
    return nn.Sequential(Block(4, 4), Block(4, 4), nn.Linear(4, 2))


def make_plan(**settings: Any) -> FsdpPlan:
    """Plan the model for two ranks with these keys of ``fsdp_config``."""
    config = {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "Block", **settings}
    spec = load_spec({"distributed_type": "FSDP", "fsdp_config": config}, environ={})
    return resolve(spec, make_model(), world_size=2, device_type="cpu")


def make_unit(name: str, **facts: Any) -> UnitObservation:
    """Return a unit of 20 parameters; ``facts`` are fields of :class:`UnitObservation` or of its :class:`LiveUnit`."""
    unit = UnitObservation(
        name=name,
        class_name="Block" if name else "Sequential",
        num_params=20,
        num_local_params=10,
        num_frozen=0,
        param_dtype="fp32",
        reduce_dtype="fp32",
        master_dtype="fp32",
        reshard_after_forward=True,
        offloaded=False,
        checkpointed=False,
        live=LiveUnit(2, is_root=not name, parts=[(None, {})], rows=()),
    )
    own = {key: value for key, value in facts.items() if hasattr(unit, key)}
    vars(unit.live).update({"num_params": 20, "shard_size": 2, **facts})
    return replace(unit, **own)


def make_run(plan: FsdpPlan | None = None, **facts: Any) -> ObservedRun:
    """Return a run on two CPU ranks with two units and a root."""
    units = (make_unit("0"), make_unit("1"), make_unit(""))
    defaults = {"model": make_model(), "units": units, "world_size": 2, "device_type": "cpu"}
    return ObservedRun(**{"plan": plan or make_plan(), **defaults, **facts})
