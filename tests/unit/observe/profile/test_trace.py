"""Chrome traces as Kineto writes them: gloo on the CPU, and NCCL on CUDA streams."""

import json

import pytest

from hf_fsdp_plugin.tools.profile.rank_profile import profile_of, read_trace

PID = 4242
RANK = {"rank": 0, "world_size": 8, "host": "a", "device": "cuda"}


def span(cat: str, name: str, start: float, end: float, tid: int = PID, **args) -> dict:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": PID, "tid": tid, "ts": start, "dur": round(end - start, 3),
        "args": args,
    }  # fmt: skip


def launch(start: float, correlation: int, tid: int = PID) -> dict:
    args = {"External id": correlation, "cbid": 211, "correlation": correlation}
    return span("cuda_runtime", "cudaLaunchKernel", start, start + 4, tid, **args)


def kernel(name: str, start: float, end: float, stream: int, correlation: int, cat: str = "kernel", **more) -> dict:
    args = {"External id": correlation, "device": 0, "context": 1, "stream": stream, "correlation": correlation}
    return span(cat, name, start, end, stream, **args, **more) | {"pid": 0}


def nccl(name: str, sent: int, received: int) -> dict:
    return {
        "Collective name": name, "In msg nelems": sent, "Out msg nelems": received, "Group size": 8,
        "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", "Process Group Name": "1",
        "Process Group Description": "mesh_fsdp", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
    }  # fmt: skip


def cuda_events() -> list[dict]:
    """One step in microseconds: the CPU launches everything in 400, the device needs 1000."""
    autograd = 4300
    return [
        {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "ts": 0, "args": {"name": "python"}},
        span("user_annotation", "hf_fsdp::step", 0, 0.001),
        span("user_annotation", "hf_fsdp::forward", 1, 200),
        span("user_annotation", "FSDP::all_gather (model.layers.0)", 5, 40),
        span("cpu_op", "c10d::_allgather_base_", 10, 30, **{"Input Dims": [[80], [10]], "Input type": ["float"] * 2}),
        span("cpu_op", "record_param_comms", 12, 28, **nccl("_allgather_base", 1000, 8000)),
        launch(14, 71),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20, 120, 28, 71,
               **nccl("_allgather_base", 1000, 8000)),
        span("cpu_op", "aten::mm", 60, 90),
        launch(70, 72),
        kernel("sm90_xmma_gemm_bf16bf16", 120, 500, 7, 72),
        span("user_annotation", "hf_fsdp::backward", 200, 350),
        launch(220, 73, autograd),
        kernel("sm90_xmma_gemm_bf16bf16", 500, 800, 7, 73),
        span("user_annotation", "FSDP::post_backward_reduce (model.layers.0)", 260, 300, autograd),
        launch(270, 74, autograd),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 700, 900, 32, 74,
               **nccl("_reduce_scatter_base", 8000, 1000)),
        launch(310, 76, autograd),
        kernel("Memcpy DtoH (Device -> Pinned)", 850, 900, 40, 76, cat="gpu_memcpy"),
        span("user_annotation", "Optimizer.step#AdamW.step", 350, 400),
        launch(360, 75),
        kernel("void at::native::(anonymous namespace)::multi_tensor_apply_kernel", 900, 1000, 7, 75),
        span("gpu_user_annotation", "hf_fsdp::forward", 20, 500, 7),
        span("user_annotation", "hf_fsdp::step", 399, 399.001),
    ]  # fmt: skip


def write(path, events: list[dict]):
    tree = {
        "schemaVersion": 1, "deviceProperties": [], "baseTimeNanoseconds": 1_000_000_000_000_000_000,
        "displayTimeUnit": "ms", "traceEvents": events, "traceName": str(path),
    }  # fmt: skip
    path.write_text(json.dumps(tree))
    return path


@pytest.fixture
def cuda(tmp_path):
    return read_trace(write(tmp_path / "trace.json", cuda_events()))


def test_kernels_have_launch_and_collective(cuda):
    gather, gemm = cuda.kernels[:2]
    assert gather.nccl_kind == "all_gather"
    assert (gather.launched - 1e9) * 1e6 == pytest.approx(14, abs=0.3)
    assert (gemm.nccl_kind, gemm.copies) == (None, False)
    assert [k.copies for k in cuda.kernels if k.name.startswith("Memcpy")] == [True]


def test_cuda_phases_follow_the_device_and_calls_their_launch(cuda):
    profile = profile_of(cuda, **RANK)
    micro = {phase: round(times.seconds * 1e6) for phase, times in profile.times.items()}
    assert micro == {"other": 1, "forward": 499, "backward": 400, "optimizer": 100}
    forward, backward = profile.times["forward"], profile.times["backward"]
    assert [round(v * 1e6) for v in (forward.compute, forward.communication, forward.exposed)] == [380, 100, 100]
    assert [round(v * 1e6) for v in (backward.compute, backward.communication, backward.exposed)] == [300, 200, 100]
    assert [(call.kind, call.unit, call.phase) for call in profile.calls] == [
        ("all_gather", "model.layers.0", "forward"),
        ("reduce_scatter", "model.layers.0", "backward"),
    ]


def test_truncated_trace_is_refused(tmp_path):
    path = write(tmp_path / "trace.json", cuda_events())
    path.write_text(path.read_text()[:-40])
    with pytest.raises(ValueError):
        read_trace(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="traceEvents"):
        read_trace(path)


def test_gloo_collectives_join_call_and_wait(tmp_path):
    events = [
        span("user_annotation", "hf_fsdp::step", 0, 0.001),
        span("cpu_op", "c10d::allgather_", 10, 20),
        span("user_annotation", "gloo:all_gather", 15, 60, 9),
        span("user_annotation", "hf_fsdp::wait", 21, 61),
        span("cpu_op", "aten::mul", 62, 80),
        span("user_annotation", "hf_fsdp::step", 90, 90.001),
    ]
    (call,) = profile_of(read_trace(write(tmp_path / "trace.json", events)), **RANK).calls
    assert (call.kind, call.unit, call.phase) == ("all_gather", None, "other")
    assert (call.seconds * 1e6, call.exposed * 1e6) == (pytest.approx(50, abs=1), pytest.approx(50, abs=1))
