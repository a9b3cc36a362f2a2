"""Comparison of stored names and shapes with the model of a config."""

import json

from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support import saved
from tests.support.saved import errors, notes, only_error


def test_checkpoint_of_the_config_has_no_problems(hf):
    verdict = verify(hf)
    assert verdict.problems == ()


def test_config_of_a_larger_model_is_reported(hf):
    saved.tiny_llama(vocab_size=48).config.save_pretrained(hf)
    text = next(text for text in errors(verify(hf)) if text.endswith("[FSDP-E479]"))
    assert "2 tensors" in text and "LlamaForCausalLM" in text
    assert "model.embed_tokens.weight (32×16 in the checkpoint, 48×16 in the model)" in text


def test_config_of_another_architecture_is_reported(hf):
    from transformers import GPT2Config

    GPT2Config(n_embd=16, n_layer=1, n_head=2, architectures=["GPT2LMHeadModel"]).save_pretrained(hf)
    found = {problem.code: problem.message for problem in verify(hf).problems}
    assert "15 of the 17 parameters of the GPT2LMHeadModel" in found["FSDP-E477"]
    assert "GPT2LMHeadModel" in found["FSDP-E478"] and ": transformer." in found["FSDP-E477"]


def test_config_check_can_be_omitted(hf):
    (hf / "config.json").write_text("{}")
    assert "config.json: has 2 bytes" in only_error(hf, "FSDP-E470", config_check=False)


def test_invalid_config_is_reported(hf):
    for config in ("{", "[]"):
        (hf / "config.json").write_text(config)
        assert any("config.json: " in text and text.endswith("[FSDP-E476]") for text in errors(verify(hf)))


def test_model_with_custom_code_is_noted(hf):
    config = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "code.Own"}, "architectures": ["Own"]}
    (hf / "config.json").write_text(json.dumps(config))
    (hf / MANIFEST_NAME).unlink()
    verdict = verify(hf)
    assert verdict.ok and any(text.endswith("[FSDP-N475]") for text in notes(verdict))


def test_tied_weights_are_stored_once(tmp_path):
    saved.tiny_llama(tied=True).save_pretrained(tmp_path)
    assert verify(tmp_path).ok


def test_unfused_experts_match_the_fused_parameter(tmp_path):
    """A Hugging Face folder stores each expert separately. The model has one parameter for all experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert errors(verify(tmp_path)) == []
    config.num_hidden_layers = 2
    config.save_pretrained(tmp_path)
    assert ": model.layers.1." in only_error(tmp_path, "FSDP-E477")
