"""Names and shapes of models that are found without torch, compared with the models on the meta device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from hf_fsdp_plugin.plan.meta_model import meta_model
from tests.support.model_families import FAMILIES

WITHOUT_OUTLINE = {"mamba"}
"""Its parameters have the shapes of computed tensors."""

PROGRAM = """
import json, sys
from pathlib import Path
from hf_fsdp_plugin.checkpoint.checking.model_outline import model_outline
for folder in sys.argv[1:]:
    try:
        found = model_outline(Path(folder))
    except Exception:
        found = None
    print(json.dumps(found))
assert "torch._C" not in sys.modules and "numpy._core" not in sys.modules
"""


def outlines(folders: Iterable[Path]) -> list[dict[str, list[int]] | None]:
    """Return the outline of each config, all of them found by one process."""
    command = [sys.executable, "-c", PROGRAM, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=os.environ)
    return [json.loads(line) for line in done.stdout.splitlines()]


def shapes(folder: Path) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in meta_model(folder).state_dict().items()}


def test_outlines_equal_the_models_of_families(tmp_path: Path) -> None:
    for name, family in FAMILIES.items():
        config = family.model.config_class(**family.config)
        config.architectures = [family.model.__name__]
        config.save_pretrained(tmp_path / name)
    found = dict(zip(FAMILIES, outlines(tmp_path / name for name in FAMILIES), strict=True))
    assert {name for name, outline in found.items() if outline is None} == WITHOUT_OUTLINE
    for name in FAMILIES.keys() - WITHOUT_OUTLINE:
        assert found[name] == shapes(tmp_path / name), name


def test_config_values_change_the_outline(tmp_path: Path) -> None:
    """Values that add, remove or resize tensors, and that come from older versions of Transformers."""
    base = json.loads(FAMILIES["llama"].model.config_class(**FAMILIES["llama"].config).to_json_string())
    base["architectures"] = ["LlamaForCausalLM"]
    changes: list[dict[str, object]] = [
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 2, "head_dim": 16},
        {"num_hidden_layers": 5, "tie_word_embeddings": True},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3},
        {"architectures": ["LlamaModel"]},
    ]
    for number, change in enumerate(changes):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text(json.dumps(base | change))
    folders = [tmp_path / str(number) for number in range(len(changes))]
    assert outlines(folders) == [shapes(folder) for folder in folders]


def test_unknown_parts_have_no_outline(tmp_path: Path) -> None:
    """Custom code, quantization, another architecture than the config's, and tied weights of different shapes."""
    base = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    configs = [
        {**base, "auto_map": {"AutoConfig": "code.Config"}},
        {**base, "quantization_config": {"quant_method": "bitsandbytes"}},
        {**base, "architectures": ["GPT2LMHeadModel"]},
        {**base, "architectures": ["LlamaAttention"]},
        {**base, "architectures": None},
        {**base, "model_type": "no such"},
        {"model_type": "ovis2", "architectures": ["Ovis2ForConditionalGeneration"], "hidden_size": 8},
    ]
    for number, config in enumerate(configs):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text(json.dumps(config))
    assert outlines(tmp_path / str(number) for number in range(len(configs))) == [None] * len(configs)


@pytest.mark.slow
def test_no_outline_of_transformers_differs(tmp_path: Path) -> None:
    """Every causal language model and base model of the installed version, with the defaults of its config."""
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    expected: dict[Path, dict[str, list[int]]] = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        for config_class in mapping.keys():  # noqa: SIM118 (items() raises for a class that is not there)
            try:
                model_class = mapping[config_class]
                folder = tmp_path / f"{config_class.__name__}-{model_class.__name__}"
                config = config_class(num_hidden_layers=3)
                config.architectures = [model_class.__name__]
                config.save_pretrained(folder)
                expected[folder] = shapes(folder)
            except Exception:  # some models cannot be built from the defaults
                continue
    found = outlines(expected)
    different = [
        folder.name for folder, own in zip(expected, found, strict=True) if own not in (None, expected[folder])
    ]
    assert different == []
    num_found = sum(own is not None for own in found)
    assert num_found > 0.6 * len(found) > 200, (transformers.__version__, num_found, len(found))
