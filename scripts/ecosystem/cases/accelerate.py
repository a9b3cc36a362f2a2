"""The test scripts that Accelerate installs, and the examples of its repository (`--accelerate-examples`)."""

from __future__ import annotations

from typing import Any

from scripts.ecosystem.model import OWN_CHECKS, TWO_PROCESSES, Case

_METRIC = ("evaluate", "sklearn")
# Models without layer classes.
_FLAT = {"settings": {"fsdp_auto_wrap_policy": "NO_WRAP"}}


def _test(script: str, arguments: str = "", **more: Any) -> Case:
    default: dict[str, Any] = {"compared": OWN_CHECKS}
    return Case(
        name=f"accelerate {script.rpartition('.')[2]}",
        package="accelerate",
        script=f"-m accelerate.test_utils.scripts.{script}",
        arguments=arguments,
        **{**default, **more},
    )


def _example(script: str, arguments: str = "", **more: Any) -> Case:
    default: dict[str, Any] = {"compared": TWO_PROCESSES, "needs": _METRIC}
    return Case(
        name=f"accelerate examples {script}",
        package="accelerate",
        script=f"{{accelerate}}/{script}.py",
        arguments=arguments,
        **{**default, **more},
    )


# Not here: test_sync, test_script and test_distributed_data_loop test DistributedDataParallel (gradients of one rank,
# autocast without casting the inputs, joining uneven inputs), test_peak_memory_usage needs a GPU, the others DeepSpeed,
# pipelines or notebooks. test_merge_weights makes a plugin of FSDP1.
TESTS = [
    _test("test_cli", sharded=False),
    _test("test_ops", sharded=False),
    _test("test_merge_weights", **_FLAT, versions=(1,)),
    _test("external_deps.test_metrics", needs=_METRIC, **_FLAT),
    _test("external_deps.test_performance", "--output_dir . --num_epochs 3", needs=_METRIC),
    _test("external_deps.test_checkpointing", "--output_dir . --num_epochs 1", needs=_METRIC),
]

# Accelerate's LocalSGD and communication hooks of DistributedDataParallel do not support FSDP. The examples take the
# batch size of a process from their source, so they are compared with two unsharded processes. Not here:
# fsdp_with_peak_mem_tracking, whose meter fails on the CPU, and gradient_accumulation_for_autoregressive_models, which
# prints no losses.
EXAMPLES = [
    _example("nlp_example"),
    _example("complete_nlp_example", "--output_dir out --checkpointing_steps epoch"),
    _example("by_feature/automatic_gradient_accumulation"),
    _example("by_feature/checkpointing", "--output_dir out --checkpointing_steps epoch"),
    # It frees its models before the end, so the plugin prints that there is no report.
    _example("by_feature/cross_validation", "--num_folds 2", sharded=False),
    _example("by_feature/early_stopping"),
    _example("by_feature/gradient_accumulation", "--gradient_accumulation_steps 2"),
    _example("by_feature/memory"),
    _example("by_feature/multi_process_metrics"),
    _example("by_feature/profiler"),
    _example("by_feature/schedule_free", needs=(*_METRIC, "schedulefree")),
    _example("by_feature/tracking"),
]
