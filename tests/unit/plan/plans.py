"""Specs for plans, and the units or problems of a plan. The world size is 2 unless it is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSection, FsdpSpec, ParamsSection, PrecisionSection, WrapSection


def wrapping(*classes: str, version: Any = 2, use_orig: bool = True, param: Any = "auto", **wrap: Any) -> FsdpSpec:
    """Return a spec with the transformer policy, unless ``policy`` is given."""
    return FsdpSpec(
        fsdp=FsdpSection(version=version),
        wrap=WrapSection(**{"policy": "transformer", "classes": classes, **wrap}),
        params=ParamsSection(use_orig=use_orig),
        precision=PrecisionSection(param=param),
    )


def planned(spec: FsdpSpec, model: nn.Module, **options: Any) -> FsdpPlan:
    return resolve(spec, model, **{"world_size": 2, **options})


def units_of(spec: FsdpSpec, model: nn.Module) -> list[str]:
    """Return the names of the planned units."""
    return [unit.name for unit in planned(spec, model).units]


def problem_in(problems: Iterable[Problem], code: str) -> Problem:
    """Return the only problem with this code."""
    found = [problem for problem in problems if problem.code == code]
    assert len(found) == 1, [str(problem) for problem in problems]
    return found[0]


def refused(code: str, spec: FsdpSpec, model: nn.Module, **options: Any) -> Problem:
    """Check that a spec is refused, and return the problem with this code."""
    with pytest.raises(SpecError) as caught:
        planned(spec, model, **options)
    return problem_in(caught.value.problems, code)
