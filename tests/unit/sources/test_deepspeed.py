"""Configs of DeepSpeed, and Accelerate's files for it: what becomes of their keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources, config_of
from hf_fsdp_plugin.spec import load
from hf_fsdp_plugin.spec.value_parsers import parse_settings
from hf_fsdp_plugin.tools.convert import conversion
from hf_fsdp_plugin.tools.convert.conversion import with_converted_config
from hf_fsdp_plugin.tools.convert.dialects import accelerate, deepspeed
from hf_fsdp_plugin.tools.convert.dialects.interface import DialectReading
from hf_fsdp_plugin.vocabulary import canonical_setting

ZERO_3 = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "activation_checkpointing": {"partition_activations": False},
    "steps_per_print": 10,
}
TRAINER = {
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 100, "total_num_steps": "auto"},
    },
}
"""Arguments of the Trainer in a config of DeepSpeed."""


@pytest.fixture
def assess(assess_converted):
    return assess_converted


def zero(stage: int = 3, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def reading(config: Any, *, arguments: dict[str, Any] | None = None, flags: tuple[str, ...] = ()) -> DialectReading:
    """Read a config as ``hf-fsdp convert`` does."""
    given = {"training_arguments": arguments or {}, "command_line": flags}
    read = conversion.read(Sources(config=config_of(config), environ={}, **given), converts=True)
    assert isinstance(read, DialectReading)
    return read


def converted(config: Any, **given: Any) -> load.Assessment:
    arguments, flags = given.get("arguments") or {}, given.get("flags", ())
    sources = Sources(config=config_of(config), training_arguments=arguments, command_line=flags, environ={})
    return load.assess(with_converted_config(sources))


def fates(read: DialectReading) -> dict[str, str]:
    return {outcome.origin.spelling: outcome.fate for outcome in read.outcomes}


def codes(read: DialectReading) -> list[str]:
    return [problem.code for problem in read.problems if problem.severity == "error"]


def test_file_of_zero_3_is_read_with_its_lines(assess, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO_3, indent=1))
    assessment = assess(path)
    spec = assessment.spec
    assert assessment.ok and spec.enabled
    assert (spec.fsdp.version, spec.sharding.strategy, spec.wrap.policy) == (2, "full_shard", "transformer")
    assert (spec.precision.param, spec.launch.mixed_precision, spec.precision.reduce) == ("bf16", "bf16", "fp32")
    assert (spec.offload.optimizer, spec.offload.params, spec.checkpoint.state_dict) == (True, False, "full")
    assert spec.activation.checkpointing == "none"
    origin = spec.origin("sharding.strategy")
    assert (origin.source_line, origin.written) == (f"{path}:11", "zero_optimization.stage=3")


def test_every_key_of_a_file_has_an_outcome():
    read = reading(ZERO_3 | TRAINER, arguments={"learning_rate": "1e-4", "bf16": True})
    written = {key for key, _ in _leaves(ZERO_3 | TRAINER)}
    named = fates(read)
    sections = {key for key in named if not any(key.startswith(f"{other}.") for other in named)}
    assert not [key for key in written if not any(key == name or key.startswith(f"{name}.") for name in sections)]
    assert named["zero_optimization.stage"] == "sets" and named["optimizer.params.lr"] == "arguments"
    assert named["activation_checkpointing"] == named["zero_optimization.overlap_comm"] == "irrelevant"
    assert all(outcome.why or outcome.becomes for outcome in read.outcomes)


def _leaves(tree: dict[str, Any], section: str = ""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{section}{key}.")
        else:
            yield f"{section}{key}", value


@pytest.mark.parametrize(
    ("stage", "strategy"), [(0, "no_shard"), (1, "shard_grad_op"), (2, "shard_grad_op"), (3, "full_shard")]
)
def test_stage_is_a_strategy(assess, stage, strategy):
    assert assess(zero(stage)).spec.sharding.strategy == strategy
    config = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}}
    assert assess(config).spec.sharding.strategy == strategy


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, {"sharding.strategy": "no_shard"}),
        ({"zero_optimization": {}}, {"sharding.strategy": "no_shard"}),
        ({"zero_optimization": {"reduce_bucket_size": 1}}, {"sharding.strategy": "no_shard"}),
        ({"zero_optimization": True, "train_batch_size": 8}, {"sharding.strategy": "shard_grad_op"}),
        (zero(mics_shard_size=4), {"sharding.strategy": "hybrid_shard", "mesh.shard": 4}),
        (zero(mics_shard_size=-1, zero_hpz_partition_size=1), {"sharding.strategy": "full_shard"}),
        (zero(zero_hpz_partition_size=8), {"sharding.strategy": "hybrid_shard", "mesh.shard": 8}),
        (zero(offload_param={"device": "nvme", "nvme_path": "/nvme"}), {"offload.params": True}),
        (zero(2, cpu_offload=True), {"offload.params": False, "offload.optimizer": True}),
        (zero(2, cpu_offload=True, cpu_offload_param=True), {"offload.params": True, "offload.optimizer": False}),
        (zero(offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}),
         {"offload.params": True, "offload.optimizer": False}),
        (zero(offload_param={"device": "cpu", "pin_memory": False}), {"offload.pin_memory": False}),
        (zero(offload_param={"device": "none", "pin_memory": False}), {"offload.params": False}),
        (zero(stage3_gather_fp16_weights_on_model_save=True), {"checkpoint.state_dict": "full"}),
        (zero(gather_16bit_weights_on_model_save=False), {"checkpoint.state_dict": "sharded"}),
        ({**zero(), "fp16": {"enabled": True}}, {"precision.param": "fp16", "launch.mixed_precision": "fp16"}),
        ({**zero(), "bfloat16": {"enabled": True}}, {"precision.param": "bf16"}),
        ({**zero(), "torch_autocast": {"enabled": True, "dtype": "float16"}}, {"precision.param": "fp16"}),
        ({**zero(), "communication_data_type": "bf16"}, {"precision.reduce": "bf16"}),
        ({**zero(), "tensor_parallel": {"autotp_size": 2}}, {"mesh.tensor": 2}),
        ({**zero(), "expert_parallel": {"enabled": True, "autoep_size": 2}}, {"mesh.expert": 2}),
        ({**zero(), "expert_parallel": {"enabled": False, "autoep_size": 2}}, {"mesh.expert": 1}),
    ],
)  # fmt: skip
def test_key_sets_settings(assess, config, settings):
    assessment = assess(config)
    assert assessment.ok, assessment.problems
    assert {name: assessment.spec.get(name) for name in settings} == settings


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({"gradient_clipping": 1.0}, {"max_grad_norm": 1.0}),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 4}),
        ({"optimizer": {"type": "Adam", "params": {"lr": "3e-5"}}}, {"optim": "adamw_torch", "learning_rate": 3e-5}),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.95]}}},
         {"optim": "sgd", "adam_beta1": 0.9, "adam_beta2": 0.95}),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 500, "warmup_num_steps": 10}}},
         {"lr_scheduler_type": "cosine", "max_steps": 500, "warmup_steps": 10}),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2},
         {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}),
        ({"checkpoint": {"use_node_local_storage": True}}, {"save_on_each_node": True}),
    ],
)  # fmt: skip
def test_key_is_an_argument_of_the_trainer(config, arguments):
    read = reading({**zero(), **config}, flags=("--num_processes", "4"))
    assert (codes(read), read.arguments) == ([], {"max_grad_norm": 0.0} | arguments)


def test_auto_is_filled_from_the_arguments():
    config = {**ZERO_3, **TRAINER, "bf16": {"enabled": "auto"}}
    given = {"bf16": "true", "learning_rate": "1e-4", "adam_beta1": 0.8, "per_device_train_batch_size": "2"}
    read = reading(config, arguments=given)
    assert codes(read) == []
    assert converted(config, arguments=given).spec.precision.param == "bf16"
    expected = {"learning_rate": 1e-4, "adam_beta1": 0.8, "per_device_train_batch_size": 2, "adam_epsilon": 1e-6}
    assert expected.items() <= read.arguments.items()
    assert "gradient_accumulation_steps" not in read.arguments and "adam_beta2" not in read.arguments


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_flag_without_value_fills_auto(assess, dtype):
    config = {**zero(), dtype: {"enabled": "auto"}}
    assert assess(config, script_arguments=(f"--{dtype}",)).spec.precision.param == dtype
    assert assess(config, script_arguments=("--seed", "1")).spec.precision.param == "auto"


def test_auto_without_arguments_is_one_error():
    read = reading({**ZERO_3, **TRAINER})
    (problem,) = [problem for problem in read.problems if problem.code == "FSDP-E063"]
    for key in ("fp16.enabled", "optimizer.params.betas", "train_micro_batch_size_per_gpu", "gradient_clipping"):
        assert key in problem.message
    for flag in ("--fp16", "--learning_rate", "--adam_beta2", "--max_grad_norm"):
        assert flag in problem.fix
    assert problem.fix.count("--learning_rate") == 1 and "reduce_bucket_size" not in problem.message


def test_run_leaves_auto_and_arguments_to_the_script(problems):
    config = {**ZERO_3, **TRAINER, "gradient_clipping": 1.0}
    assert problems(config) == []
    (note,) = [problem for problem in problems(config, severity="note") if problem.code == "FSDP-N069"]
    assert "train_micro_batch_size_per_gpu" in note.message
    (warning,) = problems(config, severity="warning")
    assert warning.code == "FSDP-W068" and "--max_grad_norm 1.0" in warning.fix


def test_arguments_of_the_script_fill_and_are_compared(assess, problems):
    config = {**ZERO_3, **TRAINER, "gradient_clipping": 1.0, "bf16": {"enabled": "auto"}}
    words = ("--bf16", "--max_grad_norm", "1.0", "--optim", "adamw_torch", "--adam_epsilon=1e-6")
    assert assess(config, script_arguments=words).spec.precision.param == "bf16"
    (warning,) = problems(config, severity="warning", script_arguments=words)
    assert warning.code == "FSDP-W068" and "--max_grad_norm" not in warning.fix and "--weight_decay 0.1" in warning.fix
    notes = problems(config, severity="note", script_arguments=words)
    assert "FSDP-N069" not in [note.code for note in notes]
    assert [p.code for p in problems(config, script_arguments=("--max_grad_norm", "0.5"))] == ["FSDP-E066"]


REFUSED = {
    "zero_optimization.zero_quantized_gradients": zero(zero_quantized_gradients=True),
    "zero_optimization.zenflow": zero(zenflow={"topk_ratio": 0.1}),
    "bf16.bf16_master_weights_and_grads": {**zero(), "bf16": {"bf16_master_weights_and_grads": True}},
    "fp16.loss_scale": {**zero(), "fp16": {"loss_scale": 128}},
    "gradient_allreduce_op": {**zero(), "gradient_allreduce_op": "sum"},
    "managed_gradient_accumulation": {**zero(), "managed_gradient_accumulation": False},
    "optimizer.type": {**zero(), "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400}}},
    "optimizer.params.freeze_step": {**zero(), "optimizer": {"type": "Adam", "params": {"freeze_step": 400}}},
    "scheduler.type": {**zero(), "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}},
    "sequence_parallel_size": {**zero(), "sequence_parallel_size": 2},
    "elasticity": {**zero(), "elasticity": {"enabled": True}},
    "autotuning": {**zero(), "autotuning": {"enabled": True}},
    "compression_training": {
        **zero(), "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}
    },
    "data_efficiency": {**zero(), "data_efficiency": {"enabled": True}},
    "sparse_attention": {**zero(), "sparse_attention": {"mode": "fixed"}},
    "deepspeed_config.enable_msamp": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"enable_msamp": True}},
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_key_without_counterpart_is_refused(key):
    (problem,) = [problem for problem in reading(REFUSED[key]).problems if problem.severity == "error"]
    assert (problem.code, problem.origin.spelling) == ("FSDP-E062", key) and problem.fix


def test_feature_that_is_turned_off_is_accepted():
    off = {
        "elasticity": {"enabled": False}, "amp": {"enabled": "false"}, "sequence_parallel_size": 1,
        "gradient_allreduce_op": "mean", "managed_gradient_accumulation": True, "eigenvalue": None,
        "compression_training": {"weight_quantization": {"enabled": False}}, "_comment": "of the user",
        "optimizer": {"type": "AdamW", "params": {"bias_correction": True, "amsgrad": False}},
    }  # fmt: skip
    read = reading({**zero(zero_quantized_weights=False), **off})
    assert codes(read) == []
    assert {fates(read)[key] for key in off if key != "optimizer"} == {"irrelevant"}


def test_key_without_value_is_not_set(problems):
    config = {**zero(offload_param=None, offload_optimizer={}), "gradient_clipping": None, "optimizer": None}
    assert problems(config) == []
    read = reading(config)
    assert (
        read.arguments == {"max_grad_norm": 0.0}
        and set(fates(read).values()) == {"sets", "irrelevant"}
        and len(read.outcomes) == 5
    )


def test_unknown_key_has_its_line_and_a_suggestion(problems, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n "zero_optimization": {\n  "stge": 3\n },\n "nonsense": 1\n}')
    first, second = problems(path)
    assert (first.code, first.origin.line, first.suggestion) == ("FSDP-E061", 3, "stage")
    assert (second.code, second.origin.line, second.suggestion) == ("FSDP-E061", 5, "")


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (zero(2, mics_shard_size=4), "FSDP-E066"),
        (zero(mics_shard_size=4, zero_hpz_partition_size=8), "FSDP-E066"),
        ({**zero(), "train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "FSDP-E066"),
        ({**zero(), "gradient_clipping": 1, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 2}}},
         "FSDP-E066"),
        (zero(4), "FSDP-E101"),
        (zero(offload_param={"device": "disk"}), "FSDP-E101"),
        ({**zero(), "optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "FSDP-E101"),
        ({**zero(), "communication_data_type": "fp8"}, "FSDP-E101"),
    ],
)  # fmt: skip
def test_invalid_or_contradictory_keys_are_one_error(problems, config, code):
    assert [problem.code for problem in problems(config)] == [code]


def test_two_precisions_conflict(codes):
    assert "FSDP-E102" in codes({**zero(), "fp16": {"enabled": True}, "bf16": {"enabled": True}})


def test_argument_conflicts_with_the_file():
    read = reading({**zero(), "gradient_clipping": 1.0}, arguments={"max_grad_norm": "0.5"})
    (problem,) = [problem for problem in read.problems if problem.severity == "error"]
    assert problem.code == "FSDP-E066" and "0.5" in problem.message
    assert codes(reading({**zero(), "gradient_clipping": 1.0}, arguments={"max_grad_norm": "1"})) == []


def test_differences_are_told(problems):
    def found(config: Any) -> set[str]:
        return {p.code for kind in ("warning", "note") for p in problems(config, severity=kind)} - {"FSDP-N067"}

    clipping = {"gradient_clipping": "auto"}
    assert found({**zero(3), **clipping}) == found({**zero(2), **clipping}) == {"FSDP-N069"}
    assert found({**zero(1), **clipping}) == {"FSDP-N069", "FSDP-N071"}
    assert found({**zero(3, zero_hpz_partition_size=8), **clipping}) == {"FSDP-N069", "FSDP-W070"}
    assert found({**zero(3, offload_param={"device": "nvme"}), **clipping}) == {"FSDP-N069", "FSDP-W070"}
    assert found({**zero(3, offload_optimizer={"device": "cpu"}), **clipping}) == {"FSDP-N069"}


def test_missing_clipping_is_told_and_converted(problems):
    (note,) = [problem for problem in problems(zero(), severity="note") if problem.code == "FSDP-N071"]
    assert "max_grad_norm is 0" in note.message and problems(zero(), severity="warning") == []
    assert reading(zero()).arguments == {"max_grad_norm": 0.0}
    assert "max_grad_norm" not in reading(zero(), arguments={"max_grad_norm": 2}).arguments
    assert "max_grad_norm" not in reading(ACCELERATE | {"deepspeed_config": {"zero_stage": 3}}).arguments


def test_weight_decay_of_all_parameters_is_told(problems):
    def notes(decay: Any) -> int:
        config = {**zero(), "optimizer": {"type": "AdamW", "params": {"weight_decay": decay}}}
        return sum("biases" in problem.message for problem in problems(config, severity="note"))

    assert (notes(0.1), notes("auto"), notes(0)) == (1, 1, 0)


ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {
        "zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": True, "offload_optimizer_device": "cpu",
        "offload_param_device": "none", "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
        "deepspeed_multinode_launcher": "standard",
    },
    "mixed_precision": "bf16", "num_processes": 8, "use_cpu": False, "tpu_env": [], "fsdp_config": {},
}  # fmt: skip


def test_section_of_accelerate_is_read(assess):
    assessment = assess(ACCELERATE)
    spec = assessment.spec
    assert assessment.ok and spec.enabled and (spec.fsdp.version, spec.launch.num_processes) == (2, 8)
    assert (spec.sharding.strategy, spec.checkpoint.state_dict, spec.precision.param) == ("full_shard", "full", "bf16")
    assert spec.offload.optimizer and not spec.offload.params and spec.loading.ram_efficient
    read = reading(ACCELERATE)
    assert read.arguments == {"gradient_accumulation_steps": 4, "max_grad_norm": 1.0}
    assert len(read.outcomes) == len(ACCELERATE) - 1 + len(ACCELERATE["deepspeed_config"])


def test_file_that_a_section_names_is_read(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({**ZERO_3, **TRAINER, "bf16": {"enabled": "auto"}}))
    path = tmp_path / "accelerate.yaml"
    section = {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}
    path.write_text(json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": section,
                                "mixed_precision": "bf16"}))  # fmt: skip
    assessment = converted(path)
    assert assessment.ok and assessment.spec.precision.param == "bf16" and assessment.spec.loading.ram_efficient
    assert assessment.spec.origin("sharding.strategy").source == str(tmp_path / "ds.json")
    read = reading(path)
    (problem,) = [problem for problem in read.problems if problem.code == "FSDP-E063"]
    assert "bf16.enabled" not in problem.message and problem.origin.source == str(tmp_path / "ds.json")
    assert "zero_optimization.stage" in fates(read)


@pytest.mark.parametrize(
    ("section", "code"),
    [
        ({"deepspeed_config_file": "none.json"}, "FSDP-E001"),
        ({"deepspeed_config_file": "ds.json", "zero_stage": 3}, "FSDP-E066"),
        ({"deepspeed_config_file": "broken.json"}, "FSDP-E006"),
    ],
)
def test_invalid_file_of_a_section_is_one_error(problems, tmp_path, section, code):
    (tmp_path / "ds.json").write_text(json.dumps(zero()))
    (tmp_path / "broken.json").write_text("{")
    path = tmp_path / "accelerate.yaml"
    path.write_text(json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": section}))
    assert [problem.code for problem in problems(path)] == [code]


def test_sections_of_two_engines_contradict(problems):
    config = {**ACCELERATE, "fsdp_config": {"fsdp_version": 2}}
    assert [problem.code for problem in problems(config)] == ["FSDP-E066"]


def test_ddp_is_converted_but_run_without_fsdp(assess):
    config = {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 2}
    assert not assess(config).spec.enabled
    read = reading(config)
    values = {setting.name: setting.value for setting in read.settings}
    assert (values["launch.distributed_type"], values["sharding.strategy"]) == ("FSDP", "full_shard")
    assert "FSDP-N071" in [problem.code for problem in read.problems]


def test_config_of_fsdp_is_not_one_of_deepspeed(codes):
    assert codes({"distributed_type": "FSDP", "deepspeed_config": {}, "fsdp_config": {"fsdp_version": 2}}) == []


def test_training_file_with_a_batch_size_is_not_deepspeed():
    file = {"output_dir": "out", "learning_rate": 1e-5, "train_batch_size": 8, "fsdp": "full_shard"}
    read = conversion.read(Sources(config=file, environ={}))
    assert read.dialect_of.name == "training_script"


@pytest.mark.parametrize("dialect", conversion.DIALECTS, ids=lambda dialect: dialect.name)
def test_table_names_settings_and_reasons(dialect):
    table = dialect.table
    for row in table.rows.values():
        if row.fate == "sets":
            assert all(canonical_setting(name) == name for name in row.to), row
        elif row.fate == "arguments":
            assert row.to, row
        else:
            assert row.why and (row.fix or row.fate == "irrelevant"), row
    assert set(table.aliases.values()) <= {*table.rows, *(path.partition(".")[0] for path in table.rows)}
    assert set(dialect.handlers) <= {*table.rows, *(" ".join(row.to) for row in table.rows.values()), "sets"}
    assert "```" in table.about


def test_arguments_of_tables_are_those_of_the_trainer():
    import dataclasses

    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    for dialect in (deepspeed.DIALECT, accelerate.DIALECT):
        for row in dialect.table.rows.values():
            if row.fate == "arguments":
                assert set(row.to) | set(row.auto) <= known, row


ZERO_KEYS = """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint sub_group_size cpu_offload_param
cpu_offload_use_pin_memory cpu_offload stage3_prefetch_bucket_size stage3_param_persistence_threshold
stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params
stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1
round_robin_gradients zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather memory_efficient_linear
pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
save_muon_momentum_buffer_in_memory leaf_module zenflow
"""
TOP_KEYS = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
steps_per_print dump_state disable_allgather communication_data_type seq_parallel_communication_data_type
prescale_gradients gradient_predivide_factor gradient_allreduce_op sparse_gradients gradient_clipping amp
graph_harvesting zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown
use_data_before_expert_parallelism dataloader_drop_last log_level
"""
"""Keys of the models with which DeepSpeed 0.19.6 reads its file."""


def test_published_keys_of_deepspeed_are_known():
    table = deepspeed.DIALECT.table
    paths = [*(f"zero_optimization.{key}" for key in ZERO_KEYS.split()), *TOP_KEYS.split()]
    assert [path for path in paths if table.row(table.known(path)) is None] == []


def test_values_of_settings_are_parsed(tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(zero(mics_shard_size=8)))
    read = conversion.read(Sources(config=ConfigFile.at(path), environ={}))
    assert read is not None
    typed = {setting.name: setting.value for setting in parse_settings(read).settings}
    assert typed["mesh.shard"] == 8 and typed["fsdp.version"] == 2
