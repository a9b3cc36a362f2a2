"""Cases that ranks run: modules of a sharded model that are called outside the model's forward, and ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from model_families import FAMILIES, Batch
from tiny import MODELS, global_batch, my_part, tiny_llama
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from training import fresh_accelerator, sgd

NUM_STEPS = 3


def family_calls(name: str) -> dict[str, Callable[[Any, Batch], Any]]:
    """Calls that libraries make on the unwrapped model of a family, other than its forward."""
    ids = "input_ids"
    calls: dict[str, Callable[[Any, Batch], Any]] = {
        "input embeddings": lambda model, batch: model.get_input_embeddings()(batch[ids]),
        "unwrapped model": lambda model, batch: next(iter(model(**batch).values())),
    }
    if name == "llama":
        calls |= {
            "head": lambda model, batch: model.get_output_embeddings()(torch.ones(2, 3, 32)),
            "base model": lambda model, batch: model.model(batch[ids]).last_hidden_state,
            "last logits": lambda model, batch: model(batch[ids], logits_to_keep=1).logits,
            "layer": one_layer,
            "norm": lambda model, batch: model.model.norm(torch.ones(2, 3, 32)),
        }
    if name == "gpt2":  # its embedding and head are tied
        calls["head"] = lambda model, batch: model.lm_head(torch.ones(2, 3, 32))
    if name == "t5":
        calls["encoder"] = lambda model, batch: model.get_encoder()(batch[ids]).last_hidden_state
        calls["generate"] = lambda model, batch: model.generate(batch[ids], max_new_tokens=4, do_sample=False)
    if name == "clip":
        calls |= {
            "text features": lambda model, batch: pooled(model.get_text_features(batch[ids])),
            "image features": lambda model, batch: pooled(model.get_image_features(batch["pixel_values"])),
        }
        del calls["input embeddings"]
    return calls


def pooled(features: Any) -> torch.Tensor:
    return features if isinstance(features, torch.Tensor) else features.pooler_output


def one_layer(model: Any, batch: Batch) -> torch.Tensor:
    hidden, positions = torch.ones(2, 3, 32), torch.arange(3)[None]
    output = model.model.layers[1](hidden, position_embeddings=model.model.rotary_emb(hidden, positions))
    return output[0] if isinstance(output, tuple) else output


def call_submodules(name: str, config: dict[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Make each call of a family before and after a forward. Return name -> result, and result of the bare model."""
    accelerator = fresh_accelerator(config)
    bare = FAMILIES[name].build().eval()
    model = accelerator.prepare(FAMILIES[name].build().eval())
    batch, results = FAMILIES[name].batch(0), {}
    for when in ("first", "after a forward"):
        for call, function in family_calls(name).items():
            with torch.no_grad():
                results[f"{call}, {when}"] = (function(accelerator.unwrap_model(model), batch), function(bare, batch))
        with torch.no_grad():
            model(**batch)
    return results


def train_with_submodules(
    name: str, config: dict[str, Any], *, uses_head_weight: bool = False
) -> tuple[list[float], list[float], list[bool]]:
    """Train with a loss that calls base model and head, as ``compute_loss`` overrides do.

    Return the losses, those of one process, and whether parameters, gradients and modes were unchanged by a call of
    ``generate`` before each optimizer step.
    """
    accelerator = fresh_accelerator(config)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    bare = MODELS[name]()
    optimizer = sgd(bare)
    expected = []
    for step in range(NUM_STEPS):
        loss = loss_by_parts(bare, global_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    model: Any = MODELS[name]()
    model, optimizer = accelerator.prepare(model, sgd(model))
    found, intact = [], []
    for step in range(NUM_STEPS):
        loss = loss_by_parts(accelerator.unwrap_model(model), my_part(global_batch(step), rank, world_size))
        accelerator.backward(loss)
        before = snapshot(model)
        accelerator.unwrap_model(model).generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)
        intact.append(same(before, snapshot(model)) and model.training)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        found.append(total.item() / world_size)
    return found, expected, intact


def loss_by_parts(model: Any, batch: Batch) -> torch.Tensor:
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    hidden = model.model(batch["input_ids"]).last_hidden_state
    logits = model.lm_head(hidden)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def snapshot(model: nn.Module) -> list[torch.Tensor | None]:
    tensors: list[Any] = [*model.parameters(), *(p.grad for p in model.parameters())]
    return [None if t is None else getattr(t, "_local_tensor", t).detach().clone() for t in tensors]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(one, other, strict=True)
    )


def generate(config: dict[str, Any], how: str) -> tuple[list[int], list[int], bool]:
    """Generate with a prompt of another length on each rank.

    Return the tokens, those of the bare model, and whether the weights are unchanged.

    Args:
        how: the object whose ``generate`` is called, or the context in which it is.
    """
    accelerator = fresh_accelerator(config)
    prompt = torch.tensor([[1, 2, 3, 4][: 2 + accelerator.process_index]])
    arguments = {"max_new_tokens": 3 + accelerator.process_index, "do_sample": False, "eos_token_id": 95}
    bare: Any = MODELS["lora" if how == "peft" else "llama"]().eval()
    expected = bare.generate(prompt, **arguments)
    model: Any = MODELS["lora" if how == "peft" else "llama"]()
    model = accelerator.prepare(model)
    before = accelerator.get_state_dict(model)
    inner = accelerator.unwrap_model(model)
    if how in ("summoned", "root summoned"):
        context: Any = FullyShardedDataParallel.summon_full_params(model, recurse=how == "summoned", writeback=True)
        with context, torch.no_grad():
            tokens = inner.generate(prompt, **arguments)
    else:
        tokens = {"model": model, "unwrapped": inner, "peft": inner}[how].generate(prompt, **arguments)
    after = accelerator.get_state_dict(model)
    equal = all(torch.equal(before[key], after[key]) for key in before) and model.training
    return tokens.tolist(), expected.tolist(), equal


def resize(config: dict[str, Any]) -> None:
    accelerator = fresh_accelerator(config)
    accelerator.unwrap_model(accelerator.prepare(tiny_llama())).resize_token_embeddings(100)
