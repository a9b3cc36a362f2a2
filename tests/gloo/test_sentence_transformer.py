"""A Trainer whose class writes checkpoints with its own methods: all of its folders can be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config, tiny_bert

pytest.importorskip("sentence_transformers")

from tests.gloo import cases_sentence_transformer as cases
from tests.gloo import cases_submodule_calls
from tests.gloo.cases_trl import write_model


def assert_loads(folder: Path, expected: dict[str, torch.Tensor], base: Path) -> None:
    """Load a folder with sentence-transformers, and compare weights and embeddings with those in memory."""
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(str(folder), device="cpu")
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    in_memory = cases.make_model(base)
    in_memory.load_state_dict(expected)
    sentences = ["the red cat sings", "a small house near the bird"]
    assert (loaded.encode(sentences) == in_memory.encode(sentences)).all()


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        slow(1, "SHARDED"),
        slow(2, "FULL"),
        slow(2, "SHARDED"),
    ],
)
def test_every_saved_folder_loads(two_ranks: Ranks, tmp_path: Path, version: int, kind: str) -> None:
    result = two_ranks.run(cases.train, str(tmp_path), version, kind)[0]
    base = tmp_path / "base"
    assert result["saved"].keys() == {2, 4}
    for step, weights in result["saved"].items():
        assert_loads(tmp_path / "run" / f"checkpoint-{step}", weights, base)
    best = result["saved"][result["best_step"]]
    assert all(torch.equal(result["best"][name], tensor) for name, tensor in best.items())
    assert_loads(tmp_path / "final", result["best"], base)
    assert_loads(tmp_path / "direct", result["best"], base)
    whole, resumed = result["losses"]
    assert resumed[-2:] == pytest.approx(whole[-2:], rel=1e-6)
    last = result["saved"][4]
    assert all(torch.allclose(result["resumed"][name], tensor, atol=1e-6) for name, tensor in last.items())


@pytest.mark.parametrize("version", [1, 2])
def test_sentence_transformer_encodes_as_in_one_process(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    write_model(str(tmp_path), tiny_bert())
    config = parallel_config("full_shard", version, 2, fsdp_transformer_layer_cls_to_wrap="BertLayer")
    for found, expected in two_ranks.run(cases_submodule_calls.encode, config, str(tmp_path)):
        torch.testing.assert_close(found, expected)
