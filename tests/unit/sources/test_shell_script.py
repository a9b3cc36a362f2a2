"""Shell scripts: words, variables and commands, launchers and their flags, and files that commands name."""

import json

import pytest

from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.sources.tree import ConfigFile
from hf_fsdp_plugin.tools.convert.dialects import reader
from hf_fsdp_plugin.tools.convert.dialects.shell_commands import parse_commands


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("a 'b c' \"d\" e\\ f # g", [["a", "b c", "d", "e f"]]),
        ("a \\\n  b\nc; d && e || f | g &", [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g"]]),
        ('X=1\nexport Y="$X 2"\na $X ${Y} "${Y}" \'$X\'', [["a", "1", "1", "2", "1 2", "$X"]]),
        ("a ${X:-8} $1 $(nproc) `date`", [["a", "8", "$1", "$(nproc)", "`date`"]]),
        ("ARGS=(--x 'y z')\nARGS+=(--w)\na \"${ARGS[@]}\" b", [["a", "--x", "y z", "--w", "b"]]),
        ("X=$(a | b)\nc --n $X", [["c", "--n", "$(a | b)"]]),
        ("a > out.txt 2>&1 < in\nb | tee log", [["a"], ["b"], ["tee", "log"]]),
        ("cat <<EOF > f\nx 'y\nEOF\na", [["cat"], ["a"]]),
        ("if [ 1 ]; then a; fi", [["[", "1", "]"], ["a"], ["fi"]]),
        ("X=1 Y=2 a", [["a"]]),
        ("a '{\n \"k\": 1}'", [["a", '{\n "k": 1}']]),
        ("a 'b", [["a", "b"]]),
    ],
)
def test_script_is_split_into_commands(script, expected):
    assert [[word.text for word in command.words] for command in parse_commands(script)] == expected


def test_lines_and_variables_of_a_command_are_known():
    first, second = parse_commands("X=1\na \\\n b\n\nY=2 c d")
    assert [word.line for word in first.words] == [2, 3]
    assert second.words[0].line == 5 and second.variables == {"X": "1", "Y": "2"}


@pytest.fixture
def assess(assess_converted):
    return assess_converted


@pytest.fixture
def script(tmp_path):
    def run(text, name="train.sh", start=None):
        (tmp_path / name).write_text(text)
        path = str(tmp_path / name) + (f":{start}" if start else "")
        return reader.read(Sources(config=ConfigFile.at(path), environ={}))

    return run


def values(read):
    return {setting.name: setting.value for setting in read.settings if not setting.implied}


def found(read):
    return [problem.code for problem in read.problems if problem.code not in ("FSDP-N067", "FSDP-N071")]


TORCHRUN = """#!/bin/bash
GPUS=4
torchrun --nnodes 2 --nproc_per_node=$GPUS --standalone train.py \\
    --model_name_or_path m \\
    --bf16 True \\
    --fsdp "full_shard auto_wrap offload" \\
    --fsdp_transformer_layer_cls_to_wrap 'LlamaDecoderLayer' \\
    --per_device_train_batch_size 2
"""


def test_torchrun_with_fsdp_flags_is_read(assess, script, tmp_path):
    read = script(TORCHRUN)
    assert found(read) == [] and read.dialect_of.name == "shell_script"
    assert {setting.origin.line for setting in read.settings if setting.name == "offload.params"} == {6}
    spec = assess(tmp_path / "train.sh").spec
    assert (spec.enabled, spec.offload.params, spec.precision.param, spec.launch.num_processes) == (
        True,
        True,
        "bf16",
        8,
    )
    assert spec.wrap.classes == ("LlamaDecoderLayer",)
    assert {outcome.origin.spelling for outcome in read.outcomes} == {
        "--nnodes", "--nproc_per_node", "--standalone", "--model_name_or_path", "--bf16", "--fsdp",
        "--fsdp_transformer_layer_cls_to_wrap", "--per_device_train_batch_size",
    }  # fmt: skip


def test_value_of_unknown_variable_is_reported(script):
    assert found(script(TORCHRUN.replace("GPUS=4\n", ""))) == ["FSDP-W078"]
    assert found(script(TORCHRUN.replace("--bf16 True", "--bf16 $1"))) == ["FSDP-E076"]
    assert found(script(TORCHRUN.replace("--model_name_or_path m", "--model_name_or_path $1"))) == []


def test_flags_of_accelerate_launch_override_its_file(assess, script, tmp_path):
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 1}\n")
    (tmp_path / "scripts").mkdir()
    read = script("accelerate launch --config_file fsdp.yaml --num_processes 2 a.py --lr 1\n", "scripts/train.sh")
    assert found(read) == [] and values(read)["launch.num_processes"] == "2"
    spec = assess(tmp_path / "scripts" / "train.sh").spec
    assert (spec.enabled, spec.fsdp.version, spec.launch.num_processes) == (True, 1, 2)


def test_fsdp_flags_of_accelerate_launch_are_read(assess, script, tmp_path):
    flags = "--use_fsdp --fsdp_sharding_strategy=2 --fsdp_offload_params=true --mixed_precision bf16"
    assert found(script(f"nohup accelerate launch {flags} train.py > log 2>&1 &\n")) == []
    spec = assess(tmp_path / "train.sh").spec
    assert (spec.sharding.strategy, spec.offload.params, spec.fsdp.version) == ("shard_grad_op", True, 1)
    assert found(script("accelerate launch --fsdp_offload_param true train.py\n")) == ["FSDP-E020"]


def test_deepspeed_flags_of_accelerate_launch_are_converted(assess, script, tmp_path):
    text = "accelerate launch --use_deepspeed --zero_stage 3 --offload_param_device cpu --num_processes 4 train.py\n"
    read = script(text)
    assert not [code for code in found(read) if "E" in code]
    spec = assess(tmp_path / "train.sh").spec
    assert (spec.sharding.strategy, spec.offload.params, spec.launch.num_processes) == ("full_shard", True, 4)
    assert "FSDP-E073" in found(script(text.replace("--use_deepspeed", "--use_deepspeed --use_fsdp")))


@pytest.mark.parametrize(
    "command",
    [
        "deepspeed --num_gpus 4 train.py --deepspeed zero3.json --bf16 true",
        "torchrun --nproc_per_node 4 train.py --deepspeed --deepspeed_config zero3.json --bf16 true",
        "NPROC_PER_NODE=4 swift sft --model m --tuner_type full --deepspeed zero3.json --bf16 true",
        "NPROC_PER_NODE=4 llamafactory-cli train --deepspeed zero3.json --bf16 true",
        "srun --nodes=1 bash -c 'torchrun --nproc_per_node 4 train.py --deepspeed zero3.json --bf16 true'",
        "python -m torch.distributed.run --nproc_per_node 4 -m pkg.train --deepspeed zero3.json --bf16 true",
    ],
)
def test_deepspeed_file_of_a_command_is_converted(assess, script, tmp_path, command):
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}
    (tmp_path / "zero3.json").write_text(json.dumps(config))
    assert found(script(f"{command}\n")) == []
    spec = assess(tmp_path / "train.sh").spec
    assert (spec.sharding.strategy, spec.precision.param) == ("full_shard", "bf16")
    assert spec.launch.num_processes == 4
    (tmp_path / "zero3.json").unlink()
    assert found(script(f"{command}\n")) == ["FSDP-E001"]


def test_presets_on_command_lines_are_known(assess, script, tmp_path):
    assert found(script("trl sft --accelerate_config fsdp2 --model_name_or_path m\n")) == []
    spec = assess(tmp_path / "train.sh").spec
    assert (spec.fsdp.version, spec.launch.num_processes, spec.checkpoint.state_dict) == (2, 8, "full")
    assert found(script("swift sft --model m --fsdp fsdp2\n")) == []
    spec = assess(tmp_path / "train.sh").spec
    assert (spec.fsdp.version, spec.activation.checkpointing, spec.checkpoint.state_dict) == (2, "full", "sharded")


def test_config_of_the_trainer_in_a_command_is_read(assess, script, tmp_path):
    (tmp_path / "sft.yaml").write_text("model_name_or_path: m\nfsdp: full_shard\n")
    (tmp_path / "other.yaml").write_text("hidden_size: 8\n")
    for command in ("trl sft --config sft.yaml", "torchrun train.py sft.yaml other.yaml"):
        assert found(script(f"{command}\n")) == []
        assert assess(tmp_path / "train.sh").spec.enabled


def test_several_commands_need_a_line(script):
    text = "accelerate launch --use_fsdp a.py\n\naccelerate launch --use_fsdp --fsdp_offload_params true \\\n  b.py\n"
    read = script(text)
    assert (
        found(read) == ["FSDP-E074"] and "line 1" in read.problems[0].message and "train.sh:3" in read.problems[0].fix
    )
    assert "offload.params" not in values(script(text, start=1))
    assert values(script(text, start=4))["offload.params"] == "true"
    assert found(script(text, start=2)) == ["FSDP-E074"]


def test_script_without_training_is_error(script):
    assert found(script("pip install deepspeed\npython eval.py --config x.yaml\necho deepspeed train.py\n")) == [
        "FSDP-E075"
    ]


def test_command_on_stdin_is_read(tmp_path):
    file = ConfigFile(path=tmp_path / "stdin", shown="stdin", data=b'torchrun train.py --fsdp "full_shard auto_wrap"')
    assert values(reader.read(Sources(config=file, environ={})))["sharding.strategy"] == "full_shard"


def test_config_names_a_line_of_a_script(tmp_path):
    file = ConfigFile.at(tmp_path / "train.sh:3")
    assert (file.path, file.start, file.shown) == (tmp_path / "train.sh", 3, str(tmp_path / "train.sh"))
    (tmp_path / "fsdp.yaml:3").write_text("")
    assert ConfigFile.at(tmp_path / "fsdp.yaml:3").start is None


def test_hostile_script_is_read_in_time(script):
    assert found(script("torchrun a.py\n" + "# text\n" * 20_000)) == ["FSDP-E004"]
    growing = "A=xxxxxxxxxx\n" + "A=$A$A\n" * 60 + "B=(a b)\n" + 'B=("${B[@]}" "${B[@]}")\n' * 40
    (command,) = parse_commands(f"{growing}torchrun a.py $A")
    assert len(command.words[-1].text) <= 10_000
    assert list(parse_commands("$(" * 5_000 + "<<x\n" * 500)) is not None
