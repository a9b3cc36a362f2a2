"""Cases that ranks run: train, save and load a model family with FSDP. Also the same steps in one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.plan.names import canonical_name
from tests.support.model_families import FAMILIES
from tests.support.tiny import my_part
from tests.support.training import fresh_accelerator

NUM_STEPS = 3
MAX_NORM = 1.0
LEARNING_RATE = 0.05


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD. Adam amplifies the rounding errors of zero gradients, such as of a key's bias before softmax."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


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


def step_in_parallel(accelerator: Any, family: str, model: nn.Module, optimizer: Any, step: int) -> tuple[float, float]:
    """Train one step. Return the loss of the global batch and the gradient norm before clipping."""
    part = my_part(FAMILIES[family].batch(step), accelerator.process_index, accelerator.num_processes)
    loss = FAMILIES[family].loss(model, part)
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().float()
    dist.all_reduce(total)
    return total.item() / accelerator.num_processes, float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def train_steps(accelerator: Any, family: str, model: nn.Module, optimizer: Any) -> tuple[list[float], list[float]]:
    """Train ``NUM_STEPS`` steps. Return the losses and the gradient norms."""
    steps = [step_in_parallel(accelerator, family, model, optimizer, step) for step in range(NUM_STEPS)]
    return [loss for loss, _ in steps], [norm for _, norm in steps]


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


def shared_names(state: dict[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Return groups of names of tensors that share memory."""
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        if tensor.numel():
            groups.setdefault(tensor.data_ptr(), []).append(name)
    return sorted(tuple(sorted(names)) for names in groups.values() if len(names) > 1)


def clones(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
