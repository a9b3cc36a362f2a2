"""Small models of real architectures, and global batches that can be split over any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 96
NUM_STEPS = 20
GLOBAL_BATCH = 8
LENGTH = 12


def tiny_llama(*, tied: bool = False, layers: int = 3, **settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    defaults = {"hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=tied, use_cache=False, **{**defaults, **settings},
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tiny_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32))


def tiny_deepseek() -> nn.Module:
    """A model that keeps the weights of its routers in fp32, also in bf16."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
        v_head_dim=8, qk_nope_head_dim=4, max_position_embeddings=32,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def tiny_t5() -> nn.Module:
    """A model that keeps some weights in fp32 if it is loaded in fp16."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def small_llama() -> nn.Module:
    """A llama that is large enough for the size threshold of the files in configs/."""
    return tiny_llama(layers=2, hidden_size=64, intermediate_size=160)


def frozen_llama(what: str) -> nn.Module:
    """A llama with frozen parameters: ``half`` of the layers, or the input ``embeddings``."""
    model: Any = tiny_llama(layers=4)
    frozen = model.model.layers[:2] if what == "half" else model.model.embed_tokens
    frozen.requires_grad_(False)
    return model


def lora_llama() -> nn.Module:
    """A LoRA adapter on a frozen llama."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM")
    return get_peft_model(tiny_llama(), config)  # type: ignore[arg-type, return-value]


def tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def tiny_mixtral(experts: int = 3) -> nn.Module:
    """A mixture of stacked experts: the first dimension of their weights is their number."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


class SimpleModel(nn.Module):
    """The model of a well-known FSDP tutorial: it has no config and declares no layer classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer1 = nn.Linear(256, 256)
        self.layer2 = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer2(self.layer1(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": tiny_llama,
    "small-llama": small_llama,
    "half": lambda: frozen_llama("half"),
    "embeddings": lambda: frozen_llama("embeddings"),
    "llama-bf16": lambda: tiny_llama().to(torch.bfloat16),
    "lora": lora_llama,
    "bert": tiny_bert,
    "experts": tiny_mixtral,
    "four-experts": lambda: tiny_mixtral(4),
    "simple": SimpleModel,
}


def global_batch(step: int) -> dict[str, torch.Tensor]:
    """Batch number ``step``: ``GLOBAL_BATCH`` x ``LENGTH`` tokens, the same on every rank."""
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + step))
    return {"input_ids": tokens, "labels": tokens.clone()}


def simple_batch(step: int) -> torch.Tensor:
    """Batch number ``step`` for :class:`SimpleModel`."""
    return torch.randn(GLOBAL_BATCH, 256, generator=torch.Generator().manual_seed(step))


def my_part(batch: dict[str, torch.Tensor], rank: int, world_size: int) -> dict[str, torch.Tensor]:
    return {key: value.chunk(world_size)[rank] for key, value in batch.items()}


OTHER_UNITS: list[dict[str, Any]] = [
    {"fsdp_activation_checkpointing": True},
    {"fsdp_auto_wrap_policy": "NO_WRAP"},
    {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
]
"""Settings with which units are other modules, or gather and free their parameters at other times."""


def parallel_config(
    strategy: str, version: int, world_size: int, *, use_cpu: bool = True, **settings: Any
) -> dict[str, Any]:
    """An Accelerate config as a dict. Hybrid strategies have a shard axis of size 2."""
    config: dict[str, Any] = {
        "distributed_type": "FSDP",
        "num_processes": world_size,
        "use_cpu": use_cpu,
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
