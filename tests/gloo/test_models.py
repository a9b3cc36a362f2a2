"""Models other than plain Transformers models, and unusual uses: they match training in one process."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import hf_fsdp_plugin as hfp
from tests.support.json_schema import assert_valid
from tests.support.matrices import slow
from tests.support.ranks import RankError, Ranks, own_device
from tests.support.tiny import MODELS, SimpleModel, parallel_config, tiny_bert, tiny_llama
from tests.support.trainer_runs import losses, make_trainer
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
)

NUM_STEPS = 3

NUM_LAYERS = 3


VERSIONS = pytest.mark.parametrize("version", [1, 2])


@cache
def reference_of(name: str) -> dict[str, Any]:
    return reference(name, sgd, NUM_STEPS)


def train_model(ranks: Ranks, name: str, config: dict[str, Any]) -> dict[str, Any]:
    return ranks.run(train, name, config, sgd, NUM_STEPS)[0]


def config_of(version: int, **settings: Any) -> dict[str, Any]:
    return parallel_config("full_shard", version, 2, **settings)


@VERSIONS
@pytest.mark.parametrize(
    "policy",
    [
        {"fsdp_auto_wrap_policy": "NO_WRAP"},
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000},
        {"fsdp_transformer_layer_cls_to_wrap": "Linear"},
        {},
    ],
    ids=["none", "size", "classes", "default"],
)
def test_plain_module_trains_with_every_wrap_policy(two_ranks: Ranks, version: int, policy: dict[str, Any]) -> None:
    run = train_model(two_ranks, "simple", config_of(version, **policy))
    assert_same_training(run, reference_of("simple"))
    assert differing(run["report"]) == []


def wrap_by_author(model: nn.Module, version: int, use_orig: bool) -> nn.Module:
    """Shard a model as torch's tutorials do."""
    layers = {type(model.model.layers[0])} if hasattr(model, "model") else {nn.Linear}
    if version == 1:
        policy, device = ModuleWrapPolicy(layers), own_device()
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=use_orig)
    for module in [m for m in model.modules() if type(m) in layers]:
        fully_shard(module)
    return fully_shard(model)


def train_wrapped_by_author(
    name: str, config: dict[str, Any], version: int, order: str, use_orig: bool = True
) -> dict[str, Any]:
    """``order``: the optimizer is created ``before wrapping``, ``before preparing`` or ``after`` preparing."""
    accelerator = fresh_accelerator(config)
    model = MODELS[name]()
    optimizer = sgd(model) if order == "before wrapping" else None
    model = wrap_by_author(model, version, use_orig)
    if order == "before preparing":
        optimizer = sgd(model)
    if optimizer is not None:
        prepared, optimizer = accelerator.prepare(model, optimizer)
    else:
        prepared = accelerator.prepare(model)
        optimizer = accelerator.prepare(sgd(prepared))
    return {**train_prepared(accelerator, prepared, optimizer, name, NUM_STEPS), "same": prepared is model}


@pytest.mark.parametrize("config_version", [1, 2])
@pytest.mark.parametrize(("version", "use_orig"), [(1, True), (1, False), (2, True)])
@pytest.mark.parametrize("order", ["before preparing", "after"])
@pytest.mark.parametrize("name", ["llama", "simple"])
def test_model_wrapped_by_author_keeps_units_and_trains(
    two_ranks: Ranks, name: str, order: str, version: int, use_orig: bool, config_version: int
) -> None:
    run = two_ranks.run(train_wrapped_by_author, name, config_of(config_version), version, order, use_orig)[0]
    assert run["same"]
    assert_same_training(run, reference_of(name))
    report = run["report"]
    layers = ["layer1", "layer2"] if name == "simple" else [f"model.layers.{i}" for i in range(3)]
    assert [unit["name"] for unit in report["units"]] == [*layers, ""]
    assert report["backend"] == f"fsdp{version}"
    assert differing(run["report"]) == [*(["fsdp.version"] if version != config_version else []), "wrap.policy"]
    assert "FSDP-W251" in [problem["code"] for problem in report["problems"]]
    assert not [problem for problem in report["problems"] if problem["severity"] == "error"]


def wrap_with_fields(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model with the plugin's fields, as TRL's ``prepare_fsdp`` does."""
    plugin, model = accelerator.state.fsdp_plugin, model.to(accelerator.device)
    if plugin.fsdp_version == 1:
        plugin.set_auto_wrap_policy(model)
        return FullyShardedDataParallel(
            model,
            sharding_strategy=plugin.sharding_strategy or plugin.reshard_after_forward,
            cpu_offload=plugin.cpu_offload,
            auto_wrap_policy=plugin.auto_wrap_policy,
            mixed_precision=plugin.mixed_precision_policy,
            sync_module_states=plugin.sync_module_states,
            backward_prefetch=plugin.backward_prefetch,
            forward_prefetch=plugin.forward_prefetch,
            use_orig_params=plugin.use_orig_params,
            param_init_fn=plugin.param_init_fn,
            ignored_modules=plugin.ignored_modules,
            limit_all_gathers=plugin.limit_all_gathers,
            device_id=accelerator.device,
        )
    mesh = accelerator.torch_device_mesh
    return fully_shard(
        model,
        reshard_after_forward=plugin.reshard_after_forward,
        offload_policy=plugin.cpu_offload,
        mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        mesh=mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)] if mesh is not None else None,
        ignored_params=get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device),
    )


def train_wrapped_with_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Train a model that was sharded with the plugin's fields and then prepared."""
    accelerator = fresh_accelerator(config)
    model, optimizer = accelerator.prepare(wrapped := wrap_with_fields(accelerator, tiny_llama()), sgd(wrapped))
    return train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)


@pytest.mark.parametrize(
    ("version", "settings"),
    [(1, {}), (1, {"fsdp_use_orig_params": False, "fsdp_ignored_modules": "lm_head"}), (2, {}),
     (2, {"fsdp_ignored_modules": "lm_head"})],
)  # fmt: skip
def test_model_wrapped_with_plugin_fields_trains(two_ranks: Ranks, version: int, settings: dict[str, Any]) -> None:
    config = config_of(version, fsdp_sync_module_states=True, fsdp_offload_params=True, **settings)
    run = two_ranks.run(train_wrapped_with_fields, config)[0]
    if not settings.get("fsdp_ignored_modules"):  # FSDP does not reduce the gradients of ignored modules
        assert_same_training(run, reference_of("llama"))
    layers = [unit["name"] for unit in run["report"]["units"]]
    assert layers == ([f"model.layers.{i}" for i in range(3)] if version == 1 else []) + [""]


def clip_unprepared(config: dict[str, Any]) -> tuple[float, float]:
    """Return the norm of one backward of a model that is wrapped but not prepared, and the norm in one process."""
    accelerator = fresh_accelerator(config)
    bare, model = tiny_llama(), wrap_with_fields(accelerator, tiny_llama())
    loss_of(bare, "llama", 0).backward()
    loss_of(model, "llama", 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(bare.parameters(), 0.5).item()
    return accelerator.clip_grad_norm_(model.parameters(), 0.5).item(), expected


def test_clipping_of_unprepared_fsdp1_model_is_refused(two_ranks: Ranks) -> None:
    for settings in ({}, {"fsdp_use_orig_params": False}):
        with pytest.raises(RankError, match="FSDP-E611"):
            two_ranks.run(clip_unprepared, config_of(1, **settings))
    norm, expected = two_ranks.run(clip_unprepared, config_of(2))[0]
    assert norm == pytest.approx(expected, rel=RELATIVE)


def evaluate_further_models(config: dict[str, Any]) -> dict[str, Any]:
    """Train a llama beside frozen models of other classes, which are prepared for evaluation only."""
    from hf_fsdp_plugin.integrations.accelerate.prepare import prepare_for_evaluation

    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, sgd(model))
    teachers = {"bert": tiny_bert(), "simple": SimpleModel()}
    prepared = {name: prepare_for_evaluation(accelerator, teacher) for name, teacher in teachers.items()}
    with torch.no_grad():
        found = {name: loss_of(teacher, name, 0).item() for name, teacher in prepared.items()}
        expected = {name: loss_of(MODELS[name](), name, 0).item() for name in prepared}
    accelerator.prepare(prepared["bert"])  # it is prepared already
    run = train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)
    text = str(hfp.report(accelerator))
    return {**run, "found": found, "expected": expected, "text": text}


@VERSIONS
def test_further_models_are_sharded_and_reported(two_ranks: Ranks, version: int) -> None:
    run = two_ranks.run(
        evaluate_further_models, config_of(version, fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer")
    )[0]
    assert_same_training(run, reference_of("llama"))
    assert run["found"] == pytest.approx(run["expected"], rel=RELATIVE)
    report = run["report"]
    assert_valid("report", report)
    assert report["model_class"] == "LlamaForCausalLM"
    bert, simple = report["other_models"]
    assert (bert["model_class"], simple["model_class"]) == ("BertForMaskedLM", "SimpleModel")
    assert {"bert.encoder.layer.0", "bert.encoder.layer.2"} <= {unit["name"] for unit in bert["units"]}
    assert [unit["name"] for unit in simple["units"]] == [""]
    for other in (bert, simple):
        assert differing(other) == []
        assert "FSDP-W260" in [problem["code"] for problem in other["problems"]]
    assert "other model" in run["text"] and "BertForMaskedLM" in run["text"]


@pytest.mark.parametrize(("version", "use_orig"), [(1, False), (2, True)])
def test_optimizer_created_before_wrapping_is_refused(two_ranks: Ranks, version: int, use_orig: bool) -> None:
    with pytest.raises(RankError, match=r"4 parameters of SGD.*FSDP-E604"):
        two_ranks.run(train_wrapped_by_author, "simple", config_of(version), version, "before wrapping", use_orig)


def test_use_orig_params_accepts_optimizer_created_before_wrap(two_ranks: Ranks) -> None:
    run = two_ranks.run(train_wrapped_by_author, "simple", config_of(1), 1, "before wrapping", True)[0]
    assert_same_training(run, reference_of("simple"))


def train_wrapped_in_trainer(output_dir: str, version: int) -> list[dict[str, Any]]:
    """Train a model that its author has wrapped, then one that the plan wraps, with the Trainer."""
    runs = []
    for model in (wrap_by_author(tiny_llama(), version, use_orig=True), tiny_llama()):
        config = {"version": version}
        trainer = make_trainer(output_dir, model, fsdp="full_shard auto_wrap", fsdp_config=config, max_steps=3)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        runs.append({"losses": [*losses(trainer), evaluated], "report": hfp.report(trainer).to_json()})
    return runs


@VERSIONS
def test_trainer_accepts_model_wrapped_by_author(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    by_author, by_plan = two_ranks.run(train_wrapped_in_trainer, str(tmp_path), version)[0]
    assert by_author["losses"] == pytest.approx(by_plan["losses"], rel=RELATIVE)
    assert by_author["report"]["units"][-1]["name"] == ""
    assert differing(by_author["report"]) == ["wrap.policy"]


@pytest.mark.parametrize(
    ("version", "use_orig", "frozen"),
    [
        (1, True, "half"),
        (1, False, "half"),
        (1, True, "embeddings"),
        (1, False, "embeddings"),  # a unit of their own
        (2, True, "half"),
        (2, True, "embeddings"),
    ],
)
def test_frozen_parameters_keep_their_values(two_ranks: Ranks, version: int, use_orig: bool, frozen: str) -> None:
    run = train_model(two_ranks, frozen, config_of(version, fsdp_use_orig_params=use_orig))
    assert_same_training(run, reference_of(frozen))
    assert "params.use_orig" not in differing(run["report"]) or version == 2


def with_dropout() -> nn.Module:
    """A llama with dropout in every layer, so that the recompute has to draw the same random numbers again."""
    model: Any = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.5))
    return model.train()


def dropout_step(config: dict[str, Any], native: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """One SGD step with dropout active: of the bare model with averaged gradients, and of the prepared one."""
    accelerator = fresh_accelerator(config)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    bare = with_dropout().to(accelerator.device)
    torch.manual_seed(100 + rank)
    loss_of(bare, "llama", 0, rank, world_size).backward()
    for parameter in bare.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    torch.optim.SGD(bare.parameters(), lr=1.0).step()

    model: Any = with_dropout()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    if native:
        (model.module if hasattr(model, "module") else model).gradient_checkpointing_enable()
    torch.manual_seed(100 + rank)
    accelerator.backward(loss_of(model, "llama", 0, rank, world_size))
    optimizer.step()
    return dict(bare.state_dict()), accelerator.get_state_dict(model)


@VERSIONS
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fsdp_activation_checkpointing": True},
        {"fsdp_activation_checkpointing": "selective"},
        {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
        {"native": True},
    ],
    ids=["none", "full", "selective", "offload", "native"],
)
def test_recompute_repeats_dropout_of_forward(two_ranks: Ranks, version: int, settings: dict[str, Any]) -> None:
    ours = {key: value for key, value in settings.items() if key != "native"}
    bare, sharded = two_ranks.run(dropout_step, config_of(version, **ours), "native" in settings)[0]
    assert_same_weights(sharded, bare)


@VERSIONS
def test_bf16_model_is_trained_with_fp32_master_weights(two_ranks: Ranks, version: int) -> None:
    run = train_model(two_ranks, "llama-bf16", {**config_of(version), "mixed_precision": "bf16"})
    assert run["masters"] == {"torch.float32"}
    assert {unit["master_dtype"] for unit in run["report"]["units"] if unit["num_params"]} == {"fp32"}
    # bf16 has 8 significant bits, so results differ by up to 1/256; weights, which change little, differ less.
    assert_same_training(run, reference_of("llama-bf16"), relative=4e-3)
    assert differing(run["report"]) == []


@VERSIONS
def test_bf16_model_without_mixed_precision_is_warned_about(two_ranks: Ranks, version: int) -> None:
    run = train_model(two_ranks, "llama-bf16", config_of(version))
    assert run["masters"] == {"torch.bfloat16"}
    assert "FSDP-W231" in [problem["code"] for problem in run["report"]["problems"]]


def train_compiled(config: dict[str, Any], how: str) -> dict[str, Any]:
    """``how``: dynamo settings of the config, or ``torch.compile(model)`` or ``model.compile()`` in the script."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    counter = CompileCounter()
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    if how == "wrapper":
        model = torch.compile(model, backend=counter)
    elif how == "in place":
        model.compile(backend=counter)
    model, optimizer = accelerator.prepare(model, sgd(model))
    run = train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)
    return {
        **run,
        "num_graphs": counter.frame_count,
        "dynamo": counters["frames"]["ok"],
        "unique_graphs": counters["stats"]["unique_graphs"],
        "breaks": list(counters["graph_break"]),
    }


@VERSIONS
@pytest.mark.parametrize("how", ["config", slow("wrapper"), slow("in place")])
def test_compiled_model_trains_with_its_compiler(two_ranks: Ranks, version: int, how: str) -> None:
    dynamo = {"dynamo_config": {"dynamo_backend": "aot_eager"}} if how == "config" else {}
    config = {**config_of(version), **dynamo}
    run = two_ranks.run(train_compiled, config, how)[0]
    assert_same_training(run, reference_of("llama"))
    assert run["dynamo"] > 0
    assert how == "config" or run["num_graphs"] > 0
    assert differing(run["report"]) == []


@VERSIONS
def test_compiled_layers_with_ignored_modules_are_one_graph(two_ranks: Ranks, version: int) -> None:
    """torch.compile breaks the graph at modules that are marked as managed by FSDP and as having flat parameters."""
    config = config_of(version, fsdp_ignored_modules=r".*\.mlp")
    run = two_ranks.run(train_compiled, {**config, "dynamo_config": {"dynamo_backend": "aot_eager"}}, "config")[0]
    assert_same_training(run, reference_of("llama"))
    assert run["dynamo"] > 0 and not [reason for reason in run["breaks"] if "use_orig_params" in reason], run["breaks"]


@VERSIONS
@pytest.mark.parametrize("kind", [True, "selective"])
def test_layers_are_compiled_with_their_checkpoints(two_ranks: Ranks, version: int, kind: Any) -> None:
    config = config_of(version, fsdp_activation_checkpointing=kind)
    run = two_ranks.run(train_compiled, {**config, "dynamo_config": {"dynamo_backend": "aot_eager"}}, "config")[0]
    assert_same_training(run, reference_of("llama"))
    assert differing(run["report"]) == []
    assert run["unique_graphs"] == 1 and run["breaks"] == []
    rows = {row["setting"]: row["observed"] for row in run["report"]["settings"]}
    assert rows["launch.dynamo_config"] == "compiled"
    assert rows["activation.checkpointing"] == ("full" if kind is True else kind)


@contextmanager
def opaque_backend() -> Iterator[None]:
    """Let the backend ``aot_eager`` hide its operators from dispatch modes, as inductor's extern kernels are hidden.

    Inductor itself compiles C++ for half a minute.
    """
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends import registry
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            with torch._C._DisableTorchDispatch():
                return graph(*args)

        return make_boxed_func(run)

    hidden = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    registry.lookup_backend("aot_eager")  # registers the backends of torch
    with patch.dict(registry._COMPILER_FNS, aot_eager=hidden):
        yield


def matmuls_of_backward(version: int, backend: str) -> dict[str, int]:
    """Return the matrix products of a backward with compiled layers, by kind of checkpointing."""
    found = {}
    for kind in ("none", "selective", "full"):
        torch._dynamo.reset()
        settings = (
            {} if kind == "none" else {"fsdp_activation_checkpointing": "selective" if kind == "selective" else True}
        )
        config = parallel_config("full_shard", version, 2, **settings)
        accelerator = fresh_accelerator({**config, "dynamo_config": {"dynamo_backend": backend}})
        model: Any = accelerator.prepare(tiny_llama(layers=NUM_LAYERS))
        ids = torch.arange(16).view(2, 8)
        # The compiler leaves a variable for its processes.
        with torch._inductor.config.patch(compile_threads=1), patch.dict(os.environ), opaque_backend():
            for _ in range(2):  # the first one compiles
                loss = model(input_ids=ids, labels=ids).loss
                with torch.profiler.profile() as profile:
                    accelerator.backward(loss)
        found[kind] = sum(event.count for event in profile.key_averages() if event.key == "aten::mm")
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    ("version", "backend"), [slow(1, "AOT_EAGER"), (2, "AOT_EAGER"), slow(1, "INDUCTOR"), slow(2, "INDUCTOR")]
)
def test_compiled_selective_checkpoint_saves_products(two_ranks: Ranks, version: int, backend: str) -> None:
    """The policy does not know the operators of compiled code: in a checkpoint, all products would be recomputed."""
    for found in two_ranks.run(matmuls_of_backward, version, backend):
        per_layer = 7  # the last product of a layer is not needed for its gradients
        assert found["full"] - found["none"] == NUM_LAYERS * (per_layer - 1)
        assert found["selective"] - found["none"] == NUM_LAYERS * (per_layer // 2)


def train_two(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Two models of different classes and their optimizers in one ``prepare``."""
    accelerator = fresh_accelerator(config)
    one, other = tiny_llama(), SimpleModel()
    one, other, first, second = accelerator.prepare(one, other, sgd(one), sgd(other))
    return [
        train_prepared(accelerator, one, first, "llama", NUM_STEPS),
        train_prepared(accelerator, other, second, "simple", NUM_STEPS),
    ]


@VERSIONS
def test_two_models_are_prepared_in_one_call(two_ranks: Ranks, version: int) -> None:
    config = config_of(version, fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=2000)
    llama, simple = two_ranks.run(train_two, config)[0]
    assert_same_training(llama, reference_of("llama"))
    assert_same_training(simple, reference_of("simple"))


def evaluate_only(config: dict[str, Any], trained: bool) -> dict[str, Any]:
    """Prepare a model without an optimizer, alone or together with a model that trains."""
    accelerator = fresh_accelerator(config)
    teacher: Any = tiny_llama().eval()
    teacher.requires_grad_(False)
    teacher = accelerator.prepare(teacher)
    with torch.no_grad():
        loss = loss_of(teacher, "llama", 0, accelerator.process_index, accelerator.num_processes)
    dist.all_reduce(loss)
    run = {"loss": loss.item() / accelerator.num_processes, "weights": accelerator.get_state_dict(teacher)}
    if trained:
        student = tiny_llama()
        student, optimizer = accelerator.prepare(student, sgd(student))
        run["student"] = train_prepared(accelerator, student, optimizer, "llama", NUM_STEPS)
    return run


@VERSIONS
@pytest.mark.parametrize("trained", [False, True], ids=["alone", "with-student"])
def test_model_without_optimizer_is_prepared(two_ranks: Ranks, version: int, trained: bool) -> None:
    run = two_ranks.run(evaluate_only, config_of(version), trained)[0]
    assert run["loss"] == pytest.approx(reference_of("llama")["losses"][0], rel=RELATIVE)
    assert_same_weights(run["weights"], tiny_llama().state_dict())
    if trained:
        assert_same_training(run["student"], reference_of("llama"))
        assert not [problem for problem in run["student"]["report"]["problems"] if problem["severity"] == "error"]


def clip_subset(config: dict[str, Any]) -> tuple[float, float]:
    """The norm of every second parameter of a prepared model, and the same norm of the unsharded model."""
    bare = tiny_llama()
    loss_of(bare, "llama", 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(list(bare.parameters())[::2], 1.0).item()
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model = accelerator.prepare(model)
    accelerator.backward(loss_of(model, "llama", 0, accelerator.process_index, accelerator.num_processes))
    return accelerator.clip_grad_norm_(list(model.parameters())[::2], 1.0).item(), expected


@VERSIONS
def test_norm_of_parameter_subset_covers_all_ranks(two_ranks: Ranks, version: int) -> None:
    norm, expected = two_ranks.run(clip_subset, config_of(version))[0]
    assert norm == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@VERSIONS
def test_adapter_trains_on_frozen_base(two_ranks: Ranks, version: int) -> None:
    run = train_model(two_ranks, "lora", config_of(version))
    assert_same_training(run, reference_of("lora"))
    assert torch.equal(run["weights"]["base_model.model.lm_head.weight"], tiny_llama().state_dict()["lm_head.weight"])
