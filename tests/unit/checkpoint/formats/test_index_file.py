"""The index of a DCP folder gives the same pieces as ``.metadata``, and damaged or hostile ones are refused."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp

from hf_fsdp_plugin.checkpoint.checking.verify import verify
from hf_fsdp_plugin.checkpoint.formats import dcp as reader
from hf_fsdp_plugin.checkpoint.formats.boxes import Box, flat_range, intersect, whole_box
from hf_fsdp_plugin.checkpoint.formats.index_file import IndexedPieces
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, read_run, shared_tensors
from hf_fsdp_plugin.checkpoint.io import InputFiles, hash_bytes
from hf_fsdp_plugin.checkpoint.merging.merge import MergeOptions, merge
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, INDEX_FILE
from hf_fsdp_plugin.checkpoint.shards import LocalShard, ModelShards, OptimizerShards, Piece
from hf_fsdp_plugin.checkpoint.writing import dcp_files
from hf_fsdp_plugin.checkpoint.writing.dcp_files import final_files
from hf_fsdp_plugin.checkpoint.writing.file_parts import PartWriter
from hf_fsdp_plugin.checkpoint.writing.state_files import model_files, optimizer_files
from hf_fsdp_plugin.problems import CheckpointError
from tests.support.assembled import assembled

WORLD = 5
WHOLE = {
    "even": torch.arange(60.0).reshape(10, 6),
    "uneven": torch.arange(77.0).reshape(11, 7).bfloat16(),
    "few_rows": torch.arange(18.0).reshape(3, 2, 3),
    "vector": torch.arange(13, dtype=torch.int64),
    "scale": torch.tensor(3.5),
}


def rows(shape: tuple[int, ...], rank: int) -> list[Box]:
    step = -(-shape[0] // WORLD)
    start, stop = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
    return [Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))] if start < stop else []


def flat(shape: tuple[int, ...], rank: int) -> list[Box]:
    size = whole_box(shape).numel
    return flat_range(shape, size * rank // WORLD, size * (rank + 1) // WORLD)


def columns(shape: tuple[int, ...], rank: int) -> list[Box]:
    if len(shape) < 2:
        return rows(shape, rank)
    size = shape[1]
    start, stop = size * rank // WORLD, size * (rank + 1) // WORLD
    return [Box((0, start, *(0 for _ in shape[2:])), (shape[0], stop - start, *shape[2:]))] if start < stop else []


LAYOUTS: dict[str, Callable[[tuple[int, ...], int], list[Box]]] = {"rows": rows, "flat": flat, "columns": columns}


def write(folder: Path, boxes: Callable[[tuple[int, ...], int], list[Box]]) -> Path:
    """Write the model as ``WORLD`` ranks do, with an index. Return the folder of the checkpoint."""
    entries = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_files, "MIN_INDEXED", 0)
        patch.setattr(dist, "get_world_size", lambda: WORLD)
        for rank in range(WORLD):
            patch.setattr(dist, "get_rank", lambda rank=rank: rank)
            tensors = []
            for name, tensor in WHOLE.items():
                own = boxes(tuple(tensor.shape), rank) if tensor.ndim else [whole_box(())]
                pieces = tuple(Piece(box, tensor[tuple(map(_slice, box.offsets, box.sizes))]) for box in own)
                tensors.append(LocalShard(name, tensor.dtype, tuple(tensor.shape), pieces))
            files = model_files(ModelShards(tuple(tensors), {"tied": "even"}), "sharded")
            PartWriter().write(folder, files.parts)
            entries.append(files.entries)
        for parts in final_files(entries):
            PartWriter().write(folder, parts)
    return folder


def _slice(offset: int, size: int) -> slice:
    return slice(offset, offset + size)


@pytest.fixture(params=LAYOUTS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", LAYOUTS[request.param])


def index_of(folder: Path) -> Path:
    (path,) = folder.rglob(f"*{INDEX_FILE}")
    return path


def without_index(folder: Path) -> StoredModel:
    path = index_of(folder)
    data = path.read_bytes()
    path.unlink()
    try:
        return read_stored_model(folder)
    finally:
        path.write_bytes(data)


def test_index_has_the_pieces_of_the_metadata(saved: Path) -> None:
    indexed, plain = read_stored_model(saved), without_index(saved)
    assert set(indexed.tensors) == {*WHOLE, "tied"}
    assert isinstance(indexed.tensors["even"].pieces, IndexedPieces)
    for name, tensor in plain.tensors.items():
        found = indexed.tensors[name]
        assert (found.name, found.dtype, found.shape) == (name, tensor.dtype, tensor.shape)
        key = lambda piece: (piece.box.offsets, piece.file)  # noqa: E731
        assert sorted(found.pieces, key=key) == sorted(tensor.pieces, key=key)
        assert found.uncovered() == tensor.uncovered() == 0 and found.files() >= tensor.files()  # and of replicas
    assert shared_tensors(indexed) == shared_tensors(plain) == [("even", "tied")]


@pytest.mark.parametrize("limit", [5000, 0], ids=["headers at once", "headers when needed"])
def test_every_box_finds_the_pieces_that_it_crosses(saved: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(reader, "MAX_EAGER", limit)
    plain = without_index(saved).tensors["uneven"]
    if not limit:
        index_of(saved).unlink()
    tensor = read_stored_model(saved, partial=True).tensors["uneven"]
    for row in range(11):
        for column in range(7):
            for sizes in ((1, 1), (11 - row, 1), (2, 7 - column)):
                box = Box((row, column), (min(sizes[0], 11 - row), sizes[1]))
                expected = [piece.box for piece in plain.pieces if intersect(box, piece.box) is not None]
                assert sorted(str(piece.box) for piece in tensor.within(box)) == sorted(map(str, expected))


def test_elements_are_those_that_were_saved(saved: Path, tmp_path: Path) -> None:
    model = read_stored_model(saved)
    for name, tensor in {**WHOLE, "tied": WHOLE["even"]}.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert assembled(saved, model.tensors[name]).tobytes() == raw
        out = memoryview(bytearray(len(raw)))
        with InputFiles(saved) as files:
            read_run(files, model.tensors[name], 0, tensor.numel(), out)
        assert bytes(out) == raw
    merge(saved, tmp_path / "out", MergeOptions())


def test_torch_reads_the_metadata(saved: Path) -> None:
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in {**WHOLE, "tied": WHOLE["even"]}.items()}}
    torch_dcp.load(state, checkpoint_id=saved / "pytorch_model_fsdp_0", no_dist=True)
    for name, tensor in WHOLE.items():
        assert torch.equal(state["model"][name], tensor)
    assert torch.equal(state["model"]["tied"], WHOLE["even"])


def write_optimizer(folder: Path) -> None:
    """Write the optimizer of ``WORLD`` ranks, with a tensor, a scalar and plain values, and an index."""
    entries = []
    moment = torch.arange(60.0).reshape(10, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_files, "MIN_INDEXED", 0)
        patch.setattr(dist, "get_world_size", lambda: WORLD)
        for rank in range(WORLD):
            patch.setattr(dist, "get_rank", lambda rank=rank: rank)
            pieces = tuple(Piece(box, moment[_slice(box.offsets[0], box.sizes[0])]) for box in rows((10, 6), rank))
            state: dict[str, Any] = {
                "exp_avg": LocalShard("state.w.exp_avg", torch.float32, (10, 6), pieces),
                "step": LocalShard("state.w.step", torch.float32, (), (Piece(whole_box(()), torch.tensor(4.0)),)),
                "rounds": 3,
            }
            if rank == 1:
                state["only_here"] = "text"
            groups = ({"params": ["w"], "lr": 0.1, "betas": (0.9, 0.95)},)
            files = optimizer_files(OptimizerShards({"w": state}, groups))
            PartWriter().write(folder, files.parts)
            entries.append(files.entries)
        for parts in final_files(entries):
            PartWriter().write(folder, parts)


def test_optimizer_is_read_from_the_index(tmp_path: Path) -> None:
    write_optimizer(tmp_path)
    indexed = read_stored_optimizer(tmp_path)
    index_of(tmp_path).unlink()
    plain = read_stored_optimizer(tmp_path)
    assert indexed is not None and plain is not None
    assert indexed.groups == plain.groups and list(indexed.groups[0]["params"]) == ["w"]
    assert indexed.state.keys() == plain.state.keys() == {"w"}
    one, other = indexed.state["w"], plain.state["w"]
    assert one.keys() == other.keys() and one["rounds"] == 3 and one["only_here"] == "text"
    for key in ("exp_avg", "step"):
        assert assembled(tmp_path, one[key]).tolist() == assembled(tmp_path, other[key]).tolist()


def test_index_of_another_save_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, rows)
    old = index_of(tmp_path).read_bytes()
    write(tmp_path, columns)
    index_of(tmp_path).write_bytes(old)
    tensor = read_stored_model(tmp_path).tensors["even"]
    assert isinstance(tensor.pieces, tuple)
    assert assembled(tmp_path, tensor).tobytes() == WHOLE["even"].numpy().tobytes()


def test_every_damaged_byte_of_the_index_is_found(tmp_path: Path) -> None:
    write(tmp_path, rows)
    path = index_of(tmp_path)
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(CheckpointError) as caught:
            read_stored_model(tmp_path)
        assert {problem.code for problem in caught.value.problems} == {"FSDP-E453"}, position
    for length in (0, 20, 40, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="FSDP-E453"):
            read_stored_model(tmp_path)


def rewrite(path: Path, edit: Callable[[dict[str, Any], Any], None]) -> None:
    """Change the header and the records of an index (int64), and write it with right hashes."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data, 8)
    tree = json.loads(data[32 : 32 + length])
    records = numpy.frombuffer(bytearray(data[32 + length :]), "<i8")
    edit(tree, records)
    raw = records.tobytes()
    for tensor in tree["tensors"]:
        size = tensor[4] * (5 + 3 * len(tensor[2])) * 8 if isinstance(tensor[4], int) else 0
        tensor[5] = hash_bytes(raw[tensor[3] : tensor[3] + size]) if isinstance(tensor[3], int) else ""
    header = json.dumps(tree).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(data[:8] + struct.pack("<Q16s", len(header), bytes.fromhex(hash_bytes(header))) + header + raw)


def set_file(name: str) -> Callable[[dict[str, Any], Any], None]:
    def edit(tree: dict[str, Any], _: Any) -> None:
        tree["files"] = [name for _ in tree["files"]]

    return edit


def set_number(column: int, value: int) -> Callable[[dict[str, Any], Any], None]:
    """Change a number of the first record: count, file, offset in the file, 2 offsets, 2 sizes, 4 steps."""

    def edit(_: dict[str, Any], records: Any) -> None:
        records[column] = value

    return edit


def set_field(field: str, value: Any) -> Callable[[dict[str, Any], Any], None]:
    return lambda tree, _: tree.update({field: value})


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        *((set_number(column, -1), "FSDP-E453") for column in range(7)),
        *((set_number(column, 1 << 60), "FSDP-E453") for column in range(11)),
        (set_number(0, 1 << 40), "FSDP-E453"),
        (set_number(0, WORLD + 1), "FSDP-E453"),
        (set_number(7, 0), "FSDP-E453"),
        (set_number(2, 1 << 40), "FSDP-E453"),
        (set_number(5, 1), "FSDP-E458"),
        (set_file("../secret"), "FSDP-E456"),
        (set_file("/etc/passwd"), "FSDP-E456"),
        (set_file("absent"), "FSDP-E457"),
        (set_field("files", []), "FSDP-E453"),
        (set_field("tensors", [[[], "float32", [1], 0, 1, ""]]), "FSDP-E453"),
        (set_field("tensors", [[["model", "w"], "object", [1], 0, 1, ""]]), "FSDP-E453"),
        (set_field("tensors", [[["model", "w"], "float32", [-1], 0, 1, ""]]), "FSDP-E453"),
        (set_field("tensors", [[["model", "w"], "float32", [1], 0, 1 << 50, ""]]), "FSDP-E453"),
        (set_field("tensors", [[["model", "w"], "float32", [1], -8, 1, ""]]), "FSDP-E453"),
        (set_field("aliases", [[["model", "a"], ["model", "b"]]]), "FSDP-E453"),
        (set_field("values", [[["model", "v"], 0, 0, 1 << 40]]), "FSDP-E453"),
        (set_field("version", 2), "FSDP-E453"),
        (set_field("metadata", 7), "FSDP-E453"),
    ],
)
def test_hostile_index_is_refused(tmp_path: Path, edit: Any, code: str) -> None:
    write(tmp_path, rows)
    rewrite(index_of(tmp_path), edit)
    with pytest.raises(CheckpointError) as caught:
        read_stored_model(tmp_path)
    assert caught.value.problems[0].code == code


@pytest.mark.parametrize(("damage", "code"), [("missing", "FSDP-E457"), ("truncated", "FSDP-E453")])
@pytest.mark.parametrize("indexed", [True, False])
def test_only_ranks_that_need_a_bad_file_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, code: str, indexed: bool
) -> None:
    monkeypatch.setattr(reader, "MAX_EAGER", 0)
    write(tmp_path, rows)
    if not indexed:
        index_of(tmp_path).unlink()
    path = tmp_path / "pytorch_model_fsdp_0" / "__2_0.distcp"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:10])
    even = read_stored_model(tmp_path, partial=True).tensors["even"]
    assert len(even.within(Box((0, 0), (4, 6)))) == 2
    with pytest.raises(CheckpointError, match=code):
        even.within(Box((3, 0), (2, 6)))
    with pytest.raises(CheckpointError, match=code):
        read_stored_model(tmp_path)


def test_missing_elements_are_reported(tmp_path: Path) -> None:
    write(tmp_path, rows)
    path = tmp_path / "pytorch_model_fsdp_0" / DCP_METADATA
    index_of(tmp_path).unlink()
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata["model.even"].chunks[2]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "MAX_EAGER", 0)
        even = read_stored_model(tmp_path, partial=True).tensors["even"]
        assert even.within(Box((0, 0), (4, 6)))
        with pytest.raises(CheckpointError, match="6 elements of even"):
            even.within(Box((3, 0), (2, 6)))
        with pytest.raises(CheckpointError, match="FSDP-E458"):
            read_stored_model(tmp_path)


def test_large_folder_opens_few_files_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint has more files than a process may open; one without an index is read file by file."""
    write(tmp_path, rows)
    index_of(tmp_path).unlink()
    monkeypatch.setattr("hf_fsdp_plugin.checkpoint.io.MAX_OPEN", 2)
    model = read_stored_model(tmp_path)
    assert assembled(tmp_path, model.tensors["even"]).tobytes() == WHOLE["even"].numpy().tobytes()


def test_renamed_tensor_keeps_its_pieces(tmp_path: Path) -> None:
    tensor = read_stored_model(write(tmp_path, rows)).tensors["even"]
    assert replace(tensor, name="other").pieces is tensor.pieces
    assert tensor.pieces[0] == next(iter(tensor.pieces)) and len(tensor.pieces) == WORLD


@pytest.mark.parametrize("size", [float("inf"), float("nan"), -1, 1e300, "1", None, True])
def test_invalid_size_of_the_metadata_is_refused(tmp_path: Path, size: Any) -> None:
    write(tmp_path, rows)
    rewrite(index_of(tmp_path), set_field("metadata", [size, ""]))
    with pytest.raises(CheckpointError, match="FSDP-E453"):
        read_stored_model(tmp_path)


def test_index_that_agrees_with_the_metadata_is_accepted(saved: Path) -> None:
    assert reader.index_problems(saved) == []


@pytest.mark.parametrize("change", ["swapped", "moved", "omitted", "alias", "dtype"])
def test_index_that_contradicts_the_metadata_is_found(tmp_path: Path, change: str) -> None:
    save_file_of = write(tmp_path, rows)

    def edit(tree: dict[str, Any], records: Any) -> None:
        tensors = {entry[0][-1]: entry for entry in tree["tensors"]}
        if change == "swapped":
            tensors["even"][0][-1], tensors["vector"][0][-1] = "vector", "even"
        elif change == "moved":
            records[tensors["even"][3] // 8 + 2] += 8
        elif change == "omitted":
            tree["tensors"].remove(tensors["vector"])
        elif change == "alias":
            tree["aliases"] = [[alias, tensors["vector"][0]] for alias, _ in tree["aliases"]]
        else:
            tensors["even"][1] = "int32"

    rewrite(index_of(tmp_path), edit)
    (found,) = reader.index_problems(save_file_of)
    assert found.code == "FSDP-E459" and INDEX_FILE in str(found)
    assert "FSDP-E459" in [problem.code for problem in verify(save_file_of).problems]
