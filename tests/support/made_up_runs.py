"""Made-up checkpoints of large worlds: their metadata is that of real ranks, their data files are sparse."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")
HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY, LAYERS = 4096, 14336, 1024, 128256, 32
STEP = 20.0


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
    """The ranks of a run that has saved a checkpoint, and the files of its staging folder.

    Args:
        version: of FSDP: 2 shards the rows of each tensor, 1 the elements of each layer.
    """

    def __init__(self, world: int, shapes: dict[str, tuple[int, ...]], version: int = 2) -> None:
        self.world, self.shapes, self.version = world, shapes, version
        units: dict[str, list[str]] = {}
        for name in shapes:
            units.setdefault(name.split("self_attn")[0].split("mlp")[0].split("input")[0].split("post")[0], []).append(
                name
            )
        self._places: dict[str, tuple[int, int]] = {}
        for names in units.values():
            sizes = [math.prod(shapes[name]) for name in names]
            for name, stop in zip(names, itertools.accumulate(sizes), strict=True):
                self._places[name] = stop, -(-sum(sizes) // world)

    def boxes(self, name: str, rank: int) -> list[Any]:
        """Return the boxes of a tensor that a rank holds."""
        from hf_fsdp_plugin.checkpoint.formats.boxes import Box, flat_range

        shape = self.shapes[name]
        if self.version == 2:
            start, count = rows_of(shape[0], rank, self.world)
            return [Box((start, *(0 for _ in shape[1:])), (count, *shape[1:]))] if count else []
        end, step = self._places[name]
        size = math.prod(shape)
        begin = end - size
        low, high = (min(max(step * number - begin, 0), size) for number in (rank, rank + 1))
        return flat_range(shape, low, high)

    def layout(self, rank: int) -> Any:
        """Return a key of ranks whose files differ only in the first rows of their shards."""
        if self.version == 1:
            return rank
        return rank == 0, tuple(rows_of(shape[0], rank, self.world)[1] for shape in self.shapes.values())

    def shards(self, rank: int) -> Any:
        """Return the rank's shards as the model and the optimizer would, without memory."""
        import torch

        from hf_fsdp_plugin.checkpoint.formats.boxes import whole_box
        from hf_fsdp_plugin.checkpoint.saved_state import LocalShard, ModelShards, OptimizerShards, Piece

        tensors, state = [], {}
        for name, shape in self.shapes.items():
            pieces = tuple(Piece(box, torch.empty(box.sizes, device="meta")) for box in self.boxes(name, rank))
            tensors.append(LocalShard(name, torch.float32, shape, pieces))
            moments = {
                key: LocalShard(f"state.{name}.{key}", torch.float32, shape, pieces)
                for key in ("exp_avg", "exp_avg_sq")
            }
            if self.version == 1 and not pieces:
                continue  # a parameter without elements on this rank has no state
            step = LocalShard(f"state.{name}.step", torch.float32, (), (Piece(whole_box(()), torch.tensor(STEP)),))
            state[name] = {**moments, "step": step}
        groups = ({"params": list(self.shapes), "lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.01},)
        return ModelShards(tuple(tensors), {}), OptimizerShards(state, groups)

    def manifest(self) -> Any:
        """Return the manifest without files."""
        from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest

        return Manifest(
            kind="sharded", backend=f"fsdp{self.version}", world_size=self.world, strategy="full_shard",
            mesh={"replicate": 1, "shard": self.world}, step=int(STEP), asynchronous=True,
            created="2026-01-02T03:04:05+00:00", versions={}, settings={},
            parameters={name: ("float32", shape) for name, shape in self.shapes.items()}, ties=(), files=(), batch={},
        )  # fmt: skip

    def write(self, staging: Any, headers_of: Container[int] | None = None) -> float:
        """Write sparse files and the records of all ranks. Return the CPU seconds of the record of one rank.

        Args:
            headers_of: the ranks whose files contain the headers of their archives; by default, all.
        """
        import torch.distributed as dist

        from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange, FileRecord
        from hf_fsdp_plugin.checkpoint.names import dcp_file
        from hf_fsdp_plugin.checkpoint.writing import state_files
        from hf_fsdp_plugin.checkpoint.writing.staging_folder import RankRecord

        known: dict[Any, Any] = {}
        seconds = []
        for rank in range(self.world):
            begin = time.process_time()
            layout = self.layout(rank)
            if layout not in known:
                model, optimizer = self.shards(rank)
                with mock.patch.multiple(dist, get_rank=lambda at=rank: at, get_world_size=lambda: self.world):
                    states = [
                        state_files.model_files(model, "sharded"),
                        state_files.optimizer_files(optimizer),
                    ]
                if self.version == 1:
                    known.clear()  # each rank has its own layout
                known[layout] = states
            files, written = [], []
            draw = random.Random(rank)
            for state in known[layout]:
                (entries,), (part,) = state.entries, state.parts
                path = f"{entries.folder}/{dcp_file(rank)}"
                bounds = [each for window in part.windows for each in window.ranges()]
                ranges = [FileRange(start=a, stop=b, hash=draw.randbytes(16).hex(), name=name) for a, b, name in bounds]
                files.append(FileRecord(path=path, size=part.size, ranges=ranges))
                written.append(entries._replace(file=dcp_file(rank), tensors=self._moved(entries.tensors, rank)))
                (staging.folder / path).parent.mkdir(exist_ok=True)
                with (staging.folder / path).open("wb") as file:
                    file.truncate(part.size)
                    if headers_of is None or rank in headers_of:
                        for item in {item.offset: item for window in part.windows for item in window.items}.values():
                            padding, head, _, tail = item.contents
                            file.seek(item.offset)
                            file.write(padding + head)
                            file.seek(item.stop - len(tail))
                            file.write(tail)
            (staging.folder / f"rng_state_{rank}.pth").write_bytes(b"\0" * 16)
            staging.write_record(rank, RankRecord(tuple(files), tuple(written)))
            seconds.append(time.process_time() - begin)
        return seconds[0]

    def _moved(self, tensors: Any, rank: int) -> Any:
        """Return the entries of a rank of FSDP2 with the first rows of the rank."""
        if self.version == 1:
            return tensors
        firsts = [rows_of(entry.shape[0], rank, self.world)[0] for entry in tensors]
        return [
            entry._replace(chunks=[chunk._replace(offsets=(first, *chunk.offsets[1:])) for chunk in entry.chunks])
            for entry, first in zip(tensors, firsts, strict=True)
        ]


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


@contextmanager
def sparse_data(world: int) -> Iterator[None]:
    """Do not compare the bytes of the data files of ``world`` ranks with their hashes."""
    from hf_fsdp_plugin.checkpoint.checking.hashes import VerifiedFiles
    from hf_fsdp_plugin.checkpoint.names import dcp_file

    sparse = {f"{folder}/{dcp_file(rank)}" for folder in FOLDERS for rank in range(world)}
    compare: Any = VerifiedFiles._compare

    def compare_real(self: Any, file: str, *arguments: Any) -> None:
        if file not in sparse:
            compare(self, file, *arguments)

    with mock.patch.object(VerifiedFiles, "_compare", compare_real):
        yield


def plan_resume(checkpoint: Path, shards: Any, rank: int, world: int) -> tuple[list[Any], int]:
    """Do what ``load_model`` and ``load_optimizer`` do on one rank before they read the data.

    Args:
        shards: the shards of the rank ``rank`` of ``world``.

    Returns:
        The files and the transfer of each read, and the number of bytes that the rank holds. Scalars are read here.
    """
    from hf_fsdp_plugin.checkpoint.checking.hashes import check_headers, files_of_checkpoint
    from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
    from hf_fsdp_plugin.checkpoint.reading.resharding import plan_transfers

    model, optimizer = shards
    held, work = 0, []
    stored_model = read_stored_model(checkpoint)
    files = files_of_checkpoint(checkpoint, stored_model, verify=True)
    with files:
        check_headers(files, stored_model, rank, world)
    for shard in model.tensors:
        work += [(files, transfer) for transfer in plan_transfers(stored_model.tensors[shard.name], shard.pieces)]
        held += shard.num_bytes
    stored = read_stored_optimizer(checkpoint)
    assert stored is not None
    files = files_of_checkpoint(checkpoint, stored, verify=True)
    with files:
        check_headers(files, stored, rank, world)
        for name, entry in optimizer.state.items():
            for key, shard in entry.items():
                found = [(files, transfer) for transfer in plan_transfers(stored.state[name][key], shard.pieces)]
                if shard.shape:
                    work += found
                    held += shard.num_bytes
                else:
                    number = memoryview(bytearray(4))
                    files.read(found[0][1].file, found[0][1].offset, number)
                    assert number.cast("f")[0] == STEP
    return work, held
