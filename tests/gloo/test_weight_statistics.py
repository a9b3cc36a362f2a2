"""Norms and histograms of whole weights and gradients, computed on ranks: equal to those of one process."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.transformers.weight_logs import watch
from hf_fsdp_plugin.messages import printer
from tests.gloo.test_weight_stream import VERSIONS
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS, parallel_config, tiny_llama
from tests.support.trainer_runs import losses, make_trainer
from tests.support.training import fresh_accelerator, loss_of

Statistics = dict[str, dict[str, Any]]
BINS = 16


def statistics_of(model: Any) -> dict[str, Statistics]:
    """The statistics by parameter, those of the gradients, and those by unit."""
    kinds: dict[str, dict[str, Any]] = {"weights": {}, "gradients": {"gradients": True}, "units": {"by_unit": True}}
    found = {kind: hfp.weight_statistics(model, bins=BINS, **given) for kind, given in kinds.items()}
    return {kind: {name: asdict(each) for name, each in entries.items()} for kind, entries in found.items()}


def on_ranks(config: dict[str, Any], name: str) -> dict[str, Any]:
    accelerator = fresh_accelerator(config)
    model = accelerator.prepare(tiny_llama(tied=True) if name == "tied" else MODELS[name]())
    loss_of(model, name, 0, dist.get_rank(), dist.get_world_size()).backward()
    found = statistics_of(model)
    loss_of(model, name, 1, dist.get_rank(), dist.get_world_size()).backward()  # it can be trained as before
    return found


@cache
def in_one_process(name: str) -> dict[str, Statistics]:
    model = tiny_llama(tied=True) if name == "tied" else MODELS[name]()
    loss_of(model, name, 0, 0, 1).backward()
    return statistics_of(model)


def check(ranks: Ranks, config: dict[str, Any], name: str) -> None:
    first, *others = ranks.run(on_ranks, config, name)
    assert all(other == first for other in others)
    expected = in_one_process(name)
    assert first["weights"].keys() == expected["weights"].keys()
    for key, found in first["weights"].items():
        whole = expected["weights"][key]
        assert [found[each] for each in ("num_elements", "minimum", "maximum", "counts")] == [
            whole[each] for each in ("num_elements", "minimum", "maximum", "counts")
        ], key
        assert (found["norm"], found["mean"]) == pytest.approx((whole["norm"], whole["mean"]), rel=1e-12, abs=1e-12)
    assert first["gradients"].keys() == expected["gradients"].keys()
    for key, found in first["gradients"].items():
        whole = expected["gradients"][key]
        assert sum(found["counts"]) == found["num_elements"] == whole["num_elements"]
        assert found["norm"] == pytest.approx(whole["norm"], rel=1e-4)
        moved = sum(abs(one - other) for one, other in zip(found["counts"], whole["counts"], strict=True))
        assert moved <= max(2, 0.01 * found["num_elements"]), key
    units, parameters = first["units"].values(), first["weights"].values()
    assert len(units) < len(parameters)
    assert sum(each["num_elements"] for each in units) == sum(each["num_elements"] for each in parameters)
    assert sum(each["norm"] ** 2 for each in units) == pytest.approx(sum(each["norm"] ** 2 for each in parameters))


@pytest.mark.parametrize("name", ["tied", slow("llama"), slow("half"), slow("experts")])
@VERSIONS
def test_statistics_equal_those_of_one_process(two_ranks: Ranks, version: int, name: str) -> None:
    check(two_ranks, parallel_config("full_shard", version, 2), name)


OTHERS = [
    ("hybrid_shard", 1, {}), slow("hybrid_shard", 2, {}), slow("no_shard", 1, {}), slow("no_shard", 2, {}),
    ("full_shard", 1, {"fsdp_use_orig_params": False}), slow("full_shard", 1, {"fsdp_offload_params": True}),
    slow("full_shard", 2, {"fsdp_offload_params": True}),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "version", "settings"), OTHERS)
def test_replicas_and_padding_are_not_counted(
    four_ranks: Ranks, strategy: str, version: int, settings: dict[str, Any]
) -> None:
    check(four_ranks, parallel_config(strategy, version, 4, **settings), "llama")


def log_and_watch(folder: str, version: int) -> dict[str, Any]:
    """What a Trainer logs, and the norm of a unit at the end."""
    config = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": version}}
    trainer = make_trainer(folder, **config, max_steps=4)
    trainer.add_callback(hfp.WeightStatistics(trainer, every=2))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "weights/model.layers.1_norm" in entry]
    whole = hfp.weight_statistics(trainer.model, by_unit=True)
    return {"losses": losses(trainer), "logged": logged, "norm": whole["model.layers.1"].norm}


@VERSIONS
def test_trainer_logs_norms_of_every_unit(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    first, second = two_ranks.run(log_and_watch, str(tmp_path), version)
    assert first == second and len(first["losses"]) == 4
    assert [entry["step"] for entry in first["logged"]] == [2, 4]
    names = {name for name in first["logged"][0] if name.startswith("gradients/")}
    assert {f"gradients/model.layers.{number}_norm" for number in range(3)} < names and len(names) in (4, 5)
    assert first["logged"][1]["weights/model.layers.1_norm"] == pytest.approx(first["norm"], rel=0.01)


def watch_models() -> dict[str, Any]:
    """The arguments that ``wandb.watch`` gets for a sharded model and for another one, and what is printed."""
    sharded = fresh_accelerator(parallel_config("full_shard", 2, 2)).prepare(tiny_llama())
    messages: list[str] = []
    printer().listener = lambda message: messages.append(str(message))
    try:
        logs = [watch(lambda *args: args[1:], None, model, None, "all", 10) for model in (tiny_llama(), sharded)]
    finally:
        printer().listener = None
    return {"logs": logs, "messages": messages}


def test_watch_of_wandb_logs_no_shards(two_ranks: Ranks) -> None:
    for found in two_ranks.run(watch_models):
        assert found["logs"] == [(None, "all", 10), (None, None, 10)]
        assert len(found["messages"]) == 1 and "FSDP-W675" in found["messages"][0]


def test_histogram_is_that_of_numpy() -> None:
    model = torch.nn.Linear(40, 30)
    found = hfp.weight_statistics(model, bins=10)["weight"]
    counts, edges = numpy.histogram(model.weight.detach().double().numpy(), bins=10)
    assert found.counts == tuple(counts) and found.edges == pytest.approx(edges, rel=1e-12)
    assert found.norm == pytest.approx(model.weight.double().norm().item())


def test_elements_that_are_not_finite_are_counted_apart() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight[:] = torch.tensor([1.0, float("inf"), float("nan")])
    found = hfp.weight_statistics(model, bins=4)["weight"]
    assert (found.num_elements, found.num_nonfinite, found.minimum, found.maximum) == (3, 2, 1.0, 1.0)
    assert found.counts == (0, 0, 1, 0) and found.edges == [0.5, 0.75, 1.0, 1.25, 1.5]
    assert hfp.weight_statistics(model, gradients=True) == {}
