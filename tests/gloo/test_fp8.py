"""Linear layers in fp8 on two ranks: equal to one process that emulates fp8, reported, saved in fp32 and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import Linear

from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_llama
from tests.support.training import assert_same_training, assert_same_weights, differing

pytest.importorskip("torchao", reason="torchao is not installed")

from tests.gloo import cases_fp8 as cases
from tests.gloo.cases_axes import train as train_by_trainer
from tests.gloo.cases_axes import train_in_loop
from tests.gloo.cases_communication import counted_and_estimated

WHOLE = {"enable_fsdp_float8_all_gather": False}
OFFLOAD = {"fsdp_offload_params": True}
LAYERS = [name for name, module in tiny_llama().named_modules() if isinstance(module, Linear)][1:-1]
"""The layers that Accelerate converts: all but the first and the last."""


@pytest.fixture(scope="module")
def references(two_ranks: Ranks) -> dict[bool, dict[str, Any]]:
    """Whether weights are cast from fp32 -> results of one process."""
    return {cast: two_ranks.run(cases.reference, "llama", all_gather=cast)[0] for cast in (False, True)}


def settings_of(report: dict[str, Any], section: str) -> dict[str, Any]:
    rows = {row["setting"]: row for row in report["settings"]}
    return {name: row["observed"] for name, row in rows.items() if name.startswith(section)}


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
    config = cases.config_of(version, **fp8)
    config["fsdp_config"] |= settings
    run = two_ranks.run(cases.train, config)[0]
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
    expected = two_ranks.run(cases.reference, name, all_gather=gathers)[0]
    config = cases.config_of(version, **fp8)
    config["fsdp_config"] |= settings
    run = two_ranks.run(cases.train, config, name)[0]
    assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert run["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert run["gathered"] == {"torch.float8_e4m3fn" if gathers else "torch.bfloat16"}
    assert differing(run["report"]) == []


@pytest.mark.parametrize("fp8", [{}, slow(WHOLE)], ids=str)
def test_divided_sequences_equal_whole_models(two_ranks: Ranks, fp8: dict[str, Any]) -> None:
    keys = {"mixed_precision": "fp8", "fp8_config": {"backend": "AO", **fp8}}
    expected = two_ranks.run(cases.reference, "llama", 3, all_gather=not fp8, divided=True)[0]
    run = two_ranks.run(train_in_loop, {"cp": 2}, keys=keys)[0]
    assert_same_training(run, expected)
    assert any(unit["fp8_modules"] for unit in run["report"]["units"])
    assert run["report"]["mesh"]["context"] == 2 and differing(run["report"]) == []


def test_report_names_each_layer_in_fp8(two_ranks: Ranks) -> None:
    report = two_ranks.run(cases.train, cases.config_of(pad_inner_dim=False))[0]["report"]
    assert sorted(name for unit in report["units"] for name in unit["fp8_modules"]) == sorted(LAYERS)
    row = next(row for row in report["settings"] if row["setting"] == "fp8.backend")
    assert "emulated" in row["reason"] and "lm_head" in row["reason"]
    assert settings_of(report, "launch.mixed")["launch.mixed_precision"] == "fp8"
    assert settings_of(report, "fp8.")["fp8.pad_inner_dim"] is False
    assert settings_of(report, "precision.")["precision.param"] == "bf16"


@pytest.mark.parametrize(
    ("before", "after"),
    [slow({}, {}), slow({"fsdp_state_dict_type": "FULL_STATE_DICT"}, {}), ({"fsdp_async_save": True}, {})],
    ids=str,
)
def test_run_resumes_from_weights_in_fp32(
    two_ranks: Ranks, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    first, second = cases.config_of(), cases.config_of()
    first["fsdp_config"] |= before
    second["fsdp_config"] |= after
    run = two_ranks.run(cases.save_and_load, str(tmp_path), first, second)[0]
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


@pytest.mark.parametrize(
    ("settings", "adapters"),
    [({}, False), slow(OFFLOAD, False), slow({}, True), slow(OFFLOAD, True)],
    ids=str,
)
def test_trainer_saves_and_resumes(two_ranks: Ranks, tmp_path: Path, settings: dict[str, Any], adapters: bool) -> None:
    tiny_llama().save_pretrained(tmp_path / "llama")  # type: ignore[operator]
    config = cases.config_of()
    config["fsdp_config"] |= settings
    arguments = (str(tmp_path / "llama"), str(tmp_path / "run"), config)
    whole = two_ranks.run(cases.train_by_trainer, *arguments, adapters=adapters)[0]
    resumed = two_ranks.run(cases.train_by_trainer, *arguments, resume=True, adapters=adapters)[0]
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert_same_weights(resumed["weights"], whole["weights"])
    exported = {key.removeprefix("base_model.model."): weight for key, weight in whole["weights"].items()}
    assert all(torch.equal(whole["exported"][key], weight) for key, weight in exported.items())
    assert differing(whole["report"]) == []
    assert any(unit["fp8_modules"] for unit in whole["report"]["units"])


@pytest.mark.parametrize("arguments", [{"mixed_precision": "fp8"}, {"mixed_precision": "bf16"}], ids=str)
@pytest.mark.parametrize("gathers", [True, False])
def test_recipe_of_a_script_turns_fp8_on(
    two_ranks: Ranks, references: dict[bool, Any], arguments: dict[str, Any], gathers: bool
) -> None:
    run = two_ranks.run(cases.train_with_handler, arguments, enable_fsdp_float8_all_gather=gathers)[0]
    assert_same_training(run, references[gathers])
    assert run["gathered"] == {"torch.float8_e4m3fn" if gathers else "torch.bfloat16"}
    assert differing(run["report"]) == []


def test_recipe_of_a_script_selects_layers(two_ranks: Ranks) -> None:
    run = two_ranks.run(cases.train_with_handler, {"mixed_precision": "fp8"}, only="q_proj")[0]
    found = [name for unit in run["report"]["units"] for name in unit["fp8_modules"]]
    assert sorted(found) == [name for name in sorted([*LAYERS, "model.layers.0.self_attn.q_proj"]) if "q_proj" in name]
    assert run["gathered"] == {"torch.bfloat16"}
    assert settings_of(run["report"], "fp8.")["fp8.pad_inner_dim"] is False
    assert differing(run["report"]) == []


@pytest.mark.parametrize("regional", [True, slow(False)])
def test_regions_are_compiled_with_fp8(two_ranks: Ranks, references: dict[bool, Any], regional: bool) -> None:
    dynamo = {"dynamo_backend": "AOT_EAGER", "dynamo_use_regional_compilation": regional}
    run = two_ranks.run(cases.train, {**cases.config_of(), "dynamo_config": dynamo})[0]
    assert run["losses"] == pytest.approx(references[True]["losses"], rel=1e-3)
    row = next(row for row in run["report"]["settings"] if row["setting"] == "launch.dynamo_config")
    assert (row["observed"], row["reason"]) == ("compiled", "by region: 3 modules")
    assert differing(run["report"]) == []


@pytest.mark.parametrize("backend", ["AOT_EAGER", "NO"])
def test_fp8_without_compilation_is_warned_of(two_ranks: Ranks, backend: str) -> None:
    config = {**cases.config_of(), "dynamo_config": {"dynamo_backend": backend}}
    printed = two_ranks.run(cases.printed_by_prepare, config)[0]
    assert printed.count("FSDP-W641") == (backend == "NO")


@pytest.mark.parametrize("fp8", [{}, slow(WHOLE)], ids=str)
def test_collectives_of_fp8_equal_estimate(two_ranks: Ranks, fp8: dict[str, Any]) -> None:
    for counted, estimated in two_ranks.run(counted_and_estimated, "llama", cases.config_of(**fp8), accumulation=2):
        assert counted == estimated
        assert counted


def test_weights_that_shards_do_not_divide_are_refused(three_ranks: Ranks) -> None:
    assert three_ranks.run(cases.refused, {**cases.config_of(), "num_processes": 3}) == [["FSDP-E169"]] * 3
    assert three_ranks.run(cases.refused, {**cases.config_of(**WHOLE), "num_processes": 3}) == [[]] * 3


def test_adapters_that_read_weights_in_fp8_are_refused(two_ranks: Ranks) -> None:
    assert two_ranks.run(cases.refused, cases.config_of(), name="peft-dora") == [["FSDP-E635"]] * 2
    assert two_ranks.run(cases.refused, cases.config_of(**WHOLE), name="peft-dora") == [[]] * 2


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
    assert two_ranks.run(cases.refused, cases.config_of(), str(tmp_path)) == [["FSDP-E167"]] * 2
