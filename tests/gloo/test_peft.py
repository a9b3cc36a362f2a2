"""Adapters of PEFT match training in one process, with and without ``use_orig_params``, or are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest
from hf_fsdp_plugin.tools.verify.comparison import manifest_problems
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support.matrices import slow
from tests.support.peft_runs import NUM_STEPS, adapted_llama
from tests.support.ranks import RankError, Ranks
from tests.support.tiny import GLOBAL_BATCH, parallel_config, tiny_llama
from tests.support.trainer_runs import Batches, losses, make_trainer
from tests.support.training import (
    RELATIVE,
    assert_same_training,
    assert_same_weights,
    differing,
    fresh_accelerator,
    loss_of,
    reference,
    sgd,
    train,
    train_prepared,
    train_without_accelerate,
)

pytest.importorskip("peft")


BACKENDS = {
    "fsdp1": {"version": 1},
    "flat": {"version": 1, "fsdp_use_orig_params": False},
    "fsdp2": {"version": 2},
}

IN_ARGUMENTS = {
    "fsdp1": {"version": 1, "use_orig_params": True},
    "flat": {"version": 1, "use_orig_params": False},
    "fsdp2": {"version": 2},
}

QUICK = ("lora", "dora", "ia3", "modules", "prompt")

SAVED = ("lora", "dora", "ia3", "embedding", "prompt", "prefix", "two")

BARE = ("ia3", "embedding", "loha", "vera")
"""Adapters whose parameters are not in modules of their own."""

OTHERS = ("rslora", "embedding", "prefix", "ptuning", "loha", "vera", "two")


@cache
def reference_of(kind: str) -> dict[str, Any]:
    return reference(f"peft-{kind}", sgd, NUM_STEPS)


def config_of(backend: str, **settings: Any) -> dict[str, Any]:
    return parallel_config("full_shard", world_size=2, **{**BACKENDS[backend], **settings})


def train_adapter(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The results of :func:`training.train`. Ranks that have not imported this module do not know its models."""
    return train(f"peft-{kind}", config, sgd, NUM_STEPS)


def train_kind(ranks: Ranks, kind: str, backend: str, **settings: Any) -> dict[str, Any]:
    return ranks.run(train_adapter, config_of(backend, **settings), kind)[0]


def codes(run: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in run["report"]["problems"]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [*QUICK, *(slow(kind) for kind in OTHERS)])
def test_adapter_trains_as_in_one_process(two_ranks: Ranks, kind: str, backend: str) -> None:
    if backend == "flat" and kind in BARE:
        with pytest.raises(RankError, match=r"(?s)fsdp_use_orig_params: true.*FSDP-E222"):
            train_kind(two_ranks, kind, backend)
        return
    run = train_kind(two_ranks, kind, backend)
    assert_same_training(run, reference_of(kind))
    assert differing(run["report"]) == []
    assert ("FSDP-W265" in codes(run)) == (backend == "flat")


@pytest.mark.parametrize("kind", ["bias", "tokens"])
def test_bare_adapter_parameters_need_original_parameters(two_ranks: Ranks, kind: str) -> None:
    with pytest.raises(RankError, match=r"(?s)fsdp_use_orig_params: true.*FSDP-E222"):
        train_kind(two_ranks, kind, "flat")
    for backend in ("fsdp1", "fsdp2"):
        assert_same_training(train_kind(two_ranks, kind, backend), reference_of(kind))


def _disabled_loss(accelerator: Any, model: Any) -> float:
    inner = accelerator.unwrap_model(model)
    with torch.no_grad(), inner.disable_adapter():
        loss = loss_of(model, "llama", 0, accelerator.process_index, accelerator.num_processes)
    dist.all_reduce(loss)
    return loss.item() / accelerator.num_processes


def train_disabled_first(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Training of a model whose first forward, and one between the steps, is in ``disable_adapter``."""
    accelerator = fresh_accelerator(config)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    model: Any = adapted_llama(kind)
    model, optimizer = accelerator.prepare(model, sgd(model))
    before = _disabled_loss(accelerator, model)
    run = train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)
    # As in preference training: a forward with gradients, one without adapters, then backward.
    loss = loss_of(model, "llama", NUM_STEPS, rank, world_size)
    after = _disabled_loss(accelerator, model)
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    optimizer.zero_grad()
    last = loss_of(model, "llama", NUM_STEPS + 1, rank, world_size).detach()
    dist.all_reduce(last)
    return {**run, "disabled": (before, after), "norm": norm, "last": last.item() / world_size}


def disabled_first_reference(kind: str) -> dict[str, Any]:
    """The results of :func:`train_disabled_first` in one process."""
    model: Any = adapted_llama(kind)
    optimizer = sgd(model)
    steps, norms = train_without_accelerate(model, optimizer, "llama", NUM_STEPS)
    loss = loss_of(model, "llama", NUM_STEPS)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    last = loss_of(model, "llama", NUM_STEPS + 1).item()
    with torch.no_grad(), model.disable_adapter():
        disabled = loss_of(model, "llama", 0).item()
    return {"losses": steps, "norms": norms, "norm": norm, "last": last, "disabled": (disabled, disabled)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["lora", "modules"])
def test_disabled_adapters_leave_the_base_model(two_ranks: Ranks, kind: str, backend: str) -> None:
    expected = disabled_first_reference(kind)
    run = two_ranks.run(train_disabled_first, config_of(backend), kind)[0]
    for name in ("losses", "norms", "norm", "last", "disabled"):
        assert run[name] == pytest.approx(expected[name], rel=RELATIVE), name


def saved_adapter(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def errors_of(folder: Path) -> list[str]:
    return [str(problem) for problem in verify(folder, config_check=False).problems if problem.severity == "error"]


def save_adapter(output_dir: str, kind: str, **arguments: Any) -> None:
    """Train one step with the Trainer, and save a checkpoint and the model."""
    trainer = make_trainer(
        output_dir, adapted_llama(kind), save_strategy="steps", save_steps=1, max_steps=1, **arguments
    )
    trainer.train()
    trainer.save_model(f"{output_dir}/final")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_dict_type", ["sharded", "full", "local"])
def test_checkpoint_of_an_adapter_is_undamaged(
    two_ranks: Ranks, tmp_path: Path, backend: str, state_dict_type: str
) -> None:
    config = {**IN_ARGUMENTS[backend], "state_dict_type": f"{state_dict_type}_state_dict".upper()}
    two_ranks.run(save_adapter, str(tmp_path), "lora", fsdp="full_shard auto_wrap", fsdp_config=config)
    folder = tmp_path / "checkpoint-1"
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.parameters and all(".lora_" in name for name in manifest.parameters)
    assert errors_of(folder) == [] == errors_of(tmp_path / "final")
    # Manifests of earlier versions also list the parameters of the base model.
    kind, shape = next(iter(manifest.parameters.values()))
    base = {"base_model.model.lm_head.base_layer.weight": (kind, shape), "base_model.model.norm.weight": (kind, shape)}
    model = read_stored_model(folder)
    assert manifest_problems(model, replace(manifest, parameters={**manifest.parameters, **base})) == []
    lost = {**manifest.parameters, **base, "base_model.model.lm_head.lora_A.default.weight": (kind, shape)}
    assert [p.code for p in manifest_problems(model, replace(manifest, parameters=lost))] == ["FSDP-E477"]


def train_save_and_resume(output_dir: str, kind: str, **arguments: Any) -> dict[str, Any]:
    """Train six steps with the Trainer, train the last three again from the checkpoint, and save the adapter."""
    schedule = {"save_strategy": "steps", "save_steps": 3, **arguments}
    whole = make_trainer(output_dir, adapted_llama(kind), **schedule)
    whole.train()
    resumed = make_trainer(output_dir, adapted_llama(kind), **schedule)
    resumed.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-3"))
    resumed.save_model(str(Path(output_dir) / "final"))
    dist.barrier()
    return {"whole": losses(whole), "resumed": losses(resumed)}


def trainer_reference(output_dir: str, kind: str) -> tuple[list[float], dict[str, dict[str, torch.Tensor]]]:
    """Losses of six steps in one process, and the state of each adapter that PEFT saves afterwards."""
    from peft import get_peft_model_state_dict
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=output_dir, per_device_train_batch_size=GLOBAL_BATCH, max_steps=6, learning_rate=1e-3,
        logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True, seed=3, save_strategy="no",
    )  # fmt: skip
    model: Any = adapted_llama(kind)
    trainer = Trainer(model=model, args=arguments, train_dataset=Batches(6))
    trainer.train()
    saved = {}
    for adapter in model.peft_config:
        state = get_peft_model_state_dict(model, adapter_name=adapter)
        saved[adapter] = {name: tensor.detach() for name, tensor in state.items()}
    return losses(trainer), saved


def _loaded(folder: str, kind: str) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(tiny_llama(layers=2, attention_bias=kind == "bias"), folder)


def adapted_logits(folder: str, kind: str) -> torch.Tensor:
    """The logits of the base model with a saved adapter."""
    return _loaded(folder, kind)(input_ids=torch.arange(8)[None]).logits.detach()


def merged_logits(folder: str, kind: str) -> torch.Tensor:
    """The logits of the base model after a saved adapter is merged into it."""
    return _loaded(folder, kind).merge_and_unload()(input_ids=torch.arange(8)[None]).logits.detach()


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param(kind, backend, marks=[] if kind == "modules" else pytest.mark.slow)
        for kind in ("modules", *SAVED)
        for backend in BACKENDS
        if not (backend == "flat" and kind in BARE)
    ],
)
def test_adapter_is_saved_resumed_and_merged(two_ranks: Ranks, tmp_path: Path, kind: str, backend: str) -> None:
    """Losses, the saved adapter, and the merged model that is loaded from it equal those of one process."""
    losses, adapters = trainer_reference(str(tmp_path / "reference"), kind)
    arguments = {"fsdp": "full_shard auto_wrap", "fsdp_config": IN_ARGUMENTS[backend]}
    run = two_ranks.run(train_save_and_resume, str(tmp_path), kind, **arguments)[0]
    assert run["whole"] == pytest.approx(losses, rel=RELATIVE)
    assert run["resumed"] == pytest.approx(losses, rel=RELATIVE)
    for folder in ("checkpoint-6", "final"):
        for name, expected in adapters.items():
            saved = saved_adapter(tmp_path / folder / ("" if name == "default" else name))
            assert_same_weights(saved, expected, 1e-4)
    assert errors_of(tmp_path / "checkpoint-6") == []
    if kind not in ("prompt", "prefix", "ptuning"):
        merged = merged_logits(str(tmp_path / "final"), kind)
        assert torch.allclose(merged, adapted_logits(str(tmp_path / "final"), kind), atol=1e-5)


def merge_sharded(config: dict[str, Any], how: str) -> list[str]:
    """Merge the adapters of a prepared model. Returns the codes of the problems."""
    import hf_fsdp_plugin as hfp

    accelerator = fresh_accelerator(config)
    model: Any = accelerator.prepare(adapted_llama("lora"))
    hfp.install(config)
    try:
        getattr(accelerator.unwrap_model(model), how)()
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    return []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["merge_adapter", "merge_and_unload", "unload"])
def test_merge_of_sharded_model_is_refused(two_ranks: Ranks, how: str, backend: str) -> None:
    assert two_ranks.run(merge_sharded, config_of(backend), how) == [["FSDP-E631"]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_adalora_is_refused(two_ranks: Ranks, backend: str) -> None:
    with pytest.raises(RankError, match="FSDP-E630"):
        train_kind(two_ranks, "adalora", backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lora_on_parameters_needs_fsdp2(two_ranks: Ranks, backend: str) -> None:
    if backend == "fsdp2":
        assert_same_training(train_kind(two_ranks, "parameters", backend), reference_of("parameters"))
        return
    with pytest.raises(RankError, match="FSDP-E646"):
        train_kind(two_ranks, "parameters", backend)


def prepare_lora_fa(config: dict[str, Any]) -> list[str]:
    """The codes of the problems with the optimizer of LoRA-FA."""
    from peft.optimizers import create_lorafa_optimizer

    import hf_fsdp_plugin as hfp

    accelerator = fresh_accelerator(config)
    model = adapted_llama("lora")
    try:
        accelerator.prepare(model, create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-3))
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    return []


@pytest.mark.parametrize("backend", BACKENDS)
def test_optimizer_of_lora_fa_is_refused(two_ranks: Ranks, backend: str) -> None:
    assert two_ranks.run(prepare_lora_fa, config_of(backend))[0] == ["FSDP-E321"]


def assign_policy(config: dict[str, Any], by_peft: bool) -> list[str]:
    """Prepare a model after a policy is assigned to the plugin. Returns its layers that are units, or the codes."""

    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    import hf_fsdp_plugin as hfp

    accelerator = fresh_accelerator(config)
    model = adapted_llama("lora")
    custom = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear))
    accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model) if by_peft else custom
    try:
        model = accelerator.prepare(model)
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems if problem.severity == "error"]
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return [name.removeprefix("base_model.") for name in units if "layers" in name]


@pytest.mark.parametrize(
    ("by_peft", "settings", "expected"),
    [
        (True, {}, ["model.model.layers.0", "model.model.layers.1"]),
        (True, {"fsdp_auto_wrap_policy": "NO_WRAP"}, ["model.model.layers.0", "model.model.layers.1"]),
        (False, {}, ["FSDP-E037"]),
    ],
    ids=str,
)
def test_policy_of_peft_may_be_assigned(
    two_ranks: Ranks, by_peft: bool, settings: dict[str, Any], expected: list[str]
) -> None:
    config = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {"fsdp_version": 2, **settings}}
    assert two_ranks.run(assign_policy, config, by_peft) == [expected] * 2


def train_checkpointed(config: dict[str, Any], kind: str, reentrant: bool) -> dict[str, Any]:
    """Training with the model's own gradient checkpointing, which needs inputs of the frozen layers with gradients."""
    accelerator = fresh_accelerator(config)
    model: Any = adapted_llama(kind)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model, optimizer = accelerator.prepare(model, sgd(model))
    return train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, slow(True)])
def test_gradient_checkpointing_of_frozen_layers(two_ranks: Ranks, backend: str, reentrant: bool) -> None:
    run = two_ranks.run(train_checkpointed, config_of(backend), "lora", reentrant)[0]
    assert_same_training(run, reference_of("lora"))
