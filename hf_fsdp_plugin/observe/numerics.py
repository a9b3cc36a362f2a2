"""Recognizes casts that are not planned, and gradients that are not reduced."""

from __future__ import annotations

from hf_fsdp_plugin.observe.live_run import LiveRun
from hf_fsdp_plugin.observe.units import dtype_name

_TORCH_NAMES = {"fp32": "float32"}
"""A plan's name of a dtype -> torch's name."""


def unplanned_cast(run: LiveRun) -> str:
    """Describe a cast of the weights after they were sharded, or autocast to another dtype; empty without either."""
    if stored := _unplanned_dtypes(run):
        return f"the weights have been cast to {', '.join(stored)} after they were sharded"
    autocast = {dtype_name(dtype) for dtype in run.first_step.autocast_dtypes} - {run.plan.precision.param}
    # Accelerate's autocast of a setting that the policy overrides is not of the script.
    autocast -= {str(run.plan.spec.launch.mixed_precision).lower()}
    return f"the model was called in an autocast context of {', '.join(sorted(autocast))}" if autocast else ""


def _unplanned_dtypes(run: LiveRun) -> list[str]:
    """Return the floating-point dtypes of shards that no planned unit has, before or after the cast to the master."""
    if run.plan.pre_sharded:
        return []
    planned = {dtype for unit in run.plan.units for dtype in unit.dtypes}
    planned.add(_TORCH_NAMES.get(run.plan.precision.master, run.plan.precision.master))
    shards = (shard for unit in run.units_with_params for shard in unit.live.shards if shard.is_floating_point())
    return sorted(
        {dtype_name(shard.dtype) for shard in shards if str(shard.dtype).removeprefix("torch.") not in planned}
    )


def not_reduced(run: LiveRun) -> list[str]:
    """Return the units whose gradients an optimizer step ignored, or of which some are set not to be reduced.

    Between two micro-batches, Accelerate sets this for all units.
    """
    switched_off = [unit.name or "(root)" for unit in run.units_with_params if not unit.live.reduces]
    if len(switched_off) == len(run.units_with_params):
        switched_off = []
    return sorted({*run.first_step.unreduced, *switched_off})
