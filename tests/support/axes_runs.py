"""Cases that four ranks run: meshes with context, tensor and expert axes, by the Trainer and by a loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp
from tests.support.distributed_config_runs import PLAIN, exported_results, with_adapters
from tests.support.ranks import on_accelerator
from tests.support.tiny import GLOBAL_BATCH, LENGTH, global_batch, my_part
from tests.support.trainer_runs import make_trainer
from tests.support.training import MAX_NORM, fresh_accelerator

Sizes = dict[str, Any]
"""Sizes of axes: cp, tp, ep, dp_shard, dp_replicate; and cp_comm_strategy."""


def config_of(sizes: Sizes, version: int = 2, **settings: Any) -> dict[str, Any]:
    """A config with a mesh, as ``accelerate config`` writes it."""
    keys = {
        name if "_" in name and not name.startswith("dp") else f"{name}_size": value for name, value in sizes.items()
    }
    return {
        "distributed_type": "FSDP",
        "use_cpu": not on_accelerator(),
        "fsdp_config": {
            "fsdp_version": version,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            **settings,
        },
        "parallelism_config": {f"parallelism_config_{key}": value for key, value in keys.items()},
    }


def num_batches(sizes: Sizes) -> int:
    """Number of ranks that train different samples."""
    return dist.get_world_size() // (sizes.get("cp", 1) * sizes.get("tp", 1))


def train(
    folder: str,
    output_dir: str,
    sizes: Sizes,
    *,
    resume: bool = False,
    adapters: bool = False,
    settings: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Train six steps through the Trainer, save every third step and export the model; or continue at step 3.

    Args:
        keys: keys of the config beside its sections for FSDP and the mesh.
    """
    from transformers import AutoModelForCausalLM

    hfp.install({**config_of(sizes, **(settings or {})), **(keys or {})})
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = with_adapters(model) if adapters else model
    arguments = {"save_strategy": "steps", "save_steps": 3, **PLAIN, **arguments}
    trainer = make_trainer(
        output_dir, model, per_device_train_batch_size=GLOBAL_BATCH // num_batches(sizes), **arguments
    )
    trainer.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-3") if resume else None)
    return exported_results(trainer, output_dir)


def train_in_loop(
    sizes: Sizes, num_steps: int = 3, length: int = LENGTH, keys: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Train a whole model with ``accelerator.maybe_context_parallel``, as in Accelerate's guide.

    Args:
        keys: keys of the config beside its sections for FSDP and the mesh.
    """
    from tests.support.tiny import tiny_llama

    accelerator = fresh_accelerator({**config_of(sizes, **settings), **(keys or {})})
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    size, found = num_batches(sizes), {"losses": [], "norms": [], "masks": []}

    def note_mask(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        found["masks"].append(kwargs["attention_mask"])

    model.model.layers[0].register_forward_pre_hook(note_mask, with_kwargs=True)
    number = dist.get_rank() // sizes.get("cp", 1)
    for step in range(num_steps):
        tokens = my_part(global_batch(step), number, size)["input_ids"].to(accelerator.device)
        tokens = torch.nn.functional.pad(tokens, (0, length - LENGTH))
        loss = backward_of_divided(
            model, tokens, sizes.get("cp", 1), accelerator.maybe_context_parallel, accelerator.backward
        )
        found["norms"].append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found["losses"].append(mean.item() / dist.get_world_size())
    weights = {key: value.cpu() for key, value in accelerator.get_state_dict(model).items()}
    return {**found, "weights": weights, "report": hfp.report(accelerator).to_json()}


def backward_of_divided(
    model: Any, tokens: torch.Tensor, size: int, divide: Any, backward: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Compute the loss of this rank's part of whole sequences and its gradients, and return the loss.

    Args:
        size: the number of ranks that divide each sequence; the mean of their losses is that of the sequences.
        divide: ``accelerator.maybe_context_parallel``, or torch's own function.
    """
    labels = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
    positions = torch.arange(tokens.size(1), device=tokens.device).expand(len(tokens), -1).contiguous()
    num_targets = (labels != -100).sum()
    divided = [tokens, labels, positions]
    with divide(buffers=divided, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(divided)):
        logits = model(input_ids=tokens, position_ids=positions).logits
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        loss: torch.Tensor = total / num_targets * size
        backward(loss)
    return loss
