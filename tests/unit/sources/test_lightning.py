"""Strategies of Lightning in files of LightningCLI and of Hydra, and files of a DistributedConfig."""

import pytest
import yaml

from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.sources.tree import ConfigFile
from hf_fsdp_plugin.tools.convert.dialects import reader


@pytest.fixture
def assess(assess_converted):
    return assess_converted


@pytest.fixture
def read_file(tmp_path):
    def run(content, name="config.yaml"):
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        (tmp_path / name).write_text(text)
        return reader.read(Sources(config=ConfigFile.at(tmp_path / name), environ={}))

    return run


def strategy(_class="FSDPStrategy", _trainer=None, **arguments):
    """Return a config of LightningCLI with a strategy."""
    return {"trainer": {"strategy": {"class_path": _class, "init_args": arguments}, **(_trainer or {})}}


def made(_class, **arguments):
    """Return an object of LightningCLI."""
    return {"class_path": _class, "init_args": arguments}


def values(read):
    return {setting.name: setting.value for setting in read.settings}


def found(read):
    return [problem.code for problem in read.problems if problem.code not in ("FSDP-N067", "FSDP-W068")]


STRATEGY = strategy(
    "lightning.pytorch.strategies.FSDPStrategy",
    {"devices": 4, "num_nodes": 2, "gradient_clip_val": 0.5, "max_epochs": 2},
    auto_wrap_policy=["Block", "nn.LlamaDecoderLayer"],
    activation_checkpointing_policy=["Block"],
    sharding_strategy="SHARD_GRAD_OP",
    cpu_offload=made("CPUOffload", offload_params=True),
    mixed_precision=made("MixedPrecision", param_dtype="torch.bfloat16", reduce_dtype="torch.float32"),
    state_dict_type="sharded",
    limit_all_gathers=True,
    timeout=10,
)


def test_fsdp_strategy_is_read(assess, read_file, tmp_path):
    read = read_file(STRATEGY)
    assert found(read) == [] and read.arguments == {"max_grad_norm": 0.5}
    spec = assess(tmp_path / "config.yaml").spec
    assert (spec.enabled, spec.fsdp.version, spec.sharding.strategy) == (True, 1, "shard_grad_op")
    assert (spec.wrap.policy, spec.wrap.classes) == ("transformer", ("Block", "LlamaDecoderLayer"))
    assert (spec.offload.params, spec.checkpoint.state_dict, spec.activation.checkpointing) == (True, "sharded", "full")
    assert (spec.precision.param, spec.precision.reduce) == ("bf16", "fp32")
    assert (spec.launch.num_processes, spec.launch.num_machines, spec.params.use_orig) == (8, 2, True)


def test_strategy_without_policy_has_one_unit(assess, read_file, tmp_path):
    config = {"trainer": {"strategy": "fsdp_cpu_offload", "devices": 2, "precision": "bf16-mixed"}}
    assert found(read_file(config)) == []
    spec = assess(tmp_path / "config.yaml").spec
    assert (spec.wrap.policy, spec.offload.params, spec.checkpoint.state_dict) == ("none", True, "full")
    assert (spec.precision.param, spec.precision.reduce, spec.launch.num_processes) == ("bf16", "bf16", 2)


POLICY = "size_based_auto_wrap_policy"


@pytest.mark.parametrize(
    ("name", "value", "codes", "expected"),
    [
        ("auto_wrap_policy", made(POLICY, min_num_params=1000), [], ("wrap.min_num_params", 1000)),
        ("auto_wrap_policy", made("functools.partial", **{"0": POLICY}), [], ("wrap.min_num_params", 100_000_000)),
        ("auto_wrap_policy", made("ModuleWrapPolicy", module_classes=["Block"]), [], ("wrap.classes", ["Block"])),
        ("auto_wrap_policy", "my_policy", ["FSDP-E062"], None),
        ("device_mesh", [2, 4], [], ("mesh.shard", 4)),
        ("device_mesh", "mesh", ["FSDP-E062"], None),
        ("ignored_modules", ["head"], ["FSDP-E062"], None),
        ("cpu_offload", None, [], None),
        ("backward_prefetch", "BACKWARD_POST", [], ("prefetch.backward", "BACKWARD_POST")),
        ("unknown_argument", 1, [], ("wrap.policy", "none")),
    ],
)
def test_argument_of_strategy_is_mapped_or_refused(read_file, name, value, codes, expected):
    read = read_file(strategy(**{name: value}))
    assert found(read) == codes
    assert expected is None or values(read)[expected[0]] == expected[1]


def test_number_that_is_not_written_is_reported(read_file):
    assert found(read_file(strategy(_trainer={"devices": "auto"}))) == ["FSDP-W078"]


def test_model_parallel_strategy_is_fsdp2(assess, read_file, tmp_path):
    kind = "ModelParallelStrategy"
    assert found(read_file(strategy(kind, {"devices": 8, "num_nodes": 2}))) == []
    spec = assess(tmp_path / "config.yaml").spec
    assert (spec.fsdp.version, spec.mesh.tensor, spec.mesh.shard, spec.checkpoint.state_dict) == (2, 8, 2, "sharded")
    read = read_file(strategy(kind, data_parallel_size=4, tensor_parallel_size=2))
    assert (values(read)["mesh.shard"], values(read)["mesh.tensor"]) == (4, 2)
    assert found(read_file(strategy(kind, data_parallel_size=4))) == ["FSDP-E076"]


@pytest.mark.parametrize("text", ["Trainer(strategy=FSDPStrategy())\n", "print(1)\n", "def ("])
def test_script_in_python_is_one_error(read_file, text):
    (problem,) = read_file(text, "train.py").problems
    assert problem.code == "FSDP-E075" and "Python" in problem.message and "config file" in problem.fix


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
    read = read_file(YAML)
    assert found(read) == []
    fates = {outcome.origin.spelling: outcome.fate for outcome in read.outcomes}
    assert fates["seed_everything"] == fates["trainer.max_epochs"] == "irrelevant"
    spec = assess(tmp_path / "config.yaml").spec
    assert (spec.wrap.classes, spec.precision.param, spec.fsdp.version) == (("DebertaLayer",), "fp16", 1)


def test_file_of_hydra_is_read(read_file):
    read = read_file(HYDRA)
    assert found(read) == []
    assert (values(read)["mesh.shard"], values(read)["mesh.tensor"], values(read)["fsdp.version"]) == (4, 2, "2")


def test_other_strategy_of_lightning_is_error(read_file):
    assert found(read_file("trainer: {strategy: ddp}\n")) == ["FSDP-E101"]


def test_distributed_config_is_read(assess, read_file, tmp_path):
    text = '{"fsdp_size": 4, "tp_size": 2, "tp_plan": null, "fsdp_cpu_offload": true}'
    read = read_file(text, "distributed.json")
    assert found(read) == [] and read.dialect_of.name == "distributed_config"
    assert {"fsdp_size", "tp_size", "fsdp_cpu_offload"} <= {outcome.origin.spelling for outcome in read.outcomes}
    assert all(setting.origin.line is not None for setting in read.settings if setting.name == "mesh.shard")
    spec = assess(tmp_path / "distributed.json").spec
    assert (spec.enabled, spec.mesh.shard, spec.mesh.tensor, spec.offload.params) == (True, 4, 2, True)


def test_distributed_config_with_unknown_field_is_error(read_file):
    assert found(read_file({"tp_plan": None, "fsdp_size": 4, "fsdp_sise": 2})) == ["FSDP-E020"]
    assert found(read_file({"tp_plan": None, "tp_size": 2})) == ["FSDP-N081"]
