"""A checkpoint of any format, world size and layout is loaded bit for bit in any other."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
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
from hf_fsdp_plugin.checkpoint.checking.hashes import VerifiedFiles
from hf_fsdp_plugin.checkpoint.reading.optimizer import load_optimizer
from hf_fsdp_plugin.checkpoint.reading.resharding import load_model
from hf_fsdp_plugin.checkpoint.saved_state import LocalShard, optimizer_shards
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.torch_private.modules import local_tensor
from tests.support.checkpoint_formats_runs import FULL, save_full_fsdp1
from tests.support.matrices import slow
from tests.support.ranks import Ranks
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


WIDE = {"hidden_size": 256, "intermediate_size": 512}


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


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Group parameters like the Trainer, as far as flat parameters permit: only layers have weight decay."""
    layers = [parameter for name, parameter in model.named_parameters() if ".layers." in name]
    rest = [parameter for name, parameter in model.named_parameters() if ".layers." not in name]
    groups = [{"params": layers, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


FSDP2: Layout = (2, "full_shard", True)

FSDP1: Layout = (1, "full_shard", True)

FLAT: Layout = (1, "full_shard", False)

WHOLE2: Layout = (2, "no_shard", True)

WHOLE1: Layout = (1, "no_shard", True)

WHOLE_FLAT: Layout = (1, "no_shard", False)

HYBRID2: Layout = (2, "hybrid_shard", True)

HYBRID1: Layout = (1, "hybrid_shard", True)

HYBRID_FLAT: Layout = (1, "hybrid_shard", False)


def name(layout: Any) -> str:
    return "-".join(map(str, layout)) if isinstance(layout, tuple) else str(layout)


def read(folder: str, layout: Layout, *, tied: bool = False) -> dict[str, Any]:
    """Resume from the checkpoint in a new run."""
    run = Run(layout, tied=tied)
    run.train(range(7, 8))  # this state is overwritten
    result = load_model(run.model, Path(folder))
    assert result.missing_keys == result.unexpected_keys == []
    load_optimizer(run.model, run.inner, Path(folder))
    return {**run.full_state(), "losses": run.train(range(3, 6))}


def assert_same(read: dict[str, Any], written: dict[str, Any]) -> None:
    assert read["groups"] == written["groups"]
    for part in ("weights", "state"):
        assert read[part].keys() == written[part].keys() and written[part]
        different = [key for key, tensor in written[part].items() if not torch.equal(read[part][key], tensor)]
        assert different == []
    assert read["losses"] == pytest.approx(written["losses"], rel=1e-4)


def _save_with_accelerate(run: Run, folder: str, kind: str) -> None:
    plugin = run.accelerator.state.fsdp_plugin
    plugin.set_state_dict_type("full" if kind == "bin" else "sharded")
    if kind == "bin" and plugin.fsdp_version == 1:
        save_full_fsdp1(run.model, run.inner, Path(folder))
        return
    fsdp_utils.save_fsdp_model(plugin, run.accelerator, run.model, folder, use_dcp=kind != "per_rank")
    fsdp_utils.save_fsdp_optimizer(plugin, run.accelerator, run.inner, run.model, folder, use_dcp=kind != "per_rank")


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
        manager().save_model(run.model, Path(folder), kind)
        manager().save_optimizer(run.model, run.inner, Path(folder), kind)
    else:
        _save_with_accelerate(run, folder, kind)
    dist.barrier()
    return {**run.full_state(), "losses": run.train(range(3, 6))}


@pytest.mark.parametrize(
    ("layout", "kind", "others"),
    [
        (FSDP2, "dcp", [FSDP1, FLAT, WHOLE2, HYBRID2]),
        slow(FSDP2, "dcp", [FSDP2, WHOLE1, WHOLE_FLAT, HYBRID1, HYBRID_FLAT]),
        slow(FSDP1, "dcp", [FSDP2, FSDP1, HYBRID_FLAT]),
        (FLAT, "dcp", [FSDP2, FLAT, HYBRID1]),
        (FSDP2, "bin", [HYBRID2, FLAT]),
        slow(FSDP1, "bin", [FSDP2, HYBRID1]),
        slow(FLAT, "bin", [FSDP2, FLAT]),
        (FSDP2, "per_rank", [HYBRID2, FSDP1]),
        slow(FSDP1, "per_rank", [FSDP2, HYBRID_FLAT]),
        slow(FLAT, "per_rank", [FSDP1]),
        slow(FSDP2, "local", [FSDP2, FLAT, HYBRID1]),
        (FSDP1, "local", [FSDP2, HYBRID_FLAT]),
        slow(FLAT, "local", [FSDP2, FSDP1]),
        slow(FSDP2, "full", [FSDP1]),
        (FLAT, "full", [FSDP2]),
        (FSDP2, "sharded", [FLAT]),
        slow(FSDP1, "sharded", [HYBRID2]),
    ],
    ids=name,
)
def test_checkpoint_of_two_ranks_is_loaded_by_four(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, layout: Layout, kind: str, others: list[Layout]
) -> None:
    written = two_ranks.run(write, str(tmp_path), layout, kind)[0]
    for other in others:
        assert_same(four_ranks.run(read, str(tmp_path), other)[0], written)


@pytest.mark.parametrize(
    ("layout", "kind", "others"),
    [
        (HYBRID2, "dcp", [FSDP2, FSDP1, FLAT]),
        (HYBRID1, "dcp", [FSDP2, WHOLE1]),
        (WHOLE2, "dcp", [FSDP1]),
        slow(WHOLE_FLAT, "dcp", [FSDP2]),
        slow(FSDP2, "bin", [FSDP1, WHOLE2]),
        (FSDP2, "per_rank", [FLAT]),
        slow(HYBRID1, "local", [FSDP2]),
        (HYBRID_FLAT, "local", [FSDP2]),
    ],
    ids=name,
)
def test_checkpoint_of_four_ranks_is_loaded_by_two(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, layout: Layout, kind: str, others: list[Layout]
) -> None:
    written = four_ranks.run(write, str(tmp_path), layout, kind)[0]
    for other in others:
        assert_same(two_ranks.run(read, str(tmp_path), other)[0], written)


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def save_wide(folder: str, layout: Layout, kinds: list[str]) -> None:
    """Save a model of some 5 MB, with optimizer state, as each kind."""
    run = Run(layout, optimizer=one_group, **WIDE)
    run.train(range(1))
    for kind in kinds:
        run.accelerator.state.fsdp_plugin.set_state_dict_type(kind)
        run.accelerator.save_state(f"{folder}/{kind}")


def _bytes(run: Run) -> int:
    """Return the bytes of the shards and of their optimizer state on this rank."""
    state = [t for entry in run.inner.state.values() for t in entry.values()]
    return sum(local_tensor(t).nbytes for t in (*run.model.parameters(), *state))


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
    original = VerifiedFiles.check_block

    def check_block(files: VerifiedFiles, *args: Any) -> None:
        original(files, *args)
        kept.append(sum(map(len, files._kept.values())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerifiedFiles, "check_block", check_block)
        yield kept


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


@pytest.mark.parametrize(
    ("layout", "other"),
    [(FSDP2, FSDP2), slow(FLAT, FLAT), slow(FSDP1, FSDP1), slow(FSDP2, FLAT), slow(FSDP1, FSDP2)],
    ids=name,
)
def test_load_reads_and_allocates_what_it_returns(
    two_ranks: Ranks, tmp_path: Path, layout: Layout, other: Layout
) -> None:
    kinds = ["sharded", "local", "full"]
    two_ranks.run(save_wide, str(tmp_path), layout, kinds)
    # To compare hashes, whole blocks of up to 1 MB are read. The tensors of this model are smaller.
    for rank in two_ranks.run(measure_reads, str(tmp_path), other, kinds, layout == other):
        assert_bounded(rank)


@pytest.mark.slow
@pytest.mark.parametrize("other", [FSDP2, HYBRID2, FLAT], ids=name)
def test_load_with_more_ranks_reads_what_it_returns(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, other: Layout
) -> None:
    kinds = ["sharded", "local", "full"]
    two_ranks.run(save_wide, str(tmp_path), FSDP2, kinds)
    for rank in four_ranks.run(measure_reads, str(tmp_path), other, kinds, False):
        assert_bounded(rank)


def assert_bounded(rank: list[dict[str, int]]) -> None:
    """Assert that reads are at most 5% more than what is loaded, and memory 10% and one unit more."""
    for found in rank:
        assert 0.99 * found["loaded"] <= found["read"] < 1.05 * found["loaded"], found
        assert found["peak"] < found["new"] + 0.1 * found["loaded"] + found["unit"], found


@pytest.mark.slow
def test_one_and_three_ranks_load_a_checkpoint_of_two(
    one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path
) -> None:
    written = two_ranks.run(write, str(tmp_path), FSDP2, "dcp")[0]
    for layout in (FSDP2, FSDP1, FLAT):
        assert_same(one_rank.run(read, str(tmp_path), layout)[0], written)
        three = three_ranks.run(read, str(tmp_path), layout)[0]
        # Eight samples are divided differently among three ranks, so the losses differ.
        assert_same({**three, "losses": written["losses"]}, written)


@pytest.mark.parametrize("kind", ["dcp", slow("bin"), slow("full")])
@pytest.mark.parametrize("layout", [FSDP2, slow(FSDP1), FLAT], ids=name)
def test_tied_weights_are_loaded_under_either_name(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, layout: Layout, kind: str
) -> None:
    written = two_ranks.run(write, str(tmp_path), layout, kind, tied=True)[0]
    for other in (FSDP2, FSDP1, HYBRID_FLAT):
        back = four_ranks.run(read, str(tmp_path), other, tied=True)[0]
        assert back["losses"] == pytest.approx(written["losses"], rel=1e-4)
        for part in ("weights", "state"):
            for key in back[part].keys() & written[part].keys():
                assert torch.equal(back[part][key], written[part][key])
        assert "model.embed_tokens.weight" in back["weights"].keys() & written["weights"].keys()


def read_after_an_evaluation(folder: str, layout: Layout) -> dict[str, Any]:
    """FSDP1 keeps parameters gathered after a forward without backward; loaded values must replace these too."""
    run = Run(layout)
    run.train(range(7, 8))
    with torch.no_grad():
        run.model(**my_part(global_batch(9), dist.get_rank(), dist.get_world_size()))
    load_model(run.model, Path(folder))
    load_optimizer(run.model, run.inner, Path(folder))
    return {"losses": run.train(range(3, 6)), **run.full_state()}


@pytest.mark.parametrize(
    "layout", [(1, "shard_grad_op", True), (1, "shard_grad_op", False), (2, "shard_grad_op", True)]
)
def test_weights_loaded_after_an_evaluation_are_trained(two_ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    written = two_ranks.run(write, str(tmp_path), FSDP2, "dcp")[0]
    assert two_ranks.run(read_after_an_evaluation, str(tmp_path), layout)[0]["losses"] == pytest.approx(
        written["losses"], rel=1e-5
    )


def without_state(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


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


@pytest.mark.parametrize(("layout", "other"), [(FSDP2, FSDP1), (FSDP1, FSDP2), (FSDP2, FLAT)])
def test_optimizer_without_state_loads_hyperparameters(
    two_ranks: Ranks, tmp_path: Path, layout: Layout, other: Layout
) -> None:
    assert two_ranks.run(write_and_read_without_state, str(tmp_path), layout, other)[0] == {"lr": 0.5, "state": 0}


def read_in_bf16(folder: str, layout: Layout) -> dict[str, torch.Tensor]:
    """Load an fp32 checkpoint into a bf16 model, and return the weights."""
    version, strategy, _ = layout
    accelerator = fresh_accelerator(parallel_config(strategy, version, dist.get_world_size()))
    model = accelerator.prepare(tiny_llama(layers=2).to(torch.bfloat16))
    load_model(model, Path(folder))
    return get_model_state_dict(model, options=FULL)


@pytest.mark.parametrize("layout", [FSDP2, FSDP1])
def test_weights_are_cast_to_the_dtype_of_the_model(two_ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    written = two_ranks.run(write, str(tmp_path), FSDP2, "dcp")[0]["weights"]
    for key, tensor in two_ranks.run(read_in_bf16, str(tmp_path), layout)[0].items():
        assert torch.equal(tensor, written[key].to(torch.bfloat16)), key


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


@pytest.mark.parametrize("layout", [FSDP2, FSDP1, FLAT], ids=name)
def test_other_architecture_is_refused_with_all_differences(two_ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    found = two_ranks.run(read_mismatch, str(tmp_path), layout, layers=3)
    assert found[0] == found[1]
    assert found[0]["unchanged"]
    codes, text = found[0]["model"]
    assert codes == ["FSDP-E421"] and " 9 tensors " in text and ": model.layers.2." in text
    assert "Load it into the model that was saved" in text
    fewer = two_ranks.run(read_mismatch, str(tmp_path), layout, layers=1)[0]
    codes, text = fewer["model"]
    assert codes == ["FSDP-E422"] and " 9 tensors " in text and ": model.layers.1." in text
    codes, text = fewer["optimizer"]
    assert codes == ["FSDP-E425"] and "only in the checkpoint: model.layers.1." in text
    assert fewer["unchanged"]


def test_other_parameter_groups_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    found = two_ranks.run(read_mismatch, str(tmp_path), FSDP1, optimizer=one_group)[0]
    codes, text = found["optimizer"]
    assert codes == ["FSDP-E425"] and "1 parameter group of 21 " in text and "2 parameter groups of 18 + 3 " in text
    assert "model" not in found


def test_checkpoint_without_optimizer_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    shutil.rmtree(tmp_path / "optimizer_0")
    found = two_ranks.run(read_mismatch, str(tmp_path), FSDP2)
    assert found[0] == found[1]
    assert found[0]["optimizer"][0] == ["FSDP-E424"]


def test_failure_of_one_rank_stops_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    found = two_ranks.run(read_mismatch, str(tmp_path), FSDP2, broken_on=1)
    for rank in found:
        assert "rank 1" in rank["model"][1] and "nowhere" in rank["model"][1]
        assert "rank 1" in rank["optimizer"][1]
        assert rank["unchanged"]


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_missing_or_truncated_file_changes_no_weight(two_ranks: Ranks, tmp_path: Path, damage: str) -> None:
    two_ranks.run(write, str(tmp_path), FSDP2, "dcp")
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        file = tmp_path / folder / "__1_0.distcp"
        if damage == "missing":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size - 1000)
    found = two_ranks.run(read_mismatch, str(tmp_path), FSDP1)
    assert found[0] == found[1]
    for part in ("model", "optimizer"):
        codes, text = found[0][part]
        assert codes == ["FSDP-E457" if damage == "missing" else "FSDP-E453"] and "__1_0.distcp" in text
    assert found[0]["unchanged"]


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


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("other", [FSDP2, FSDP1], ids=name)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_adapters_alone_are_loaded(two_ranks: Ranks, tmp_path: Path, other: Layout, kind: str) -> None:
    result = two_ranks.run(write_and_read_adapters, str(tmp_path), FSDP2, other, kind)[0]
    adapters = {key for key in result["read"] if "lora_" in key or "modules_to_save" in key}
    assert len(adapters) == 9
    for key, tensor in result["read"].items():
        assert torch.equal(tensor, result["written" if key in adapters else "fresh"][key]), key
    assert set(result["missing"]) == result["read"].keys() - adapters
    assert "FSDP-E421" in result["refused"]


def write_uneven_state(folder: str, layout: Layout) -> None:
    """Save an optimizer without state for the final norm, and with one step less for the head."""
    run = Run(layout)
    run.train(range(3))
    named = dict(run.model.named_parameters())
    del run.inner.state[named["model.norm.weight"]]
    run.inner.state[named["lm_head.weight"]]["step"] -= 1
    manager().save_optimizer(run.model, run.inner, Path(folder), "local")


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


def test_different_steps_per_parameter_are_loaded(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write_uneven_state, str(tmp_path), FSDP2)
    for layout in (FSDP2, FSDP1, HYBRID1):
        ranks = four_ranks.run(read_uneven_state, str(tmp_path), layout)
        steps = {name: step for rank in ranks for name, step in rank["steps"].items()}
        assert "model.norm.weight" not in steps
        assert len(steps) == 20
        assert steps.pop("lm_head.weight") == 2.0
        assert set(steps.values()) == {3.0}
        assert all(rank["logged"] == [] for rank in ranks)


def test_flat_parameter_has_one_step_and_a_warning(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write_uneven_state, str(tmp_path), FSDP2)
    for rank in two_ranks.run(read_uneven_state, str(tmp_path), FLAT):
        assert set(rank["steps"].values()) == {3.0}
        (message,) = rank["logged"]
        assert "different values of the optimizer's 'step'" in message and " 3.0" in message
        assert rank["norm"] == 0.0
