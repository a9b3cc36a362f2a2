"""``hf-fsdp check``: its exit code, its JSON and its table."""

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
def no_ambient_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("FSDP_VERSION", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "fsdp.yaml"
    path.write_text(GOOD)
    return path


def verdict(capsys, *argv: str) -> tuple[int, dict]:
    code = main(["check", "--json", *argv])
    out = capsys.readouterr().out
    return code, json.loads(out)


def test_a_clean_config_exits_0_and_shows_every_setting_with_its_origin(capsys, config):
    code, said = verdict(capsys, str(config))
    assert code == 0 and said["ok"] is True
    assert "plan" not in said
    assert said["settings"]["sharding.strategy"] == {
        "value": "shard_grad_op",
        "origin": f"{config}:4 fsdp_sharding_strategy=2",
    }
    assert said["settings"]["wrap.classes"]["value"] == ["A"]
    assert said["settings"]["prefetch.forward"] == {"value": False, "origin": "default"}
    assert set(said["settings"]) == {name for name, _, _ in FsdpSpec().settings()}


def test_a_config_with_an_error_exits_1_and_says_what_to_do(capsys, config):
    config.write_text(GOOD + "  fsdp_offload_param: true\n")
    code, said = verdict(capsys, str(config))
    assert code == 1 and said["ok"] is False
    assert [{**problem, "code": ""} for problem in said["problems"]] == [
        {
            "code": "",
            "severity": "error",
            "setting": None,
            "origin": f"{config}:6",
            "message": "unknown key 'fsdp_offload_param'.",
            "fix": "Did you mean fsdp_offload_params?",
        }
    ]
    assert said["settings"]["sharding.strategy"]["value"] == "shard_grad_op"


def test_a_warning_alone_exits_0(capsys, config):
    code, said = verdict(capsys, str(config), "--set", "fsdp.version=2", "--set", "params.use_orig=false")
    assert code == 0 and said["problems"][0]["severity"] == "warning"


def test_without_json_the_table_is_on_stdout_and_complaints_are_on_stderr(capsys, config):
    assert main(["check", str(config), "--set", "nonsense=1"]) == 1
    shown = capsys.readouterr()
    assert f"sharding.strategy        shard_grad_op  {config}:4 fsdp_sharding_strategy=2" in shown.out
    assert "defaults: fsdp.version 1" in shown.out
    assert shown.err == "--set: unknown setting 'nonsense'. See hf-fsdp check --json for the names.\n"


def test_the_error_format_is_place_message_and_remedy(capsys, config):
    config.write_text(GOOD.replace(": A", ": A B"))
    main(["check", str(config)])
    assert capsys.readouterr().err == (
        f"{config}:5: wrap.classes: 'A B' has a blank inside. Put a comma between names: A, B.\n"
    )


def test_words_and_overrides_are_taken(capsys, config):
    code, said = verdict(capsys, "--fsdp", "full_shard auto_wrap", "--fsdp-config", '{"offload_params": true}')
    assert code == 0
    assert said["settings"]["offload.params"] == {
        "value": True,
        "origin": "TrainingArguments fsdp_config:1 offload_params=true",
    }
    assert said["settings"]["fsdp.version"]["value"] == 2
    code, said = verdict(capsys, "--fsdp")
    assert code == 0 and said["settings"]["launch.distributed_type"]["value"] == "FSDP"


def test_a_world_size_is_held_against_the_mesh(capsys, config):
    code, said = verdict(capsys, str(config), "--set", "mesh.shard=2", "--world-size", "3")
    assert code == 1
    assert "2 does not divide num_processes, 3" in said["problems"][-1]["message"]


def test_without_a_config_accelerates_default_file_is_read(capsys, tmp_path):
    assert main(["check"]) == 1
    assert "Accelerate has no default one in" in capsys.readouterr().err
    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text(GOOD)
    code, said = verdict(capsys)
    assert code == 0 and said["settings"]["sharding.strategy"]["value"] == "shard_grad_op"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["frobnicate"],
        ["check", "--frobnicate"],
        ["check", "a", "b"],
        ["check", "--world-size", "0"],
        ["check", "--set"],
    ],
)
def test_wrong_usage_exits_2_and_writes_nothing_to_stdout_but_help(capsys, argv):
    assert main(argv) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_unknown_verb_is_told_which_there_are(capsys):
    assert main(["frobnicate"]) == 2
    assert "unknown verb 'frobnicate'. The verbs are check, schema, launch" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["check", "--help"], ["schema", "--help"]])
def test_help_and_version_exit_0(capsys, argv):
    assert main(argv) == 0
    assert capsys.readouterr().out


def test_json_has_no_number_that_json_does_not_know(capsys, config):
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


@pytest.mark.slow
def test_with_a_model_the_plan_is_shown_and_absent_classes_are_errors(capsys, config, tiny_llama):
    config.write_text(GOOD.replace(": A", ": LlamaDecoderLayer"))
    code, said = verdict(capsys, str(config), "--model", str(tiny_llama))
    assert code == 0
    assert (said["plan"]["backend"], said["plan"]["mesh"]) == ("fsdp1", {"replicate": 1, "shard": 2})
    config.write_text(GOOD.replace(": A", ": LamaDecoderLayer"))
    code, said = verdict(capsys, str(config), "--model", str(tiny_llama))
    assert (code, said["plan"], said["problems"][0]["setting"]) == (1, None, "wrap.classes")
    assert said["problems"][0]["origin"] == f"{config}:5"
