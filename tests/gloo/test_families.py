"""Each model family trains, saves and resumes under both versions of FSDP as in one process."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.plan.names import canonical_name
from tests.support.families_runs import LEARNING_RATE, MAX_NORM, NUM_STEPS, clones, sgd, step_in_parallel, train_steps
from tests.support.matrices import alternating
from tests.support.model_families import FAMILIES
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import fresh_accelerator


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def reference(family: str) -> dict[str, Any]:
    """Return losses and norms of ``NUM_STEPS`` + 1 steps in one process, and the weights around the last step."""
    model = FAMILIES[family].build()
    optimizer = sgd(model)
    run: dict[str, Any] = {"losses": [], "norms": [], "num_params": sum(p.numel() for p in model.parameters())}
    for step in range(NUM_STEPS + 1):
        if step == NUM_STEPS:
            run["shared"] = shared_names(model.state_dict())
            run["saved"] = clones(model.state_dict())
        loss = FAMILIES[family].loss(model, FAMILIES[family].batch(step))
        loss.backward()
        run["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        run["losses"].append(loss.item())
    return {**run, "weights": dict(model.state_dict())}


def shared_names(state: dict[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Return groups of names of tensors that share memory."""
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        if tensor.numel():
            groups.setdefault(tensor.data_ptr(), []).append(name)
    return sorted(tuple(sorted(names)) for names in groups.values() if len(names) > 1)


# Attention has no fused kernel on the simulated accelerator, so more intermediate results are rounded.
RELATIVE = 2e-5 if os.environ.get("RANKS_DEVICE") == "accelerator" else 1e-5

reference_of = cache(reference)


def config_of(family: str, version: int) -> dict[str, Any]:
    layers = ",".join(FAMILIES[family].layers)
    return parallel_config("full_shard", version, 2, fsdp_transformer_layer_cls_to_wrap=layers)


def assert_close(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare names, shapes and dtypes exactly, and values relative to each tensor's norm."""
    assert {name: (w.shape, w.dtype) for name, w in weights.items()} == {
        name: (w.shape, w.dtype) for name, w in expected.items()
    }
    for name, weight in expected.items():
        distance = (weights[name].float() - weight.float()).norm() / weight.float().norm().clamp(min=1e-3)
        assert distance < RELATIVE, f"{name} is off by {distance:.1e}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family trained on ranks with one version of FSDP, and the same steps in one process."""

    version: int
    run: dict[str, Any]
    expected: dict[str, Any]


LIKE_OTHERS = ("bert-mlm", "gpt-j", "llama-base", "mistral", "clip-text", "qwen3")
"""Families whose modules differ little from those of another one. Their cases are all slow."""
PARAMETERS = [
    pytest.param(pair.values, marks=pytest.mark.slow if pair.values[0] in LIKE_OTHERS else pair.marks)
    for pair in alternating(FAMILIES)
]


def prepared(family: str, config: dict[str, Any], make_optimizer: Any) -> tuple[Any, nn.Module, Any]:
    accelerator = fresh_accelerator(config)
    model = FAMILIES[family].build()
    return (accelerator, *accelerator.prepare(model, make_optimizer(model)))


def unsharded_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are not sharded."""
    if isinstance(model, FullyShardedDataParallel):
        flat = {id(p) for unit in FullyShardedDataParallel.fsdp_modules(model) for p in unit._handle.flat_param._params}
        return [canonical_name(name) for name, p in model.named_parameters() if id(p) not in flat]
    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


def num_states(optimizer: Any) -> int:
    return sum(bool(state) for state in optimizer.state.values())


def resume(family: str, config: dict[str, Any], kind: str, folder: Path, make_optimizer: Any) -> dict[str, Any]:
    """Load a saved state into a new model whose parameters are zero, and train one step."""
    accelerator, model, optimizer = prepared(family, config, make_optimizer)
    accelerator.state.fsdp_plugin.set_state_dict_type(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(folder))
    loaded, states = clones(accelerator.get_state_dict(model)), num_states(optimizer)
    loss, norm = step_in_parallel(accelerator, family, model, optimizer, NUM_STEPS)
    weights = clones(accelerator.get_state_dict(model))
    return {"loaded": loaded, "num_states": states, "loss": loss, "norm": norm, "weights": weights}


def shared_folder() -> Path:
    """Create one folder for all ranks."""
    name = [tempfile.mkdtemp(prefix="hf_fsdp_state_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    assert name[0] is not None
    return Path(name[0])


def train(family: str, config: dict[str, Any], make_optimizer: Any = sgd) -> dict[str, Any]:
    """Train ``NUM_STEPS`` steps, save a sharded and a full state, and train one step after loading each of them."""
    accelerator, model, optimizer = prepared(family, config, make_optimizer)
    losses, norms = train_steps(accelerator, family, model, optimizer)
    state = accelerator.get_state_dict(model)
    run = {
        "losses": losses,
        "norms": norms,
        "report": hfp.report(accelerator).to_json(),
        "unsharded": unsharded_parameters(model),
        "num_states": num_states(optimizer),
        "num_trained": len(optimizer.param_groups[0]["params"]),
        "shared": shared_names(state),
        "saved": clones(state),
    }
    folders = {}
    for kind in ("sharded", "full"):
        accelerator.state.fsdp_plugin.set_state_dict_type(kind)
        folders[kind] = shared_folder()
        accelerator.save_state(str(folders[kind]))
    run["resumed"] = {kind: resume(family, config, kind, folder, make_optimizer) for kind, folder in folders.items()}
    return run


@pytest.fixture(scope="module", params=PARAMETERS, ids=lambda param: f"{param[0]}-{param[1]}")
def case(two_ranks: Ranks, request: pytest.FixtureRequest) -> Case:
    """One run for each family and version, shared by the tests."""
    family, version = request.param
    run = two_ranks.run(train, family, config_of(family, version))[0]
    return Case(version=version, run=run, expected=reference_of(family))


def test_family_matches_single_process(case: Case) -> None:
    assert case.run["losses"] == pytest.approx(case.expected["losses"][:NUM_STEPS], rel=RELATIVE)
    assert case.run["norms"] == pytest.approx(case.expected["norms"][:NUM_STEPS], rel=RELATIVE)
    assert_close(case.run["saved"], case.expected["saved"])


def test_gathered_state_dict_keeps_ties(case: Case) -> None:
    assert case.run["shared"] == case.expected["shared"]


def test_all_parameters_except_scalars_are_sharded(case: Case) -> None:
    num_params, report = case.expected["num_params"], case.run["report"]
    scalars = [name for name, weight in case.expected["saved"].items() if weight.dim() == 0]
    assert sum(unit["num_params"] for unit in report["units"]) == num_params - len(scalars)
    assert sum(rank["num_local_params"] for rank in report["ranks"]) == num_params + len(scalars)
    assert case.run["unsharded"] == scalars


def test_report_has_no_differences(case: Case) -> None:
    report = case.run["report"]
    assert report["backend"] == f"fsdp{case.version}"
    assert [row for row in report["settings"] if row["status"] == "differs"] == []
    assert [problem for problem in report["problems"] if problem["severity"] != "note"] == []


def test_full_and_sharded_states_resume_exactly(case: Case) -> None:
    for resumed in case.run["resumed"].values():
        assert all(torch.equal(resumed["loaded"][name], weight) for name, weight in case.run["saved"].items())
        assert resumed["loss"] == pytest.approx(case.expected["losses"][NUM_STEPS], rel=RELATIVE)
        assert resumed["norm"] == pytest.approx(case.expected["norms"][NUM_STEPS], rel=RELATIVE)
        assert_close(resumed["weights"], case.expected["weights"])


@pytest.mark.parametrize("optimizer", [plain_sgd, adam], ids=["plain-sgd", "adam"])
@pytest.mark.parametrize("version", [1, 2])
def test_resume_adds_no_optimizer_state(two_ranks: Ranks, version: int, optimizer: Any) -> None:
    run = two_ranks.run(train, "llava", config_of("llava", version), optimizer)[0]
    assert run["num_states"] < run["num_trained"], "the last layer of the vision tower must be unused"
    assert [resumed["num_states"] for resumed in run["resumed"].values()] == [run["num_states"]] * 2
