"""The table of device types. Accelerators are tested with a recording stand-in for their torch module."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_fsdp_plugin import devices
from hf_fsdp_plugin.devices import DEVICES
from hf_fsdp_plugin.problems import SpecError

ACCELERATORS = [name for name in DEVICES if name != "cpu"]


class Recorder:
    """Stands in for ``torch.cuda`` or ``torch.xpu``: records each call and returns 7."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((name, *args))
            return self if name == "cudart" else 7

        return call


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: recorder)
    return recorder


@pytest.mark.parametrize("name", DEVICES)
def test_collectives_are_those_of_torch(name: str):
    assert dist.Backend.default_device_backend_map[name] == DEVICES[name].collectives


@pytest.mark.parametrize("name", ACCELERATORS)
def test_torch_module_has_every_function_used(name: str):
    module = torch.get_device_module(name)
    used = (
        "is_available is_initialized device_count current_device set_device synchronize max_memory_allocated "
        "reset_peak_memory_stats get_rng_state set_rng_state"
    )
    assert [function for function in used.split() if not callable(getattr(module, function, None))] == []


def test_process_group_backend_serves_cpu_tensors():
    assert DEVICES["cpu"].process_group_backend == "gloo"
    assert DEVICES["cuda"].process_group_backend == "cpu:gloo,cuda:nccl"
    assert DEVICES["xpu"].process_group_backend == "cpu:gloo,xpu:xccl"


@pytest.mark.parametrize("name", ACCELERATORS)
def test_accelerator_calls_its_torch_module(name: str, recorder: Recorder):
    device = DEVICES[name]
    device.set_current(3)
    device.set_rng_state("state")
    device.synchronize()
    device.reset_peak_memory()
    assert (device.count(), device.current_index(), device.peak_memory(), device.get_rng_state()) == (7, 7, 7, 7)
    assert device.is_initialized()
    assert recorder.calls == [
        ("set_device", 3),
        ("set_rng_state", "state"),
        ("synchronize",),
        ("reset_peak_memory_stats",),
        ("device_count",),
        ("current_device",),
        ("max_memory_allocated",),
        ("get_rng_state",),
        ("is_available",),
        ("is_initialized",),
    ]


def test_cuda_pins_and_unpins_existing_memory(recorder: Recorder):
    memory = torch.zeros(8, dtype=torch.uint8)
    assert not DEVICES["cuda"].pin(memory), "7 is not cudaSuccess"
    DEVICES["cuda"].unpin(memory)
    assert recorder.calls == [
        ("cudart",),
        ("cudaHostRegister", memory.data_ptr(), 8, 0),
        ("cudart",),
        ("cudaHostUnregister", memory.data_ptr()),
    ]


def test_cpu_measures_its_process():
    cpu = DEVICES["cpu"]
    assert cpu.peak_memory() > 10 << 20
    assert (cpu.count(), cpu.current_index(), cpu.is_initialized()) == (0, 0, True)
    assert not cpu.pin(torch.zeros(8))


def test_cpu_rng_state_can_be_restored():
    state = DEVICES["cpu"].get_rng_state()
    first = torch.rand(4)
    DEVICES["cpu"].set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


@pytest.mark.parametrize(("found", "expected"), [(None, "cpu"), ("mps", "cpu"), ("cuda", "cuda"), ("npu", "npu")])
def test_accelerator_type_is_that_of_torch(found: str | None, expected: str, monkeypatch: pytest.MonkeyPatch):
    accelerator = None if found is None else SimpleNamespace(type=found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    assert devices.accelerator_type() == expected
    assert devices.available_device() is DEVICES.get(expected, DEVICES["cpu"])


def test_unsupported_device_is_refused():
    assert devices.get_device("xpu").type == "xpu"
    with pytest.raises(SpecError) as refusal:
        devices.get_device("npu")
    (problem,) = refusal.value.problems
    assert problem.code == "FSDP-E301"
    assert all(name in problem.message for name in ("npu", *DEVICES))
