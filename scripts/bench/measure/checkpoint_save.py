"""Compare how long training pauses for a checkpoint with the plugin and with the stock Trainer, on the same live model.

A Trainer trains a Llama with 162 million parameters on two gloo ranks: with 500 million, 24 GB are too few for all
ways. After some steps a callback saves, alternately with the stock functions and plugin of the Trainer and Accelerate,
with this plugin, and with ``torch.distributed.checkpoint``: ``save``, and ``async_save`` with a thread, with a process,
and with a ``DefaultStager`` that is used again. The stager copies at once, or as in torchtitan to shared memory, beside
the next forward and backward, while the step waits. torch writes the state of model and optimizer, in a process group
of its own. This plugin also writes just that (``state``), without the files of the Trainer.

A stall is the time that the call takes on the slowest rank; a save is complete when rank 0 sees the whole checkpoint.
Before each save the disk is synced and the previous checkpoint is removed, so that the page cache is the same for all.
Memory is the growth of the resident size of rank 0 until the save is complete, with the steps that go on meanwhile:
buffers of an earlier save are not counted.

    python -m scripts.bench checkpoint_save       (four minutes on 2 cores; writes docs/results/checkpoint_save.json)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench.common import make_dataset, make_llama, make_parser, run_two_ranks
from scripts.bench.tables.update_results import write_result

GB = 1e9
# The saves of a round. After an asynchronous save two steps follow, during which it is written.
ROUNDS = (
    "sharded stock",
    "sharded ours",
    "sharded ours, asynchronous",
    "state ours, asynchronous",
    "torch save",
    "torch thread, asynchronous",
    "torch process, asynchronous",
    "torch stager, asynchronous",
    "torch titan, asynchronous",
)
FULL = ("full stock", "full ours")


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "checkpoint_save")
    parser.add_argument("--rounds", type=int, default=3, help="saves of each sharded kind, after the first")
    parser.add_argument("--full-rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="folder for checkpoints, on the disk to measure")
    return parser.parse_args()


def schedule(args: argparse.Namespace) -> list[str | None]:
    """Return the save after each step, or ``None``. The first asynchronous save follows soon after the first step."""
    plan: list[str | None] = [None, None, "sharded ours, asynchronous", None, None]
    for number in range(args.rounds):
        for kind in ROUNDS if number % 2 == 0 else ROUNDS[::-1]:
            plan += [kind, None] if kind.endswith("asynchronous") else [kind]
        plan += [None]
    for number in range(args.full_rounds):
        plan += FULL if number % 2 == 0 else FULL[::-1]
    return plan


class TorchSaves:
    """Saves with ``torch.distributed.checkpoint``."""

    def __init__(self) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._group: Any = None
        # Pinned memory and copies without waiting need an accelerator.
        on_cpu = {"use_pinned_memory": False, "use_non_blocking_copy": False}
        self._stagers = {
            "stager": DefaultStager(StagingOptions(use_shared_memory=False, use_async_staging=False, **on_cpu)),
            "titan": DefaultStager(StagingOptions(use_shared_memory=True, use_async_staging=True, **on_cpu)),
        }
        self._staging: Any = None
        self._future: Any = None
        register_optimizer_step_pre_hook(lambda *_: self.wait_for_copies())

    def wait_for_copies(self) -> None:
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def save(self, trainer: Any, what: str, folder: Path) -> None:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        model, optimizer = trainer.model, trainer.optimizer.optimizer
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        if "asynchronous" not in what:
            dcp.save(state, checkpoint_id=folder, process_group=self._group)
            return
        way = what.split()[1].rstrip(",")
        kind = AsyncCheckpointerType.PROCESS if way in ("process", "titan") else AsyncCheckpointerType.THREAD
        stager = self._stagers.get(way)
        found: Any = dcp.async_save(
            state, checkpoint_id=folder, process_group=self._group, async_checkpointer_type=kind, async_stager=stager
        )
        self._staging = getattr(found, "staging_completion", None)
        self._future = getattr(found, "upload_completion", found)

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None


def when_complete(path: Path, entry: dict[str, Any], start: float) -> threading.Thread:
    """Set ``entry["complete"]`` to the seconds after which ``path`` exists, in a thread."""

    def watch() -> None:
        while not path.exists():
            time.sleep(0.02)
        entry["complete"] = time.perf_counter() - start

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def as_stock(trainer: Any, kind: str) -> Iterator[None]:
    """Save as the stock stack does: replace the plugin by Accelerate's and detach the plan from the model."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
    from hf_fsdp_plugin.state import parts_of

    state, parts = trainer.accelerator.state, parts_of(trainer.model)
    ours = state.fsdp_plugin
    stock = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=f"{kind.upper()}_STATE_DICT")
    plan = parts._parts.pop(FsdpPlan)
    state.fsdp_plugin = stock
    try:
        yield
    finally:
        state.fsdp_plugin = ours
        parts.put(plan)


@contextlib.contextmanager
def as_ours(trainer: Any, kind: str, *, asynchronous: bool) -> Iterator[None]:
    from dataclasses import replace

    plugin = trainer.accelerator.state.fsdp_plugin
    spec = plugin.spec
    plugin.set_state_dict_type(kind)
    plugin.spec = replace(spec, checkpoint=replace(spec.checkpoint, asynchronous=asynchronous))
    try:
        yield
    finally:
        plugin.set_state_dict_type("sharded")
        plugin.spec = spec


def reset_peak() -> int:
    """Reset the peak resident size and return the current one, in bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the peak resident size since :func:`reset_peak`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def measured_callback(args: argparse.Namespace, folder: Path, results: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist
    from transformers import Trainer, TrainerCallback

    from hf_fsdp_plugin.checkpoint.writing.state_files import manifest_of
    from hf_fsdp_plugin.integrations.saving import manager

    plan = schedule(args)
    torch_saves = TorchSaves()

    def slowest(seconds: float) -> float:
        value = torch.tensor([seconds])
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def save(trainer: Any, what: str) -> float:
        kind = what.split()[0]
        if kind == "torch":
            dist.barrier()
            start = time.perf_counter()
            torch_saves.save(trainer, what, folder / f"checkpoint-{trainer.state.global_step}")
            return slowest(time.perf_counter() - start)
        if kind == "state":
            dist.barrier()
            start = time.perf_counter()
            save_state(trainer, folder / f"checkpoint-{trainer.state.global_step}")
            return slowest(time.perf_counter() - start)
        ours = "ours" in what
        way = as_ours(trainer, kind, asynchronous="asynchronous" in what) if ours else as_stock(trainer, kind)
        with way:
            dist.barrier()
            start = time.perf_counter()
            if ours:
                trainer._save_checkpoint(trainer.model, None)
            else:
                Trainer._save_checkpoint(trainer, trainer.model, None)
            return slowest(time.perf_counter() - start)

    def save_state(trainer: Any, path: Path) -> None:
        """Save what torch's ways save: the model and the optimizer."""
        model, manifest = trainer.model, partial(manifest_of, trainer.model, "sharded", step=None, batch={})
        with manager().saving(path, manifest, asynchronous=True) as into:
            manager().save_model(model, into, "sharded")
            manager().save_optimizer(model, trainer.optimizer.optimizer, into, "sharded")

    class Measure(TrainerCallback):
        trainer: Any = None
        watch: threading.Thread | None = None
        saving, entry, before = "", None, 0

        def wait(self) -> None:
            """Wait for the save in flight, and until rank 0 has seen it."""
            manager().wait()
            torch_saves.wait()
            if self.watch is not None:
                self.watch.join()
            if self.entry is not None:
                self.entry["rank0_grew"] = peak_bytes() - self.before
            self.saving, self.entry = "", None

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.wait()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            dist.barrier()
            self.start = time.perf_counter()

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = slowest(time.perf_counter() - self.start)
            number = state.global_step - 1
            if number > 0:
                results["steps"].append({"seconds": seconds, "saving": self.saving, "number": number})
            self.saving = ""  # of the steps beside a save, only the first one waits for copies
            what = plan[number] if number < len(plan) else None
            if what is None:
                return
            self.wait()
            if dist.get_rank() == 0:
                for path in folder.glob("checkpoint-*"):
                    shutil.rmtree(path)
                os.sync()
            dist.barrier()
            entry: dict[str, Any] = {}
            results["saves"].setdefault(what, []).append(entry)
            path = folder / f"checkpoint-{state.global_step}"
            if what.startswith("torch"):
                path /= ".metadata"
            self.before, self.entry = reset_peak(), entry
            self.watch = when_complete(path, entry, time.perf_counter()) if dist.get_rank() == 0 else None
            stall = save(self.trainer, what)
            entry["stall"] = stall
            if what.endswith("asynchronous"):
                self.saving = what
            else:
                self.wait()
            if dist.get_rank() == 0:
                print(f"step {state.global_step}: {what}: {stall:.3f} s", flush=True)

    return Measure()


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Train and measure. Runs on each rank; rank 0 prints and writes the result."""
    import torch
    import torch.distributed as dist

    import hf_fsdp_plugin as hfp

    torch.set_num_threads(1)
    results: dict[str, Any] = {"saves": {}, "steps": []}
    callback = measured_callback(args, folder, results)
    trainer = hfp.FsdpTrainer(
        model=make_llama(
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 4,
            num_hidden_layers=args.layers,
            num_attention_heads=16,
            num_key_value_heads=16,
        ),
        args=hfp.FsdpTrainingArguments(
            output_dir=str(folder),
            fsdp="full_shard auto_wrap",
            fsdp_config={"fsdp_version": 2, "state_dict_type": "SHARDED", "async_save": True},
            per_device_train_batch_size=1,
            max_steps=len(schedule(args)) + 1,
            learning_rate=1e-5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=make_dataset(vocab_size=args.vocabulary, length=args.length),
        callbacks=[callback],
    )
    callback.trainer = trainer
    weights = sum(parameter.numel() for parameter in trainer.model.parameters()) * 4
    trainer.train()
    if dist.get_rank() == 0:
        write(args, results, weights)
    dist.barrier()
    dist.destroy_process_group()


def write(args: argparse.Namespace, results: dict[str, Any], weights: int) -> None:
    saves = results["saves"]
    stalls = {what: [entry["stall"] for entry in entries] for what, entries in saves.items()}
    first, *later = stalls["sharded ours, asynchronous"]
    stock, full_stock = statistics.median(stalls["sharded stock"]), statistics.median(stalls["full stock"])
    grew = {what: max(entry["rank0_grew"] for entry in entries) for what, entries in saves.items()}
    complete = {what: statistics.median(entry["complete"] for entry in entries) for what, entries in saves.items()}
    peers = {what: statistics.median(found) for what, found in stalls.items() if what.startswith("torch")}
    steps: dict[str, list[float]] = {}
    for step in results["steps"]:
        steps.setdefault(step["saving"] or "free", []).append(step["seconds"])
    step_seconds = {what: statistics.median(found) for what, found in steps.items()}
    ours = "state ours, asynchronous"
    best = {
        what: min(figures[each] for each in peers if each.endswith("asynchronous"))
        for what, figures in (("stall", peers), ("complete", complete), ("growth", grew), ("step", step_seconds))
    }
    result = {
        "model": f"Llama, {args.layers} layers, hidden {args.hidden}, {weights / 4e6:.0f} M parameters, fp32",
        "weights_bytes": weights,
        "ranks": 2,
        "stall_seconds": {what: [round(value, 3) for value in values] for what, values in stalls.items()},
        "complete_seconds": {what: round(seconds, 3) for what, seconds in complete.items()},
        "rank0_growth_bytes": grew,
        "step_seconds": {what: round(seconds, 3) for what, seconds in step_seconds.items()},
        "steps": [{**step, "seconds": round(step["seconds"], 3)} for step in results["steps"]],
        "ratios": {
            "asynchronous_first": round(first / stock, 3),
            "asynchronous_later": round(statistics.median(later) / stock, 3),
            "synchronous_sharded": round(statistics.median(stalls["sharded ours"]) / stock, 3),
            "full": round(statistics.median(stalls["full ours"]) / full_stock, 3),
            "step_while_writing": round(step_seconds["sharded ours, asynchronous"] / step_seconds["free"], 3),
            "synchronous_over_torch": round(statistics.median(stalls["sharded ours"]) / peers["torch save"], 3),
        },
        "over_best_of_torch": {
            "stall": round(statistics.median(stalls[ours]) / best["stall"], 3),
            "complete": round(complete[ours] / best["complete"], 3),
            "rank0_growth": round(grew[ours] / best["growth"], 3),
            "step_beside_the_save": round(step_seconds[ours] / best["step"], 3),
        },
        "full_memory_saved_bytes": grew["full stock"] - grew["full ours"],
    }
    write_result("checkpoint_save", args.out, result)


def main() -> int:
    args = parse_args()
    if "RANK" in os.environ:
        measure(args, args.folder)
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="checkpoint_save_") as folder:
        return run_two_ranks(__file__, [*sys.argv[1:], f"--folder={folder}"])


if __name__ == "__main__":
    raise SystemExit(main())
