"""Settings that Accelerate and Transformers ignore, misread or refuse: the plugin applies them or reports the reason.

Each test writes a setting in one form and compares it with the report of the live model on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_fsdp_plugin as hfp
from tests.support.matrices import alternating
from tests.support.ranks import RankError, Ranks, on_accelerator
from tests.support.tiny import MODELS, global_batch, my_part
from tests.support.trainer_runs import make_trainer

ReportOf = Callable[..., dict[str, Any]]


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


def report_of_file(path: str, model_name: str = "llama") -> dict[str, Any]:
    """Return the report of an Accelerate loop with a config file, and its loss.

    The number of processes in the file is overridden.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    overrides = (f"launch.num_processes={world_size}", f"launch.use_cpu={not on_accelerator()}".lower())
    accelerator = hfp.accelerator(hfp.load_spec(path, overrides=overrides, environ={}))
    model = MODELS[model_name]()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loss = model(**my_part(global_batch(0), rank, accelerator.num_processes)).loss
    accelerator.backward(loss)
    optimizer.step()
    report = hfp.report(accelerator).to_json()
    return {**report, "loss_dtype": str(loss.dtype), "loss": loss.item()}


@pytest.fixture
def report_of(two_ranks: Ranks, tmp_path: Path) -> ReportOf:
    """The report of a loop on two ranks with an Accelerate YAML, whose ``fsdp_config`` has these keys."""

    def run(*, ranks: Ranks = two_ranks, top: str = "", **settings: Any) -> dict[str, Any]:
        settings = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **settings}
        lines = "".join(f"  {key}: {value}\n" for key, value in settings.items() if value is not None)
        path = tmp_path / "fsdp.yaml"
        path.write_text(f"distributed_type: FSDP\n{top}\nfsdp_config:\n{lines}")
        return ranks.run(report_of_file, str(path))[0]

    return run


def report_of_arguments(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Return the report of a Trainer with these TrainingArguments."""
    trainer = make_trainer(output_dir, max_steps=1, **arguments)
    trainer.train()
    return hfp.report(trainer).to_json()


@pytest.fixture
def report_of_trainer(two_ranks: Ranks, tmp_path: Path) -> ReportOf:
    """The report of a Trainer on two ranks with these TrainingArguments."""
    return lambda **arguments: two_ranks.run(report_of_arguments, str(tmp_path), **arguments)[0]


def row(report: dict[str, Any], setting: str) -> dict[str, Any]:
    return next(entry for entry in report["settings"] if entry["setting"] == setting)


def assert_applied(report: dict[str, Any], **expected: Any) -> None:
    """``sharding__strategy="no_shard"``: that value was observed and applied, and no setting differs."""
    for name, value in expected.items():
        entry = row(report, name.replace("__", "."))
        assert (entry["status"], entry["observed"]) == ("applied", value), entry
    assert [entry for entry in report["settings"] if entry["status"] == "differs"] == []


@pytest.mark.parametrize(
    ("strategy", "version"), alternating(["shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"])
)
def test_training_arguments_strategy_is_applied(four_ranks: Ranks, tmp_path: Path, strategy: str, version: int) -> None:
    config: dict[str, Any] = {"version": version}
    if strategy.startswith("hybrid"):
        config["fsdp_size"] = 2
    report = four_ranks.run(report_of_arguments, str(tmp_path), fsdp=f"{strategy} auto_wrap", fsdp_config=config)[0]
    mesh = {"shard_grad_op": (1, 4), "no_shard": (4, 1)}.get(strategy, (2, 2))
    assert_applied(report, sharding__strategy=strategy, mesh__replicate=mesh[0], mesh__shard=mesh[1])


def test_reshard_after_forward_accepts_strategy_in_version_1(report_of: ReportOf) -> None:
    report = report_of(fsdp_version=1, fsdp_reshard_after_forward="SHARD_GRAD_OP")
    assert_applied(report, sharding__strategy="shard_grad_op")


@pytest.mark.parametrize(
    ("written", "strategy"),
    [("2", "shard_grad_op"), ("3", "no_shard"), ("4", "hybrid_shard"), ("HYBRID_SHARD", "hybrid_shard")],
)
def test_sharding_strategy_is_applied_in_version_2(
    four_ranks: Ranks, report_of: ReportOf, written: str, strategy: str
) -> None:
    size = 2 if strategy == "hybrid_shard" else None
    report = report_of(ranks=four_ranks, fsdp_version=2, fsdp_sharding_strategy=written, fsdp_size=size)
    assert_applied(report, sharding__strategy=strategy)


@pytest.mark.parametrize(
    ("key", "version"), alternating(["fsdp_offload_params", "offload_params", "cpu_offload", "fsdp_cpu_offload"])
)
def test_every_offload_key_of_training_arguments_is_applied(
    report_of_trainer: ReportOf, key: str, version: int
) -> None:
    report = report_of_trainer(fsdp="full_shard auto_wrap", fsdp_config={"version": version, key: True})
    assert_applied(report, offload__params=True)


def test_cpu_offload_in_yaml_is_applied(report_of: ReportOf, version: int) -> None:
    report = report_of(fsdp_version=version, fsdp_cpu_offload="true")
    assert_applied(report, offload__params=True)
    if version == 2:  # on CPU ranks the plugin sets no offload policy under FSDP1: it would only pin memory
        assert all(unit["offloaded"] for unit in report["units"] if unit["num_params"])


@pytest.mark.parametrize(
    ("written", "observed"), [("BACKWARD_PRE", "pre"), ("BACKWARD_POST", "post"), ("NO_PREFETCH", "none")]
)
def test_backward_prefetch_policy_is_applied(report_of: ReportOf, version: int, written: str, observed: str) -> None:
    report = report_of(fsdp_version=version, fsdp_backward_prefetch_policy=written)
    assert_applied(report, prefetch__backward=observed)


def assert_size_policy(report: dict[str, Any]) -> None:
    assert_applied(report, wrap__policy="size")
    threshold = row(report, "wrap.min_num_params")
    assert threshold["status"] == "applied" and threshold["observed"].startswith("smallest unit ")
    assert len(report["units"]) > 1


def test_size_policy_keys_of_the_guide_are_applied(report_of: ReportOf, version: int) -> None:
    keys = {"fsdp_auto_wrap_policy": None, "fsdp_wrap_policy": "SIZE_BASED_WRAP", "min_num_param": 2000}
    assert_size_policy(report_of(fsdp_version=version, **keys))


def test_auto_wrap_with_min_num_params_is_size_policy(report_of_trainer: ReportOf, version: int) -> None:
    config = {"version": version, "min_num_params": 2000}
    assert_size_policy(report_of_trainer(fsdp="full_shard auto_wrap", fsdp_config=config))


@pytest.mark.parametrize(
    "written", ["[LlamaMLP, LlamaAttention]", '"LlamaMLP, LlamaAttention"', "LlamaMLP,LlamaAttention"]
)
def test_layer_classes_as_list_or_with_blanks_are_applied(report_of: ReportOf, version: int, written: str) -> None:
    keys = {"fsdp_auto_wrap_policy": None, "fsdp_transformer_layer_cls_to_wrap": written}
    report = report_of(fsdp_version=version, **keys)
    assert_applied(report, wrap__policy="transformer")
    assert {"LlamaMLP", "LlamaAttention"} <= {unit["class"] for unit in report["units"]}


@pytest.mark.parametrize(
    ("key", "meant"),
    [("fsdp_offload_param", "fsdp_offload_params"), ("reshard_after_foward", "reshard_after_forward")],
)
def test_misspelled_key_is_refused_with_suggestion(report_of: ReportOf, key: str, meant: str) -> None:
    with pytest.raises(RankError, match=f"unknown key '{key}'.*{meant}"):
        report_of(fsdp_version=2, **{key: "true"})


def test_limit_all_gathers_is_applied_in_version_1(report_of: ReportOf) -> None:
    report = report_of(fsdp_version=1, fsdp_limit_all_gathers="false")
    assert_applied(report, prefetch__limit_all_gathers=False)


def test_use_orig_params_is_applied_in_version_1(report_of: ReportOf) -> None:
    assert_applied(report_of(fsdp_version=1, fsdp_use_orig_params="false"), params__use_orig=False)


def test_mixed_precision_policy_fields_are_applied(report_of: ReportOf, version: int) -> None:
    policy = "{param_dtype: bf16, reduce_dtype: fp32, output_dtype: fp32}"
    report = report_of(fsdp_version=version, fsdp_mixed_precision_policy=policy)
    assert_applied(report, precision__param="bf16", precision__reduce="fp32", precision__output="fp32")


def test_bf16_keeps_reduction_and_loss_in_fp32(report_of: ReportOf, version: int) -> None:
    report = report_of(top="mixed_precision: bf16", fsdp_version=version)
    assert_applied(report, precision__param="bf16", precision__reduce="fp32", launch__mixed_precision="bf16")
    for unit in (unit for unit in report["units"] if unit["num_params"]):
        assert (unit["param_dtype"], unit["reduce_dtype"], unit["master_dtype"]) == ("bf16", "fp32", "fp32")
    assert report["loss_dtype"] == "torch.float32"
    # A bf16 loss between 4 and 8 is a multiple of 1/32; this one is finer.
    assert (report["loss"] * 32) % 1 != 0


def test_cpu_ranks_are_sharded(report_of: ReportOf, version: int) -> None:
    report = report_of(fsdp_version=version)
    assert_applied(report, sharding__strategy="full_shard")
    for unit in report["units"]:
        assert unit["num_local_params"] <= unit["num_params"] / 2 + 16  # FSDP1 pads a flat parameter
    assert report["memory"]["params_bytes"] == pytest.approx(4 * report["num_params"] / 2, rel=0.01)


@pytest.mark.parametrize(
    ("fsdp", "strategy"),
    [
        ("no_shard", "no_shard"),
        ("FULL_SHARD auto_wrap", "full_shard"),
        ("full_shard,auto_wrap", "full_shard"),
        ("full shard", "full_shard"),
        (["shard_grad_op", "auto_wrap"], "shard_grad_op"),
        (True, "full_shard"),
    ],
    ids=str,
)
def test_every_form_of_fsdp_argument_is_applied(report_of_trainer: ReportOf, fsdp: Any, strategy: str) -> None:
    assert_applied(report_of_trainer(fsdp=fsdp), sharding__strategy=strategy)


def test_fsdp_config_as_yaml_file_is_applied(report_of_trainer: ReportOf, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text("fsdp_version: 1\nfsdp_sharding_strategy: SHARD_GRAD_OP\nfsdp_state_dict_type: SHARDED\n")
    report = report_of_trainer(fsdp=True, fsdp_config=str(path))
    assert_applied(report, fsdp__version=1, sharding__strategy="shard_grad_op", checkpoint__state_dict="sharded")


@pytest.mark.parametrize("written", ["SHARDED", "SHARDED_STATE_DICT", "sharded", "3"])
def test_state_dict_type_suffix_is_optional(report_of: ReportOf, written: str) -> None:
    assert_applied(report_of(fsdp_version=2, fsdp_state_dict_type=written), checkpoint__state_dict="sharded")


def test_sync_module_states_works_on_cpu_ranks(report_of: ReportOf, version: int) -> None:
    report = report_of(fsdp_version=version, fsdp_sync_module_states="true")
    assert_applied(report, loading__sync_module_states=True)
