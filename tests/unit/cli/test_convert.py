"""``hf-fsdp convert``: the forms of the new config, its files, and what it prints."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file, save_file

from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import assess
from hf_fsdp_plugin.tools.convert.conversion import with_converted_config
from tests.support.deepspeed_files import Zero
from tests.support.json_schema import assert_valid

DATA = Path(__file__).parents[2] / "data" / "good"
CONFIGS = Path(__file__).parents[3] / "configs"
DEEPSPEED = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_prefetch_bucket_size": 1000},
    "bf16": {"enabled": "auto"},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}
SOURCES: dict[str, dict[str, Any]] = {
    "zero-0": {"zero_optimization": {"stage": 0}, "steps_per_print": 1},
    "zero-1": {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
    "zero-2": {"zero_optimization": {"stage": 2, "cpu_offload": True}, "communication_data_type": "bf16"},
    "mics": {"zero_optimization": {"stage": 3, "mics_shard_size": 2}, "bf16": {"enabled": True}},
    "tensor": {"zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}},
    "offload": {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True,
                              "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    },
    "ddp": {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 4},
    "accelerate": {"distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": "bf16",
                   "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True}},
    "dtypes": {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {
        "fsdp_version": 2, "fsdp_mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}},
    "context": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": {
        "parallelism_config_cp_size": 2, "parallelism_config_cp_comm_strategy": "alltoall"}},
    "trainer": {"output_dir": "out", "fsdp": "full_shard auto_wrap", "gradient_checkpointing": True, "bf16": True},
    "compile": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2},
                "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_dynamic": True}},
}  # fmt: skip
FILES = [*sorted(DATA.iterdir()), *sorted(CONFIGS.glob("*.yaml"))]
ARGUMENTS = ("--", "--learning_rate", "1e-4", "--output_dir", "out")


def values(spec: FsdpSpec, *without: str) -> dict[str, Any]:
    """The settings of a spec. Keys of Accelerate's file without effect are not converted."""
    ignored = {"launch.extra", "activation.native", *without}
    return {name: value for name, value, _ in spec.settings() if name not in ignored}


def spec_of(path: Path, **given: Any) -> FsdpSpec:
    sources = with_converted_config(Sources(config=ConfigFile.at(path), environ={}, **given), converts=True)
    assessment = assess(sources)
    assert assessment.ok, assessment.problems
    return assessment.spec


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED, indent=1))
    return path


@pytest.fixture(params=[*SOURCES, *FILES], ids=lambda source: getattr(source, "name", source))
def any_source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A config of every dialect."""
    if isinstance(request.param, Path):
        return request.param
    path = tmp_path / f"{request.param}.yaml"
    path.write_text(json.dumps(SOURCES[request.param]))
    return path


def test_converted_yaml_gives_the_spec_of_the_source(hf_fsdp, any_source, tmp_path):
    out = tmp_path / "converted.yaml"
    code, _, err = hf_fsdp("convert", any_source, "--out", out, *ARGUMENTS)
    assert code == 0, err
    before = spec_of(any_source, training_arguments={"learning_rate": 1e-4})
    after = spec_of(out)
    native = {"activation.checkpointing"} if before.activation.native else set()
    assert values(after, *native) == values(before, *native)
    assert load_config_from_file(str(out)).distributed_type == "FSDP"  # stock Accelerate


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in ("compile",)])
def test_converted_arguments_give_the_spec_of_the_source(hf_fsdp, tmp_path, name):
    path = tmp_path / "source.yaml"
    path.write_text(json.dumps(SOURCES[name]))
    code, out, err = hf_fsdp("convert", path, "--to", "training-arguments")
    assert code == 0, err
    call = ast.parse(out).body[0].value
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    after = assess(Sources(training_arguments=given, environ={}))
    assert after.ok, after.problems
    before = spec_of(path)
    launcher = [name for name, _, _ in before.settings() if name.startswith("launch.")]
    assert values(after.spec, *launcher) == values(before, *launcher)
    assert after.spec.launch.mixed_precision == before.launch.mixed_precision


def test_yaml_is_for_fsdp2_and_arguments_are_shown(hf_fsdp, source):
    code, out, err = hf_fsdp("convert", source, "--num_processes", "4", "--", "--bf16", "true", "--learning_rate=2e-5")
    assert code == 0
    assert yaml.safe_load(out) == {
        "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4,
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                        "fsdp_offload_params": True, "fsdp_reshard_after_forward": True},
    }  # fmt: skip
    assert "Arguments of the script: --max_grad_norm 1.0 --optim adamw_torch --learning_rate 2e-05" in err
    assert f"{source}:3" in err and "zero_optimization.stage=3" in err and "no counterpart" in err


def test_fsdp1_is_possible(hf_fsdp, source):
    code, out, _ = hf_fsdp("convert", source, "--fsdp_version", "1", *ARGUMENTS)
    section = yaml.safe_load(out)["fsdp_config"]
    assert (code, section["fsdp_version"], section["fsdp_sharding_strategy"]) == (0, 1, "FULL_SHARD")


def test_json_has_the_outcome_of_every_key(hf_fsdp, source):
    code, out, err = hf_fsdp("convert", source, "--json", *ARGUMENTS)
    tree = json.loads(out)
    assert (code, err, tree["dialect"], tree["to"]) == (0, "", "DeepSpeed", "accelerate")
    fates = {key["key"]: (key["line"], key["fate"], key["becomes"]) for key in tree["keys"]}
    assert fates["zero_optimization.stage"] == (3, "sets", ["sharding.strategy=full_shard"])
    assert fates["gradient_clipping"][1:] == ("arguments", ["max_grad_norm=1.0"])
    assert fates["zero_optimization.stage3_prefetch_bucket_size"][1] == "irrelevant"
    assert tree["script_arguments"] == {"max_grad_norm": 1.0, "optim": "adamw_torch", "learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (json.dumps(DEEPSPEED), "FSDP-E063"),
        ('{"zero_optimization": {"stage": 3}, "distributed_type": "FSDP"}', "FSDP-E064"),
        ('{"zero_optimization": {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2}}', "FSDP-E066"),
        ('{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}', "FSDP-E062"),
        ('{"zero_optimization": {"stag": 3}}', "FSDP-E061"),
        ('{"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 3}}', "FSDP-E101"),
        ('{"distributed_type": "NO"}', "FSDP-E736"),
        ("{", "FSDP-E006"),
    ],
)
def test_invalid_source_is_one_error_and_writes_nothing(hf_fsdp, tmp_path, text, code):
    (tmp_path / "ds.json").write_text(text)
    out = tmp_path / "new.yaml"
    found, printed, err = hf_fsdp("convert", tmp_path / "ds.json", "--out", out)
    errors = [line for line in err.splitlines() if ": error: " in line or "error: " in line]
    assert (found, printed, len(errors)) == (1, "", 1) and f"[{code}]" in errors[0] and "ds.json" in errors[0]
    assert not out.exists()


def test_file_is_replaced_only_with_force(hf_fsdp, source, tmp_path):
    out = tmp_path / "fsdp.yaml"
    out.write_text("mine")
    code, _, err = hf_fsdp("convert", source, "--out", out, *ARGUMENTS)
    assert (code, out.read_text()) == (1, "mine") and "FSDP-E761" in err
    assert hf_fsdp("convert", source, "--out", out, "--force", *ARGUMENTS)[0] == 0
    assert yaml.safe_load(out.read_text())["distributed_type"] == "FSDP"
    code, _, err = hf_fsdp("convert", source, "--out", tmp_path / "none" / "fsdp.yaml", *ARGUMENTS)
    assert code == 1 and "FSDP-E764" in err


def test_missing_source_exits_2(hf_fsdp, tmp_path):
    code, out, err = hf_fsdp("convert", tmp_path / "none.json")
    assert (code, out) == (2, "") and "FSDP-E001" in err


def test_form_without_place_for_a_setting_is_refused(hf_fsdp, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: object())  # the library of fp8 is installed
    config = {"distributed_type": "FSDP", "mixed_precision": "fp8", "fsdp_config": {"fsdp_version": 2},
              "fp8_config": {"backend": "AO", "pad_inner_dim": False}}  # fmt: skip
    path = tmp_path / "fp8.yaml"
    path.write_text(json.dumps(config))
    code, out, err = hf_fsdp("convert", path, "--to", "training-arguments")
    assert (code, out) == (1, "") and "FSDP-E737" in err and "fp8.pad_inner_dim" in err
    code, out, _ = hf_fsdp("convert", path)
    assert (code, yaml.safe_load(out)["fp8_config"]) == (0, {"backend": "ao", "pad_inner_dim": False})


def test_words_after_dashes_are_flags(hf_fsdp, source):
    code, _, err = hf_fsdp("convert", source, "--", "train.py", "--bf16", "true")
    assert code == 2 and "flags of the script" in err


def test_checkpoint_of_deepspeed_is_converted(hf_fsdp: Any, tmp_path: Path) -> None:
    zero = Zero(weights={"w": torch.ones(3)}, groups=[["w"]])
    zero.write(tmp_path / "run", 2, 2)
    code, printed, messages = hf_fsdp("convert", tmp_path / "run", "--out", tmp_path / "out")
    assert (code, printed) == (0, f"{tmp_path}/out: step 3, 4 tensors, 40 B, written by 2 ranks of DeepSpeed\n")
    assert messages.count("FSDP-W415") == 2
    code, printed, _ = hf_fsdp("convert", tmp_path / "run", "--out", tmp_path / "out", "--json")
    assert code == 1 and json.loads(printed)["problems"][0]["code"] == "FSDP-E481"
    code, printed, _ = hf_fsdp("convert", tmp_path / "run", "--out", tmp_path / "out", "--json", "--force")
    found = json.loads(printed)
    assert_valid("convert", found)
    assert code == 0 and (found["dialect"], found["step"], found["world_size"]) == ("deepspeed", 3, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "needs --out"),
        (("--out", "x", "--to", "accelerate"), "--to is about configs"),
        (("--out", "x", "--fsdp_version", "2"), "--fsdp_version=2 is about configs"),
        (("--out", "x", "--set", "fsdp.version=2"), "--set is about configs"),
        (("--out", "x", "--", "--bf16", "true"), "-- is about configs"),
    ],
)
def test_flags_of_configs_are_refused_for_a_folder(
    hf_fsdp: Any, tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    code, _, messages = hf_fsdp("convert", tmp_path, *arguments)
    assert code == 2 and text in messages


def test_dtype_is_refused_for_configs_and_deepspeed(hf_fsdp: Any, tmp_path: Path) -> None:
    Zero(weights={"w": torch.ones(3)}, groups=[["w"]]).write(tmp_path / "run", 2, 2)
    code, _, messages = hf_fsdp("convert", tmp_path / "run", "--out", tmp_path / "out", "--dtype", "bf16")
    assert code == 2 and "--dtype conflicts with a checkpoint of DeepSpeed" in messages
    code, _, messages = hf_fsdp("convert", CONFIGS / "fsdp2_bf16.yaml", "--dtype", "bf16")
    assert code == 2 and "--dtype is about weights" in messages


def test_folder_becomes_shards_and_back(hf_fsdp: Any, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "hf" / "model.safetensors")
    code, printed, messages = hf_fsdp("convert", tmp_path / "hf", "--out", tmp_path / "shards", "--dtype", "bf16")
    assert (code, printed) == (0, f"{tmp_path}/shards: 1 tensor, 12 B to start a run from\n")
    assert "FSDP-N475" in messages
    assert hf_fsdp("convert", tmp_path / "shards", "--out", tmp_path / "back")[0] == 0
    expected = torch.arange(6.0).reshape(2, 3).bfloat16()
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")["w"], expected)
    code, printed, _ = hf_fsdp("convert", tmp_path / "hf", "--out", tmp_path / "shards", "--json", "--force")
    found = json.loads(printed)
    assert_valid("convert", found)
    assert code == 0 and (found["dialect"], found["step"], found["num_tensors"]) == ("full", None, 1)
