"""User code that reads and changes the weights of a prepared model, on real ranks."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import hf_fsdp_plugin as hfp
from tests.support import user_code_runs
from tests.support.ranks import Ranks
from tests.support.tiny import OTHER_UNITS, global_batch, my_part, parallel_config, tiny_llama
from tests.support.training import adamw, assert_same_weights, fresh_accelerator, loss_of, sgd
from tests.support.user_code_runs import codes_of, make_model

NUM_STEPS = 3


class WholeCopies:
    """The average of diffusers' ``EMAModel``: copies of the parameters from before ``prepare``."""

    def __init__(self, parameters: Any) -> None:
        self.shadow = [parameter.clone().detach() for parameter in parameters]

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        for shadow, parameter in zip(self.shadow, list(parameters), strict=True):
            shadow.sub_(0.1 * (shadow - parameter))


class SharpnessAware(torch.optim.SGD):
    """Has the methods of the sharpness-aware optimizers that scripts contain."""

    def first_step(self, zero_grad: bool = False) -> None:
        """Move the weights along the gradients, by a length that does not depend on the norm of all gradients."""

    def second_step(self, zero_grad: bool = False) -> None:
        """Restore the weights, and update them."""


VERSIONS = pytest.mark.parametrize("version", [1, 2])


@torch.no_grad()
def edit(model: Any, parameters: dict[str, Any]) -> None:
    """Change rows of the embeddings, scale the norms, and write random numbers to a layer."""
    model.get_input_embeddings().weight[:10] = 0
    model.get_input_embeddings().weight[10] += 1.0
    for name, parameter in parameters.items():
        if name.endswith("norm.weight"):
            parameter.mul_(1.5)
        if name.endswith("layers.1.mlp.up_proj.weight") or "lora_A" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))


def edit_reference(name: str) -> dict[str, torch.Tensor]:
    """Train, edit and train an unsharded model. Returns its weights."""
    model = make_model(name).float()
    optimizer = adamw(model)
    for number in range(NUM_STEPS):
        user_code_runs.step(None, model, optimizer, name, number)
        edit(model, dict(model.named_parameters()))
    return dict(model.state_dict())


def train_and_edit(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The same with :func:`full_parameters`. Only rank 0 edits in the second step."""
    accelerator = fresh_accelerator(config)
    model = make_model(name)
    inner = model
    model, optimizer = accelerator.prepare(model, adamw(model))
    names, dtypes, seen = set(), set(), []
    for number in range(NUM_STEPS):
        user_code_runs.step(accelerator, model, optimizer, name, number)
        if number == 1:  # an evaluation leaves the root gathered
            with torch.no_grad():
                loss_of(model, "llama", number)
        with hfp.full_parameters(model, modify=True) as parameters:
            if number != 1 or dist.get_rank() == 0:
                edit(inner, parameters)
            names |= set(parameters)
            dtypes |= {str(parameter.dtype) for parameter in parameters.values()}
        with hfp.full_parameters(inner.get_input_embeddings()) as parameters:
            seen.append(float(parameters["weight"].norm()))
    return {"weights": accelerator.get_state_dict(model), "names": names, "dtypes": dtypes, "norms": seen}


@VERSIONS
@pytest.mark.parametrize("name", ["llama", "tied", "half", "lora"])
def test_edits_of_whole_parameters_equal_one_process(two_ranks: Ranks, name: str, version: int) -> None:
    runs = two_ranks.run(train_and_edit, name, parallel_config("full_shard", version, 2))
    expected = edit_reference(name)
    assert_same_weights(runs[0]["weights"], expected)
    for run in runs:
        assert run["names"] == set(expected)
        assert run["norms"] == runs[0]["norms"]


@VERSIONS
@pytest.mark.parametrize(
    "settings",
    [
        *OTHER_UNITS,
        {"fsdp_sharding_strategy": "NO_SHARD"},
        {"fsdp_offload_params": True},
        {"fsdp_ignored_modules": "model.embed_tokens"},
    ],
    ids=str,
)
def test_edits_with_other_settings_equal_one_process(two_ranks: Ranks, settings: dict[str, Any], version: int) -> None:
    runs = two_ranks.run(train_and_edit, "llama", parallel_config("full_shard", version, 2, **settings))
    expected = edit_reference("llama")
    assert_same_weights(runs[0]["weights"], expected)
    assert all(run["names"] == set(expected) for run in runs)


@VERSIONS
def test_edits_of_compiled_layers_equal_one_process(two_ranks: Ranks, version: int) -> None:
    config = {**parallel_config("full_shard", version, 2), "dynamo_config": {"dynamo_backend": "EAGER"}}
    runs = two_ranks.run(train_and_edit, "llama", config)
    assert_same_weights(runs[0]["weights"], edit_reference("llama"))


@VERSIONS
def test_edits_on_a_hybrid_mesh_equal_one_process(four_ranks: Ranks, version: int) -> None:
    runs = four_ranks.run(train_and_edit, "tied", parallel_config("hybrid_shard", version, 4))
    assert_same_weights(runs[0]["weights"], edit_reference("tied"))


def test_edits_of_flat_parameters_equal_one_process(two_ranks: Ranks) -> None:
    config = parallel_config("full_shard", 1, 2, fsdp_use_orig_params=False)
    runs = two_ranks.run(train_and_edit, "llama", config)
    assert_same_weights(runs[0]["weights"], edit_reference("llama"))


def edit_in_mixed_precision(config: dict[str, Any]) -> dict[str, Any]:
    accelerator = fresh_accelerator(config)
    inner: Any = tiny_llama()
    model, optimizer = accelerator.prepare(inner, adamw(inner))
    value = 1.0 + 2.0**-12  # not a number of bf16
    with hfp.full_parameters(inner.lm_head, modify=True) as parameters:
        parameters["weight"].fill_(value)
    user_code_runs.step(accelerator, model, optimizer, "llama", 0)
    with hfp.full_parameters(inner, modify=True) as parameters:
        dtypes = {str(parameter.dtype) for parameter in parameters.values()}
        changed = float((inner.lm_head.weight - value).abs().max())
    return {"dtypes": dtypes, "changed": changed}


@VERSIONS
def test_whole_parameters_have_the_master_dtype(two_ranks: Ranks, version: int) -> None:
    config = {**parallel_config("full_shard", version, 2), "mixed_precision": "bf16"}
    for run in two_ranks.run(edit_in_mixed_precision, config):
        assert run["dtypes"] == {"torch.float32"}
        assert 0 < run["changed"] <= 1.1e-3


def misuse(config: dict[str, Any]) -> dict[str, list[str]]:
    """The codes of the problems of what is refused in or around :func:`full_parameters`, by kind."""
    accelerator = fresh_accelerator(config)
    inner: Any = tiny_llama()
    model, optimizer = accelerator.prepare(inner, adamw(inner))

    def inside(function: Callable[[], Any], modify: bool = False) -> Callable[[], None]:
        def call() -> None:
            with hfp.full_parameters(model, modify=modify):
                function()

        return call

    def call_in_forward() -> None:
        hook = inner.model.layers[0].mlp.register_forward_hook(lambda *_: inside(lambda: None)())
        try:
            loss_of(model, "llama", 0)
        finally:
            hook.remove()

    codes = {
        "change": codes_of(inside(lambda: inner.model.norm.weight.zero_())),
        "forward": codes_of(inside(lambda: loss_of(model, "llama", 0))),
        "layer": codes_of(inside(lambda: inner.model.norm(torch.zeros(1, 32)))),
        "save": codes_of(inside(lambda: accelerator.get_state_dict(model))),
        "nested": codes_of(inside(inside(lambda: None))),
        "step": codes_of(inside(optimizer.step)),
        "failed": codes_of(inside(lambda: [inner.model.norm.weight.zero_(), 1 / (1 - dist.get_rank())], modify=True)),
        "nothing": codes_of(inside(lambda: None)),
        "weights": [str(float(accelerator.get_state_dict(model).get("model.norm.weight", torch.ones(1)).min()))],
    }
    user_code_runs.step(accelerator, model, optimizer, "llama", 0)
    return {**codes, "in forward": codes_of(call_in_forward)}


@VERSIONS
def test_misuse_of_full_parameters_is_refused(two_ranks: Ranks, version: int) -> None:
    for codes in two_ranks.run(misuse, parallel_config("full_shard", version, 2)):
        assert codes.pop("failed") == ["FSDP-E303"]
        assert codes.pop("nothing") == []
        assert codes.pop("weights") == ["1.0"]
        assert codes == {kind: ["FSDP-E308"] for kind in codes}


def read_unsharded() -> tuple[list[str], bool]:
    model = tiny_llama()
    with hfp.full_parameters(model, modify=True) as parameters:
        return list(parameters), all(parameters[name] is p for name, p in model.named_parameters())


def test_full_parameters_leave_unsharded_models_unchanged(one_rank: Ranks) -> None:
    names, are_same = one_rank.run(read_unsharded)[0]
    assert len(names) > 10
    assert are_same


def copies(config: dict[str, Any]) -> dict[str, list[str]]:
    """The codes of the problems of copies of a sharded model, by kind."""
    accelerator = fresh_accelerator(config)
    inner: Any = tiny_llama()
    model = accelerator.prepare(inner)
    return {
        "deepcopy": codes_of(lambda: copy.deepcopy(model)),
        "unwrapped": codes_of(lambda: copy.deepcopy(accelerator.unwrap_model(model))),
        "layer": codes_of(lambda: copy.deepcopy(inner.model.layers[0].mlp)),
        "embeddings": codes_of(lambda: copy.deepcopy(inner.get_input_embeddings())),
        "AveragedModel": codes_of(lambda: AveragedModel(model)),
        "in a list": codes_of(lambda: copy.deepcopy([inner])),
        "without weights": codes_of(lambda: copy.deepcopy(inner.model.layers[0].mlp.act_fn)),
    }


@VERSIONS
def test_copies_of_sharded_models_are_refused(two_ranks: Ranks, version: int) -> None:
    for codes in two_ranks.run(copies, parallel_config("full_shard", version, 2)):
        assert codes.pop("without weights") == []
        assert codes == {kind: ["FSDP-E310"] for kind in codes}


@torch.no_grad()
def other_weights(model: nn.Module) -> nn.Module:
    other = tiny_llama(tied=True)
    generator = torch.Generator().manual_seed(8)
    for parameter in other.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return other


def load_whole_state_dicts(config: dict[str, Any], after_evaluation: bool = False) -> dict[str, Any]:
    """Load the whole state dict of other weights to the unwrapped model, and train on."""
    accelerator = fresh_accelerator(config)
    model = tiny_llama(tied=True)
    state = other_weights(model).state_dict()
    # Not Adam: its first step is the sign of the gradient, which rounding decides where the gradient is nearly zero.
    model, optimizer = accelerator.prepare(model, sgd(model))
    if after_evaluation:
        with torch.no_grad():
            loss_of(model, "llama", 0)
    result = accelerator.unwrap_model(model).load_state_dict(state)
    loaded = accelerator.get_state_dict(model)
    loaded = {name: tensor.clone() for name, tensor in loaded.items()}
    partial = accelerator.unwrap_model(model).load_state_dict(
        {"model.norm.weight": torch.full((32,), 3.0)}, strict=False
    )
    user_code_runs.step(accelerator, model, optimizer, "llama", 0)
    return {
        "loaded": loaded,
        "missing": [*result.missing_keys],
        "partial": len(partial.missing_keys) > 10,
        "trained": accelerator.get_state_dict(model),
    }


def loaded_reference() -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights that :func:`load_whole_state_dicts` loads, and those after the step."""
    model: Any = other_weights(tiny_llama(tied=True))
    loaded = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = sgd(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    user_code_runs.step(None, model, optimizer, "llama", 0)
    return loaded, dict(model.state_dict())


@VERSIONS
@pytest.mark.parametrize("after_evaluation", [False, True])
def test_unwrapped_model_loads_whole_tensors(two_ranks: Ranks, after_evaluation: bool, version: int) -> None:
    config = parallel_config("full_shard", version, 2)
    run = two_ranks.run(load_whole_state_dicts, config, after_evaluation)[0]
    loaded, trained = loaded_reference()
    assert_same_weights(run["loaded"], loaded, 0.0)
    assert_same_weights(run["trained"], trained)
    assert run["missing"] == []
    assert run["partial"]


def count(model: Any) -> list[Any]:
    base = model.base_model.model if hasattr(model, "peft_config") else model
    found = [base.num_parameters(only_trainable=t, exclude_embeddings=e) for t in (False, True) for e in (False, True)]
    found.append(base.model.num_parameters())
    return [*found, model.get_nb_trainable_parameters() if hasattr(model, "peft_config") else None]


def counts(name: str, config: dict[str, Any] | None) -> dict[str, Any]:
    """What methods of Transformers and PEFT count, before sharding and after."""
    model: Any = make_model(name)
    before = count(model)
    fresh_accelerator(config).prepare(model)
    return {"before": before, "after": count(model)}


@VERSIONS
@pytest.mark.parametrize("name", ["llama", "tied", "half", "lora"])
def test_counts_of_parameters_are_those_of_one_process(two_ranks: Ranks, name: str, version: int) -> None:
    for run in two_ranks.run(counts, name, parallel_config("full_shard", version, 2)):
        assert run["after"] == run["before"]


def penalty(config: dict[str, Any], kind: str) -> str:
    """Train one step with a penalty on parameters in the loss. Returns what rank 0 printed."""
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        for _ in range(2):
            loss = loss_of(model, "llama", 0, accelerator.process_index, accelerator.num_processes)
            if kind == "all":
                loss = loss + sum(parameter.pow(2).sum() for parameter in model.parameters())
            elif kind == "layer":
                squares = accelerator.unwrap_model(model).model.layers[0].mlp.up_proj.weight.pow(2).sum()
                loss = loss + (squares.full_tensor() if isinstance(squares, DTensor) else squares)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return printed.getvalue()


@pytest.mark.cpu_ranks("FSDP1 adds gradients of flat shards that are in a loss on two streams")
@VERSIONS
def test_flat_shards_in_a_loss_are_reported_once(two_ranks: Ranks, version: int) -> None:
    config = parallel_config("full_shard", version, 2)
    kinds = ["none", "layer", "all"] if version == 1 else ["none", "layer"]
    found = [two_ranks.run(penalty, config, kind)[0].count("FSDP-W311") for kind in kinds]
    assert found == ([0, 1, 1] if version == 1 else [0, 0])


def average_of_copies(config: dict[str, Any]) -> str:
    """What the end of a script prints, if it averages copies from before ``prepare``."""
    accelerator = fresh_accelerator(config)
    hfp.install()
    model = tiny_llama()
    average = WholeCopies(model.parameters())
    model = accelerator.prepare(model)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            average.step(model.parameters())
        except RuntimeError as error:
            sys.excepthook(type(error), error, error.__traceback__)
    return printed.getvalue()


def test_average_of_whole_copies_names_the_remedy(two_ranks: Ranks) -> None:
    printed = two_ranks.run(average_of_copies, parallel_config("full_shard", 2, 2))[0]
    assert "FSDP-E627" in printed


def sharded_by_torch() -> list[str]:
    """The codes of :func:`full_parameters` of a model that a script has sharded itself."""
    from torch.distributed.fsdp import fully_shard

    model = tiny_llama()
    fully_shard(model)
    return codes_of(lambda: hfp.full_parameters(model).__enter__())


def test_full_parameters_of_other_sharded_models_are_refused(two_ranks: Ranks) -> None:
    assert two_ranks.run(sharded_by_torch) == [["FSDP-E309"]] * 2


DOCUMENT = (Path(__file__).parents[2] / "docs" / "your_code.md").read_text(encoding="utf-8")

EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


def run_examples(config: dict[str, Any], blocks: list[str], folder: str) -> dict[str, Any]:
    """Run examples of docs/your_code.md one after the other. Returns some of their variables."""
    accelerator = fresh_accelerator(config)
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    rank, world_size = accelerator.process_index, accelerator.num_processes
    batches = [my_part(global_batch(number), rank, world_size) for number in range(2)]
    names: dict[str, Any] = {
        "hfp": hfp, "torch": torch, "accelerator": accelerator, "model": model, "optimizer": optimizer,
        "batches": batches,
    }  # fmt: skip
    with contextlib.chdir(folder):
        for block in blocks:
            exec(block, names)
    return {name: names[name] for name in ("norms", "row") if name in names}


@VERSIONS
def test_examples_of_the_document_run(two_ranks: Ranks, version: int, tmp_path: Path) -> None:
    blocks = [block for block in EXAMPLES if "Trainer(" not in block and (version == 2 or "# FSDP2" not in block)]
    assert len(blocks) == (9 if version == 2 else 8)
    runs = two_ranks.run(run_examples, parallel_config("full_shard", version, 2), blocks, str(tmp_path))
    before = tiny_llama()
    expected = {name: float(parameter.norm()) for name, parameter in before.named_parameters()}
    for run in runs:
        assert run["norms"] == pytest.approx(expected, rel=1e-6)
        assert run["row"].tolist() == before.get_input_embeddings().weight[5].tolist()  # type: ignore[operator]


def train_with_penalty(config: dict[str, Any] | None) -> Any:
    """One step with the penalty of docs/your_code.md. Without a config, in one process."""
    accelerator = None if config is None else fresh_accelerator(config)
    model: Any = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    rank, size = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    squares = model.get_input_embeddings().weight.pow(2).sum()
    squares = squares.full_tensor() if isinstance(squares, DTensor) else squares
    loss = loss_of(model, "llama", 0, rank, size) + 0.01 * squares
    loss.backward()
    optimizer.step()
    if accelerator is None:
        return loss.item(), dict(model.state_dict())
    return accelerator.reduce(loss.detach(), "mean").item(), accelerator.get_state_dict(model)


def test_penalty_under_fsdp2_equals_one_process(two_ranks: Ranks) -> None:
    loss, weights = two_ranks.run(train_with_penalty, parallel_config("full_shard", 2, 2))[0]
    expected_loss, expected = train_with_penalty(None)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_same_weights(weights, expected)


def differentiate_twice(config: dict[str, Any]) -> dict[str, list[str]]:
    """The codes of backwards with a graph, by kind, and of one without a graph that follows them."""
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model = accelerator.prepare(model)
    batch = my_part(global_batch(0), accelerator.process_index, accelerator.num_processes)

    def of_inputs(output: str) -> None:
        """A gradient penalty."""
        embeddings = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        outputs = model(inputs_embeds=embeddings, labels=batch["labels"])
        (gradient,) = torch.autograd.grad(outputs[output].pow(2).sum(), embeddings, create_graph=True)
        gradient.pow(2).sum().backward()

    codes = {
        "loss": codes_of(lambda: of_inputs("loss")),
        "logits": codes_of(lambda: of_inputs("logits")),
        "backward": codes_of(lambda: model(**batch).loss.backward(create_graph=True)),
    }
    with torch.no_grad():
        model(**batch)
    return codes


@VERSIONS
def test_double_backward_is_refused(two_ranks: Ranks, version: int) -> None:
    for codes in two_ranks.run(differentiate_twice, parallel_config("full_shard", version, 2)):
        assert codes == {kind: ["FSDP-E313"] for kind in ("loss", "logits", "backward")}


def backward_twice(config: dict[str, Any]) -> list[str]:
    """The codes of a second backward through one forward; losses of two outputs that are added do not raise."""
    accelerator = fresh_accelerator(config)
    model: Any = accelerator.prepare(tiny_llama())
    batch = my_part(global_batch(0), accelerator.process_index, accelerator.num_processes)
    output = model(**batch)
    accelerator.backward(output.loss + output.logits.square().mean())
    output = model(**batch)
    accelerator.backward(output.loss, retain_graph=True)
    return codes_of(lambda: accelerator.backward(output.logits.square().mean()))


@pytest.mark.parametrize(
    ("version", "strategy", "codes"),
    [(1, "full_shard", ["FSDP-E315"]), (1, "shard_grad_op", ["FSDP-E315"]), (1, "no_shard", []), (2, "full_shard", [])],
)
def test_second_backward_is_refused_if_weights_are_freed(
    two_ranks: Ranks, version: int, strategy: str, codes: list[str]
) -> None:
    assert two_ranks.run(backward_twice, parallel_config(strategy, version, 2)) == [codes] * 2


def prepare_sharpness_aware(config: dict[str, Any]) -> list[str]:
    model = tiny_llama()
    return codes_of(lambda: fresh_accelerator(config).prepare(model, SharpnessAware(model.parameters(), lr=0.1)))


@VERSIONS
def test_sharpness_aware_optimizer_is_refused(two_ranks: Ranks, version: int) -> None:
    codes = two_ranks.run(prepare_sharpness_aware, parallel_config("full_shard", version, 2))
    assert codes == [["FSDP-E321"]] * 2
