"""One process publishes weights and others map them. Nobody waits for a process that has not begun or has failed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_fsdp_plugin.backends.loading import shared_weights
from hf_fsdp_plugin.backends.loading.equal_weights import MemoryMaps, parameter_memory
from hf_fsdp_plugin.backends.loading.shared_weights import Publication, Received, WeightExchange

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


def tensors() -> dict[str, torch.Tensor]:
    values = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    return {**values, "scalar": torch.tensor(2.0), "empty": torch.empty(0, 3), "transposed": torch.ones(2, 3).T * 2}


def published(exchange: WeightExchange, key: str, content: dict[str, torch.Tensor], files: Any = ()) -> Publication:
    publication = exchange.join(key)
    assert isinstance(publication, Publication)
    assert publication.publish(content, files, "facts")
    return publication


def received(exchange: WeightExchange, key: str) -> Received:
    result = exchange.join(key)
    assert isinstance(result, Received)
    return result


def test_received_weights_equal_the_published_ones(exchange: WeightExchange) -> None:
    content, expected = tensors(), tensors()
    published(exchange, "key", content)
    other = received(exchange, "key")
    assert other.facts == "facts"
    for found in (content, other.tensors([])):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name].double(), tensor.double()), name
    assert parameter_memory([content["scalar"]]).num_shared == 1


def test_change_in_place_is_not_seen_by_others(exchange: WeightExchange) -> None:
    content = {"weight": torch.zeros(5000)}
    published(exchange, "key", content)
    first = received(exchange, "key").tensors([])["weight"]
    first.add_(1)
    content["weight"].add_(2)
    assert parameter_memory([first]).private_bytes > 0
    assert received(exchange, "key").tensors([])["weight"].sum() == 0
    assert (first.sum(), content["weight"].sum()) == (5000, 10000)


def test_views_of_files_are_mapped_and_not_copied(exchange: WeightExchange, tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    save_file({"a": torch.ones(4, 4), "b": torch.arange(3.0)}, path)
    content = load_file(path)
    content["cast"] = content["b"].double()
    published(exchange, "key", content, [path])
    found = received(exchange, "key").tensors([path])
    for group in (content, found):
        memory = parameter_memory(group.values())
        assert (memory.num_mapped, memory.num_shared, memory.num_private) == (2, 1, 0)
    assert all(torch.equal(found[name], content[name]) for name in content)


@pytest.mark.parametrize("chunk", [4096, 64 << 20])
def test_moved_weights_are_published_where_they_are(
    exchange: WeightExchange, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(shared_weights, "_CHUNK", chunk)
    publication = exchange.join("key")
    assert isinstance(publication, Publication)
    expected = {str(size): torch.arange(float(size)) for size in (1, 700, 1200, 3)} | {"none": torch.empty(0)}
    content = {name: publication.move(tensor.clone()) for name, tensor in expected.items()}
    content["changed"] = publication.move(torch.zeros(5000))
    content["changed"] += 1
    expected["changed"] = torch.ones(5000)
    addresses = {name: tensor.data_ptr() for name, tensor in content.items()}
    assert publication.publish(content, [], None)
    copied = {name for name in content if content[name].data_ptr() != addresses[name]}
    assert "changed" in copied
    assert chunk > 4096 or copied == {"changed"}  # all weights of a chunk count as changed
    found = received(exchange, "key").tensors([])
    for tensors in (content, found):
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert parameter_memory(content.values()).num_shared == parameter_memory(found.values()).num_shared == 5


def test_views_of_files_are_not_moved(exchange: WeightExchange, tmp_path: Path) -> None:
    publication = exchange.join("key")
    assert isinstance(publication, Publication)
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    mapped = load_file(tmp_path / "model.safetensors")["a"]
    assert publication.move(mapped) is mapped
    publication.close()


def test_waiting_process_receives_weights_computed_later(exchange: WeightExchange) -> None:
    publication = exchange.join("key")
    assert isinstance(publication, Publication)
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(exchange.join("key")))
    waiting.start()
    publication.publish(tensors(), [], None)
    waiting.join(30)
    assert isinstance(results[0], Received)


def test_waiting_process_takes_over_if_the_publisher_fails(exchange: WeightExchange) -> None:
    publication = exchange.join("key")
    assert isinstance(publication, Publication)
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(exchange.join("key")))
    waiting.start()
    publication.close()
    waiting.join(30)
    assert isinstance(results[0], Publication)


def test_keys_and_jobs_are_separate(exchange: WeightExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    published(exchange, "key", tensors())
    assert isinstance(exchange.join("another key"), Publication)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert isinstance(exchange.join("key"), Publication)


def test_close_withdraws_and_mapped_weights_stay_valid(exchange: WeightExchange) -> None:
    content = {"weight": torch.ones(3)}
    published(exchange, "key", content)
    found = received(exchange, "key").tensors([])
    exchange.close()
    assert isinstance(exchange.join("key"), Publication)
    assert torch.equal(found["weight"], torch.ones(3)) and torch.equal(content["weight"], torch.ones(3))


def test_no_memory_leaves_the_weights_unchanged(exchange: WeightExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> int:
        raise OSError("no memory")

    content = tensors()
    publication = exchange.join("key")
    assert isinstance(publication, Publication)
    monkeypatch.setattr(shared_weights.os, "ftruncate", fail)
    assert not publication.publish(content, [], None)
    assert torch.equal(content["scalar"], torch.tensor(2.0))
    assert isinstance(exchange.join("key"), Publication), "the next process computes the weights"


def test_single_rank_and_other_systems_share_nothing(exchange: WeightExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert exchange.join("key") is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delattr(shared_weights.os, "memfd_create")
    assert exchange.join("key") is None


def test_parameter_memory_counts_each_kind_once() -> None:
    model = nn.Linear(4, 4)
    model.register_parameter("tied", model.weight)
    model.register_parameter("meta", nn.Parameter(torch.empty(2, device="meta")))
    memory = parameter_memory(model.parameters())
    assert (memory.num_private, memory.num_on_meta, memory.num_mapped) == (2, 1, 0)
    assert (memory.private_bytes, memory.total_bytes) == (80, 88)


def test_without_proc_no_mapping_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert MemoryMaps.read([torch.ones(2)]).find(torch.ones(2)) is None
