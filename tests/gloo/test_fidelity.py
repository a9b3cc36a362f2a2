"""Settings that Accelerate and Transformers ignore, misread or refuse: the plugin applies them or reports the reason.

Each test has one form of writing a setting; the result is read off the live model on real ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases_fidelity import report_of_arguments, report_of_yaml
from ranks import RankError, Ranks

HEAD = "distributed_type: FSDP\nuse_cpu: true\nnum_processes: {ranks}\n"


def yaml_of(body: str, ranks: int = 2, **top: Any) -> str:
    """An Accelerate YAML with ``body`` as its fsdp_config."""
    lines = "".join(f"  {line}\n" for line in body.strip().splitlines())
    return (
        HEAD.format(ranks=ranks) + "".join(f"{key}: {value}\n" for key, value in top.items()) + "fsdp_config:\n" + lines
    )


def row(report: dict[str, Any], setting: str) -> dict[str, Any]:
    return next(entry for entry in report["settings"] if entry["setting"] == setting)


def assert_applied(report: dict[str, Any], **expected: Any) -> None:
    """``sharding__strategy="no_shard"``: that value was observed and applied, and no setting differs."""
    for name, value in expected.items():
        entry = row(report, name.replace("__", "."))
        assert (entry["status"], entry["observed"]) == ("applied", value), entry
    assert [entry for entry in report["settings"] if entry["status"] == "differs"] == []


def unit_classes(report: dict[str, Any]) -> set[str]:
    return {unit["class"] for unit in report["units"]}


@pytest.mark.parametrize("strategy", ["shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"])
@pytest.mark.parametrize("version", [1, 2])
def test_training_arguments_strategy_is_applied(four_ranks: Ranks, tmp_path: Path, strategy: str, version: int) -> None:
    config: dict[str, Any] = {"version": version}
    if strategy.startswith("hybrid"):
        config["fsdp_size"] = 2
    report = four_ranks.run(report_of_arguments, str(tmp_path), fsdp=f"{strategy} auto_wrap", fsdp_config=config)[0]
    mesh = {"shard_grad_op": (1, 4), "no_shard": (4, 1)}.get(strategy, (2, 2))
    assert_applied(report, sharding__strategy=strategy, mesh__replicate=mesh[0], mesh__shard=mesh[1])


def test_reshard_after_forward_accepts_strategy_in_version_1(two_ranks: Ranks, tmp_path: Path) -> None:
    text = yaml_of(
        "fsdp_version: 1\nfsdp_reshard_after_forward: SHARD_GRAD_OP\nfsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    )
    assert_applied(two_ranks.run(report_of_yaml, text, str(tmp_path))[0], sharding__strategy="shard_grad_op")


@pytest.mark.parametrize(
    ("written", "strategy"),
    [("2", "shard_grad_op"), ("3", "no_shard"), ("4", "hybrid_shard"), ("HYBRID_SHARD", "hybrid_shard")],
)
def test_sharding_strategy_is_applied_in_version_2(
    four_ranks: Ranks, tmp_path: Path, written: str, strategy: str
) -> None:
    body = f"fsdp_version: 2\nfsdp_sharding_strategy: {written}\nfsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    if strategy == "hybrid_shard":
        body += "\nfsdp_size: 2"
    report = four_ranks.run(report_of_yaml, yaml_of(body, ranks=4), str(tmp_path))[0]
    assert_applied(report, sharding__strategy=strategy)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("key", ["fsdp_offload_params", "offload_params", "cpu_offload", "fsdp_cpu_offload"])
def test_every_offload_key_of_training_arguments_is_applied(
    two_ranks: Ranks, tmp_path: Path, key: str, version: int
) -> None:
    config = {"version": version, key: True}
    report = two_ranks.run(report_of_arguments, str(tmp_path), fsdp="full_shard auto_wrap", fsdp_config=config)[0]
    assert_applied(report, offload__params=True)


@pytest.mark.parametrize("version", [1, 2])
def test_cpu_offload_in_yaml_is_applied(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    text = yaml_of(f"fsdp_version: {version}\nfsdp_cpu_offload: true\nfsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP")
    report = two_ranks.run(report_of_yaml, text, str(tmp_path))[0]
    assert_applied(report, offload__params=True)
    if version == 2:  # FSDP1 gets no offload policy on CPU ranks: it would pin memory without moving any
        assert all(unit["offloaded"] for unit in report["units"] if unit["num_params"])


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("written", "observed"), [("BACKWARD_PRE", "pre"), ("BACKWARD_POST", "post"), ("NO_PREFETCH", "none")]
)
def test_backward_prefetch_policy_is_applied(
    two_ranks: Ranks, tmp_path: Path, version: int, written: str, observed: str
) -> None:
    body = (
        f"fsdp_version: {version}\nfsdp_backward_prefetch_policy: {written}\nfsdp_wrap_policy: TRANSFORMER_BASED_WRAP"
    )
    assert_applied(two_ranks.run(report_of_yaml, yaml_of(body), str(tmp_path))[0], prefetch__backward=observed)


@pytest.mark.parametrize("version", [1, 2])
def test_size_policy_keys_of_the_guide_are_applied(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    text = yaml_of(f"fsdp_version: {version}\nfsdp_wrap_policy: SIZE_BASED_WRAP\nmin_num_param: 2000")
    report = two_ranks.run(report_of_yaml, text, str(tmp_path))[0]
    assert_applied(report, wrap__policy="size")
    assert row(report, "wrap.min_num_params")["status"] == "applied"
    assert len(report["units"]) > 1


@pytest.mark.parametrize("version", [1, 2])
def test_auto_wrap_with_min_num_params_is_size_policy(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    config = {"version": version, "min_num_params": 2000}
    report = two_ranks.run(report_of_arguments, str(tmp_path), fsdp="full_shard auto_wrap", fsdp_config=config)[0]
    assert_applied(report, wrap__policy="size")
    assert row(report, "wrap.min_num_params")["status"] == "applied"
    assert len(report["units"]) > 1


@pytest.mark.parametrize(
    "written", ["[LlamaMLP, LlamaAttention]", '"LlamaMLP, LlamaAttention"', "LlamaMLP,LlamaAttention"]
)
@pytest.mark.parametrize("version", [1, 2])
def test_layer_classes_as_list_or_with_blanks_are_applied(
    two_ranks: Ranks, tmp_path: Path, version: int, written: str
) -> None:
    body = f"fsdp_version: {version}\nfsdp_transformer_layer_cls_to_wrap: {written}"
    report = two_ranks.run(report_of_yaml, yaml_of(body), str(tmp_path))[0]
    assert_applied(report, wrap__policy="transformer")
    assert {"LlamaMLP", "LlamaAttention"} <= unit_classes(report)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("fsdp_offload_param", "fsdp_offload_params"), ("reshard_after_foward", "reshard_after_forward")],
)
def test_misspelt_key_is_refused_with_suggestion(two_ranks: Ranks, tmp_path: Path, key: str, meant: str) -> None:
    with pytest.raises(RankError, match=f"unknown key '{key}'.*{meant}"):
        two_ranks.run(report_of_yaml, yaml_of(f"fsdp_version: 2\n{key}: true"), str(tmp_path))


@pytest.mark.parametrize("version", [1, 2])
def test_mixed_precision_policy_fields_are_applied(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    body = (
        f"fsdp_version: {version}\nfsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "fsdp_mixed_precision_policy: {param_dtype: bf16, reduce_dtype: fp32, output_dtype: fp32}"
    )
    report = two_ranks.run(report_of_yaml, yaml_of(body), str(tmp_path))[0]
    assert_applied(report, precision__param="bf16", precision__reduce="fp32", precision__output="fp32")


def test_xla_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"xla\.enabled"):
        two_ranks.run(report_of_yaml, yaml_of("fsdp_version: 1\nxla: true"), str(tmp_path))


@pytest.mark.parametrize("version", [1, 2])
def test_bf16_keeps_reduction_and_loss_in_fp32(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    text = yaml_of(f"fsdp_version: {version}\nfsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", mixed_precision="bf16")
    report = two_ranks.run(report_of_yaml, text, str(tmp_path))[0]
    assert_applied(report, precision__param="bf16", precision__reduce="fp32")
    assert report["loss_dtype"] == "torch.float32"
    # A bf16 loss between 4 and 8 is a multiple of 1/32; this one is finer.
    assert (report["loss"] * 32) % 1 != 0


@pytest.mark.parametrize("version", [1, 2])
def test_cpu_ranks_are_sharded(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    text = yaml_of(f"fsdp_version: {version}\nfsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP")
    report = two_ranks.run(report_of_yaml, text, str(tmp_path))[0]
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
def test_every_form_of_fsdp_argument_is_applied(two_ranks: Ranks, tmp_path: Path, fsdp: Any, strategy: str) -> None:
    assert_applied(two_ranks.run(report_of_arguments, str(tmp_path), fsdp=fsdp)[0], sharding__strategy=strategy)


def test_fsdp_config_as_yaml_file_is_applied(two_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text("fsdp_version: 1\nfsdp_sharding_strategy: SHARD_GRAD_OP\nfsdp_state_dict_type: SHARDED\n")
    report = two_ranks.run(report_of_arguments, str(tmp_path), fsdp=True, fsdp_config=str(path))[0]
    assert_applied(report, fsdp__version=1, sharding__strategy="shard_grad_op", checkpoint__state_dict="sharded")


def test_numeric_reshard_after_forward_is_a_strategy(two_ranks: Ranks, tmp_path: Path) -> None:
    body = "fsdp_version: 2\nfsdp_reshard_after_forward: 2\nfsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    assert_applied(two_ranks.run(report_of_yaml, yaml_of(body), str(tmp_path))[0], sharding__strategy="shard_grad_op")


@pytest.mark.parametrize("written", ["SHARDED", "SHARDED_STATE_DICT", "sharded", "3"])
def test_state_dict_type_suffix_is_optional(two_ranks: Ranks, tmp_path: Path, written: str) -> None:
    body = f"fsdp_version: 2\nfsdp_state_dict_type: {written}\nfsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    assert_applied(two_ranks.run(report_of_yaml, yaml_of(body), str(tmp_path))[0], checkpoint__state_dict="sharded")


@pytest.mark.parametrize("version", [1, 2])
def test_sync_module_states_works_on_cpu_ranks(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    body = f"fsdp_version: {version}\nfsdp_sync_module_states: true\nfsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    assert_applied(two_ranks.run(report_of_yaml, yaml_of(body), str(tmp_path))[0], loading__sync_module_states=True)
