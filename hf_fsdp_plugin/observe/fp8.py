"""Reads which layers of the live model compute in fp8, and how."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_fsdp_plugin.observe.observed_run import (
    ObservedRun,
    ObservedValue,
    common_value,
    differing_value,
    unobserved_value,
)
from hf_fsdp_plugin.observe.units import fp8_library
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.text import format_names, plural

_OFF = "mixed_precision is not fp8"


def read_backend(run: ObservedRun) -> ObservedValue:
    """Read the library of the layers in fp8, and which linear layers are not among them."""
    layers = _layers(run)
    linear = [canonical_name(name) for name, module in run.model.named_modules() if isinstance(module, nn.Linear)]
    others = [name for name in linear if name not in layers]
    if not layers:
        return differing_value("none", "no layer computes in fp8") if run.plan.spec.uses_fp8 else unobserved_value(_OFF)
    value = common_value(map(fp8_library, layers.values()))
    emulated = any(getattr(config, "emulate", False) for config in _configs(run))
    reason = f"{plural(len(layers), 'layer computes', 'layers compute')} in fp8{', emulated' if emulated else ''}"
    reason += f"; other linear layers: {format_names(others, 3)}" if others else ""
    return ObservedValue(value, reason, matches=value == run.plan.get("fp8.backend"))


def read_all_gather(run: ObservedRun) -> ObservedValue:
    """Read whether the shards of all layers in fp8 cast themselves in the all-gather."""
    if not (sharded := {name for unit in run.units for name in unit.fp8_modules}):
        return unobserved_value("no layer in fp8 is sharded" if run.plan.spec.uses_fp8 else _OFF)
    found = sum(key == "weight" for unit in run.units for _, key in unit.live.casting)
    if 0 < found < len(sharded):
        return differing_value(f"in {found} of {len(sharded)} layers")
    return ObservedValue(found > 0)


def read_padding(run: ObservedRun) -> ObservedValue:
    if not (configs := _configs(run)):
        return unobserved_value("no layer of torchao computes in fp8")
    return ObservedValue(common_value(config.pad_inner_dim for config in configs))


def _layers(run: ObservedRun) -> dict[str, nn.Module]:
    named = ((canonical_name(name), module) for name, module in run.model.named_modules())
    return {name: module for name, module in named if fp8_library(module)}


def _configs(run: ObservedRun) -> list[Any]:
    return [module.config for module in _layers(run).values() if hasattr(module, "config")]
