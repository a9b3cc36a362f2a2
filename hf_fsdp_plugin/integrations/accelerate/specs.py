"""Settings that a script gives to an Accelerator: its precision, and the fields that are assigned to its plugin.

Stock Accelerate reads ``accelerator.state.fsdp_plugin.min_num_params = …`` when it prepares a model. Here an assignment
changes the spec, from which the plan of the model is resolved (``PlannedFsdpPlugin.spec_for``). An assignment that
cannot have this effect is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, Final

from accelerate.utils import FullyShardedDataParallelPlugin

from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import with_plugin_object

STATE_DICT_FIELDS: Final = frozenset({"state_dict_type", "state_dict_config", "optim_state_dict_config"})
"""Fields that scripts may change at any time. Each save reads the type; the options of torch have no effect."""
FIELDS: Final = frozenset(field.name for field in fields(FullyShardedDataParallelPlugin)) - STATE_DICT_FIELDS
"""Fields that are settings of the plan."""

_MEANING_OF_NONE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "auto_wrap_policy": "no_wrap",
        "backward_prefetch": "no_prefetch",
        "min_num_params": 0,
        "mixed_precision_policy": {f"{name}_dtype": "no" for name in ("param", "reduce", "output", "buffer")},
    }
)
"""Field -> the value that ``None`` stands for. Other fields have no such value."""


def spec_with_assignments(spec: FsdpSpec, assigned: Mapping[str, Any]) -> FsdpSpec:
    """Return ``spec`` with the fields that a script assigned, which override it with a warning.

    Raises:
        SpecError: a value is not supported, cannot have an effect any more, or conflicts with another setting.
    """
    given: dict[str, Any] = {}
    for name, value in assigned.items():
        if name == "cpu_ram_efficient_loading":
            fix = "Set fsdp_cpu_ram_efficient_loading in the config."
            raise refused_assignment(name, "the model is loaded already", fix)
        if value is None and name not in _MEANING_OF_NONE:
            raise refused_assignment(name, "None is not a value of this setting", "Assign the value that is meant.")
        given[name] = _MEANING_OF_NONE[name] if value is None else value
    changed = with_plugin_object(spec, given)
    if changed.precision.param == "fp16" != spec.precision.param:
        reason = "fp16 needs a gradient scaler, which the Accelerator creates in its constructor"
        raise refused_assignment("mixed_precision_policy", reason, "Set mixed_precision: fp16 in the config.")
    return changed


def refused_assignment(name: str, reason: str, fix: str) -> SpecError:
    """Return the error that an assignment would have no effect."""
    message = f"accelerator.state.fsdp_plugin.{name} was assigned, but {reason}."
    return SpecError([Problem(code="FSDP-E632", message=message, fix=fix)])


def is_of_peft(policy: Any) -> bool:
    """Return whether a wrap policy is the one that PEFT's ``fsdp_auto_wrap_policy`` returns."""
    inner = getattr(policy, "keywords", {}).get("policies", ())
    functions = (getattr(each, "keywords", {}).get("lambda_fn") for each in inner)
    return any(str(getattr(function, "__module__", "")).startswith("peft.") for function in functions)


def with_mixed_precision(spec: FsdpSpec, given: Any) -> FsdpSpec:
    """Return ``spec`` with the precision of ``Accelerator(mixed_precision=…)``, which overrides the sources.

    Raises:
        SpecError: the precision is fp8.
    """
    if given is None or (given == "no" and not spec.asked("precision.param")):
        return spec
    origin = Origin(source="Accelerator()", spelling="mixed_precision", text=str(given))
    if str(given).lower() == "fp8":
        message = "mixed_precision=fp8: fp8 is implemented inside the model (torchao, TransformerEngine), not by FSDP."
        fix = "Set mixed_precision to bf16."
        raise SpecError([Problem(code="FSDP-E121", setting="precision.param", message=message, fix=fix, origin=origin)])
    param: Any = given if given in ("bf16", "fp16") else "auto"
    if param == spec.precision.param:
        return spec
    before = spec.origin("precision.param")
    overridden = Problem(
        code="FSDP-W103",
        setting="precision.param",
        origin=before,
        message=f"{before.written} is overridden by {origin}.",
        fix="Set it in one place.",
    )
    return replace(
        spec,
        precision=replace(spec.precision, param=param),
        origins={**spec.origins, "precision.param": origin},
        problems=(*spec.problems, overridden) if spec.asked("precision.param") else spec.problems,
    )
