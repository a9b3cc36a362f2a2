"""Cases that ranks run: train, write checkpoints with torch and Accelerate, and load them in another layout."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import fsdp_utils
from torch import is_tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_fsdp_plugin.checkpoint import folders
from hf_fsdp_plugin.checkpoint.checking.verify import VerifiedFiles
from hf_fsdp_plugin.checkpoint.reading.optimizer import load_optimizer
from hf_fsdp_plugin.checkpoint.reading.resharding import load_model
from hf_fsdp_plugin.checkpoint.shards import LocalShard, optimizer_shards
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.torch_private.modules import local_tensor
from tests.gloo.cases_checkpoint_formats import FULL, save_full_fsdp1
from tests.support.tiny import global_batch, my_part, parallel_config, tiny_llama
from tests.support.training import fresh_accelerator

WEIGHT_DECAY = 0.1
LEARNING_RATE = 1e-2
HYPERPARAMETERS = ("lr", "betas", "weight_decay", "eps", "initial_lr")

NO_PART = LocalShard("", torch.float32, (), ())

Layout = tuple[int, str, bool]
"""Version of FSDP, strategy, use_orig_params."""


class Run:
    """A tiny model and its optimizer, sharded by a layout."""

    def __init__(
        self, layout: Layout, *, tied: bool = False, layers: int = 2, optimizer: Any = None, **sizes: int
    ) -> None:
        version, strategy, use_orig = layout
        world_size = dist.get_world_size()
        settings = {"fsdp_use_orig_params": use_orig} if version == 1 else {}
        self.accelerator = fresh_accelerator(parallel_config(strategy, version, world_size, **settings))
        model = tiny_llama(tied=tied, layers=layers, **sizes)
        self.model, self.optimizer = self.accelerator.prepare(model, (optimizer or two_groups)(model))
        self.inner = self.optimizer.optimizer

    def train(self, steps: Iterable[int]) -> list[float]:
        losses = []
        for step in steps:
            part = my_part(global_batch(step), dist.get_rank(), dist.get_world_size())
            loss = self.model(**part).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        return losses

    def full_state(self) -> dict[str, Any]:
        """Return full weights and optimizer state, gathered by torch, and the parameter groups."""
        weights = get_model_state_dict(self.model, options=FULL)
        optimizer = get_optimizer_state_dict(self.model, self.inner, options=FULL)
        state = {f"{name}.{key}": value for name, entry in optimizer["state"].items() for key, value in entry.items()}
        return {
            "weights": {name: tensor.clone() for name, tensor in weights.items()},
            "state": {key: torch.as_tensor(value).clone() for key, value in state.items()},
            "groups": {
                min(group["params"]): {key: group.get(key) for key in HYPERPARAMETERS}
                for group in optimizer["param_groups"]
            },
        }


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def without_state(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Group parameters like the Trainer, as far as flat parameters permit: only layers have weight decay."""
    layers = [parameter for name, parameter in model.named_parameters() if ".layers." in name]
    rest = [parameter for name, parameter in model.named_parameters() if ".layers." not in name]
    groups = [{"params": layers, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


def write(folder: str, layout: Layout, kind: str, *, tied: bool = False) -> dict[str, Any]:
    """Train three steps and write a checkpoint. Returns its full tensors, and the losses of the next steps."""
    run = Run(layout, tied=tied)
    run.train(range(3))
    for group in run.inner.param_groups:
        group["initial_lr"] = LEARNING_RATE
        group["lr"] = LEARNING_RATE / 2
    if kind == "dcp":
        state = {"model": get_model_state_dict(run.model)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(Path(folder) / "pytorch_model_fsdp_0"))
        state = {"optimizer": get_optimizer_state_dict(run.model, run.inner)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(Path(folder) / "optimizer_0"))
    elif kind in ("full", "sharded", "local"):  # written by this package
        manager.save_model(run.model, Path(folder), kind)
        manager.save_optimizer(run.model, run.inner, Path(folder), kind)
    else:
        _save_with_accelerate(run, folder, kind)
    dist.barrier()
    return {**run.full_state(), "losses": run.train(range(3, 6))}


def _save_with_accelerate(run: Run, folder: str, kind: str) -> None:
    plugin = run.accelerator.state.fsdp_plugin
    plugin.set_state_dict_type("full" if kind == "bin" else "sharded")
    if kind == "bin" and plugin.fsdp_version == 1:
        save_full_fsdp1(run.model, run.inner, Path(folder))
        return
    fsdp_utils.save_fsdp_model(plugin, run.accelerator, run.model, folder, use_dcp=kind != "per_rank")
    fsdp_utils.save_fsdp_optimizer(plugin, run.accelerator, run.inner, run.model, folder, use_dcp=kind != "per_rank")


def read(folder: str, layout: Layout, *, tied: bool = False) -> dict[str, Any]:
    """Resume from the checkpoint in a new run."""
    run = Run(layout, tied=tied)
    run.train(range(7, 8))  # this state is overwritten
    result = load_model(run.model, Path(folder))
    assert result.missing_keys == result.unexpected_keys == []
    load_optimizer(run.model, run.inner, Path(folder))
    return {**run.full_state(), "losses": run.train(range(3, 6))}


WIDE = {"hidden_size": 256, "intermediate_size": 512}


def save_wide(folder: str, layout: Layout, kinds: list[str]) -> None:
    """Save a model of some 5 MB, with optimizer state, as each kind."""
    run = Run(layout, optimizer=one_group, **WIDE)
    run.train(range(1))
    for kind in kinds:
        run.accelerator.state.fsdp_plugin.set_state_dict_type(kind)
        run.accelerator.save_state(f"{folder}/{kind}")


def measure_reads(folder: str, layout: Layout, kinds: list[str], verify: bool) -> list[dict[str, int]]:
    """Load each kind into a new run, which has optimizer state already or not.

    Returns:
        Bytes of the shards and of their optimizer state, of one unit, read from files, and allocated at most.
    """
    found = []
    unit = sum(parameter.numel() * 4 for parameter in cast("Any", tiny_llama(**WIDE)).model.layers[0].parameters())
    for kind in kinds:
        for steps in (0, 1):
            run = Run(layout, optimizer=one_group, **WIDE)
            run.train(range(5, 5 + steps))
            held = _bytes(run)
            with LiveBytes() as live, counted_reads() as counts, kept_blocks() as kept:
                load_model(run.model, Path(folder) / kind, verify=verify)
                load_optimizer(run.model, run.inner, Path(folder) / kind, verify=verify)
            sizes = {"loaded": _bytes(run), "new": _bytes(run) - held, "unit": unit}
            found.append({**sizes, "read": sum(counts), "peak": live.peak + max(kept, default=0)})
    return found


def _bytes(run: Run) -> int:
    """Return the bytes of the shards and of their optimizer state on this rank."""
    state = [t for entry in run.inner.state.values() for t in entry.values()]
    return sum(local_tensor(t).nbytes for t in (*run.model.parameters(), *state))


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those allocated while the mode was active."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {local_tensor(t).untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(is_tensor, tree_leaves(result)):
            storage = local_tensor(tensor).untyped_storage()
            if storage._cdata not in before:
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Yield the list of the bytes of every read of a file."""
    counts: list[int] = []
    original = os.preadv

    def counted(*args: Any) -> int:
        counts.append(original(*args))
        return counts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        yield counts


@contextmanager
def kept_blocks() -> Iterator[list[int]]:
    """Yield the list of the bytes of kept blocks, which are compared with their hashes and are no tensors.

    Not with tracemalloc: in Python 3.11 it crashes if a thread ends while it is stopped.
    """
    kept: list[int] = []
    original = VerifiedFiles._read_part

    def read_part(files: VerifiedFiles, *args: Any) -> None:
        original(files, *args)
        kept.append(sum(map(len, files._kept.values())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerifiedFiles, "_read_part", read_part)
        yield kept


def read_mismatch(folder: str, layout: Layout, *, layers: int = 2, optimizer: Any = None, broken_on: int = -1) -> Any:
    """Return codes and text of every load that fails, and whether weights and state are unchanged."""
    run = Run(layout, layers=layers, optimizer=optimizer)
    run.train(range(1))
    before = run.full_state()
    place = Path(folder) / "nowhere" if dist.get_rank() == broken_on else Path(folder)
    failed: dict[str, Any] = {}
    for what, load in (
        ("model", lambda: load_model(run.model, place)),
        ("optimizer", lambda: load_optimizer(run.model, run.inner, place)),
    ):
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(folders, "TIMEOUT", 0.1)
                load()
        except SpecError as error:
            failed[what] = ([problem.code for problem in error.problems], str(error))
    after = run.full_state()
    unchanged = all(
        torch.equal(before[part][key], after[part][key]) for part in ("weights", "state") for key in after[part]
    )
    return {**failed, "unchanged": unchanged}


def read_after_an_evaluation(folder: str, layout: Layout) -> dict[str, Any]:
    """FSDP1 keeps parameters gathered after a forward without backward; loaded values must replace these too."""
    run = Run(layout)
    run.train(range(7, 8))
    with torch.no_grad():
        run.model(**my_part(global_batch(9), dist.get_rank(), dist.get_world_size()))
    load_model(run.model, Path(folder))
    load_optimizer(run.model, run.inner, Path(folder))
    return {"losses": run.train(range(3, 6)), **run.full_state()}


def write_and_read_without_state(folder: str, layout: Layout, other: Layout) -> dict[str, Any]:
    """Save and load the state of plain SGD, which has hyperparameters only."""
    run = Run(layout, optimizer=without_state)
    run.train(range(1))
    run.inner.param_groups[0]["lr"] = 0.5
    state = {"optimizer": get_optimizer_state_dict(run.model, run.inner)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(Path(folder) / "optimizer_0"))
    resumed = Run(other, optimizer=without_state)
    load_optimizer(resumed.model, resumed.inner, Path(folder))
    return {"lr": resumed.inner.param_groups[0]["lr"], "state": len(resumed.inner.state)}


def read_in_bf16(folder: str, layout: Layout) -> dict[str, torch.Tensor]:
    """Load an fp32 checkpoint into a bf16 model, and return the weights."""
    version, strategy, _ = layout
    accelerator = fresh_accelerator(parallel_config(strategy, version, dist.get_world_size()))
    model = accelerator.prepare(tiny_llama(layers=2).to(torch.bfloat16))
    load_model(model, Path(folder))
    return get_model_state_dict(model, options=FULL)


def write_uneven_state(folder: str, layout: Layout) -> None:
    """Save an optimizer without state for the final norm, and with one step less for the head."""
    run = Run(layout)
    run.train(range(3))
    named = dict(run.model.named_parameters())
    del run.inner.state[named["model.norm.weight"]]
    run.inner.state[named["lm_head.weight"]]["step"] -= 1
    manager.save_optimizer(run.model, run.inner, Path(folder), "local")


def read_uneven_state(folder: str, layout: Layout) -> dict[str, Any]:
    """Return the step of every parameter on this rank, the logged messages, and the maximum moment of the norm."""
    run = Run(layout)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_fsdp_plugin").addHandler(handler)
    try:
        load_optimizer(run.model, run.inner, Path(folder))
    finally:
        logging.getLogger("hf_fsdp_plugin").removeHandler(handler)
    shards = optimizer_shards(run.model, run.inner)
    moments = [piece.tensor for piece in shards.state.get("model.norm.weight", {}).get("exp_avg", NO_PART).pieces]
    return {
        "steps": {name: entry["step"].pieces[0].tensor.item() for name, entry in shards.state.items()},
        "logged": logged,
        "norm": max((part.abs().max().item() for part in moments), default=0.0),
    }


def write_and_read_adapters(folder: str, layout: Layout, other: Layout, kind: str) -> dict[str, Any]:
    """Load the adapters of a PEFT model, without the frozen weights, into another model."""
    first = _with_adapters(layout, seed=1)
    plugin = first.state.fsdp_plugin
    plugin.set_state_dict_type(kind)
    model = first._models[0]
    fsdp_utils.save_fsdp_model(plugin, first, model, folder, adapter_only=True)
    dist.barrier()
    written = get_model_state_dict(model, options=FULL)
    second = _with_adapters(other, seed=2)._models[0]
    fresh = get_model_state_dict(second, options=FULL)
    try:
        load_model(second, Path(folder))
    except SpecError as error:
        refused = str(error)
    missing = load_model(second, Path(folder), adapter_only=True).missing_keys
    read = get_model_state_dict(second, options=FULL)
    return {"written": written, "fresh": fresh, "read": read, "missing": missing, "refused": refused}


def _with_adapters(layout: Layout, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    version, strategy, _ = layout
    accelerator = fresh_accelerator(parallel_config(strategy, version, dist.get_world_size()))
    model = tiny_llama(layers=2)
    torch.manual_seed(seed)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = get_peft_model(model, config)
    with torch.no_grad():
        model.get_parameter("base_model.model.lm_head.modules_to_save.default.weight").normal_()
    accelerator.prepare(model)
    return accelerator
