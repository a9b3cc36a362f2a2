"""Batches on the meta device for models of several kinds."""

import pytest
import torch
import transformers as hf

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.tools.plan.estimate.memory.meta_pass import meta_batch
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory
from hf_fsdp_plugin.tools.plan.estimate.types import Workload

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


SPEECH = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 6, "decoder_layers": 6}
TOWER = {**SIZES, "num_hidden_layers": 6}


def made(family):
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2}
    with torch.device("meta"):
        if family == "t5":
            sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "vocab_size": 64}
            return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, num_layers=6, decoder_start_token_id=0))
        if family == "whisper":
            heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
            positions = {"max_source_positions": 20, "max_target_positions": 16, "vocab_size": 64}
            return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**SPEECH, **heads, **positions, **tokens))
        text = {**TOWER, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2}
        images = {**TOWER, "image_size": 16, "patch_size": 4}
        return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=images, projection_dim=16))


def test_models_with_other_inputs_are_refused():
    with torch.device("meta"):
        waves = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SIZES))
        headless = hf.BertModel(hf.BertConfig(**SIZES))
    for model in (waves, headless):
        with pytest.raises(SpecError) as caught:
            meta_batch(model, micro_batch=2, seq_len=8)
        assert [problem.code for problem in caught.value.problems] == ["FSDP-E811"]


def test_speech_and_images_have_the_longest_inputs():
    speech = meta_batch(made("whisper"), micro_batch=2, seq_len=128)
    assert speech["input_features"].shape == (2, 80, 40) and speech["labels"].shape == (2, 16)
    both = meta_batch(made("clip"), micro_batch=2, seq_len=8)
    assert both["input_ids"].shape == (2, 8) and both["pixel_values"].shape == (2, 3, 16, 16) and both["return_loss"]


def test_labels_have_the_shape_of_the_task():
    with torch.device("meta"):
        classifier = hf.BertForSequenceClassification(hf.BertConfig(**SIZES))
        tagger = hf.BertForTokenClassification(hf.BertConfig(**SIZES))
        images = hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=8, patch_size=4))
    assert meta_batch(classifier, micro_batch=2, seq_len=8)["labels"].shape == (2,)
    assert meta_batch(tagger, micro_batch=2, seq_len=8)["labels"].shape == (2, 8)
    assert meta_batch(images, micro_batch=2, seq_len=8)["pixel_values"].shape == (2, 3, 8, 8)


def test_code_that_depends_on_values_is_a_problem():
    class Looks(hf.BertForMaskedLM):
        def forward(self, input_ids=None, labels=None):
            input_ids.cpu().tolist()
            return super().forward(input_ids=input_ids, labels=labels)

    with torch.device("meta"):
        model = Looks(hf.BertConfig(**SIZES))
    spec = hfp.load_spec(fsdp="full_shard auto_wrap", fsdp_config={"transformer_layer_cls_to_wrap": ["BertLayer"]})
    plan = hfp.resolve(spec, model, world_size=2)
    with pytest.raises(SpecError) as caught:
        estimate_memory(plan, model, Workload(micro_batch=1, seq_len=8))
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E810"]
    assert model.config.use_cache and all(parameter.is_meta for parameter in model.parameters())
