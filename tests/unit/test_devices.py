"""The table of device types. A mock that records calls replaces the torch module of accelerators."""

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
    """A mock of ``torch.cuda`` or ``torch.xpu`` that records each call and returns ``result``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result = 7

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            self.calls.append((name, *args))
            return self if name in ("cudart", "Event") else self.result

        return call


@pytest.mark.parametrize("name", DEVICES)
def test_collectives_match_torch(name: str):
    assert dist.Backend.default_device_backend_map[name] == DEVICES[name].collectives


def test_process_group_backend_serves_cpu_tensors():
    assert DEVICES["cpu"].process_group_backend == "gloo"
    assert DEVICES["cuda"].process_group_backend == "cpu:gloo,cuda:nccl"
    assert DEVICES["xpu"].process_group_backend == "cpu:gloo,xpu:xccl"


@pytest.mark.parametrize("name", ACCELERATORS)
def test_accelerator_calls_functions_of_its_torch_module(name: str, monkeypatch: pytest.MonkeyPatch):
    module, device = torch.get_device_module(name), DEVICES[name]
    recorder = Recorder()
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: recorder)
    device.set_current(3)
    device.synchronize()
    device.record_event().synchronize()
    assert (device.count(), device.current_index(), device.peak_memory(), device.is_initialized()) == (7, 7, 7, 7)
    calls = [("set_device", 3), ("synchronize",), ("Event",), ("record",), ("synchronize",)]
    assert recorder.calls[:5] == calls
    known = [getattr(module, name, None) or getattr(module.Event, name, None) for name, *_ in recorder.calls]
    assert all(map(callable, known))


def test_cuda_pins_and_unpins_existing_memory(monkeypatch: pytest.MonkeyPatch):
    recorder, memory = Recorder(), torch.zeros(8, dtype=torch.int32)
    launched: list[Any] = []
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: recorder)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: launched.append(device))
    recorder.result = 0
    assert DEVICES["cuda"].pin(memory)
    DEVICES["cuda"].unpin(memory)
    calls = [call for call in recorder.calls if call != ("cudart",)]
    assert calls == [("cudaHostRegister", memory.data_ptr(), 32, 0), ("cudaHostUnregister", memory.data_ptr())]
    assert launched == []


def test_failed_pin_leaves_no_error_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch):
    recorder, memory = Recorder(), torch.zeros(8, dtype=torch.uint8)
    pending = []

    def launch(*sizes: Any, device: str) -> None:
        """As torch does at a launch: raise the error that the runtime has kept, and clear it."""
        if pending:
            raise RuntimeError(f"CUDA error: {pending.pop()}")

    monkeypatch.setattr(torch, "get_device_module", lambda device_type: recorder)
    monkeypatch.setattr(torch, "zeros", launch)
    for call in (DEVICES["cuda"].pin, DEVICES["cuda"].unpin):
        pending.append("invalid argument")
        assert not call(memory), "7 is not cudaSuccess"
        launch(device="cuda")


def test_cpu_measures_its_process():
    cpu = DEVICES["cpu"]
    assert cpu.peak_memory() > 10 << 20
    assert (cpu.count(), cpu.current_index(), cpu.is_initialized()) == (0, 0, True)
    assert not cpu.pin(torch.zeros(8))


@pytest.mark.parametrize(("found", "expected"), [(None, "cpu"), ("mps", "cpu"), ("cuda", "cuda"), ("npu", "npu")])
def test_accelerator_type_matches_torch(found: str | None, expected: str, monkeypatch: pytest.MonkeyPatch):
    accelerator = None if found is None else SimpleNamespace(type=found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    assert devices.accelerator_type() == expected
    assert devices.available_device() is DEVICES.get(expected, DEVICES["cpu"])


def register(monkeypatch: pytest.MonkeyPatch, name: str, module: Any, collectives: str = "hccl") -> None:
    """Make torch know a device type, as the package of its vendor does."""
    modules = {name: module}
    original = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda given: modules.get(given) or original(given))
    monkeypatch.setitem(dist.Backend.default_device_backend_map, name, collectives)


@pytest.mark.parametrize(
    ("name", "variable"), [("npu", "ASCEND_RT_VISIBLE_DEVICES"), ("mlu", "MLU_VISIBLE_DEVICES"), ("hpu", "")]
)
def test_registered_device_type_works_without_a_row(name: str, variable: str, monkeypatch: pytest.MonkeyPatch):
    recorder = Recorder()
    register(monkeypatch, name, recorder)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: SimpleNamespace(type=name))
    device = devices.available_device()
    assert (device.type, device.process_group_backend) == (name, f"cpu:gloo,{name}:hccl")
    assert device.visible_variable == variable
    assert devices.get_device(name) == device and devices.unsupported_device(name) is None
    device.set_current(2)
    assert (device.count(), device.peak_memory(), recorder.calls[0]) == (7, 7, ("set_device", 2))
    assert not device.pin(torch.zeros(1)), "only the memory of CUDA devices can be pinned after allocation"


@pytest.mark.parametrize(("name", "collectives"), [("mps", "gloo"), ("npu", "")])
def test_unsupported_device_is_refused(name: str, collectives: str, monkeypatch: pytest.MonkeyPatch):
    register(monkeypatch, name, Recorder(), collectives)
    assert devices.get_device("xpu").type == "xpu"
    with pytest.raises(SpecError) as refusal:
        devices.get_device(name)
    (problem,) = refusal.value.problems
    assert problem.code == "FSDP-E301"
    assert all(text in problem.message for text in (name, "no backend for collectives", *DEVICES))


def test_unknown_memory_of_a_device_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutProperties(Recorder):
        def __getattr__(self, name: str) -> Any:
            if name == "get_device_properties":
                raise AttributeError(name)
            return super().__getattr__(name)

    register(monkeypatch, "npu", WithoutProperties())
    assert devices.get_device("npu").total_memory() is None
    assert (DEVICES["cpu"].total_memory() or 0) > 1 << 30
