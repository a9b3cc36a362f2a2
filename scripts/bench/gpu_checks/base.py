"""What the checks share: their registration, the config of a case, sizes of models, and small training runs.

A check is a function with the case as argument. It raises an error if it fails, :class:`Skipped` if it cannot run here,
and returns figures. The process group exists. Other checks may have run in the same process before.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.common import make_llama

Case = dict[str, Any]
NUM_STEPS = 10
_SET_BY_ACCELERATORS = ("ACCELERATE_", "FSDP_", "PARALLELISM_")


class Skipped(Exception):
    """A check cannot run on this machine. The message is the reason."""


class Unusable(Exception):
    """This machine can run no check. The message has the reason and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check and what it takes.

    Attributes:
        seconds: expected time on an H100 in a process that has imported everything. ``--minutes`` uses it.
        limit: seconds after which the check has failed.
        min_ranks: on fewer ranks it would show nothing.
        fresh: whether it needs a process in which no other check has run.
    """

    function: Callable[[Case], Case]
    seconds: float
    limit: float
    min_ranks: int
    fresh: bool


CHECKS: dict[str, Check] = {}
"""Name of a check -> the check."""


def check(
    *, seconds: float = 4, limit: float = 90, min_ranks: int = 1, fresh: bool = False
) -> Callable[[Callable[[Case], Case]], Callable[[Case], Case]]:
    def register(function: Callable[[Case], Case]) -> Callable[[Case], Case]:
        CHECKS[function.__name__] = Check(
            function=function, seconds=seconds, limit=limit, min_ranks=min_ranks, fresh=fresh
        )
        return function

    return register


def expect(condition: Any, text: str) -> None:
    if not condition:
        raise RuntimeError(text)


# ---- the device -----------------------------------------------------------------------------------------------------


def on_accelerator(case: Case) -> bool:
    return case["device"] not in ("cpu", "meta")


def device_module(case: Case) -> Any:
    """Return the module of torch with the device's functions, such as ``torch.cuda``."""
    import torch

    return torch.get_device_module(case["device"])


def device_of(case: Case) -> Any:
    from hf_fsdp_plugin.devices import get_device

    return get_device(case["device"])


def torch_device(case: Case) -> Any:
    """Return this rank's device, as torch names it."""
    import torch

    if not on_accelerator(case):
        return torch.device(case["device"])
    return torch.device(case["device"], device_module(case).current_device())


def free_memory(case: Case) -> int:
    """Return the bytes that this process can still allocate on its device; 0 on CPU ranks."""
    if not on_accelerator(case):
        return 0
    module = device_module(case)
    module.empty_cache()
    return int(module.mem_get_info()[0]) if hasattr(module, "mem_get_info") else device_of(case).total_memory() or 0


def check_free_memory(case: Case) -> None:
    """Raise :class:`Unusable` if the smallest model does not fit on the device, for example beside other programs.

    Not in the parent of the ranks, because the query makes a context.
    """
    module, needed = device_module(case), 32 * TINY.num_params
    if not hasattr(module, "mem_get_info"):
        return
    free, total = module.mem_get_info()
    if free < needed:
        variable = device_of(case).visible_variable or "the variable of its vendor"
        raise Unusable(
            f"{torch_device(case)} has {free / 1e9:.2f} of {total / 1e9:.1f} GB free, and the smallest model needs "
            f"{needed / 1e9:.2f} GB. End other programs on it, or hide it with {variable}."
        )


# ---- models ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A Llama and its batch."""

    name: str
    config: dict[str, Any]
    micro_batch: int
    seq_len: int

    @property
    def num_params(self) -> int:
        c = self.config
        kv = c["hidden_size"] // c["num_attention_heads"] * c["num_key_value_heads"]
        layer = c["hidden_size"] * (2 * c["hidden_size"] + 2 * kv + 3 * c["intermediate_size"] + 2)
        return c["num_hidden_layers"] * layer + c["hidden_size"] * (2 * c["vocab_size"] + 1)

    def model(self, device: Any = "cpu") -> Any:
        """Return the model in fp32 on a device, with the same random weights in every process."""
        import torch

        with torch.device(device):
            return make_llama(**self.config).train()

    def batches(self, device: Any, number: int = 4) -> list[dict[str, Any]]:
        """Return batches of random tokens. Those of another rank differ."""
        import torch
        import torch.distributed as dist

        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        shape = (self.micro_batch, self.seq_len)
        ids = [torch.randint(0, self.config["vocab_size"], shape, generator=generator) for _ in range(number)]
        return [{"input_ids": each, "labels": each} for each in (each.to(device) for each in ids)]

    def with_layers(self, count: int, *, micro_batch: int, seq: int) -> Size:
        """Return the same model with another number of layers, and another batch."""
        config = {**self.config, "num_hidden_layers": count}
        return Size(name=f"{self.name}, {count} layers", config=config, micro_batch=micro_batch, seq_len=seq)


def _size(
    name: str, hidden: int, inter: int, layers: int, heads: int, kv: int, vocab: int, batch: int, seq: int
) -> Size:
    config = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv,
    }  # fmt: skip
    return Size(name=name, config=config, micro_batch=batch, seq_len=seq)


TINY = _size("tiny", 256, 512, 4, 4, 2, 1024, 4, 64)
SIZES = (
    _size("1.1 B", 2048, 8192, 16, 16, 8, 32000, 4, 1024),
    _size("0.4 B", 1024, 4096, 20, 16, 8, 32000, 8, 1024),
    TINY,
)
"""From the largest to the smallest."""


def llama_3_8b_layers(count: int) -> Size:
    """Return some layers of Llama-3-8B with a smaller vocabulary, and one sequence of 8,192 tokens."""
    return _size(f"{count} layers of 8 B", 4096, 14336, count, 32, 8, 32000, 1, 8192)


_SMALLEST_DEVICE = 12e9
"""Bytes of free memory below which models are tiny: their steps are mostly Python, so that times show nothing."""


def size_for(case: Case, bytes_per_param: float, largest: str = "1.1 B") -> Size:
    """Return the largest size whose state and activations fit on the device.

    Args:
        bytes_per_param: bytes that the check needs for each parameter; a fifth of the memory is left for activations.
    """
    free, names = free_memory(case), [size.name for size in SIZES]
    if free < _SMALLEST_DEVICE:
        return TINY
    fits = [size for size in SIZES[names.index(largest) :] if size.num_params * bytes_per_param < 0.8 * free]
    return fits[0]


# ---- training -------------------------------------------------------------------------------------------------------


def config(case: Case) -> Case:
    """Return the Accelerate config of a case. Hybrid strategies have a mesh of two replicas, on fewer ranks of one."""
    hybrid = case["strategy"].startswith("hybrid")
    replicas = 2 if case["ranks"] >= 4 else 1
    mesh = {"dp_replicate_size": replicas, "dp_shard_size": case["ranks"] // replicas}
    return {
        "distributed_type": "FSDP",
        "num_processes": case["ranks"],
        "mixed_precision": "no" if case["precision"] == "fp32" else case["precision"],
        **({"use_cpu": True} if case["device"] == "cpu" else {}),
        "fsdp_config": {
            "fsdp_version": case["version"],
            "fsdp_sharding_strategy": case["strategy"].upper(),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": case["offload"],
            "fsdp_async_save": True,
            **case.get("settings", {}),
        },
        **case.get("top", {}),
        **({"parallelism_config": mesh} if hybrid else {}),
    }


def spec_of(case: Case) -> Any:
    import hf_fsdp_plugin as hfp

    return hfp.load_spec(config(case), environ={})


def reset_accelerate() -> None:
    """Let the next Accelerator of this process begin anew."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(_SET_BY_ACCELERATORS)]:
        if name != "ACCELERATE_USE_CPU":
            del os.environ[name]
    gc.collect()


def reset_process() -> None:
    """Undo what an earlier check has left: hooks of this package, Accelerate's state and variables."""
    import hf_fsdp_plugin as hfp

    hfp.uninstall()
    reset_accelerate()


def new_accelerator(case: Case, *, stock: bool = False, model: Any = None) -> Any:
    """A new Accelerator in a process that may have had others.

    Args:
        stock: whether it is Accelerate's own, with the settings of the plan for ``model``.
    """
    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.tools.bench.rank import stock_accelerator

    reset_accelerate()
    spec = spec_of(case)
    if not stock:
        return hfp.accelerator(spec)
    hfp.uninstall()
    plan = hfp.resolve(spec, model, world_size=case["ranks"], device_type=case["device"])
    return stock_accelerator(plan, torch_device(case))


class Run:
    """A Llama that is trained on one batch of random tokens, each rank with rows of its own.

    Args:
        stock: train with stock Accelerate.
        optimizer: arguments of AdamW.
    """

    LEARNING_RATE = 1e-3
    """Of the tiny model. The first steps of a large one would not lower its loss at this rate."""

    def __init__(self, case: Case, size: Size = TINY, *, stock: bool = False, **optimizer: Any) -> None:
        import torch

        from hf_fsdp_plugin.torch_private.grad_scaler import CollectiveGradScaler

        model = size.model() if size is TINY else size.model(torch_device(case))
        self.accelerator = new_accelerator(case, stock=stock, model=model)
        if case.get("scaled") and case["device"] == "cpu":  # CPU ranks have no fp16 training
            self.accelerator.scaler = CollectiveGradScaler("cpu", init_scale=1024.0)
        adamw = torch.optim.AdamW(model.parameters(), lr=self.LEARNING_RATE if size is TINY else 1e-4, **optimizer)
        self.model, self.optimizer = self.accelerator.prepare(model, adamw)
        self.batch = size.batches(self.accelerator.device, 1)[0]

    def backward(self, batch: dict[str, Any] | None = None) -> float:
        loss = self.model(**(self.batch if batch is None else batch)).loss
        self.accelerator.backward(loss)
        return float(loss.item())

    def step(self, batch: dict[str, Any] | None = None, *, clip: bool = True) -> float:
        loss = self.backward(batch)
        if clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, num_steps: int = NUM_STEPS, *, clip: bool = True) -> list[float]:
        import torch

        losses = [self.step(clip=clip) for _ in range(num_steps)]
        expect(all(torch.isfinite(torch.tensor(losses))) and losses[-1] < losses[0], f"the loss did not fall: {losses}")
        return losses


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def on_all(value: Any) -> list[Any]:
    """Return the value of each rank."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def is_rank_0() -> bool:
    import torch.distributed as dist

    return dist.get_rank() == 0


def broadcast(value: Any) -> Any:
    """Return rank 0's value."""
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def on_rank_0(run: Callable[[Path], Any]) -> Any:
    """Call a function with a new folder on rank 0, and return its result on all ranks. Its error is raised on all."""
    done = None
    if is_rank_0():
        try:
            with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
                done = run(Path(folder))
        except Exception as error:
            done = error
    done = broadcast(done)
    if isinstance(done, Exception):
        raise done
    return done


@contextmanager
def shared_folder(needed_bytes: int = 0) -> Iterator[Path]:
    """A new folder that all ranks use, on this machine.

    Raises:
        Skipped: the disk has less than ``needed_bytes`` free.
    """
    import torch.distributed as dist

    folder = Path(broadcast(tempfile.mkdtemp(prefix="gpu_check_") if is_rank_0() else ""))
    try:
        free = shutil.disk_usage(folder).free
        if free < needed_bytes:
            raise Skipped(f"{folder} has {free / 1e9:.1f} GB free, and {needed_bytes / 1e9:.1f} GB are needed")
        yield folder
        dist.barrier()
    finally:
        # Not after a barrier: a rank that has failed does not reach it.
        if is_rank_0():
            shutil.rmtree(folder, ignore_errors=True)
