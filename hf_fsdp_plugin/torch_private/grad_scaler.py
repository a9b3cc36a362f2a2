"""The gradient scaler of fp16, which decides on all ranks together whether a step is skipped."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.contracts import contracts_in, import_target

CONTRACTS = contracts_in(__file__)
_check_and_unscale_ = import_target("torch:_amp_foreach_non_finite_check_and_unscale_", CONTRACTS)


class CollectiveGradScaler(GradScaler):
    """Unscales this rank's part of each gradient, and skips a step on all ranks if any rank has an infinite gradient.

    torch's scalers pass all gradients of a dtype to one kernel, which raises for DTensors beside plain tensors. FSDP1's
    ``ShardedGradScaler`` does not reduce the result over the ranks if the optimizer is fused and nothing is clipped, so
    that some ranks would skip a step. :meth:`unscale_` and :meth:`step` are collective.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by ``inv_scale`` in place. Collective.

        Returns:
            Whether any rank has an infinite gradient, as 1.0 or 0.0, on the device of the scale only: torch adds the
            values of all devices, and fused optimizers skip a step if the sum is exactly 1.
        """
        for (device, _), gradients in _local_gradients(optimizer).items():
            on_device = torch.zeros_like(found_inf, device=device)
            _check_and_unscale_(gradients, on_device, inv_scale.to(device))
            found_inf.copy_(torch.maximum(found_inf, on_device.to(found_inf.device)))
        # Ranks with empty shards have gradients on fewer devices, so there is one collective for all of them.
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # Accelerate calls it in `load_state`. A scaler that has been used has both, with the values that were loaded.
        if self._growth_tracker is None:
            super()._lazy_init_scale_growth_tracker(dev)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Unscale the gradients and call ``optimizer.step``, unless a gradient is infinite. Collective."""
        # Fused kernels of the CPU read the flag and the scale from asynchronous copies, before these have arrived.
        if getattr(optimizer, "_step_supports_amp_scaling", False) and self._device != "cpu":
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            if any(parameter.device.type == "cpu" for parameter in parameters):
                optimizer._step_supports_amp_scaling = False
        return super().step(optimizer, *args, **kwargs)


def _local_gradients(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Return the memory of this rank's gradients, by device and dtype: each kernel takes one of both."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is None:
                continue
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if local.is_sparse:
                parameter.grad = local = local.coalesce()  # sums the values of equal indices: the sum may be inf
                local = local.values()
            if local.numel():
                found[local.device, local.dtype].append(local)
    return found
