"""Run on ranks: training steps with a file of configs/. The model is large enough for their size threshold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cases_equivalence import LEARNING_RATE, MAX_NORM, fresh_accelerator
from tiny import global_batch, my_part, tiny_bert
from torch import nn

NUM_STEPS = 4


def small_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {"llama": small_llama, "bert": tiny_bert}


def reference(model_name: str) -> list[float]:
    """Return the losses of one process on the global batches, in fp32."""
    model = MODELS[model_name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(**global_batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(model_name: str, config: dict[str, Any]) -> list[float]:
    """Return the same losses of a parallel run."""
    accelerator = fresh_accelerator(config)
    model = MODELS[model_name]()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    losses = []
    for step in range(NUM_STEPS):
        loss = model(**my_part(global_batch(step), accelerator.process_index, accelerator.num_processes)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        losses.append(total.item() / accelerator.num_processes)
    return losses
