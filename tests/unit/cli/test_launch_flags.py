"""The arguments of ``hf-fsdp launch``: what is parsed, and what is an error before any rank starts."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_fsdp_plugin.launcher.flags import parse_launch_arguments
from hf_fsdp_plugin.problems import UsageError

CONFIG = "distributed_type: FSDP\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 2\n"
SCRIPT = "open('started', 'w').write('x')"
UNKNOWN = "unknown flag --num_procs before the script. Did you mean --num_processes?"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "train").write_text(SCRIPT)
    (tmp_path / "fsdp.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def launch(hf_fsdp: Callable) -> Callable[..., tuple[int, str, str]]:
    return functools.partial(hf_fsdp, "launch", "--config_file", "fsdp.yaml")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num_procs", "2", "train.py"], UNKNOWN),
        (["--fsdp_offload_param", "true", "train.py"], "Did you mean --fsdp_offload_params?"),
        (["--use_deepspeed", "train.py"], "--use_deepspeed is not supported: this launcher runs FSDP only"),
        (["--max_restarts", "some", "train.py"], "--max_restarts is 'some'; expected a number"),
        (["--show-ranks", "some", "train.py"], "--show_ranks: invalid choice: 'some'"),
        (["--grace", "soon", "train.py"], "--grace is 'soon'; expected a number"),
        (["--hang_timeout", "soon", "train.py"], "--hang_timeout is 'soon'; expected seconds"),
        (["missing.py"], "missing.py: no such script"),
        (["-m", "no_such_module_anywhere"], "no module named no_such_module_anywhere"),
        (["."], "without a __main__.py"),
        (["--report"], "--report needs a value"),
        (["--config_file=", "train.py"], "--config_file needs a value"),
        (["--num_processes", "--cpu", "train.py"], "--num_processes needs a value"),
        (["--cpu=false", "train.py"], "--cpu takes no value, but is given 'false'. Write --cpu alone to turn it on"),
        (["--use_fsdp=false", "train.py"], "--use_fsdp takes no value"),
        (["--quiet=", "train.py"], "--quiet takes no value"),
        (["--log_dir", "a", "--log_dir", "b", "train.py"], "--log_dir b conflicts with --log_dir a"),
        (["--offload_params", "true", "train.py"], "Did you mean --fsdp_offload_params?"),
        (["--sharding_strategy", "1", "train.py"], "Did you mean --fsdp_sharding_strategy?"),
        (["--log_dir", "train.py", "train.py"], "--log_dir train.py: "),
        (["--report", "/proc/none/r.json", "train.py"], "--report /proc/none/r.json: "),
        (["x" * 5000], "no such script"),
        (["fsdp.yaml"], "is a config, not a script"),
        ([], "no script"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_usage_exits_2_with_one_line(launch: Callable, folder: Path, argv: list[str], message: str) -> None:
    code, _, err = launch(*argv)
    assert (code, err.count("\n")) == (2, 1) and message in err, err
    assert not (folder / "started").exists()


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--num_processes", "100000"], ["FSDP-E702"]),
        (["--num_processes", "0"], ["at least 1"]),
        (["--set", "foo=1"], ["'foo'"]),
        (["--num_machines", "2"], ["FSDP-E704"]),
        (["--num_machines", "2", "--num_processes", "3"], ["num_processes=3", "num_machines=2"]),
        (["--fsdp_sharding_strategy", "9", "--set", "foo=1"], ["fsdp_sharding_strategy", "'foo'"]),
        (["--num_processes", "1", "--num_processes", "2"], ["FSDP-E102", "--num_processes=2"]),
        (["--fsdp", "full_shard", "--fsdp", "no_shard"], ["FSDP-E102", "--fsdp=no_shard"]),
        (["--fsdp_offload_params="], ["FSDP-E050"]),
    ],
    ids=str,
)
def test_all_config_errors_are_reported_at_once(launch: Callable, folder: Path, argv: list, parts: list) -> None:
    code, _, err = launch(*argv, "train.py")
    assert code == 1 and all(part in err for part in parts), err
    assert not (folder / "started").exists()


def test_dry_run_shows_the_variables_of_a_pod(launch: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NNODES": "2", "NPROC_PER_NODE": "2", "RDZV_ENDPOINT": "localhost:23456"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    code, out, _ = launch("--dry_run", "train.py")
    assert code == 0 and "environment PET_NNODES=2" in out
    assert "rendezvous: 2 machines, 4 ranks, machine 0 runs ranks 0 to 1, localhost:23456" in out


@pytest.mark.parametrize(
    ("name", "value", "code", "message"),
    [
        ("PET_MAX_RESTARTS", "x", 2, "hf-fsdp launch: PET_MAX_RESTARTS is 'x'; expected a number.\n"),
        ("PET_NNODES", "1:2", 1, "Start the script with torchrun -m hf_fsdp_plugin, which takes MIN:MAX"),
    ],
)
def test_invalid_variable_of_a_pod_starts_nothing(
    launch: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, code: int, message: str
) -> None:
    monkeypatch.setenv(name, value)
    found, _, err = launch("train.py")
    assert (found, err.count("\n")) == (code, 1) and message in err, err
    assert not (folder / "started").exists()


def test_dry_run_prints_command_and_rendezvous(launch: Callable, folder: Path) -> None:
    code, out, _ = launch("--dry-run", "--num_processes", "4", "--cpu", "train", "a b")
    assert code == 0
    assert "rendezvous: 1 machine, 4 ranks, 127.0.0.1:" in out
    assert "hf_fsdp_plugin.launcher.run_script train 'a b'" in out
    assert not (folder / "started").exists()


def test_dry_run_shows_settings_units_and_verdict(launch: Callable, folder: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64}
    (folder / "llama").mkdir()
    (folder / "llama/config.json").write_text(json.dumps(config))
    flags = ["--dry_run", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    for argv in (["--model", "llama", "train.py"], ["train.py", "--model_name_or_path=llama"]):
        code, out, _ = launch(*flags, *argv)
        assert code == 0 and "LlamaDecoderLayer ×2" in out and "fsdp_version=2" in out
        assert out.endswith("Nothing was started (--dry_run).\n") and "no problems. Runs FSDP2 full_shard" in out
    code, out, _ = launch("--dry_run", "train.py", "--model_name", "own/model")
    assert code == 0 and "own/model cannot be built here" in out
    code, _, err = launch("--dry_run", "--model", "own/model", "train.py")
    assert code == 1 and "[FSDP-E709]" in err
    assert not (folder / "started").exists()


def test_flags_are_shown_as_written(launch: Callable, hf_fsdp: Callable, folder: Path) -> None:
    flags = ["--cpu", "--fsdp-offload-params", "true", "--DEBUG"]
    for code, out, _ in (launch(*flags, "--dry_run", "train.py"), hf_fsdp("check", "fsdp.yaml", *flags)):
        shown = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.startswith(("launch.", "off"))}
        assert code == 0
        assert {"launch.use_cpu": "--cpu", "launch.debug": "--DEBUG"}.items() <= shown.items()
        assert shown["offload.params"] == "--fsdp-offload-params=true"


@pytest.mark.parametrize("flag", ["--json", "--model=llama"])
def test_flags_of_a_dry_run_need_it(launch: Callable, folder: Path, flag: str) -> None:
    code, _, err = launch(flag, "train.py")
    assert code == 2 and "needs --dry_run" in err and not (folder / "started").exists()


def test_flags_of_other_launchers_have_suggestions(hf_fsdp: Callable) -> None:
    for written, right in (
        ("--config", "config_file"),
        ("--nproc_per_node", "num_processes"),
        ("--nnodes", "num_m"),
    ):
        code, _, err = hf_fsdp("launch", written, "2", "train.py")
        assert code == 2 and f"Did you mean --{right}" in err


def test_launch_without_a_config_is_a_note(hf_fsdp: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    code, _, err = hf_fsdp("launch", "--dry_run", "train.py")
    assert code == 0 and "[FSDP-N713]" in err
    code, _, err = hf_fsdp("launch", "--dry_run", "--use_fsdp", "train.py")
    assert code == 0 and "[FSDP-N713]" not in err


def test_hyphens_equals_signs_and_any_suffix_are_accepted() -> None:
    parsed = parse_launch_arguments(["--num-processes=1", "--mixed-precision=no", "--same_network", "--DEBUG", "train"])
    assert parsed.command_line == ("--num-processes=1", "--mixed-precision=no", "--same_network", "--DEBUG")
    assert (parsed.script, parsed.options) == ("train", {})
    parsed = parse_launch_arguments(["--quiet", "--monitor_interval", "5", "-t", "3", "--", "--odd.py"])
    assert (parsed.script, parsed.options) == ("--odd.py", {"quiet": "true", "tee": "3"})


def test_values_may_begin_with_a_dash() -> None:
    parsed = parse_launch_arguments(["--role", "-odd", "--FSDP-cpu-offload", "-1", "-t", "-2", "train.py", "--role"])
    assert parsed.options == {"role": "-odd", "tee": "-2"} and parsed.command_line == ("--FSDP-cpu-offload=-1",)
    assert parsed.script_args == ("--role",)


def test_arguments_after_the_script_are_unchanged() -> None:
    parsed = parse_launch_arguments(["--num_processes", "2", "train.py", "--num_processes", "3", "--", "-m"])
    assert parsed.command_line == ("--num_processes=2",)
    assert (parsed.script, parsed.script_args) == ("train.py", ("--num_processes", "3", "--", "-m"))
    with pytest.raises(UsageError, match="unknown flag --learning_rate"):
        parse_launch_arguments(["--learning_rate", "1", "train.py"])
