"""``merge --dtype`` keeps in fp32 what the model's class keeps in fp32 at this dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from tests.support.merge_inputs import MODEL, codes, messages
from tests.support.tiny import tiny_deepseek, tiny_llama, tiny_t5


def save(folder: Path, model: Any) -> Path:
    """Write the checkpoint of a model as ``save_state`` does without the plugin, and its config."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / MODEL, no_dist=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "dtype", "kept"),
    [
        (tiny_deepseek, "bfloat16", ("mlp.gate.weight", "e_score_correction_bias")),
        (tiny_deepseek, "float32", ()),
        (tiny_t5, "bfloat16", ()),
        (tiny_t5, "float16", ("wo.weight",)),
        (tiny_llama, "bfloat16", ()),
    ],
)
def test_weights_that_the_model_keeps_in_fp32_stay(
    make: Callable[[], Any], dtype: str, kept: tuple[str, ...], tmp_path: Path
) -> None:
    model, out = make(), tmp_path / "out"
    merged = merge(save(tmp_path / "run", model), out, MergeOptions(dtype=dtype, verify=True))
    dtypes = {name: tensor.dtype for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    wanted = {name: torch.float32 if name.endswith(kept) else getattr(torch, dtype) for name in dtypes}
    assert dtypes == wanted and any(name.endswith(kept) for name in dtypes) == bool(kept)
    assert ("FSDP-N443" in codes(merged)) == bool(kept)
    assert not kept or kept[0] in messages(merged)
    loaded = type(model).from_pretrained(out)
    assert {name: p.dtype for name, p in loaded.named_parameters() if name in dtypes}.items() <= dtypes.items()
