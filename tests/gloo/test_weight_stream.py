"""Whole weights of a model in training, unit by unit, on real ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.sharding.shard import plan_of
from tests.support import user_code_runs
from tests.support.matrices import alternating, slow
from tests.support.peft_runs import adapted_llama
from tests.support.ranks import Ranks, own_device
from tests.support.tiny import global_batch, parallel_config, tiny_llama
from tests.support.training import adamw, fresh_accelerator, loss_of
from tests.support.user_code_runs import codes_of, make_model

VERSIONS = pytest.mark.parametrize("version", [1, 2])


def trained(config: dict[str, Any], name: str) -> tuple[Any, Any, Any]:
    """An Accelerator, a model after one step, and its optimizer."""
    accelerator = fresh_accelerator(config)
    model = adapted_llama(name.removeprefix("peft-")) if name.startswith("peft-") else make_model(name)
    model, optimizer = accelerator.prepare(model, adamw(model))
    user_code_runs.step(accelerator, model, optimizer, "llama", 0)
    return accelerator, model, optimizer


def stream_and_save(config: dict[str, Any], name: str, folder: str, dtype: str | None) -> dict[str, Any]:
    """What is yielded, and how often; ``save_pretrained`` writes the same weights."""
    accelerator, model, _ = trained(config, name)
    given = getattr(torch, dtype) if dtype else None
    pairs = [(key, tensor.clone()) for key, tensor in hfp.stream_parameters(model, dtype=given)]
    accelerator.unwrap_model(model).save_pretrained(folder)
    loss_of(model, "llama", 1, dist.get_rank(), dist.get_world_size()).backward()  # it can be trained as before
    return {"tensors": dict(pairs), "num": len(pairs)}


@pytest.mark.parametrize("name, version", alternating(["tied", "llama", "experts"], [2, 1]))
def test_stream_equals_saved_files(two_ranks: Ranks, tmp_path: Path, name: str, version: int) -> None:
    runs = two_ranks.run(stream_and_save, parallel_config("full_shard", version, 2), name, str(tmp_path), None)
    assert_equals_file(runs, tmp_path)


def merge_and_stream(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """What is yielded of a model with adapters, and what PEFT merges in one process from the same weights."""
    accelerator, model, _ = trained(config, f"peft-{kind}")
    streamed = dict(hfp.stream_parameters(model))
    state = accelerator.get_state_dict(model)
    loss_of(model, "llama", 1, dist.get_rank(), dist.get_world_size()).backward()  # it can be trained as before
    after = accelerator.get_state_dict(model)
    if dist.get_rank() != 0:
        return {"tensors": streamed}
    whole: Any = adapted_llama(kind)
    whole.load_state_dict(state)
    expected = dict(whole.merge_and_unload().state_dict())
    return {
        "tensors": streamed,
        "expected": expected,
        "is_unchanged": all(map(torch.equal, after.values(), state.values())),
    }


@pytest.mark.parametrize(
    "kind, version",
    [("lora", 2), ("dora", 1), slow("modules", 1), slow("tokens", 2), slow("embedding", 2), slow("bias", 1),
     slow("ia3", 2), slow("two", 2), slow("parameters", 2), slow("lora", 1), slow("dora", 2), slow("vera", 2)],
)  # fmt: skip
def test_adapters_are_merged_as_by_peft(two_ranks: Ranks, kind: str, version: int) -> None:
    first, second = two_ranks.run(merge_and_stream, parallel_config("full_shard", version, 2), kind)
    assert first["is_unchanged"]
    for run in (first, second):
        assert run["tensors"].keys() == first["expected"].keys()
        assert all(torch.equal(run["tensors"][key], first["expected"][key]) for key in first["expected"])


OTHER_SETTINGS = [
    slow({"fsdp_offload_params": True}, 1),
    slow({"fsdp_offload_params": True}, 2),
    slow({"fsdp_sharding_strategy": "NO_SHARD"}, 1),
    ({"fsdp_sharding_strategy": "NO_SHARD"}, 2),
    slow({"fsdp_ignored_modules": "model.embed_tokens"}, 2),
    ({"fsdp_use_orig_params": False}, 1),
]


def assert_equals_file(runs: list[dict[str, Any]], folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    for run in runs:
        assert run["num"] == len(expected)
        assert run["tensors"].keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key].to(tensor.dtype)) for key, tensor in run["tensors"].items())


@pytest.mark.parametrize("settings, version", OTHER_SETTINGS)
def test_stream_equals_files_with_other_settings(
    two_ranks: Ranks, tmp_path: Path, settings: dict[str, Any], version: int
) -> None:
    config = {**parallel_config("full_shard", version, 2, **settings), "mixed_precision": "bf16"}
    runs = two_ranks.run(stream_and_save, config, "tied", str(tmp_path), "bfloat16")
    assert {tensor.dtype for tensor in runs[0]["tensors"].values()} == {torch.bfloat16}
    assert_equals_file(runs, tmp_path)


@VERSIONS
def test_stream_of_a_hybrid_mesh_equals_files(four_ranks: Ranks, tmp_path: Path, version: int) -> None:
    config = parallel_config("hybrid_shard", version, 4)
    assert_equals_file(four_ranks.run(stream_and_save, config, "experts", str(tmp_path), None), tmp_path)


def test_accelerator_ranks_stream_saved_files(two_accelerator_ranks: Ranks, tmp_path: Path) -> None:
    config = parallel_config("full_shard", 2, 2, fsdp_offload_params=True)
    assert_equals_file(two_accelerator_ranks.run(stream_and_save, config, "tied", str(tmp_path), None), tmp_path)


def peak_of_stream(config: dict[str, Any]) -> tuple[int, int]:
    """Bytes that a stream allocates on the device at its peak, and those of the two largest units together."""
    accelerator = fresh_accelerator(config)
    model = accelerator.prepare(tiny_llama(layers=6, hidden_size=128, intermediate_size=256))
    units = sorted((4 * unit.num_params for unit in plan_of(model).units), reverse=True)
    memory = torch.get_device_module(own_device())
    for _ in range(2):
        memory.synchronize()
        before = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        for _name, _tensor in hfp.stream_parameters(model):
            memory.synchronize()  # the simulated process group holds tensors until the device has gathered them
            del _tensor
    return memory.max_memory_allocated() - before, units[0] + units[1]


@VERSIONS
def test_stream_holds_two_units_on_a_device(two_accelerator_ranks: Ranks, version: int) -> None:
    for peak, two_units in two_accelerator_ranks.run(peak_of_stream, parallel_config("full_shard", version, 2)):
        assert 0.9 * two_units < peak <= 1.05 * two_units


def stream_changes(config: dict[str, Any]) -> list[set[str]]:
    """The names that are yielded with one dictionary, after changes of different kinds."""
    _, model, _ = trained(config, "peft-lora")
    sent: dict[str, int] = {}
    names = []

    def stream() -> None:
        names.append({key for key, _ in hfp.stream_parameters(model, changed_since=sent)})

    stream()
    stream()
    with hfp.full_parameters(model, modify=True) as parameters:
        next(value for name, value in parameters.items() if "layers.1.self_attn.q_proj.lora_B" in name)[0, 0] += 1
    stream()
    if dist.get_rank() == 1:  # on one rank, and without a change of `_version`
        shard = next(p for name, p in model.named_parameters() if "up_proj" in name)
        getattr(shard, "_local_tensor", shard).data.view(-1)[-1:] += 1
    stream()
    iterator = hfp.stream_parameters(model, changed_since=sent)
    assert next(iterator, None) is None
    return names


@VERSIONS
def test_only_changed_tensors_are_streamed(two_ranks: Ranks, version: int) -> None:
    for names in two_ranks.run(stream_changes, parallel_config("full_shard", version, 2)):
        assert len(names[0]) == 21
        assert names[1:] == [set(), {"model.layers.1.self_attn.q_proj.weight"}, {"model.layers.0.mlp.up_proj.weight"}]


class EngineLlama(nn.Module):
    """A llama as vLLM and SGLang have it: q, k and v are one matrix, as are gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.llama: Any = tiny_llama()
        self.stacked: dict[str, tuple[nn.Parameter, int]] = {}
        for parameter in self.llama.parameters():
            parameter.data.zero_()
        for number, layer in enumerate(self.llama.model.layers):
            for inner, parts in ((layer.self_attn, ("q", "k", "v")), (layer.mlp, ("gate", "up"))):
                matrices = [getattr(inner, f"{part}_proj") for part in parts]
                joint = nn.Parameter(torch.zeros(sum(matrix.out_features for matrix in matrices), 32))
                start = 0
                for part, matrix in zip(parts, matrices, strict=True):
                    place = "self_attn" if part in "qkv" else "mlp"
                    self.stacked[f"model.layers.{number}.{place}.{part}_proj.weight"] = joint, start
                    matrix.weight = nn.Parameter(joint.data[start : start + matrix.out_features])
                    start += matrix.out_features

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own, loaded = dict(self.llama.named_parameters()), set()
        for name, tensor in weights:
            if name in self.stacked:
                joint, start = self.stacked[name]
                joint[start : start + tensor.shape[0]].copy_(tensor)
            else:
                own[name].copy_(tensor)
            loaded.add(name)
        return loaded


def load_engine(config: dict[str, Any]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Logits of the model in training, and of an engine's model that has loaded its weights."""
    _, model, _ = trained(config, "lora")
    engine = EngineLlama()
    loaded = engine.load_weights(hfp.stream_parameters(model))
    batch = global_batch(0)["input_ids"]
    with torch.no_grad():
        return len(loaded), model(input_ids=batch).logits, engine.llama(input_ids=batch).logits


@VERSIONS
def test_engine_loads_a_stream_with_merged_adapters(two_ranks: Ranks, version: int) -> None:
    for num_loaded, logits, of_engine in two_ranks.run(load_engine, parallel_config("full_shard", version, 2)):
        assert num_loaded == 30
        torch.testing.assert_close(of_engine, logits, rtol=1e-5, atol=1e-6)


def send_to_reader(config: dict[str, Any], address: str, shared: str) -> float:
    """Rank 0 sends the weights to a reader, one tensor at a time. Returns the loss in training."""
    _, model, _ = trained(config, "tied")
    with Client(address) if dist.get_rank() == 0 else nullcontext() as reader:
        for name, tensor in hfp.stream_parameters(model):
            if reader is not None:
                in_shared_memory(shared, tensor.shape).copy_(tensor)
                reader.send((name, tensor.shape))
                assert reader.recv() == name
    with torch.no_grad():
        return float(loss_of(model, "tied", 5))


def in_shared_memory(path: str, shape: torch.Size) -> torch.Tensor:
    size = shape.numel()
    return torch.from_file(path, shared=True, size=size).view(shape)


def load_from_shared_memory(listener: Listener, shared: str) -> float:
    """What another process does: it loads the weights, and returns its loss."""
    own: Any = tiny_llama(tied=True)
    with listener.accept() as sender, torch.no_grad(), suppress(EOFError):
        while True:
            name, shape = sender.recv()
            own.get_parameter(name).copy_(in_shared_memory(shared, shape))
            sender.send(name)
    with torch.no_grad():
        return float(loss_of(own, "tied", 5))


def test_a_process_reads_a_stream_in_shared_memory(two_ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ThreadPoolExecutor(1) as thread:
        address, shared = f"{folder}/socket", f"{folder}/weights"
        with Listener(address) as listener:
            reading = thread.submit(load_from_shared_memory, listener, shared)
            losses = two_ranks.run(send_to_reader, parallel_config("full_shard", 2, 2), address, shared)
        assert losses == pytest.approx([reading.result(60)] * 2, rel=1e-6)
    with torch.no_grad():
        assert losses[0] != pytest.approx(float(loss_of(tiny_llama(tied=True), "tied", 5)), rel=1e-5)


def misuse(config: dict[str, Any]) -> dict[str, list[str]]:
    """The codes of what is refused, by kind, and of a stream after one that all ranks ended early."""
    _, model, _ = trained(config, "llama")
    inner: Any = model.model

    def all_of(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return lambda: list(hfp.stream_parameters(*args, **kwargs))

    def in_forward() -> None:
        hook = inner.layers[0].mlp.register_forward_hook(lambda *_: all_of(model)())
        try:
            loss_of(model, "llama", 0)
        finally:
            hook.remove()

    def in_block() -> None:
        with hfp.full_parameters(model):
            all_of(model)()

    iterator = hfp.stream_parameters(model)
    assert next(iterator)[1].numel()
    iterator.close()  # type: ignore[attr-defined]
    return {
        "dtype": codes_of(all_of(model, dtype="bf16")),
        "part": codes_of(all_of(inner.layers[0])),
        "block": codes_of(in_block),
        "arguments": codes_of(all_of(model, dtype=torch.bfloat16 if dist.get_rank() else None)),
        "allowed": codes_of(all_of(model)),
        "forward": codes_of(in_forward),
    }


@VERSIONS
def test_misuse_of_streams_is_refused(two_ranks: Ranks, version: int) -> None:
    first, second = two_ranks.run(misuse, parallel_config("full_shard", version, 2))
    assert first.pop("allowed") == second.pop("allowed") == []
    assert first.pop("arguments") == second.pop("arguments") == ["FSDP-E670"]
    assert first == second == {kind: ["FSDP-E308"] for kind in first}


def refuse_adapters(config: dict[str, Any], kind: str) -> tuple[list[str], set[str]]:
    """The codes for adapters that cannot be merged, and the names without the merge."""
    _, model, _ = trained(config, f"peft-{kind}")
    codes = codes_of(lambda: list(hfp.stream_parameters(model)))
    return codes, {name for name, _ in hfp.stream_parameters(model, merge_adapters=False)}


def test_prompts_are_streamed_without_a_merge_only(two_ranks: Ranks) -> None:
    for codes, names in two_ranks.run(refuse_adapters, parallel_config("full_shard", 2, 2), "prompt"):
        assert codes == ["FSDP-E631"]
        assert "prompt_encoder.default.embedding.weight" in names


def stream_to_trl(config: dict[str, Any]) -> tuple[set[str], bool]:
    """What TRL's ``VLLMGeneration`` sends of a sharded model with adapters."""
    from trl.generation.vllm_generation import VLLMGeneration

    accelerator, model, _ = trained(config, "lora")
    generation = VLLMGeneration.__new__(VLLMGeneration)  # its constructor needs a server or an engine
    generation.model = model
    generation.accelerator = accelerator
    sent = dict(generation._iter_named_params())
    expected = dict(hfp.stream_parameters(model))
    return set(sent), all(torch.equal(sent[name], tensor) for name, tensor in expected.items())


def test_trl_sends_a_stream_with_merged_adapters(two_ranks: Ranks) -> None:
    for names, are_equal in two_ranks.run(stream_to_trl, parallel_config("full_shard", 2, 2)):
        assert len(names) == 30
        assert "model.layers.0.self_attn.q_proj.weight" in names
        assert are_equal


def stream_unsharded() -> bool:
    model = tiny_llama()
    streamed = dict(hfp.stream_parameters(model))
    return all(torch.equal(streamed[name], parameter) for name, parameter in model.named_parameters())


def test_models_without_shards_are_streamed() -> None:
    assert stream_unsharded()
