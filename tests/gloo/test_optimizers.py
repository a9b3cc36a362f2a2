"""Each optimizer trains as in one process, saves and resumes, or is refused before the first step."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.optimizers.parameters import step_mode
from tests.support.optimizers_runs import NUM_STEPS, _eager
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS, parallel_config
from tests.support.training import fresh_accelerator, loss_of


def _groups(model: nn.Module, *, split: bool) -> list[dict[str, Any]]:
    """One group, or matrices with weight decay and other parameters without, as the Trainer makes them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not split:
        return [{"params": trained, "weight_decay": 0.01}]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def _projected(model: nn.Module, *, split: bool, **settings: Any) -> list[dict[str, Any]]:
    """The groups of GaLore and APOLLO: the matrices are projected."""
    trained = list(model.parameters())
    settings = {"rank": 4, "update_proj_gap": 4, "scale": 0.25, "proj_type": "std", **settings}
    if not split:
        return [{"params": trained}]
    return [
        {"params": [p for p in trained if p.ndim != 2]},
        {"params": [p for p in trained if p.ndim == 2], **settings},
    ]


def _matrices(model: nn.Module, *, split: bool) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.ndim == 2]}]


def _all(model: nn.Module, *, split: bool) -> list[nn.Parameter]:
    return list(model.parameters())


_apollo = partial(_projected, proj="random", scale_type="channel")


OPTIMIZERS: dict[str, tuple[str, dict[str, Any], Callable[..., Any]]] = {
    "adamw": ("torch.optim.AdamW", {}, _groups),
    "adamw-foreach": ("torch.optim.AdamW", {"foreach": True}, _groups),
    "adamw-fused": ("torch.optim.AdamW", {"fused": True}, _groups),
    "adamw-amsgrad": ("torch.optim.AdamW", {"amsgrad": True}, _groups),
    "adam": ("torch.optim.Adam", {}, _groups),
    "sgd": ("torch.optim.SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}, _groups),
    "sgd-fused": ("torch.optim.SGD", {"lr": 0.05, "momentum": 0.9, "fused": True}, _groups),
    "adagrad": ("torch.optim.Adagrad", {"initial_accumulator_value": 0.1}, _groups),
    "adagrad-fused": ("torch.optim.Adagrad", {"fused": True, "initial_accumulator_value": 0.1}, _groups),
    "adadelta": ("torch.optim.Adadelta", {"lr": 1.0}, _groups),
    "rmsprop": ("torch.optim.RMSprop", {"lr": 1e-4, "centered": True, "momentum": 0.9}, _groups),
    "nadam": ("torch.optim.NAdam", {}, _groups),
    "radam": ("torch.optim.RAdam", {}, _groups),
    "adamax": ("torch.optim.Adamax", {}, _groups),
    "asgd": ("torch.optim.ASGD", {"lr": 1e-2}, _groups),
    "rprop": ("torch.optim.Rprop", {}, _all),
    "lbfgs": ("torch.optim.LBFGS", {}, _all),
    "torch-adafactor": ("torch.optim.Adafactor", {"lr": 1e-2}, _groups),
    "muon": ("torch.optim.Muon", {}, _matrices),
    "hf-adafactor": ("transformers.Adafactor", {"scale_parameter": False, "relative_step": False}, _groups),
    "hf-adafactor-relative": ("transformers.Adafactor", {"lr": None}, _groups),
    "bnb-adamw8bit": ("bitsandbytes.optim.AdamW8bit", {"min_8bit_size": 64}, _groups),
    "bnb-adamw32bit": ("bitsandbytes.optim.AdamW32bit", {}, _groups),
    "bnb-paged-adamw8bit": ("bitsandbytes.optim.PagedAdamW8bit", {"min_8bit_size": 64}, _groups),
    "bnb-lion8bit": ("bitsandbytes.optim.Lion8bit", {"lr": 1e-4, "min_8bit_size": 64}, _groups),
    "bnb-lion32bit": ("bitsandbytes.optim.Lion32bit", {"lr": 1e-4}, _groups),
    "bnb-rmsprop32bit": ("bitsandbytes.optim.RMSprop32bit", {"lr": 1e-4}, _groups),
    "bnb-ademamix": ("bitsandbytes.optim.AdEMAMix", {}, _groups),
    "bnb-lamb": ("bitsandbytes.optim.LAMB32bit", {}, _groups),
    "lion": ("lion_pytorch.Lion", {"lr": 1e-4}, _groups),
    "schedulefree-adamw": ("schedulefree.AdamWScheduleFree", {"warmup_steps": 2}, _groups),
    "schedulefree-radam": ("schedulefree.RAdamScheduleFree", {}, _groups),
    "schedulefree-sgd": ("schedulefree.SGDScheduleFree", {"lr": 0.05}, _groups),
    "grokadamw": ("grokadamw.GrokAdamW", {}, _groups),
    "prodigy": ("prodigyopt.Prodigy", {"lr": 1.0}, _groups),
    "galore-adamw": ("galore_torch.GaLoreAdamW", {"no_deprecation_warning": True}, _projected),
    "galore-adafactor": (
        "galore_torch.GaLoreAdafactor", {"scale_parameter": False, "relative_step": False}, _projected,
    ),
    "apollo": ("apollo_torch.APOLLOAdamW", {}, _apollo),
    "torchao-adamw8bit": ("torchao.optim.AdamW8bit", {"block_size": 64}, _groups),
    "torchao-adamw4bit": ("torchao.optim.AdamW4bit", {"block_size": 64}, _groups),
    "torchao-adamwfp8": ("torchao.optim.AdamWFp8", {"block_size": 64}, _groups),
    "normalized": ("tests.gloo.test_optimizers.NormalizedDescent", {"lr": 0.1}, _all),
    "own-kernel": ("tests.gloo.test_optimizers.OwnKernelDescent", {"lr": 0.1}, _all),
}  # fmt: skip
"""Name -> class, its settings, and the function that returns the parameter groups."""


class NormalizedDescent(torch.optim.Optimizer):
    """An optimizer that the plugin does not know. It divides each gradient by its norm."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group["lr"])

    def update(self, parameter: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        parameter.sub_(grad / grad.norm(), alpha=lr)


class OwnKernelDescent(NormalizedDescent):
    """It updates each element alone, with a kernel that does not accept DTensors."""

    def update(self, parameter: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        _memory(parameter).sub_(_memory(grad).sign(), alpha=lr / 100)


def _memory(tensor: torch.Tensor) -> Any:
    """The memory of a tensor, as a kernel of another library accesses it. A DTensor has none."""
    assert type(tensor) in (torch.Tensor, nn.Parameter), type(tensor)
    return tensor.detach()


SAME = 1e-4
"""Relative difference of losses to one process in fp32."""

BLOCKS = {"8bit": 1e-3, "fp8": 5e-3, "4bit": 2e-2}
"""The same for quantized state: its blocks begin at other elements in a shard, and torchao quantizes only shards whose
size is a multiple of the block size.
"""

RESUMED = 1e-6


E320, E321, E322, E411 = ["FSDP-E320"], ["FSDP-E321"], ["FSDP-E322"], ["FSDP-E411"]

FORMS = {"FSDP1": (1, True), "FSDP1 flat": (1, False), "FSDP2": (2, True)}


EXPECTED: dict[str, tuple[list[str], list[str], list[str] | str]] = {
    "adamw": ([], [], "unchanged"),
    "adamw-foreach": ([], [], "unchanged"),
    "adamw-fused": ([], [], "unchanged"),
    "adamw-amsgrad": ([], [], "unchanged"),
    "adam": ([], [], "unchanged"),
    "sgd": ([], [], "unchanged"),
    "sgd-fused": ([], [], "local"),
    "adagrad": ([], [], "unchanged"),
    "adagrad-fused": ([], [], "local"),
    "adadelta": ([], [], "unchanged"),
    "rmsprop": ([], [], "unchanged"),
    "nadam": ([], [], "unchanged"),
    "radam": ([], [], "unchanged"),
    "adamax": ([], [], "unchanged"),
    "asgd": ([], [], "unchanged"),
    "rprop": ([], [], "local"),
    "lbfgs": (E321, E321, E321),
    "torch-adafactor": (E320, E320, "whole"),
    "muon": (E320, E320, "divided"),
    "hf-adafactor": (E320, E320, "whole"),
    "hf-adafactor-relative": (E320, E320, "whole"),
    "bnb-adamw8bit": ([], E322, "local"),
    "bnb-adamw32bit": ([], [], "local"),
    "bnb-paged-adamw8bit": ([], E322, "local"),
    "bnb-lion8bit": ([], E322, "local"),
    "bnb-lion32bit": ([], [], "local"),
    "bnb-rmsprop32bit": ([], [], "local"),
    "bnb-ademamix": ([], E322, "local"),
    "bnb-lamb": (E320, E320, "whole"),
    "lion": ([], [], "local"),
    "schedulefree-adamw": ([], [], "unchanged"),
    "schedulefree-radam": ([], [], "unchanged"),
    "schedulefree-sgd": ([], [], "unchanged"),
    "grokadamw": (E320, E320, "unchanged"),
    "prodigy": (E320, E320, "unchanged"),
    "galore-adamw": (E320, E320, "whole"),
    "galore-adafactor": (E320, E320, "whole"),
    "apollo": (E320, E320, "whole"),
    "torchao-adamw8bit": ([], E322, "unchanged"),
    "torchao-adamw4bit": ([], E322, "unchanged"),
    "torchao-adamwfp8": ([], E322, "unchanged"),
}
"""Name -> codes of the refusal under FSDP1, without original parameters, and under FSDP2, or how its steps run."""


UNKNOWN = {"normalized", "own-kernel"}

QUICK = ("adamw-fused", "sgd-fused", "hf-adafactor", "muon", "bnb-adamw8bit", "schedulefree-adamw")

QUICK_RESUMED = ("hf-adafactor", "bnb-adamw8bit", "muon")

RESUMABLE = [name for name, codes in EXPECTED.items() if codes[2] != E321]

SLOW = pytest.mark.slow


def params(names: Any, quick: tuple[str, ...] = QUICK) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=SLOW) for name in names]


def available(name: str) -> None:
    pytest.importorskip(OPTIMIZERS[name][0].partition(".")[0])


def tolerance(name: str) -> float:
    return next((value for kind, value in BLOCKS.items() if name.endswith(kind)), SAME)


def _model(name: str) -> str:
    """The model that an optimizer trains. torchao quantizes the state of shards with at least 4096 elements only."""
    return "simple" if name.startswith("torchao") else "llama"


def train(
    name: str,
    version: int,
    *,
    use_orig: bool = True,
    start: int = 0,
    stop: int = NUM_STEPS,
    resume_from: str | None = None,
    save_to: str | None = None,
    order: str = "together",
    **settings: Any,
) -> dict[str, Any]:
    """Train from step ``start`` to step ``stop``. Returns the losses, or the codes of the problems.

    Args:
        order: how model and optimizer are prepared: in one call, in two, or by Accelerate's single methods.
    """
    world_size = dist.get_world_size()
    more: dict[str, Any] = {"fsdp_use_orig_params": use_orig} if version == 1 else {}
    if _model(name) == "simple":
        more["fsdp_auto_wrap_policy"] = "NO_WRAP"
    accelerator = fresh_accelerator(parallel_config("full_shard", version, world_size, **more, **settings))
    model = MODELS[_model(name)]()
    try:
        if order == "model first":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(make(name, model, split=use_orig))
        elif order == "optimizer first":
            optimizer = accelerator.prepare(make(name, model, split=use_orig))
            model = accelerator.prepare(model)
        elif order == "single methods":
            model = accelerator.prepare_model(model)
            optimizer = accelerator.prepare_optimizer(make(name, model, split=use_orig))
        else:
            model, optimizer = accelerator.prepare(model, make(name, model, split=use_orig))
        if resume_from:
            accelerator.load_state(resume_from)
        losses = []
        for step in range(start, stop):
            part = loss_of(model, _model(name), step, accelerator.process_index, world_size)
            accelerator.backward(part)
            if order != "together":
                with torch.no_grad():  # an evaluation before the step leaves units gathered
                    loss_of(model, _model(name), step)
            total = part.detach().clone()
            dist.all_reduce(total)
            with _eager(name):
                optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item() / world_size)
        if save_to:
            accelerator.save_state(save_to)
    except hfp.SpecError as error:
        return {"codes": sorted({problem.code for problem in error.problems}), "losses": []}
    mode = step_mode(optimizer.optimizer)
    return {"codes": [], "losses": losses, "mode": mode, "num_steps": hfp.report(accelerator).training.steps}


def make(name: str, model: nn.Module, *, split: bool = True) -> torch.optim.Optimizer:
    """The optimizer in training mode. ``split``: with the parameter groups of the Trainer, or with one group."""
    path, settings, groups = OPTIMIZERS[name]
    module, _, kind = path.rpartition(".")
    optimizer = getattr(importlib.import_module(module), kind)(groups(model, split=split), **{"lr": 1e-3, **settings})
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def one_process(name: str, *, split: bool = True) -> list[float]:
    """The losses of one process on the global batches, without FSDP and without clipping."""
    model = MODELS[_model(name)]().float()
    optimizer = make(name, model, split=split)
    losses = []
    for step in range(NUM_STEPS):
        loss = loss_of(model, _model(name), step)
        loss.backward()
        with _eager(name):
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@cache
def losses_of_one_process(name: str, split: bool) -> list[float]:
    return one_process(name, split=split)


def test_every_optimizer_has_an_expectation() -> None:
    assert EXPECTED.keys() | UNKNOWN == OPTIMIZERS.keys()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", params(EXPECTED))
def test_optimizer_trains_as_in_one_process(two_ranks: Ranks, name: str, form: str) -> None:
    available(name)
    (version, use_orig), expected = FORMS[form], EXPECTED[name][list(FORMS).index(form)]
    run = two_ranks.run(train, name, version, use_orig=use_orig)[0]
    if isinstance(expected, list) and expected:
        assert run["codes"] == expected
        return
    assert run["codes"] == []
    assert run["mode"] == (expected or "unchanged")
    assert run["losses"] == pytest.approx(losses_of_one_process(name, use_orig), rel=tolerance(name))


def train_with_warnings(name: str, version: int) -> dict[str, Any]:
    """Train as :func:`train` does. Returns also what was printed."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        run = train(name, version)
    return {**run, "printed": printed.getvalue()}


@pytest.mark.parametrize(
    ("name", "version", "is_right"), [("own-kernel", 1, True), ("normalized", 1, False), ("normalized", 2, True)]
)
def test_unknown_optimizer_trains_with_a_warning(two_ranks: Ranks, name: str, version: int, is_right: bool) -> None:
    run = two_ranks.run(train_with_warnings, name, version)[0]
    class_name = OPTIMIZERS[name][0].rpartition(".")[2]
    assert "FSDP-W324" in run["printed"] and f"{class_name} of tests is not in the table" in run["printed"]
    assert (run["codes"], run["mode"]) == ([], "unchanged")
    assert (run["losses"] == pytest.approx(losses_of_one_process(name, True), rel=SAME)) == is_right


@pytest.mark.parametrize("form", ["FSDP1", "FSDP2"])
@pytest.mark.parametrize("name", params(RESUMABLE, QUICK_RESUMED))
def test_resumed_optimizer_continues(two_ranks: Ranks, tmp_path: Path, name: str, form: str) -> None:
    available(name)
    (version, _), expected = FORMS[form], EXPECTED[name][list(FORMS).index(form)]
    if isinstance(expected, list) and expected:
        pytest.skip("refused")
    whole = two_ranks.run(train, name, version)[0]
    first = two_ranks.run(train, name, version, stop=5, save_to=str(tmp_path / "saved"))[0]
    if first["codes"]:
        assert first["codes"] == E411 and name.startswith(("galore", "apollo", "grokadamw"))
        return
    again = two_ranks.run(train, name, version, start=5, resume_from=str(tmp_path / "saved"))[0]
    assert again["codes"] == []
    assert again["losses"] == pytest.approx(whole["losses"][5:], rel=RESUMED)


@pytest.mark.parametrize(
    "name", params(["hf-adafactor", "adagrad", "schedulefree-adamw", "lion", "muon", "prodigy"], QUICK_RESUMED[:1])
)
def test_state_is_resumed_on_one_rank(two_ranks: Ranks, one_rank: Ranks, tmp_path: Path, name: str) -> None:
    available(name)
    whole = two_ranks.run(train, name, 2)[0]
    two_ranks.run(train, name, 2, stop=5, save_to=str(tmp_path / "saved"))
    again = one_rank.run(train, name, 2, start=5, resume_from=str(tmp_path / "saved"))[0]
    assert again["losses"] == pytest.approx(whole["losses"][5:], rel=SAME)


def test_quantized_state_is_refused_by_other_shards(two_ranks: Ranks, one_rank: Ranks, tmp_path: Path) -> None:
    available("bnb-adamw8bit")
    two_ranks.run(train, "bnb-adamw8bit", 2, stop=2, save_to=str(tmp_path / "saved"))
    again = one_rank.run(train, "bnb-adamw8bit", 2, start=2, resume_from=str(tmp_path / "saved"))[0]
    assert again["codes"] == ["FSDP-E426"]


ORDERS = pytest.mark.parametrize("order", ["model first", "optimizer first", "single methods"])


@ORDERS
@pytest.mark.parametrize("name", ["hf-adafactor", "adamw-fused", "bnb-adamw8bit"])
def test_optimizer_prepared_apart_trains_the_same(two_ranks: Ranks, name: str, order: str) -> None:
    available(name)
    run = two_ranks.run(train, name, 2, order=order)[0]
    assert run["losses"] == pytest.approx(losses_of_one_process(name, True), rel=tolerance(name))
    assert run["num_steps"] == NUM_STEPS


@ORDERS
def test_optimizer_prepared_apart_is_refused_the_same(two_ranks: Ranks, order: str) -> None:
    codes = two_ranks.run(train, "hf-adafactor", 1, order=order)[0]["codes"]
    assert [code for code in codes if code != "FSDP-W328"] == ["FSDP-E320"]  # one of the case's groups is empty


def printed_about_groups(by: str, order: str) -> str:
    """Prepare a model of FSDP1 and an optimizer with groups by names or dimensions. Returns what was printed."""
    accelerator = fresh_accelerator(parallel_config("full_shard", 1, dist.get_world_size()))
    model: Any = MODELS["llama"]()
    if order == "model first":
        model = accelerator.prepare(model)
    named = list(model.named_parameters())
    first = [p for name, p in named if ("norm" not in name if by == "names" else p.dim() >= 2)]
    inside = {id(p) for p in first}
    groups = [{"params": first}, {"params": [p for _, p in named if id(p) not in inside], "weight_decay": 0.0}]
    if by == "names":
        groups.append({"params": [p for name, p in named if "bias" in name]})  # it has none
    optimizer = torch.optim.AdamW(groups)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        accelerator.prepare(model, optimizer)
    return printed.getvalue()


@pytest.mark.parametrize("by", ["names", "dimensions"])
@pytest.mark.parametrize("order", ["together", "model first"])
def test_groups_by_dimensions_of_pieces_are_a_warning(two_ranks: Ranks, by: str, order: str) -> None:
    printed = two_ranks.run(printed_about_groups, by, order)[0]
    assert ("FSDP-W328" in printed) == (by == "dimensions" and order == "model first")
