"""Cases that ranks run: ``from_pretrained`` with RAM-efficient loading, and what scripts do with the model."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.loading.equal_weights import parameter_memory
from hf_fsdp_plugin.backends.loading.shared_weights import Publication
from hf_fsdp_plugin.backends.loading.weight_loader import BROADCAST_ATTRIBUTE
from hf_fsdp_plugin.plan.names import unwrapped
from tests.gloo.cases_families import clones, sgd, train_steps
from tests.gloo.cases_trainer import losses
from tests.support.model_families import FAMILIES, TEXT_CONFIG, without_dropout
from tests.support.training import fresh_accelerator


def save_plain(family: str, folder: str) -> None:
    """Save the model on rank 0."""
    if dist.get_rank() == 0:
        FAMILIES[family].build().save_pretrained(folder)
    dist.barrier()


def save_both_names(folder: str, equal: bool) -> None:
    """Save a tied model with the weight under both names, as other tools do."""
    from safetensors.torch import load_file, save_file

    save_plain("llama-tied", folder)
    if dist.get_rank() == 0:
        path = Path(folder) / "model.safetensors"
        weights = load_file(path)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * (1.0 if equal else 2.0)
        save_file(weights, path, metadata={"format": "pt"})
    dist.barrier()


def save_bin(family: str, folder: str) -> None:
    """Save the model on rank 0 as older versions of Transformers did."""
    if dist.get_rank() == 0:
        model = FAMILIES[family].build()
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), Path(folder) / "pytorch_model.bin")
    dist.barrier()


GGUF_NAMES = {
    "embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm", "input_layernorm": "attn_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    # of LFM2, which Transformers dequantizes tensor by tensor
    "embedding_norm": "token_embd_norm", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "self_attn.out_proj": "attn_output", "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm", "operator_norm": "attn_norm", "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down",
}  # fmt: skip


def save_gguf(folder: str, architecture: str) -> None:
    """Save a tiny model as a GGUF file on rank 0."""
    if dist.get_rank() == 0:
        model: Any = FAMILIES["llama"].build() if architecture == "llama" else tiny_lfm2()
        write_gguf(model, f"{folder}/model.gguf", architecture)
    dist.barrier()


def write_gguf(model: Any, path: str, architecture: str) -> None:
    """Write a Llama or an LFM2 as a GGUF file with fp16 matrices."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_context_length(config.max_position_embeddings)
    if architecture == "llama":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
    else:
        heads = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
        writer.add_head_count_kv(heads)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_rope_freq_base(1e4)
        writer.add_token_list([str(number) for number in range(config.vocab_size)])
    for name, tensor in model.state_dict().items():
        *parts, _ = name.split(".")
        *_, group, module = ["", *parts]
        block = f"blk.{parts[2]}." if ".layers." in name else ""
        short = GGUF_NAMES.get(f"{group}.{module}") or GGUF_NAMES.get(module, module)
        data = tensor.squeeze().numpy().astype("float16" if tensor.dim() > 1 else "float32")
        writer.add_tensor(f"{block}{short}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_lfm2() -> Any:
    config = CONFIG_MAPPING["lfm2"](
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, full_attn_idxs=[1], block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def load_gguf(folder: str, config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Load and shard the model of a GGUF file."""
    accelerator = fresh_accelerator(config)
    with contextlib.redirect_stderr(io.StringIO()) as printed, recorded_moves() as moves:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=dtype)
    memory = asdict(parameter_memory(model.parameters()))
    model = accelerator.prepare(model)
    return {
        "memory": memory,
        "weights": clones(accelerator.get_state_dict(model)),
        "printed": printed.getvalue(),
        "num_moved": len(moves),
        "from_files": getattr(model, BROADCAST_ATTRIBUTE).num_from_files,
    }


def load_and_train(family: str, folder: str, config: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """Load, train some steps, and return what this rank has after loading and after each step."""
    accelerator = fresh_accelerator(config)
    model = FAMILIES[family].model.from_pretrained(folder, dtype=dtype)
    model.config.use_cache = False
    without_dropout(model)
    model = model.to(accelerator.device)  # as many scripts do; it must not copy the weights on CPU ranks
    memory = asdict(parameter_memory(model.parameters()))
    model, optimizer = accelerator.prepare(model.train(), sgd(model))
    return {
        "steps": train_steps(accelerator, family, model, optimizer),
        "weights": clones(accelerator.get_state_dict(model)),
        "report": hfp.report(accelerator).to_json(),
        "memory": memory,
        "num_filled": getattr(getattr(model, BROADCAST_ATTRIBUTE, None), "num_filled", 0),
        "buffers": clones(dict(unwrapped(model).named_buffers())),
    }


def load_and_train_with_trainer(family: str, folder: str, output_dir: str, **fsdp_config: Any) -> dict[str, Any]:
    """Create the arguments, load the model, then train it with the Trainer."""
    args = hfp.FsdpTrainingArguments(
        output_dir=output_dir, fsdp="full_shard auto_wrap", fsdp_config=fsdp_config, use_cpu=True, max_steps=2,
        per_device_train_batch_size=2, report_to="none", disable_tqdm=True, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    model = FAMILIES[family].model.from_pretrained(folder)
    memory = asdict(parameter_memory(model.parameters()))
    rows = [{k: v[i] for k, v in FAMILIES[family].batch(s).items()} for s in range(4) for i in range(4)]
    trainer = hfp.FsdpTrainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    return {"memory": memory, "losses": losses(trainer), "report": hfp.report(trainer).to_json()}


# What scripts do between from_pretrained and prepare. Each function returns the model to prepare.


def move(model: Any) -> Any:
    return model.to(torch.device("cpu"))


def change_in_place(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def read_weights(model: Any) -> Any:
    assert all(torch.isfinite(parameter.sum()) for parameter in model.parameters())
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
    return model


def resize(model: Any) -> Any:
    model.resize_token_embeddings(TEXT_CONFIG["vocab_size"] + 8, mean_resizing=False)
    return model


def resize_to_mean(model: Any) -> Any:
    model.resize_token_embeddings(TEXT_CONFIG["vocab_size"] + 8, mean_resizing=True)
    return model


def tie(model: Any) -> Any:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


def copy_deeply(model: Any) -> Any:
    teacher = copy.deepcopy(model)
    change_in_place(model)
    return teacher


def cast(model: Any) -> Any:
    return model.to(torch.bfloat16).float()


def forward(model: Any) -> Any:
    assert torch.isfinite(FAMILIES["llama"].loss(model, FAMILIES["llama"].batch(0)))
    return model


def merge_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, config).merge_and_unload()  # type: ignore[operator]


TOUCHES: dict[str, Callable[[Any], Any]] = {
    touch.__name__: touch
    for touch in (
        move, change_in_place, read_weights, resize, resize_to_mean, tie, copy_deeply, cast, forward, merge_lora,
    )
}  # fmt: skip


def touch_model(name: str, folder: str, dtype: str) -> nn.Module:
    """Load a model and use it as a script does. The values are the same in every process."""
    torch.manual_seed(0)
    return TOUCHES[name](FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype))  # type: ignore[attr-defined]


def touch_and_prepare(folder: str, dtype: str, config: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return for each use of the model: whether this rank had all weights, and the weights of the prepared model."""
    results = {}
    for name in names:
        accelerator = fresh_accelerator(config)
        model = touch_model(name, folder, dtype)
        on_meta = [n for n, tensor in model.state_dict().items() if tensor.is_meta]
        local = clones(model.state_dict())
        model = accelerator.prepare(model)
        results[name] = {"on_meta": on_meta, "local": local, "prepared": clones(accelerator.get_state_dict(model))}
    return results


def save_before_prepare(folder: str, dtype: str, output: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save a loaded model before it is prepared, and return the file. Transformers writes it on rank 0 only."""
    from safetensors.torch import load_file

    fresh_accelerator(config)
    model: Any = FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    model.save_pretrained(output)
    dist.barrier()
    return clones(load_file(f"{output}/model.safetensors"))


def load_with_new_head(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Load a model with a head that the checkpoint lacks; each rank draws other values for it."""
    from transformers import BertForSequenceClassification

    accelerator = fresh_accelerator(config)
    torch.manual_seed(dist.get_rank())
    model: Any = BertForSequenceClassification.from_pretrained(folder, num_labels=3)
    head = model.classifier.weight.detach().clone()
    on_meta = sum(parameter.is_meta for parameter in model.parameters())
    model = accelerator.prepare(model)
    return {
        "head": head,
        "on_meta": on_meta,
        "prepared": accelerator.get_state_dict(model).get("classifier.weight"),
        "report": hfp.report(accelerator).to_json(),
    }


def change_on_one_rank(folder: str, dtype: str, config: dict[str, Any]) -> dict[str, Any]:
    """Change the weights in place on rank 0 only, and keep a view of this rank's memory while preparing."""
    accelerator = fresh_accelerator(config)
    model: Any = FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    view = model.model.norm.weight.data
    before = view.clone()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.model.norm.weight.add_(1.0)
    dist.barrier()
    seen = view.clone()
    model = accelerator.prepare(model)
    prepared = accelerator.get_state_dict(model).get("model.norm.weight")
    return {"before": before, "seen": seen, "after": view.clone(), "prepared": prepared}


def load_on_one_rank(folder: str, dtype: str, config: dict[str, Any], rank: int) -> int:
    """Load on one rank only. Then all ranks wait for each other."""
    fresh_accelerator(config)
    num = 0
    if dist.get_rank() == rank:
        model: Any = FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
        num = sum(torch.isfinite(parameter).all().item() for parameter in model.parameters())
    dist.barrier()
    return num


def load_one_after_the_other(folder: str, dtype: str, config: dict[str, Any]) -> dict[str, Any]:
    """Load twice on every rank, rank 0 first, as ``main_process_first`` does."""
    accelerator = fresh_accelerator(config)
    with accelerator.main_process_first():
        first: Any = FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    second: Any = FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    memory = [asdict(parameter_memory(model.parameters())) for model in (first, second)]
    change_in_place(first)
    return {"memory": memory, "first": clones(first.state_dict()), "second": clones(second.state_dict())}


def load_damaged(folder: str, dtype: str, config: dict[str, Any]) -> str:
    """Return the type of the error of a damaged checkpoint."""
    fresh_accelerator(config)
    try:
        FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    except Exception as error:
        return type(error).__name__
    return ""


def load_quantized(folder: str, config: dict[str, Any]) -> tuple[str, int]:
    """Return what is printed while a model is quantized, and the number of parameters on the meta device."""
    from transformers import BitsAndBytesConfig

    fresh_accelerator(config)
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        model: Any = FAMILIES["llama"].model
        model = model.from_pretrained(folder, quantization_config=four_bit, dtype=torch.bfloat16)
    return printed.getvalue(), parameter_memory(model.parameters()).num_on_meta


def load_given_weights(folder: str, dtype: str, config: dict[str, Any], given: str) -> tuple[str, dict[str, Any]]:
    """Return what is printed while loading, and the memory of the model.

    Args:
        given: ``copied`` or ``mapped`` weights, which the script passes; ``no`` for weights that are read.
    """
    from safetensors.torch import load_file

    fresh_accelerator(config)
    kind: Any = FAMILIES["llama"].model
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        if given != "no":
            state = load_file(f"{folder}/model.safetensors")
            state = clones(state) if given == "copied" else state
            kind_config = kind.config_class.from_pretrained(folder)
            model = kind.from_pretrained(None, config=kind_config, state_dict=state, dtype=dtype)
        else:
            model = kind.from_pretrained(folder, dtype=dtype)
    return printed.getvalue(), asdict(parameter_memory(model.parameters()))


def prepare_meta_model(config: dict[str, Any]) -> dict[str, Any]:
    """A script that creates the model on the meta device on every rank except rank 0."""
    accelerator = fresh_accelerator(config)
    if dist.get_rank() == 0:
        model = FAMILIES["llama"].build()
    else:
        with torch.device("meta"):
            model = FAMILIES["llama"].build()
    model = accelerator.prepare(model)
    return {
        "num_filled": getattr(model, BROADCAST_ATTRIBUTE).num_filled,
        "weights": clones(accelerator.get_state_dict(model)),
        "report": hfp.report(accelerator).to_json(),
    }


def private_memory() -> int:
    """Return the bytes that only this process has, without pages of files and without freed memory."""
    # The C library keeps up to 64 MB of freed memory in each of its arenas: as much as this test's model.
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel reports no anonymous memory")


LARGE: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 4},
    "mixtral": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16, "num_local_experts": 4,
        "num_key_value_heads": 8,
    },
}  # fmt: skip


def save_large(folder: str, family: str = "llama") -> None:
    """Save a model of some 60 MB in bf16 on rank 0."""
    if dist.get_rank() == 0:
        config = CONFIG_MAPPING[family](vocab_size=8192, num_attention_heads=8, **LARGE[family])
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        model = model.to(torch.bfloat16).to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.zero_()
        model.save_pretrained(folder)
    dist.barrier()


def sum_of_weights(model: Any) -> float:
    return sum(float(parameter.detach().sum()) for parameter in model.parameters())


def private_memory_of_loading(folder: str, dtype: str, config: dict[str, Any]) -> dict[str, Any]:
    """Load a large model, and read all weights.

    Returns:
        The smallest growth of this rank's private memory over three loads: afterwards, and its peak while it moves
        weights to shared memory; 0 if it never does.
    """
    fresh_accelerator(config)
    warm_up = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")  # libraries allocate memory at their first use
    assert sum_of_weights(warm_up) == 0
    del warm_up
    grown, peaks = [], []
    for _ in range(3):  # other code of a long-lived process allocates memory too; a copy is there each time
        before = private_memory()
        with recorded_moves() as sizes:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        peaks += [max(sizes) - before] if sizes else []  # another rank may move them
        assert sum_of_weights(model) == 0
        grown.append(private_memory() - before)
        memory = asdict(parameter_memory(model.parameters()))
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        dist.barrier()
        del model
    return {"grown": min(grown), "peak": min(peaks, default=0), "model": num_bytes, "memory": memory}


@contextlib.contextmanager
def recorded_moves() -> Iterator[list[int]]:
    """Yield the list of this process's private memory whenever a weight is about to be moved to shared memory."""
    sizes: list[int] = []
    original = Publication.move

    def move(publication: Publication, tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(private_memory())
        return original(publication, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Publication, "move", move)
        yield sizes
