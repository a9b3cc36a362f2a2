"""The simulated accelerator finds what is wrong on a real device, and reports nothing that is correct."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import cases_device as cases
from tests.accelerator.accelerator_build import BACKEND, _build_module, available
from tests.support.ranks import Ranks


@pytest.mark.parametrize("order", ["event", "event.synchronize", "wait_stream", "synchronize"])
def test_ordered_streams_are_not_reported(device_rank: Ranks, order: str) -> None:
    assert device_rank.run(cases.two_streams, order) == [[]]


@pytest.mark.parametrize("order", ["none", "wrong stream"])
def test_race_between_streams_is_reported(device_rank: Ranks, order: str) -> None:
    assert device_rank.run(cases.two_streams, order) == [["race"]]


def test_reads_and_separate_parts_are_not_reported(device_rank: Ranks) -> None:
    assert device_rank.run(cases.two_reads) == [[]]
    assert device_rank.run(cases.two_parts) == [[]]


def test_race_names_operators_sizes_and_stack(device_rank: Ranks) -> None:
    [(text, stack)] = device_rank.run(cases.race_text)
    assert text.startswith("aten::add (read, 4000 bytes, stream ")
    assert "aten::zero_ (write, 4000 bytes, stream 0 of npu:0)" in text
    assert "race_text" in stack


@pytest.mark.parametrize(("wait", "kinds"), [("none", ["race"]), ("work", []), ("future", [])])
def test_use_of_collective_needs_wait(device_rank: Ranks, wait: str, kinds: list[str]) -> None:
    assert device_rank.run(cases.collective, wait) == [kinds]


@pytest.mark.parametrize(
    ("how", "kinds"),
    [("none", ["freed"]), ("record_stream", []), ("wait before free", []), ("wait before reuse", [])],
)
def test_free_needs_record_stream_or_wait(device_rank: Ranks, how: str, kinds: list[str]) -> None:
    assert device_rank.run(cases.free, how) == [kinds]


@pytest.mark.parametrize(
    ("wait", "arrived"), [("none", False), ("other stream", False), ("event", True), ("synchronize", True)]
)
def test_copy_to_host_arrives_after_wait(device_rank: Ranks, wait: str, arrived: bool) -> None:
    assert device_rank.run(cases.copy_to_host, wait) == [(not arrived, arrived)]


@pytest.mark.parametrize(("when", "kinds"), [("before", ["host memory"]), ("after", [])])
def test_change_of_host_memory_is_reported(device_rank: Ranks, when: str, kinds: list[str]) -> None:
    assert device_rank.run(cases.host_memory_changes, when) == [kinds]


def test_parameter_that_moves_is_not_reported(device_rank: Ranks) -> None:
    assert device_rank.run(cases.parameter_moves) == [[]]


def test_device_sees_copy_that_host_does_not_see(device_rank: Ranks) -> None:
    assert device_rank.run(cases.copy_there_and_back) == [float(cases.SIZE)]


def test_existing_memory_can_be_pinned(device_rank: Ranks) -> None:
    assert device_rank.run(cases.pinned_memory) == [
        {
            "before": False,
            "pin": True,
            "pinned": True,
            "again": False,
            "kinds": ["unpinned"],
            "after": False,
            "error": "the memory is not page-locked",
        }
    ]


def test_host_waits_are_listed(device_rank: Ranks) -> None:
    [(counts, num_bytes, stack)] = device_rank.run(cases.host_waits)
    assert counts == {
        "barrier": 1,
        "blocking copy to device": 1,
        "blocking copy to host": 1,
        "device.synchronize": 1,
        "event.synchronize": 1,
        "item": 1,
        "pageable copy to device": 1,
        "pageable copy to host": 1,
        "size depends on data": 1,
        "stream.synchronize": 1,
    }
    assert num_bytes == 4000
    assert "cases_device.py" in stack
    assert device_rank.run(cases.no_host_waits) == [{}]


def test_memory_is_counted_in_units_of_512_bytes(device_rank: Ranks) -> None:
    assert device_rank.run(cases.memory_counters) == [
        {"one byte": 512, "two tensors": 1536, "with a view": 1536, "freed": 0, "peak": 1536}
    ]


def test_allocation_above_limit_raises_out_of_memory(device_rank: Ranks) -> None:
    assert device_rank.run(cases.memory_limit) == [
        {
            "free": 4096,
            "messages": [
                "NPU out of memory. Tried to allocate 4.50 KiB. NPU 0",
                "NPU out of memory. Tried to allocate 8.00 KiB. NPU 0",
            ],
            "fits": 1024,
            "num_ooms": 2,
        }
    ]


def test_random_numbers_follow_state_of_device(device_rank: Ranks) -> None:
    [result] = device_rank.run(cases.random_numbers)
    assert all(result.values()), result


def test_autocast_selects_dtypes(device_rank: Ranks) -> None:
    assert device_rank.run(cases.autocast_dtypes) == [["torch.bfloat16", "torch.float32", "torch.float32"]]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("two devices", "Expected all tensors to be on the same device"),
        ("two devices in a matrix product", "Expected all tensors to be on the same device"),
        ("ordinal", "invalid device ordinal: 5"),
        ("set_device", "invalid device ordinal: 5"),
        ("collective on the cpu", "supports only tensors of its device"),
    ],
)
def test_wrong_device_raises_error(device_rank: Ranks, case: str, message: str) -> None:
    [found] = device_rank.run(cases.error_of, case)
    assert message in found


@pytest.mark.parametrize("case", ["number on the cpu", "index on the cpu"])
def test_numbers_and_indices_may_be_on_cpu(device_rank: Ranks, case: str) -> None:
    assert device_rank.run(cases.error_of, case) == [""]


def test_complex_tensors_work(device_rank: Ranks) -> None:
    assert device_rank.run(cases.complex_numbers) == [[1.0] * 12]


def test_process_without_backend_folder_has_no_device() -> None:
    import torch

    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert not hasattr(torch, "npu")


_VISIBLE = """
import multiprocessing, torch, torch_npu
def use():
    torch.ones(1, device="npu")
def child():
    process = multiprocessing.get_context("fork").Process(target=use)
    process.start()
    process.join()
    return process.exitcode
unused = child()
torch.manual_seed(1)
one = torch.rand(3, device="npu:1")
torch.npu.set_rng_state(torch.npu.get_rng_state(1), 0)
same = torch.equal(torch.rand(3, device="npu:0").cpu(), torch.rand(3, device="npu:1").cpu())
print([torch.npu.device_count(), torch_npu.physical_devices(), same, unused, child() != 0])
"""
_SECOND = """
import torch
from accelerate import PartialState
from hf_fsdp_plugin.devices import DEVICES, available_device
device = available_device()
state = PartialState()
print([device.type, device.process_group_backend, device.type in DEVICES, str(state.device), state.backend])
print([hasattr(torch.sdaa, name) for name in ("get_device_properties", "mem_get_info", "get_device_name", "Event")])
print([torch.sdaa.device_count(), hasattr(torch, "npu")])
"""


def _outputs(script: str, **variables: str) -> list[list[object]]:
    """The lists that a script prints in a process that has the device."""
    if reason := available():
        pytest.skip(f"no simulated accelerator: {reason}")
    path = os.pathsep.join([str(BACKEND), str(BACKEND.parents[2])])
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = result.stdout.replace("'", '"').replace("True", "true").replace("False", "false").replace("(", "[")
    return [json.loads(line.replace(")", "]")) for line in lines.splitlines()]


def test_visible_devices_limit_a_process() -> None:
    # The third index is invalid and hides the rest. Each device has random numbers of its own. A process that is forked
    # before the first use of the device may use it, and not one that is forked later.
    variables = {"SIM_ACCELERATOR_COUNT": "4", "ASCEND_RT_VISIBLE_DEVICES": "3,1,7,0"}
    assert _outputs(_VISIBLE, **variables) == [[2, [3, 1], True, 0, True]]


def test_device_type_without_row_is_supported() -> None:
    variables = {
        "SIM_ACCELERATOR_NAME": "sdaa", "SDAA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "false",
    }  # fmt: skip
    assert _outputs(_SECOND, **variables) == [
        ["sdaa", "cpu:gloo,sdaa:tccl", False, "sdaa:0", "tccl"],
        [False, False, False, True],
        [1, False],
    ]


def test_missing_compiler_skips_except_in_ci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build = _build_module()
    monkeypatch.setattr(build, "library_path", lambda: tmp_path / "library.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("CI", raising=False)
    assert build.available() == "there is no C++ compiler (no-such-compiler)"
    monkeypatch.setenv("CI", "true")
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        build.available()
    (tmp_path / "library.so").touch()
    assert build.available() == ""
