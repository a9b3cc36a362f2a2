"""Numbers that a forward receives keep their dtype in mixed precision, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp_plugin.backends.sharding.forwards import cast_activations
from tests.gloo import cases_inputs as cases
from tests.support.ranks import Ranks

VERSIONS = pytest.mark.parametrize("version", [1, 2])
BF16, FP32 = "torch.bfloat16", "torch.float32"


@VERSIONS
def test_only_activations_are_cast(two_ranks: Ranks, version: int) -> None:
    for received in two_ranks.run(cases.received_by_units, version):
        root, inner = received["root"], received["inner"]
        dtypes = {name: dtype for name, (dtype, _) in root.items()}
        activations = dict.fromkeys(("hidden", "in_dataclass", "in_list"), BF16)
        assert dtypes == {**activations, "count": FP32, "time_steps": FP32, "weight": FP32, "ids": "torch.int64"}
        assert root["count"][1] == inner["count"][1] == [261.0]
        assert root["time_steps"][1] == inner["time_steps"][1] == pytest.approx([999.0, 0.3], rel=1e-7)
        assert root["weight"][1] == pytest.approx([70000.0, 0.1], rel=1e-7)
        assert inner["hidden"][0] == BF16
        assert (
            received["reason"]
            == "activations in hidden, nested are cast to it, numbers in count, nested keep their dtype"
        )


@VERSIONS
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_steps": 20},
        {"max_steps": 10, "gradient_accumulation_steps": 2},
        {"max_steps": 5, "average_tokens_across_devices": False},
    ],
    ids=["20 steps", "accumulation", "own tokens"],
)
def test_divisors_of_the_loss_equal_those_of_ddp(
    two_ranks: Ranks, tmp_path: Path, version: int, arguments: dict[str, Any]
) -> None:
    ours = two_ranks.run(cases.divisors, str(tmp_path), {"fsdp_version": version}, bf16=True, **arguments)
    ddp = two_ranks.run(cases.divisors, str(tmp_path), None, **arguments)
    for one, other in zip(ours, ddp, strict=True):
        assert [number for _, number in one["divisors"]] == [number for _, number in other["divisors"]]
        assert {dtype for dtype, _ in one["divisors"]} == {dtype for dtype, _ in other["divisors"]}
        assert one["losses"] == pytest.approx(other["losses"], rel=5e-3)  # bf16
    numbers = {number for _, number in ours[0]["divisors"]}
    assert len(numbers) > 3 and any(number % 4 for number in numbers)  # not exact in bf16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_more_labels_than_fp16_can_count(dtype: torch.dtype) -> None:
    """CPU ranks have no fp16 training."""
    hidden, count = torch.ones(2, 3), torch.tensor(70_001.0)
    args, kwargs = cast_activations(((hidden,), {"num_items_in_batch": count, "more": [{"count": count}]}), dtype)
    assert args[0].dtype == dtype
    assert kwargs["num_items_in_batch"] is count and kwargs["more"][0]["count"] is count
