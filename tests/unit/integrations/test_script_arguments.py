"""The table of the arguments of a script is complete, and every row of it is true."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    TorchDynamoPlugin,
)
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig
from transformers import TrainingArguments

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.accelerate import fp8 as recipes
from hf_fsdp_plugin.integrations.accelerate.accelerator import replace_scaler
from hf_fsdp_plugin.integrations.accelerate.prepare import _unit_compiler
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import MessagePrinter, printer
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.spec import rules
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.supported import installed_versions, release_of
from hf_fsdp_plugin.torch_private.functions import timeout_of
from scripts.script_arguments import ROWS, DocumentedRow

GLOO = Path(__file__).parents[2] / "gloo"


def subclasses(kind: type) -> list[type]:
    return [each for child in kind.__subclasses__() for each in (child, *subclasses(child))]


HANDLERS = {kind.__name__: kind for kind in subclasses(KwargsHandler) if kind.__module__.startswith("accelerate.")}
CLASSES: dict[str, type] = {
    **HANDLERS,
    **{
        kind.__name__: kind
        for kind in (ParallelismConfig, FullyShardedDataParallelPlugin, DataLoaderConfiguration, TrainingArguments)
    },
}


LEFT_TO_THE_TRAINER = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
optim_target_modules gradient_accumulation_steps average_tokens_across_devices label_smoothing_factor
bf16_full_eval fp16_full_eval tf32 use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha
torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps logging_first_step
log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm
report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps
eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics save_strategy save_steps
ignore_data_skip save_on_each_node enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id
hub_strategy hub_always_push hub_revision metric_for_best_model greater_is_better
restore_callback_states_from_checkpoint full_determinism seed data_seed accelerator_config
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns
label_names train_sampling_strategy length_column_name debug skip_memory_metrics do_train do_eval do_predict
local_rank
"""
"""The arguments of ``TrainingArguments`` that have no meaning for FSDP."""


def names_of(owner: str) -> set[str]:
    """Return the arguments of a class of the installed version."""
    if owner == "Accelerator":
        return set(inspect.signature(Accelerator.__init__).parameters) - {"self"}
    return {field.name for field in dataclasses.fields(CLASSES[owner])}


SINCE = {
    ("TrainingArguments", "activation_checkpointing"): ("transformers", "5.23"),
    ("TrainingArguments", "activation_checkpointing_kwargs"): ("transformers", "5.23"),
}
"""Class and argument -> the library and its version that has added it. Older supported versions do not have it."""


def is_in_installed(owner: str, name: str) -> bool:
    if (owner, name) not in SINCE:
        return True
    library, version = SINCE[owner, name]
    return release_of(installed_versions()[library]) >= release_of(version)


@pytest.mark.parametrize("owner", ["Accelerator", *CLASSES])
def test_every_argument_has_one_row(owner: str) -> None:
    listed = [name for row in ROWS if row.owner == owner for name in row.names]
    listed += LEFT_TO_THE_TRAINER.split() if owner == "TrainingArguments" else []
    assert len(listed) == len(set(listed))
    existing = {name for name in listed if is_in_installed(owner, name)}
    assert sorted(names_of(owner) - existing) == [], (
        "new arguments without a row in scripts/script_arguments.py, or in the list above"
    )
    assert sorted(existing - names_of(owner)) == [], "rows of arguments that do not exist"


def test_rows_are_of_known_classes() -> None:
    assert {row.owner for row in ROWS} == {"Accelerator", *CLASSES}
    assert all(row.code and (row.fix or row.elsewhere) for row in ROWS if row.verdict == "refused")


@pytest.fixture
def rank(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank of a launcher, with the hooks installed and FSDP enabled."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    for name in ("FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_USE_FSDP"):  # Accelerate sets them
        monkeypatch.setenv(name, "false")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    hfp.uninstall()
    hfp.install({"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {"fsdp_version": 2}})
    yield
    hfp.uninstall()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def made(kind: type, name: str, value: Any) -> Any:
    """An object with one argument that is not its default. The constructor may need a library that is missing."""
    handler: Any = kind.__new__(kind)
    for field in dataclasses.fields(kind):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        setattr(handler, field.name, default)
    setattr(handler, name, value)
    return handler


def other_value(kind: type, name: str) -> Any:
    """A value that differs from the default."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    if isinstance(field.default, DDPCommunicationHookType):
        return DDPCommunicationHookType.BF16
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, int):
        return field.default + 1
    return {"a": 1} if field.default is dataclasses.MISSING else True


def pairs(verdict: str, condition: Callable[[DocumentedRow], bool]) -> list[Any]:
    return [
        pytest.param(row, name, id=f"{row.owner}-{name}")
        for row in ROWS
        if row.verdict == verdict and condition(row)
        for name in sorted(row.names)
        if is_in_installed(row.owner, name)
    ]


def raised(function: Callable[[], Any]) -> list[str]:
    """Return the codes of the errors that a call raises."""
    try:
        function()
    except SpecError as error:
        return [problem.code for problem in error.problems if problem.severity == "error"]
    return []


SPECIAL: dict[str, Any] = {
    "init_method": "tcp://127.0.0.1:1", "sp_size": 2, "param_init_fn": nn.init.zeros_,
    "state_dict_config": FullStateDictConfig(rank0_only=False), "optim_state_dict_config": FullStateDictConfig(),
    "deepspeed": {"zero_optimization": {"stage": 2}},
}  # fmt: skip


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(("row", "name"), pairs("refused", lambda row: row.owner in HANDLERS))
def test_handler_is_refused(row: DocumentedRow, name: str) -> None:
    kind = HANDLERS[row.owner]
    value = SPECIAL.get(name) or other_value(kind, name)
    assert raised(lambda: Accelerator(kwargs_handlers=[made(kind, name, value)])) == [row.code]


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(("row", "name"), pairs("refused", lambda row: row.owner not in HANDLERS))
def test_argument_is_refused(row: DocumentedRow, name: str, tmp_path: Path) -> None:
    value = SPECIAL.get(name, SimpleNamespace(tp_size=2))
    calls: dict[str, Callable[[], Any]] = {
        "Accelerator": lambda: Accelerator(**{name: value}),
        "ParallelismConfig": lambda: Accelerator(parallelism_config=ParallelismConfig(**{name: value})),
        "FullyShardedDataParallelPlugin": lambda: Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **{name: value})
        ),
        "TrainingArguments": lambda: arguments_of(tmp_path, **{name: value}),
    }
    assert raised(calls[row.owner]) == [row.code]


def arguments_of(folder: Path, **given: Any) -> Any:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", fsdp=True, **given)


@pytest.fixture
def printed(rank: None) -> Iterator[Callable[[], list[str]]]:
    """The codes of the problems that are printed in the test."""
    messages: list[Any] = []
    process.end(MessagePrinter)
    printer().listener = messages.append
    yield lambda: [message.code for message in messages if hasattr(message, "code")]
    process.end(MessagePrinter)


@pytest.mark.parametrize(("row", "name"), pairs("note", lambda row: not row.elsewhere))
def test_argument_without_meaning_is_noted(
    row: DocumentedRow, name: str, tmp_path: Path, printed: Callable[[], list[str]]
) -> None:
    if row.owner == "TrainingArguments":
        arguments_of(tmp_path, **{name: 1})
    else:
        kind = HANDLERS[row.owner]
        Accelerator(kwargs_handlers=[made(kind, name, other_value(kind, name))])
    assert "FSDP-N613" in printed()


@pytest.mark.parametrize(("row", "name"), pairs("note", lambda row: row.elsewhere))
def test_note_of_a_source_is_a_problem_of_the_spec(row: DocumentedRow, name: str) -> None:
    value = SPECIAL.get(name, SimpleNamespace())
    source = "plugin_object" if row.owner == "FullyShardedDataParallelPlugin" else "parallelism_config"
    spec = hfp.load_spec({"distributed_type": "FSDP"}, **{source: {name: value}}, environ={})
    assert row.code in [problem.code for problem in spec.problems]


def test_assigned_state_dict_options_are_noted(printed: Callable[[], list[str]]) -> None:
    plugin = Accelerator().state.fsdp_plugin
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert printed() == []
    plugin.state_dict_config = FullStateDictConfig(rank0_only=False)
    assert printed() == ["FSDP-N136"]


@pytest.mark.parametrize(
    "handler",
    [
        DistributedDataParallelKwargs(),
        DistributedDataParallelKwargs(comm_hook="no"),  # type: ignore[arg-type]
        InitProcessGroupKwargs(init_method="env://"),
    ],
    ids=str,
)
def test_defaults_of_handlers_are_accepted(handler: Any, printed: Callable[[], list[str]]) -> None:
    Accelerator(kwargs_handlers=[handler])
    assert printed() == []


@pytest.mark.usefixtures("rank")
def test_fp8_without_its_library_has_one_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_is_installed", lambda backend: False)
    assert raised(lambda: Accelerator(mixed_precision="fp8")) == ["FSDP-E166"]
    on = {"distributed_type": "FSDP"}
    assert raised(lambda: hfp.load_spec(on, environ={"ACCELERATE_MIXED_PRECISION": "fp8"})) == ["FSDP-E166"]
    assert raised(lambda: hfp.load_spec(on, training_arguments={"fp8": True}, environ={})) == ["FSDP-E166"]
    assert raised(lambda: hfp.load_spec({**on, "mixed_precision": "fp8"}, environ={})) == ["FSDP-E166"]
    monkeypatch.setattr(rules, "_is_installed", lambda backend: True)
    assert raised(lambda: hfp.load_spec({**on, "mixed_precision": "fp8"}, environ={})) == []


@pytest.mark.parametrize(
    "variables",
    [{"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "MSAMP"}, {"PARALLELISM_CONFIG_PP_SIZE": "2"}],
    ids=str,
)
def test_variables_of_runs_without_fsdp_are_left_alone(
    uninstalled: None, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hfp.install() is None
    assert raised(lambda: session().load(training_arguments={"fsdp": True})) != []


def test_mesh_without_fsdp_is_left_to_accelerate(assess: Callable[..., Any]) -> None:
    found = assess(parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2))
    assert found.ok and not found.spec.enabled
    assert [problem for problem in found.problems if problem.severity != "note"] == []


def test_mesh_overrides_a_given_spec(rank: None) -> None:
    config = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {"dp_shard_size": 2, "dp_replicate_size": 2}}
    spec = hfp.load_spec(config, environ={})
    same, other = (ParallelismConfig(dp_shard_size=2, dp_replicate_size=size) for size in (2, 4))
    for given in (same, other):
        made = hfp.accelerator(spec, parallelism_config=given)
        assert made.state.fsdp_plugin.spec.mesh.replicate == given.dp_replicate_size


# ---- applied ----
MESH = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
# Argument of the plugin -> its value, the setting, and the value of the setting.
OF_PLUGIN: dict[str, tuple[Any, str, Any]] = {
    "fsdp_version": (2, "fsdp.version", 2),
    "sharding_strategy": ("NO_SHARD", "sharding.strategy", "no_shard"),
    "reshard_after_forward": (False, "sharding.strategy", "shard_grad_op"),
    "backward_prefetch": ("BACKWARD_POST", "prefetch.backward", "post"),
    "mixed_precision_policy": ("bf16", "precision.param", "bf16"),
    "auto_wrap_policy": ("transformer_based_wrap", "wrap.policy", "transformer"),
    "cpu_offload": (True, "offload.params", True),
    "ignored_modules": (".*head", "wrap.ignored_modules", ".*head"),
    "state_dict_type": ("FULL_STATE_DICT", "checkpoint.state_dict", "full"),
    "limit_all_gathers": (False, "prefetch.limit_all_gathers", False),
    "use_orig_params": (False, "params.use_orig", False),
    "sync_module_states": (True, "loading.sync_module_states", True),
    "forward_prefetch": (True, "prefetch.forward", True),
    "activation_checkpointing": (True, "activation.checkpointing", "full"),
    "activation_checkpointing_offload": (True, "activation.offload", True),
    "cpu_ram_efficient_loading": (True, "loading.ram_efficient", True),
    "transformer_cls_names_to_wrap": (["Layer"], "wrap.classes", ("Layer",)),
    "min_num_params": (9, "wrap.min_num_params", 9),
}


def plugin_argument_is_applied(name: str) -> None:
    value, setting, expected = OF_PLUGIN[name]
    more = {"activation_checkpointing": True} if name == "activation_checkpointing_offload" else {}
    spec = hfp.load_spec(plugin_object={name: value, **more}, environ={})
    assert spec.get(setting) == expected and spec.asked(setting)


def mesh_is_applied(name: str) -> None:
    spec = hfp.load_spec({"distributed_type": "FSDP"}, parallelism_config=MESH, environ={})
    setting = {"dp_replicate_size": "mesh.replicate", "dp_shard_size": "mesh.shard"}[name]
    assert spec.get(setting) == getattr(MESH, name)
    assert spec.origin(setting).source == "ParallelismConfig"


def scaler_argument_is_applied(name: str) -> None:
    value: Any = False if name == "enabled" else 2.0 if name != "growth_interval" else 7
    if name == "backoff_factor":
        value = 0.25
    accelerator = SimpleNamespace(
        scaler=object(), scaler_handler=GradScalerKwargs(**{name: value}), device=torch.device("cpu")
    )
    replace_scaler(accelerator)
    scaler: Any = accelerator.scaler
    if name == "enabled":
        assert not scaler.is_enabled()
    else:
        assert scaler.state_dict()["scale" if name == "init_scale" else name] == value


def dynamo_argument_is_applied(name: str) -> None:
    values: dict[str, Any] = {"backend": "eager", "mode": "max-autotune", "options": {"a": True}}
    given = {"backend": "aot_eager", name: values.get(name, True)}
    plugin = TorchDynamoPlugin(**given)
    compiled: list[dict[str, Any]] = []
    unit: Any = SimpleNamespace(compile=lambda **kwargs: compiled.append(kwargs))
    accelerator = SimpleNamespace(state=SimpleNamespace(dynamo_plugin=plugin))
    compile_unit = _unit_compiler(accelerator)
    assert compile_unit is not None
    compile_unit(unit)
    (kwargs,) = compiled
    assert kwargs["backend"] == given["backend"]
    assert name == "use_regional_compilation" or kwargs[name] == given[name]


def timeout_is_applied(name: str) -> None:
    session().early_group = dist.group.WORLD
    Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=77))])
    assert timeout_of() == timedelta(seconds=77)


def other_backend_is_refused(name: str) -> None:
    other = InitProcessGroupKwargs(backend="mpi")
    assert raised(lambda: Accelerator(kwargs_handlers=[other])) == ["FSDP-E612"]
    assert raised(lambda: Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])) == []


def other_ddp_backend_is_refused(name: str) -> None:
    assert raised(lambda: arguments_of(Path("out"), ddp_backend="mpi")) == ["FSDP-E612"]
    assert raised(lambda: arguments_of(Path("out"), ddp_backend="gloo")) == []


def ddp_timeout_is_applied(name: str) -> None:
    session().early_group = dist.group.WORLD
    arguments_of(Path("out"), ddp_timeout=77)
    assert timeout_of() == timedelta(seconds=77)


def accelerator_argument_is_applied(name: str) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, forward_prefetch=True)
    given: dict[str, tuple[Any, str, Any]] = {
        "mixed_precision": ("bf16", "precision.param", "bf16"),
        "fsdp_plugin": (plugin, "prefetch.forward", True),
        "parallelism_config": (MESH, "mesh.shard", 4),
    }
    value, setting, expected = given[name]
    assert Accelerator(**{name: value}).state.fsdp_plugin.spec.get(setting) == expected


def dynamo_is_applied(name: str) -> None:
    plugin = TorchDynamoPlugin(backend="aot_eager")
    accelerator = Accelerator(**{name: "aot_eager" if name == "dynamo_backend" else plugin})
    assert accelerator.state.dynamo_plugin.backend.value == "AOT_EAGER"


def training_argument_is_applied(name: str) -> None:
    given: dict[str, tuple[dict[str, Any], str, Any]] = {
        "fsdp": ({"fsdp": "shard_grad_op"}, "sharding.strategy", "shard_grad_op"),
        "fsdp_config": ({"fsdp": True, "fsdp_config": {"version": 1}}, "fsdp.version", 1),
        "bf16": ({"fsdp": True, "bf16": True}, "precision.param", "bf16"),
        "fp16": ({"fsdp": True, "fp16": True}, "precision.param", "fp16"),
        "use_cpu": ({"fsdp": True, "use_cpu": True}, "launch.use_cpu", True),
        "gradient_checkpointing": ({"fsdp": True, name: True}, "activation.checkpointing", "full"),
        "activation_checkpointing": ({"fsdp": True, name: True}, "activation.checkpointing", "full"),
    }
    arguments, setting, expected = given[name]
    assert hfp.load_spec(training_arguments=arguments, environ={}).get(setting) == expected


def mesh_of_training_arguments_is_applied(name: str) -> None:
    arguments = arguments_of(Path("out"), parallelism_config=MESH)
    spec = session().spec_of_arguments(arguments)
    assert spec is not None and (spec.mesh.replicate, spec.mesh.shard) == (2, 4)


_SAVES, _ARGUMENTS = "test_checkpoint_save.py", "test_arguments.py"
# Class and arguments -> the test: a function, or the test with ranks that applies them.
APPLIED: dict[tuple[str, str], Callable[[str], None] | str] = {
    ("Accelerator", "fsdp_plugin mixed_precision parallelism_config"): accelerator_argument_is_applied,
    ("Accelerator", "dynamo_backend dynamo_plugin"): dynamo_is_applied,
    ("Accelerator", "kwargs_handlers"): timeout_is_applied,
    ("GradScalerKwargs", "init_scale growth_factor backoff_factor growth_interval enabled"): scaler_argument_is_applied,
    ("InitProcessGroupKwargs", "timeout"): timeout_is_applied,
    ("InitProcessGroupKwargs", "backend"): other_backend_is_refused,
    ("TorchDynamoPlugin", "backend mode fullgraph dynamic options disable use_regional_compilation"):
        dynamo_argument_is_applied,
    ("ParallelismConfig", "dp_replicate_size dp_shard_size"): mesh_is_applied,
    ("AORecipeKwargs", "config module_filter_func"): "test_fp8.py::test_recipe_of_a_script_selects_layers",
    ("AORecipeKwargs", "pad_inner_dim enable_fsdp_float8_all_gather"):
        "test_fp8.py::test_recipe_of_a_script_turns_fp8_on",
    ("ParallelismConfig", "cp_size tp_size"): "test_axes.py::test_axes_of_parallelism_config_are_applied",
    ("FullyShardedDataParallelPlugin", " ".join(OF_PLUGIN)): plugin_argument_is_applied,
    ("TrainingArguments", "fsdp fsdp_config bf16 fp16 use_cpu gradient_checkpointing activation_checkpointing"):
        training_argument_is_applied,
    ("TrainingArguments", "parallelism_config"): mesh_of_training_arguments_is_applied,
    ("TrainingArguments", "ddp_timeout"): ddp_timeout_is_applied,
    ("TrainingArguments", "ddp_backend"): other_ddp_backend_is_refused,
    ("TrainingArguments", "gradient_checkpointing_kwargs activation_checkpointing_kwargs"):
        "test_peft.py::test_gradient_checkpointing_of_frozen_layers",
    ("TrainingArguments", "torch_compile torch_compile_backend torch_compile_mode"):
        f"{_ARGUMENTS}::test_training_argument_is_applied",
    ("TrainingArguments", "max_grad_norm"): "test_distributed_config.py::test_trainer_equals_one_process",
    ("TrainingArguments", "save_only_model load_best_model_at_end save_total_limit"):
        f"{_SAVES}::test_save_only_model_with_load_best_model_at_end",
    ("TrainingArguments", "resume_from_checkpoint"): "test_trainer.py::test_resumed_training_equals_uninterrupted",
}  # fmt: skip
TESTS = {(owner, name): test for (owner, names), test in APPLIED.items() for name in names.split()}


def test_every_applied_argument_has_a_test() -> None:
    assert TESTS.keys() == {(row.owner, name) for row in ROWS if row.verdict == "applied" for name in row.names}


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(("row", "name"), pairs("applied", lambda row: True))
def test_argument_is_applied(row: DocumentedRow, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    test = TESTS[row.owner, name]
    if not isinstance(test, str):
        test(name)
        return
    file, _, function = test.partition("::")
    tree = ast.parse((GLOO / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.usefixtures("rank")
def test_timeout_of_a_started_group_is_a_warning(printed: Callable[[], list[str]]) -> None:
    Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=77))])
    assert printed() == ["FSDP-W614"]
    assert timeout_of() != timedelta(seconds=77)


@pytest.mark.usefixtures("rank")
def test_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_is_installed", lambda backend: True)
    monkeypatch.setattr(recipes, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    spec = hfp.load_spec({"distributed_type": "FSDP", "mixed_precision": "fp8"}, environ={})
    assert raised(lambda: recipes.handlers_of(spec, [])) == ["FSDP-E168"]
    assert recipes.handlers_of(hfp.load_spec({"distributed_type": "FSDP"}, environ={}), []) == []
