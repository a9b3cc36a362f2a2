"""The tiny clone of a model: its classes, units and size, for real sizes of many architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.tools.meta_model import on_meta
from hf_fsdp_plugin.tools.preflight.clone import (
    MAX_PARAMS,
    classes_of,
    config_parts,
    find_clone,
    num_params_of,
    small_config,
    write_clone,
)
from hf_fsdp_plugin.tools.preflight.training import check_export
from tests.support.model_families import FAMILIES

LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": 128001,
    "pad_token_id": 128004,
}  # fmt: skip
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-70b": (hf.LlamaForCausalLM, LLAMA_70B),
    "llama-tied": (hf.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mixtral": (hf.MixtralForCausalLM, {}),
    "bert": (hf.BertForMaskedLM, {}),
    "bert-classifier": (hf.BertForSequenceClassification, {}),
    "t5": (hf.T5ForConditionalGeneration, {"decoder_start_token_id": 0}),
    "gpt2": (hf.GPT2LMHeadModel, {}),
    "gpt-neox": (hf.GPTNeoXForCausalLM, {}),
    "gpt-neo": (hf.GPTNeoForCausalLM, {}),
    "gpt-j": (hf.GPTJForCausalLM, {}),
    "bart": (hf.BartForConditionalGeneration, {}),
    "bloom-7b": (hf.BloomForCausalLM, {"hidden_size": 4096, "n_head": 32, "n_layer": 30}),
    "opt": (hf.OPTForCausalLM, {}),
    "falcon": (hf.FalconForCausalLM, {}),
    "mistral": (hf.MistralForCausalLM, {}),
    "qwen3": (hf.Qwen3ForCausalLM, {}),
    "qwen3-moe": (hf.Qwen3MoeForCausalLM, {}),
    "gemma": (hf.GemmaForCausalLM, {}),
    "phi3": (hf.Phi3ForCausalLM, {}),
    "deepseek-v3": (hf.DeepseekV3ForCausalLM, {}),
    "gpt-oss": (hf.GptOssForCausalLM, {}),
    "mamba": (hf.MambaForCausalLM, {}),
    "distilbert": (hf.DistilBertForMaskedLM, {}),
    "electra": (hf.ElectraForMaskedLM, {}),
    "whisper": (hf.WhisperForConditionalGeneration, {}),
    "vit": (hf.ViTForImageClassification, {}),
    "swin": (hf.SwinForImageClassification, {}),
    "clip": (hf.CLIPModel, {}),
    "llava": (hf.LlavaForConditionalGeneration, {}),
    "qwen2-vl": (hf.Qwen2VLForConditionalGeneration, {}),
}
SPEC = load_spec({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, environ={})


def unit_classes(model: Any) -> set[str]:
    return {unit.class_name for unit in resolve(SPEC, model, world_size=2).units}


@pytest.mark.parametrize("name", MODELS)
def test_clone_has_classes_and_units_of_the_model(name: str) -> None:
    model_class, settings = MODELS[name]
    config = model_class.config_class(**settings)
    clone = find_clone(model_class, config)
    real, small = on_meta(model_class, config), on_meta(model_class, clone.config)
    assert classes_of(small) == classes_of(real)
    assert unit_classes(small) == unit_classes(real)
    # Each stage of Swin has its own number of heads, so its widths are kept.
    assert [problem.code for problem in clone.problems] == (["FSDP-N757"] if name == "swin" else [])
    assert clone.num_params == num_params_of(small) < MAX_PARAMS / 4
    assert clone.real_num_params == num_params_of(real) > clone.num_params


@pytest.mark.parametrize("family", FAMILIES)
def test_clone_of_a_small_model_has_its_classes(family: str) -> None:
    model_class, settings = FAMILIES[family].model, FAMILIES[family].config
    config = model_class.config_class(**settings)  # type: ignore[attr-defined]
    clone = find_clone(model_class, config)
    assert classes_of(on_meta(model_class, clone.config)) == classes_of(on_meta(model_class, config))
    assert clone.num_params <= clone.real_num_params


def test_grouped_heads_and_head_size_are_kept() -> None:
    small = small_config(hf.LlamaConfig(**LLAMA_70B), 2)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (2, 1, 128)
    assert (small.num_hidden_layers, small.hidden_size, small.vocab_size) == (2, 64, 512)


def test_special_tokens_are_below_the_small_vocabulary() -> None:
    small = small_config(hf.LlamaConfig(**LLAMA_70B), 2)
    tokens = [small.bos_token_id, small.eos_token_id, small.pad_token_id]
    assert len(set(tokens)) == 3 and max(tokens) < 512


def test_lists_of_layers_are_cut_with_the_layers() -> None:
    config = hf.Qwen3Config(num_hidden_layers=8, use_sliding_window=True, max_window_layers=4)
    small = small_config(config, 2)
    assert len(config.layer_types) == 8 and small.layer_types == config.layer_types[:2]


def test_later_layers_of_another_class_are_in_the_clone() -> None:
    config = hf.DeepseekV3Config()  # three dense layers before the layers with experts
    assert find_clone(hf.DeepseekV3ForCausalLM, config).config.num_hidden_layers == 4


def test_router_can_select_its_experts() -> None:
    small = small_config(hf.DeepseekV3Config(), 4)
    assert small.n_routed_experts == 16  # two for each of eight groups


def test_parts_of_a_model_are_reduced_together() -> None:
    small = small_config(hf.LlavaConfig(), 2)
    assert {part.num_hidden_layers for part in config_parts(small) if "num_hidden_layers" in vars(part)} == {2}


def test_quantization_is_removed_and_the_config_unchanged() -> None:
    config = hf.LlamaConfig(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    small = small_config(config, 2)
    assert getattr(small, "quantization_config", None) is None
    assert config.quantization_config and config.num_hidden_layers == 32


def test_clone_without_a_class_of_the_model_is_reported() -> None:
    config = hf.DeepseekV3Config(num_hidden_layers=20, first_k_dense_replace=19)
    (problem,) = find_clone(hf.DeepseekV3ForCausalLM, config).problems
    assert problem.code == "FSDP-W759" and "DeepseekV3MoE" in problem.message


def test_model_that_stays_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_fsdp_plugin.tools.preflight.clone.MAX_PARAMS", 1000)
    with pytest.raises(SpecError) as refused:
        find_clone(hf.GPT2LMHeadModel, hf.GPT2Config())
    assert [problem.code for problem in refused.value.problems] == ["FSDP-E752"]


def test_invalid_config_is_refused_with_its_reason() -> None:
    config = hf.BertConfig(hidden_size=100, num_attention_heads=12)
    with pytest.raises(SpecError) as refused:
        find_clone(hf.BertForMaskedLM, config)
    assert [problem.code for problem in refused.value.problems] == ["FSDP-E752"]


def test_widths_are_kept_with_a_note_if_smaller_ones_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real_reduction = small_config

    def refusing(config: Any, num_layers: int, *, narrow: bool) -> Any:
        if narrow:
            raise ValueError("no smaller widths")
        return real_reduction(config, num_layers, narrow=False)

    monkeypatch.setattr("hf_fsdp_plugin.tools.preflight.clone.small_config", refusing)
    clone = find_clone(hf.GPT2LMHeadModel, hf.GPT2Config())
    assert (clone.config.n_embd, clone.config.n_layer) == (768, 2)
    assert [problem.code for problem in clone.problems] == ["FSDP-N757"]


@pytest.mark.parametrize("dtype", ["bfloat16", "auto", None])
def test_config_with_a_dtype_as_text_has_a_clone(dtype: str | None) -> None:
    config = hf.GPT2Config()
    config.dtype = dtype  # the Auto classes set the argument of from_pretrained
    assert find_clone(hf.GPT2LMHeadModel, config).problems == ()


def test_written_clone_is_loaded_with_its_dtype(tmp_path: Path) -> None:
    config = hf.GPT2Config(dtype="bfloat16")
    clone = find_clone(hf.GPT2LMHeadModel, config)
    write_clone(hf.GPT2LMHeadModel, clone, tmp_path / "clone")
    loaded = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "clone")
    assert num_params_of(loaded) == clone.num_params
    assert {str(parameter.dtype) for parameter in loaded.parameters()} == {"torch.bfloat16"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clone"]


def test_export_with_other_weights_is_an_error(tmp_path: Path) -> None:
    clone = find_clone(hf.GPT2LMHeadModel, hf.GPT2Config())
    write_clone(hf.GPT2LMHeadModel, clone, tmp_path / "clone")
    model = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "clone")
    check_export(model, model.state_dict(), tmp_path / "clone")
    trained = {**model.state_dict(), "transformer.wpe.weight": model.transformer.wpe.weight.detach() + 1}
    with pytest.raises(SpecError, match="wpe") as refused:
        check_export(model, trained, tmp_path / "clone")
    assert [problem.code for problem in refused.value.problems] == ["FSDP-E754"]
