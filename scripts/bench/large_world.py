"""What resuming and committing cost in large worlds, counted on made-up checkpoints of 70 billion parameters.

A checkpoint has the metadata of a Llama of 70 billion parameters with AdamW in fp32, sharded by FSDP2, as the ranks
write it: every chunk of every tensor, with the hashes of its bytes. The data files are sparse. The package's own code
commits the checkpoint as rank 0, and plans and reads the shards of one rank, in the same and in a smaller world. Reads
of the data are counted instead of executed: their time is that of the disk, and grows with the bytes that a rank holds.

Each world is measured in a process of its own. The CPU seconds of a resume are those of everything but the data:
manifest, index, scalars and plan. While rank 0 commits, another thread counts in a loop: its speed, relative to the
speed that it has alone, is what the commit leaves of the GIL for training.

    python scripts/bench/large_world.py    (ten minutes on 2 cores; writes docs/results/large_world.json)
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import make_parser
from update_results import write_result

FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")
WORLDS = (2, 8, 64, 256, 1024, 4096)
HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY, LAYERS = 8192, 28672, 1024, 128256, 80


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "large_world")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints; default: the system's")
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def llama_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Llama's parameters, in the order of the model."""
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEY_VALUE, HIDDEN),
        "self_attn.v_proj": (KEY_VALUE, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def rows_of(size: int, rank: int, world: int) -> tuple[int, int]:
    """Return the first row and the number of rows of a rank's shard, as torch.chunk divides them."""
    step = -(-size // world)
    start = min(step * rank, size)
    return start, min(start + step, size) - start


class MadeUpRun:
    """The ranks of a run that has saved a checkpoint, and the files of its staging folder."""

    def __init__(self, world: int, shapes: dict[str, tuple[int, ...]]) -> None:
        self.world, self.shapes = world, shapes

    def local_shapes(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return tuple((rows_of(size, rank, self.world)[1], *rest) for size, *rest in self.shapes.values())

    def shards(self, rank: int) -> Any:
        """Return the rank's shards as the model and the optimizer would, without memory."""
        import torch

        from hf_fsdp_plugin.checkpoint.formats.boxes import Box, whole
        from hf_fsdp_plugin.checkpoint.shard_layout import LocalShard, Piece
        from hf_fsdp_plugin.checkpoint.shards import ModelShards, OptimizerShards

        tensors, state = [], {}
        for name, shape in self.shapes.items():
            start, count = rows_of(shape[0], rank, self.world)
            box = Box((start, *(0 for _ in shape[1:])), (count, *shape[1:]))
            pieces = (Piece(box, torch.empty(box.sizes, device="meta")),) if count else ()
            tensors.append(LocalShard(name, torch.float32, shape, pieces))
            moments = {
                key: LocalShard(f"state.{name}.{key}", torch.float32, shape, pieces)
                for key in ("exp_avg", "exp_avg_sq")
            }
            step = LocalShard(f"state.{name}.step", torch.float32, (), (Piece(whole(()), torch.tensor(20.0)),))
            state[name] = {**moments, "step": step}
        groups = ({"params": list(self.shapes), "lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.01},)
        return ModelShards(tuple(tensors), {}), OptimizerShards(state, groups)

    def write(self, staging: Any) -> float:
        """Write sparse files and the records of all ranks. Return the CPU seconds of the record of one rank."""
        import numpy
        import torch.distributed as dist

        from hf_fsdp_plugin.checkpoint.formats.block_file import PackedRanges, pack_all
        from hf_fsdp_plugin.checkpoint.formats.ranges import FileRange, FileRecord
        from hf_fsdp_plugin.checkpoint.writing import part_writer, state_files
        from hf_fsdp_plugin.checkpoint.writing.chunk_tables import DcpEntries
        from hf_fsdp_plugin.checkpoint.writing.dcp import MIN_INDEXED
        from hf_fsdp_plugin.checkpoint.writing.rank_record import RankRecord

        hashes: Any = part_writer._RangeHashes  # the ranges that a rank hashes
        known: dict[Any, Any] = {}
        seconds = []
        dist.get_world_size = lambda *_: self.world  # type: ignore[assignment]
        for rank in range(self.world):
            dist.get_rank = functools.partial(int, rank)  # type: ignore[assignment]
            begin = time.process_time()
            layout = rank == 0, self.local_shapes(rank)
            if layout not in known:  # equal layouts differ in the first rows and in the name of the file
                model, optimizer = self.shards(rank)
                states = [state_files.model_files(model, "sharded"), state_files.optimizer_files(optimizer, "sharded")]
                bounds = [hashes(state.parts[0])._bounds for state in states]
                known[layout] = rank, states, bounds
            first, states, bounds = known[layout]
            files, dcp = [], []
            for state, own in zip(states, bounds, strict=True):
                (entries,), (part,) = state.dcp, state.parts
                chunks = entries.chunks.copy()
                sizes = numpy.array([shape[0] for _, _, shape in entries.tensors])[chunks[:, 0]]
                chunks[:, 4] = -(-sizes // self.world) * rank
                name = entries.file.replace(f"__{first}_", f"__{rank}_")
                path = f"{entries.folder}/{name}"
                names: dict[str, int] = {}
                ranges = [FileRange(start=low, stop=high, hash="0" * 32, name=name) for low, high, name in own]
                packed = numpy.frombuffer(bytearray(pack_all(ranges, names)), "u1").reshape(-1, 36)
                packed[:, 20:] = numpy.random.default_rng(rank).integers(0, 256, (len(packed), 16), dtype="u1")
                files.append(FileRecord(path=path, size=part.size, ranges=PackedRanges(packed.tobytes(), tuple(names))))
                dcp.append(DcpEntries(entries.folder, name, entries.tensors, chunks, entries.smalls, entries.aliases))
                (staging.folder / path).parent.mkdir(exist_ok=True)
                with (staging.folder / path).open("wb") as file:
                    file.truncate(part.size)
                    if len(chunks) * self.world < MIN_INDEXED:  # the headers of the archives are read
                        for item in part.extents[0].items:
                            file.seek(item.offset)
                            file.write(item.contents[0])
                            file.seek(item.stop - len(item.contents[2]))
                            file.write(item.contents[2])
            (staging.folder / f"rng_state_{rank}.pth").write_bytes(b"\0" * 16)
            seconds.append(time.process_time() - begin)
            staging.write_record(rank, RankRecord(tuple(files), tuple(dcp)))
        return seconds[0]


class Counts:
    """Counts opened files, reads and bytes while it is active. Reads of tensors are not executed."""

    def __init__(self, monitored: Path) -> None:
        self.opens: set[str] = set()
        self.reads = self.num_bytes = self.data_reads = self.data_bytes = 0
        self._root = str(monitored)

    def __enter__(self) -> Counts:
        self._plain = os.open, os.pread, os.preadv
        os.open, os.pread, os.preadv = self._open, self._pread, self._preadv  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        os.open, os.pread, os.preadv = self._plain

    def _open(self, path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).startswith(self._root):
            self.opens.add(str(path))
        return self._plain[0](path, *arguments, **options)

    def _pread(self, *arguments: Any) -> bytes:
        data = self._plain[1](*arguments)
        self.reads += 1
        self.num_bytes += len(data)
        return data

    def _preadv(self, *arguments: Any) -> int:
        count = self._plain[2](*arguments)
        self.reads += 1
        self.num_bytes += count
        return count

    def data(self, num_bytes: int) -> None:
        self.data_reads += 1
        self.data_bytes += num_bytes


class NoBytes:
    """Memory of a size, without memory."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __setitem__(self, part: slice, _: NoBytes) -> None:
        assert len(range(*part.indices(self._size))) == self._size

    def __getitem__(self, part: slice) -> NoBytes:
        return NoBytes(len(range(*part.indices(self._size))))


def resume(checkpoint: Path, saved: int, run: MadeUpRun, rank: int) -> dict[str, Any]:
    """Plan and read the shards of one rank, from the checkpoint of ``saved`` ranks."""
    from hf_fsdp_plugin.checkpoint.checking.verified_files import check_headers, files_of_checkpoint
    from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model, read_stored_optimizer
    from hf_fsdp_plugin.checkpoint.reading.fill import transfers

    verified: Any = importlib.import_module("hf_fsdp_plugin.checkpoint.checking.verified_files")
    compare = verified.VerifiedFiles._compare
    sparse = {f"{folder}/__{writer}_0.distcp" for folder in FOLDERS for writer in range(saved)}

    def compare_real(self: Any, file: str, *arguments: Any) -> None:
        if file not in sparse:
            compare(self, file, *arguments)

    verified.VerifiedFiles._compare = compare_real
    model, optimizer = run.shards(rank)
    counts = Counts(checkpoint)
    held = 0
    before = resource.getrusage(resource.RUSAGE_SELF)
    with counts:
        work = []
        stored_model = read_stored_model(checkpoint, partial=True)
        model_files = files_of_checkpoint(checkpoint, stored_model, verify=True)
        with model_files:
            check_headers(model_files, stored_model, rank, run.world)
        for shard in model.tensors:
            found = list(transfers(stored_model.tensors[shard.name], shard.pieces))
            work += [(model_files, transfer) for transfer in found]
            held += shard.num_bytes
        stored = read_stored_optimizer(checkpoint, partial=True)
        assert stored is not None
        files = files_of_checkpoint(checkpoint, stored, verify=True)
        with files:
            check_headers(files, stored, rank, run.world)
            for name, entry in optimizer.state.items():
                for key, shard in entry.items():
                    found = list(transfers(stored.state[name][key], shard.pieces))
                    if not shard.shape:  # really read
                        number = memoryview(bytearray(4))
                        files.read(found[0].file, found[0].offset, number)
                        assert number.cast("f")[0] == 20.0
                        continue
                    work += [(files, transfer) for transfer in found]
                    held += shard.num_bytes
        planned = resource.getrusage(resource.RUSAGE_SELF)
        plain = verified.InputFiles.read, verified.hash_bytes
        verified.InputFiles.read = lambda _files, _file, _offset, out: counts.data(len(out))
        verified.hash_bytes = lambda _: ""
        verified.bytearray = NoBytes
        verified.memoryview = lambda memory: memory
        try:
            for opened, transfer in work:
                opened.read(transfer.file, transfer.offset, NoBytes(transfer.into.nbytes))  # type: ignore[arg-type]
        finally:
            verified.InputFiles.read, verified.hash_bytes = plain
            verified.VerifiedFiles._compare = compare
            del verified.bytearray, verified.memoryview
    return {
        "cpu_seconds": round(cpu_seconds(before, planned), 3),
        "read_planning_seconds": round(cpu_seconds(planned, resource.getrusage(resource.RUSAGE_SELF)), 3),
        "opened_files": len(counts.opens),
        "metadata_reads": counts.reads,
        "metadata_bytes": counts.num_bytes,
        "data_reads": counts.data_reads,
        "held_bytes": held,
        "read_over_held": round((counts.data_bytes + counts.num_bytes) / held, 4),
    }


def cpu_seconds(before: Any, after: Any) -> float:
    return float(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def ticks(stop: threading.Event | None, seconds: float) -> Iterator[float]:
    """Count in a loop until ``stop`` is set, or for ``seconds``. Yield the time of each round of 2,000 additions."""
    end = time.perf_counter() + seconds
    while not stop.is_set() if stop is not None else time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(2000):
            pass
        yield time.perf_counter() - begin


def commit(staging: Any, run: MadeUpRun) -> dict[str, Any]:
    """Commit as rank 0 in a thread, while this thread counts."""
    from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest

    parameters = {name: ("float32", shape) for name, shape in run.shapes.items()}
    manifest = Manifest(
        kind="sharded", backend="fsdp2", world_size=run.world, mesh={"replicate": 1, "shard": run.world},
        strategy="full_shard", step=20, asynchronous=True, created="2026-01-02T03:04:05+00:00", versions={},
        settings={}, parameters=parameters, ties=(), files=(), batch={},
    )  # fmt: skip
    done, used, failures = threading.Event(), [0.0], []

    def work() -> None:
        try:
            begin = time.thread_time()
            staging.commit(staging.read_records(run.world), manifest)
            used[0] = time.thread_time() - begin
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    alone = list(ticks(None, 1.0))
    thread = threading.Thread(target=work)
    begin = time.perf_counter()
    thread.start()
    beside = list(ticks(done, 0))
    thread.join()
    if failures:
        raise failures[0]
    seconds = time.perf_counter() - begin
    speed = (len(beside) / seconds) / (len(alone) / sum(alone))
    return {
        "cpu_seconds": round(used[0], 2),
        "seconds": round(seconds, 2),
        "speed_of_other_thread": round(speed, 3),
        "longest_pause_seconds": round(max(beside, default=0.0), 3),
    }


def measure(world: int, layers: int, work: Path) -> dict[str, Any]:
    from hf_fsdp_plugin.checkpoint.names import BLOCK_FILE, DCP_METADATA, INDEX_FILE, MANIFEST_NAME
    from hf_fsdp_plugin.checkpoint.writing.staging import StagingFolder

    shapes = llama_shapes(layers)
    run = MadeUpRun(world, shapes)
    staging = StagingFolder(work / "checkpoint-20")
    staging._create()
    record = run.write(staging)
    committed = commit(staging, run)
    checkpoint = staging.final
    other = MadeUpRun(max(1, world * 3 // 4), shapes)
    return {
        "record_cpu_seconds": round(record, 2),
        "commit": committed,
        "manifest_bytes": (checkpoint / MANIFEST_NAME).stat().st_size,
        "hash_file_bytes": size_of(checkpoint / BLOCK_FILE),
        "metadata_bytes": sum(path.stat().st_size for path in checkpoint.rglob(DCP_METADATA)),
        "index_bytes": sum(path.stat().st_size for path in checkpoint.rglob(INDEX_FILE)),
        "same": resume(checkpoint, world, run, world // 2),
        "fewer": {"ranks": other.world, **resume(checkpoint, world, other, other.world // 2)},
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def run_world(world: int, layers: int, folder: Path | None, results: Any) -> None:
    work = Path(tempfile.mkdtemp(dir=folder))
    try:
        results.put(measure(world, layers, work))
    finally:
        shutil.rmtree(work)


def main() -> int:
    args = parse_args()
    found = {}
    context = multiprocessing.get_context("spawn")
    for world in args.worlds:
        results = context.SimpleQueue()
        process = context.Process(target=run_world, args=(world, args.layers, args.folder, results))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"the measurement of {world} ranks failed")
        found[str(world)] = results.get()
        print(world, json.dumps(found[str(world)]), file=sys.stderr)
    result = {"model": f"Llama, {args.layers} layers, hidden {HIDDEN}, fp32, AdamW, FSDP2", "worlds": found}
    write_result("large_world", args.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
