"""Cases that ranks run: user code that reads and changes the weights of prepared models."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from tests.gloo.cases_trainer import Batches
from tests.support.tiny import MODELS, global_batch, my_part, tiny_llama
from tests.support.training import adamw, fresh_accelerator, loss_of, sgd

NUM_STEPS = 3


def codes_of(function: Callable[[], Any]) -> list[str]:
    """The codes of the problems that a call raises."""
    try:
        function()
    except SpecError as error:
        return sorted({problem.code for problem in error.problems})
    return []


def make_model(name: str) -> Any:
    return tiny_llama(tied=True) if name == "tied" else MODELS[name]()


def step(accelerator: Any, model: nn.Module, optimizer: Any, name: str, number: int) -> None:
    """One step of an unsharded model (without an accelerator), or of a prepared one."""
    name = "llama" if name != "simple" else name
    if accelerator is None:
        loss_of(model, name, number).backward()
    else:
        accelerator.backward(loss_of(model, name, number, accelerator.process_index, accelerator.num_processes))
    optimizer.step()
    optimizer.zero_grad()


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
        step(None, model, optimizer, name, number)
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
        step(accelerator, model, optimizer, name, number)
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
    step(accelerator, model, optimizer, "llama", 0)
    return {**codes, "in forward": codes_of(call_in_forward)}


def edit_in_mixed_precision(config: dict[str, Any]) -> dict[str, Any]:
    accelerator = fresh_accelerator(config)
    inner: Any = tiny_llama()
    model, optimizer = accelerator.prepare(inner, adamw(inner))
    value = 1.0 + 2.0**-12  # not a number of bf16
    with hfp.full_parameters(inner.lm_head, modify=True) as parameters:
        parameters["weight"].fill_(value)
    step(accelerator, model, optimizer, "llama", 0)
    with hfp.full_parameters(inner, modify=True) as parameters:
        dtypes = {str(parameter.dtype) for parameter in parameters.values()}
        changed = float((inner.lm_head.weight - value).abs().max())
    return {"dtypes": dtypes, "changed": changed}


def read_unsharded() -> tuple[list[str], bool]:
    model = tiny_llama()
    with hfp.full_parameters(model, modify=True) as parameters:
        return list(parameters), all(parameters[name] is p for name, p in model.named_parameters())


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
    step(accelerator, model, optimizer, "llama", 0)
    return {
        "loaded": loaded,
        "missing": [*result.missing_keys],
        "partial": len(partial.missing_keys) > 10,
        "trained": accelerator.get_state_dict(model),
    }


@torch.no_grad()
def other_weights(model: nn.Module) -> nn.Module:
    other = tiny_llama(tied=True)
    generator = torch.Generator().manual_seed(8)
    for parameter in other.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return other


def loaded_reference() -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights that :func:`load_whole_state_dicts` loads, and those after the step."""
    model: Any = other_weights(tiny_llama(tied=True))
    loaded = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = sgd(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    step(None, model, optimizer, "llama", 0)
    return loaded, dict(model.state_dict())


def counts(name: str, config: dict[str, Any] | None) -> dict[str, Any]:
    """What methods of Transformers and PEFT count, before sharding and after."""
    model: Any = make_model(name)
    before = count(model)
    fresh_accelerator(config).prepare(model)
    return {"before": before, "after": count(model)}


def count(model: Any) -> list[Any]:
    base = model.base_model.model if hasattr(model, "peft_config") else model
    found = [base.num_parameters(only_trainable=t, exclude_embeddings=e) for t in (False, True) for e in (False, True)]
    found.append(base.model.num_parameters())
    return [*found, model.get_nb_trainable_parameters() if hasattr(model, "peft_config") else None]


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


class WholeCopies:
    """The average of diffusers' ``EMAModel``: copies of the parameters from before ``prepare``."""

    def __init__(self, parameters: Any) -> None:
        self.shadow = [parameter.clone().detach() for parameter in parameters]

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        for shadow, parameter in zip(self.shadow, list(parameters), strict=True):
            shadow.sub_(0.1 * (shadow - parameter))


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


def run_examples(config: dict[str, Any], blocks: list[str], folder: str) -> dict[str, Any]:
    """Run examples of docs/your_code.md one after the other. Returns some of their variables."""
    accelerator = fresh_accelerator(config)
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    rank, world_size = accelerator.process_index, accelerator.num_processes
    batches = [my_part(global_batch(number), rank, world_size) for number in range(2)]
    names: dict[str, Any] = {
        "hfp": hfp, "accelerator": accelerator, "model": model, "optimizer": optimizer, "batches": batches,
    }  # fmt: skip
    with contextlib.chdir(folder):
        for block in blocks:
            exec(block, names)
    return {name: names[name] for name in ("norms", "row") if name in names}


def run_trainer_example(block: str, folder: str, **arguments: Any) -> None:
    arguments = {"max_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, **arguments}
    args = hfp.FsdpTrainingArguments(output_dir=folder, **arguments)
    exec(block, {"hfp": hfp, "Trainer": hfp.FsdpTrainer, "args": args, "model": tiny_llama(), "dataset": Batches(2)})


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


def sharded_by_torch() -> list[str]:
    """The codes of :func:`full_parameters` of a model that a script has sharded itself."""
    from torch.distributed.fsdp import fully_shard

    model = tiny_llama()
    fully_shard(model)
    return codes_of(lambda: hfp.full_parameters(model).__enter__())


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


class SharpnessAware(torch.optim.SGD):
    """Has the methods of the sharpness-aware optimizers that scripts contain."""

    def first_step(self, zero_grad: bool = False) -> None:
        """Move the weights along the gradients, by a length that does not depend on the norm of all gradients."""

    def second_step(self, zero_grad: bool = False) -> None:
        """Restore the weights, and update them."""


def prepare_sharpness_aware(config: dict[str, Any]) -> list[str]:
    model = tiny_llama()
    return codes_of(lambda: fresh_accelerator(config).prepare(model, SharpnessAware(model.parameters(), lr=0.1)))


def write_tied(config: dict[str, Any], path: str) -> bool:
    """Write a model with tied weights with ``torch.save``. Returns whether it is read as one tensor."""
    accelerator = fresh_accelerator(config)
    model = accelerator.prepare(tiny_llama(tied=True))
    state = accelerator.unwrap_model(model).state_dict()
    torch.save(state, f"{path}/{accelerator.process_index}.pt")
    read = torch.load(f"{path}/{accelerator.process_index}.pt")
    return read["lm_head.weight"].data_ptr() == read["model.embed_tokens.weight"].data_ptr()
