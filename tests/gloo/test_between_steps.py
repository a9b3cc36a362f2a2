"""Forwards outside of training steps, weights that change after them, and errors that a script catches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_plugin.integrations.torch_functions import add_remedy
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import SpecError
from tests.gloo.collective_counter import CollectiveCounter
from tests.support.ranks import Ranks
from tests.support.tiny import global_batch, parallel_config, tiny_llama
from tests.support.training import adamw, fresh_accelerator, loss_of

Change = Callable[[Any, Any], None]


def by_optimizer(model: Any, optimizer: Any) -> None:
    """Change the weights as optimizers do that evaluate with other weights than they train (schedule-free)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(0.9)


def by_parameters(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


def by_data(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


CHANGES: dict[str, Change] = {"optimizer": by_optimizer, "parameters": by_parameters, "data": by_data}


def no_forward(model: Any) -> None:
    pass


def without_gradients(model: Any) -> None:
    with torch.no_grad():
        loss_of(model, "llama", 7)


def in_evaluation_mode(model: Any) -> torch.Tensor:
    """The loss has a graph, but the model is in evaluation mode."""
    loss = loss_of(model.eval(), "llama", 7)
    model.train()
    return loss


def only_logged(model: Any) -> torch.Tensor:
    """The loss has a graph, and stays alive."""
    return loss_of(model, "llama", 7)


FORWARDS: dict[str, Callable[[Any], Any]] = {
    "none": no_forward,
    "no_grad": without_gradients,
    "eval": in_evaluation_mode,
    "logged": only_logged,
}


CLIPS: dict[str, Callable[[Any, Any], Any]] = {
    "norm": lambda accelerator, parameters: accelerator.clip_grad_norm_(parameters, 0.1),
    "torch": lambda accelerator, parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.1),
    "by hand": lambda accelerator, parameters: [p.grad.mul_(0.1) for p in parameters if p.grad is not None],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).relu()


class Caller(nn.Module):
    """Calls ``forward`` of its blocks, as SqueezeBERT does, or a module inside a block, as DiT of diffusers does."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error == "inside a unit":
            x = self.blocks[0].inner(x)
        for block in self.blocks:
            x = block.forward(x)
        if self.error == "shape":  # 8 and 16 are sizes of shards under FSDP1
            x = x + torch.zeros(1, 8)
        if self.error == "shape in a layer":
            x = self.blocks[0](torch.cat([x, x], -1))
        return self.head(x)


VERSIONS = pytest.mark.parametrize("version", [1, 2])

STRATEGIES = pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])

PRECISIONS = pytest.mark.parametrize("precision", ["no", "bf16"])


def config_of(version: int, strategy: str = "full_shard", precision: str = "no") -> dict[str, Any]:
    return {**parallel_config(strategy, version, 2), "mixed_precision": precision}


def losses_with(config: dict[str, Any], forward: str, change: str | None) -> list[float]:
    """Train two steps, call the model, change the weights, call it again, train on. Return the losses of this rank."""
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = []
    for step in range(4):
        if step == 2:
            kept = FORWARDS[forward](model)
            if change is not None:
                with torch.no_grad():
                    CHANGES[change](model, optimizer)
            FORWARDS[forward](model)
            del kept
        loss = loss_of(model, "llama", step, accelerator.process_index, 2)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@VERSIONS
@STRATEGIES
@PRECISIONS
@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_after_evaluation_are_used(
    two_ranks: Ranks, version: int, strategy: str, precision: str, change: str
) -> None:
    config = config_of(version, strategy, precision)
    expected = two_ranks.run(losses_with, config, "none", change)
    assert two_ranks.run(losses_with, config, "no_grad", change) == expected


@VERSIONS
@STRATEGIES
@PRECISIONS
@pytest.mark.parametrize("change", [None, "optimizer"])
def test_forward_without_backward_does_not_change_training(
    two_ranks: Ranks, version: int, strategy: str, precision: str, change: str | None
) -> None:
    """Under FSDP1 in bf16, gradients would not be reduced in the next step."""
    config = config_of(version, strategy, precision)
    expected = two_ranks.run(losses_with, config, "none", change)
    for forward in ("logged", "eval"):
        assert two_ranks.run(losses_with, config, forward, change) == expected


def refused(function: Callable[..., Any], *args: Any) -> list[str]:
    """Return the codes of the problems that a case raises."""
    with pytest.raises(SpecError) as caught:
        function(*args)
    return [problem.code for problem in caught.value.problems]


@VERSIONS
def test_change_of_gathered_copies_is_refused(two_ranks: Ranks, version: int) -> None:
    case = (losses_with, config_of(version, "shard_grad_op"), "logged", "parameters")
    assert two_ranks.run(refused, *case) == [["FSDP-E317"]] * 2


def _run_out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


def losses_around_failure(config: dict[str, Any], where: str | None, then: str = "") -> list[float]:
    """Train with a call that fails in the third step, and whose error is caught. Return the losses of this rank.

    Args:
        where: a step that fails: ``forward``, ``submodule`` (of a call of the base model), ``backward`` or ``None``.
        then: what follows: a ``save`` of the weights, or a batch whose gradients are only ``accumulated``.
    """
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    inner = accelerator.unwrap_model(model)
    mlp = unwrapped(inner.model.layers[1]).mlp
    losses = []
    for step in range(5):
        if step == 2 and where is not None:
            hook = mlp.register_full_backward_pre_hook if where == "backward" else mlp.register_forward_pre_hook
            handle = hook(_run_out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                if where == "submodule":
                    inner.model(global_batch(0)["input_ids"].to(inner.device))
                accelerator.backward(loss_of(model, "llama", 9))
            handle.remove()
        if step == 2 and then == "save":
            accelerator.get_state_dict(model)
        if step == 2 and then == "accumulated":
            with accelerator.no_sync(model):
                accelerator.backward(loss_of(model, "llama", 7, accelerator.process_index, 2))
        loss = loss_of(model, "llama", step, accelerator.process_index, 2)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@VERSIONS
@pytest.mark.parametrize("where", ["forward", "submodule", "backward"])
@PRECISIONS
def test_training_continues_after_caught_error(two_ranks: Ranks, version: int, where: str, precision: str) -> None:
    config = config_of(version, precision=precision)
    expected = two_ranks.run(losses_around_failure, config, None)
    assert two_ranks.run(losses_around_failure, config, where) == expected


@VERSIONS
@pytest.mark.parametrize("then", ["save", "accumulated"])
def test_caught_error_of_backward_is_followed_by(two_ranks: Ranks, version: int, then: str) -> None:
    config = config_of(version)
    expected = two_ranks.run(losses_around_failure, config, None, then)
    assert two_ranks.run(losses_around_failure, config, "backward", then) == expected


def losses_after_failure_with_older_torch(config: dict[str, Any]) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state")
        return losses_around_failure(config, "backward")


def test_failed_backward_is_refused_with_older_torch(two_ranks: Ranks) -> None:
    case = (losses_after_failure_with_older_torch, config_of(2))
    assert two_ranks.run(refused, *case) == [["FSDP-E318"]] * 2


def count_all_gathers(config: dict[str, Any]) -> dict[str, int]:
    """Count the all-gathers of a training step, of forwards without gradients, and of such a forward in a step."""
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    counter = CollectiveCounter()

    def step(between: Callable[[Any], Any]) -> None:
        loss = loss_of(model, "llama", 0)
        between(model)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    calls: dict[str, Callable[[], None]] = {
        "step": lambda: step(no_forward),
        "evaluation": lambda: without_gradients(model),
        "next evaluation": lambda: without_gradients(model),
        "step after it": lambda: step(no_forward),
        "step with a forward": lambda: step(without_gradients),
    }
    step(no_forward)  # the first one prefetches nothing
    for name, call in calls.items():
        with counter, counter.during(name):
            call()
    gathers: Counter[str] = Counter()
    for (kind, _, _, phase), number in counter.calls.items():
        gathers[phase] += number if kind == "all_gather" else 0
    return dict(gathers)


@pytest.mark.parametrize(
    ("version", "strategy", "counts"),
    [
        (1, "full_shard", (7, 4, 7, 10)),
        (1, "shard_grad_op", (4, 4, 4, 4)),
        (2, "full_shard", (9, 5, 10, 14)),
        (2, "shard_grad_op", (5, 5, 6, 6)),
    ],
)
def test_steps_have_no_added_all_gather(
    two_ranks: Ranks, version: int, strategy: str, counts: tuple[int, int, int, int]
) -> None:
    """The units are the layers and one or two others. A forward in a step uses what the step has gathered.

    FSDP2 prefetches one unit too many in the first backward after a forward without gradients.
    """
    step, evaluation, after, both = counts
    expected = {"step": step, "evaluation": evaluation, "next evaluation": evaluation}
    for found in two_ranks.run(count_all_gathers, config_of(version, strategy)):
        assert found == {**expected, "step after it": after, "step with a forward": both}


def losses_with_forward_before_clip(
    config: dict[str, Any], forward: str, clip: str, before_optimizer: str = "none"
) -> list[float]:
    """Train with a forward ``before_optimizer`` is made, and another one between the backward and the clipping."""
    accelerator = fresh_accelerator(config)
    model: Any = accelerator.prepare_model(tiny_llama())
    kept = FORWARDS[before_optimizer](model)
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    del kept
    losses = []
    for step in range(3):
        loss = loss_of(model, "llama", step, accelerator.process_index, 2)
        accelerator.backward(loss)
        kept = FORWARDS[forward](model)
        CLIPS[clip](accelerator, model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del kept
    return losses


@pytest.mark.parametrize(
    ("version", "strategy"), [(1, "full_shard"), (2, "full_shard"), (1, "shard_grad_op"), (2, "shard_grad_op")]
)
@pytest.mark.parametrize("clip", CLIPS)
def test_forward_before_clipping_changes_nothing(two_ranks: Ranks, version: int, strategy: str, clip: str) -> None:
    """After a forward with gradients, gathered parameters of FSDP2 are copies, which have no gradients."""
    config = config_of(version, strategy)
    expected = two_ranks.run(losses_with_forward_before_clip, config, "none", clip)
    assert two_ranks.run(losses_with_forward_before_clip, config, "logged", clip) == expected


@STRATEGIES
def test_optimizer_made_after_forward_gets_the_shards(two_ranks: Ranks, strategy: str) -> None:
    """Under FSDP1 and ``SHARD_GRAD_OP``, torch refuses the parameters then."""
    case = (losses_with_forward_before_clip, config_of(2, strategy), "none", "norm")
    assert two_ranks.run(*case, "logged") == two_ranks.run(*case)


def losses_with_forward_before_step(config: dict[str, Any], forward: str) -> list[float]:
    """Train with another forward between the backward and the step. Return the losses of this rank."""
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = []
    for step in range(3):
        loss = loss_of(model, "llama", step, accelerator.process_index, 2)
        accelerator.backward(loss)
        kept = FORWARDS[forward](model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del kept
    return losses


@VERSIONS
@pytest.mark.parametrize("forward", ["no_grad", "logged"])
def test_forward_before_step_of_offloaded_shards(two_accelerator_ranks: Ranks, version: int, forward: str) -> None:
    """The step waits until the device has read the shards: the device reports memory that changes during a copy."""
    config = parallel_config("full_shard", version, 2, use_cpu=False, fsdp_offload_params=True)
    expected = two_accelerator_ranks.run(losses_with_forward_before_step, config, "none")
    assert two_accelerator_ranks.run(losses_with_forward_before_step, config, forward) == expected


def generate_on_device(config: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the tokens that a model with offloaded shards generates after a forward, and those of the bare model."""
    accelerator = fresh_accelerator(config)
    prompt, arguments = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 3, "do_sample": False}
    bare: Any = tiny_llama().eval()
    expected = bare.generate(prompt, **arguments)
    model: Any = accelerator.prepare(tiny_llama())
    without_gradients(model)
    tokens = accelerator.unwrap_model(model).generate(prompt.to(accelerator.device), **arguments)
    return tokens.tolist(), expected.tolist()


@VERSIONS
def test_generate_with_offloaded_shards(two_accelerator_ranks: Ranks, version: int) -> None:
    config = parallel_config("full_shard", version, 2, use_cpu=False, fsdp_offload_params=True)
    for found, expected in two_accelerator_ranks.run(generate_on_device, config):
        assert found == expected


def blocks_as_units(config: dict[str, Any]) -> dict[str, Any]:
    fsdp = {**config["fsdp_config"], "fsdp_transformer_layer_cls_to_wrap": "Block"}
    return {**config, "fsdp_config": fsdp}


def _steps(model: Any, backward: Callable[[torch.Tensor], Any], optimizer: Any = None) -> list[float]:
    optimizer = optimizer or adamw(model)
    losses = []
    for step in range(3):
        loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_with_direct_calls(config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the losses of a model that calls ``block.forward``, and those of one process. Hooks run once."""
    accelerator = fresh_accelerator(blocks_as_units(config))
    model: Any = Caller()
    found, calls = [], [0]
    losses = [_steps(Caller(), lambda loss: loss.backward())]
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses.insert(0, _steps(model, accelerator.backward, optimizer))
    found.append(calls[0])
    assert found == [3]
    return losses[0], losses[1]


@VERSIONS
def test_direct_calls_of_forward_train_as_in_one_process(two_ranks: Ranks, version: int) -> None:
    for found, expected in two_ranks.run(train_with_direct_calls, config_of(version)):
        assert found == pytest.approx(expected, rel=1e-6)


def codes_of_error(config: dict[str, Any], error: str) -> list[str]:
    """Return the codes of the notes on an error in the forward of :class:`Caller`."""
    accelerator = fresh_accelerator(blocks_as_units(config))
    model = accelerator.prepare(Caller(error))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(4, 16))
    add_remedy(caught.value)
    return re.findall(r"FSDP-\w+", " ".join(getattr(caught.value, "__notes__", ())))


@pytest.mark.parametrize(
    ("error", "codes"), [("inside a unit", ["FSDP-E627"]), ("shape", []), ("shape in a layer", [])]
)
def test_errors_of_shards_name_their_cause(two_ranks: Ranks, error: str, codes: list[str]) -> None:
    for printed in two_ranks.run(codes_of_error, config_of(2), error):
        assert printed == codes
