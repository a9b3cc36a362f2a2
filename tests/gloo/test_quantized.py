"""Models that bitsandbytes has quantized: training equals one process, or the settings are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.training import differing

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from tests.gloo.test_loading import efficient_config
from tests.gloo.test_peft import BACKENDS, config_of
from tests.support.loading_runs import load_quantized, save_plain
from tests.support.peft_runs import prepare_quantized, quantized_reference, save_tiny_llama, train_quantized


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("storage", "dtype", "double"),
    [("bfloat16", "float32", True), slow("float32", "float32", False)],
)
def test_quantized_weights_train_as_in_one_process(
    two_ranks: Ranks, tmp_path: Path, storage: str, dtype: str, double: bool, backend: str
) -> None:
    save_tiny_llama(str(tmp_path))
    expected = two_ranks.run(quantized_reference, str(tmp_path), storage, dtype, double)[0]
    run = two_ranks.run(train_quantized, config_of(backend), str(tmp_path), storage, dtype, double)[0]
    for name in ("losses", "norms", "evaluations"):
        assert run[name] == pytest.approx(expected[name], rel=1e-4), name
    assert differing(run["report"]) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantized_weights_train_in_bf16(two_ranks: Ranks, tmp_path: Path, backend: str) -> None:
    save_tiny_llama(str(tmp_path))
    expected = quantized_reference(str(tmp_path), "float32", "float32", False)
    config = {**config_of(backend), "mixed_precision": "bf16"}
    run = two_ranks.run(train_quantized, config, str(tmp_path), "bfloat16", "bfloat16", False)[0]
    assert run["losses"] == pytest.approx(expected["losses"], rel=0.01)
    assert run["evaluations"] == pytest.approx(expected["evaluations"], rel=0.01)
    assert run["masters"] == {"torch.float32"}


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("storage", "precision", "code"), [("uint8", "no", "FSDP-E220"), ("float16", "bf16", "FSDP-E266")]
)
def test_quantized_weights_that_would_be_garbage_are_refused(
    two_ranks: Ranks, tmp_path: Path, backend: str, storage: str, precision: str, code: str
) -> None:
    save_tiny_llama(str(tmp_path))
    config = {**config_of(backend), "mixed_precision": precision}
    codes = two_ranks.run(prepare_quantized, config, str(tmp_path), storage, "float32")
    assert all(code in found for found in codes)


@pytest.mark.cpu_ranks("a quantized model on devices is whole on each of them by design, without FSDP-W660")
def test_quantized_model_is_whole_on_every_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    first, second = two_ranks.run(load_quantized, str(tmp_path), efficient_config())
    assert first[1] == second[1] == 0
    assert "FSDP-W660" in first[0] and "quantized (bitsandbytes)" in first[0]
