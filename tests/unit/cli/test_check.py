"""``hf-fsdp check``: exit code, JSON, table, verdict, and where configs and flags come from."""

import io
import json
import re
import sys

import pytest

from hf_fsdp_plugin.cli.main import VERBS, main
from hf_fsdp_plugin.launcher import world
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec import rules
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import assess

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


def place(origin: dict) -> str:
    """Return an origin of the JSON output as text."""
    where = origin["source"] if origin["file"] is None else f"{origin['file']}:{origin['line']}"
    return f"{where} {origin['key']}={origin['text']}" if origin["key"] else where


def check(capsys, *argv: str) -> tuple[int, dict]:
    code = main(["check", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_clean_config_exits_0_with_every_setting(capsys, config):
    code, result = check(capsys, str(config))
    assert code == 0 and result["ok"] is True
    assert "plan" not in result
    strategy = result["settings"]["sharding.strategy"]
    assert (strategy["value"], place(strategy["origin"])) == ("shard_grad_op", f"{config}:4 fsdp_sharding_strategy=2")
    assert result["settings"]["wrap.classes"]["value"] == ["A"]
    forward = result["settings"]["prefetch.forward"]
    assert (forward["value"], forward["refused"], place(forward["origin"])) == (False, False, "default")
    assert set(result["settings"]) == {name for name, _, _ in FsdpSpec().settings()}


def test_config_with_an_error_exits_1_with_a_fix(capsys, config):
    config.write_text(GOOD + "  fsdp_offload_param: true\n")
    code, result = check(capsys, str(config))
    assert code == 1 and result["ok"] is False
    (problem,) = result["problems"]
    assert set(problem) == {"code", "severity", "setting", "origin", "message", "fix", "suggestion"}
    origin = {"source": "file", "file": str(config), "line": 6, "key": "fsdp_offload_param", "text": "true"}
    assert (problem["severity"], problem["setting"], problem["origin"]) == ("error", None, origin)
    assert problem["suggestion"] == "fsdp_offload_params"
    assert "'fsdp_offload_param'" in problem["message"] and "fsdp_offload_params" in problem["fix"]
    assert result["settings"]["sharding.strategy"]["value"] == "shard_grad_op"


def test_warnings_alone_exit_0(capsys, config):
    code, result = check(capsys, str(config), "--set", "fsdp.version=2", "--set", "params.use_orig=false")
    assert code == 0 and result["problems"][0]["severity"] == "warning"


def test_problems_on_stderr_table_and_verdict_on_stdout(capsys, config):
    assert main(["check", str(config), "--set", "nonsense=1"]) == 1
    shown = capsys.readouterr()
    assert re.search(r"sharding.strategy +shard_grad_op +4  fsdp_sharding_strategy=2\n", shown.out)
    assert "defaults: fsdp.version 1" in shown.out
    assert shown.err.startswith("--set: error: ") and "'nonsense'" in shown.err and shown.err.count("\n") == 1
    assert shown.out.splitlines()[-1] == f"{config}: 1 error"
    assert shown.out.count(str(config)) == 2  # the heading of the origins and the verdict


def test_problem_text_has_place_setting_and_code(capsys, config):
    config.write_text(GOOD.replace(": A", ": A B"))
    main(["check", str(config)])
    err = capsys.readouterr().err
    assert err.startswith(f"{config}:5: error: wrap.classes: 'A B' ") and err.count("\n") == 1


def test_verdict_counts_problems_or_says_what_will_run(capsys, config):
    def last_line(*argv):
        main(["check", str(config), *argv])
        return capsys.readouterr().out.splitlines()[-1].removeprefix(f"{config}: ")

    on_two = "Runs FSDP1 shard_grad_op on 2 ranks; each A is a unit; no mixed precision."
    assert last_line("--fsdp_version=1") == f"no problems. {on_two}"
    assert last_line("--set", "launch.distributed_type=NO").startswith("1 error")
    warned = last_line("--set", "fsdp.version=2", "--set", "params.use_orig=false", "--cpu")
    assert warned == f"1 warning. {on_two}".replace("FSDP1", "FSDP2").replace("2 ranks", "2 CPU ranks")
    config.write_text(GOOD + "  fsdp_offload_param: 1\n  fsdp_version: 2\n  fsdp_use_orig_params: false\n")
    assert last_line() == "1 error, 1 warning"
    assert last_line("--set", "nonsense=1") == "2 errors, 1 warning"


def test_problems_are_in_line_order(capsys, config):
    config.write_text(GOOD.replace("strategy: 2", "strategy: 9") + "  fsdp_nonsense: 1\nnum_machines: 0\n")
    main(["check", str(config)])
    places = [line.split(":")[1] for line in capsys.readouterr().err.splitlines()]
    assert places == ["4", "6", "7"]


def test_refused_value_is_not_shown_as_default(capsys, config):
    config.write_text(GOOD.replace("strategy: 2", "strategy: FULL") + "  fsdp_versoin: 2\n")
    _, result = check(capsys, str(config))
    for name, line, key in (("sharding.strategy", 4, "fsdp_sharding_strategy"), ("fsdp.version", 6, "fsdp_versoin")):
        shown = result["settings"][name]
        assert (shown["value"], shown["refused"]) == (None, True)
        assert (shown["origin"]["line"], shown["origin"]["key"]) == (line, key)
    main(["check", str(config)])
    out = capsys.readouterr().out
    assert re.search(r"sharding.strategy +refused +4  fsdp_sharding_strategy=FULL", out)
    assert "strategy" not in out.partition("defaults:")[2]


@pytest.mark.parametrize("width", [80, 120])
def test_text_fits_the_terminal(capsys, config, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    config.rename(config.with_name("f.yaml"))
    monkeypatch.chdir(config.parent)
    long_names = ", ".join(f"VeryLongNameOfTransformerLayer{number}" for number in range(9))
    config.with_name("f.yaml").write_text(GOOD.replace(": A", f": {long_names}") + "  fsdp_nonsense: 1\n")
    main(["check", "f.yaml", "--set", "fsdp.version=2"])
    shown = capsys.readouterr()
    assert max(map(len, (shown.out + shown.err).splitlines())) <= width
    assert "… " in shown.out or "…" in shown.out


@pytest.mark.parametrize(
    ("variables", "is_colored"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
    ids=str,
)
def test_colors_follow_the_variables(capsys, config, monkeypatch, variables, is_colored):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    main(["check", str(config), "--set", "nonsense=1"])
    shown = capsys.readouterr()
    assert ("\033[31merror: \033[0m" in shown.err, "\033[31m1 error\033[0m" in shown.out) == (is_colored,) * 2
    assert is_colored or "\033" not in shown.out + shown.err


def test_terminal_is_colored_unless_dumb(monkeypatch):
    from hf_fsdp_plugin.cli.output import has_color

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert has_color(Terminal()) and not has_color(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_color(Terminal())


def test_config_file_flag_is_the_config(capsys, config):
    for flag in ("--config_file", "--config-file"):
        code, result = check(capsys, flag, str(config))
        assert (code, result["config"], result["settings"]["sharding.strategy"]["value"]) == (
            0, str(config), "shard_grad_op"
        )  # fmt: skip


def test_several_files_have_one_verdict_each(capsys, config):
    other = config.with_name("other.yaml")
    other.write_text("distributed_type: FSPD\n")
    assert main(["check", str(config), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith((f"{config}: ", f"{other}: "))][1] == f"{other}: 1 error"
    code, result = check(capsys, str(config), str(other))
    assert (code, result["ok"], [one["ok"] for one in result["configs"]]) == (1, False, [True, False])
    assert check(capsys, str(config), str(config))[0] == 0


def test_stdin_is_read_for_a_dash(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((GOOD + "  nonsense: 1\n").encode())))
    code, result = check(capsys, "-")
    assert (code, result["config"], result["problems"][0]["origin"]["line"]) == (1, "<stdin>", 6)
    assert result["settings"]["sharding.strategy"]["value"] == "shard_grad_op"


def test_flags_of_launch_override_the_config_as_notes(capsys, config):
    flags = ["--mixed_precision", "bf16", "--fsdp-version=2", "--cpu", "--num_processes", "4"]
    config.write_text(GOOD + "mixed_precision: fp16\n")
    code, result = check(capsys, str(config), *flags)
    values = {name: result["settings"][name]["value"] for name in ("precision.param", "fsdp.version", "launch.use_cpu")}
    assert (code, values) == (0, {"precision.param": "bf16", "fsdp.version": 2, "launch.use_cpu": True})
    codes = {problem["code"] for problem in result["problems"]}
    assert codes == {"FSDP-N105"}


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        ("--config a.yaml", "Did you mean --config_file?"),
        ("--nproc_per_node 2", "Did you mean --num_processes?"),
        ("--fsdp_offload_param true", "Did you mean --fsdp_offload_params?"),
        ("--modle x", "Did you mean --model?"),
        ("--report x", "is a flag of hf-fsdp launch only"),
        ("--use_deepspeed", "is not supported"),
        ("--frobnicate", "`hf-fsdp check --help`"),
    ],
)
def test_unknown_flag_has_a_suggestion(capsys, argv, hint):
    assert main(["check", *argv.split()]) == 2
    err = capsys.readouterr().err
    assert hint in err and err.count("\n") == 1


def test_section_in_set_names_what_to_write(capsys, config):
    code, result = check(capsys, str(config), "--set", "fsdp_config=x")
    (problem,) = (problem for problem in result["problems"] if problem["code"] == "FSDP-E020")
    assert code == 1 and "section" in problem["message"] and "--fsdp_config" in problem["fix"]


def test_world_size_is_shown_as_written(capsys, config):
    _, result = check(capsys, str(config), "--world-size", "4")
    assert place(result["settings"]["launch.num_processes"]["origin"]) == "command line --world-size=4"
    (problem,) = (problem for problem in result["problems"] if problem["setting"] == "launch.num_processes")
    assert problem["severity"] == "note" and "--set" not in problem["message"]


@pytest.mark.parametrize(
    ("setting", "absent", "present"),
    [
        ("launch.mixed_precision=bf17", "auto", "no, fp16, bf16 or fp8"),
        ("launch.num_processes=two", "1e8", "auto, or an integer"),
        ("wrap.min_num_params=many", "nothing", "100000000, 1e8 or 100M"),
    ],
)
def test_expected_values_are_those_that_are_accepted(capsys, config, setting, absent, present):
    _, result = check(capsys, str(config), "--set", setting)
    (problem,) = (problem for problem in result["problems"] if problem["severity"] == "error")
    assert present in problem["message"] and absent not in problem["message"]


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_missing_config_exits_2(capsys, tmp_path, json_flag):
    assert main(["check", str(tmp_path / "none.yaml"), *json_flag]) == 2
    assert main(["check", str(tmp_path), *json_flag]) == 2
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("FSDP-E001") == 2


def test_fsdp_and_fsdp_config_flags_are_read(capsys, config):
    code, result = check(capsys, "--fsdp", "full_shard auto_wrap", "--fsdp-config", '{"offload_params": true}')
    assert code == 0
    offload = result["settings"]["offload.params"]
    assert offload["value"] is True
    assert place(offload["origin"]) == "TrainingArguments fsdp_config offload_params=true"
    assert result["settings"]["fsdp.version"]["value"] == 2
    code, result = check(capsys, "--fsdp")
    assert code == 0 and result["settings"]["launch.distributed_type"]["value"] == "FSDP"


def test_world_size_is_checked_against_the_mesh(capsys, config):
    code, result = check(capsys, str(config), "--set", "mesh.shard=2", "--world-size", "3")
    assert code == 1
    assert result["problems"][-1]["setting"] == "mesh.shard"


def test_default_file_is_read_without_a_config(capsys, tmp_path):
    assert main(["check"]) == 2
    assert str(tmp_path / "hf") in capsys.readouterr().err
    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text(GOOD)
    code, result = check(capsys)
    assert code == 0 and result["settings"]["sharding.strategy"]["value"] == "shard_grad_op"


@pytest.mark.parametrize("argv", ["", "check --frobnicate", "check --world-size 0", "check --set"])
def test_wrong_usage_exits_2(capsys, argv):
    assert main(argv.split()) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_unknown_verb_lists_the_verbs(capsys):
    assert main(["frobnicate"]) == 2
    assert f"unknown verb 'frobnicate'. The verbs are {', '.join(VERBS)}." in capsys.readouterr().err


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
    assert result["plan"]["backend"] == "fsdp1"
    assert result["plan"]["mesh"] == {"replicate": 1, "shard": 2, "context": 1, "tensor": 1, "expert": 1}
    config.write_text(GOOD.replace(": A", ": LamaDecoderLayer"))
    code, result = check(capsys, str(config), "--model", str(tiny_llama))
    assert (code, result["plan"], result["problems"][0]["setting"]) == (1, None, "wrap.classes")
    assert result["problems"][0]["origin"]["line"] == 5


@pytest.mark.slow
def test_model_is_planned_for_the_device_of_launch(capsys, config, tiny_llama, monkeypatch):
    argv = [str(config), "--model", str(tiny_llama), "--set", "wrap.policy=none", "--set", "wrap.classes=LlamaMLP"]
    found = {"none": world.FoundDevices(), "gpus": world.FoundDevices(kind="cuda", count=2)}
    for machine, device in (("none", "cpu"), ("gpus", "cuda")):
        monkeypatch.setattr(world, "find_devices", lambda machine=machine: found[machine])
        assert check(capsys, *argv)[1]["plan"]["device"] == device
    assert check(capsys, *argv, "--device", "xpu")[1]["plan"]["device"] == "xpu"
    assert check(capsys, *argv, "--cpu")[1]["plan"]["device"] == "cpu"


@pytest.mark.slow
def test_remarks_on_a_model_are_printed_once(capsys, config, tiny_llama):
    config.write_text(GOOD.replace(": A", ": LlamaDecoderLayer"))
    main(["check", str(config), "--model", str(tiny_llama), "--fsdp_version", "2", "--fsdp_use_orig_params", "false"])
    shown = capsys.readouterr()
    assert shown.err.count("FSDP-W148") == 1 and "FSDP-W148" not in shown.out and "LlamaDecoderLayer ×2" in shown.out


def test_distributed_config_flag_is_read(capsys, tmp_path):
    path = tmp_path / "distributed.json"
    path.write_text('{"fsdp_size": 2, "dp_replicate_size": 2}')
    assert main(["check", "--distributed-config", str(path), "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["mesh.replicate"]["value"] == 2
    assert place(settings["mesh.replicate"]["origin"]) == f"{path}:1 dp_replicate_size=2"


def test_config_that_does_not_enable_fsdp_has_no_defaults(capsys, tmp_path):
    path = tmp_path / "axolotl.yaml"
    path.write_text("base_model: m\nbf16: auto\nfsdp:\nfsdp_config:\n")
    for argv in ([str(path)], ["--fsdp", ""], ["--fsdp-config", '{"min_num_params": 0}']):
        code, result = check(capsys, *argv)
        assert code == 0 and not result["enabled"]
        assert main(["check", *argv]) == 0
        shown = capsys.readouterr()
        assert "full_shard" not in shown.out and "FSDP is not enabled by these settings" in shown.err


def test_version_that_depends_on_the_script_is_noted(capsys, config):
    code, result = check(capsys, str(config))
    assert (code, [problem["code"] for problem in result["problems"]]) == (0, ["FSDP-N161"])
    assert check(capsys, str(config), "--set", "fsdp.version=1")[1]["problems"] == []


@pytest.mark.parametrize(
    ("keys", "noted"),
    [
        ("", "fsdp.version"),
        ("fsdp_version: 1", "wrap.policy"),
        ("fsdp_version: 2", "wrap.policy"),
        ("fsdp_auto_wrap_policy: NO_WRAP", "fsdp.version"),
        ("fsdp_version: 1\n  fsdp_auto_wrap_policy: NO_WRAP", None),
        ("fsdp_version: 2\n  fsdp_transformer_layer_cls_to_wrap: A", None),
    ],
)
def test_defaults_that_depend_on_the_script_are_noted(capsys, tmp_path, keys, noted):
    path = tmp_path / "fsdp.yaml"
    path.write_text(f"distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  {keys}\n")
    _, result = check(capsys, str(path))
    assert [p["setting"] for p in result["problems"] if p["code"] == "FSDP-N161"] == [noted] * (noted is not None)
    specs = [
        assess(Sources(config=ConfigFile.at(path), training_arguments=given, environ={})).spec
        for given in ({}, {"fsdp": True})
    ]
    differ = any(specs[0].get(name) != specs[1].get(name) for name in ("fsdp.version", "wrap.policy"))
    assert differ is (noted is not None)


def test_verdict_names_what_runs_in_each_kind_of_script(capsys, tmp_path):
    path = tmp_path / "fsdp.yaml"
    path.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n")

    def verdict(*argv):
        assert main(["check", str(path), *argv]) == 0
        return capsys.readouterr().out.splitlines()[-1].partition("Runs ")[2]

    alone = "FSDP1 full_shard on 2 ranks; the whole model is one unit; no mixed precision."
    with_fsdp = "If TrainingArguments in the script set fsdp, it runs FSDP2; each layer is a unit."
    assert verdict() == f"{alone} {with_fsdp}"
    assert "FSDP2" not in verdict("--fsdp_version", "1", "--fsdp_auto_wrap_policy", "NO_WRAP")


def test_check_starts_without_the_modules_of_ranks(tmp_path, imports_no_heavy_library):
    path = tmp_path / "fsdp.yaml"
    path.write_text(GOOD)
    of_ranks = ("multiprocessing", "hf_fsdp_plugin.hangs.calls", "hf_fsdp_plugin.launcher.run_script")
    imports_no_heavy_library("check", path, libraries=("torch", *of_ranks))


def test_summary_names_fp8_and_the_other_precision(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "_is_installed", lambda backend: True)
    path = tmp_path / "fp8.yaml"
    path.write_text("distributed_type: FSDP\nmixed_precision: fp8\nfsdp_config: {fsdp_version: 2}\n")
    assert main(["check", str(path)]) == 0
    assert "; fp8 and bf16." in capsys.readouterr().out
