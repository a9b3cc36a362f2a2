"""Batches on the meta device for models of several kinds."""

import pytest
import torch
import transformers as hf

from hf_fsdp_plugin.estimate.memory.batch import meta_batch
from hf_fsdp_plugin.problems import SpecError

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_models_with_other_inputs_are_refused():
    with torch.device("meta"):
        whisper = hf.WhisperForConditionalGeneration(hf.WhisperConfig(encoder_layers=1, decoder_layers=1))
        headless = hf.BertModel(hf.BertConfig(**SIZES))
    for model in (whisper, headless):
        with pytest.raises(SpecError) as caught:
            meta_batch(model, micro_batch=2, seq_len=8)
        assert [problem.code for problem in caught.value.problems] == ["FSDP-E811"]


def test_labels_have_the_shape_of_the_task():
    with torch.device("meta"):
        classifier = hf.BertForSequenceClassification(hf.BertConfig(**SIZES))
        tagger = hf.BertForTokenClassification(hf.BertConfig(**SIZES))
        images = hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=8, patch_size=4))
    assert meta_batch(classifier, micro_batch=2, seq_len=8)["labels"].shape == (2,)
    assert meta_batch(tagger, micro_batch=2, seq_len=8)["labels"].shape == (2, 8)
    assert meta_batch(images, micro_batch=2, seq_len=8)["pixel_values"].shape == (2, 3, 8, 8)
