"""``hf-fsdp merge --fold-adapter`` gives the weights of PEFT's ``merge_and_unload``, bit for bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp_plugin.problems import CheckpointError, SpecError
from hf_fsdp_plugin.tools.merge.merging import Merged, MergeOptions, merge
from tests.support.merge_inputs import codes
from tests.support.tiny import tiny_gpt2, tiny_llama, tiny_mixtral

peft = pytest.importorskip("peft")


def llama(**settings: Any) -> Any:
    return tiny_llama(layers=2, **settings)


QV = ["q_proj", "v_proj"]
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "linear": (llama, {"target_modules": QV}),
    "all linear": (llama, {"target_modules": "all-linear", "use_rslora": True}),
    "dora": (llama, {"target_modules": QV, "use_dora": True}),
    "patterns": (llama, {"target_modules": [*QV, "down_proj"], "rank_pattern": {"v_proj": 2},
                         "alpha_pattern": {r"layers\.1\..*q_proj": 32}}),
    "embedding": (llama, {"target_modules": [*QV, "embed_tokens"]}),
    "modules": (llama, {"target_modules": QV, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "tokens": (llama, {"target_modules": QV, "trainable_token_indices": [1, 5]}),
    "bias": (lambda: llama(attention_bias=True), {"target_modules": QV, "bias": "all"}),
    "lora bias": (lambda: llama(attention_bias=True), {"target_modules": QV, "lora_bias": True}),
    "tied": (lambda: llama(tied=True), {"target_modules": [*QV, "embed_tokens"]}),
    "tied head": (lambda: llama(tied=True), {"target_modules": [*QV, "lm_head"]}),
    "both tied": (lambda: llama(tied=True), {"target_modules": ["embed_tokens", "lm_head"]}),
    "untied": (lambda: llama(tied=True), {"target_modules": QV, "modules_to_save": ["embed_tokens"]}),
    "kept tied": (lambda: llama(tied=True),
                  {"target_modules": QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "conv1d": (tiny_gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "conv1d dora": (tiny_gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "experts": (tiny_mixtral, {"target_modules": QV, "target_parameters": ["mlp.experts.gate_up_proj",
                                                                      "mlp.experts.down_proj"]}),
    "parameters": (llama, {"target_modules": [], "target_parameters": ["self_attn.q_proj.weight"]}),
}  # fmt: skip


def save_base(folder: Path, make: Callable[[], Any] = llama, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    make().to(dtype).save_pretrained(folder, max_shard_size="20KB")
    return folder


def adapted(base: Path, settings: dict[str, Any]) -> Any:
    """The base model with an adapter that changes the weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **settings})
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def save_adapter(base: Path, folder: Path, settings: dict[str, Any]) -> Path:
    adapted(base, settings).save_pretrained(folder)
    return folder


def by_peft(base: Path, adapter: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()


def fold(adapter: Path, base: Path, out: Path, **options: Any) -> Merged:
    return merge(adapter, out, MergeOptions(fold_adapter=base, **options))


def assert_same_model(out: Path, expected: Any) -> None:
    from transformers import AutoModelForCausalLM

    found, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    state, wanted = found.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(state[name], tensor)] == []
    assert {name: tensor.dtype for name, tensor in state.items()} == {n: t.dtype for n, t in wanted.items()}


@pytest.mark.parametrize("case", CASES)
def test_fold_equals_merge_and_unload(case: str, tmp_path: Path) -> None:
    make, settings = CASES[case]
    base = save_base(tmp_path / "base", make)
    adapter = save_adapter(base, tmp_path / "adapter", settings)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    merged = fold(adapter, base, tmp_path / "out", verify=True)
    assert merged.num_folded > 0 and merged.verified
    assert_same_model(tmp_path / "out", by_peft(base, adapter))
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert ("FSDP-W444" in codes(merged)) == (case == "untied")


def test_stored_dtypes_are_those_of_the_base(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": QV, "modules_to_save": ["lm_head"]})
    fold(adapter, base, tmp_path / "out")
    assert_same_model(tmp_path / "out", by_peft(base, adapter))


def test_dtype_converts_the_merged_weights(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": QV})
    fold(adapter, base, tmp_path / "out", dtype="bfloat16")
    assert_same_model(tmp_path / "out", by_peft(base, adapter).to(torch.bfloat16))


def save_whole_model(base: Path, folder: Path, settings: dict[str, Any], *, prefix: bool = True) -> Any:
    """Write a checkpoint with all weights of a model with adapters, as stock ``save_state`` does."""
    from torch.distributed import checkpoint as dcp

    model = adapted(base, settings)
    state = {
        key if prefix else key.removeprefix("base_model.model."): value for key, value in model.state_dict().items()
    }
    dcp.save({"model": state}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    model.peft_config["default"].save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", ["linear", "dora", "modules", "kept tied", "bias", "parameters"])
def test_checkpoint_with_the_whole_model_is_folded(case: str, tmp_path: Path) -> None:
    make, settings = CASES[case]
    base = save_base(tmp_path / "base", make)
    model = save_whole_model(base, tmp_path / "run", settings)
    fold(tmp_path / "run", base, tmp_path / "out")
    assert_same_model(tmp_path / "out", model.merge_and_unload())


def test_base_may_be_a_checkpoint(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    make, settings = CASES["tied"]
    base, shards = save_base(tmp_path / "base", make), tmp_path / "shards"
    adapter = save_adapter(base, tmp_path / "adapter", settings)
    torch.manual_seed(0)
    dcp.save({"model": make().state_dict()}, checkpoint_id=shards / "pytorch_model_fsdp_0", no_dist=True)
    (base / "config.json").rename(shards / "config.json")
    fold(adapter, shards, tmp_path / "out")
    (shards / "config.json").rename(base / "config.json")
    assert_same_model(tmp_path / "out", by_peft(base, adapter))


def test_adapter_of_add_adapter_is_folded(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    model = save_whole_model(base, tmp_path / "run", {"target_modules": QV}, prefix=False)
    fold(tmp_path / "run", base, tmp_path / "out")
    assert_same_model(tmp_path / "out", model.merge_and_unload())


def refusal(adapter: Path, base: Path, out: Path, **options: Any) -> str:
    """Return the code and message of the refusal, after a check that nothing is left behind."""
    with pytest.raises((CheckpointError, SpecError)) as caught:
        fold(adapter, base, out, **options)
    assert len(caught.value.problems) == 1 and caught.value.problems[0].fix
    assert not out.exists() and not list(out.parent.glob(".*"))
    text = str(caught.value)
    del caught  # its frames keep the files of the checkpoint open
    return text


def test_changed_base_weights_are_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    save_whole_model(base, tmp_path / "run", {"target_modules": QV})
    other = tmp_path / "other"
    model = llama()
    model.model.norm.weight.data += 1
    model.save_pretrained(other)
    text = refusal(tmp_path / "run", other, tmp_path / "out")
    assert "FSDP-E442" in text and "model.norm.weight" in text


def change_config(adapter: Path, **values: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"peft_type": "IA3"}, "not LORA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"target_modules": ["attn"]}, "attn"),
        ({"alora_invocation_tokens": [1]}, "adapter_config.json"),
    ],
    ids=str,
)
def test_config_that_cannot_be_folded_is_refused(values: dict[str, Any], part: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": QV})
    change_config(adapter, **values)
    text = refusal(adapter, base, tmp_path / "out")
    assert "FSDP-E441" in text and part in text


@pytest.mark.parametrize(
    ("values", "code"),
    [({"target_modules": ["q_proj"]}, "E478"), ({"target_modules": [*QV, "k_proj"]}, "E477"), ({"r": 2}, "E479")],
    ids=str,
)
def test_adapter_of_another_config_is_refused(values: dict[str, Any], code: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": QV})
    change_config(adapter, **values)
    assert f"FSDP-{code}" in refusal(adapter, base, tmp_path / "out")


def test_base_of_another_shape_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": QV})
    other = save_base(tmp_path / "other", lambda: llama(hidden_size=16))
    assert "FSDP-E479" in refusal(adapter, other, tmp_path / "out")


def test_checkpoint_without_adapter_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    assert "has no adapter_config.json" in refusal(save_base(tmp_path / "run" / "other"), base, tmp_path / "out")


def test_missing_adapter_config_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "run" / "adapter", {"target_modules": QV})
    (adapter / "adapter_config.json").rename(tmp_path / "adapter_config.json")
    assert "has no adapter_config.json" in refusal(adapter, base, tmp_path / "out")
    fold(adapter, base, tmp_path / "out", config=tmp_path)
    assert list((tmp_path / "out").glob("model*.safetensors"))


def test_several_adapters_are_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    state = adapted(base, {"target_modules": QV}).state_dict()
    save_whole_model(base, tmp_path / "run", {"target_modules": QV})
    other = {key.replace(".default.", ".second."): value for key, value in state.items() if ".lora_" in key}
    from torch.distributed import checkpoint as dcp

    dcp.save({"model": state | other}, checkpoint_id=tmp_path / "run" / "pytorch_model_fsdp_0", no_dist=True)
    assert "has several adapters" in refusal(tmp_path / "run", base, tmp_path / "out")


@pytest.mark.parametrize("what", ["quantized", "adapter", "no config"])
def test_base_without_whole_weights_is_refused(what: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": QV})
    config = base / "config.json"
    if what == "quantized":
        config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"bits": 4}}))
    elif what == "no config":
        config.unlink()
    else:
        base = save_adapter(base, tmp_path / "other", {"target_modules": QV})
    assert "FSDP-E441" in refusal(adapter, base, tmp_path / "out")


def test_peft_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": QV})
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "FSDP-E727" in refusal(adapter, base, tmp_path / "out")
