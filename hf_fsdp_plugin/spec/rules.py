"""Rules between settings: one function per rule, each from a spec to the problems that it finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.launch_rules import LAUNCH_RULES, Rule, about
from hf_fsdp_plugin.spec.model import FsdpSpec


def check_activation_offload(spec: FsdpSpec) -> Iterator[Problem]:
    if not spec.activation.offload:
        return
    if spec.activation.checkpointing == "none":
        message = "activation offload requires activation checkpointing, which is off."
        fix = "Set fsdp_activation_checkpointing: true, or remove fsdp_activation_checkpointing_offload."
        yield about(spec, "FSDP-E140", "activation.offload", message, fix)
    elif spec.activation.native:
        message = "gradient_checkpointing of Transformers cannot offload activations."
        fix = "Set fsdp_activation_checkpointing: true instead of gradient_checkpointing."
        yield about(spec, "FSDP-E141", "activation.offload", message, fix)


def check_size_threshold(spec: FsdpSpec) -> Iterator[Problem]:
    if spec.wrap.policy == "size" and spec.wrap.min_num_params <= 0:
        message = f"the size policy requires min_num_params above 0; it is {spec.wrap.min_num_params}."
        fix = "Set fsdp_min_num_params, for example to 1e8, or wrap by layer class: TRANSFORMER_BASED_WRAP."
        yield about(spec, "FSDP-E142", "wrap.policy", message, fix)


def check_unused_wrapping(spec: FsdpSpec) -> Iterator[Problem]:
    policy = spec.wrap.policy
    if policy != "transformer" and spec.wrap.classes:
        message = f"layer classes have no effect with the wrap policy {policy}."
        fix = "Set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, or remove the classes."
        yield about(spec, "FSDP-W143", "wrap.classes", message, fix)
    if policy != "size" and spec.wrap.min_num_params > 0:
        message = f"min_num_params has no effect with the wrap policy {policy}."
        fix = "Set fsdp_auto_wrap_policy: SIZE_BASED_WRAP, or remove min_num_params."
        yield about(spec, "FSDP-W143", "wrap.min_num_params", message, fix)


def check_class_names(spec: FsdpSpec) -> Iterator[Problem]:
    for name in spec.wrap.classes:
        if name.isidentifier():
            continue
        reason, fix = "is not a class name", "Write names such as LlamaDecoderLayer."
        if any(character.isspace() for character in name):
            reason, fix = "contains a space", f"Separate names with commas: {', '.join(name.split())}."
        elif all(part.isidentifier() for part in name.split(".")):
            reason, fix = "is a path, not a class name", f"Write the class alone: {name.rpartition('.')[2]}."
        yield about(spec, "FSDP-E144", "wrap.classes", f"'{name[:80]}' {reason}.", fix)


def check_ignored_modules(spec: FsdpSpec) -> Iterator[Problem]:
    try:
        re.compile(spec.wrap.ignored_modules)
    except (re.error, RecursionError, OverflowError) as reason:
        message = f"'{spec.wrap.ignored_modules[:80]}' is not a valid regular expression: {reason}."
        fix = "Write one that matches module names, such as .*\\.lora_.*; escape brackets."
        yield about(spec, "FSDP-E145", "wrap.ignored_modules", message, fix)


def check_half_precisions(spec: FsdpSpec) -> Iterator[Problem]:
    if {spec.launch.mixed_precision, spec.precision.param} == {"bf16", "fp16"}:
        message = f"{spec.origin('launch.mixed_precision')} conflicts with {spec.origin('precision.param')}."
        yield about(spec, "FSDP-E146", "precision.param", message, "Set only one of bf16 and fp16.")


def check_fp16_on_cpu(spec: FsdpSpec) -> Iterator[Problem]:
    if spec.launch.use_cpu and "fp16" in (spec.launch.mixed_precision, spec.precision.param):
        name = "precision.param" if spec.precision.param == "fp16" else "launch.mixed_precision"
        message = "fp16 training is not supported on CPU ranks: its gradient scaler requires an accelerator."
        yield about(spec, "FSDP-E147", name, message, "Set mixed_precision to bf16 or no.")


def check_fsdp2_support(spec: FsdpSpec) -> Iterator[Problem]:
    """Settings of FSDP1 without a counterpart in FSDP2."""
    if spec.fsdp.version != 2:
        return
    fix = "Remove the key, or set fsdp_version: 1."
    if not spec.prefetch.limit_all_gathers:
        reason = "FSDP2 frees memory in stream order and limits all-gathers without a switch."
        yield about(spec, "FSDP-W148", "prefetch.limit_all_gathers", f"false is not supported by FSDP2. {reason}", fix)
    if not spec.params.use_orig:
        reason = "FSDP2 has no flat parameters: they always keep their names and shapes."
        yield about(spec, "FSDP-W148", "params.use_orig", f"false is not supported by FSDP2. {reason}", fix)


def check_ram_efficient_loading(spec: FsdpSpec) -> Iterator[Problem]:
    if spec.loading.ram_efficient and not spec.loading.sync_module_states:
        message = (
            f"{spec.origin('loading.ram_efficient')} loads the weights on rank 0 only, and "
            f"{spec.origin('loading.sync_module_states')} prevents their broadcast to the other ranks."
        )
        fix = "Set fsdp_sync_module_states: true, or remove fsdp_cpu_ram_efficient_loading."
        yield about(spec, "FSDP-E149", "loading.sync_module_states", message, fix)


RULES: Final[tuple[Rule, ...]] = (
    *LAUNCH_RULES,
    check_activation_offload,
    check_size_threshold,
    check_unused_wrapping,
    check_class_names,
    check_ignored_modules,
    check_half_precisions,
    check_fp16_on_cpu,
    check_fsdp2_support,
    check_ram_efficient_loading,
)


def check_rules(spec: FsdpSpec) -> tuple[Problem, ...]:
    """Return all problems that the rules find, in the order of the rules."""
    return tuple(problem for rule in RULES for problem in rule(spec))
