"""Settings in Python scripts and in files of LightningCLI: strategies of Lightning, and DistributedConfig."""

import pytest

from hf_fsdp_plugin.sources.dialects import reader
from hf_fsdp_plugin.sources.interface import ConfigFile, Sources


@pytest.fixture
def read_file(tmp_path):
    def run(text, name="train.py", start=None):
        (tmp_path / name).write_text(text)
        path = str(tmp_path / name) + (f":{start}" if start else "")
        return reader.read(Sources(config=ConfigFile.at(path), environ={}))

    return run


def values(read):
    return {setting.name: setting.value for setting in read.settings}


def found(read):
    return [problem.code for problem in read.problems if problem.code not in ("FSDP-N067", "FSDP-W068")]


SCRIPT = """
import torch
policy = {Block, nn.LlamaDecoderLayer}
strategy = FSDPStrategy(
    auto_wrap_policy=policy,
    activation_checkpointing_policy=policy,
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    cpu_offload=CPUOffload(offload_params=True),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    state_dict_type="sharded",
    limit_all_gathers=True,
    timeout=timedelta(hours=1),
)
trainer = Trainer(devices=4, num_nodes=2, strategy=strategy, gradient_clip_val=0.5, max_epochs=2)
"""


def test_fsdp_strategy_of_a_script_is_read(assess, read_file, tmp_path):
    read = read_file(SCRIPT)
    assert found(read) == [] and read.arguments == {"max_grad_norm": 0.5}
    spec = assess(tmp_path / "train.py").spec
    assert (spec.enabled, spec.fsdp.version, spec.sharding.strategy) == (True, 1, "shard_grad_op")
    assert (spec.wrap.policy, spec.wrap.classes) == ("transformer", ("Block", "LlamaDecoderLayer"))
    assert (spec.offload.params, spec.checkpoint.state_dict, spec.activation.checkpointing) == (True, "sharded", "full")
    assert (spec.precision.param, spec.precision.reduce) == ("bf16", "fp32")
    assert (spec.launch.num_processes, spec.launch.num_machines, spec.params.use_orig) == (8, 2, True)


def test_strategy_without_policy_has_one_unit(assess, read_file, tmp_path):
    assert found(read_file('Fabric(strategy="fsdp_cpu_offload", devices=2, precision="bf16-mixed")\n')) == []
    spec = assess(tmp_path / "train.py").spec
    assert (spec.wrap.policy, spec.offload.params, spec.checkpoint.state_dict) == ("none", True, "full")
    assert (spec.precision.param, spec.precision.reduce, spec.launch.num_processes) == ("bf16", "bf16", 2)


@pytest.mark.parametrize(
    ("argument", "codes", "expected"),
    [
        ("auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=1e6)", [], ("wrap.min_num_params", 1e6)),
        ("auto_wrap_policy=size_based_auto_wrap_policy", [], ("wrap.min_num_params", 100_000_000)),
        ("auto_wrap_policy=ModuleWrapPolicy({Block})", [], ("wrap.classes", ["Block"])),
        (
            "auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})", [],
            ("wrap.classes", ["Block"]),
        ),
        ("auto_wrap_policy=my_policy", ["FSDP-E062"], None),
        ("auto_wrap_policy=make_policy(model)", ["FSDP-E062"], None),
        ("device_mesh=(2, 4)", [], ("mesh.shard", 4)),
        ("device_mesh=mesh", ["FSDP-E062"], None),
        ("ignored_modules=[model.head]", ["FSDP-E062"], None),
        ("cpu_offload=None", [], ("offload.params", False)),
        ("backward_prefetch=BackwardPrefetch.BACKWARD_POST", [], ("prefetch.backward", "BACKWARD_POST")),
        ("unknown_argument=1", [], ("wrap.policy", "none")),
    ],
)  # fmt: skip
def test_argument_of_strategy_is_mapped_or_refused(read_file, argument, codes, expected):
    read = read_file(f"Trainer(strategy=FSDPStrategy({argument}))\n")
    assert found(read) == codes
    assert expected is None or values(read)[expected[0]] == expected[1]


def test_value_that_is_not_written_is_reported(read_file, codes, tmp_path):
    read = read_file("Trainer(strategy=FSDPStrategy(), devices=count(), precision=args.precision)\n")
    assert found(read) == ["FSDP-W078", "FSDP-W078"]
    read_file("Trainer(strategy=FSDPStrategy(sharding_strategy=args.strategy))\n")
    assert codes(tmp_path / "train.py") == ["FSDP-E101"]


def test_model_parallel_strategy_is_fsdp2(assess, read_file, tmp_path):
    assert found(read_file("s = ModelParallelStrategy()\nTrainer(strategy=s, devices=8, num_nodes=2)\n")) == []
    spec = assess(tmp_path / "train.py").spec
    assert (spec.fsdp.version, spec.mesh.tensor, spec.mesh.shard, spec.checkpoint.state_dict) == (2, 8, 2, "sharded")
    read = read_file("ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=2)\n")
    assert (values(read)["mesh.shard"], values(read)["mesh.tensor"]) == (4, 2)
    assert found(read_file("ModelParallelStrategy(data_parallel_size=4)\n")) == ["FSDP-E076"]


def test_several_strategies_need_a_line(read_file):
    text = "a = FSDPStrategy()\nb = FSDPStrategy(\n    cpu_offload=True)\n"
    assert found(read_file(text)) == ["FSDP-E074"]
    assert values(read_file(text, start=3))["offload.params"] is True


@pytest.mark.parametrize("text", ["print(1)\n", "def (", "x = 'FSDPStrategy('\n"])
def test_python_script_without_strategy_is_error(read_file, text):
    assert found(read_file(text)) == ["FSDP-E075"]


YAML = """
seed_everything: 1
trainer:
  devices: 2
  precision: 16-mixed
  max_epochs: 3
  strategy:
    class_path: lightning.pytorch.strategies.FSDPStrategy
    init_args:
      cpu_offload: false
      auto_wrap_policy:
        class_path: torch.distributed.fsdp.wrap.ModuleWrapPolicy
        init_args:
          module_classes: !!set
            ? models.deberta.DebertaLayer
model: {class_path: my.Model}
"""
HYDRA = """
trainer:
  devices: 2
  strategy: {_target_: lightning.pytorch.strategies.ModelParallelStrategy, data_parallel_size: 4}
"""


def test_file_of_lightning_cli_is_read(assess, read_file, tmp_path):
    read = read_file(YAML, "config.yaml")
    assert found(read) == []
    fates = {outcome.origin.spelling: outcome.fate for outcome in read.outcomes}
    assert fates["seed_everything"] == fates["trainer.max_epochs"] == "irrelevant"
    spec = assess(tmp_path / "config.yaml").spec
    assert (spec.wrap.classes, spec.precision.param, spec.fsdp.version) == (("DebertaLayer",), "fp16", 1)


def test_file_of_hydra_is_read(read_file):
    read = read_file(HYDRA, "config.yaml")
    assert found(read) == []
    assert (values(read)["mesh.shard"], values(read)["mesh.tensor"], values(read)["fsdp.version"]) == (4, 2, "2")


def test_other_strategy_of_lightning_is_error(read_file):
    assert found(read_file("trainer: {strategy: ddp}\n", "config.yaml")) == ["FSDP-E101"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"fsdp_size": 4, "tp_size": 2, "tp_plan": null, "fsdp_cpu_offload": true}', "distributed.json"),
        ("config = DistributedConfig(fsdp_size=4, tp_size=2, fsdp_cpu_offload=True)\n", "train.py"),
    ],
)
def test_distributed_config_is_read(assess, read_file, tmp_path, text, name):
    read = read_file(text, name)
    assert found(read) == [] and read.dialect_of.name == "distributed_config"
    assert {"fsdp_size", "tp_size", "fsdp_cpu_offload"} <= {outcome.origin.spelling for outcome in read.outcomes}
    assert all(setting.origin.line is not None for setting in read.settings if setting.name == "mesh.shard")
    spec = assess(tmp_path / name).spec
    assert (spec.enabled, spec.mesh.shard, spec.mesh.tensor, spec.offload.params) == (True, 4, 2, True)


def test_distributed_config_with_unknown_field_is_error(read_file):
    assert found(read_file("DistributedConfig(fsdp_size=4, fsdp_sise=2)\n")) == ["FSDP-E020"]
    assert found(read_file("DistributedConfig(tp_size=2)\n")) == ["FSDP-N081"]
