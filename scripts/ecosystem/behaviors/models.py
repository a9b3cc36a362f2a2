"""Models of many architectures, made from configs (as for pretraining), trained with the Trainer and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as t

from scripts.ecosystem.behaviors.common import (
    SMALL,
    VOCABULARY,
    Regression,
    classified,
    images,
    llama,
    made,
    numbers,
    texts,
    tokens,
    trained,
    translated,
)

HEADS = {"hidden_dim": 64, "n_layers": 2, "n_heads": 4, "dim": 32}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "bos_token_id": 1,
    "forced_eos_token_id": 2,
}
PIXELS = {"image_size": 32, "patch_size": 8}


def gpt_neox() -> Any:
    return trained(made(t.GPTNeoXForCausalLM, t.GPTNeoXConfig(**SMALL)), texts())


def llama_lm() -> Any:
    return trained(llama(), texts())


def llama_tied() -> Any:
    return trained(llama(tie_word_embeddings=True), texts())


def mistral() -> Any:
    return trained(made(t.MistralForCausalLM, t.MistralConfig(**SMALL, num_key_value_heads=2)), texts())


def qwen2() -> Any:
    return trained(made(t.Qwen2ForCausalLM, t.Qwen2Config(**SMALL, num_key_value_heads=2)), texts())


def gemma() -> Any:
    return trained(made(t.GemmaForCausalLM, t.GemmaConfig(**SMALL, num_key_value_heads=2, head_dim=8)), texts())


def mixtral() -> Any:
    config = t.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    return trained(made(t.MixtralForCausalLM, config), texts())


def qwen2_moe() -> Any:
    config = t.Qwen2MoeConfig(
        **SMALL,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return trained(made(t.Qwen2MoeForCausalLM, config), texts())


def gpt2() -> Any:
    return trained(
        made(t.GPT2LMHeadModel, t.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4)), texts()
    )


def gpt2_classification() -> Any:
    config = t.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, pad_token_id=0)
    return trained(made(t.GPT2ForSequenceClassification, config), classified())


def bloom() -> Any:
    return trained(
        made(t.BloomForCausalLM, t.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)), texts()
    )


def opt() -> Any:
    return trained(made(t.OPTForCausalLM, t.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32)), texts())


def phi() -> Any:
    return trained(made(t.PhiForCausalLM, t.PhiConfig(**SMALL)), texts())


def mamba() -> Any:
    config = t.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2, pad_token_id=0)
    return trained(made(t.MambaForCausalLM, config), texts())


def falcon() -> Any:
    return trained(made(t.FalconForCausalLM, t.FalconConfig(**SMALL)), texts())


def xlnet() -> Any:
    config = t.XLNetConfig(vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64)
    return trained(made(t.XLNetForSequenceClassification, config), classified())


def bert_masked_lm() -> Any:
    return trained(made(t.BertForMaskedLM, t.BertConfig(**SMALL)), texts())


def roberta_tags() -> Any:
    rows = [{"input_ids": row, "labels": row % 3} for row in tokens()]
    return trained(made(t.RobertaForTokenClassification, t.RobertaConfig(**SMALL, num_labels=3)), rows)


def distilbert() -> Any:
    return trained(
        made(t.DistilBertForSequenceClassification, t.DistilBertConfig(vocab_size=VOCABULARY, **HEADS)), classified()
    )


def distilbert_answers() -> Any:
    rows = [{"input_ids": row, "start_positions": 1, "end_positions": 3} for row in tokens()]
    return trained(made(t.DistilBertForQuestionAnswering, t.DistilBertConfig(vocab_size=VOCABULARY, **HEADS)), rows)


def deberta_v2() -> Any:
    config = t.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8)
    return trained(made(t.DebertaV2ForSequenceClassification, config), classified())


def electra() -> Any:
    return trained(made(t.ElectraForSequenceClassification, t.ElectraConfig(**SMALL, embedding_size=16)), classified())


def albert() -> Any:
    return trained(made(t.AlbertForSequenceClassification, t.AlbertConfig(**SMALL, embedding_size=16)), classified())


def funnel() -> Any:
    config = t.FunnelConfig(vocab_size=VOCABULARY, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=64)
    return trained(made(t.FunnelForSequenceClassification, config), classified())


def modernbert() -> Any:
    config = t.ModernBertConfig(**SMALL, cls_token_id=1, sep_token_id=2)
    return trained(made(t.ModernBertForMaskedLM, config), texts())


def t5() -> Any:
    config = t.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return trained(made(t.T5ForConditionalGeneration, config), translated())


def bart() -> Any:
    return trained(made(t.BartForConditionalGeneration, t.BartConfig(**SEQ2SEQ)), translated())


def pegasus() -> Any:
    return trained(made(t.PegasusForConditionalGeneration, t.PegasusConfig(**SEQ2SEQ)), translated())


def marian() -> Any:
    return trained(made(t.MarianMTModel, t.MarianConfig(**SEQ2SEQ)), translated())


def whisper() -> Any:
    sizes = {name: value for name, value in SEQ2SEQ.items() if name != "max_position_embeddings"}
    config = t.WhisperConfig(**sizes, num_mel_bins=8, max_source_positions=16, max_target_positions=16)
    sounds = torch.randn(16, 8, 32, generator=torch.Generator().manual_seed(0))
    rows = [{"input_features": sound, "labels": row} for sound, row in zip(sounds, tokens(), strict=True)]
    return trained(made(t.WhisperForConditionalGeneration, config), rows)


def _sounds(length: int = 800) -> torch.Tensor:
    return torch.randn(16, length, generator=torch.Generator().manual_seed(0))


def _wav2vec2() -> t.Wav2Vec2Config:
    return t.Wav2Vec2Config(
        **SMALL,
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=16,
        apply_spec_augment=False,
    )


def wav2vec2_classification() -> Any:
    rows = [{"input_values": sound, "labels": number % 2} for number, sound in enumerate(_sounds())]
    return trained(made(t.Wav2Vec2ForSequenceClassification, _wav2vec2()), rows)


def wav2vec2_ctc() -> Any:
    rows = [{"input_values": sound, "labels": row[:4]} for sound, row in zip(_sounds(), tokens(), strict=True)]
    return trained(made(t.Wav2Vec2ForCTC, _wav2vec2()), rows)


def clip() -> Any:
    text = {**SMALL, "projection_dim": 16}
    vision = {
        name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    config = t.CLIPConfig(text_config=text, vision_config={**vision, **PIXELS, "projection_dim": 16}, projection_dim=16)
    rows = [
        {"pixel_values": picture["pixel_values"], "input_ids": row}
        for picture, row in zip(images(), tokens(), strict=True)
    ]

    def collate(found: Any) -> dict[str, Any]:
        return {**t.default_data_collator(found), "return_loss": True}

    return trained(made(t.CLIPModel, config), rows, more={"data_collator": collate})


def _vision() -> dict[str, Any]:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {**{name: SMALL[name] for name in sizes}, **PIXELS}


def vit() -> Any:
    return trained(made(t.ViTForImageClassification, t.ViTConfig(**_vision())), images())


def segformer() -> Any:
    config = t.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        num_labels=3,
        image_size=32,
        drop_path_rate=0.0,
    )
    return trained(
        made(t.SegformerForSemanticSegmentation, config), images(labels=torch.arange(1024).reshape(32, 32) % 3)
    )


def beit_segmentation() -> Any:
    config = t.BeitConfig(
        **{**_vision(), "num_hidden_layers": 4, "image_size": 64, "patch_size": 16},
        out_indices=[1, 2, 3, 4],
        num_labels=3,
        drop_path_rate=0.0,
        auxiliary_loss_weight=0.4,
    )
    rows = images(size=64, labels=torch.arange(4096).reshape(64, 64) % 3)
    return trained(made(t.BeitForSemanticSegmentation, config), rows)


def resnet_batch_norm() -> Any:
    config = t.ResNetConfig(embedding_size=8, hidden_sizes=[16, 16], depths=[1, 1], layer_type="basic")
    return trained(made(t.ResNetForImageClassification, config), images())


def convnext() -> Any:
    config = t.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4)
    return trained(made(t.ConvNextForImageClassification, config), images())


def swin() -> Any:
    config = t.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, drop_path_rate=0.0
    )
    return trained(made(t.SwinForImageClassification, config), images())


def patchtst() -> Any:
    config = t.PatchTSTConfig(
        num_input_channels=2,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        prediction_length=4,
        d_model=16,
        num_attention_heads=2,
        ffn_dim=32,
        num_hidden_layers=2,
        loss="mse",
        norm_type="batchnorm",
    )
    series = torch.randn(16, 36, 2, generator=torch.Generator().manual_seed(0))
    rows = [{"past_values": row[:32], "future_values": row[32:]} for row in series]
    return trained(made(t.PatchTSTForPrediction, config), rows)


def vision_encoder_decoder() -> Any:
    encoder = t.ViTConfig(**_vision())
    decoder = t.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
    for config in (encoder, decoder):
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    rows = [{**picture, "labels": row} for picture, row in zip(images(), tokens(), strict=True)]
    return trained(made(t.VisionEncoderDecoderModel, config), rows)


_REMOTE = """from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_remote"

    def __init__(self, width=8, **kwargs):
        self.width = width
        super().__init__(**kwargs)


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(config.width, config.width), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(config.width, 1)
        self.post_init()

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"logits": logits} if labels is None else {"loss": (logits - labels).square().mean(), "logits": logits}
"""


def remote_code() -> Any:
    folder = Path("remote") / str(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    folder.mkdir(parents=True)
    (folder / "tiny_remote.py").write_text(_REMOTE)
    (folder / "config.json").write_text(
        '{"model_type": "tiny_remote", "width": 8, "auto_map": '
        '{"AutoConfig": "tiny_remote.TinyConfig", "AutoModel": "tiny_remote.TinyModel"}}'
    )
    config = t.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return trained(t.AutoModel.from_config(config, trust_remote_code=True), numbers())


def plain_module() -> Any:
    return trained(Regression(), numbers())
