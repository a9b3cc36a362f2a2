"""Optimizers that update whole matrices: the ranks divide the work, and train as one process does."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, zeros

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.optimizers.division import newton_schulz_flops
from hf_fsdp_plugin.backends.optimizers.parameters import step_mode
from hf_fsdp_plugin.tools.plan.estimate.muon import muon_step
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import unit_bytes
from hf_fsdp_plugin.torch_private.grad_scaler import CollectiveGradScaler
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS, parallel_config, tiny_llama
from tests.support.training import (
    assert_same_training,
    assert_same_weights,
    fresh_accelerator,
    loss_of,
    reference,
    train,
)

SAME = 1e-6
"""Relative difference of losses to one process, with an iteration in fp32."""
BF16 = 1e-4
"""The same for torch's Muon, whose iteration rounds to bf16: a difference of the reduced gradients in the last bit can
change a rounding, which is 2**-8 of an element. Undivided steps have the same differences.
"""
BF16_WEIGHTS = 5e-3
"""The same for its weights after 20 steps; undivided steps differ by 3.8e-3."""


class Fp32Muon(torch.optim.Optimizer):
    """Muon with a Newton-Schulz iteration in fp32, for matrices and stacks of them; SGD for other parameters."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.1})
        self.flops = 0

    def matrix_cost(self, shape: torch.Size, group: Any) -> float:
        # The gradients of a router have a singular value that is a rounding error.
        return newton_schulz_flops(shape) if shape[-2] > 4 else 0

    def matrix_inputs(self, parameter: torch.Tensor, group: Any) -> list[torch.Tensor]:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["momentum_buffer"].mul_(0.95).add_(parameter.grad)
        return [parameter.grad + 0.95 * state["momentum_buffer"]]

    def matrix_update(self, inputs: Any, group: Any) -> list[torch.Tensor]:
        (matrix,) = inputs
        self.flops += newton_schulz_flops(matrix.shape)
        is_tall = matrix.shape[-2] > matrix.shape[-1]
        x = matrix.mT if is_tall else matrix
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        return [x.mT if is_tall else x]

    def apply_update(self, parameter: torch.Tensor, outputs: Any, group: Any) -> None:
        parameter.mul_(1 - group["lr"] * group["decay"]).sub_(outputs[0], alpha=group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.dim() > 1 and self.matrix_cost(parameter.shape, group):
                    inputs = self.matrix_inputs(parameter, group)
                    self.apply_update(parameter, self.matrix_update(inputs, group), group)
                else:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


class Shampoo(Fp32Muon):
    """A rule with state for whole matrices: sums of products, of other sizes than the parameter, also sharded."""

    def matrix_inputs(self, parameter: torch.Tensor, group: Any) -> list[torch.Tensor]:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if not state:
            for key, size in zip(("rows", "columns"), parameter.shape, strict=True):
                state[key] = _zeros(parameter, size, size)
        return [grad, state["rows"], state["columns"]]

    def matrix_update(self, inputs: Any, group: Any) -> list[torch.Tensor]:
        grad, rows, columns = inputs
        rows, columns = rows + grad @ grad.mT, columns + grad.mT @ grad
        return [_root(rows) @ grad @ _root(columns), rows, columns]

    def apply_update(self, parameter: torch.Tensor, outputs: Any, group: Any) -> None:
        parameter.sub_(outputs[0], alpha=group["lr"])
        for key, value in zip(("rows", "columns"), outputs[1:], strict=True):
            self.state[parameter][key].copy_(value)


def _zeros(parameter: torch.Tensor, *shape: int) -> torch.Tensor:
    """A tensor that is sharded as the parameter is."""
    if isinstance(parameter, DTensor):
        return zeros(*shape, device_mesh=parameter.device_mesh, placements=parameter.placements)
    return torch.zeros(*shape)


def _root(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse fourth root of a positive semidefinite matrix, away from zero."""
    values, vectors = torch.linalg.eigh(matrix.double() + 1e-2 * torch.eye(len(matrix), dtype=torch.float64))
    return (vectors * values.clamp(min=1e-2) ** -0.25 @ vectors.mT).to(matrix.dtype)


class WholeSteps(torch.optim.Muon):
    """Muon as it ran before its steps were divided: a class with its own ``step`` runs on DTensors."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class WrongShape(Fp32Muon):
    def matrix_update(self, inputs: Any, group: Any) -> list[torch.Tensor]:
        return [inputs[0].flatten()]


def fp32_muon(model: nn.Module) -> torch.optim.Optimizer:
    return Fp32Muon(model.parameters())


def shampoo(model: nn.Module) -> torch.optim.Optimizer:
    return Shampoo(model.parameters())


def muon(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    return torch.optim.Muon(matrices, **{"lr": 1e-3, **settings})


@pytest.mark.parametrize("name, settings, accumulation", [
    ("llama", {"fsdp_offload_params": True}, 2), ("experts", {}, 1),
])  # fmt: skip
def test_divided_steps_match_one_process(
    two_ranks: Ranks, name: str, settings: dict[str, Any], accumulation: int
) -> None:
    config = parallel_config("full_shard", 2, 2, **settings)
    found = two_ranks.run(train, name, config, fp32_muon, accumulation=accumulation)[0]
    assert_same_training(found, reference(name, fp32_muon), SAME)


def test_replicas_divide_further(four_ranks: Ranks) -> None:
    found = four_ranks.run(train, "four-experts", parallel_config("hybrid_shard", 2, 4), fp32_muon)[0]
    assert_same_training(found, reference("four-experts", fp32_muon), SAME)


@pytest.mark.parametrize("settings", [{}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "weight_decay": 0.01}])
def test_muon_of_torch_matches_one_process(four_ranks: Ranks, settings: dict[str, Any]) -> None:
    optimizer_of = partial(muon, **settings)
    found = four_ranks.run(train, "llama", parallel_config("hybrid_shard", 2, 4), optimizer_of)[0]
    expected = reference("llama", optimizer_of)
    assert found["losses"] == pytest.approx(expected["losses"], rel=BF16)
    assert_same_weights(found["weights"], expected["weights"], BF16_WEIGHTS)


def test_offloaded_muon_on_device_matches(two_accelerator_ranks: Ranks) -> None:
    config = parallel_config("full_shard", 2, 2, use_cpu=False, fsdp_offload_params=True)
    found = two_accelerator_ranks.run(train, "llama", config, fp32_muon)[0]
    assert_same_training(found, reference("llama", fp32_muon), 1e-5)


def test_state_for_whole_matrices_stays_sharded(two_ranks: Ranks) -> None:
    found = two_ranks.run(train, "small-llama", parallel_config("full_shard", 2, 2), shampoo, num_steps=3)[0]
    assert_same_training(found, reference("small-llama", shampoo, num_steps=3), 1e-5)


def shown_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that docs/optimizers.md shows."""
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"torch": torch}
    exec(next(block for block in text.split("```python\n") if block.startswith("class ")).partition("```")[0], names)
    return names["Orthogonal"]([parameter for parameter in model.parameters() if parameter.ndim == 2])


def test_optimizer_of_the_document_matches_one_process(two_ranks: Ranks) -> None:
    found = two_ranks.run(train, "llama", parallel_config("full_shard", 2, 2), shown_optimizer)[0]
    assert_same_training(found, reference("llama", shown_optimizer))


def memory_of_step(hidden: int) -> tuple[int, int]:
    """The most bytes that the second step allocates on this device, and the prediction."""
    config = parallel_config("full_shard", 2, dist.get_world_size(), use_cpu=False)
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama(layers=2, hidden_size=hidden, intermediate_size=2 * hidden)
    plan = hfp.resolve(hfp.load_spec(config), model, world_size=dist.get_world_size(), device_type="npu")
    predicted = muon_step(plan, [shard for unit in unit_bytes(plan, model) for shard in unit.shards]).memory
    model, optimizer = accelerator.prepare(model, muon(model))
    memory = torch.get_device_module(accelerator.device.type)
    for _ in range(2):
        accelerator.backward(loss_of(model, "llama", 0))
        before = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        optimizer.step()
        peak = memory.max_memory_allocated() - before
        optimizer.zero_grad()
    return peak, predicted


def test_predicted_memory_of_a_step_is_allocated(two_accelerator_ranks: Ranks) -> None:
    found = two_accelerator_ranks.run(memory_of_step, 256)
    assert max(peak for peak, _ in found) == pytest.approx(found[0][1], rel=0.05)


def count_flops(name: str) -> tuple[int, str]:
    """The FLOPs of this rank in one step, and how the steps run."""
    accelerator = fresh_accelerator(parallel_config("full_shard", 2, dist.get_world_size()))
    model = MODELS[name]()
    model, optimizer = accelerator.prepare(model, Fp32Muon(model.parameters()))
    accelerator.backward(loss_of(model, name, 0))
    optimizer.step()
    return optimizer.optimizer.flops, step_mode(optimizer.optimizer)


def test_each_rank_updates_a_part_of_the_matrices(two_ranks: Ranks) -> None:
    flops = [number for number, mode in two_ranks.run(count_flops, "llama") if mode == "divided"]
    whole = sum(newton_schulz_flops(p.shape) for p in MODELS["llama"]().parameters() if p.ndim == 2)
    assert sum(flops) == whole and max(flops) <= 0.55 * whole


def run_muon(kind: str, start: int, stop: int, resume_from: str = "", save_to: str = "") -> list[float]:
    """Train with Muon, and save or resume. Returns the losses."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    accelerator = fresh_accelerator(parallel_config("full_shard", 2, world_size))
    model = MODELS["llama"]()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    model, optimizer = accelerator.prepare(model, {"whole": WholeSteps, "divided": torch.optim.Muon}[kind](matrices))
    if resume_from:
        accelerator.load_state(resume_from)
    losses = []
    for step in range(start, stop):
        part = loss_of(model, "llama", step, rank, world_size)
        accelerator.backward(part)
        optimizer.step()
        optimizer.zero_grad()
        total = part.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    if save_to:
        accelerator.save_state(save_to)
    return losses


def test_state_of_undivided_steps_is_resumed(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    whole = two_ranks.run(run_muon, "whole", 0, 6, save_to="")[0]
    two_ranks.run(run_muon, "whole", 0, 3, save_to=str(tmp_path / "saved"))
    for ranks in (two_ranks, four_ranks):
        again = ranks.run(run_muon, "divided", 3, 6, resume_from=str(tmp_path / "saved"))[0]
        assert again == pytest.approx(whole[3:], rel=2e-5)  # without the momenta, they differ by 8e-5


def skip_step(name: str) -> list[tuple[int, bool]]:
    """Step with the scaler of fp16, first with an infinite gradient. Returns FLOPs and whether a step was skipped."""
    accelerator = fresh_accelerator(parallel_config("full_shard", 2, dist.get_world_size()))
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    accelerator.scaler = CollectiveGradScaler("cpu", init_scale=256.0)
    model = MODELS[name]()
    model, optimizer = accelerator.prepare(model, Fp32Muon(model.parameters()))
    found = []
    for is_infinite in (True, False):
        accelerator.backward(loss_of(model, name, 0))
        if is_infinite and dist.get_rank() == 0:
            next(model.parameters()).grad.to_local()[0, 0] = float("inf")
        optimizer.step()
        optimizer.zero_grad()
        found.append((optimizer.optimizer.flops, optimizer.step_was_skipped))
    return found


@pytest.mark.cpu_ranks("the case makes the scaler of fp16 for CPU ranks")
def test_skipped_step_of_fp16_sends_nothing(two_ranks: Ranks) -> None:
    for skipped, stepped in two_ranks.run(skip_step, "llama"):
        assert skipped == (0, True) and stepped[0] > 0 and not stepped[1]


def printed_problems(kind: str) -> str:
    """Prepare an optimizer and step it once. Returns what was printed, and the error."""
    accelerator = fresh_accelerator(parallel_config("full_shard", 2, dist.get_world_size()))
    model = MODELS["llama"]()
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        factory = {"adafactor": torch.optim.Adafactor, "wrong": WrongShape}[kind]
        model, optimizer = accelerator.prepare(model, factory(model.parameters()))
    accelerator.backward(loss_of(model, "llama", 0))
    try:
        optimizer.step()
    except hfp.SpecError as error:
        return f"{printed.getvalue()} {error}"
    return printed.getvalue()


def test_optimizer_that_is_not_divided_is_a_note(two_ranks: Ranks) -> None:
    assert "FSDP-N329" in two_ranks.run(printed_problems, "adafactor")[0]


def test_rule_with_outputs_of_wrong_shape_is_an_error(two_ranks: Ranks) -> None:
    printed = two_ranks.run(printed_problems, "wrong")
    assert all("FSDP-E330" in each and "matrix_update of WrongShape" in each for each in printed)
