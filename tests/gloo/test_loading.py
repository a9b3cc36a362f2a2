"""With RAM-efficient loading a rank maps its weights, or has none until ``prepare``. All values stay the same."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.loading.mapped_files import parameter_memory
from hf_fsdp_plugin.backends.loading.weight_loader import BroadcastRecord
from hf_fsdp_plugin.integrations.torch_functions import add_remedy
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.state import find_part, parts_of
from tests.support.families_runs import clones, sgd, train_steps
from tests.support.loading_runs import save_plain, write_gguf
from tests.support.matrices import slow
from tests.support.model_families import FAMILIES, TEXT_CONFIG, without_dropout
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.trainer_runs import losses
from tests.support.training import fresh_accelerator

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

READS = ("read_weights", "forward")
"""The functions that compute with the values of weights."""


LARGE: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 4},
    "mixtral": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16, "num_local_experts": 4,
        "num_key_value_heads": 8,
    },
}  # fmt: skip


# Tied, three tied weights, converted experts; then untied, scalars and position ids, a scaled embedding.
LOADED = ["llama-tied", "bert-mlm", "mixtral"]

OTHERS = [slow(family) for family in ("llama", "t5", "clip", "gemma")]

both_versions = pytest.mark.parametrize("version", [1, 2])

# The file contains fp32: read as fp32 it is mapped, read as bf16 rank 0 casts it.
SHARED = pytest.mark.cpu_ranks("ranks share weights in host memory; those of devices do not")

both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["mapped", "cast"])


def efficient_config(version: int = 2) -> dict[str, Any]:
    return parallel_config("full_shard", version, 2, fsdp_cpu_ram_efficient_loading=True)


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
        "num_filled": getattr(find_part(model, BroadcastRecord), "num_filled", 0),
        "buffers": clones(dict(unwrapped(model).named_buffers())),
    }


def load_both_ways(
    ranks: Ranks, family: str, folder: Path, version: int, dtype: str = "float32", **top: Any
) -> list[list[dict[str, Any]]]:
    """Return the results of all ranks with and without RAM-efficient loading."""
    return [
        ranks.run(
            load_and_train,
            family,
            str(folder),
            parallel_config("full_shard", version, 2, fsdp_cpu_ram_efficient_loading=efficient) | top,
            dtype,
        )
        for efficient in (True, False)
    ]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def row(report: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in report["settings"] if row["setting"] == "loading.ram_efficient")


@SHARED
@both_versions
@pytest.mark.parametrize("family", [*LOADED, *OTHERS])
def test_ranks_share_weights_and_results_are_equal(two_ranks: Ranks, tmp_path: Path, family: str, version: int) -> None:
    two_ranks.run(save_plain, family, str(tmp_path))
    efficient, normal = load_both_ways(two_ranks, family, tmp_path, version)
    first, second = (rank["memory"] for rank in efficient)
    assert efficient[0]["num_filled"] == first["num_on_meta"] == 0
    assert (second["num_on_meta"] > 0) == (efficient[1]["num_filled"] > 0) == (family == "mixtral")
    if family != "mixtral":
        # Transformers creates a tied bias again when it ties the weights.
        assert first["num_private"] == second["num_private"] == (family == "bert-mlm")
    observed = row(efficient[0]["report"])
    assert observed["status"] == "applied"
    assert efficient[0]["steps"] == normal[0]["steps"]
    assert equal(efficient[0]["weights"], normal[0]["weights"])
    assert all(equal(efficient[rank]["buffers"], normal[rank]["buffers"]) for rank in (0, 1))


@SHARED
@both_versions
def test_cast_weights_are_those_of_rank_0_in_fp32(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(save_plain, "llama-tied", str(tmp_path))
    efficient, normal = load_both_ways(two_ranks, "llama-tied", tmp_path, version, "bfloat16", mixed_precision="bf16")
    first, second = (rank["memory"] for rank in efficient)
    assert first["num_on_meta"] == 0 == second["num_private"]
    assert second["num_on_meta"] == efficient[1]["num_filled"] > 0
    assert row(efficient[0]["report"])["status"] == "applied"
    assert [rank["memory"]["num_on_meta"] for rank in normal] == [0, 0]
    assert {weight.dtype for weight in efficient[0]["weights"].values()} == {torch.float32}
    assert efficient[0]["steps"] == normal[0]["steps"]


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


@pytest.mark.parametrize("is_equal", [True, False], ids=["one-tensor", "two-tensors"])
@both_dtypes
def test_both_names_of_a_tie_are_compared_on_every_rank(
    two_ranks: Ranks, tmp_path: Path, is_equal: bool, dtype: str
) -> None:
    two_ranks.run(save_both_names, str(tmp_path), is_equal)
    efficient, normal = load_both_ways(two_ranks, "llama-tied", tmp_path, 2, dtype)
    assert [rank["memory"]["num_on_meta"] for rank in efficient] == [0, 0]
    assert efficient[0]["steps"] == normal[0]["steps"]


def save_bin(family: str, folder: str) -> None:
    """Save the model on rank 0 as older versions of Transformers did."""
    if dist.get_rank() == 0:
        model = FAMILIES[family].build()
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), Path(folder) / "pytorch_model.bin")
    dist.barrier()


def test_bin_file_is_mapped(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_bin, "llama", str(tmp_path))
    efficient, normal = load_both_ways(two_ranks, "llama", tmp_path, 2)
    assert [rank["memory"]["num_private"] for rank in efficient] == [0, 0]
    assert efficient[0]["steps"] == normal[0]["steps"]


def tiny_lfm2() -> Any:
    config = CONFIG_MAPPING["lfm2"](
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, full_attn_idxs=[1], block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def save_gguf(folder: str, architecture: str) -> None:
    """Save a tiny model as a GGUF file on rank 0."""
    if dist.get_rank() == 0:
        model: Any = FAMILIES["llama"].build() if architecture == "llama" else tiny_lfm2()
        write_gguf(model, f"{folder}/model.gguf", architecture)
    dist.barrier()


def private_memory() -> int:
    """Return the bytes that only this process has, without pages of files and without freed memory."""
    # The C library keeps up to 64 MB of freed memory in each of its arenas: as much as this test's model.
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel reports no anonymous memory")


def load_gguf(folder: str, config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Load and shard the model of a GGUF file."""
    accelerator = fresh_accelerator(config)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=dtype)
    memory = asdict(parameter_memory(model.parameters()))
    model = accelerator.prepare(model)
    return {
        "memory": memory,
        "weights": clones(accelerator.get_state_dict(model)),
        "printed": printed.getvalue(),
    }


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", "float32"), ("lfm2", "float32"), slow("llama", "bfloat16")]
)
def test_gguf_file_is_loaded_by_all_ranks(two_ranks: Ranks, tmp_path: Path, architecture: str, dtype: str) -> None:
    pytest.importorskip("gguf")
    two_ranks.run(save_gguf, str(tmp_path), architecture)
    efficient = two_ranks.run(load_gguf, str(tmp_path), efficient_config(), dtype)
    normal, _ = two_ranks.run(load_gguf, str(tmp_path), parallel_config("full_shard", 2, 2), dtype)
    first, second = efficient
    assert first["memory"]["num_on_meta"] == 0 == second["memory"]["num_on_meta"]
    assert "FSDP-W660" in first["printed"] and equal(first["weights"], normal["weights"])


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


@both_versions
def test_trainer_loads_a_usable_model_on_every_rank(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    model, output_dir = str(tmp_path / "model"), str(tmp_path / "out")
    two_ranks.run(save_plain, "llama-tied", model)
    efficient, normal = (
        two_ranks.run(
            load_and_train_with_trainer,
            "llama-tied",
            model,
            output_dir,
            version=version,
            cpu_ram_efficient_loading=is_efficient,
        )
        for is_efficient in (True, False)
    )
    for rank in efficient:
        assert rank["memory"]["num_private"] == rank["memory"]["num_on_meta"] == 0
    assert efficient[0]["losses"] == normal[0]["losses"]
    assert row(efficient[0]["report"])["status"] == "applied"


def touch_model(name: str, folder: str, dtype: str) -> nn.Module:
    """Load a model and use it as a script does. The values are the same in every process."""
    torch.manual_seed(0)
    return TOUCHES[name](FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype))  # type: ignore[attr-defined]


def touch_and_prepare(folder: str, dtype: str, config: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return for each use of the model the names of weights that this rank lacks, and all weights before and after."""
    results = {}
    for name in names:
        accelerator = fresh_accelerator(config)
        model = touch_model(name, folder, dtype)
        state = model.state_dict()
        on_meta = [n for n, tensor in state.items() if tensor.is_meta]
        local = clones({n: tensor for n, tensor in state.items() if not tensor.is_meta})
        model = accelerator.prepare(model)
        results[name] = {"on_meta": on_meta, "local": local, "prepared": clones(accelerator.get_state_dict(model))}
    return results


@both_versions
@both_dtypes
def test_scripts_use_the_model_before_prepare(two_ranks: Ranks, tmp_path: Path, version: int, dtype: str) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    is_mapped = dtype == "float32"
    names = [name for name in TOUCHES if name != "merge_lora" or pytest.importorskip("peft")]
    names = [name for name in names if is_mapped or name not in READS]
    results = two_ranks.run(touch_and_prepare, str(tmp_path), dtype, efficient_config(version), names)
    for name in names:
        expected = {
            key: tensor.detach() for key, tensor in touch_model(name, str(tmp_path), dtype).state_dict().items()
        }
        for rank in (0, 1):
            has_weights = is_mapped or rank == 0
            assert results[rank][name]["on_meta"] == ([] if has_weights else list(expected)), name
            assert not has_weights or equal(results[rank][name]["local"], expected), f"{name} on rank {rank}"
        prepared = results[0][name]["prepared"]
        assert equal({key: tensor.to(expected[key].dtype) for key, tensor in prepared.items()}, expected), name


def read_deferred(folder: str, config: dict[str, Any], names: list[str]) -> dict[str, str]:
    """Return what is printed if a script computes with weights that rank 0 has cast."""
    printed = {}
    for name in names:
        fresh_accelerator(config)
        printed[name] = ""
        try:
            touch_model(name, folder, "bfloat16")
        except RuntimeError as error:
            add_remedy(error)
            printed[name] = "".join(traceback.format_exception(error))
        dist.barrier()
    return printed


def test_reading_deferred_weights_is_an_error_with_a_remedy(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    first, second = two_ranks.run(read_deferred, str(tmp_path), efficient_config(), list(READS))
    for name in READS:
        assert first[name] == ""
        assert "FSDP-E662" in second[name] and "LlamaForCausalLM" in second[name], name


def prepare_without_broadcast(folder: str, config: dict[str, Any]) -> list[str]:
    """Load efficiently, then prepare the model with settings that send no weights. Returns the codes of the error."""
    fresh_accelerator(efficient_config())
    model: Any = FAMILIES["llama"].model.from_pretrained(folder, dtype="bfloat16")  # type: ignore[attr-defined]
    accelerator = fresh_accelerator(config)
    try:
        accelerator.prepare(model)
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    return []


def test_deferred_weights_without_broadcast_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    plain = parallel_config("full_shard", 2, 2)
    assert two_ranks.run(prepare_without_broadcast, str(tmp_path), plain) == [["FSDP-E661"]] * 2


def save_before_prepare(folder: str, dtype: str, output: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save a loaded model before it is prepared, and return the file. Transformers writes it on rank 0 only."""
    from safetensors.torch import load_file

    fresh_accelerator(config)
    model: Any = FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    model.save_pretrained(output)
    dist.barrier()
    return clones(load_file(f"{output}/model.safetensors"))


@both_dtypes
def test_save_pretrained_before_prepare_is_complete(two_ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    output = str(tmp_path / "saved")
    saved = two_ranks.run(save_before_prepare, str(tmp_path), dtype, output, efficient_config())
    expected = touch_model("read_weights", str(tmp_path), dtype).state_dict()
    assert equal(saved[0], expected) and equal(saved[1], expected)


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


@both_versions
def test_new_head_is_initialized_and_made_equal(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(save_plain, "bert-mlm", str(tmp_path))
    first, second = two_ranks.run(load_with_new_head, str(tmp_path), efficient_config(version))
    assert first["on_meta"] == second["on_meta"] == 0
    assert 0 < second["head"].std() < 1 and not torch.equal(first["head"], second["head"])
    assert torch.equal(first["prepared"], first["head"])
    assert row(first["report"])["status"] == "applied"


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


@both_versions
def test_change_in_place_stays_on_its_rank(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    first, second = two_ranks.run(change_on_one_rank, str(tmp_path), "float32", efficient_config(version))
    assert torch.equal(first["seen"], first["before"] + 1)
    assert torch.equal(second["seen"], second["before"])
    # The broadcast writes to new memory, because writing to a mapped page would copy it.
    assert torch.equal(second["after"], second["before"])
    assert torch.equal(first["prepared"].to(first["seen"].dtype), first["seen"])


def load_on_one_rank(folder: str, dtype: str, config: dict[str, Any], rank: int) -> int:
    """Load on one rank only. Then all ranks wait for each other."""
    fresh_accelerator(config)
    num = 0
    if dist.get_rank() == rank:
        model: Any = FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
        num = sum(parameter.is_meta or torch.isfinite(parameter).all().item() for parameter in model.parameters())
    dist.barrier()
    return num


@both_dtypes
@pytest.mark.parametrize("rank", [0, 1])
def test_loading_on_one_rank_waits_for_nobody(two_ranks: Ranks, tmp_path: Path, dtype: str, rank: int) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    nums = two_ranks.run(load_on_one_rank, str(tmp_path), dtype, efficient_config(), rank)
    assert nums[rank] > 0 == nums[1 - rank]


def load_one_after_the_other(folder: str, dtype: str, config: dict[str, Any]) -> dict[str, Any]:
    """Load twice on every rank, rank 0 first, as ``main_process_first`` does."""
    accelerator = fresh_accelerator(config)
    with accelerator.main_process_first():
        first: Any = FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    second: Any = FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    memory = [asdict(parameter_memory(model.parameters())) for model in (first, second)]
    change_in_place(first)
    states = [clones({n: t for n, t in model.state_dict().items() if not t.is_meta}) for model in (first, second)]
    return {"memory": memory, "first": states[0], "second": states[1]}


@both_dtypes
def test_second_model_is_independent_of_the_first(two_ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    expected = touch_model("read_weights", str(tmp_path), dtype).state_dict()
    ranks = two_ranks.run(load_one_after_the_other, str(tmp_path), dtype, efficient_config())
    for rank in ranks if dtype == "float32" else ranks[:1]:
        assert dtype == "bfloat16" or [memory["num_private"] for memory in rank["memory"]] == [0, 0]
        assert equal(rank["second"], expected)
        assert equal(rank["first"], {name: tensor * 2 for name, tensor in expected.items()})


def load_damaged(folder: str, dtype: str, config: dict[str, Any]) -> str:
    """Return the type of the error of a damaged checkpoint."""
    fresh_accelerator(config)
    try:
        FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    except Exception as error:
        return type(error).__name__
    return ""


@both_dtypes
def test_damaged_file_is_an_error_on_every_rank(two_ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    errors = two_ranks.run(load_damaged, str(tmp_path), dtype, efficient_config())
    assert errors[0] == errors[1] != ""


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


@both_dtypes
@pytest.mark.parametrize("given", ["copied", "mapped", "no"])
def test_private_weights_are_a_warning_with_their_size(
    two_ranks: Ranks, tmp_path: Path, dtype: str, given: str
) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    arguments = (str(tmp_path), dtype, efficient_config(), given)
    (printed, memory), _ = two_ranks.run(load_given_weights, *arguments)
    is_private = given == "copied" or (given == "mapped" and dtype != "float32")
    assert (memory["num_private"] > 0) == (is_private or dtype != "float32")
    assert ("FSDP-W660" in printed and "kB on each rank" in printed) == is_private


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
        "num_filled": parts_of(model).get(BroadcastRecord).num_filled,
        "weights": clones(accelerator.get_state_dict(model)),
        "report": hfp.report(accelerator).to_json(),
    }


@both_versions
def test_model_that_a_script_creates_on_meta_is_filled(two_ranks: Ranks, version: int) -> None:
    first, second = two_ranks.run(prepare_meta_model, efficient_config(version))
    assert first["num_filled"] == 0 < second["num_filled"]
    assert equal(first["weights"], dict(FAMILIES["llama"].build().state_dict()))
    assert row(first["report"])["status"] == "applied"


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


def has_zeros(model: Any) -> bool:
    """Read all weights, if this rank has them."""
    return all(parameter.is_meta or not parameter.detach().any() for parameter in model.parameters())


def private_memory_of_loading(folder: str, dtype: str, config: dict[str, Any]) -> dict[str, Any]:
    """Load a large model, and read all weights.

    Returns:
        The smallest growth of this rank's private memory over three loads.
    """
    fresh_accelerator(config)
    warm_up = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")  # libraries allocate memory at their first use
    assert has_zeros(warm_up)
    del warm_up
    grown = []
    for _ in range(3):  # other code of a long-lived process allocates memory too; a copy is there each time
        before = private_memory()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        assert has_zeros(model)
        grown.append(private_memory() - before)
        memory = asdict(parameter_memory(model.parameters()))
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        dist.barrier()
        del model
    return {"grown": min(grown), "model": num_bytes, "memory": memory}


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("llama", "float32"), ("mixtral", "bfloat16")])
def test_private_memory_is_small(two_ranks: Ranks, tmp_path: Path, family: str, dtype: str) -> None:
    two_ranks.run(save_large, str(tmp_path), family)
    ranks = two_ranks.run(private_memory_of_loading, str(tmp_path), dtype, efficient_config())
    is_mapped = (family, dtype) == ("llama", "bfloat16")
    for rank in ranks if is_mapped else ranks[1:]:
        assert rank["memory"]["num_mapped" if is_mapped else "num_on_meta"] > 0 == rank["memory"]["num_private"]
        assert rank["model"] > 40e6
        assert rank["grown"] < 0.2 * rank["model"]
