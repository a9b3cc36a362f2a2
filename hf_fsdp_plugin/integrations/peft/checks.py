"""Checks of a model with adapters, and of a wrap policy that a script assigned, before the model is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError

_READS_MATRICES: Final = ("ADALORA",)
"""Kinds of adapters that compute with whole parameters and gradients outside of the forward of a layer."""
_OWN_MODULES: Final = ("peft.", "hf_fsdp_plugin.")
"""Modules whose wrap policies choose the same units as a plan."""


def check_adapters(model: nn.Module) -> None:
    """Raise ``SpecError`` for adapters that would train with one rank's shards as if they were whole matrices."""
    configs = getattr(unwrapped(model), "peft_config", None)
    found = [
        f"{name!r} ({kind})"
        for name, config in (configs.items() if isinstance(configs, dict) else ())
        if (kind := str(getattr(config.peft_type, "value", config.peft_type))) in _READS_MATRICES
    ]
    if found:
        message = (
            f"the adapter {', '.join(found)} is not supported with FSDP: AdaLoRA computes its regularization and the "
            "importance of ranks from whole matrices and gradients, and each rank has only parts of them."
        )
        raise SpecError([Problem(code="FSDP-E630", message=message, fix="Use LoRA, or train without FSDP.")])


def check_assigned_policy(plugin: Any) -> None:
    """Raise ``SpecError`` for an ``auto_wrap_policy`` that a script assigned to the plugin, unless it is PEFT's.

    PEFT's ``fsdp_auto_wrap_policy`` wraps the model's layers and the trainable modules in them. The plan does the same
    where FSDP1 requires it. The Trainer assigns this policy for every PEFT model.
    """
    policy = getattr(plugin, "auto_wrap_policy", None)
    if policy is None or any(name.startswith(_OWN_MODULES) for name in _modules_of(policy)):
        return
    message = (
        f"auto_wrap_policy was set to {_name(policy)} after the Accelerator was created. The plan chooses the units "
        "from the settings, so it would have no effect."
    )
    fix = (
        "Set fsdp_auto_wrap_policy and fsdp_transformer_layer_cls_to_wrap in the config, or pass one of torch's "
        "policies to FullyShardedDataParallelPlugin(auto_wrap_policy=...)."
    )
    raise SpecError([Problem(code="FSDP-E632", setting="wrap.policy", message=message, fix=fix)])


def _modules_of(policy: Any) -> Iterator[str]:
    """Yield the modules in which the functions of a policy are defined: of partials, and of policies joined by "or"."""
    keywords = getattr(policy, "keywords", {})
    for inner in (keywords.get("lambda_fn"), *keywords.get("policies", ())):
        if inner is not None:
            yield from _modules_of(inner)
    yield getattr(getattr(policy, "func", policy), "__module__", "") or ""


def _name(policy: Any) -> str:
    return str(getattr(getattr(policy, "func", policy), "__name__", type(policy).__name__))
