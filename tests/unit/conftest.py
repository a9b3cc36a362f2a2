"""A process group of one rank, sources to assess, and checkpoints to check."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources.interface import Sources, config_of
from hf_fsdp_plugin.spec import load
from hf_fsdp_plugin.tools.convert.conversion import with_converted_config
from tests.support import saved
from tests.support.merge_inputs import checkpoint, out  # noqa: F401 (fixtures)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _sources(config: Any = None, **sources: Any) -> Sources:
    given = {name: sources.pop(name) for name in ("fsdp", "fsdp_config") if name in sources}
    sources["training_arguments"] = {**sources.get("training_arguments", {}), **given}
    return Sources(config=config_of(config), **{"environ": {}, **sources})


@pytest.fixture
def assess() -> Callable[..., load.Assessment]:
    """Assess a config and other sources, without the environment of the test run."""
    return lambda config=None, **sources: load.assess(_sources(config, **sources))


@pytest.fixture
def assess_converted() -> Callable[..., load.Assessment]:
    """Assess sources as a command does, which converts a config of another program first."""

    def run(config: Any = None, script_arguments: Sequence[str] = (), **sources: Any) -> load.Assessment:
        return load.assess(with_converted_config(_sources(config, **sources), script_arguments))

    return run


@pytest.fixture
def problems(assess: Callable[..., load.Assessment]) -> Callable[..., list[Problem]]:
    """Return the problems of one severity."""

    def run(config: Any = None, *, severity: str = "error", **sources: Any) -> list[Problem]:
        return [problem for problem in assess(config, **sources).problems if problem.severity == severity]

    return run


@pytest.fixture
def codes(problems: Callable[..., list[Problem]]) -> Callable[..., list[str]]:
    """Return the codes of the problems of one severity."""
    return lambda *config, **given: [problem.code for problem in problems(*config, **given)]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A checkpoint in the local format, with a manifest."""
    return saved.local_checkpoint(tmp_path / "checkpoint-20")


@pytest.fixture(scope="session")
def stock_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    torch.manual_seed(0)
    return saved.stock_checkpoint(tmp_path_factory.mktemp("stock") / "checkpoint-7", saved.tiny_llama())


@pytest.fixture
def stock(tmp_path: Path, stock_once: Path) -> Path:
    """A copy of a sharded checkpoint as Accelerate writes it."""
    return Path(shutil.copytree(stock_once, tmp_path / "checkpoint-7"))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the metadata of torch 2.9.1 and of a later Accelerate, before the installed libraries."""
    for name in ("torch-2.9.1.dist-info", "accelerate-1.99.0.dist-info"):
        (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path
