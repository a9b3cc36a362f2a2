"""Models with LoRA adapters, as a plan counts them: on the meta device, with weights of 4 bits for QLoRA."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.problems import Problem, SpecError

_BLOCK, _NESTED_BLOCK = 64, 256
"""Elements that share a scale in bitsandbytes' 4-bit weights, and scales that share one if they are nested."""


def with_lora(model: nn.Module, *, rank: int, quantized: bool) -> nn.Module:
    """Return the model with LoRA adapters on all linear layers but the head. Other parameters are frozen.

    Args:
        model: on the meta device. It is changed.
        quantized: whether the weights of these layers are stored in 4 bits (NF4 with nested scales), which every
            forward and backward expands to the compute dtype. The scales are not sharded.

    Raises:
        SpecError: PEFT is not installed (FSDP-E727).
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        message = "--lora-rank and --qlora need the package peft, which is not installed."
        fix = "Run pip install peft, or leave them out."
        raise SpecError([Problem(code="FSDP-E727", message=message, fix=fix)]) from error
    if quantized:
        _pack_linears(model)
    name = type(model).__name__
    task = "CAUSAL_LM" if name.endswith(("ForCausalLM", "LMHeadModel")) else None
    task = "SEQ_CLS" if name.endswith("ForSequenceClassification") else task
    config = LoraConfig(r=rank, target_modules="all-linear", task_type=task)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a deprecated attribute of Transformers
        adapted: nn.Module = get_peft_model(model, config)
    return adapted


class _Expand(torch.autograd.Function):
    """A product with a packed weight. Only the packed form is kept for the backward (bitsandbytes' ``MatMul4Bit``)."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, out_features: int) -> torch.Tensor:
        ctx.shape = (out_features, inputs.shape[-1])
        return inputs @ inputs.new_empty(ctx.shape).t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        return grad @ grad.new_empty(ctx.shape), None


class PackedLinear(nn.Linear):
    """A linear layer with a weight of 4 bits per element, stored in a tensor of the compute dtype."""

    def __init__(self, layer: nn.Linear) -> None:
        numel, itemsize = layer.weight.numel(), layer.weight.element_size()
        scales = -(-numel // _BLOCK)
        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features, bias=False, dtype=layer.weight.dtype)
            packed = torch.empty(-(-numel // (2 * itemsize)), 1, dtype=layer.weight.dtype)
            self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8), persistent=False)
            self.register_buffer("nested_scales", torch.empty(-(-scales // _NESTED_BLOCK)), persistent=False)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Expand.apply(inputs, self.out_features)
        return output if self.bias is None else output + self.bias


def _pack_linears(model: nn.Module) -> None:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, PackedLinear(child))
