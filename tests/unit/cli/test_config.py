"""``hf-fsdp config`` without a terminal: options, files, and what stock Accelerate reads from them."""

from __future__ import annotations

import itertools
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin import Problem, SpecError, load_spec
from hf_fsdp_plugin.launcher.flags import Parser
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.tools.config.conversation import State
from hf_fsdp_plugin.tools.config.questions import BY_NAME, QUESTIONS
from hf_fsdp_plugin.tools.config.verb import add_arguments
from tests.support.json_schema import assert_valid


def spec_of(path: Path | str) -> FsdpSpec:
    spec = load_spec(path, environ={})
    assert [str(problem) for problem in spec.problems if problem.severity != "note"] == []
    return spec


# Each dict is a path through the questions; the settings are what its answers mean.
STRATEGY = [
    ({"strategy": name}, {"sharding.strategy": name}) for name, row in STRATEGIES.items() if not row.hybrid
] + [
    (
        {"strategy": name, "group_size": "2"},
        {"sharding.strategy": name, "mesh.shard": 2, "mesh.replicate": 2},
    )
    for name, row in STRATEGIES.items()
    if row.hybrid
]  # fmt: skip
OTHERS = [
    (
        {"wrap_policy": "transformer", "wrap_classes": "ABlock,BBlock", "precision": "bf16", "state_dict": "sharded"},
        {"wrap.policy": "transformer", "wrap.classes": ("ABlock", "BBlock"), "precision.param": "bf16",
         "checkpoint.state_dict": "sharded"},
    ),
    (
        {"wrap_policy": "size", "min_num_params": "1e6", "precision": "fp16", "state_dict": "full", "offload": "yes"},
        {"wrap.policy": "size", "wrap.min_num_params": 10**6, "precision.param": "fp16",
         "checkpoint.state_dict": "full", "offload.params": True},
    ),
    (
        {"wrap_policy": "none", "precision": "no", "checkpointing": "full", "ram_efficient_loading": "no"},
        {"wrap.policy": "none", "precision.param": "auto", "activation.checkpointing": "full",
         "activation.offload": False, "loading.ram_efficient": False},
    ),
    (
        {"state_dict": "local", "checkpointing": "selective", "activation_offload": "yes"},
        {"wrap.policy": "transformer", "wrap.classes": (), "checkpoint.state_dict": "local",
         "activation.checkpointing": "selective", "activation.offload": True},
    ),
]  # fmt: skip
VERSIONS = [
    ({"fsdp_version": "1"}, {"fsdp.version": 1, "params.use_orig": True, "prefetch.backward": "pre"}),
    ({"fsdp_version": "2"}, {"fsdp.version": 2, "params.use_orig": True}),
]  # fmt: skip
COMBINATIONS = [
    ({"gpus": "4"} | version[0] | strategy[0] | others[0], version[1] | strategy[1] | others[1])
    for version, strategy, others in itertools.product(VERSIONS, STRATEGY, OTHERS)
]


def options(answers: dict[str, str]) -> list[str]:
    return [word for name, value in answers.items() for word in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.parametrize(("answers", "settings"), COMBINATIONS)
def test_written_file_means_the_answers(config, answers, settings):
    out, err = config("--yes", "-o", "fsdp.yaml", "--json", *options(answers))
    result = json.loads(out)
    assert_valid("config", result)
    spec = spec_of("fsdp.yaml")
    assert spec.enabled and {name: spec.get(name) for name in settings} == settings
    assert spec.launch.num_processes == 4
    assert "--per_device_train_batch_size 1 --gradient_accumulation_steps 1" in err


@pytest.mark.parametrize("answers", [answers for answers, _ in COMBINATIONS])
def test_stock_accelerate_reads_the_settings(config, answers, monkeypatch):
    out, _ = config("--yes", "-o", "fsdp.yaml", "--json", *options(answers))
    limits = " ".join(json.loads(out)["stock_limits"])
    variables = stock_variables(Path("fsdp.yaml"))
    for name, value in variables.items():
        if name.startswith(("FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.setenv(name, value)
    # Their broadcast under FSDP1 needs a GPU.
    assert variables["FSDP_CPU_RAM_EFFICIENT_LOADING"] == answers.get("ram_efficient_loading", "yes").replace(
        "yes", "true"
    ).replace("no", "false")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", "false")
    refuses = [word for word in ("LOCAL_STATE_DICT", "selective", "offload activations") if word in limits]
    if "refuses" in limits and refuses:
        with pytest.raises(ValueError):
            stock_plugin()
        return
    plugin = stock_plugin()
    spec = spec_of("fsdp.yaml")
    assert plugin.fsdp_version == spec.fsdp.version
    policy = plugin.cpu_offload  # OffloadPolicy offloads nothing, CPUOffloadPolicy does
    assert getattr(policy, "offload_params", type(policy).__name__ == "CPUOffloadPolicy") == spec.offload.params
    assert plugin.state_dict_type.name.lower() == f"{spec.checkpoint.state_dict}_state_dict"
    assert plugin.activation_checkpointing == (spec.activation.checkpointing == "full")
    assert variables["ACCELERATE_MIXED_PRECISION"] == spec.launch.mixed_precision
    row = STRATEGIES[spec.sharding.strategy]
    if spec.fsdp.version == 1:
        assert plugin.sharding_strategy.name == row.torch_name
        assert plugin.use_orig_params == spec.params.use_orig
        found = plugin.backward_prefetch.name.lower() if plugin.backward_prefetch else "none"
        assert found.removeprefix("backward_") == spec.prefetch.backward
    elif "NO_SHARD" not in limits:
        assert plugin.reshard_after_forward == row.reshards_after_forward
    if row.hybrid and spec.fsdp.version == 2:
        assert variables["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "2"
    if spec.wrap.policy == "size":
        assert plugin.min_num_params == spec.wrap.min_num_params
    elif spec.wrap.policy == "transformer" and spec.wrap.classes:
        assert plugin.transformer_cls_names_to_wrap == list(spec.wrap.classes)


def stock_variables(path: Path) -> dict[str, str]:
    """Return the variables that stock ``accelerate launch`` sets for its ranks."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    parsed = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, defaults, _ = _validate_launch_command(parsed)
    assert defaults is not None and args.use_fsdp
    before = dict(os.environ)
    try:
        return prepare_multi_gpu_env(args)
    finally:
        os.environ.clear()
        os.environ.update(before)


def stock_plugin() -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin()


def test_cpu_ranks_are_written_and_kept(config):
    config("--yes", "-o", "fsdp.yaml", "--cpu")
    spec = spec_of("fsdp.yaml")
    assert (spec.launch.use_cpu, spec.launch.num_processes) == (True, 2)
    out, _ = config("--yes", "-o", "fsdp.yaml", "--force", "--json", "--strategy", "shard_grad_op")
    assert spec_of("fsdp.yaml").launch.use_cpu
    assert json.loads(out)["stock_limits"] == ["Stock Accelerate does not shard on CPU ranks."]
    _, err = config("--yes", "-o", "fsdp.yaml", "--force", "--precision", "fp16", code=1)
    assert "FSDP-E147" in err and spec_of("fsdp.yaml").launch.mixed_precision == "bf16"


def test_every_question_is_an_option(config):
    parser = Parser()
    add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {question.flag for question in QUESTIONS} <= flags


@pytest.mark.parametrize(
    ("argv", "code", "part"),
    [
        ("--gpus 0", "FSDP-E762", "between 1 and"),
        ("--gpus 1000000000000000000000000000000", "FSDP-E762", "between 1 and"),
        ("--gpus eight", "FSDP-E762", "'eight' is not a whole number"),
        ("--gpus 8 --global-batch 20", "FSDP-E762", "Nearest: 16 or 24"),
        ("--gpus 2 --global-batch 12 --micro-batch 4", "FSDP-E762", "does not divide 6"),
        ("--strategy zero9", "FSDP-E762", "is not one of full_shard"),
        ("--strategy hybrid_shard --gpus 6 --group-size 4", "FSDP-E762", "does not divide the 6 ranks"),
        ("--wrap-classes 3x", "FSDP-E762", "is not a class name"),
        ("--wrap-policy size --min-num-params 0", "FSDP-E762", "above 0"),
        ("--num-machines 2 --machine-rank 2", "FSDP-E762", "between 0 and 1"),
        ("--group-size 4", "FSDP-E763", "--group-size"),
        ("--model none/such", "FSDP-E709", "none/such"),
        ("-o none/fsdp.yaml", "FSDP-E764", "none is not a folder"),
        ("-o .", "FSDP-E764", "it is a folder"),
    ],
)
def test_wrong_option_is_refused_and_writes_nothing(config, tmp_path, argv, code, part):
    wrong_usage = code in ("FSDP-E762", "FSDP-E763")
    target = [] if "-o" in argv else ["-o", "fsdp.yaml"]
    _, err = config("--yes", *target, *argv.split(), code=2 if wrong_usage else 1)
    assert code in err and part in err and not list(tmp_path.glob("**/*.yaml"))


def test_lines_of_stdin_answer_the_questions(config, monkeypatch, tmp_path):
    answers = ["", "", "3", "fp16", "six", "6", "1", "2", "2"] + [""] * 10
    (tmp_path / "answers").write_text("\n".join(answers) + "\n")
    with (tmp_path / "answers").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        _, err = config("-o", "fsdp.yaml")
    spec = spec_of("fsdp.yaml")
    assert (spec.launch.num_processes, spec.launch.mixed_precision, spec.fsdp.version) == (3, "fp16", 1)
    assert spec.sharding.strategy == "shard_grad_op" and "'six' is not a whole number" in err
    assert "2. shard_grad_op: keeps gathered parameters" in err and "Default full_shard" in err


def test_end_of_input_is_an_error_and_writes_nothing(config, monkeypatch, tmp_path):
    for number in (0, 3):
        (tmp_path / "answers").write_text("\n" * number)
        with (tmp_path / "answers").open() as file:
            monkeypatch.setattr("sys.stdin", file)
            _, err = config("-o", "fsdp.yaml", code=1)
        assert "FSDP-E760" in err and "Nothing was written" in err and not Path("fsdp.yaml").exists()


def test_default_place_is_that_of_accelerate(config, tmp_path):
    config("--yes", "--gpus", "2")
    path = tmp_path / "home/accelerate/default_config.yaml"
    assert spec_of(path).launch.num_processes == 2
    (tmp_path / "other").write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)
    _, err = config("--yes", "--gpus", "4", code=1)
    assert "FSDP-E761" in err and spec_of(path).launch.num_processes == 2
    config("--yes", "--gpus", "4", "--force")
    assert spec_of(path).launch.num_processes == 4 and os.listdir(path.parent) == [path.name]


def test_json_file_is_written_and_changed(config, tmp_path):
    config("--yes", "-o", "fsdp.json", "--gpus", "2")
    tree = json.loads(Path("fsdp.json").read_text())
    Path("fsdp.json").write_text(json.dumps({**tree, "enable_cpu_affinity": True}))
    config("--yes", "-o", "fsdp.json", "--strategy", "shard_grad_op", "--force")
    assert spec_of("fsdp.json").sharding.strategy == "shard_grad_op"
    assert json.loads(Path("fsdp.json").read_text())["enable_cpu_affinity"] is True


def test_full_disk_leaves_the_file_unchanged(config, monkeypatch, tmp_path):
    config("--yes", "-o", "fsdp.yaml", "--gpus", "2")
    before = Path("fsdp.yaml").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    _, err = config("--yes", "-o", "fsdp.yaml", "--gpus", "4", "--force", code=1)
    assert "FSDP-E764" in err and "No space left on device" in err
    assert Path("fsdp.yaml").read_bytes() == before and os.listdir(tmp_path) == ["fsdp.yaml"]


def test_model_that_cannot_be_predicted_is_configured(config, llama, monkeypatch):
    def fail(state: Any, gpu_memory: int) -> None:
        raise (
            SpecError([Problem(code="FSDP-E811", message="no batch")]) if state.gpus == 2 else RuntimeError("odd\ncode")
        )

    monkeypatch.setattr("hf_fsdp_plugin.tools.config.conversation.advice_of", fail)
    for gpus, reason in (("2", "no batch"), ("4", "RuntimeError: odd")):
        _, err = config("--yes", "-o", f"{gpus}.yaml", "--model", "llama", "--gpus", gpus, "--gpu-memory", "80GB")
        assert f"No prediction: {reason}\n" in err and spec_of(f"{gpus}.yaml").launch.num_processes == int(gpus)


@pytest.mark.parametrize(
    "recommended, offload, asked", [(False, False, False), (True, False, True), (True, True, False)]
)
def test_offload_of_the_state_is_asked_if_recommended(recommended: bool, offload: bool, asked: bool) -> None:
    state = State(answers={"offload": offload}, recommended={"offload.optimizer": recommended})
    assert BY_NAME["offload_optimizer"].asked(state) is asked
