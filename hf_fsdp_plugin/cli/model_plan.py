"""The plan of a spec for a model that is named on the command line. Imports torch when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec

if TYPE_CHECKING:
    from torch import nn

    from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan


def plan_of_model(
    spec: FsdpSpec, model: str, *, world_size: int, device_type: str
) -> tuple[FsdpPlan | None, tuple[Problem, ...]]:
    """Return the plan and its problems; no plan if a problem is an error, or if the model cannot be built.

    Args:
        model: a folder with a ``config.json``, or a hub id.
    """
    built, problems = load_model(model)
    return (None, problems) if built is None else plan_of(spec, built, world_size=world_size, device_type=device_type)


def plan_of(
    spec: FsdpSpec, model: nn.Module, *, world_size: int, device_type: str
) -> tuple[FsdpPlan | None, tuple[Problem, ...]]:
    """Return the plan and its problems; no plan if a problem is an error."""
    from hf_fsdp_plugin.estimate.unit_sizes import with_padding_warning
    from hf_fsdp_plugin.plan.resolve import resolve

    try:
        plan = with_padding_warning(resolve(spec, model, world_size=world_size, device_type=device_type), model)
    except SpecError as error:
        return None, error.problems
    return plan, plan.problems


def load_model(model: str) -> tuple[nn.Module | None, tuple[Problem, ...]]:
    """Return the model on the meta device; ``None`` and the reason if it does not exist or cannot be built."""
    from hf_fsdp_plugin.plan.meta_model import meta_model

    try:
        return meta_model(model), ()
    except SpecError as error:
        return None, error.problems
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split())
        has_advice = any(f"{word} " in message for word in ("Give", "Correct", "Name"))
        problem = Problem(
            code="FSDP-E709",
            message=message,
            fix="" if has_advice else "Give a directory with a config.json, or the name of a model in the local cache.",
            origin=Origin(source="--model", spelling="--model", text=model),
        )
        return None, (problem,)
