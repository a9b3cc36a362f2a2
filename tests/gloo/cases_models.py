"""Cases that ranks run: models other than plain Transformers models, and unusual uses."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import hf_fsdp_plugin as hfp
from tests.gloo.cases_trainer import losses, make_trainer
from tests.support.ranks import own_device
from tests.support.tiny import MODELS, SimpleModel, parallel_config, tiny_bert, tiny_llama
from tests.support.training import fresh_accelerator, loss_of, sgd, train_prepared

NUM_STEPS = 3
NUM_LAYERS = 3


def wrap_by_author(model: nn.Module, version: int, use_orig: bool) -> nn.Module:
    """Shard a model as torch's tutorials do."""
    layers = {type(model.model.layers[0])} if hasattr(model, "model") else {nn.Linear}
    if version == 1:
        policy, device = ModuleWrapPolicy(layers), own_device()
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=use_orig)
    for module in [m for m in model.modules() if type(m) in layers]:
        fully_shard(module)
    return fully_shard(model)


def train_wrapped_by_author(
    name: str, config: dict[str, Any], version: int, order: str, use_orig: bool = True
) -> dict[str, Any]:
    """``order``: the optimizer is created ``before wrapping``, ``before preparing`` or ``after`` preparing."""
    accelerator = fresh_accelerator(config)
    model = MODELS[name]()
    optimizer = sgd(model) if order == "before wrapping" else None
    model = wrap_by_author(model, version, use_orig)
    if order == "before preparing":
        optimizer = sgd(model)
    if optimizer is not None:
        prepared, optimizer = accelerator.prepare(model, optimizer)
    else:
        prepared = accelerator.prepare(model)
        optimizer = accelerator.prepare(sgd(prepared))
    return {**train_prepared(accelerator, prepared, optimizer, name, NUM_STEPS), "same": prepared is model}


def wrap_with_fields(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model with the plugin's fields, as TRL's ``prepare_fsdp`` does."""
    plugin, model = accelerator.state.fsdp_plugin, model.to(accelerator.device)
    if plugin.fsdp_version == 1:
        plugin.set_auto_wrap_policy(model)
        return FullyShardedDataParallel(
            model,
            sharding_strategy=plugin.sharding_strategy or plugin.reshard_after_forward,
            cpu_offload=plugin.cpu_offload,
            auto_wrap_policy=plugin.auto_wrap_policy,
            mixed_precision=plugin.mixed_precision_policy,
            sync_module_states=plugin.sync_module_states,
            backward_prefetch=plugin.backward_prefetch,
            forward_prefetch=plugin.forward_prefetch,
            use_orig_params=plugin.use_orig_params,
            param_init_fn=plugin.param_init_fn,
            ignored_modules=plugin.ignored_modules,
            limit_all_gathers=plugin.limit_all_gathers,
            device_id=accelerator.device,
        )
    mesh = accelerator.torch_device_mesh
    return fully_shard(
        model,
        reshard_after_forward=plugin.reshard_after_forward,
        offload_policy=plugin.cpu_offload,
        mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        mesh=mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)] if mesh is not None else None,
        ignored_params=get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device),
    )


def train_wrapped_with_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Train a model that was sharded with the plugin's fields and then prepared."""
    accelerator = fresh_accelerator(config)
    model, optimizer = accelerator.prepare(wrapped := wrap_with_fields(accelerator, tiny_llama()), sgd(wrapped))
    return train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)


def clip_unprepared(config: dict[str, Any]) -> tuple[float, float]:
    """Return the norm of one backward of a model that is wrapped but not prepared, and the norm in one process."""
    accelerator = fresh_accelerator(config)
    bare, model = tiny_llama(), wrap_with_fields(accelerator, tiny_llama())
    loss_of(bare, "llama", 0).backward()
    loss_of(model, "llama", 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(bare.parameters(), 0.5).item()
    return accelerator.clip_grad_norm_(model.parameters(), 0.5).item(), expected


def evaluate_further_models(config: dict[str, Any]) -> dict[str, Any]:
    """Train a llama beside frozen models of other classes, which are prepared for evaluation only."""
    from hf_fsdp_plugin.integrations.accelerate.prepare import prepare_for_evaluation

    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, sgd(model))
    teachers = {"bert": tiny_bert(), "simple": SimpleModel()}
    prepared = {name: prepare_for_evaluation(accelerator, teacher) for name, teacher in teachers.items()}
    with torch.no_grad():
        found = {name: loss_of(teacher, name, 0).item() for name, teacher in prepared.items()}
        expected = {name: loss_of(MODELS[name](), name, 0).item() for name in prepared}
    accelerator.prepare(prepared["bert"])  # it is prepared already
    run = train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)
    text = str(hfp.report(accelerator))
    return {**run, "found": found, "expected": expected, "text": text}


def dropout_step(config: dict[str, Any], native: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """One SGD step with dropout active: of the bare model with averaged gradients, and of the prepared one."""
    accelerator = fresh_accelerator(config)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    bare = with_dropout().to(accelerator.device)
    torch.manual_seed(100 + rank)
    loss_of(bare, "llama", 0, rank, world_size).backward()
    for parameter in bare.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    torch.optim.SGD(bare.parameters(), lr=1.0).step()

    model: Any = with_dropout()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    if native:
        (model.module if hasattr(model, "module") else model).gradient_checkpointing_enable()
    torch.manual_seed(100 + rank)
    accelerator.backward(loss_of(model, "llama", 0, rank, world_size))
    optimizer.step()
    return dict(bare.state_dict()), accelerator.get_state_dict(model)


def with_dropout() -> nn.Module:
    """A llama with dropout in every layer, so that the recompute has to draw the same random numbers again."""
    model: Any = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.5))
    return model.train()


def train_compiled(config: dict[str, Any], how: str) -> dict[str, Any]:
    """``how``: dynamo settings of the config, or ``torch.compile(model)`` or ``model.compile()`` in the script."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    counter = CompileCounter()
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    if how == "wrapper":
        model = torch.compile(model, backend=counter)
    elif how == "in place":
        model.compile(backend=counter)
    model, optimizer = accelerator.prepare(model, sgd(model))
    run = train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)
    return {
        **run,
        "num_graphs": counter.frame_count,
        "dynamo": counters["frames"]["ok"],
        "unique_graphs": counters["stats"]["unique_graphs"],
        "breaks": list(counters["graph_break"]),
    }


def matmuls_of_backward(version: int) -> dict[str, int]:
    """Return the matrix products of a backward with layers that inductor compiles, by kind of checkpointing."""
    found = {}
    for kind in ("none", "selective", "full"):
        torch._dynamo.reset()
        settings = (
            {} if kind == "none" else {"fsdp_activation_checkpointing": "selective" if kind == "selective" else True}
        )
        config = parallel_config("full_shard", version, 2, **settings)
        accelerator = fresh_accelerator({**config, "dynamo_config": {"dynamo_backend": "INDUCTOR"}})
        model: Any = accelerator.prepare(tiny_llama(layers=NUM_LAYERS))
        ids = torch.arange(16).view(2, 8)
        # The compiler leaves a variable for its processes.
        with torch._inductor.config.patch(compile_threads=1), patch.dict(os.environ):
            for _ in range(2):  # the first one compiles
                loss = model(input_ids=ids, labels=ids).loss
                with torch.profiler.profile() as profile:
                    accelerator.backward(loss)
        found[kind] = sum(event.count for event in profile.key_averages() if event.key == "aten::mm")
    torch._dynamo.reset()
    return found


def train_two(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Two models of different classes and their optimizers in one ``prepare``."""
    accelerator = fresh_accelerator(config)
    one, other = tiny_llama(), SimpleModel()
    one, other, first, second = accelerator.prepare(one, other, sgd(one), sgd(other))
    return [
        train_prepared(accelerator, one, first, "llama", NUM_STEPS),
        train_prepared(accelerator, other, second, "simple", NUM_STEPS),
    ]


def evaluate_only(config: dict[str, Any], trained: bool) -> dict[str, Any]:
    """Prepare a model without an optimizer, alone or together with a model that trains."""
    accelerator = fresh_accelerator(config)
    teacher: Any = tiny_llama().eval()
    teacher.requires_grad_(False)
    teacher = accelerator.prepare(teacher)
    with torch.no_grad():
        loss = loss_of(teacher, "llama", 0, accelerator.process_index, accelerator.num_processes)
    dist.all_reduce(loss)
    run = {"loss": loss.item() / accelerator.num_processes, "weights": accelerator.get_state_dict(teacher)}
    if trained:
        student = tiny_llama()
        student, optimizer = accelerator.prepare(student, sgd(student))
        run["student"] = train_prepared(accelerator, student, optimizer, "llama", NUM_STEPS)
    return run


def clip_subset(config: dict[str, Any]) -> tuple[float, float]:
    """The norm of every second parameter of a prepared model, and the same norm of the unsharded model."""
    bare = tiny_llama()
    loss_of(bare, "llama", 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(list(bare.parameters())[::2], 1.0).item()
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model = accelerator.prepare(model)
    accelerator.backward(loss_of(model, "llama", 0, accelerator.process_index, accelerator.num_processes))
    return accelerator.clip_grad_norm_(list(model.parameters())[::2], 1.0).item(), expected


def train_wrapped_in_trainer(output_dir: str, version: int) -> list[dict[str, Any]]:
    """Train a model that its author has wrapped, then one that the plan wraps, with the Trainer."""
    runs = []
    for model in (wrap_by_author(tiny_llama(), version, use_orig=True), tiny_llama()):
        config = {"version": version}
        trainer = make_trainer(output_dir, model, fsdp="full_shard auto_wrap", fsdp_config=config, max_steps=3)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        runs.append({"losses": [*losses(trainer), evaluated], "report": hfp.report(trainer).to_json()})
    return runs
