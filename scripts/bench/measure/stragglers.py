"""Make one rank of a training slow in eight ways, and count which slow ranks are reported, and false alarms.

Four gloo ranks train a Llama with FSDP2 on real data loaders. Each case makes one rank slow, such as by a data set that
reads slowly or by a process that uses its core, until the rank is reported or the time limit is over. Between the
cases, and with --healthy, no rank is slow: every report is a false alarm. With --load, processes that use both cores in
bursts run beside the healthy ranks.

    python -m scripts.bench stragglers                       (20 to 40 minutes; writes docs/results/stragglers.json)
    python -m scripts.bench stragglers --cases 0 --healthy 90 --load
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from scripts.bench.common import make_llama, make_parser, run_two_ranks
from scripts.bench.tables.update_results import write_result

NUM_RANKS: Final = 4
CONFIG: Final = {
    "distributed_type": "FSDP",
    "num_processes": NUM_RANKS,
    "use_cpu": True,
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}
VOCABULARY: Final = 1024
SAVE_EVERY: Final = 4
"""Steps between two checkpoints in the case of slow saves."""
PHASES: Final = {
    "slow reads of samples": {"data"},
    "busy core": {"forward", "backward", "optimizer"},
    "longer samples": {"forward", "backward"},
    "slow collectives": {"forward", "backward"},
    "throttled forward": {"forward"},
    "slow backward": {"backward"},
    "slow optimizer": {"optimizer"},
    "slow saves": {"saving"},
}
"""Kind -> the phases in which the rank loses its time."""


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "stragglers")
    parser.add_argument("--cases", type=int, default=20, help="slow ranks; their kinds take turns")
    parser.add_argument("--kinds", nargs="*", choices=[*PHASES], default=[*PHASES])
    parser.add_argument("--window", type=float, default=10.0, help="shortest window of the search, in seconds")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until a slow rank counts as not found")
    parser.add_argument("--healthy", type=float, default=2.0, help="minutes without a slow rank")
    parser.add_argument("--load", action="store_true", help="run other processes beside the healthy ranks")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--trace", action="store_true", help="print the slowest rank of each window")
    return parser.parse_args()


class Samples:
    """Random tokens, whose length and whose time to read can be changed while a loader reads them."""

    def __init__(self, length: int) -> None:
        self.length, self.delay = length, 0.0

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        time.sleep(self.delay)
        ids = torch.randint(0, VOCABULARY, (self.length,))
        return {"input_ids": ids, "labels": ids}


class Training:
    """The training of this rank, which goes on from case to case."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        import torch

        import hf_fsdp_plugin as hfp

        self.rank, self.folder = int(os.environ["RANK"]), folder
        self.accelerator = hfp.accelerator(hfp.load_spec(CONFIG), project_dir=str(folder))
        model = make_llama(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.samples, self.batch, self.saves = Samples(args.length), args.batch, False
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.batches = iter(torch.utils.data.DataLoader(self.samples, batch_size=args.batch))  # type: ignore[arg-type]
        self.num_steps = 0

    def step(self) -> None:
        batch = next(self.batches)
        self.accelerator.backward(self.model(**batch).loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        if self.saves and self.num_steps % SAVE_EVERY == 0:
            self.accelerator.save_state(str(self.folder / "checkpoint"))

    def ends_everywhere(self, value: bool) -> bool:
        """Return the value of rank 0."""
        import torch
        import torch.distributed as dist

        flag = torch.tensor(value)
        dist.broadcast(flag, 0)
        return bool(flag)

    def run(self, ends: Callable[[], bool]) -> float:
        """Train until ``ends`` returns true on rank 0. Returns the seconds of a step."""
        begin, before = time.monotonic(), self.num_steps
        while not self.ends_everywhere(ends()):
            self.step()
        return (time.monotonic() - begin) / max(1, self.num_steps - before)


def spin(cores: set[int], seconds: float) -> None:
    """Use these cores in bursts of random length, at most for a time."""
    os.setsid()  # Linux divides a core between sessions: in that of a rank, the process would take its time only
    os.sched_setaffinity(0, cores)
    end, source = time.monotonic() + seconds, random.Random(os.getpid())
    while time.monotonic() < end:
        burst = time.monotonic() + source.uniform(0.05, 2.0)
        while time.monotonic() < burst:
            pass
        time.sleep(source.uniform(0.05, 2.0))


def hold(core: int) -> None:
    """Use a core without a pause, in the session of a rank, so that Linux divides the rank's share of the core."""
    os.sched_setaffinity(0, {core})
    while True:
        pass


@contextmanager
def processes(function: Callable[..., None], arguments: list[tuple[Any, ...]]) -> Iterator[None]:
    """Run a function in other processes while the block runs."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=function, args=each, daemon=True) for each in arguments]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


def slow_rank(kind: str, training: Training, seconds: float) -> AbstractContextManager[Any]:
    """Return the block in which this rank is slow.

    Args:
        seconds: by which its steps become longer, approximately.
    """
    import torch.distributed as dist

    def sleep(*_: Any) -> None:
        time.sleep(part)

    layers = [module for module in training.model.modules() if type(module).__name__.endswith("DecoderLayer")]
    part = seconds / len(layers)
    stack = ExitStack()
    if kind == "slow reads of samples":
        stack.enter_context(patch.object(training.samples, "delay", seconds / training.batch))
    elif kind == "longer samples":
        stack.enter_context(patch.object(training.samples, "length", 8 * training.samples.length))
    elif kind == "throttled forward":
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(sleep).remove)
    elif kind == "slow backward":
        for layer in layers:
            stack.callback(layer.register_full_backward_hook(sleep).remove)
    elif kind == "slow optimizer":
        part = seconds
        stack.callback(training.optimizer.optimizer.register_step_pre_hook(sleep).remove)
    elif kind == "slow collectives":  # a call returns late, as when its buffers of the network are full
        new = hasattr(dist.ProcessGroup, "all_gather_single")
        name = "all_gather_single" if new else "_allgather_base"
        original = getattr(dist.ProcessGroup, name)

        def late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(part / 2)  # there is one in the forward of a layer, and one in its backward
            return original(*args, **kwargs)

        stack.enter_context(patch.object(dist.ProcessGroup, name, late))
    elif kind == "slow saves":
        from hf_fsdp_plugin.integrations.saving import manager

        write = manager().writer.write

        def write_late(*args: Any) -> Any:
            time.sleep(SAVE_EVERY * seconds / 2)  # of the model, and of the optimizer
            return write(*args)

        stack.enter_context(patch.object(manager().writer, "write", write_late))
    elif kind == "busy core":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[-1]})
        stack.callback(os.sched_setaffinity, 0, set(cores))
        stack.enter_context(processes(hold, [(cores[-1],)] * 3))
    return stack


def measure(args: argparse.Namespace) -> None:
    """Run the cases on each rank; rank 0 prints and writes the result."""
    import torch
    import torch.distributed as dist

    from hf_fsdp_plugin.integrations.run_metrics import run_metrics
    from hf_fsdp_plugin.metrics.figures import Slower, StragglerSearch

    torch.set_num_threads(1)
    rank, reports = int(os.environ["RANK"]), list[Slower]()
    training = Training(args, Path(os.environ["HF_FSDP_BENCH_FOLDER"]))
    metrics = run_metrics()

    class Search(StragglerSearch):
        def _judge(self, slower: Slower | None) -> Slower | None:
            if args.trace:
                print(f"    step {training.num_steps}: {slower}", flush=True)
            return super()._judge(slower)

        def add(self, now: Any) -> Slower | None:
            found = super().add(now)
            reports.extend([found] if found is not None else [])
            return found

    def search_again() -> None:
        reports.clear()
        if metrics.search is not None:
            metrics.search = Search(0.2, seconds=args.window)

    def after(seconds: float) -> Callable[[], bool]:
        end = time.monotonic() + seconds
        return lambda: time.monotonic() > end

    training.run(after(args.window))
    usual, rows = training.run(after(args.window)), list[dict[str, Any]]()
    usual = float(_of_rank_0(usual))
    if rank == 0:
        print(f"a step takes {usual:.3f} s", flush=True)
    for number in range(args.cases):
        kind = args.kinds[number % len(args.kinds)]
        slow, share = 1 + number % (NUM_RANKS - 1), (0.5, 1.0)[number // len(args.kinds) % 2]
        training.saves = kind == "slow saves"
        search_again()
        with slow_rank(kind, training, share * usual) if rank == slow else contextlib.nullcontext():
            end, begin = after(args.limit), time.monotonic()
            training.run(lambda end=end: bool(reports) or end())
        first = reports[0] if reports else None
        if rank == 0:
            row = {"kind": kind, "rank": slow, "found": first is not None and first.rank == slow}
            row |= {"wrong": sum(each.rank != slow for each in reports), "seconds": time.monotonic() - begin}
            row |= {"by": first.by if first else 0.0, "phase": first.phase if first else ""}
            row["right_phase"] = first is not None and first.phase in PHASES[kind]
            rows.append(row)
            print(f"[{number + 1:2}/{args.cases}] {row}", flush=True)
    training.saves = False
    search_again()
    begin, steps = time.monotonic(), training.num_steps
    cores = os.sched_getaffinity(0)
    load = [(cores, 60 * args.healthy + 60)] * 3 if args.load and rank == 0 else []
    with processes(spin, load):
        training.run(after(60 * args.healthy))
    if rank == 0:
        result = {
            "ranks": NUM_RANKS,
            "usual_step_seconds": usual,
            "cases": rows,
            "num_cases": len(rows),
            "num_found": sum(row["found"] for row in rows),
            "num_right_phase": sum(row["right_phase"] for row in rows),
            "healthy_minutes": (time.monotonic() - begin) / 60,
            "healthy_steps": training.num_steps - steps,
            "healthy_loaded": args.load,
            "false_alarms": len(reports) + sum(row["wrong"] for row in rows),
            "window_seconds": args.window,
        }
        write_result("stragglers", args.out, result)
    dist.barrier()
    dist.destroy_process_group()


def _of_rank_0(value: float) -> float:
    from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object

    return broadcast_object(value)


def main() -> int:
    args = parse_args()
    if "RANK" in os.environ:
        measure(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "HF_FSDP_BENCH_FOLDER": folder}
        return run_two_ranks(__file__, sys.argv[1:], environ, num_ranks=NUM_RANKS)


if __name__ == "__main__":
    sys.exit(main())
