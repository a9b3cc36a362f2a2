"""Optimizers by name, and cases in which ranks train, save and resume with them."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

import hf_fsdp_plugin as hfp
from tests.gloo.cases_trainer import Batches
from tests.support.tiny import GLOBAL_BATCH, MODELS, parallel_config
from tests.support.training import fresh_accelerator, loss_of

NUM_STEPS = 10


def _model(name: str) -> str:
    """The model that an optimizer trains. torchao quantizes the state of shards with at least 4096 elements only."""
    return "simple" if name.startswith("torchao") else "llama"


def _eager(name: str) -> Any:
    """Run torchao's compiled step eagerly: the compiler takes seconds per shape, and leaves threads behind."""
    return torch.compiler.set_stance("force_eager") if name.startswith("torchao") else nullcontext()


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
    "normalized": ("tests.gloo.cases_optimizers.NormalizedDescent", {"lr": 0.1}, _all),
    "own-kernel": ("tests.gloo.cases_optimizers.OwnKernelDescent", {"lr": 0.1}, _all),
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


def _memory(tensor: torch.Tensor) -> Any:
    """The memory of a tensor, as a kernel of another library accesses it. A DTensor has none."""
    assert type(tensor) in (torch.Tensor, nn.Parameter), type(tensor)
    return tensor.detach()


class OwnKernelDescent(NormalizedDescent):
    """It updates each element alone, with a kernel that does not accept DTensors."""

    def update(self, parameter: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        _memory(parameter).sub_(_memory(grad).sign(), alpha=lr / 100)


def make(name: str, model: nn.Module, *, split: bool = True) -> torch.optim.Optimizer:
    """The optimizer in training mode. ``split``: with the parameter groups of the Trainer, or with one group."""
    path, settings, groups = OPTIMIZERS[name]
    module, _, kind = path.rpartition(".")
    optimizer = getattr(importlib.import_module(module), kind)(groups(model, split=split), **{"lr": 1e-3, **settings})
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


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
    mode = getattr(optimizer.optimizer, "_hf_fsdp_step_mode", "unchanged")
    return {"codes": [], "losses": losses, "mode": mode, "num_steps": hfp.report(accelerator).training.steps}


def train_with_warnings(name: str, version: int) -> dict[str, Any]:
    """Train as :func:`train` does. Returns also what was printed."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        run = train(name, version)
    return {**run, "printed": printed.getvalue()}


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


def train_with_trainer(
    output_dir: str, optim: str, fsdp: dict[str, Any] | None, *, resume: bool = False, decay_all: bool = False
) -> Any:
    """Train with a Trainer that creates the optimizer ``optim``, and save at step 5, or resume there.

    Args:
        fsdp: the ``fsdp_config``; ``None`` for transformers' own Trainer in one process.
        decay_all: whether weight decay applies to biases and norms too, as in flat parameters.

    Returns:
        The losses by step, and the codes of the problems, or the type of another error.
    """
    arguments: dict[str, Any] = {
        "output_dir": output_dir, "optim": optim, "learning_rate": 1e-3, "weight_decay": 0.01, "max_steps": NUM_STEPS,
        "per_device_train_batch_size": GLOBAL_BATCH // dist.get_world_size(), "logging_steps": 1, "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "seed": 3, "save_strategy": "steps" if fsdp else "no", "save_steps": 5,
    }  # fmt: skip
    if optim.startswith(("galore", "apollo")):
        arguments |= {"optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=4"}
    model, data = MODELS["small-llama"](), Batches(6)
    trainer: Any = None
    try:
        if fsdp is None:
            trainer = Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=data)
            if decay_all:
                trainer.get_decay_parameter_names = lambda model: [name for name, _ in model.named_parameters()]
        else:
            args = hfp.FsdpTrainingArguments(fsdp="auto_wrap", fsdp_config=fsdp, **arguments)
            trainer = hfp.FsdpTrainer(model=model, args=args, train_dataset=data)
        with _eager("torchao" if "torch_" in optim else ""):
            trainer.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-5") if resume else None)
    except hfp.SpecError as error:
        return {"losses": {}, "result": sorted({problem.code for problem in error.problems})}
    except Exception as error:
        return {"losses": {}, "result": f"{type(error).__name__}: {error}"}
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return {"losses": losses, "result": []}
