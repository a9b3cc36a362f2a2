"""``hf-fsdp config`` on a file that exists: what is not asked is kept, with order and comments."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hf_fsdp_plugin import SpecError, load_spec
from hf_fsdp_plugin.tools.config.text import SettingLine, change_keys, in_block_style, keys_of
from hf_fsdp_plugin.tools.config.verb import Target, _check

STOCK = """\
# my cluster
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 4
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'  # a TPU setting
dynamo_config:
  dynamo_backend: INDUCTOR

enable_cpu_affinity: true
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 1234
main_training_function: main
mixed_precision: fp16
num_machines: 2
num_processes: 8
rdzv_backend: c10d
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
# the end
"""
FSDP1 = """\
distributed_type: FSDP
num_processes: 4
fsdp_config:
  # kept: a line of its own
  fsdp_version: 1
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP   # of the old model
  fsdp_min_num_params: 1000000
  fsdp_sharding_strategy: 2
  FSDP_BACKWARD_PREFETCH: backward_post
  fsdp_use_orig_params: false
  fsdp_ignored_modules: .*lora.*
mixed_precision: bf16
"""
TRAINING_FILE = "base_model: llama\noutput_dir: x\n"


@pytest.fixture
def config(hf_fsdp, tmp_path, monkeypatch):
    """Write a file, run the verb on it with --yes --force, and return the new content."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *argv: str, code: int = 0) -> str:
        path = Path("fsdp.yaml")
        path.write_bytes(text.encode())
        found, _, err = hf_fsdp("config", "-o", "fsdp.yaml", "--yes", "--force", *argv)
        assert found == code, err
        return path.read_bytes().decode()

    return run


def test_file_of_accelerate_config_keeps_its_other_keys(config):
    text = config(STOCK)
    lines = text.splitlines()
    kept = STOCK.splitlines()
    for key in ("deepspeed_config:", "  gradient_accumulation_steps: 4", "  zero_stage: 3"):
        kept.remove(key)
    kept.remove("distributed_type: DEEPSPEED")
    assert [line for line in lines if line in kept] == kept
    assert "# Not used with distributed_type: FSDP:\n# deepspeed_config:\n#   gradient_accumulation_steps: 4\n" in text
    spec = load_spec("fsdp.yaml", environ={})
    assert (spec.launch.num_processes, spec.launch.main_process_ip, spec.launch.mixed_precision) == (
        8,
        "10.0.0.1",
        "fp16",
    )
    assert (spec.launch.rdzv_backend, spec.launch.enable_cpu_affinity, spec.fsdp.version) == ("c10d", True, 2)
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file("fsdp.yaml").fsdp_config["fsdp_version"] == 2


def test_existing_values_are_the_defaults(config):
    assert config(FSDP1) == FSDP1.replace(
        "mixed_precision: bf16\n",
        "mixed_precision: bf16\nnum_machines: 1  # one machine needs no address and no port\n",
    ).replace(
        "  fsdp_ignored_modules: .*lora.*\n",
        "  fsdp_ignored_modules: .*lora.*\n"
        "  fsdp_offload_params: false  # faster; the optimizer would run on the CPU\n"
        "  fsdp_activation_checkpointing: false  # no recomputation; choose full if memory is short\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT  # every rank writes its part; resumes on any number of GPUs\n"
        "  fsdp_cpu_ram_efficient_loading: true  # a machine holds the weights once, not once per GPU\n",
    )


def test_second_run_changes_nothing(config):
    once = config(FSDP1)
    assert config(once) == once
    assert config(config(STOCK)) == config(STOCK)


def test_changed_answers_change_only_their_lines(config):
    before = config(FSDP1)
    text = config(before, "--strategy", "full_shard", "--wrap-policy", "transformer", "--wrap-classes", "ABlock")
    assert "  fsdp_sharding_strategy: FULL_SHARD  # " in text and "min_num_params" not in text
    assert "  # kept: a line of its own\n" in text and "fsdp_transformer_layer_cls_to_wrap: ABlock" in text
    changed = {"fsdp_auto_wrap_policy", "fsdp_min_num_params", "fsdp_sharding_strategy"}
    assert [line for line in before.splitlines() if not changed & {line.split(":")[0].strip()}] == [
        line
        for line in text.splitlines()
        if not (changed | {"fsdp_transformer_layer_cls_to_wrap"}) & {line.split(":")[0].strip()}
    ]


def test_version_2_removes_keys_of_version_1(config):
    tree = yaml.safe_load(config(FSDP1, "--fsdp-version", "2"))
    assert tree["fsdp_config"] == {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000000,
        "fsdp_sharding_strategy": 2, "FSDP_BACKWARD_PREFETCH": "backward_post", "fsdp_ignored_modules": ".*lora.*",
        "fsdp_offload_params": False, "fsdp_activation_checkpointing": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "{distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}}\n",
        '{"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": true}}',
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}  # both\nnum_processes: 2",
        "fsdp_config:\r\n  fsdp_version: 2\r\n  fsdp_offload_params: true\r\ndistributed_type: FSDP\r\n",
        "distributed_type: FSDP\nnum_machines: 1\nfsdp_config:\nparallelism_config: {}\n",
        "distributed_type: NO\nfsdp_config: {}\nuse_cpu: false\n",
        "---\ndistributed_type: 'FSDP'\nfsdp_config:\n    fsdp_version: 2\n    fsdp_transformer_layer_cls_to_wrap:\n"
        "    - A\n    - B\n    # after\n    fsdp_offload_params: true\n...\n",
        "distributed_type: MULTI_GPU\nnum_processes: 2\nfp16: true\n",
        "\ufeffdistributed_type: FSDP\nnum_processes: 2\nfsdp_config: {}",
    ],
)
def test_every_form_of_file_can_be_changed(config, text):
    for argv in (["--offload", "no"], ["--offload", "yes", "--precision", "bf16", "--wrap-classes", "C"]):
        after = config(text, *argv, "--gpus", "4", "--strategy", "shard_grad_op")
        spec = load_spec("fsdp.yaml", environ={})
        assert spec.enabled and spec.sharding.strategy == "shard_grad_op" and spec.launch.num_processes == 4
        assert spec.offload.params == ("yes" in argv)
        assert ("\r\n" in after) == ("\r\n" in text) and after.count("fsdp_config") == 1
        assert [str(problem) for problem in spec.problems if problem.severity != "note"] == []


def test_errors_of_the_file_stop_the_write(config, hf_fsdp):
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_param: true\n"
    assert config(text, code=1) == text
    for broken, problem in (("a: [", "FSDP-E006"), ("- 1\n", "FSDP-E009"), (TRAINING_FILE, "FSDP-E766")):
        Path("fsdp.yaml").write_text(broken)
        found, _, err = hf_fsdp("config", "-o", "fsdp.yaml", "--gpus", "2")
        assert found == 1 and problem in err
        assert Path("fsdp.yaml").read_text() == broken
    assert config(TRAINING_FILE, "--gpus", "2", code=1) == TRAINING_FILE
    config("a: [", "--gpus", "2")
    assert load_spec("fsdp.yaml", environ={}).launch.num_processes == 2


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[3] / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_config_keeps_its_settings(config, path):
    before = load_spec(path, environ={})
    once = config(path.read_text())
    after = load_spec("fsdp.yaml", environ={})
    assert {name: after.get(name) for name in before.origins} == {name: before.get(name) for name in before.origins}
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert [line for line in once.splitlines() if line.startswith("#")] == comments
    assert config(once) == once


def test_text_that_means_other_settings_is_refused(tmp_path):
    entry = SettingLine(name="offload.params", section="fsdp_config", key="fsdp_offload_params", value=True, means=True)
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: false}\n"
    target = Target(path=tmp_path / "fsdp.yaml", shown="fsdp.yaml", new=text)
    with pytest.raises(SpecError) as error:
        _check(target, [entry])
    assert [problem.code for problem in error.value.problems] == ["FSDP-E765"]


def test_removing_the_last_key_removes_its_section():
    text = in_block_style("a: 1\nb:\n  c: 2  # x\n# y\nd: {e: 1, f: 2}\n", ["d"])
    assert text == "a: 1\nb:\n  c: 2  # x\n# y\nd:\n  e: 1\n  f: 2\n"
    removed = {key: [] for key in keys_of(text) if key.name in ("c", "e")}
    assert change_keys(text, removed, {}) == "a: 1\n# y\nd:\n  f: 2\n"


def test_new_keys_are_added_to_their_sections():
    added = {"": ["z: 1"], "a": ["y: 2"], "b": ["x: 3"], "c": ["w: 4"]}
    expected = "a:\n    v: 0\n    y: 2\nb:\n  x: 3\nz: 1\nc:\n  w: 4\n# end\n"
    assert change_keys("a:\n    v: 0\nb:\n# end\n", {}, added) == expected
