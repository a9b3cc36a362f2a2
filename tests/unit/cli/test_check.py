"""``hf-fsdp check``: exit code, JSON and table."""

import json

import pytest

from hf_fsdp_plugin.cli.main import main
from hf_fsdp_plugin.spec.model import FsdpSpec

GOOD = """\
distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_sharding_strategy: 2
  fsdp_transformer_layer_cls_to_wrap: A
"""


@pytest.fixture(autouse=True)
def no_other_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("FSDP_VERSION", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "fsdp.yaml"
    path.write_text(GOOD)
    return path


def check(capsys, *argv: str) -> tuple[int, dict]:
    code = main(["check", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_clean_config_exits_0_with_every_setting(capsys, config):
    code, result = check(capsys, str(config))
    assert code == 0 and result["ok"] is True
    assert "plan" not in result
    strategy = {"value": "shard_grad_op", "origin": f"{config}:4 fsdp_sharding_strategy=2"}
    assert result["settings"]["sharding.strategy"] == strategy
    assert result["settings"]["wrap.classes"]["value"] == ["A"]
    assert result["settings"]["prefetch.forward"] == {"value": False, "origin": "default"}
    assert set(result["settings"]) == {name for name, _, _ in FsdpSpec().settings()}


def test_config_with_an_error_exits_1_with_a_fix(capsys, config):
    config.write_text(GOOD + "  fsdp_offload_param: true\n")
    code, result = check(capsys, str(config))
    assert code == 1 and result["ok"] is False
    (problem,) = result["problems"]
    assert set(problem) == {"code", "severity", "setting", "origin", "message", "fix"}
    assert (problem["severity"], problem["setting"], problem["origin"]) == ("error", None, f"{config}:6")
    assert "'fsdp_offload_param'" in problem["message"] and "fsdp_offload_params" in problem["fix"]
    assert result["settings"]["sharding.strategy"]["value"] == "shard_grad_op"


def test_warnings_alone_exit_0(capsys, config):
    code, result = check(capsys, str(config), "--set", "fsdp.version=2", "--set", "params.use_orig=false")
    assert code == 0 and result["problems"][0]["severity"] == "warning"


def test_table_on_stdout_and_problems_on_stderr(capsys, config):
    assert main(["check", str(config), "--set", "nonsense=1"]) == 1
    shown = capsys.readouterr()
    assert f"sharding.strategy        shard_grad_op  {config}:4 fsdp_sharding_strategy=2" in shown.out
    assert "defaults: fsdp.version 1" in shown.out
    assert shown.err.startswith("--set: ") and "'nonsense'" in shown.err and shown.err.count("\n") == 1


def test_problem_text_has_place_setting_and_code(capsys, config):
    config.write_text(GOOD.replace(": A", ": A B"))
    main(["check", str(config)])
    err = capsys.readouterr().err
    assert err.startswith(f"{config}:5: wrap.classes: 'A B' ") and "A, B." in err and err.count("\n") == 1


def test_fsdp_and_fsdp_config_flags_are_read(capsys, config):
    code, result = check(capsys, "--fsdp", "full_shard auto_wrap", "--fsdp-config", '{"offload_params": true}')
    assert code == 0
    offload = {"value": True, "origin": "TrainingArguments fsdp_config:1 offload_params=true"}
    assert result["settings"]["offload.params"] == offload
    assert result["settings"]["fsdp.version"]["value"] == 2
    code, result = check(capsys, "--fsdp")
    assert code == 0 and result["settings"]["launch.distributed_type"]["value"] == "FSDP"


def test_world_size_is_checked_against_the_mesh(capsys, config):
    code, result = check(capsys, str(config), "--set", "mesh.shard=2", "--world-size", "3")
    assert code == 1
    assert result["problems"][-1]["setting"] == "mesh.shard"


def test_default_file_is_read_without_a_config(capsys, tmp_path):
    assert main(["check"]) == 1
    assert str(tmp_path / "hf") in capsys.readouterr().err
    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text(GOOD)
    code, result = check(capsys)
    assert code == 0 and result["settings"]["sharding.strategy"]["value"] == "shard_grad_op"


@pytest.mark.parametrize("argv", ["", "check --frobnicate", "check a b", "check --world-size 0", "check --set"])
def test_wrong_usage_exits_2(capsys, argv):
    assert main(argv.split()) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_unknown_verb_lists_the_verbs(capsys):
    assert main(["frobnicate"]) == 2
    assert "unknown verb 'frobnicate'. The verbs are check, schema, launch" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_exit_0(capsys, flag):
    assert main([flag]) == 0
    assert capsys.readouterr().out


def test_json_has_no_nan_or_infinity(capsys, config):
    config.write_text(GOOD + "tpu_zone: .inf\n")
    main(["check", "--json", str(config)])
    json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


@pytest.fixture
def tiny_llama(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_unknown_model_is_an_error(capsys, config, tmp_path):
    code, result = check(capsys, str(config), "--model", str(tmp_path / "none"))
    assert (code, result["plan"], result["problems"][-1]["code"]) == (1, None, "FSDP-E709")


@pytest.mark.slow
def test_model_adds_the_plan_or_its_errors(capsys, config, tiny_llama):
    config.write_text(GOOD.replace(": A", ": LlamaDecoderLayer"))
    code, result = check(capsys, str(config), "--model", str(tiny_llama))
    assert code == 0
    assert (result["plan"]["backend"], result["plan"]["mesh"]) == ("fsdp1", {"replicate": 1, "shard": 2})
    config.write_text(GOOD.replace(": A", ": LamaDecoderLayer"))
    code, result = check(capsys, str(config), "--model", str(tiny_llama))
    assert (code, result["plan"], result["problems"][0]["setting"]) == (1, None, "wrap.classes")
    assert result["problems"][0]["origin"] == f"{config}:5"


def test_distributed_config_flag_is_read(capsys, tmp_path):
    path = tmp_path / "distributed.json"
    path.write_text('{"fsdp_size": 2, "dp_replicate_size": 2}')
    assert main(["check", "--distributed-config", str(path), "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["mesh.replicate"] == {"value": 2, "origin": f"{path}:1 dp_replicate_size=2"}
