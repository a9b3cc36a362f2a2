"""Flags: ``--set``, ``--fsdp`` and the flags of ``accelerate launch``."""

import pytest

from hf_fsdp_plugin.sources.command_line import LAUNCHER_FLAGS, SWITCHES, flags_before_script

LAUNCH = [
    "--config_file", "c.yaml", "--num_processes=4", "--use_fsdp", "--fsdp_sharding_strategy", "2",
    "--mixed_precision", "bf16", "--same_network", "-m", "pkg.train", "--fsdp", "full_shard", "--num_processes", "9",
]  # fmt: skip


def test_launcher_flags_end_at_script():
    assert flags_before_script(LAUNCH) == tuple(LAUNCH[: LAUNCH.index("-m") + 1])


def test_accelerate_flags_are_settings(assess):
    spec = assess(command_line=flags_before_script(LAUNCH)).spec
    assert (spec.sharding.strategy, spec.launch.num_processes, spec.precision.param) == ("shard_grad_op", 4, "bf16")
    assert (spec.fsdp.version, spec.launch.same_network) == (1, True)
    assert str(spec.origin("sharding.strategy")) == "command line --fsdp_sharding_strategy=2"


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--cpu"], "launch.use_cpu", True),
        (["--gpu_ids", "0,1"], "launch.gpu_ids", "0,1"),
        (["--machine_rank", "1", "--num_machines", "2"], "launch.machine_rank", 1),
        (["--main_process_ip", "10.0.0.1"], "launch.main_process_ip", "10.0.0.1"),
        (["--main_process_port=0"], "launch.main_process_port", 0),
        (["--rdzv_backend", "c10d"], "launch.rdzv_backend", "c10d"),
        (["--parallelism_config_dp_shard_size", "2"], "mesh.shard", 2),
        (["--dynamo_backend", "inductor"], "launch.dynamo_config", {"dynamo_backend": "inductor"}),
        (["--fsdp-offload-params", "true"], "offload.params", True),
        (["--fsdp", "shard_grad_op auto_wrap"], "sharding.strategy", "shard_grad_op"),
        (["--fsdp=full shard"], "sharding.strategy", "full_shard"),
        (["--fsdp", "--fsdp-config", '{"offload_params": true}'], "offload.params", True),
        (["--bf16"], "precision.param", "bf16"),
        (["--bf16", "true"], "precision.param", "bf16"),
    ],
)
def test_flag_sets_setting(assess, flags, name, value):
    assert assess(command_line=flags).spec.get(name) == value


@pytest.mark.parametrize(
    ("words", "name", "shown"),
    [
        (["--cpu"], "launch.use_cpu", "--cpu"),
        (["--use-cpu"], "launch.use_cpu", "--use-cpu"),
        (["--use_cpu", "true"], "launch.use_cpu", "--use_cpu=true"),
        (["--same-network"], "launch.same_network", "--same-network"),
        (["--DEBUG"], "launch.debug", "--DEBUG"),
        (["--bf16"], "precision.param", "--bf16"),
        (["--fsdp-offload-params", "true"], "offload.params", "--fsdp-offload-params=true"),
        (["--FSDP_VERSION=2"], "fsdp.version", "--FSDP_VERSION=2"),
        (["--use-fsdp"], "launch.distributed_type", "--use-fsdp"),
        (["--fsdp"], "launch.distributed_type", "--fsdp"),
        (["--fsdp", "no_shard"], "sharding.strategy", "--fsdp=no_shard"),
    ],
)
def test_origin_is_the_flag_as_written(assess, words, name, shown):
    origin = assess(command_line=words).spec.origin(name)
    assert str(origin) == f"command line {shown}"
    key, equals, text = shown.partition("=")
    found = origin.to_json()
    assert (found["file"], found["key"], found["text"]) == (None, key, text if equals else None)


def test_invalid_fsdp_config_names_the_flag_as_written(assess):
    (problem,) = assess(command_line=["--fsdp", "--fsdp-config", ""]).problems
    assert (problem.code, problem.origin.spelling) == ("FSDP-E050", "--fsdp-config")


def test_fsdp_flag_has_training_arguments_dialect(assess):
    assert assess(command_line=["--fsdp", "full_shard"]).spec.fsdp.version == 2
    assert assess(command_line=["--fsdp", "full_shard", "--fsdp_version", "1"]).spec.fsdp.version == 1


def test_unknown_flags_are_ignored(assess):
    assessment = assess(command_line=["train.py", "--output_dir", "x", "--lr", "1e-4", "--fsdp", "full_shard"])
    assert assessment.ok
    assert assessment.spec.sharding.strategy == "full_shard"


def test_misspelled_fsdp_flag_is_error_with_suggestion(problems):
    (problem,) = problems(command_line=["--fsdp_ofload_params", "true"])
    assert (problem.code, problem.origin.spelling) == ("FSDP-E020", "--fsdp_ofload_params")
    assert "--fsdp_offload_params" in problem.fix


@pytest.mark.parametrize(
    "name", ["sharding.strategy", "fsdp_sharding_strategy", "SHARDING_STRATEGY", "Sharding.Strategy"]
)
def test_set_accepts_canonical_names_and_keys(assess, name):
    for overrides in ([f"{name}=shard_grad_op"], {name: 2}):
        assert assess(overrides=overrides).spec.sharding.strategy == "shard_grad_op"
    assert assess(command_line=["--set", f"{name}=2"]).spec.origin("sharding.strategy").source == "--set"


@pytest.mark.parametrize(
    ("override", "code", "suggestion"),
    [
        ("sharding.strategi=2", "FSDP-E020", "sharding.strategy"),
        ("fsdp_offload_param=1", "FSDP-E020", "fsdp_offload_params"),
        ("offload", "FSDP-E031", "NAME"),
        ("=1", "FSDP-E031", "NAME"),
        ("offload.params=maybe", "FSDP-E101", "true or false"),
    ],
)
def test_invalid_set_is_error(problems, override, code, suggestion):
    problem = problems(overrides=[override])[0]
    assert problem.code == code
    assert suggestion in str(problem)


@pytest.mark.parametrize("flag", sorted(SWITCHES - LAUNCHER_FLAGS))
def test_switch_with_a_value_is_an_error(problems, flag):
    for value in ("false", "true", ""):
        (problem,) = problems(command_line=[f"--{flag}={value}"])
        assert (problem.code, problem.origin.spelling) == ("FSDP-E054", f"--{flag}")
        assert f"--{flag} alone" in problem.fix


@pytest.mark.parametrize(
    "flags",
    [
        ["--fsdp", "full_shard", "--fsdp", "no_shard"],
        ["--fsdp", "--fsdp", "false"],
        ["--fsdp", "full_shard", "--fsdp_config", "{}", "--fsdp_config", "a.yaml"],
        ["--num_processes", "2", "--num_processes=4"],
        ["--mixed_precision", "bf16", "--mixed_precision", "no"],
        ["--use_cpu", "false", "--cpu"],
        ["--set", "offload.params=true", "--set", "offload.params=false"],
    ],
)
def test_flag_with_two_values_is_an_error(codes, flags):
    assert "FSDP-E102" in codes(command_line=flags)


@pytest.mark.parametrize("flags", [["--fsdp", "full_shard"], ["--num_processes", "2"], ["--cpu"], ["--fsdp"]])
def test_repeated_flag_with_the_same_value_is_accepted(assess, flags):
    assert assess(command_line=["--use_fsdp", *flags, *flags]).ok


@pytest.mark.parametrize("flag", ["--fsdp_offload_params", "--fsdp_version", "--num_processes", "--fsdp_config"])
def test_flag_without_its_value_is_an_error(codes, flag):
    for flags in ([flag], [flag, "--cpu"], [f"{flag}="]):
        assert "FSDP-E050" in codes(command_line=["--fsdp", *flags])


@pytest.mark.parametrize(("flags", "kind"), [(["--fsdp"], "FSDP"), (["--fsdp="], "NO"), (["--fsdp", ""], "NO")])
def test_empty_fsdp_flag_is_off(assess, flags, kind):
    assert assess(command_line=flags).spec.launch.distributed_type == kind
