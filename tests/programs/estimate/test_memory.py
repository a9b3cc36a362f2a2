"""The part of tests/unit/estimate/test_memory.py that starts processes or computes for seconds."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_fsdp_plugin.tools.plan.estimate.memory.step import pinned_bytes
from tests.unit.estimate.test_memory import QUICK, estimate


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("version", [1, 2])
def test_skipped_layers_are_counted_as_if_they_had_run(version, checkpointing, monkeypatch):
    options = {"version": version, "activation_checkpointing": checkpointing, "mixed_precision": "bf16", "ranks": 4}
    skipped = estimate(**options)
    monkeypatch.setattr("hf_fsdp_plugin.tools.plan.estimate.memory.meta_pass._MIN_LAYERS", 100)
    assert estimate(**options).peak == skipped.peak


@QUICK
@given(
    micro_batch=st.integers(1, 4),
    seq_len=st.integers(8, 64),
    more=st.tuples(st.integers(0, 3), st.integers(0, 64)),
    checkpointing=st.sampled_from(["none", "full"]),
)
def test_peak_grows_with_batch_and_length(micro_batch, seq_len, more, checkpointing):
    small = estimate(2, micro_batch, seq_len, activation_checkpointing=checkpointing)
    large = estimate(2, micro_batch + more[0], seq_len + more[1], activation_checkpointing=checkpointing)
    assert large.peak.bytes >= small.peak.bytes


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler: apt-get install g++")
def test_pinned_memory_is_rounded_as_by_torch(tmp_path):
    """The rule is in a header of the installed torch, and so is its function, which is compiled here."""
    include = Path(torch.__file__).parent / "include"
    assert "return c10::llvm::PowerOf2Ceil(size);" in (include / "ATen/core/CachingHostAllocator.h").read_text()
    source, program = tmp_path / "rounded.cpp", tmp_path / "rounded"
    source.write_text(
        "#include <c10/util/llvmMathExtras.h>\n#include <cstdio>\n#include <cstdlib>\n"
        "int main(int n, char** sizes) { for (int i = 1; i < n; i++)"
        ' std::printf("%llu ", (unsigned long long)c10::llvm::PowerOf2Ceil(std::strtoull(sizes[i], nullptr, 10))); }'
    )
    subprocess.run(["g++", "-std=c++20", f"-I{include}", str(source), "-o", str(program)], check=True, timeout=120)
    sizes = [0, 1, 2, 3, 4096, 4097, (1 << 30) - 1, 1 << 30, (1 << 30) + 1, 3 << 40]
    found = subprocess.run([program, *map(str, sizes)], capture_output=True, text=True, check=True, timeout=60).stdout
    assert [int(text) for text in found.split()] == [pinned_bytes(size) for size in sizes]
