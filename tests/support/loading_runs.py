"""Cases that ranks run: ``from_pretrained`` with RAM-efficient loading, and what scripts do with the model."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_plugin.backends.loading.mapped_files import parameter_memory
from tests.support.model_families import FAMILIES
from tests.support.training import fresh_accelerator


def save_plain(family: str, folder: str) -> None:
    """Save the model on rank 0."""
    if dist.get_rank() == 0:
        FAMILIES[family].build().save_pretrained(folder)
    dist.barrier()


GGUF_NAMES = {
    "embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm", "input_layernorm": "attn_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    # of LFM2, which Transformers dequantizes tensor by tensor
    "embedding_norm": "token_embd_norm", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "self_attn.out_proj": "attn_output", "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm", "operator_norm": "attn_norm", "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down",
}  # fmt: skip


def write_gguf(model: Any, path: str, architecture: str) -> None:
    """Write a Llama or an LFM2 as a GGUF file with fp16 matrices."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_context_length(config.max_position_embeddings)
    if architecture == "llama":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
    else:
        heads = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
        writer.add_head_count_kv(heads)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_rope_freq_base(1e4)
        writer.add_token_list([str(number) for number in range(config.vocab_size)])
    for name, tensor in model.state_dict().items():
        *parts, _ = name.split(".")
        *_, group, module = ["", *parts]
        block = f"blk.{parts[2]}." if ".layers." in name else ""
        short = GGUF_NAMES.get(f"{group}.{module}") or GGUF_NAMES.get(module, module)
        data = tensor.squeeze().numpy().astype("float16" if tensor.dim() > 1 else "float32")
        writer.add_tensor(f"{block}{short}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_quantized(folder: str, config: dict[str, Any]) -> tuple[str, int]:
    """Return what is printed while a model is quantized, and the number of parameters on the meta device."""
    from transformers import BitsAndBytesConfig

    fresh_accelerator(config)
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        model: Any = FAMILIES["llama"].model
        model = model.from_pretrained(folder, quantization_config=four_bit, dtype=torch.bfloat16)
    return printed.getvalue(), parameter_memory(model.parameters()).num_on_meta
