"""Cases that ranks run: ``save_pretrained`` and its relatives at the end of an Accelerate loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.ranks.agreement import LIMIT_VARIABLE
from tests.support.tiny import MODELS, parallel_config
from tests.support.training import adamw, fresh_accelerator, loss_of

LIMIT_S = "2"


class Trained:
    """A prepared model after one step."""

    def __init__(self, version: int, strategy: str = "full_shard", model: Any = "llama", **settings: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.accelerator = fresh_accelerator(parallel_config(strategy, version, self.world_size, **settings))
        raw = MODELS[model]() if isinstance(model, str) else model()
        self.model, self.optimizer = self.accelerator.prepare(raw, adamw(raw))
        self.accelerator.backward(self.loss(0))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, step: int) -> torch.Tensor:
        return loss_of(self.model, "llama", step, self.rank, self.world_size)

    @property
    def unwrapped(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    @property
    def main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights, gathered by torch."""
        return {name: tensor.clone() for name, tensor in self.accelerator.get_state_dict(self.model).items()}

    def save(self, folder: str, model: Any = None, **arguments: Any) -> None:
        """Save as the examples of Transformers do."""
        model = self.unwrapped if model is None else model
        model.save_pretrained(folder, is_main_process=self.main, save_function=self.accelerator.save, **arguments)


def codes_of(call: Callable[[], Any]) -> list[str]:
    """Return the codes of the problems that a call raises."""
    os.environ[LIMIT_VARIABLE] = LIMIT_S
    try:
        call()
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    finally:
        del os.environ[LIMIT_VARIABLE]
    return []


def mixture() -> torch.nn.Module:
    """A mixture of experts. Transformers keeps the experts in one tensor, and stores them separately."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def save(folder: str, form: str, version: int, strategy: str, model: Any = "llama", **settings: Any) -> dict[str, Any]:
    """Save a trained model in one of the forms in which scripts do.

    Returns:
        The weights, and the codes of problems.
    """
    run = Trained(version, strategy, mixture if model == "mixture" else model, **settings)
    codes: list[str] = []
    if form == "all":
        run.save(folder)
    elif form == "wrapped":
        run.model.save_pretrained(folder)
    elif form == "split":
        run.save(folder)
        run.save(folder, max_shard_size="20KB")
    elif form == "state_dict":
        state = run.accelerator.get_state_dict(run.model)
        run.save(folder, state_dict=state)
    elif form == "state_dict_main":
        state = run.accelerator.get_state_dict(run.model)
        if run.main:
            run.unwrapped.save_pretrained(folder, state_dict=state)
    elif form == "evaluated":
        run.model.eval()
        with torch.no_grad():
            run.loss(1)
        run.save(folder)
    elif form == "variant":
        run.save(folder, variant="fp32")
    elif form == "folders":
        run.unwrapped.save_pretrained(folder if run.main else f"{folder}-{run.rank}")
    elif form == "one":
        codes = codes_of(lambda: run.unwrapped.save_pretrained(folder)) if run.main else []
    elif form == "one_then_all":
        codes = codes_of(lambda: run.unwrapped.save_pretrained(folder)) if run.main else []
        dist.barrier()
        run.save(folder)
    else:
        raise ValueError(form)
    dist.barrier()
    return {"codes": codes, "weights": run.weights()}


def save_modules(folder: str, version: int, **settings: Any) -> dict[str, Any]:
    """Save modules of a sharded model, and an unrelated model that is not sharded."""
    run = Trained(version, **settings)
    run.save(f"{folder}/base", run.unwrapped.model)
    run.accelerator.save_model(run.unwrapped.model, f"{folder}/accelerate")
    plain = MODELS["llama"]()
    run.save(f"{folder}/plain", plain)
    run.accelerator.save_model(plain, f"{folder}/plain_accelerate")
    dist.barrier()
    return {"weights": run.weights(), "plain": dict(plain.state_dict())}


def use_state_dicts(folder: str, version: int, strategy: str) -> dict[str, Any]:
    """Write state dicts with torch and safetensors, and read them back into the model."""
    run = Trained(version, strategy)
    path = Path(folder)
    expected = run.weights()
    results: dict[str, Any] = {"weights": expected}
    state = run.accelerator.get_state_dict(run.model)
    if run.main:
        torch.save(state, path / "gathered.pt")
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / "gathered.safetensors")
    live = run.unwrapped.state_dict()
    results["torch.save"] = codes_of(lambda: torch.save({"model": live, "step": [1, 2]}, path / f"live{run.rank}.pt"))
    results["accelerator.save"] = codes_of(lambda: run.accelerator.save(live, path / "accelerate.pt"))
    results["accelerator.save"] += codes_of(
        lambda: run.accelerator.save(live, path / "accelerate.safetensors", safe_serialization=True)
    )
    results["unchanged"] = all(isinstance(value, DTensor) == (version == 2) for value in live.values())
    results["safetensors"] = codes_of(lambda: save_file(dict(live), path / f"live{run.rank}.safetensors"))
    parameters = dict(run.model.named_parameters())
    results["parameters"] = codes_of(lambda: torch.save(parameters, path / f"parameters{run.rank}.pt"))
    steps = run.optimizer.state_dict()
    results["optimizer"] = codes_of(lambda: torch.save(steps, path / f"optimizer{run.rank}.pt"))
    copies = {name: value.clone() for name, value in live.items()}
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    run.unwrapped.load_state_dict(copies)
    results["loaded"] = run.weights()
    module = run.unwrapped.model.norm.state_dict()
    results["module"] = {name: value.full_tensor() if version == 2 else value for name, value in module.items()}
    return results


def call_on_one_rank(version: int) -> dict[str, list[str]]:
    """Make collective calls on rank 0 only."""
    run = Trained(version)
    calls: dict[str, Callable[[], Any]] = {
        "get_state_dict": lambda: run.accelerator.get_state_dict(run.model),
        "save_model": lambda: run.accelerator.save_model(run.model, "never"),
        "push_to_hub": lambda: run.unwrapped.push_to_hub("never"),
    }
    if version == 1:
        calls["state_dict"] = lambda: run.unwrapped.state_dict()
        calls["wrapped_state_dict"] = lambda: run.model.state_dict()
    else:
        calls["torch.save"] = lambda: torch.save(run.unwrapped.state_dict(), "never")
    codes = {name: codes_of(call) for name, call in calls.items()} if run.main else {}
    dist.barrier()
    return codes


def save_quantized(folder: str) -> list[str]:
    """Save a model that looks quantized."""
    run = Trained(2)
    run.unwrapped.hf_quantizer = object()
    return codes_of(lambda: run.save(folder))


def give_wrong_state(version: int, folder: str) -> dict[str, list[str]]:
    """Pass incomplete and sharded state dicts to ``save_pretrained``."""
    run = Trained(version)
    whole = run.accelerator.get_state_dict(run.model)
    parameters = dict(run.unwrapped.named_parameters())
    states = {
        "whole": whole,
        "incomplete": {name: tensor for name, tensor in whole.items() if "layers.1." not in name},
        "sharded": parameters,
        "empty": {name: torch.empty(0) for name in whole},
        "nothing": {},
    }
    codes = {}
    if run.main:
        for name, state in states.items():
            codes[name] = codes_of(lambda state=state: run.unwrapped.save_pretrained(folder, state_dict=state))
    dist.barrier()
    return codes


def push(version: int, record: str) -> dict[str, Any]:
    """Upload a model with a hub that records the files."""
    from transformers.utils import hub

    run = Trained(version)
    uploads: list[str] = []

    def upload(self: Any, folder: str, repo_id: str, *args: Any, **kwargs: Any) -> str:
        target = Path(record) / repo_id.rpartition("/")[2]
        target.mkdir(parents=True)
        for path in Path(folder).iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        uploads.append(repo_id)
        return f"uploaded {repo_id}"

    class Api:
        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return type("Repo", (), {"repo_id": repo_id})

    class Card:
        def save(self, path: str) -> None:
            Path(path).write_text("card")

    from transformers import modeling_utils

    originals = {
        (hub, "hf_api"): lambda *_, **__: Api(),
        (hub, "create_and_tag_model_card"): lambda *_, **__: Card(),
        (modeling_utils, "hf_api"): lambda *_, **__: Api(),
        (modeling_utils, "create_and_tag_model_card"): lambda *_, **__: Card(),
        (hub.PushToHubMixin, "_upload_modified_files"): upload,
    }
    before = {key: getattr(*key) for key in originals}
    try:
        for (owner, name), value in originals.items():
            setattr(owner, name, value)
        result = run.unwrapped.push_to_hub("user/pushed")
        run.save(f"{record}-local", push_to_hub=True, repo_id="user/saved")
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
    dist.barrier()
    return {"result": result, "uploads": uploads, "weights": run.weights()}
