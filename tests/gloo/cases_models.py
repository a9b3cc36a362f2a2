"""Cases for ranks: models other than plain Transformers models, and unusual uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from cases_equivalence import fresh_accelerator
from tiny import global_batch, my_part, tiny_llama
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import hf_fsdp_plugin as hfp

NUM_STEPS = 3
LEARNING_RATE = 0.05


class SimpleModel(nn.Module):
    """The model of a well-known FSDP tutorial: it has no config and declares no layer classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer1 = nn.Linear(256, 256)
        self.layer2 = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer2(self.layer1(x))


def simple_batch(step: int) -> torch.Tensor:
    return torch.randn(8, 256, generator=torch.Generator().manual_seed(step))


def frozen_llama(what: str, **kwargs: Any) -> nn.Module:
    """A llama with frozen parameters: ``half`` of the layers, or the input ``embeddings``."""
    model: Any = tiny_llama(layers=4, **kwargs)
    frozen = model.model.layers[:2] if what == "half" else model.model.embed_tokens
    frozen.requires_grad_(False)
    return model


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "simple": SimpleModel,
    "llama": tiny_llama,
    "half": lambda: frozen_llama("half"),
    "embeddings": lambda: frozen_llama("embeddings"),
    "llama-bf16": lambda: tiny_llama().to(torch.bfloat16),
}


def loss_of(model: nn.Module, name: str, step: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
    if name == "simple":
        return model(simple_batch(step).chunk(world_size)[rank]).square().mean()
    return model(**my_part(global_batch(step), rank, world_size)).loss


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=LEARNING_RATE, momentum=0.9)


def reference(name: str) -> dict[str, Any]:
    """Losses, norms and weights of one process. A bf16 model is converted to fp32 first."""
    model = BUILDERS[name]().float()
    optimizer = sgd(model.parameters())
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = loss_of(model, name, step)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def steps(accelerator: Any, model: nn.Module, optimizer: Any, name: str) -> dict[str, Any]:
    """``NUM_STEPS`` steps of a prepared model, its weights and its report."""
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = loss_of(model, name, step, accelerator.process_index, accelerator.num_processes)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(total.item() / accelerator.num_processes)
    report = hfp.report(accelerator).to_json()
    return {"losses": losses, "norms": norms, "weights": accelerator.get_state_dict(model), "report": report}


def train(name: str, config: dict[str, Any]) -> dict[str, Any]:
    accelerator = fresh_accelerator(config)
    model = BUILDERS[name]()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    run = steps(accelerator, model, optimizer, name)
    masters = {str(p.dtype) for group in optimizer.param_groups for p in group["params"]}
    return {**run, "masters": masters}


def wrap_by_author(model: nn.Module, version: int, use_orig: bool) -> nn.Module:
    """Shard a model as torch's tutorials do."""
    layers = {type(model.model.layers[0])} if hasattr(model, "model") else {nn.Linear}
    if version == 1:
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(layers),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig,
        )
    for module in [m for m in model.modules() if type(m) in layers]:
        fully_shard(module)
    return fully_shard(model)


def train_wrapped_by_author(
    name: str, config: dict[str, Any], version: int, order: str, use_orig: bool = True
) -> dict[str, Any]:
    """``order``: the optimizer is created ``before wrapping``, ``before preparing`` or ``after`` preparing."""
    accelerator = fresh_accelerator(config)
    model = BUILDERS[name]()
    optimizer = sgd(model.parameters()) if order == "before wrapping" else None
    model = wrap_by_author(model, version, use_orig)
    if order == "before preparing":
        optimizer = sgd(model.parameters())
    if optimizer is not None:
        prepared, optimizer = accelerator.prepare(model, optimizer)
    else:
        prepared = accelerator.prepare(model)
        optimizer = accelerator.prepare(sgd(prepared.parameters()))
    return {**steps(accelerator, prepared, optimizer, name), "same": prepared is model}


def dropout_step(config: dict[str, Any], native: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """One SGD step with dropout active: of the bare model with averaged gradients, and of the prepared one."""
    accelerator = fresh_accelerator(config)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    bare = with_dropout()
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
    counter = CountingBackend()
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    if how == "wrapper":
        model = torch.compile(model, backend=counter)
    elif how == "in place":
        model.compile(backend=counter)
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    run = steps(accelerator, model, optimizer, "llama")
    return {**run, "num_graphs": counter.num_graphs, "dynamo": torch._dynamo.utils.counters["frames"]["ok"]}


class CountingBackend:
    """A compiler that counts the graphs and runs them unchanged."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph.forward


def train_two(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Two models of different classes and their optimizers in one ``prepare``."""
    accelerator = fresh_accelerator(config)
    one, other = tiny_llama(), SimpleModel()
    one, other, first, second = accelerator.prepare(one, other, sgd(one.parameters()), sgd(other.parameters()))
    return [steps(accelerator, one, first, "llama"), steps(accelerator, other, second, "simple")]


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
        student, optimizer = accelerator.prepare(student, sgd(student.parameters()))
        run["student"] = steps(accelerator, student, optimizer, "llama")
    return run


def clip_subset(config: dict[str, Any]) -> tuple[float, float]:
    """The norm of every second parameter of a prepared model, and that of the unsharded model."""
    bare = tiny_llama()
    loss_of(bare, "llama", 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(list(bare.parameters())[::2], 1.0).item()
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model = accelerator.prepare(model)
    accelerator.backward(loss_of(model, "llama", 0, accelerator.process_index, accelerator.num_processes))
    return accelerator.clip_grad_norm_(list(model.parameters())[::2], 1.0).item(), expected


def train_wrapped_in_trainer(output_dir: str, version: int) -> dict[str, Any]:
    """Train a model that its author has wrapped, and one that the plan wraps, with the Trainer."""
    from cases_trainer import Batches, losses

    runs = {}
    for wrapped in (True, False):
        args = hfp.FsdpTrainingArguments(
            output_dir=output_dir, fsdp="full_shard auto_wrap", fsdp_config={"version": version}, use_cpu=True,
            max_steps=3, per_device_train_batch_size=4, report_to="none", disable_tqdm=True, logging_steps=1,
            save_strategy="no", seed=3,
        )  # fmt: skip
        model = tiny_llama()
        if wrapped:
            model = wrap_by_author(model, version, use_orig=True)
        trainer = hfp.FsdpTrainer(model=model, args=args, train_dataset=Batches(3), eval_dataset=Batches(1))
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        runs[wrapped] = {"losses": [*losses(trainer), evaluated], "report": hfp.report(trainer).to_json()}
    return {"by author": runs[True], "by config": runs[False]}


def train_adapter(config: dict[str, Any]) -> dict[str, Any]:
    """Train a LoRA adapter on a frozen base model."""
    from peft import get_peft_model

    accelerator = fresh_accelerator(config)
    model: Any = get_peft_model(tiny_llama(), lora_config())
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    return steps(accelerator, model, optimizer, "llama")


def reference_adapter() -> dict[str, Any]:
    from peft import get_peft_model

    BUILDERS["lora"] = lambda: get_peft_model(tiny_llama(), lora_config())  # type: ignore[arg-type, return-value]
    return reference("lora")


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
