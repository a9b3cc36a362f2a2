"""Optimizer steps that change nothing, and gradients that add up, are errors; the report counts what changed."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from tests.support.json_schema import assert_valid
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS, global_batch, my_part, parallel_config
from tests.support.training import fresh_accelerator

NUM_STEPS = 3


def _backward(accelerator: Any, model: nn.Module, step: int, before: Callable[[], None] = lambda: None) -> None:
    loss = model(**my_part(global_batch(step), dist.get_rank(), dist.get_world_size())).loss
    before()
    accelerator.backward(loss)


def _prepared(accelerator: Any) -> tuple[Any, Any]:
    model: Any = MODELS["llama"]()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def unprepared_optimizer(accelerator: Any) -> None:
    """The optimizer is created before ``prepare`` and not passed to it."""
    model: Any = MODELS["llama"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = accelerator.prepare(model)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of_shards(accelerator: Any) -> None:
    """The optimizer is created after ``prepare``."""
    model = accelerator.prepare(MODELS["llama"]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)
        optimizer.step()
        optimizer.zero_grad()


def no_step(accelerator: Any) -> None:
    model, _ = _prepared(accelerator)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)


def evaluation(accelerator: Any) -> None:
    model, _ = _prepared(accelerator)
    model.eval()
    with torch.no_grad():
        model(**my_part(global_batch(0), dist.get_rank(), dist.get_world_size()))


def never_zeroed(accelerator: Any) -> None:
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)
        optimizer.step()


def zeroed_before_backward(accelerator: Any) -> None:
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step, optimizer.zero_grad)
        optimizer.step()


def zeroed_in_place(accelerator: Any) -> None:
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        _backward(accelerator, model, step)
        optimizer.step()


def accumulated_by_hand(accelerator: Any) -> None:
    model, optimizer = _prepared(accelerator)
    for step in range(2 * NUM_STEPS):
        _backward(accelerator, model, step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def discriminator(accelerator: Any) -> None:
    """Another backward passes through the model before its gradients are zeroed."""
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)  # the generator's loss: only its own optimizer would step
        optimizer.zero_grad(set_to_none=False)
        _backward(accelerator, model, step + 1)
        optimizer.step()


def penalty_on_shards(accelerator: Any) -> None:
    """A penalty on weights, whose gradients exist when the backward of the model begins."""
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        loss = model(**my_part(global_batch(step), dist.get_rank(), dist.get_world_size())).loss
        norm: Any = model.model.layers[0].input_layernorm.weight
        accelerator.backward(loss + 1e-3 * norm.square().sum().full_tensor())
        optimizer.step()
        optimizer.zero_grad()


def two_optimizers(accelerator: Any) -> None:
    """Every second step updates the layers, with the gradients of two backwards; the others update the rest."""
    model: Any = MODELS["llama"]()
    layers = [p for name, p in model.named_parameters() if "layers" in name]
    others = [p for name, p in model.named_parameters() if "layers" not in name]
    model, often, seldom = accelerator.prepare(
        model, torch.optim.SGD(others, lr=1e-2), torch.optim.SGD(layers, lr=1e-2)
    )
    for step in range(2 * NUM_STEPS):
        _backward(accelerator, model, step)
        often.step()
        often.zero_grad()
        if step % 2:
            seldom.step()
            seldom.zero_grad()


def optimizer_in_backward(accelerator: Any) -> None:
    """Each parameter has an optimizer that steps and sets the gradient to ``None`` during the backward."""
    model = accelerator.prepare(MODELS["llama"]())
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=1e-2)

        def step_and_zero(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_and_zero)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)


def with_frozen_reference(accelerator: Any) -> None:
    """A reference model and an unrelated optimizer that trains something else."""
    other = nn.Linear(2, 2)
    unrelated = torch.optim.SGD(other.parameters(), lr=1e-2)
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        unrelated.step()  # without gradients
        _backward(accelerator, model, step)
        optimizer.step()
        optimizer.zero_grad()


def _steps(accelerator: Any, model: nn.Module, *optimizers: Any, num: int = NUM_STEPS) -> None:
    for step in range(num):
        loss = model(**my_part(global_batch(step), dist.get_rank(), dist.get_world_size())).loss
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def _add_head(accelerator: Any, model: nn.Module, *, trained: bool = True) -> nn.Module:
    inner: Any = accelerator.unwrap_model(model)
    inner.head = nn.Linear(64, 1)
    head: nn.Module = inner.head
    return head.requires_grad_(trained)


def added_before_the_optimizer(accelerator: Any) -> None:
    model = accelerator.prepare(MODELS["llama"]())
    _add_head(accelerator, model)
    accelerator.prepare(torch.optim.AdamW(model.parameters()))


def replaced_before_the_optimizer(accelerator: Any) -> None:
    model = accelerator.prepare(MODELS["llama"]())
    inner: Any = accelerator.unwrap_model(model)
    inner.lm_head = nn.Linear(inner.lm_head.in_features, inner.lm_head.out_features)
    accelerator.prepare(torch.optim.AdamW(model.parameters()))


def added_to_a_group(accelerator: Any) -> None:
    model, optimizer = _prepared(accelerator)
    _steps(accelerator, model, optimizer)
    optimizer.optimizer.add_param_group({"params": list(_add_head(accelerator, model).parameters())})
    _steps(accelerator, model, optimizer, num=1)


def added_for_an_unprepared_optimizer(accelerator: Any) -> None:
    model = accelerator.prepare(MODELS["llama"]())
    _add_head(accelerator, model)
    _steps(accelerator, model, torch.optim.AdamW(model.parameters()))


def added_and_saved(accelerator: Any) -> None:
    model, optimizer = _prepared(accelerator)
    _add_head(accelerator, model, trained=False)
    _steps(accelerator, model, optimizer)
    accelerator.save_state(f"{tempfile.gettempdir()}/added")  # the ranks share the folder


def added_before_prepare(accelerator: Any) -> None:
    model: Any = MODELS["llama"]()
    model.head = nn.Linear(64, 1)
    model.head.requires_grad_(False)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    _steps(accelerator, model, optimizer)
    accelerator.save_state(f"{tempfile.gettempdir()}/before")


def no_rate(accelerator: Any) -> None:
    model: Any = MODELS["llama"]()
    _steps(accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.0)))


def warm_up(accelerator: Any) -> None:
    model, optimizer = _prepared(accelerator)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: step / NUM_STEPS)
    for _ in range(NUM_STEPS):
        _steps(accelerator, model, optimizer, num=1)
        schedule.step()


def rate_by_rank(accelerator: Any) -> None:
    model: Any = MODELS["llama"]()
    rate = 1e-2 if dist.get_rank() else 1e-4
    _steps(accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=rate)))


def one_group_without_rate(accelerator: Any) -> None:
    model: Any = MODELS["llama"]()
    layers = [p for name, p in model.named_parameters() if "layers.0" in name]
    others = [p for name, p in model.named_parameters() if "layers.0" not in name]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": layers, "lr": 0.0}], lr=1e-2)
    _steps(accelerator, *accelerator.prepare(model, optimizer))


LOOPS = {
    loop.__name__: loop
    for loop in (
        unprepared_optimizer, optimizer_of_shards, no_step, evaluation, never_zeroed, zeroed_before_backward,
        zeroed_in_place, accumulated_by_hand, discriminator, penalty_on_shards, two_optimizers, with_frozen_reference,
        optimizer_in_backward, added_before_the_optimizer, replaced_before_the_optimizer, added_to_a_group,
        added_for_an_unprepared_optimizer, added_and_saved, added_before_prepare, no_rate, warm_up, rate_by_rank,
        one_group_without_rate,
    )
}  # fmt: skip


VERSIONS = [1, 2]


def run_loop(config: dict[str, Any], name: str, *, with_message: bool = False) -> dict[str, Any]:
    """Return the codes of the problems, the part ``training`` of the report, and its summary."""
    accelerator = fresh_accelerator(config)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            LOOPS[name](accelerator)
    except SpecError as error:
        message = {"message": str(error)} if with_message else {}
        return {"codes": [problem.code for problem in error.problems], "raised": True, **message}
    report = hfp.report(accelerator)
    codes = [problem.code for problem in report.problems if problem.severity == "error"]
    warnings = [problem.code for problem in report.problems if problem.code.startswith("FSDP-W5")]
    found = {"codes": codes, "raised": False, "report": report.to_json(), "summary": report.summary()}
    return found | {"warnings": warnings, "printed": printed.getvalue()}


def run(two_ranks: Ranks, version: int, name: str) -> dict[str, Any]:
    first, second = two_ranks.run(run_loop, parallel_config("full_shard", version, 2), name)
    assert first["codes"] == second["codes"] and first["raised"] == second["raised"]
    return first


def test_unprepared_optimizer_is_an_error_at_its_second_step(two_ranks: Ranks) -> None:
    assert run(two_ranks, 2, "unprepared_optimizer") == {"codes": ["FSDP-E513"], "raised": True}


@pytest.mark.parametrize("version", VERSIONS)
def test_gradients_that_are_never_zeroed_are_an_error(two_ranks: Ranks, version: int) -> None:
    assert run(two_ranks, version, "never_zeroed") == {"codes": ["FSDP-E514"], "raised": True}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "num_steps"),
    [
        ("zeroed_before_backward", NUM_STEPS),
        ("zeroed_in_place", NUM_STEPS),
        ("accumulated_by_hand", NUM_STEPS),
        ("discriminator", NUM_STEPS),
        ("with_frozen_reference", NUM_STEPS),
        ("two_optimizers", 3 * NUM_STEPS),
        ("optimizer_of_shards", NUM_STEPS - 1),
    ],
)
def test_loop_that_trains_is_reported(two_ranks: Ranks, version: int, name: str, num_steps: int) -> None:
    found = run(two_ranks, version, name)
    training = found["report"]["training"]
    assert found["codes"] == [] and "none differs" in found["summary"]
    assert training["steps"] == num_steps
    assert training["changed_parameters"] == training["trained_parameters"] > 20
    assert f"training: {num_steps} optimizer steps; {training['changed_parameters']} of " in found["summary"]
    assert_valid("report", found["report"])


def test_penalty_on_shards_is_no_problem(two_ranks: Ranks) -> None:
    found = run(two_ranks, 2, "penalty_on_shards")
    assert found["codes"] == [] and found["report"]["training"]["steps"] == NUM_STEPS


def test_optimizer_of_flat_parameters_trains_unprepared(two_ranks: Ranks) -> None:
    """FSDP1 keeps the parameter objects, so an optimizer that was created before ``prepare`` trains."""
    found = run(two_ranks, 1, "unprepared_optimizer")
    assert found["codes"] == [] and found["report"]["training"]["changed_parameters"] > 20


def test_optimizers_that_step_in_the_backward_train(two_ranks: Ranks) -> None:
    found = run(two_ranks, 2, "optimizer_in_backward")
    training = found["report"]["training"]
    assert found["codes"] == [] and "none differs" in found["summary"]
    assert training["steps"] > 0 and training["changed_parameters"] > 0


@pytest.mark.parametrize("version", VERSIONS)
def test_backwards_without_a_step_are_reported(two_ranks: Ranks, version: int) -> None:
    found = run(two_ranks, version, "no_step")
    assert found["codes"] == ["FSDP-E515"]
    assert "none differs" not in found["summary"] and "no optimizer step was observed" in found["summary"]
    assert found["report"]["training"] == {
        "steps": 0, "examined_steps": 0, "changed_parameters": None, "trained_parameters": None,
        "unchanged_parameters": [],
    }  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_evaluation_has_no_problem_but_no_step(two_ranks: Ranks, version: int) -> None:
    found = run(two_ranks, version, "evaluation")
    assert found["codes"] == [] and "none differs" not in found["summary"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("added_before_the_optimizer", "head.weight"),
        ("replaced_before_the_optimizer", "lm_head.weight"),
        ("added_to_a_group", "head.weight"),
        ("added_for_an_unprepared_optimizer", "head.weight"),
    ],
)
def test_training_of_added_parameters_is_refused(two_ranks: Ranks, version: int, name: str, parameter: str) -> None:
    config = parallel_config("full_shard", version, 2)
    for found in two_ranks.run(run_loop, config, name, with_message=True):
        assert (set(found["codes"]), found["raised"]) == ({"FSDP-E517"}, True) and parameter in found["message"]


@pytest.mark.parametrize("version", VERSIONS)
def test_added_parameters_are_reported_and_named_in_a_save(two_ranks: Ranks, version: int) -> None:
    found = run(two_ranks, version, "added_and_saved")
    rows = {row["setting"]: row for row in found["report"]["settings"]}
    assert rows["sharding.strategy"]["status"] == "differs" and "head.weight" in rows["sharding.strategy"]["reason"]
    assert [row["setting"] for row in rows.values() if row["status"] == "differs"] == ["sharding.strategy"]
    assert "FSDP-W518" in found["printed"] and "head.weight" in found["printed"]


@pytest.mark.parametrize("version", VERSIONS)
def test_parameters_added_before_prepare_are_accepted(two_ranks: Ranks, version: int) -> None:
    found = run(two_ranks, version, "added_before_prepare")
    assert (found["codes"], found["warnings"]) == ([], []) and "none differs" in found["summary"]
    assert "FSDP-W518" not in found["printed"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "warnings", "text"),
    [
        ("no_rate", ["FSDP-W519"], "the learning rate was 0 in all 3 optimizer steps"),
        ("warm_up", [], ""),
        ("rate_by_rank", ["FSDP-W520"], "lr of AdamW differs by rank in step 1: 0.0001 on rank 0, 0.01 on rank 1"),
        ("one_group_without_rate", [], "changed, not model.layers.0."),
    ],
)
def test_steps_that_do_not_train_as_intended_are_named(
    two_ranks: Ranks, version: int, name: str, warnings: list[str], text: str
) -> None:
    found = run(two_ranks, version, name)
    assert (found["codes"], found["warnings"]) == ([], warnings)
    assert text in " ".join(found["summary"].split())
    assert_valid("report", found["report"])


def run_batches(config: dict[str, Any], accumulation: int, sizes: tuple[int, int], kind: str) -> dict[str, Any]:
    """Train with a loader, and return the effective batch size of the report, and the messages of FSDP-W512.

    Args:
        accumulation: the argument of the Accelerator.
        sizes: the batch size of each rank.
        kind: ``accumulated``, ``not accumulated``, or what the collator does: ``first only``, ``packed``.
    """
    accelerator = fresh_accelerator(config)
    accelerator.gradient_accumulation_steps = accumulation
    batches = [{name: value[row] for name, value in global_batch(row // 4).items()} for row in [*range(4)] * 48]

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if kind == "first only":
            samples = samples[:1]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        if kind == "packed":
            num_samples, length = batch["input_ids"].shape
            batch = {name: value.reshape(1, -1) for name, value in batch.items() if name != "attention_mask"}
            batch["position_ids"] = torch.arange(length).repeat(num_samples)[None]
        return batch

    loader: Any = torch.utils.data.DataLoader(batches, batch_size=sizes[dist.get_rank()], collate_fn=collate)  # type: ignore[arg-type]
    model: Any = MODELS["llama"]()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    for _, batch in zip(range(12), loader, strict=False):
        with contextlib.nullcontext() if kind == "not accumulated" else accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    report = hfp.report(accelerator)
    messages = [problem.message for problem in report.problems if problem.code == "FSDP-W512"]
    found = {"size": report.effective_batch_size, "tokens": report.tokens}
    return {**found, "messages": messages, "table": str(report)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("accumulation", "sizes", "kind", "size", "text"),
    [
        (2, (4, 4), "accumulated", 16, ""),
        (2, (4, 4), "not accumulated", 8, "2 forwards per optimizer step were requested, but 4 and 1 were observed"),
        (1, (4, 2), "accumulated", 6, "batches of different sizes: 2 to 4"),
        (
            1,
            (4, 4),
            "first only",
            2,
            "4 samples per forward and 1 forwards per optimizer step were requested, but 1",
        ),
        (1, (4, 4), "packed", 8, ""),
    ],
)
def test_effective_batch_size_is_the_observed_one(
    two_ranks: Ranks, version: int, accumulation: int, sizes: tuple[int, int], kind: str, size: int, text: str
) -> None:
    config = parallel_config("full_shard", version, 2)
    for found in two_ranks.run(run_batches, config, accumulation, sizes, kind):
        assert found["size"] == size and f"effective batch size {size}" in found["table"]
        assert found["tokens"] == (0 if kind == "packed" else 12 * size)
        assert len(found["messages"]) == bool(text) and text in "".join(found["messages"])
