"""Tiny models of real architectures, and global batches that can be split over any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 96
NUM_STEPS = 20
GLOBAL_BATCH = 8
LENGTH = 12


def tiny_llama(*, tied: bool = False, layers: int = 3) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


MODELS = {"llama": tiny_llama, "bert": tiny_bert}


def global_batch(step: int) -> dict[str, torch.Tensor]:
    """Batch number ``step``: ``GLOBAL_BATCH`` x ``LENGTH`` tokens, the same on every rank."""
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + step))
    return {"input_ids": tokens, "labels": tokens.clone()}


def my_part(batch: dict[str, torch.Tensor], rank: int, world_size: int) -> dict[str, torch.Tensor]:
    return {key: value.chunk(world_size)[rank] for key, value in batch.items()}


def parallel_config(strategy: str, version: int, world_size: int, **settings: Any) -> dict[str, Any]:
    """An Accelerate config as a dict. Hybrid strategies have a shard axis of size 2."""
    config: dict[str, Any] = {
        "distributed_type": "FSDP",
        "num_processes": world_size,
        "use_cpu": True,
        "fsdp_config": {
            "fsdp_version": version,
            "fsdp_sharding_strategy": strategy.upper(),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            **settings,
        },
    }
    if strategy.startswith("hybrid"):
        config["parallelism_config"] = {
            "parallelism_config_dp_shard_size": 2,
            "parallelism_config_dp_replicate_size": world_size // 2,
        }
    return config
