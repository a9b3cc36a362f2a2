"""Linear layers in fp8 on two ranks: equal to one process that emulates fp8, reported, saved in fp32 and resumed."""

from __future__ import annotations

import copy
import functools
import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Linear

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.torch_private.context_parallel import add_cpu_attention
from tests.support import peft_runs  # noqa: F401 adds models with adapters
from tests.support.axes_runs import backward_of_divided, train_in_loop
from tests.support.axes_runs import train as train_by_trainer
from tests.support.communication_runs import counted_and_estimated
from tests.support.distributed_config_runs import PLAIN, exported_results, load, with_adapters
from tests.support.matrices import slow
from tests.support.ranks import Ranks, reset_accelerate
from tests.support.tiny import MODELS, global_batch, parallel_config, tiny_llama
from tests.support.trainer_runs import make_trainer
from tests.support.training import (
    MAX_NORM,
    adamw,
    assert_same_training,
    assert_same_weights,
    differing,
    fresh_accelerator,
    loss_of,
    train_prepared,
)

NUM_STEPS = 4
"""Sums of two ranks differ by 1e-7 from those of one process. After some more steps, one such difference is at the
border between two numbers of fp8, on some processors, and changes a norm by 0.1%."""


Results = tuple[float, dict[str, torch.Tensor]]
"""The loss of a part of a batch, and its gradients in fp32."""


pytest.importorskip("torchao", reason="torchao is not installed")


WHOLE = {"enable_fsdp_float8_all_gather": False}

OFFLOAD = {"fsdp_offload_params": True}

LAYERS = [name for name, module in tiny_llama().named_modules() if isinstance(module, Linear)][1:-1]
"""The layers that Accelerate converts: all but the first and the last."""


def _cast_weights(computing: nn.Module, masters: nn.Module) -> None:
    """Replace the weights of layers in fp8 by the masters, cast to fp8."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    for name, module in computing.named_modules():
        if type(module).__name__ == "Float8Linear":
            how: Any = (torch.float8_e4m3fn, module.linear_mm_config)
            cast: Any = hp_tensor_to_float8_dynamic(
                masters.get_submodule(name).weight.detach(), *how, gemm_input_role=GemmInputRole.WEIGHT
            )
            rest: Any = (torch.bfloat16, module.linear_mm_config, GemmInputRole.WEIGHT)
            module.weight = nn.Parameter(Float8TrainingTensor(cast._data, cast._scale, *rest))


def _taken(model: nn.Module, loss: torch.Tensor) -> Results:
    """The loss and the gradients, which are removed from the model."""
    gradients = {key: p.grad.float() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), gradients


def _of_samples(model: nn.Module, name: str, step: int) -> list[Results]:
    """The results of the parts of two ranks."""
    parts = []
    for part in range(2):
        loss = loss_of(model, name, step, part, 2)
        loss.backward()
        parts.append(_taken(model, loss))
    return parts


def _of_divided_sequences(model: nn.Module, step: int) -> list[Results]:
    """The results of all ranks, each of which has a part of each sequence, with Accelerate's hooks and torch's ring."""
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.tensor.experimental import context_parallel

    add_cpu_attention()
    _attach_context_parallel_hooks(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    divide, tokens = functools.partial(context_parallel, mesh), global_batch(step)["input_ids"]
    loss = backward_of_divided(model, tokens, mesh.size(), divide, torch.Tensor.backward)
    parts: list[Any] = [None] * mesh.size()
    dist.all_gather_object(parts, _taken(model, loss))
    return parts


def reference(
    name: str, num_steps: int = NUM_STEPS, *, all_gather: bool = False, divided: bool = False
) -> dict[str, Any]:
    """Losses, norms and weights of one process that computes the parts of several ranks, with fp32 masters.

    Args:
        all_gather: whether weights are cast to fp8 from fp32; otherwise from bf16.
        divided: whether this is one of several ranks with whole models, which divide sequences instead of samples.
    """
    from accelerate.utils import convert_model_to_fp8_ao
    from torchao.float8 import Float8LinearConfig

    model = MODELS[name]().float()
    optimizer, losses, norms = adamw(model), [], []
    for step in range(num_steps):
        computing = copy.deepcopy(model)
        for parameter in computing.parameters():  # buffers stay in fp32, as under FSDP2
            parameter.data = parameter.data.to(torch.bfloat16)
        convert_model_to_fp8_ao(computing, config=Float8LinearConfig(emulate=True, pad_inner_dim=True))
        if all_gather:
            _cast_weights(computing, model)
        parts = _of_divided_sequences(computing, step) if divided else _of_samples(computing, name, step)
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradient = sum(gradients[key] for _, gradients in parts) / len(parts)
                parameter.grad = gradient  # type: ignore[assignment]
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(sum(loss for loss, _ in parts) / len(parts))
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


@pytest.fixture(scope="module")
def references(two_ranks: Ranks) -> dict[bool, dict[str, Any]]:
    """Whether weights are cast from fp32 -> results of one process."""
    return {cast: two_ranks.run(reference, "llama", all_gather=cast)[0] for cast in (False, True)}


def settings_of(report: dict[str, Any], section: str) -> dict[str, Any]:
    rows = {row["setting"]: row for row in report["settings"]}
    return {name: row["observed"] for name, row in rows.items() if name.startswith(section)}


def config_of(version: int = 2, *, mixed_precision: str = "fp8", **fp8: Any) -> dict[str, Any]:
    """A config as ``accelerate config`` writes it, with the settings of ``fp8_config``."""
    config = parallel_config("full_shard", version, 2)
    return {**config, "mixed_precision": mixed_precision, "fp8_config": {"backend": "AO", **fp8}}


def gathered_dtypes(model: nn.Module) -> set[str]:
    """The dtypes of the weights of layers in fp8 just before their forward, when they are gathered."""
    found: set[str] = set()

    def note(module: Any, *_: Any) -> None:
        weight = module.weight
        found.add(str(getattr(weight, "_data", weight).dtype))

    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            module.register_forward_pre_hook(note)
    return found


def train(config: dict[str, Any], name: str = "llama", **arguments: Any) -> dict[str, Any]:
    accelerator = fresh_accelerator(config, **arguments)
    model = MODELS[name]()
    model, optimizer = accelerator.prepare(model, adamw(model))
    return {"gathered": gathered_dtypes(model), **train_prepared(accelerator, model, optimizer, name, NUM_STEPS)}


@pytest.mark.parametrize(
    ("version", "fp8", "settings"),
    [
        (2, {}, {}),
        (2, WHOLE, {}),
        (1, {}, {}),
        (2, {}, {"fsdp_activation_checkpointing": True}),
        slow(2, {}, {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
        (2, {}, {"fsdp_cpu_ram_efficient_loading": True}),
        slow(2, {}, {"fsdp_auto_wrap_policy": "NO_WRAP"}),
        (2, {}, OFFLOAD),
        slow(2, WHOLE, OFFLOAD),
        slow(1, {}, OFFLOAD),
    ],
    ids=str,
)
def test_training_equals_one_process(
    two_ranks: Ranks, references: dict[bool, Any], version: int, fp8: dict[str, Any], settings: dict[str, Any]
) -> None:
    gathers = version == 2 and not fp8
    config = config_of(version, **fp8)
    config["fsdp_config"] |= settings
    run = two_ranks.run(train, config)[0]
    assert_same_training(run, references[gathers])
    assert run["gathered"] == {"torch.float8_e4m3fn" if gathers else "torch.bfloat16"}
    assert differing(run["report"]) == []
    observed = settings_of(run["report"], "fp8.")
    assert (observed["fp8.backend"], observed["fp8.all_gather"]) == ("ao", gathers)


@pytest.mark.parametrize(
    ("name", "version", "fp8", "settings"),
    [
        ("lora", 2, {}, {}),
        slow("lora", 2, WHOLE, {}),
        slow("lora", 1, {}, {}),
        slow("lora", 2, {}, OFFLOAD),
        slow("peft-modules", 2, {}, {}),
        slow("peft-embedding", 2, {}, {}),
        slow("peft-bias", 2, {}, {}),
        slow("peft-ia3", 2, {}, {}),
        slow("peft-loha", 2, {}, {}),
        slow("peft-ptuning", 2, {}, {}),
        slow("peft-dora", 2, WHOLE, {}),
    ],
    ids=str,
)
def test_adapters_equal_one_process(
    two_ranks: Ranks, name: str, version: int, fp8: dict[str, Any], settings: dict[str, Any]
) -> None:
    gathers = version == 2 and not fp8
    expected = two_ranks.run(reference, name, all_gather=gathers)[0]
    config = config_of(version, **fp8)
    config["fsdp_config"] |= settings
    run = two_ranks.run(train, config, name)[0]
    assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert run["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert run["gathered"] == {"torch.float8_e4m3fn" if gathers else "torch.bfloat16"}
    assert differing(run["report"]) == []


@pytest.mark.parametrize("fp8", [{}, slow(WHOLE)], ids=str)
def test_divided_sequences_equal_whole_models(two_ranks: Ranks, fp8: dict[str, Any]) -> None:
    keys = {"mixed_precision": "fp8", "fp8_config": {"backend": "AO", **fp8}}
    expected = two_ranks.run(reference, "llama", 3, all_gather=not fp8, divided=True)[0]
    run = two_ranks.run(train_in_loop, {"cp": 2}, keys=keys)[0]
    assert_same_training(run, expected)
    assert any(unit["fp8_modules"] for unit in run["report"]["units"])
    assert run["report"]["mesh"]["context"] == 2 and differing(run["report"]) == []


def test_report_names_each_layer_in_fp8(two_ranks: Ranks) -> None:
    report = two_ranks.run(train, config_of(pad_inner_dim=False))[0]["report"]
    assert sorted(name for unit in report["units"] for name in unit["fp8_modules"]) == sorted(LAYERS)
    row = next(row for row in report["settings"] if row["setting"] == "fp8.backend")
    assert "emulated" in row["reason"] and "lm_head" in row["reason"]
    assert settings_of(report, "launch.mixed")["launch.mixed_precision"] == "fp8"
    assert settings_of(report, "fp8.")["fp8.pad_inner_dim"] is False
    assert settings_of(report, "precision.")["precision.param"] == "bf16"


def save_and_load(folder: str, config: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Train, save, train on, load in the same run and repeat; then repeat in a new run from the checkpoint."""
    accelerator = fresh_accelerator(config)
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    train_prepared(accelerator, model, optimizer, "llama", 2)
    accelerator.save_state(f"{folder}/state")
    weights = accelerator.get_state_dict(model)
    first = train_prepared(accelerator, model, optimizer, "llama", 2)["losses"]
    accelerator.load_state(f"{folder}/state")
    again = train_prepared(accelerator, model, optimizer, "llama", 2)["losses"]
    accelerator.load_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/model")
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/exported", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator = fresh_accelerator(after)
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    accelerator.load_state(f"{folder}/state")
    new = train_prepared(accelerator, model, optimizer, "llama", 2)["losses"]
    return {"first": first, "again": again, "new": new, "weights": weights}


@pytest.mark.parametrize(
    ("before", "after"),
    [slow({}, {}), slow({"fsdp_state_dict_type": "FULL_STATE_DICT"}, {}), ({"fsdp_async_save": True}, {})],
    ids=str,
)
def test_run_resumes_from_weights_in_fp32(
    two_ranks: Ranks, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    first, second = config_of(), config_of()
    first["fsdp_config"] |= before
    second["fsdp_config"] |= after
    run = two_ranks.run(save_and_load, str(tmp_path), first, second)[0]
    assert run["again"] == pytest.approx(run["first"], rel=1e-6)
    assert run["new"] == pytest.approx(run["first"], rel=1e-6)
    plain = tiny_llama()
    assert_same_weights(run["weights"], {**plain.state_dict(), **run["weights"]})
    for folder in ("model", "exported"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert {name: tensor.dtype for name, tensor in saved.items()} == dict.fromkeys(run["weights"], torch.float32)
        assert all(torch.equal(saved[name], weight) for name, weight in run["weights"].items())
    loaded = type(plain).from_pretrained(tmp_path / "exported")  # type: ignore[attr-defined]
    assert all(torch.equal(weight, run["weights"][name]) for name, weight in loaded.state_dict().items())


def train_by_trainer_on_ranks(
    folder: str, output_dir: str, config: dict[str, Any], *, resume: bool = False, adapters: bool = False
) -> dict[str, Any]:
    """Train six steps through the Trainer, save every third step and export the model; or continue at step 3."""
    from transformers import AutoModelForCausalLM

    hfp.install(config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = with_adapters(model) if adapters else model
    trainer = make_trainer(output_dir, model, save_strategy="steps", save_steps=3, **PLAIN)
    trainer.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-3") if resume else None)
    return exported_results(trainer, output_dir)


@pytest.mark.parametrize(
    ("settings", "adapters"),
    [({}, False), slow(OFFLOAD, False), slow({}, True), slow(OFFLOAD, True)],
    ids=str,
)
def test_trainer_saves_and_resumes(two_ranks: Ranks, tmp_path: Path, settings: dict[str, Any], adapters: bool) -> None:
    tiny_llama().save_pretrained(tmp_path / "llama")  # type: ignore[operator]
    config = config_of()
    config["fsdp_config"] |= settings
    arguments = (str(tmp_path / "llama"), str(tmp_path / "run"), config)
    whole = two_ranks.run(train_by_trainer_on_ranks, *arguments, adapters=adapters)[0]
    resumed = two_ranks.run(train_by_trainer_on_ranks, *arguments, resume=True, adapters=adapters)[0]
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert_same_weights(resumed["weights"], whole["weights"])
    exported = {key.removeprefix("base_model.model."): weight for key, weight in whole["weights"].items()}
    assert all(torch.equal(whole["exported"][key], weight) for key, weight in exported.items())
    assert differing(whole["report"]) == []
    assert any(unit["fp8_modules"] for unit in whole["report"]["units"])


def train_with_handler(arguments: dict[str, Any], *, only: str = "", **recipe: Any) -> dict[str, Any]:
    """Train with ``AORecipeKwargs`` of the script, which turns fp8 on.

    Args:
        only: end of the names of the layers that compute in fp8, with a config of the script.
    """
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    reset_accelerate()
    hfp.install({**config_of(mixed_precision="no"), "fp8_config": None})
    if only:
        recipe |= {"config": Float8LinearConfig(), "module_filter_func": lambda module, name: name.endswith(only)}
    accelerator = Accelerator(cpu=True, kwargs_handlers=[AORecipeKwargs(**recipe)], **arguments)
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, adamw(model))
    return {"gathered": gathered_dtypes(model), **train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)}


@pytest.mark.parametrize("arguments", [{"mixed_precision": "fp8"}, {"mixed_precision": "bf16"}], ids=str)
@pytest.mark.parametrize("gathers", [True, False])
def test_recipe_of_a_script_turns_fp8_on(
    two_ranks: Ranks, references: dict[bool, Any], arguments: dict[str, Any], gathers: bool
) -> None:
    run = two_ranks.run(train_with_handler, arguments, enable_fsdp_float8_all_gather=gathers)[0]
    assert_same_training(run, references[gathers])
    assert run["gathered"] == {"torch.float8_e4m3fn" if gathers else "torch.bfloat16"}
    assert differing(run["report"]) == []


def test_recipe_of_a_script_selects_layers(two_ranks: Ranks) -> None:
    run = two_ranks.run(train_with_handler, {"mixed_precision": "fp8"}, only="q_proj")[0]
    found = [name for unit in run["report"]["units"] for name in unit["fp8_modules"]]
    assert sorted(found) == [name for name in sorted([*LAYERS, "model.layers.0.self_attn.q_proj"]) if "q_proj" in name]
    assert run["gathered"] == {"torch.bfloat16"}
    assert settings_of(run["report"], "fp8.")["fp8.pad_inner_dim"] is False
    assert differing(run["report"]) == []


@pytest.mark.parametrize("regional", [True, slow(False)])
def test_regions_are_compiled_with_fp8(two_ranks: Ranks, references: dict[bool, Any], regional: bool) -> None:
    dynamo = {"dynamo_backend": "AOT_EAGER", "dynamo_use_regional_compilation": regional}
    run = two_ranks.run(train, {**config_of(), "dynamo_config": dynamo})[0]
    assert run["losses"] == pytest.approx(references[True]["losses"], rel=1e-3)
    row = next(row for row in run["report"]["settings"] if row["setting"] == "launch.dynamo_config")
    assert (row["observed"], row["reason"]) == ("compiled", "by region: 3 modules")
    assert differing(run["report"]) == []


def printed_by_prepare(config: dict[str, Any]) -> str:
    """Return what this rank prints when a model is converted."""
    with redirect_stderr(io.StringIO()) as printed:
        accelerator = fresh_accelerator(config)
        model = MODELS["llama"]()
        accelerator.prepare(model, adamw(model))
    return printed.getvalue()


@pytest.mark.parametrize("backend", ["AOT_EAGER", "NO"])
def test_fp8_without_compilation_is_warned_of(two_ranks: Ranks, backend: str) -> None:
    config = {**config_of(), "dynamo_config": {"dynamo_backend": backend}}
    printed = two_ranks.run(printed_by_prepare, config)[0]
    assert printed.count("FSDP-W641") == (backend == "NO")


@pytest.mark.parametrize("fp8", [{}, slow(WHOLE)], ids=str)
def test_collectives_of_fp8_equal_estimate(two_ranks: Ranks, fp8: dict[str, Any]) -> None:
    for counted, estimated in two_ranks.run(counted_and_estimated, "llama", config_of(**fp8), accumulation=2):
        assert counted == estimated
        assert counted


def refused(config: dict[str, Any], folder: str = "", name: str = "llama") -> list[str]:
    """The codes with which preparing a model is refused; a model of a folder is sharded while it is loaded."""
    try:
        accelerator = fresh_accelerator(config)
        accelerator.prepare(load(folder, fsdp_size=2) if folder else MODELS[name]())
    except SpecError as error:
        return [problem.code for problem in error.problems if problem.severity == "error"]
    return []


def test_weights_that_shards_do_not_divide_are_refused(three_ranks: Ranks) -> None:
    assert three_ranks.run(refused, {**config_of(), "num_processes": 3}) == [["FSDP-E169"]] * 3
    assert three_ranks.run(refused, {**config_of(**WHOLE), "num_processes": 3}) == [[]] * 3


def test_adapters_that_read_weights_in_fp8_are_refused(two_ranks: Ranks) -> None:
    assert two_ranks.run(refused, config_of(), name="peft-dora") == [["FSDP-E635"]] * 2
    assert two_ranks.run(refused, config_of(**WHOLE), name="peft-dora") == [[]] * 2


@pytest.mark.slow
def test_run_with_divided_sequences_resumes(four_ranks: Ranks, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "llama")  # type: ignore[operator]
    keys = {"mixed_precision": "fp8", "fp8_config": {"backend": "AO"}}
    arguments = (str(tmp_path / "llama"), str(tmp_path / "run"), {"cp": 2})
    whole = four_ranks.run(train_by_trainer, *arguments, keys=keys)[0]
    resumed = four_ranks.run(train_by_trainer, *arguments, keys=keys, resume=True)[0]
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert_same_weights(resumed["weights"], whole["weights"])
    assert all(torch.equal(whole["exported"][key], weight) for key, weight in whole["weights"].items())
    assert differing(whole["report"]) == []


def test_model_that_is_sharded_at_load_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)  # type: ignore[operator]
    assert two_ranks.run(refused, config_of(), str(tmp_path)) == [["FSDP-E167"]] * 2
