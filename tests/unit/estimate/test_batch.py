"""Batches on the meta device for models of several kinds."""

import pytest
import torch
import transformers as hf

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.estimate.memory import estimate_memory
from hf_fsdp_plugin.estimate.memory.batch import meta_batch
from hf_fsdp_plugin.estimate.workload import Workload
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
