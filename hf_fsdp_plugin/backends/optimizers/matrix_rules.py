"""The interface of optimizers whose update needs whole matrices, and that of torch's Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim import Optimizer

from hf_fsdp_plugin.backends.optimizers.division import newton_schulz_flops
from hf_fsdp_plugin.torch_private.functions import adjusted_muon_lr, orthogonalize, with_local_tensor
from hf_fsdp_plugin.torch_private.modules import local_tensor


@runtime_checkable
class MatrixRule(Protocol):
    """An update of whole matrices whose work FSDP2's ranks divide. An optimizer with these methods is divided.

    ``matrix_inputs`` and ``apply_update`` compute element by element, on the shards of every rank. ``matrix_update``
    computes on whole matrices, on one rank per matrix. In one process, the three calls one after the other are the
    whole update of a parameter, so the optimizer's own ``step`` can consist of them. See docs/optimizers.md.
    """

    def matrix_cost(self, shape: torch.Size, group: Mapping[str, Any]) -> float:
        """Return the cost of ``matrix_update`` for a parameter, in any unit, by which the work is divided.

        Returns:
            0 for a parameter that the optimizer's own ``step`` updates, as it updates all parameters that do not have 2
            or 3 dimensions.
        """

    def matrix_inputs(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """Update the elementwise state of a parameter, and return the tensors that ``matrix_update`` needs whole.

        Parameter, gradient and state are DTensors. So are the inputs, with the mesh and the placements of the parameter
        and the same number of matrices, but of any size. They are sent in their own dtype.
        """

    def matrix_update(self, inputs: Sequence[torch.Tensor], group: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """Return what ``apply_update`` needs, for one matrix or several of one parameter.

        Args:
            inputs: plain tensors (rows, columns), or (matrices, rows, columns) of a parameter with three dimensions.
                Their memory may be changed.

        Returns:
            One tensor for each input, of its shape. It is sent in the dtype of the input.
        """

    def apply_update(self, parameter: torch.Tensor, outputs: Sequence[torch.Tensor], group: Mapping[str, Any]) -> None:
        """Change a parameter by the outputs, DTensors that are laid out like the inputs."""


class MuonRule:
    """The update of ``torch.optim.Muon`` (``_single_tensor_muon``), operation by operation."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer  # loading a checkpoint replaces its state

    def matrix_cost(self, shape: torch.Size, group: Mapping[str, Any]) -> float:
        return newton_schulz_flops(shape, group["ns_steps"]) if len(shape) == 2 else 0

    def matrix_inputs(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        grad: Any = parameter.grad
        state = self._optimizer.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        own, momentum = local_tensor(grad), local_tensor(state["momentum_buffer"])
        momentum.lerp_(own, 1 - group["momentum"])
        update = own.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        # The iteration begins with this cast, so half of the bytes of fp32 are sent without a difference.
        return [with_local_tensor(grad, update.bfloat16())]

    def matrix_update(self, inputs: Sequence[torch.Tensor], group: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        return [orthogonalize(inputs[0], group["ns_coefficients"], group["ns_steps"], group["eps"])]

    def apply_update(self, parameter: torch.Tensor, outputs: Sequence[torch.Tensor], group: Mapping[str, Any]) -> None:
        lr, local = float(group["lr"]), local_tensor(parameter)
        local.mul_(1 - lr * group["weight_decay"])
        local.add_(local_tensor(outputs[0]), alpha=-adjusted_muon_lr(lr, group["adjust_lr_fn"], parameter.shape))


def matrix_rule(optimizer: Optimizer) -> MatrixRule:
    """Return the rule of an optimizer that is divided: its own methods, or that of torch's Muon."""
    return optimizer if isinstance(optimizer, MatrixRule) else MuonRule(optimizer)
