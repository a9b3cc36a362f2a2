"""Cases that two ranks run: linear layers in fp8, which CPU ranks emulate, by a loop and by the Trainer."""

from __future__ import annotations

import copy
import functools
import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.torch_private.context_parallel import add_cpu_attention
from tests.gloo import cases_peft  # noqa: F401 (adds models with adapters)
from tests.gloo.cases_axes import backward_of_divided
from tests.gloo.cases_distributed_config import PLAIN, exported_results, load, with_adapters
from tests.gloo.cases_trainer import make_trainer
from tests.support.ranks import reset_accelerate
from tests.support.tiny import MODELS, global_batch, parallel_config
from tests.support.training import MAX_NORM, adamw, fresh_accelerator, loss_of, train_prepared

NUM_STEPS = 6


def config_of(version: int = 2, *, mixed_precision: str = "fp8", **fp8: Any) -> dict[str, Any]:
    """A config as ``accelerate config`` writes it, with the settings of ``fp8_config``."""
    config = parallel_config("full_shard", version, 2)
    return {**config, "mixed_precision": mixed_precision, "fp8_config": {"backend": "AO", **fp8}}


def reference(
    name: str, num_steps: int = NUM_STEPS, *, all_gather: bool = False, divided: bool = False
) -> dict[str, Any]:
    """Losses, norms and weights of one process that computes the parts of several ranks, with fp32 masters.

    Args:
        all_gather: whether weights are cast to fp8 from fp32; otherwise from bf16.
        divided: whether this is one of several ranks with whole models, which divide sequences instead of samples.
    """
    from accelerate.utils import convert_model_to_fp8_ao
    from torchao.float8 import Float8LinearConfig

    model = MODELS[name]().float()
    optimizer, losses, norms = adamw(model), [], []
    for step in range(num_steps):
        computing = copy.deepcopy(model)
        for parameter in computing.parameters():  # buffers stay in fp32, as under FSDP2
            parameter.data = parameter.data.to(torch.bfloat16)
        convert_model_to_fp8_ao(computing, config=Float8LinearConfig(emulate=True, pad_inner_dim=True))
        if all_gather:
            _cast_weights(computing, model)
        parts = _of_divided_sequences(computing, step) if divided else _of_samples(computing, name, step)
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradient = sum(gradients[key] for _, gradients in parts) / len(parts)
                parameter.grad = gradient  # type: ignore[assignment]
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(sum(loss for loss, _ in parts) / len(parts))
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def _cast_weights(computing: nn.Module, masters: nn.Module) -> None:
    """Replace the weights of layers in fp8 by the masters, cast to fp8."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    for name, module in computing.named_modules():
        if type(module).__name__ == "Float8Linear":
            how: Any = (torch.float8_e4m3fn, module.linear_mm_config)
            cast: Any = hp_tensor_to_float8_dynamic(
                masters.get_submodule(name).weight.detach(), *how, gemm_input_role=GemmInputRole.WEIGHT
            )
            rest: Any = (torch.bfloat16, module.linear_mm_config, GemmInputRole.WEIGHT)
            module.weight = nn.Parameter(Float8TrainingTensor(cast._data, cast._scale, *rest))


Results = tuple[float, dict[str, torch.Tensor]]
"""The loss of a part of a batch, and its gradients in fp32."""


def _of_samples(model: nn.Module, name: str, step: int) -> list[Results]:
    """The results of the parts of two ranks."""
    parts = []
    for part in range(2):
        loss = loss_of(model, name, step, part, 2)
        loss.backward()
        parts.append(_taken(model, loss))
    return parts


def _of_divided_sequences(model: nn.Module, step: int) -> list[Results]:
    """The results of all ranks, each of which has a part of each sequence, with Accelerate's hooks and torch's ring."""
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.tensor.experimental import context_parallel

    add_cpu_attention()
    _attach_context_parallel_hooks(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    divide, tokens = functools.partial(context_parallel, mesh), global_batch(step)["input_ids"]
    loss = backward_of_divided(model, tokens, mesh.size(), divide, torch.Tensor.backward)
    parts: list[Any] = [None] * mesh.size()
    dist.all_gather_object(parts, _taken(model, loss))
    return parts


def _taken(model: nn.Module, loss: torch.Tensor) -> Results:
    """The loss and the gradients, which are removed from the model."""
    gradients = {key: p.grad.float() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), gradients


def gathered_dtypes(model: nn.Module) -> set[str]:
    """The dtypes of the weights of layers in fp8 just before their forward, when they are gathered."""
    found: set[str] = set()

    def note(module: Any, *_: Any) -> None:
        weight = module.weight
        found.add(str(getattr(weight, "_data", weight).dtype))

    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            module.register_forward_pre_hook(note)
    return found


def train(config: dict[str, Any], name: str = "llama", **arguments: Any) -> dict[str, Any]:
    accelerator = fresh_accelerator(config, **arguments)
    model = MODELS[name]()
    model, optimizer = accelerator.prepare(model, adamw(model))
    return {"gathered": gathered_dtypes(model), **train_prepared(accelerator, model, optimizer, name, NUM_STEPS)}


def printed_by_prepare(config: dict[str, Any]) -> str:
    """Return what this rank prints when a model is converted."""
    with redirect_stderr(io.StringIO()) as printed:
        accelerator = fresh_accelerator(config)
        model = MODELS["llama"]()
        accelerator.prepare(model, adamw(model))
    return printed.getvalue()


def save_and_load(folder: str, config: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Train, save, train on, load in the same run and repeat; then repeat in a new run from the checkpoint."""
    accelerator = fresh_accelerator(config)
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    train_prepared(accelerator, model, optimizer, "llama", 2)
    accelerator.save_state(f"{folder}/state")
    weights = accelerator.get_state_dict(model)
    first = train_prepared(accelerator, model, optimizer, "llama", 2)["losses"]
    accelerator.load_state(f"{folder}/state")
    again = train_prepared(accelerator, model, optimizer, "llama", 2)["losses"]
    accelerator.load_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/model")
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/exported", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator = fresh_accelerator(after)
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    accelerator.load_state(f"{folder}/state")
    new = train_prepared(accelerator, model, optimizer, "llama", 2)["losses"]
    return {"first": first, "again": again, "new": new, "weights": weights}


def train_by_trainer(
    folder: str, output_dir: str, config: dict[str, Any], *, resume: bool = False, adapters: bool = False
) -> dict[str, Any]:
    """Train six steps through the Trainer, save every third step and export the model; or continue at step 3."""
    from transformers import AutoModelForCausalLM

    hfp.install(config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = with_adapters(model) if adapters else model
    trainer = make_trainer(output_dir, model, save_strategy="steps", save_steps=3, **PLAIN)
    trainer.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-3") if resume else None)
    return exported_results(trainer, output_dir)


def train_with_handler(arguments: dict[str, Any], *, only: str = "", **recipe: Any) -> dict[str, Any]:
    """Train with ``AORecipeKwargs`` of the script, which turns fp8 on.

    Args:
        only: end of the names of the layers that compute in fp8, with a config of the script.
    """
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    reset_accelerate()
    hfp.install({**config_of(mixed_precision="no"), "fp8_config": None})
    if only:
        recipe |= {"config": Float8LinearConfig(), "module_filter_func": lambda module, name: name.endswith(only)}
    accelerator = Accelerator(cpu=True, kwargs_handlers=[AORecipeKwargs(**recipe)], **arguments)
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, adamw(model))
    return {"gathered": gathered_dtypes(model), **train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)}


def refused(config: dict[str, Any], folder: str = "", name: str = "llama") -> list[str]:
    """The codes with which preparing a model is refused; a model of a folder is sharded while it is loaded."""
    try:
        accelerator = fresh_accelerator(config)
        accelerator.prepare(load(folder, fsdp_size=2) if folder else MODELS[name]())
    except SpecError as error:
        return [problem.code for problem in error.problems if problem.severity == "error"]
    return []
