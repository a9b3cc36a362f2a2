"""A process group of one rank, and fixtures for the tests of sources and spec."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources.model import Sources, config_of
from hf_fsdp_plugin.spec import load
from hf_fsdp_plugin.spec.load import Assessment


@pytest.fixture
def one_rank() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def assess() -> Callable[..., Assessment]:
    """``load.assess`` of a config and further sources, without the environment of the test run."""

    def run(config: Any = None, **sources: Any) -> Assessment:
        given = {name: sources.pop(name) for name in ("fsdp", "fsdp_config") if name in sources}
        sources["training_arguments"] = {**sources.get("training_arguments", {}), **given}
        return load.assess(Sources(config=config_of(config), **{"environ": {}, **sources}))

    return run


@pytest.fixture
def problems(assess: Callable[..., Assessment]) -> Callable[..., list[Problem]]:
    """The problems of one severity."""

    def run(config: Any = None, *, severity: str = "error", **sources: Any) -> list[Problem]:
        return [problem for problem in assess(config, **sources).problems if problem.severity == severity]

    return run


@pytest.fixture
def codes(problems: Callable[..., list[Problem]]) -> Callable[..., list[str]]:
    """The codes of the problems of one severity."""

    def run(config: Any = None, **given: Any) -> list[str]:
        return [problem.code for problem in problems(config, **given)]

    return run
